//! Is told by librbd that an image has changed, and has a thread look.
//!
//! librbd forbids its callback to wait, and asking for the size may.
use super::connection::check;
use super::image::RbdImage;
use super::library::Library;
use std::ffi::c_void;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;

/// A watch on an image, which sends each change.
///
/// Dropped before the image is closed.
#[derive(Debug)]
pub(super) struct SizeWatch {
    library: &'static Library,
    image: super::library::ImageHandle,
    handle: u64,
    changes: Arc<SyncSender<()>>,
}

// SAFETY: an image may be used by any thread.
unsafe impl Send for SizeWatch {}
// SAFETY: nothing is done by reference.
unsafe impl Sync for SizeWatch {}

impl SizeWatch {
    pub(super) fn new(image: &RbdImage, changes: Arc<SyncSender<()>>) -> io::Result<Self> {
        let mut watch = Self { library: image.library(), image: image.handle, handle: 0, changes };
        let changes = Arc::as_ptr(&watch.changes).cast_mut().cast();
        // SAFETY: the image is open. `changes` lives until `drop` has ended the watch.
        let watching =
            unsafe { (watch.library.rbd_update_watch)(watch.image, &mut watch.handle, changed, changes) };
        match check(watching) {
            Ok(()) => Ok(watch),
            Err(error) => {
                // There is nothing to end.
                std::mem::forget(watch);
                Err(error)
            }
        }
    }
}

impl Drop for SizeWatch {
    fn drop(&mut self) {
        // SAFETY: the image is open: it is closed after this. librbd waits for a callback that runs.
        let ended = check(unsafe { (self.library.rbd_update_unwatch)(self.image, self.handle) });
        if ended.is_err() {
            // A callback may still come.
            std::mem::forget(Arc::clone(&self.changes));
        }
        // Its thread finds that the session is gone.
        let _ = self.changes.try_send(());
    }
}

/// Called by a thread of librbd when the image has changed. Nothing in it panics or waits.
unsafe extern "C" fn changed(changes: *mut c_void) {
    // SAFETY: the sender of a `SizeWatch`, which keeps it until its watch has ended.
    let changes = unsafe { &*changes.cast::<SyncSender<()>>() };
    // A change that waits already covers this one.
    let _ = changes.try_send(());
}
