//! The cut between images and where their bytes lie.
use crate::{Job, Outcome, Pieces, Rest, WakeSet};
use paravane_dma::{HostSlice, Region};
use std::collections::VecDeque;
use std::fmt::Debug;
use std::fs::File;
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

/// An open store: bytes from 0 to its size.
///
/// Shared by the queues of a disk. Dropped when the disk and its last queue are gone.
pub trait Store: Debug + Send + Sync {
    /// A way to the store for one virtqueue, with room for `jobs` jobs in flight.
    ///
    /// # Errors
    /// The host refuses a resource.
    fn queue(&self, jobs: u16) -> io::Result<Box<dyn StoreQueue>>;

    /// Does one job and waits for it. Returns what [`Outcome::result`] would be.
    ///
    /// For formats, which need tables before they can go on. Many threads may wait at once.
    ///
    /// # Safety
    /// The pieces of the job, the array that lists them, and the memory that they name stay valid
    /// during the call.
    unsafe fn perform(&self, job: Job) -> i32;

    /// Size in bytes, by the latest that is known of the store. Never blocks.
    fn size(&self) -> u64;

    /// Bytes up to the end that the server named last [[`Store::size`]]. Never blocks.
    ///
    /// Less than the size if the store has shrunk: requests beyond fail there.
    fn end(&self) -> u64 {
        self.size()
    }

    /// Size in bytes, of a file by its file system \[[`Store::size`]\]. Never asks a server.
    ///
    /// # Errors
    /// The file system does not tell.
    fn try_size(&self) -> io::Result<u64> {
        Ok(self.size())
    }

    /// The file or block device that the store is \[none\].
    fn file(&self) -> Option<&File> {
        None
    }

    /// Asks the store for its size. May block.
    ///
    /// # Errors
    /// The store does not answer.
    fn refresh(&self) -> io::Result<u64> {
        Ok(self.size())
    }

    /// Sets the size in bytes. May block.
    ///
    /// # Errors
    /// The store refuses.
    fn set_size(&self, _size: u64) -> io::Result<()> {
        Err(io::Error::new(io::ErrorKind::Unsupported, "the store cannot be resized from here"))
    }

    /// Asks which parts of a range read as zeroes. May block.
    ///
    /// The list begins at `offset` and is in order and without gaps. It has at least one part, and may
    /// end before the range does (ask again for the rest), or after it. Offset and length are whole blocks of
    /// [`StoreLimits::block`], and lie within the store.
    ///
    /// A store that cannot tell calls everything data, as the default does.
    ///
    /// # Errors
    /// The store does not answer, or refuses.
    fn extents(&self, offset: u64, len: u64) -> io::Result<Vec<StoreExtent>> {
        Ok(vec![StoreExtent::data(offset, len)])
    }

    /// What the store accepts.
    fn limits(&self) -> StoreLimits;

    /// State, for observers \[without a location\]. Never blocks.
    fn status(&self) -> StoreStatus {
        StoreStatus::default()
    }

    /// Gives up at once what waits for a connection: requests fail with an I/O error.
    fn close(&self) {}
}

impl dyn Store + '_ {
    /// Reads some bytes; 0 at the end.
    ///
    /// # Errors
    /// The store refuses.
    pub fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<usize> {
        let piece = HostSlice { ptr: into.as_mut_ptr(), len: into.len() };
        let pieces = Pieces { first: NonNull::from(&piece), count: 1 };
        // SAFETY: the piece is `into`, which is borrowed for the call.
        moved(unsafe { self.perform(Job::Read { pieces, offset }) })
    }

    /// Reads up to the end of the store, and returns the number of bytes.
    ///
    /// The rest of `into` is unchanged.
    ///
    /// # Errors
    /// The store refuses.
    pub fn read_up_to(&self, into: &mut [u8], offset: u64) -> io::Result<usize> {
        let mut done = 0;
        while done < into.len() {
            // An offset that no file can have is beyond the end.
            let at = offset.checked_add(done as u64).filter(|at| i64::try_from(*at).is_ok());
            let Some(at) = at else { break };
            match self.read_at(&mut into[done..], at) {
                Ok(0) => break,
                Ok(len) => done += len,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(done)
    }

    /// Writes all bytes.
    ///
    /// # Errors
    /// The store refuses.
    pub fn write_all_at(&self, mut data: &[u8], mut offset: u64) -> io::Result<()> {
        while !data.is_empty() {
            let piece = HostSlice { ptr: data.as_ptr().cast_mut(), len: data.len() };
            let pieces = Pieces { first: NonNull::from(&piece), count: 1 };
            // SAFETY: the piece is `data`, which is borrowed for the call and only read.
            match moved(unsafe { self.perform(Job::Write { pieces, offset, durable: false }) }) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(done) => {
                    data = &data[done.min(data.len())..];
                    offset += done as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Makes a range read as zeroes. `unmap`: frees it where that can be.
    ///
    /// # Errors
    /// EOPNOTSUPP: only writes can.
    pub fn zero(&self, offset: u64, len: u64, unmap: bool) -> io::Result<()> {
        // SAFETY: the job has no memory.
        moved(unsafe { self.perform(Job::Zeroes { offset, len, unmap }) }).map(drop)
    }

    /// Frees a range, whose content is undefined afterwards.
    ///
    /// # Errors
    /// EOPNOTSUPP: it cannot be freed.
    pub fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        // SAFETY: the job has no memory.
        moved(unsafe { self.perform(Job::Discard { offset, len }) }).map(drop)
    }

    /// Makes all writes durable.
    ///
    /// # Errors
    /// The store has lost a write.
    pub fn sync(&self) -> io::Result<()> {
        // SAFETY: the job has no memory.
        moved(unsafe { self.perform(Job::Flush) }).map(drop)
    }
}

/// Does a job in a queue of its own.
///
/// # Safety
/// As [`Store::perform`].
#[cfg(any(feature = "http", feature = "rbd"))]
pub(crate) unsafe fn perform_in_queue(store: &dyn Store, job: Job) -> i32 {
    let mut outcomes = VecDeque::with_capacity(1);
    let done = store.queue(1).and_then(|mut queue| {
        // SAFETY: the caller's promise holds until the queue has ended, which is before this returns.
        unsafe { queue.push(0, job) }?;
        while outcomes.is_empty() {
            queue.wait()?;
            queue.reap(&mut outcomes);
        }
        Ok(())
    });
    match (done, outcomes.pop_front()) {
        (Ok(()), Some(outcome)) => outcome.result(),
        (Err(error), _) => -error.raw_os_error().unwrap_or(libc::EIO),
        (Ok(()), None) => -libc::EIO,
    }
}

/// A result as system calls have it.
fn moved(result: i32) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::from_raw_os_error(-result))
}

/// Jobs of one virtqueue in flight. It belongs to one thread at a time.
///
/// ```text
///   push(head, job)*  ->  submit  ->  ... store ...  ->  reap: (head, result)*
///   rest(true) before the owner sleeps
/// ```
pub trait StoreQueue: Debug + Send {
    /// Adds the descriptors that become readable when there is something to reap to `wakes` \[none: it signals
    /// what it was made with\].
    ///
    /// They leave an earlier set. `None`: they only leave it, which cannot fail. Later events wait.
    ///
    /// A store with several adds each: an epoll instance within another costs whoever makes it readable.
    ///
    /// # Errors
    /// The host refuses; `None` takes out what was added.
    fn register(&mut self, _wakes: Option<&WakeSet>) -> io::Result<()> {
        Ok(())
    }

    /// What is known of the next event, after a call that did nothing. Waits for kicks.
    ///
    /// With `arm`, makes events wake the owner, which sleeps now unless the answer is [`Rest::Serve`].
    /// Without, makes no system call.
    fn rest(&mut self, arm: bool) -> Rest;

    /// Turns signals of events off until `rest(true)`, where that costs less than to let them come \[nothing\].
    fn quiet(&mut self) {}

    /// Whether it keeps guest memory beyond that of jobs: see [`StoreQueue::register_memory`].
    fn registers(&self) -> bool {
        false
    }

    /// Registers the regions of the memory map with this generation, unless they are already \[nothing\].
    fn register_memory(&mut self, _generation: u64, _regions: &[Arc<Region>]) {}

    /// Queues a job. The store has it after [`StoreQueue::submit`] at the latest.
    ///
    /// A virtual call for each job takes 2 ns more than a match. A list of jobs for one call a batch would
    /// take 10 ns a job, which is copied once more.
    ///
    /// # Errors
    /// The job was not queued.
    ///
    /// # Safety
    /// The pieces of the job, the array that lists them, and the memory that they name must stay
    /// valid and in place until the job's outcome has been reaped. `head` has no other job in
    /// flight.
    unsafe fn push(&mut self, head: u16, job: Job) -> io::Result<()>;

    /// Gives all queued jobs to the store. Never blocks.
    ///
    /// # Errors
    /// The host refuses work. Jobs of a lost connection are no error: they wait.
    fn submit(&mut self) -> io::Result<()>;

    /// Appends the outcomes of jobs that have ended. Never blocks.
    fn reap(&mut self, outcomes: &mut VecDeque<Outcome>);

    /// Submits, and waits until there is something to reap. A job must be in flight.
    ///
    /// # Errors
    /// The host refuses to wait; jobs stay in flight.
    fn wait(&mut self) -> io::Result<()>;

    /// Gives up jobs that the store has not begun.
    ///
    /// Each still has an outcome: ECANCELED or EINTR if it was given up, which `wait` waits for as for
    /// all others. A write that was interrupted may have written a part.
    fn cancel(&mut self);
}

/// What a store accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoreLimits {
    /// Writes fail.
    pub read_only: bool,
    /// Offsets and lengths are multiples of it: a power of two from 1 to 4096 bytes.
    pub block: u32,
    /// Block in bytes that costs no more than it must: a power of two from `block` to 4096.
    pub physical_block: u32,
    /// Bytes below which a discard frees nothing: a multiple of `physical_block`.
    pub discard_block: u32,
    /// Ranges can be discarded.
    pub discard: bool,
    /// Ranges can be zeroed without a transfer of zeroes.
    pub zeroes: bool,
}

/// A part of a store that is of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoreExtent {
    /// Where it begins, in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
    /// It takes no room.
    pub hole: bool,
    /// It reads as zeroes.
    pub zeroes: bool,
}

impl StoreLimits {
    /// Of a file on a file system with blocks of 4096 bytes.
    pub const FILE: Self = Self {
        read_only: false,
        block: 1,
        physical_block: 4096,
        discard_block: 4096,
        discard: true,
        zeroes: true,
    };
}

impl StoreExtent {
    /// A part that may hold anything.
    #[must_use]
    pub fn data(offset: u64, len: u64) -> Self {
        Self { offset, len, hole: false, zeroes: false }
    }

    /// A part that takes no room and reads as zeroes.
    #[must_use]
    pub fn hole(offset: u64, len: u64) -> Self {
        Self { offset, len, hole: true, zeroes: true }
    }
}

/// State of a store, for observers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StoreStatus {
    /// Location without secrets, for example `nbd://host:10809/export`.
    pub location: String,
    /// What goes on.
    pub link: Link,
    /// Connections that are up. Ceph: 1 while no request is older than 5 s.
    pub connections: u32,
    /// Connections that were made again.
    pub reconnects: u64,
    /// Jobs that wait for a connection, or for a store that has stalled; Ceph: those older than 5 s.
    pub waiting: u32,
    /// Last error of the store, which may be over.
    pub error: Option<String>,
    /// Chunks kept on this host, if the store has a cache.
    pub cache: Option<CacheStatus>,
}

/// Whether the store can be reached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Link {
    /// The store answers.
    #[default]
    Up,
    /// Jobs have had no reply for 5 s, and no connection is known to be lost; jobs wait.
    ///
    /// NBD: nothing was received. Ceph: a request is older; librbd does not tell of its connections.
    Stalled,
    /// A connection is being made again; jobs wait.
    Reconnecting,
    /// The time to wait is over: jobs fail until the store is back.
    Down,
    /// The store has changed under the disk, does not keep to its protocol, or is another client's:
    /// all jobs fail.
    Unusable,
}

/// Counters of a cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheStatus {
    /// Bytes of chunks that were found.
    pub hit_bytes: u64,
    /// Bytes of chunks that were fetched for a request.
    pub miss_bytes: u64,
    /// Bytes of chunks that were fetched ahead.
    pub read_ahead_bytes: u64,
    /// Bytes kept now.
    pub used_bytes: u64,
    /// Most bytes to keep.
    pub limit_bytes: u64,
    /// Chunks that were evicted.
    pub evicted: u64,
    /// Chunks that could not be kept, because the folder is full or failed.
    pub not_kept: u64,
    /// The folder keeps no chunks at present; the error of the store says why.
    pub is_failing: bool,
}
