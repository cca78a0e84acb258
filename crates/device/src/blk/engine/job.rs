//! What engines take and return.
use paravane_dma::HostSlice;
use std::ptr::NonNull;

/// The pieces of memory of one transfer.
///
/// Not borrowed: [`Engine::push`](super::Engine::push) has the contract.
#[derive(Clone, Copy, Debug)]
pub(in crate::blk) struct Pieces {
    pub(in crate::blk) first: NonNull<HostSlice>,
    pub(in crate::blk) count: u32,
}

// SAFETY: plain data; dereferencing it relies on the contract of `Engine::push`, in any thread.
unsafe impl Send for Pieces {}

impl Pieces {
    /// As an iovec array: HostSlice has the layout of `struct iovec`.
    pub(super) fn iovecs(self) -> *const libc::iovec {
        self.first.as_ptr().cast_const().cast()
    }

    /// The list.
    ///
    /// # Safety
    /// It is valid for as long as the result is used.
    pub(in crate::blk) unsafe fn slices(&self) -> &[HostSlice] {
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts(self.first.as_ptr(), self.count as usize) }
    }

    /// The piece, if there is one whose length fits an io_uring entry.
    ///
    /// Cheaper than a list, also for system calls.
    pub(super) fn single(self) -> Option<(*mut u8, u32)> {
        if self.count != 1 {
            return None;
        }
        // SAFETY: the list is valid while the job is (Engine::push), and it has one entry.
        let piece = unsafe { self.first.read() };
        Some((piece.ptr, u32::try_from(piece.len).ok()?))
    }
}

/// One system call on the image. Offsets and lengths are in bytes.
#[derive(Clone, Copy, Debug)]
pub(in crate::blk) enum Job {
    /// preadv(2).
    Read { pieces: Pieces, offset: u64 },
    /// pwritev2(2), with RWF_DSYNC if `durable`.
    Write { pieces: Pieces, offset: u64, durable: bool },
    /// fdatasync(2).
    Sync,
    /// fallocate(2). After a `discard` the content is undefined.
    Allocate { mode: i32, offset: u64, len: u64, discard: bool },
}

/// Result of a job.
///
/// Made by engines only, once for each job, when nothing accesses its memory any more.
#[derive(Debug)]
pub(in crate::blk) struct Outcome {
    pub(super) head: u16,
    pub(super) result: i32,
}

impl Outcome {
    /// Descriptor head that the job was pushed with.
    pub(in crate::blk) fn head(&self) -> u16 {
        self.head
    }

    /// The system call's result, or a negative error number.
    pub(in crate::blk) fn result(&self) -> i32 {
        self.result
    }
}
