//! Direct I/O (O_DIRECT): alignment of a file, and bounce buffers.
//!
//! ```text
//!   request --part of a block of the disk------> I/O error: the driver was told the block size
//!      '----part of a block of the file--------> whole blocks are read and written (whole_blocks.rs)
//!      '----memory is not aligned--------------> bounce buffer, up to 64 KiB at a time  <-> guest memory
//!      '----all is aligned---------------------> guest memory
//! ```
use paravane_dma::HostSlice;
use paravane_store::pieces::{gather, scatter};
use rustix::fs::{AtFlags, OFlags, StatxFlags};
use rustix::io::Errno;
use std::collections::TryReserveError;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Largest supported block in bytes, and largest alignment that any file demands.
///
/// All guests know blocks of this size.
const MAX_BLOCK: u64 = 4096;
/// Most bytes in a bounce buffer.
const AT_ONCE: u64 = 64 << 10;

/// Memory that is aligned for any file.
#[derive(Clone, Copy, Immutable, IntoBytes, FromBytes, KnownLayout)]
#[repr(C, align(4096))]
pub(super) struct Page([u8; 4096]);

impl Page {
    pub(super) const ZEROES: Self = Self([0; 4096]);
}

/// Alignment of direct I/O in bytes; powers of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Alignment {
    /// Of memory addresses.
    pub(super) memory: u64,
    /// Of file offsets and lengths.
    pub(super) block: u64,
    /// The same for reads, which may be less: a file system that shares blocks between files copies
    /// them when they are written, and whole.
    pub(super) read_block: u64,
}

impl Alignment {
    /// Turns on direct I/O for an open file, and finds out its alignment.
    pub(super) fn begin(file: &File) -> io::Result<Self> {
        let flags = rustix::fs::fcntl_getfl(file)?;
        rustix::fs::fcntl_setfl(file, flags | OFlags::DIRECT)?;
        let unsupported = || io::Error::from(Errno::OPNOTSUPP);
        match reported(file)? {
            Some(reported) => Some(reported).filter(Self::is_usable).ok_or_else(unsupported),
            None => probed(file)?.ok_or_else(unsupported),
        }
    }

    fn is_usable(&self) -> bool {
        let fits = |n: u64| n.is_power_of_two() && n <= MAX_BLOCK;
        fits(self.memory) && fits(self.block) && fits(self.read_block) && self.read_block <= self.block
    }

    /// Whether the file takes a transfer of these pieces.
    fn suits(&self, pieces: &[HostSlice]) -> bool {
        let unaligned = |piece: &HostSlice| {
            (piece.ptr as u64) & (self.memory - 1) | (piece.len as u64) & (self.block - 1)
        };
        pieces.iter().all(|piece| unaligned(piece) == 0)
    }
}

/// STATX_DIO_READ_ALIGN of linux/stat.h (Linux 6.14).
const DIO_READ_ALIGN: StatxFlags = StatxFlags::from_bits_retain(0x2_0000);

/// The alignment that the kernel reports (Linux 6.1, most file systems).
///
/// Zeroes: no direct I/O.
fn reported(file: &File) -> io::Result<Option<Alignment>> {
    let wanted = StatxFlags::DIOALIGN | DIO_READ_ALIGN;
    let known = match rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, wanted) {
        Ok(known) => known,
        Err(Errno::NOSYS) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let block = u64::from(known.stx_dio_offset_align).max(paravane_spec::blk::SECTOR);
    let reads = known.stx_mask & DIO_READ_ALIGN.bits() != 0 && known.stx_dio_read_offset_align != 0;
    let read_block = match reads {
        true => u64::from(known.stx_dio_read_offset_align).max(paravane_spec::blk::SECTOR),
        false => block,
    };
    Ok((known.stx_mask & StatxFlags::DIOALIGN.bits() != 0).then(|| Alignment {
        memory: known.stx_dio_mem_align.into(),
        block,
        read_block,
    }))
}

/// The least alignment that works, found by reading.
fn probed(file: &File) -> io::Result<Option<Alignment>> {
    let mut room = [Page::ZEROES; 2];
    for align in [512, 4096] {
        // Aligned to this and to no more.
        let buffer = &mut room.as_mut_bytes()[align..2 * align];
        match file.read_at(buffer, align as u64) {
            Ok(_) => {
                let align = align as u64;
                return Ok(Some(Alignment { memory: align, block: align, read_block: align }));
            }
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(None)
}

/// A bounce buffer between guest memory and the file, for one request.
pub(super) struct Bounce {
    pages: Vec<Page>,
    /// Part of the present transfer.
    part: HostSlice,
}

impl std::fmt::Debug for Bounce {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Bounce").field("part", &self.part).finish_non_exhaustive()
    }
}

impl Bounce {
    /// Allocates a buffer for a request of `len` bytes.
    ///
    /// `None` if its pieces are aligned.
    ///
    /// # Errors
    /// The host has no memory.
    pub(super) fn for_pieces(
        pieces: &[HostSlice],
        len: u32,
        alignment: Option<Alignment>,
    ) -> Result<Option<Box<Self>>, TryReserveError> {
        if alignment.is_none_or(|alignment| alignment.suits(pieces)) {
            return Ok(None);
        }
        let count = u64::from(len).min(AT_ONCE).div_ceil(size_of::<Page>() as u64) as usize;
        let mut pages = Vec::new();
        pages.try_reserve_exact(count)?;
        pages.resize(count, Page::ZEROES);
        let part = HostSlice { ptr: pages.as_mut_bytes().as_mut_ptr(), len: 0 };
        Ok(Some(Box::new(Self { pages, part })))
    }

    /// Memory of the next transfer, of `left` bytes. Valid until the next call.
    pub(super) fn part(&mut self, left: u64) -> &mut HostSlice {
        let room = self.pages.as_mut_bytes();
        let len = left.min(room.len() as u64) as usize;
        self.part = HostSlice { ptr: room.as_mut_ptr(), len };
        &mut self.part
    }

    /// Fills the buffer for the next write, of `left` bytes.
    ///
    /// # Safety
    /// As [`gather`].
    pub(super) unsafe fn copy_in(&mut self, pieces: &[HostSlice], left: u64) {
        let len = self.part(left).len;
        // SAFETY: the caller's promise.
        unsafe { gather(pieces, 0, &mut self.pages.as_mut_bytes()[..len]) };
    }

    /// Copies the first `moved` bytes that were read to the pieces.
    ///
    /// # Safety
    /// As [`scatter`].
    pub(super) unsafe fn copy_out(&mut self, moved: usize, pieces: &[HostSlice]) {
        let bytes = self.pages.as_bytes();
        // SAFETY: the caller's promise.
        unsafe { scatter(pieces, 0, &bytes[..moved.min(bytes.len())]) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(ptr: usize, len: usize) -> HostSlice {
        HostSlice { ptr: std::ptr::without_provenance_mut(ptr), len }
    }

    #[test]
    fn what_is_aligned_needs_no_buffer() {
        let alignment = Some(Alignment { memory: 4, block: 512, read_block: 512 });
        let needs =
            |pieces: &[HostSlice], alignment| Bounce::for_pieces(pieces, 512, alignment).unwrap().is_some();
        assert!(!needs(&[piece(0x1004, 512), piece(0x9ffc, 4096)], alignment));
        assert!(needs(&[piece(0x1002, 512)], alignment));
        assert!(needs(&[piece(0x1000, 512), piece(0x2001, 512)], alignment));
        assert!(needs(&[piece(0x1000, 256), piece(0x2000, 256)], alignment));
        assert!(!needs(&[piece(0x1001, 3)], None));
    }

    #[test]
    fn the_smallest_alignment_that_works_is_found() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(16384).unwrap();
        // Without O_DIRECT anything works, so the first try does.
        let alignment = |memory, block, read_block| Alignment { memory, block, read_block };
        assert_eq!(probed(file.as_file()).unwrap(), Some(alignment(512, 512, 512)));
        assert!(alignment(4, 4096, 512).is_usable());
        assert!(!alignment(0, 0, 0).is_usable(), "which is how the kernel says no");
        assert!(!alignment(512, 65536, 65536).is_usable());
        assert!(!alignment(512, 512, 4096).is_usable());
    }
}
