//! The mark of an image that has become a backing file while it was served.
//!
//! A raw image says nothing of its overlays. To write to it again loses what lies in them, and makes
//! them inconsistent. So the image is marked, before the first write to the overlay, by an extended
//! attribute with the overlay's path. It is not opened for writing while it has the mark. File
//! systems without such attributes, and block devices, have no mark.
use std::ffi::{CStr, OsStr};
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// The attribute, which holds the path of the overlay.
pub const OVERLAY_MARK: &str = "user.paravane.overlay";
const NAME: &CStr = c"user.paravane.overlay";
/// Longest path that is read.
const LONGEST: usize = 4096;

/// Marks an image.
///
/// `false`: the file system has no attributes.
pub(super) fn set(file: &File, overlay: &Path) -> io::Result<bool> {
    use rustix::io::Errno;
    let flags = rustix::fs::XattrFlags::empty();
    match rustix::fs::fsetxattr(file, NAME, overlay.as_os_str().as_bytes(), flags) {
        Ok(()) => Ok(true),
        // EPERM: a block device.
        Err(Errno::NOTSUP | Errno::NOSYS | Errno::PERM) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Whether an image can be marked, and so has a mark if a snapshot has frozen it.
pub(super) fn is_possible(file: &File) -> bool {
    use rustix::io::Errno;
    let is_file = file.metadata().is_ok_and(|metadata| metadata.is_file());
    let found = rustix::fs::fgetxattr(file, NAME, &mut [0; 0][..]);
    is_file && !matches!(found, Err(Errno::NOTSUP | Errno::NOSYS | Errno::PERM))
}

/// Removes the [mark](OVERLAY_MARK) of an image that is no backing file any more.
///
/// For instance when the overlay has been committed to it. An image without a mark stays as it is.
pub fn clear_overlay_mark(file: &File) {
    // Without one there is nothing to do.
    let _ = rustix::fs::fremovexattr(file, NAME);
}

/// The overlay that an image is marked with.
///
/// An attribute that cannot be read is none.
pub(super) fn overlay(file: &File) -> Option<PathBuf> {
    let mut path = vec![0; LONGEST];
    let len = match rustix::fs::fgetxattr(file, NAME, &mut path[..]) {
        Ok(len) => len,
        // Longer: it is marked all the same.
        Err(rustix::io::Errno::RANGE) => 0,
        Err(_) => return None,
    };
    Some(OsStr::from_bytes(&path[..len]).into())
}
