//! Direct I/O for parts of blocks: a disk with smaller blocks than its file takes.
//!
//! ```text
//!   job --as it is--> file --EINVAL--> whole blocks: read, change, write back; one write at a time
//! ```
//! A guest keeps the block size that it was told. The file may take larger blocks: on another device,
//! or since its file system shares its blocks with a copy. Some file systems take smaller transfers
//! all the same, so each is tried first.
//!
//! Writes to different parts of a block do not lose each other, as each has the lock for its read and
//! write. A write of a whole block that overlaps one of a part is the driver's race, as on a disk.
use super::direct::Page;
use paravane_store::lock;
use paravane_store::pieces::{gather, scatter, total};
use paravane_store::{Job, Store};
use std::io;
use std::ops::Range;
use std::sync::Mutex;
use zerocopy::IntoBytes;

/// Most bytes of one transfer; the rest follows in further ones.
const AT_ONCE: u64 = 1 << 20;

/// The whole blocks of a transfer.
struct Blocks {
    pages: Vec<Page>,
    /// Offset of the first block in the file.
    start: u64,
    /// Bytes of the transfer in the buffer.
    part: Range<usize>,
    /// Bytes of a block.
    block: usize,
    /// Bytes of all blocks.
    len: usize,
}

impl Blocks {
    /// Memory for the blocks of `len` bytes at `offset`, or of their first part.
    ///
    /// # Errors
    /// The host has no memory.
    fn new(offset: u64, len: u64, block: u64) -> io::Result<Self> {
        let start = offset & !(block - 1);
        let end = offset.checked_add(len.min(AT_ONCE)).ok_or(io::ErrorKind::InvalidInput)?;
        let whole = (end.next_multiple_of(block) - start) as usize;
        let mut pages = Vec::new();
        let count = whole.div_ceil(size_of::<Page>());
        pages.try_reserve_exact(count).map_err(|_| io::ErrorKind::OutOfMemory)?;
        pages.resize(count, Page::ZEROES);
        let part = (offset - start) as usize..(end - start) as usize;
        Ok(Self { pages, start, part, block: block as usize, len: whole })
    }

    fn bytes(&mut self) -> &mut [u8] {
        &mut self.pages.as_mut_bytes()[..self.len]
    }

    /// Reads a range of the buffer from the file. Returns the number of bytes up to the file's end.
    fn read(&mut self, file: &dyn Store, range: Range<usize>) -> io::Result<usize> {
        let start = self.start + range.start as u64;
        file.read_up_to(&mut self.bytes()[range], start)
    }

    /// Reads the blocks of which only a part is written.
    fn read_edges(&mut self, file: &dyn Store) -> io::Result<()> {
        let (part, block, len) = (self.part.clone(), self.block, self.len);
        let (first, last) = (0..block, len - block..len);
        let is_first = part.start > 0 || part.end < block;
        let is_last = part.end < len && (last.start > 0 || !is_first);
        for edge in [is_first.then_some(first), is_last.then_some(last)].into_iter().flatten() {
            // To write a whole block there would make the file longer.
            if self.read(file, edge)? < block {
                return Err(io::Error::from_raw_os_error(libc::EINVAL));
            }
        }
        Ok(())
    }
}

/// Does a transfer in blocks of `block` bytes, a power of two. Returns the bytes moved.
///
/// Writes lock `alone`, which belongs to the file.
///
/// # Errors
/// The file refuses; EINVAL for jobs that are no transfers.
///
/// # Safety
/// The pieces of the job, the array that lists them, and the memory that they name stay valid during
/// the call.
pub(super) unsafe fn perform(file: &dyn Store, block: u64, alone: &Mutex<()>, job: Job) -> io::Result<usize> {
    match job {
        Job::Read { pieces, offset } => {
            // SAFETY: the caller's promise.
            let pieces = unsafe { pieces.slices() };
            let mut blocks = Blocks::new(offset, total(pieces), block)?;
            let len = blocks.len;
            let found = blocks.read(file, 0..len)?;
            let part = blocks.part.start.min(found)..blocks.part.end.min(found);
            let data = &blocks.bytes()[part];
            // SAFETY: the caller's promise; they are mapped for writing, since it is a read.
            unsafe { scatter(pieces, 0, data) };
            Ok(data.len())
        }
        Job::Write { pieces, offset, durable } => {
            // SAFETY: the caller's promise.
            let pieces = unsafe { pieces.slices() };
            let mut blocks = Blocks::new(offset, total(pieces), block)?;
            let (part, start) = (blocks.part.clone(), blocks.start);
            // Nothing is left half done under it.
            let _alone = lock(alone);
            blocks.read_edges(file)?;
            // SAFETY: the caller's promise.
            unsafe { gather(pieces, 0, &mut blocks.bytes()[part.clone()]) };
            file.write_all_at(blocks.bytes(), start)?;
            if durable {
                file.sync()?;
            }
            Ok(part.len())
        }
        _ => Err(io::Error::from_raw_os_error(libc::EINVAL)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use paravane_dma::HostSlice;
    use paravane_store::Pieces;
    use paravane_store::file::FileStore;
    use std::fs::File;
    use std::os::unix::fs::FileExt;
    use std::ptr::NonNull;

    fn run(file: &File, data: &mut [u8], offset: u64, write: bool) -> io::Result<usize> {
        let alone = Mutex::new(());
        let (one, other) = data.split_at_mut(data.len() / 3);
        let mut list = [one, other].map(|part| HostSlice { ptr: part.as_mut_ptr(), len: part.len() });
        let pieces = Pieces { first: NonNull::from(&mut list).cast(), count: 2 };
        let job = match write {
            true => Job::Write { pieces, offset, durable: true },
            false => Job::Read { pieces, offset },
        };
        // SAFETY: all is borrowed for the call.
        unsafe { perform(&*FileStore::of(file.try_clone()?), 4096, &alone, job) }
    }

    #[test]
    fn parts_of_blocks_are_read_and_written_and_the_rest_stays() {
        let file = tempfile::tempfile().unwrap();
        let mut model: Vec<u8> = (0..8 * 4096_u32).map(|at| (at / 512) as u8).collect();
        file.write_all_at(&model, 0).unwrap();
        for (offset, len) in [
            (512, 512),
            (0, 512),
            (3584, 512),
            (3584, 1024),
            (4096, 4096),
            (4096 + 512, 3 * 4096),
            (512, 4096 - 512),
            (0, 8 * 4096),
            (7 * 4096 + 3584, 512),
        ] {
            let mut data = vec![(offset / 512) as u8 ^ 0xa5; len];
            assert_eq!(run(&file, &mut data, offset as u64, true).unwrap(), len);
            model[offset..offset + len].copy_from_slice(&data);
            data.fill(0);
            assert_eq!(run(&file, &mut data, offset as u64, false).unwrap(), len);
            assert!(data == model[offset..offset + len]);
            let mut all = vec![0; model.len()];
            file.read_exact_at(&mut all, 0).unwrap();
            assert!(all == model, "{len} bytes at {offset}");
        }
    }

    #[test]
    fn a_file_that_ends_within_a_block_keeps_its_size() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(4096 + 512).unwrap();
        assert_eq!(run(&file, &mut [1; 1024], 4096, false).unwrap(), 512);
        let refused = run(&file, &mut [1; 512], 4096, true).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::EINVAL));
        assert_eq!(file.metadata().unwrap().len(), 4096 + 512);
    }
}
