//! Past the host's page cache (O_DIRECT): what a file asks for, and what is done for requests that do not have it.
//!
//! ```text
//!   request --its place on the disk is not aligned--> an I/O error: the driver was told the size of a block
//!      '----its memory is not aligned---------------> a buffer of ours, at most 64 KiB at a time  <-> guest memory
//!      '----------------------------------------------> guest memory, as ever
//! ```
use super::pieces::{gather, scatter};
use paravane_dma::HostSlice;
use rustix::fs::{AtFlags, OFlags, StatxFlags};
use rustix::io::Errno;
use std::collections::TryReserveError;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Largest block that a driver is asked to go by, which is what all guests know; and what any file is content with.
const MAX_BLOCK: u64 = 4096;
/// Most bytes that go through a buffer at once.
const AT_ONCE: u64 = 64 << 10;

/// Memory that is aligned for any file.
#[derive(Clone, Copy, Immutable, IntoBytes, FromBytes, KnownLayout)]
#[repr(C, align(4096))]
pub(super) struct Page([u8; 4096]);

impl Page {
    pub(super) const ZEROES: Self = Self([0; 4096]);
}

/// What transfers past the page cache have to be aligned to, in bytes; powers of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Alignment {
    /// Addresses in memory.
    pub(super) memory: u64,
    /// Offsets in the file, and lengths.
    pub(super) block: u64,
}

impl Alignment {
    /// Makes transfers of this open file go past the page cache, and asks what they have to be aligned to.
    pub(super) fn begin(file: &File) -> io::Result<Self> {
        let flags = rustix::fs::fcntl_getfl(file)?;
        rustix::fs::fcntl_setfl(file, flags | OFlags::DIRECT)?;
        let unsupported = || io::Error::from(Errno::OPNOTSUPP);
        match said(file)? {
            Some(said) => Some(said).filter(Self::is_usable).ok_or_else(unsupported),
            None => tried(file)?.ok_or_else(unsupported),
        }
    }

    fn is_usable(&self) -> bool {
        let fits = |n: u64| n.is_power_of_two() && n <= MAX_BLOCK;
        fits(self.memory) && fits(self.block)
    }

    /// Whether the file takes a transfer of these pieces.
    fn suits(&self, pieces: &[HostSlice]) -> bool {
        let unaligned = |piece: &HostSlice| {
            (piece.ptr as u64) & (self.memory - 1) | (piece.len as u64) & (self.block - 1)
        };
        pieces.iter().all(|piece| unaligned(piece) == 0)
    }
}

/// What the kernel says (from Linux 6.1 on, on most file systems). Zeroes: it cannot be.
fn said(file: &File) -> io::Result<Option<Alignment>> {
    let known = match rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN) {
        Ok(known) => known,
        Err(Errno::NOSYS) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    Ok((known.stx_mask & StatxFlags::DIOALIGN.bits() != 0).then(|| Alignment {
        memory: known.stx_dio_mem_align.into(),
        block: u64::from(known.stx_dio_offset_align).max(paravane_spec::blk::SECTOR),
    }))
}

/// The least that the file takes.
fn tried(file: &File) -> io::Result<Option<Alignment>> {
    let mut room = [Page::ZEROES; 2];
    for align in [512, 4096] {
        // Aligned to this and to no more.
        let buffer = &mut room.as_mut_bytes()[align..2 * align];
        match file.read_at(buffer, align as u64) {
            Ok(_) => return Ok(Some(Alignment { memory: align as u64, block: align as u64 })),
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(None)
}

/// A buffer between guest memory and the file, for one request.
pub(super) struct Bounce {
    pages: Vec<Page>,
    /// The part that the present transfer moves.
    part: HostSlice,
}

impl std::fmt::Debug for Bounce {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Bounce").field("part", &self.part).finish_non_exhaustive()
    }
}

impl Bounce {
    /// For a request of `len` bytes; `None` if the file takes its pieces as they are.
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

    /// What is moved next, of `left` bytes. It stays where it is until it is asked for again.
    pub(super) fn part(&mut self, left: u64) -> &mut HostSlice {
        let room = self.pages.as_mut_bytes();
        let len = left.min(room.len() as u64) as usize;
        self.part = HostSlice { ptr: room.as_mut_ptr(), len };
        &mut self.part
    }

    /// Fills the buffer with what is written next, of `left` bytes.
    ///
    /// # Safety
    /// As [`gather`].
    pub(super) unsafe fn fill(&mut self, pieces: &[HostSlice], left: u64) {
        let len = self.part(left).len;
        // SAFETY: the caller's promise.
        unsafe { gather(pieces, &mut self.pages.as_mut_bytes()[..len]) };
    }

    /// Hands on the first `moved` bytes that were read.
    ///
    /// # Safety
    /// As [`scatter`].
    pub(super) unsafe fn hand_on(&mut self, moved: usize, pieces: &[HostSlice]) {
        let bytes = self.pages.as_bytes();
        // SAFETY: the caller's promise.
        unsafe { scatter(&bytes[..moved.min(bytes.len())], pieces) };
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
        let alignment = Some(Alignment { memory: 4, block: 512 });
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
        assert_eq!(tried(file.as_file()).unwrap(), Some(Alignment { memory: 512, block: 512 }));
        assert!(Alignment { memory: 4, block: 4096 }.is_usable());
        assert!(!Alignment { memory: 0, block: 0 }.is_usable(), "which is how the kernel says no");
        assert!(!Alignment { memory: 512, block: 65536 }.is_usable());
    }
}
