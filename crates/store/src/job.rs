//! What stores take and return.
use paravane_dma::HostSlice;
use std::ptr::NonNull;

/// The pieces of memory of one transfer.
///
/// Not borrowed: [`StoreQueue::push`](crate::StoreQueue::push) has the contract.
#[derive(Clone, Copy, Debug)]
pub struct Pieces {
    /// The first one of an array.
    pub first: NonNull<HostSlice>,
    /// Number of pieces.
    pub count: u32,
}

// SAFETY: plain data; dereferencing it relies on the contract of `StoreQueue::push`, in any thread.
unsafe impl Send for Pieces {}

impl Pieces {
    /// As an iovec array: [`HostSlice`] has the layout of `struct iovec`.
    #[must_use]
    pub fn iovecs(self) -> *const libc::iovec {
        self.first.as_ptr().cast_const().cast()
    }

    /// The list.
    ///
    /// # Safety
    /// It is valid for as long as the result is used.
    #[must_use]
    pub unsafe fn slices(&self) -> &[HostSlice] {
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts(self.first.as_ptr(), self.count as usize) }
    }

    /// Bytes of all pieces.
    ///
    /// # Safety
    /// The list is valid.
    #[must_use]
    pub unsafe fn bytes(&self) -> u64 {
        // SAFETY: the caller's promise.
        crate::pieces::total(unsafe { self.slices() })
    }

    /// The piece, if there is one whose length fits an io_uring entry.
    ///
    /// Cheaper than a list, also for system calls.
    ///
    /// # Safety
    /// The list is valid.
    #[must_use]
    pub unsafe fn single(self) -> Option<(*mut u8, u32)> {
        if self.count != 1 {
            return None;
        }
        // SAFETY: the caller's promise; the list has one entry.
        let piece = unsafe { self.first.read() };
        Some((piece.ptr, u32::try_from(piece.len).ok()?))
    }
}

/// One operation on the bytes of a store. Offsets and lengths are in bytes.
#[derive(Clone, Copy, Debug)]
pub enum Job {
    /// Reads into the pieces.
    Read {
        /// Memory to fill.
        pieces: Pieces,
        /// Where in the store.
        offset: u64,
    },
    /// Writes from the pieces.
    Write {
        /// Memory to take the data from.
        pieces: Pieces,
        /// Where in the store.
        offset: u64,
        /// The write is durable when it is done.
        durable: bool,
    },
    /// Makes all writes durable that were done before.
    Flush,
    /// Frees a range, whose content is undefined afterwards. A hint.
    Discard {
        /// Where in the store.
        offset: u64,
        /// Length of the range.
        len: u64,
    },
    /// Makes a range read as zeroes.
    Zeroes {
        /// Where in the store.
        offset: u64,
        /// Length of the range.
        len: u64,
        /// The range is freed where the store can.
        unmap: bool,
    },
}

/// Result of a job.
///
/// Made once for each job, when nothing accesses its memory any more.
#[derive(Debug)]
pub struct Outcome {
    head: u16,
    result: i32,
}

impl Outcome {
    /// The outcome of the job that was pushed with `head`.
    ///
    /// `result` is the number of bytes moved, 0 for other operations, or a negative error number.
    ///
    /// # Safety
    /// The job has ended: its store accesses its memory no more. No other outcome was made of it.
    #[must_use]
    pub unsafe fn new(head: u16, result: i32) -> Self {
        Self { head, result }
    }

    /// The number that the job was pushed with: the head of a descriptor chain.
    #[must_use]
    pub fn head(&self) -> u16 {
        self.head
    }

    /// Bytes moved, 0 for other operations, or a negative error number.
    ///
    /// A transfer may be short. EOPNOTSUPP: the store cannot discard or zero.
    #[must_use]
    pub fn result(&self) -> i32 {
        self.result
    }
}
