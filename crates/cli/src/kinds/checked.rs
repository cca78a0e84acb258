//! Checks of options that several kinds share.
use paravane_store::Location;
use std::path::{Path, PathBuf};

/// An option without dashes, and why it is invalid.
pub(crate) type OptionError = (&'static str, String);

/// Maximum number of queues.
///
/// A vhost-user message names a queue by one byte (section "Vring state").
pub(crate) const MAX_QUEUES: u16 = 256;
/// Default queue size: QEMU's maximum.
///
/// A request without an indirect table takes three descriptors or more.
pub(crate) const QUEUE_SIZE: u16 = 1024;

/// A number from 1 to `most`.
///
/// # Errors
/// It is out of range.
pub(crate) fn within(option: &'static str, number: u16, most: u16) -> Result<u16, OptionError> {
    match number {
        n if (1..=most).contains(&n) => Ok(n),
        n => Err((option, format!("{n} is out of range: use 1 to {most}"))),
    }
}

/// A queue size.
///
/// # Errors
/// It is no power of two, or out of range.
pub(crate) fn queue_size(size: u16, least: u16) -> Result<u16, OptionError> {
    match size {
        size if size.is_power_of_two() && (least..=32768).contains(&size) => Ok(size),
        size => Err(("queue-size", format!("{size} is invalid: use a power of two from {least} to 32768"))),
    }
}

/// The location; of a file by its canonical path.
pub(crate) fn real_location(location: &Location) -> Location {
    location.path().map_or_else(|| location.clone(), |path| real_path(path).into())
}

/// Folder of a file.
pub(crate) fn directory_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// The canonical path; of a missing file, that of its directory and its name.
pub(crate) fn real_path(path: &Path) -> PathBuf {
    let by_directory = || Some(directory_of(path).canonicalize().ok()?.join(path.file_name()?));
    path.canonicalize().ok().or_else(by_directory).unwrap_or_else(|| path.to_owned())
}
