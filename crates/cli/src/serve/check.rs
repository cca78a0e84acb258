//! What can be checked before a daemon changes anything.
use super::args::DaemonArgs;
use super::sandbox::user::Target;
use super::spec::DeviceSpec;
use super::{limits, shelf, threads};
use crate::kinds::checked::directory_of;
use anyhow::{Context, anyhow};
use std::path::Path;

/// Checks users, files and limits. Changes nothing.
///
/// # Errors
/// One of them is invalid.
pub(crate) fn check(daemon: &DaemonArgs, devices: &[DeviceSpec]) -> Result<(), anyhow::Error> {
    check_daemon(daemon, devices)?;
    devices.iter().try_for_each(check_device)
}

/// Checks what concerns all devices.
///
/// # Errors
/// A user, file or limit is invalid.
pub(super) fn check_daemon(daemon: &DaemonArgs, devices: &[DeviceSpec]) -> Result<(), anyhow::Error> {
    if let Some(user) = &daemon.user {
        Target::find(user)?;
    }
    limits::mapping(daemon)?;
    threads::count(daemon)?;
    if let Some(control) = &daemon.control {
        check_length(control).context("--control")?;
    }
    match &daemon.cache {
        Some(cache) if !cache.is_dir() => {
            return Err(anyhow!("no directory {} for --cache", cache.display()));
        }
        None if daemon.cache_size.is_some() => return Err(anyhow!("--cache-size needs --cache")),
        _ => {}
    }
    if daemon.holder.is_some() {
        devices.iter().try_for_each(|device| shelf::check_name(&device.name))?;
    }
    Ok(())
}

/// Checks the files of a device.
fn check_device(device: &DeviceSpec) -> Result<(), anyhow::Error> {
    let named = || format!("device {}", device.name);
    for image in device.images() {
        let file =
            std::fs::metadata(image).with_context(|| image.display().to_string()).with_context(named)?;
        if file.is_dir() {
            return Err(anyhow!("image {} is a directory", image.display())).with_context(named);
        }
    }
    if let Some(socket) = device.socket() {
        check_length(socket).with_context(named)?;
        let directory = directory_of(socket);
        if !directory.is_dir() {
            return Err(anyhow!("no directory {} for the socket", directory.display())).with_context(named);
        }
    }
    Ok(())
}

/// Checks that a path fits the address of a UNIX socket.
///
/// # Errors
/// It is too long.
pub(super) fn check_length(socket: &Path) -> Result<(), anyhow::Error> {
    /// `sun_path` with a final zero.
    const MOST: usize = 107;
    let len = socket.as_os_str().len();
    if len > MOST {
        return Err(anyhow!(
            "socket path of {len} bytes is too long: the kernel takes at most {MOST}; use a shorter one: {}",
            socket.display()
        ));
    }
    Ok(())
}
