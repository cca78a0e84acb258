//! Is told by librbd that an image has changed, and has a thread look.
//!
//! librbd forbids its callback to wait, and asking for the size may.
use super::connection::check;
use super::image::RbdImage;
use super::library::Library;
use crate::lock::lock;
use std::ffi::c_void;
use std::io;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;

/// Wakes a thread.
#[derive(Debug, Default)]
pub(super) struct Bell {
    state: Mutex<WatchState>,
    rung: Condvar,
}

#[derive(Debug, Default)]
struct WatchState {
    rung: bool,
    end: bool,
}

impl Bell {
    fn set(&self, change: impl FnOnce(&mut WatchState)) {
        change(&mut lock(&self.state));
        self.rung.notify_one();
    }

    /// Runs `work` on a thread of its own each time that it rings, until [`SizeWatch`] ends.
    ///
    /// # Errors
    /// The host refuses a thread.
    pub(super) fn on_ring(self: Arc<Self>, work: impl Fn() + Send + 'static) -> io::Result<()> {
        let run = move || {
            loop {
                let state = lock(&self.state);
                let quiet = |state: &mut WatchState| !state.rung && !state.end;
                let mut state = self.rung.wait_while(state, quiet).unwrap_or_else(PoisonError::into_inner);
                if state.end {
                    return;
                }
                state.rung = false;
                drop(state);
                work();
            }
        };
        thread::Builder::new().name("rbd-size".into()).spawn(run).map(drop)
    }
}

/// A watch on an image, which rings at each change.
///
/// Dropped before the image is closed.
#[derive(Debug)]
pub(super) struct SizeWatch {
    library: &'static Library,
    image: super::library::ImageHandle,
    handle: u64,
    bell: Arc<Bell>,
}

// SAFETY: an image may be used by any thread.
unsafe impl Send for SizeWatch {}
// SAFETY: nothing is done by reference.
unsafe impl Sync for SizeWatch {}

impl SizeWatch {
    pub(super) fn new(image: &RbdImage, bell: Arc<Bell>) -> io::Result<Self> {
        let mut watch = Self { library: image.library(), image: image.handle(), handle: 0, bell };
        let bell = Arc::as_ptr(&watch.bell).cast_mut().cast();
        // SAFETY: the image is open. `bell` lives until `drop` has ended the watch.
        let watching =
            unsafe { (watch.library.rbd_update_watch)(watch.image, &mut watch.handle, changed, bell) };
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
            std::mem::forget(Arc::clone(&self.bell));
        }
        self.bell.set(|state| state.end = true);
    }
}

/// Called by a thread of librbd when the image has changed. Nothing in it panics or waits.
unsafe extern "C" fn changed(bell: *mut c_void) {
    // SAFETY: the bell of a `SizeWatch`, which keeps it until its watch has ended.
    let bell = unsafe { &*bell.cast::<Bell>() };
    bell.set(|state| state.rung = true);
}
