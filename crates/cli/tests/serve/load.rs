//! Clients under load, whose daemon is replaced again and again.
use crate::daemon::patience;
use crate::driver::{Driver, Random, Wish};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Bytes of a disk.
pub(crate) const SIZE: usize = 1 << 20;

/// The disks of [`under_load`], each with two queues.
pub(crate) const DISKS: [&str; 4] = ["a", "b", "c", "d"];

pub(crate) fn wish(packed: bool, event_idx: bool, queues: usize) -> Wish {
    Wish { packed, event_idx, queues, depth: 8 }
}

/// Ends the clients, also if the test fails.
pub(crate) struct EndClients<'a>(pub(crate) &'a AtomicBool);

impl Drop for EndClients<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Runs one client for each disk, and calls `replace` with 1 to `times`, which replaces the daemon.
///
/// All clients go on after each. Returns the disks with what was written to them. `report` says what
/// the daemon knows, if a client does not go on.
pub(crate) fn under_load(
    socket: impl Fn(&str) -> PathBuf,
    times: usize,
    replace: impl FnMut(usize),
    report: impl Fn() -> String,
) -> Vec<(&'static str, Vec<u8>)> {
    under_load_from(&vec![0; SIZE], socket, times, replace, report)
}

/// As [`under_load`], with disks that begin with `content`.
pub(crate) fn under_load_from(
    content: &[u8],
    socket: impl Fn(&str) -> PathBuf,
    times: usize,
    mut replace: impl FnMut(usize),
    report: impl Fn() -> String,
) -> Vec<(&'static str, Vec<u8>)> {
    let start = Instant::now();
    let wishes = [wish(false, true, 2), wish(true, true, 2), wish(false, false, 1), wish(true, false, 1)];
    let done = AtomicBool::new(false);
    let rounds: [AtomicUsize; 4] = Default::default();
    std::thread::scope(|scope| {
        let (done, rounds) = (&done, &rounds);
        let threads: Vec<_> = DISKS
            .into_iter()
            .zip(wishes)
            .zip(rounds)
            .map(|((name, wish), rounds)| {
                let mut driver = Driver::connect(&socket(name), wish).unwrap();
                driver.be_patient();
                scope.spawn(move || {
                    let (mut model, mut random) = (content.to_vec(), Random::new(7));
                    while !done.load(Ordering::Relaxed) {
                        driver.exercise(&mut model, 50, &mut random);
                        rounds.fetch_add(1, Ordering::Relaxed);
                    }
                    drop(driver);
                    (name, model)
                })
            })
            .collect();
        let end = EndClients(done);
        for number in 1..=times {
            let before: Vec<_> = rounds.iter().map(|rounds| rounds.load(Ordering::Relaxed)).collect();
            replace(number);
            // All of them go on.
            let end = Instant::now() + patience();
            while rounds.iter().zip(&before).any(|(now, before)| now.load(Ordering::Relaxed) < before + 2) {
                assert!(Instant::now() < end, "after {number}: {}", report());
                assert!(!threads.iter().any(|thread| thread.is_finished()), "a client has failed");
                std::thread::sleep(Duration::from_millis(2));
            }
        }
        drop(end);
        let done: usize = rounds.iter().map(|rounds| rounds.load(Ordering::Relaxed)).sum();
        let seconds = start.elapsed().as_secs();
        eprintln!("{times} daemons replaced under {done} rounds of requests in {seconds} s");
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}
