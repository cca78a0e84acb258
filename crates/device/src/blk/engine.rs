//! Who does the host I/O. An engine takes jobs and gives back results; it knows nothing of requests.
//!
//! ```text
//!   push(head, job)*  ->  submit  ->  ... kernel ...  ->  reap: (head, result)*
//!   quiet() at the start of a serve, listen() before the owner sleeps: in between completions wake nobody
//! ```
#[cfg(test)]
pub(super) mod held;
mod immediate;
mod mapped;
mod registered;
mod threads;
mod uring;

pub(super) use mapped::Mapped;
pub(super) use threads::Pool;
pub(super) use uring::probe;

use super::image::Image;
use crate::MappedQueue;
use paravane_dma::HostSlice;
use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;

/// The pieces of memory of one transfer. They are not borrowed but promised, see [`Engine::push`].
#[derive(Clone, Copy, Debug)]
pub(super) struct Pieces {
    pub(super) first: NonNull<HostSlice>,
    pub(super) count: u32,
}

// SAFETY: plain data; whoever dereferences it relies on the promise of `Engine::push`, in any thread.
unsafe impl Send for Pieces {}

impl Pieces {
    /// As the kernel wants them: HostSlice has the layout of `struct iovec`.
    fn iovecs(self) -> *const libc::iovec {
        self.first.as_ptr().cast_const().cast()
    }

    /// The list.
    ///
    /// # Safety
    /// It is valid for as long as the result is used.
    pub(super) unsafe fn slices(&self) -> &[HostSlice] {
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts(self.first.as_ptr(), self.count as usize) }
    }

    /// The one piece, where there is only one and its length fits an io_uring entry: cheaper than a list, for system calls as well.
    fn single(self) -> Option<(*mut u8, u32)> {
        if self.count != 1 {
            return None;
        }
        // SAFETY: the list is valid while the job is (Engine::push), and it has one entry.
        let piece = unsafe { self.first.read() };
        Some((piece.ptr, u32::try_from(piece.len).ok()?))
    }
}

/// One system call's worth of work on the image. Offsets and lengths are in bytes.
#[derive(Clone, Copy, Debug)]
pub(super) enum Job {
    /// preadv(2).
    Read { pieces: Pieces, offset: u64 },
    /// pwritev2(2), with RWF_DSYNC if `durable`.
    Write { pieces: Pieces, offset: u64, durable: bool },
    /// fdatasync(2).
    Sync,
    /// fallocate(2). For a `discard` any content will do.
    Allocate { mode: i32, offset: u64, len: u64, discard: bool },
}

/// Result of a job. Made by engines only, once for each job, when nothing accesses its memory any more.
#[derive(Debug)]
pub(super) struct Outcome {
    head: u16,
    result: i32,
}

impl Outcome {
    /// Descriptor head that the job was pushed with.
    pub(super) fn head(&self) -> u16 {
        self.head
    }

    /// The system call's result, or a negative error number.
    pub(super) fn result(&self) -> i32 {
        self.result
    }
}

/// Which engine a disk uses; made once, when it is opened.
#[derive(Debug)]
pub(super) enum EngineKind {
    /// A ring for each queue, and what is registered with them: the image, and perhaps guest memory. The rings hold the image's
    /// lock, too: requests outlive a process that is killed, and nobody else may write to the image before they are done.
    Uring { registers: bool },
    /// Nothing beyond the image, which may be mapped.
    Immediate { mapped: Option<Arc<Mapped>> },
    /// One pool for all queues, and why it is not io_uring if that was the first choice.
    Threads { pool: Arc<Pool>, why: Option<String> },
}

/// One queue's engine.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "one a queue, and the larger one is the one to be fast")]
pub(super) enum Engine {
    Uring(uring::Uring),
    Immediate(immediate::Immediate),
    Threads(threads::Threads),
    #[cfg(test)]
    Held(held::Held),
}

impl Engine {
    /// For an image, with room for `jobs` jobs in flight.
    pub(super) fn new(kind: &EngineKind, image: &Arc<Image>, jobs: u16) -> io::Result<Self> {
        Ok(match kind {
            EngineKind::Uring { registers } => Self::Uring(uring::Uring::new(&image.file, *registers, jobs)?),
            EngineKind::Immediate { mapped } => {
                Self::Immediate(immediate::Immediate::new(image.clone(), mapped.clone(), jobs))
            }
            EngineKind::Threads { pool, .. } => Self::Threads(threads::Threads::new(pool.clone(), jobs)?),
        })
    }

    /// Whether it keeps guest memory beyond what jobs name.
    pub(super) fn registers(&self) -> bool {
        matches!(self, Self::Uring(uring) if uring.registers())
    }

    /// Before jobs of this queue are pushed: its memory may be another than before.
    pub(super) fn follow(&mut self, queue: &mut MappedQueue) {
        if let Self::Uring(uring) = self {
            uring.follow(queue);
        }
    }

    /// Readable when there is something to reap while the engine listens. None: nothing ever takes any time.
    pub(super) fn fd(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Uring(uring) => Some(uring.fd()),
            Self::Immediate(_) => None,
            Self::Threads(threads) => Some(threads.fd()),
            #[cfg(test)]
            Self::Held(held) => Some(held.fd()),
        }
    }

    /// From here to [`Engine::listen`], completions need not make [`Engine::fd`] readable.
    pub(super) fn quiet(&mut self) {
        match self {
            Self::Uring(uring) => uring.quiet(),
            Self::Immediate(_) | Self::Threads(_) => {}
            #[cfg(test)]
            Self::Held(_) => {}
        }
    }

    /// [`Engine::fd`] is not readable, and from here on completions make it so. `true`: there is something to do already,
    /// and the next serve does it.
    pub(super) fn listen(&mut self) -> bool {
        match self {
            Self::Uring(uring) => uring.listen(),
            Self::Immediate(immediate) => immediate.has_news(),
            Self::Threads(threads) => threads.listen(),
            #[cfg(test)]
            Self::Held(held) => held.listen(),
        }
    }

    /// Whether there is something to reap or to submit, as far as that shows without a lock or a system call.
    pub(super) fn has_news(&mut self) -> Option<bool> {
        match self {
            Self::Uring(uring) => Some(uring.has_news()),
            Self::Immediate(immediate) => Some(immediate.has_news()),
            Self::Threads(_) => None,
            #[cfg(test)]
            Self::Held(_) => None,
        }
    }

    /// Takes a job. The kernel may see it now, and has it after [`Engine::submit`].
    ///
    /// # Errors
    /// The host refuses work; the job was not taken.
    ///
    /// # Safety
    /// The pieces of the job, the array that lists them, and the memory that they name must stay valid and
    /// where they are until the job's outcome has been reaped. `head` has no other job in flight.
    pub(super) unsafe fn push(&mut self, head: u16, job: Job) -> io::Result<()> {
        match self {
            // SAFETY: the caller's promise is the one that is asked for.
            Self::Uring(uring) => unsafe { uring.push(head, job) },
            Self::Immediate(immediate) => {
                immediate.push(head, job);
                Ok(())
            }
            Self::Threads(threads) => {
                threads.push(head, job);
                Ok(())
            }
            #[cfg(test)]
            Self::Held(held) => {
                held.push(head, job);
                Ok(())
            }
        }
    }

    /// Hands everything pushed to the kernel, in one system call.
    ///
    /// # Errors
    /// The host refuses work.
    pub(super) fn submit(&mut self) -> io::Result<()> {
        match self {
            Self::Uring(uring) => uring.submit(),
            Self::Immediate(_) => Ok(()),
            Self::Threads(threads) => {
                threads.submit();
                Ok(())
            }
            #[cfg(test)]
            Self::Held(held) => {
                held.submit();
                Ok(())
            }
        }
    }

    /// Appends what is done to `outcomes`.
    pub(super) fn reap(&mut self, outcomes: &mut VecDeque<Outcome>) {
        match self {
            Self::Uring(uring) => uring.reap(outcomes),
            Self::Immediate(immediate) => immediate.reap(outcomes),
            Self::Threads(threads) => threads.reap(outcomes),
            #[cfg(test)]
            Self::Held(held) => held.reap(outcomes),
        }
    }

    /// Submits, and waits until there is something to reap. Something must be in flight.
    ///
    /// # Errors
    /// The host refuses to wait; what is in flight still is.
    pub(super) fn wait(&mut self) -> io::Result<()> {
        match self {
            Self::Uring(uring) => uring.wait(),
            Self::Immediate(_) => Ok(()),
            Self::Threads(threads) => {
                threads.wait();
                Ok(())
            }
            #[cfg(test)]
            Self::Held(held) => {
                held.wait();
                Ok(())
            }
        }
    }
}
