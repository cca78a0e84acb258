//! Reads of cached chunks that go to the kernel in one system call.
//!
//! ```text
//!   push:     chunks valid?  -- no: the read is not collected
//!               | generations
//!   perform:  io_uring_enter: each is copied, or would wait for the disk
//!               | a few only, no ring, or another error: preadv2 for each of them
//!             generations still the same?  -- no: absent  ([`Chunks::end`])
//! ```
//! All entries have RWF_NOWAIT: the kernel copies them during the call that submits them, and
//! gives none to its threads. What is correct does not depend on it: [`Ring::copy`] returns when
//! the kernel has none of them.
use super::chunks::{BegunRead, Chunks, Found};
use crate::Pieces;
use io_uring::{IoUring, opcode, squeue, types};
use std::io;
use std::os::fd::AsRawFd;

/// Most reads of a batch, as many as a device takes from a virtqueue at once.
const MOST: usize = 64;

/// Fewest reads for which a ring pays.
///
/// CPU time of a read of 4 KiB in order of the batch's size, beside 940 ns with preadv2: 2: 1030 ns,
/// 4: 910, 8: 820, 16: 780, 64: 750. Linux 6.18; preadv2 spends 90 ns on the list of one piece.
const FEWEST: usize = 4;

/// The data is the ring's only registered file.
const DATA: types::Fixed = types::Fixed(0);

/// A read of bytes that an object has.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Read {
    /// Number of the job.
    pub(crate) head: u16,
    /// Memory, as long or longer.
    pub(crate) pieces: Pieces,
    /// Where in the object.
    pub(crate) offset: u64,
    /// Bytes.
    pub(crate) len: u64,
}

/// A read that was collected.
#[derive(Debug)]
struct Collected {
    read: Read,
    begun: BegunRead,
    /// Bytes that the ring has copied, or an error number; `None`: preadv2 tells.
    copied: Option<Result<u64, i32>>,
}

/// Reads of one queue. All that it ever has are of one [`Chunks`].
#[derive(Debug, Default)]
pub(crate) struct Batch {
    reads: Vec<Collected>,
    ring: RingState,
}

#[derive(Debug, Default)]
#[expect(clippy::large_enum_variant, reason = "one for each queue, and the larger one is to be fast")]
enum RingState {
    /// No batch was large enough yet.
    #[default]
    Unused,
    Open(Ring),
    /// The host refuses a ring, or it has failed.
    Refused,
}

impl Batch {
    /// Whether there is nothing to do.
    pub(crate) fn is_empty(&self) -> bool {
        self.reads.is_empty()
    }

    /// Whether it has to be done before the next read is added.
    pub(crate) fn is_full(&self) -> bool {
        self.reads.len() >= MOST
    }

    /// Adds a read. `false`: its chunks are not valid, or a file system cannot tell that it would wait.
    ///
    /// # Safety
    /// The pieces, the array that lists them and the memory that they name stay valid until the read
    /// was performed or given up, or the batch is dropped.
    pub(super) unsafe fn push(&mut self, chunks: &Chunks, read: Read) -> bool {
        if !chunks.reads_at_once() {
            return false;
        }
        let Some(begun) = chunks.begin(read.offset, read.len) else { return false };
        self.reads.push(Collected { read, begun, copied: None });
        true
    }

    /// Removes the reads; nothing was done for them.
    pub(crate) fn give_up(&mut self) -> impl Iterator<Item = Read> {
        self.reads.drain(..).map(|collected| collected.read)
    }

    /// Does the reads, in order.
    pub(super) fn perform(&mut self, chunks: &Chunks) -> impl Iterator<Item = (Read, Found)> {
        for reads in self.reads.chunks_mut(MOST).filter(|reads| reads.len() >= FEWEST) {
            if let RingState::Unused = self.ring {
                self.ring = Ring::new(chunks).map_or_else(refused, RingState::Open);
            }
            if let RingState::Open(ring) = &mut self.ring
                // SAFETY: the promise of `push`.
                && let Err(error) = unsafe { ring.copy(reads) }
            {
                self.ring = refused(error);
            }
        }
        self.reads.drain(..).map(|Collected { read, begun, copied }| {
            // SAFETY: the promise of `push`.
            let copied = copied.unwrap_or_else(|| unsafe { chunks.copy(read.pieces, read.offset, true) });
            (read, chunks.end(begun, read.len, copied, true))
        })
    }
}

#[cold]
fn refused(error: io::Error) -> RingState {
    tracing::debug!("cached chunks are read without io_uring: {error}");
    RingState::Refused
}

/// A ring with the file of the data.
struct Ring(IoUring);

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ring").finish_non_exhaustive()
    }
}

impl Ring {
    /// A ring for a full batch.
    ///
    /// # Errors
    /// The host refuses.
    fn new(chunks: &Chunks) -> io::Result<Self> {
        let ring = IoUring::new(MOST as u32)?;
        ring.submitter().register_files(&[chunks.data.as_raw_fd()])?;
        Ok(Self(ring))
    }

    /// Copies what the kernel has in memory. [`MOST`] reads at most.
    ///
    /// # Errors
    /// The kernel refuses; some reads may be done. The ring must not be used again.
    ///
    /// # Safety
    /// The pieces of the reads, the arrays that list them and the memory that they name are valid.
    unsafe fn copy(&mut self, reads: &mut [Collected]) -> io::Result<()> {
        let mut queue = self.0.submission();
        for (index, collected) in reads.iter().enumerate() {
            // SAFETY: the caller's promise, and the kernel has none of these when this function returns.
            let pushed = unsafe { queue.push(&entry(&collected.read).user_data(index as u64)) };
            if pushed.is_err() {
                break;
            }
        }
        let pushed = queue.len();
        drop(queue);
        let (mut done, mut failure) = (0, None);
        loop {
            for completion in self.0.completion() {
                done += 1;
                let result = completion.result();
                let copied = match u64::try_from(result) {
                    Ok(bytes) => Some(Ok(bytes)),
                    Err(_) if result == -libc::EAGAIN => Some(Err(libc::EAGAIN)),
                    Err(_) => None,
                };
                if let Some(collected) = reads.get_mut(completion.user_data() as usize) {
                    collected.copied = copied;
                }
            }
            // The kernel has taken what is not in the submission queue any more.
            let left = self.0.submission().len();
            if done + left == pushed && (left == 0 || failure.is_some()) {
                // It has none of them, and never sees those that are left: the ring is not used again.
                return failure.map_or(Ok(()), Err);
            }
            if failure.is_some() {
                // What it has taken it also completes.
                std::thread::yield_now();
                continue;
            }
            match self.0.submit_and_wait(pushed - done) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => failure = Some(error),
            }
        }
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // The kernel releases a ring some time after its descriptor is closed, and the file with it.
        if let Err(error) = self.0.submitter().unregister_files() {
            tracing::debug!("a file of chunks stays open until the kernel has released a ring: {error}");
        }
    }
}

fn entry(read: &Read) -> squeue::Entry {
    let Read { pieces, offset, .. } = *read;
    // SAFETY: a read that was collected has a valid list (`Batch::push`).
    match unsafe { pieces.single() } {
        Some((ptr, len)) => {
            opcode::Read::new(DATA, ptr, len).offset(offset).rw_flags(libc::RWF_NOWAIT).build()
        }
        None => opcode::Readv::new(DATA, pieces.iovecs(), pieces.count)
            .offset(offset)
            .rw_flags(libc::RWF_NOWAIT)
            .build(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::Layout;
    use paravane_dma::HostSlice;
    use std::fs::File;
    use std::os::fd::AsFd;
    use std::ptr::NonNull;
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

    const CHUNK: usize = 4096;

    /// Chunks with their number in each byte; `None` where the file system cannot tell that it would
    /// wait.
    fn chunks(count: u64) -> Option<(Chunks, File)> {
        let layout = Layout::new(count * CHUNK as u64, CHUNK as u32).unwrap();
        let (data, map) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        let chunks = Chunks::in_files(layout, data.try_clone().unwrap(), map, [3; 32]).unwrap();
        for chunk in 0..count {
            chunks.keep(chunk, &[chunk as u8 + 1; CHUNK], chunk == 1).unwrap();
        }
        let mut out = [0; 8];
        let mut slice = HostSlice { ptr: out.as_mut_ptr(), len: out.len() };
        let pieces = Pieces { first: NonNull::from(&mut slice), count: 1 };
        // SAFETY: the slice and its memory live for the call.
        if unsafe { chunks.copy(pieces, 0, true) } == Err(libc::EOPNOTSUPP) {
            paravane_test_support::skip("batch", "the file system does not support RWF_NOWAIT".to_owned());
            return None;
        }
        Some((chunks, data))
    }

    /// Memory of reads: each has a piece.
    struct Memory {
        bytes: Vec<[u8; CHUNK]>,
        slices: Vec<HostSlice>,
    }

    impl Memory {
        fn new(count: usize) -> Self {
            let mut bytes = vec![[0xee; CHUNK]; count];
            let slices = bytes.iter_mut().map(|it| HostSlice { ptr: it.as_mut_ptr(), len: CHUNK }).collect();
            Self { bytes, slices }
        }

        /// Adds the reads of these chunks.
        fn push(&mut self, batch: &mut Batch, chunks: &Chunks, wanted: &[u64]) -> Vec<bool> {
            let each = wanted.iter().zip(&mut self.slices).enumerate();
            each.map(|(head, (chunk, slice))| {
                let pieces = Pieces { first: NonNull::from(slice), count: 1 };
                let read =
                    Read { head: head as u16, pieces, offset: chunk * CHUNK as u64, len: CHUNK as u64 };
                // SAFETY: the tests perform the batch while the memory lives.
                unsafe { batch.push(chunks, read) }
            })
            .collect()
        }

        fn first(&self) -> Vec<u8> {
            self.bytes.iter().map(|bytes| bytes[0]).collect()
        }
    }

    fn found(batch: &mut Batch, chunks: &Chunks) -> Vec<Found> {
        batch.perform(chunks).map(|(_, found)| found).collect()
    }

    fn has_ring(batch: &Batch) -> bool {
        matches!(batch.ring, RingState::Open(_))
    }

    const COPIED: Found = Found::Copied { mark: None };

    #[test]
    fn hits_are_copied_with_a_ring_and_without_one() {
        let Some((chunks, _)) = chunks(5) else { return };
        let refused = Batch { ring: RingState::Refused, ..Batch::default() };
        for (round, mut batch) in [Batch::default(), refused].into_iter().enumerate() {
            let mut memory = Memory::new(5);
            assert_eq!(memory.push(&mut batch, &chunks, &[0, 1, 4, 3, 2]), [true; 5]);
            let all: Vec<_> = batch.perform(&chunks).map(|(read, found)| (read.head, found)).collect();
            // The mark of chunk 1 is taken once.
            let marked = Found::Copied { mark: (round == 0).then_some(1) };
            assert_eq!(all, [(0, COPIED), (1, marked), (2, COPIED), (3, COPIED), (4, COPIED)]);
            assert_eq!(memory.first(), [1, 2, 5, 4, 3]);
            assert!(batch.is_empty());
            if round == 0 && !has_ring(&batch) {
                paravane_test_support::skip("batch", "this host refuses io_uring".to_owned());
            }
        }
    }

    #[test]
    fn a_few_reads_open_no_ring() {
        let Some((chunks, _)) = chunks(4) else { return };
        let (mut batch, mut memory) = (Batch::default(), Memory::new(FEWEST - 1));
        memory.push(&mut batch, &chunks, &[1, 2, 3]);
        assert_eq!(found(&mut batch, &chunks), [Found::Copied { mark: Some(1) }, COPIED, COPIED]);
        assert_eq!(memory.first(), [2, 3, 4]);
        assert!(matches!(batch.ring, RingState::Unused));
    }

    #[test]
    fn absent_chunks_are_not_collected_and_those_that_are_evicted_meanwhile_are_absent() {
        let Some((chunks, _)) = chunks(6) else { return };
        assert_eq!(chunks.evict(), Some(CHUNK as u64));
        let (mut batch, mut memory) = (Batch::default(), Memory::new(6));
        let taken = memory.push(&mut batch, &chunks, &[1, 0, 2, 3, 4, 5]);
        assert_eq!(taken, [true, false, true, true, true, true]);
        // The hand passes all of them once.
        assert_eq!(chunks.evict(), Some(CHUNK as u64));
        assert!(!chunks.has(1));
        assert_eq!(found(&mut batch, &chunks), [Found::Absent, COPIED, COPIED, COPIED, COPIED]);

        // Evicted, and kept again.
        let mut memory = Memory::new(4);
        memory.push(&mut batch, &chunks, &[2, 3, 4, 5]);
        assert_eq!(chunks.evict(), Some(CHUNK as u64));
        chunks.keep(2, &[99; CHUNK], false).unwrap();
        assert_eq!(found(&mut batch, &chunks), [Found::Absent, COPIED, COPIED, COPIED]);
        assert_eq!(memory.first()[1..], [4, 5, 6]);
    }

    #[test]
    fn bad_memory_fails_its_own_read() {
        let Some((chunks, _)) = chunks(5) else { return };
        let (mut batch, mut memory) = (Batch::default(), Memory::new(5));
        memory.slices[2].ptr = std::ptr::without_provenance_mut(8);
        memory.push(&mut batch, &chunks, &[0, 4, 1, 2, 3]);
        assert_eq!(found(&mut batch, &chunks), [COPIED, COPIED, Found::Failed(libc::EFAULT), COPIED, COPIED]);
        assert!(chunks.has(1));
    }

    #[test]
    fn what_is_short_or_not_in_memory_comes_later() {
        let Some((chunks, data)) = chunks(6) else { return };
        let (mut batch, mut memory) = (Batch::default(), Memory::new(5));
        data.set_len(5 * CHUNK as u64 + 100).unwrap();
        memory.push(&mut batch, &chunks, &[0, 5, 2, 3, 4]);
        assert_eq!(found(&mut batch, &chunks), [COPIED, Found::Later, COPIED, COPIED, COPIED]);

        data.sync_all().unwrap();
        rustix::fs::fadvise(&data, 0, None, rustix::fs::Advice::DontNeed).unwrap();
        let mut memory = Memory::new(4);
        memory.push(&mut batch, &chunks, &[0, 2, 3, 4]);
        let found = found(&mut batch, &chunks);
        // A file system in memory keeps all of them.
        assert!(found.iter().all(|found| matches!(found, Found::Later | Found::Copied { .. })), "{found:?}");
    }

    #[test]
    fn the_kernel_does_all_reads_in_the_call_that_submits_them() {
        let Some((chunks, data)) = chunks(8) else { return };
        let Ok(mut ring) = Ring::new(&chunks) else { return };
        for cached in [true, false] {
            if !cached {
                data.sync_all().unwrap();
                rustix::fs::fadvise(&data, 0, None, rustix::fs::Advice::DontNeed).unwrap();
            }
            let (mut batch, mut memory) = (Batch::default(), Memory::new(8));
            memory.push(&mut batch, &chunks, &[0, 1, 2, 3, 4, 5, 6, 7]);
            for collected in &batch.reads {
                // SAFETY: all are done, as is asserted, while the memory lives.
                unsafe { ring.0.submission().push(&entry(&collected.read)) }.unwrap();
            }
            ring.0.submit().unwrap();
            assert_eq!(ring.0.completion().count(), 8);
        }
    }

    #[test]
    fn a_ring_that_fails_is_given_up() {
        let Some((chunks, _)) = chunks(4) else { return };
        let Ok(ring) = Ring::new(&chunks) else { return };
        let null = File::open("/dev/null").unwrap();
        // SAFETY: the ring owns its descriptor, which stays open: it is another file now.
        let fd = unsafe { libc::dup2(null.as_fd().as_raw_fd(), ring.0.as_raw_fd()) };
        assert_eq!(fd, ring.0.as_raw_fd());
        let (mut batch, mut memory) =
            (Batch { ring: RingState::Open(ring), ..Batch::default() }, Memory::new(4));
        memory.push(&mut batch, &chunks, &[3, 2, 0, 0]);
        assert_eq!(found(&mut batch, &chunks), [COPIED; 4]);
        assert_eq!(memory.first(), [4, 3, 1, 1]);
        assert!(matches!(batch.ring, RingState::Refused));
    }

    #[test]
    fn what_is_given_up_is_not_touched() {
        let Some((chunks, _)) = chunks(4) else { return };
        let (mut batch, mut memory) = (Batch::default(), Memory::new(4));
        memory.push(&mut batch, &chunks, &[0, 1, 2, 3]);
        assert_eq!(batch.give_up().map(|read| read.head).collect::<Vec<_>>(), [0, 1, 2, 3]);
        assert!(found(&mut batch, &chunks).is_empty());
        assert_eq!(memory.first(), [0xee; 4]);
    }

    #[test]
    fn a_batch_notices_evictions_under_it() {
        let Some((chunks, _)) = chunks(8) else { return };
        let (done, wrong) = (AtomicBool::new(false), AtomicBool::new(false));
        let (copied, absent) = (AtomicU64::new(0), AtomicU64::new(0));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut batch = Batch::default();
                while !done.load(Ordering::Relaxed) {
                    let mut memory = Memory::new(8);
                    let taken = memory.push(&mut batch, &chunks, &[0, 1, 2, 3, 4, 5, 6, 7]);
                    absent.fetch_add(taken.iter().filter(|taken| !**taken).count() as u64, Ordering::Relaxed);
                    for (read, found) in batch.perform(&chunks) {
                        let head = usize::from(read.head);
                        let right = match found {
                            Found::Copied { .. } => {
                                copied.fetch_add(1, Ordering::Relaxed);
                                memory.bytes[head] == [head as u8 + 1; CHUNK]
                            }
                            Found::Absent => {
                                absent.fetch_add(1, Ordering::Relaxed);
                                true
                            }
                            Found::Later => true,
                            Found::Failed(_) => false,
                        };
                        wrong.fetch_or(!right, Ordering::Relaxed);
                    }
                }
            });
            let enough =
                |count: &AtomicU64| count.load(Ordering::Relaxed) > 300 || wrong.load(Ordering::Relaxed);
            while !enough(&copied) || !enough(&absent) {
                for chunk in 0..8 {
                    let _ = chunks.keep(chunk, &[chunk as u8 + 1; CHUNK], false);
                }
                std::thread::yield_now();
                chunks.evict();
            }
            done.store(true, Ordering::Relaxed);
        });
        assert!(!wrong.into_inner());
    }
}
