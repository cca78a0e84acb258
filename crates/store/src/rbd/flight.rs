//! One request in librbd, and the buffer that it reads into or writes from.
//!
//! librbd never gets guest memory. Some of its threads block all signals, so that a fault in memory
//! whose owner has truncated the file would kill the process (see `paravane_dma`); it has no way to
//! take a request back, so that a queue could not end while an OSD is down; and a guest that
//! changes data while it is sent would break its checksum. So a request owns a buffer, which the
//! thread of the queue fills and empties.
//!
//! ```text
//!   queue --start--> librbd --(a thread of librbd)--> ended --> Ended, or dropped if abandoned
//! ```
use super::ended::EndedRequests;
use super::image::RbdImage;
use super::library::{Completion, Library};
use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

/// `RBD_WRITE_ZEROES_FLAG_THICK_PROVISION`: zeroes take space.
const THICK_PROVISION: libc::c_int = 1;

/// What librbd is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RbdRequest {
    /// Reads `len` bytes into the buffer.
    Read {
        offset: u64,
        len: usize,
    },
    /// Writes the first `len` bytes of the buffer.
    Write {
        offset: u64,
        len: usize,
    },
    Flush,
    Discard {
        offset: u64,
        len: u64,
    },
    Zeroes {
        offset: u64,
        len: u64,
        unmap: bool,
    },
}

/// A request, before, in, and after librbd.
#[derive(Debug)]
pub(super) struct Flight(pub(super) Box<Parts>);

/// What a request consists of. It stays in place while librbd has it.
#[derive(Debug)]
pub(super) struct Parts {
    /// Slot of the queue.
    pub(super) slot: usize,
    /// As long as the longest request that it has carried.
    pub(super) buffer: Vec<u8>,
    /// What librbd returned: bytes read, 0, or a negative error number.
    pub(super) result: i32,
    library: &'static Library,
    /// Where it goes. In librbd only.
    ended: Option<Arc<EndedRequests<Flight>>>,
}

impl Flight {
    pub(super) fn new(library: &'static Library) -> Self {
        Self(Box::new(Parts { slot: 0, buffer: Vec::new(), result: 0, library, ended: None }))
    }

    /// Makes the buffer at least `len` bytes long.
    pub(super) fn make_room(&mut self, len: usize) {
        if self.0.buffer.len() < len {
            self.0.buffer.resize(len, 0);
        }
    }

    /// Hands the request to librbd. It comes back through `ended`.
    ///
    /// # Errors
    /// librbd does not take it: the flight is back, with the error as its result.
    pub(super) fn start(
        mut self,
        image: &RbdImage,
        ended: &Arc<EndedRequests<Self>>,
        request: RbdRequest,
    ) -> Result<(), Self> {
        let library = self.0.library;
        if let RbdRequest::Read { len, .. } | RbdRequest::Write { len, .. } = request {
            assert!(len <= self.0.buffer.len(), "a request exceeds its buffer");
        }
        self.0.ended = Some(Arc::clone(ended));
        let handle = image.handle;
        let flight = Box::into_raw(self.0);
        let mut completion = ptr::null_mut();
        // SAFETY: librbd writes the handle of the completion, and hands the pointer to the callback,
        // which owns the flight then.
        let made =
            unsafe { (library.rbd_aio_create_completion)(flight.cast(), ended_in_librbd, &mut completion) };
        if made < 0 {
            // SAFETY: nobody else has it.
            return Err(unsafe { Self::refused(flight, made) });
        }
        // SAFETY: `flight` is ours until a request is made.
        let buffer = unsafe { (*flight).buffer.as_mut_ptr() };
        // SAFETY: image and completion are valid. The buffer has `len` bytes and is not touched
        // before the callback owns the flight. `image` outlives the request: closing it waits for
        // requests in flight.
        let started = unsafe {
            match request {
                RbdRequest::Read { offset, len } => {
                    (library.rbd_aio_read)(handle, offset, len, buffer.cast(), completion)
                }
                RbdRequest::Write { offset, len } => {
                    (library.rbd_aio_write)(handle, offset, len, buffer.cast(), completion)
                }
                RbdRequest::Flush => (library.rbd_aio_flush)(handle, completion),
                RbdRequest::Discard { offset, len } => {
                    (library.rbd_aio_discard)(handle, offset, len, completion)
                }
                RbdRequest::Zeroes { offset, len, unmap } => {
                    let flags = if unmap { 0 } else { THICK_PROVISION };
                    // All of our targets have 64 bits.
                    (library.rbd_aio_write_zeroes)(handle, offset, len as usize, completion, flags, 0)
                }
            }
        };
        if started < 0 {
            // SAFETY: a request that was not made does not call back: completion and flight are ours.
            return Err(unsafe {
                (library.rbd_aio_release)(completion);
                Self::refused(flight, started)
            });
        }
        Ok(())
    }

    /// A flight that librbd did not take.
    ///
    /// # Safety
    /// `parts` is from `Box::into_raw`, and nobody else has it.
    unsafe fn refused(parts: *mut Parts, result: i32) -> Self {
        // SAFETY: the caller promises what is asked for.
        let mut parts = unsafe { Box::from_raw(parts) };
        (parts.ended, parts.result) = (None, result);
        Self(parts)
    }
}

/// Called by a thread of librbd when a request has ended. Nothing in it panics or allocates.
unsafe extern "C" fn ended_in_librbd(completion: Completion, flight: *mut c_void) {
    // SAFETY: `start` gave the flight away, and this is called once.
    let mut flight = Flight(unsafe { Box::from_raw(flight.cast()) });
    let library = flight.0.library;
    // SAFETY: the completion of this request, which has ended; released once.
    let result = unsafe {
        let result = (library.rbd_aio_get_return_value)(completion);
        (library.rbd_aio_release)(completion);
        result
    };
    flight.0.result = i32::try_from(result).unwrap_or(-libc::EIO);
    if let Some(ended) = flight.0.ended.take() {
        ended.posted.put(flight);
    }
}
