//! Copies a disk to another image, without its zeroes.
use super::{Disk, Extent, ImageError};
use paravane_spec::blk::SECTOR;
use std::ops::{ControlFlow, Range};

/// Bytes that are copied at once: a multiple of every cluster.
const AT_ONCE: u64 = 2 << 20;
/// Bytes that are zeroed at once, in case that only writes can.
const ZEROED_AT_ONCE: u64 = 128 << 20;
/// Zeroes within data that are worth a request of their own, in bytes.
const GAP: u64 = 64 << 10;
/// Bytes that are compared at once.
const ZEROES: [u8; 4096] = [0; 4096];

/// What the target of a copy holds before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// It reads as zeroes.
    Zeroes,
    /// It may hold anything. What lies beyond the end of the source is zeroed, too.
    Unknown,
}

/// Copies `from` to `to`.
///
/// Zeroes of the source are not read where its layers tell of them, and not written where `to` is known
/// to read as zeroes. `watch` is told how far the copy is, in bytes of the disk, and may end it. The
/// copy is durable at the end. Returns the number of bytes of data written.
///
/// # Errors
/// Reading or writing failed, or [`ImageError::Stopped`]. Then the target is incomplete.
pub fn copy(
    from: &Disk,
    to: &Disk,
    content: Content,
    watch: &mut dyn FnMut(u64) -> ControlFlow<()>,
) -> Result<u64, ImageError> {
    let size = from.size();
    if to.size() < size {
        return Err(ImageError::Small { path: to.path().to_owned(), target: to.size(), source_size: size });
    }
    let (end, grain) = match content {
        Content::Zeroes => (size, to.grain()),
        Content::Unknown => (to.size(), to.grain().max(GAP)),
    };
    let mut copy = Copy { from, to, content, grain: grain.min(AT_ONCE), end, watch, written: 0 };
    copy.run()?;
    to.sync()?;
    let _ = (copy.watch)(end);
    Ok(copy.written)
}

struct Copy<'a> {
    from: &'a Disk,
    to: &'a Disk,
    content: Content,
    /// Zeroes of fewer bytes are written with the data around them.
    grain: u64,
    /// Where the copy ends. From the end of the source on, there are zeroes.
    end: u64,
    watch: &'a mut dyn FnMut(u64) -> ControlFlow<()>,
    written: u64,
}

impl Copy<'_> {
    fn run(&mut self) -> Result<(), ImageError> {
        // What is written begins and ends at blocks of the target.
        let block = match self.content {
            Content::Zeroes => SECTOR,
            Content::Unknown => self.to.block(),
        };
        let mut buffer = vec![0; AT_ONCE.min(self.end) as usize];
        let mut at = 0;
        while at < self.end {
            let (is_data, end) = self.extent(at)?;
            let whole = end / block * block;
            if !is_data && (whole > at || end == self.end) {
                let end = if end == self.end { end } else { whole };
                self.zeroes(at..end)?;
                at = end;
                continue;
            }
            let end = end.next_multiple_of(block).min(self.end);
            while at < end {
                // To a border of the target's clusters, so that each is written once.
                let next = end.min((at + 1).next_multiple_of(AT_ONCE));
                self.watch(at)?;
                self.data(&mut buffer[..(next - at) as usize], at)?;
                at = next;
            }
        }
        Ok(())
    }

    /// Whether there is data in the source at `at`, and where that ends.
    fn extent(&self, at: u64) -> Result<(bool, u64), ImageError> {
        match self.from.size().checked_sub(at) {
            Some(left @ 1..) => {
                let (extent, len) = self.from.extent(at, left)?;
                let end = at + len;
                let is_data = extent == Extent::Data;
                // Zeroes at the end of the source go on beyond it.
                Ok((is_data, if !is_data && len == left { self.end } else { end }))
            }
            _ => Ok((false, self.end)),
        }
    }

    /// Reads as much as `data` has room for, and writes the grains that are not all zeroes.
    fn data(&mut self, data: &mut [u8], offset: u64) -> Result<(), ImageError> {
        let inside = (self.from.size() - offset).min(data.len() as u64) as usize;
        self.from.read(&mut data[..inside], offset)?;
        data[inside..].fill(0);
        let data = &*data;
        let (len, grain) = (data.len() as u64, self.grain);
        let end_of_grain = |at: u64| ((offset + at + 1).next_multiple_of(grain) - offset).min(len);
        let is_zero = |from: u64, to: u64| {
            data[from as usize..to as usize].chunks(ZEROES.len()).all(|part| part == &ZEROES[..part.len()])
        };
        let mut at = 0;
        while at < len {
            let zero = is_zero(at, end_of_grain(at));
            let mut end = end_of_grain(at);
            while end < len && is_zero(end, end_of_grain(end)) == zero {
                end = end_of_grain(end);
            }
            match zero {
                true => self.zeroes(offset + at..offset + end)?,
                false => {
                    self.to.write(&data[at as usize..end as usize], offset + at)?;
                    self.written += end - at;
                }
            }
            at = end;
        }
        Ok(())
    }

    /// Makes a range of the target read as zeroes, where it is not known to.
    fn zeroes(&mut self, range: Range<u64>) -> Result<(), ImageError> {
        self.watch(range.start)?;
        let mut at = range.start;
        while self.content == Content::Unknown && at < range.end {
            let (extent, len) = self.to.extent(at, range.end - at)?;
            let len = match extent {
                Extent::Data => {
                    let len = len.min(ZEROED_AT_ONCE);
                    self.to.zero(at, len)?;
                    len
                }
                _ => len,
            };
            at += len;
            self.watch(at)?;
        }
        Ok(())
    }

    fn watch(&mut self, at: u64) -> Result<(), ImageError> {
        if (self.watch)(at).is_break() { Err(ImageError::Stopped) } else { Ok(()) }
    }
}
