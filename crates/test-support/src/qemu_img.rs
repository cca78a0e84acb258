//! `qemu-img` on hosts where images stay locked for a moment.
use crate::patience;
use std::process::{Command, Output};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Words of errors that pass.
///
/// The second one: it measures how long a key takes to derive, and gives up on a busy host.
const PASSING: [&str; 2] = ["Failed to lock byte", "Unable to get accurate CPU usage"];

/// Runs `qemu-img`, again while the image is locked.
///
/// A child that another test has forked keeps our descriptors, with their locks, until it executes
/// its program; the kernel keeps the lock of a process that was killed until it has released its rings.
///
/// # Panics
/// It cannot be started.
#[must_use]
pub fn qemu_img(arguments: &[&str]) -> Output {
    let start = Instant::now();
    loop {
        let output = Command::new("qemu-img").args(arguments).output().expect("qemu-img starts");
        let stderr = String::from_utf8_lossy(&output.stderr);
        let passes = PASSING.iter().any(|words| stderr.contains(words));
        if output.status.success() || !passes || start.elapsed() > patience() {
            return output;
        }
        sleep(Duration::from_millis(10));
    }
}
