//! Which pages of an image in memory are present.
use rustix::fs::SeekFrom;
use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use zerocopy::FromZeros;

/// Bytes that one bit covers; a page of the host has one or several.
const PAGE: u64 = 4096;
/// Most runs of data that are looked for.
///
/// Data behind them counts as missing until it is written.
const MOST_RUNS: usize = 1 << 16;
/// Most bytes of an image that are tracked: 1 TiB, whose bits take 32 MiB.
///
/// A sparse image may have any size. Pages beyond count as missing.
pub(super) const MOST_TRACKED: u64 = 1 << 40;

/// A bit for each present page. Each is a hint, which may be stale.
#[derive(Debug)]
pub struct PresentPages {
    words: Box<[AtomicU64]>,
    /// Bytes of the image.
    pub(super) len: u64,
    /// Bytes from the start of the image that have bits.
    tracked: u64,
}

impl PresentPages {
    /// Looks for data in a file of `len` bytes. Takes a millisecond for each 25 MB of data.
    ///
    /// Stale where another process writes or discards meanwhile.
    ///
    /// # Errors
    /// The host has no memory for the bits, or the file cannot be read.
    pub fn find(file: &File, len: u64) -> io::Result<Self> {
        let present = Self::none(len)?;
        let mut at = 0;
        for _ in 0..MOST_RUNS {
            // ENXIO: there is no more data.
            let seek = |to| match rustix::fs::seek(file, to) {
                Err(Errno::NXIO) => Ok(None),
                found => Ok::<_, io::Error>(Some(found?)),
            };
            let Some(data) = seek(SeekFrom::Data(at))? else { break };
            let Some(hole) = seek(SeekFrom::Hole(data))? else { break };
            present.note(data..hole, true);
            at = hole;
        }
        Ok(present)
    }

    fn none(len: u64) -> io::Result<Self> {
        let tracked = len.min(MOST_TRACKED);
        let words = tracked.div_ceil(PAGE).div_ceil(64);
        let words = <[AtomicU64]>::new_box_zeroed_with_elems(words as usize);
        Ok(Self { words: words.map_err(|_| io::ErrorKind::OutOfMemory)?, len, tracked })
    }

    /// Words and masks of the bits for a range of bytes.
    ///
    /// The range is not empty, and tracked.
    fn masks(&self, bytes: Range<u64>) -> impl Iterator<Item = (&AtomicU64, u64)> {
        let (first, last) = (bytes.start / PAGE, (bytes.end - 1) / PAGE);
        (first / 64..=last / 64).map(move |word| {
            let from = first.max(word * 64) % 64;
            let to = last.min(word * 64 + 63) % 64;
            (&self.words[word as usize], (u64::MAX << from) & (u64::MAX >> (63 - to)))
        })
    }

    /// Whether all pages of a range of bytes are present.
    #[inline]
    pub(super) fn all(&self, bytes: Range<u64>) -> bool {
        // Relaxed: a hint. A thread that relies on written data is ordered after it by
        // other means.
        !bytes.is_empty()
            && bytes.end <= self.tracked
            && self.masks(bytes).all(|(word, mask)| word.load(Ordering::Relaxed) & mask == mask)
    }

    /// Records that the pages of a range of bytes are present, or that some are not.
    pub(super) fn note(&self, bytes: Range<u64>, present: bool) {
        let bytes = bytes.start..bytes.end.min(self.tracked);
        if bytes.is_empty() {
            return;
        }
        for (word, mask) in self.masks(bytes) {
            // Relaxed: as above.
            match present {
                true => word.fetch_or(mask, Ordering::Relaxed),
                false => word.fetch_and(!mask, Ordering::Relaxed),
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_noted_whole() {
        let pages = PresentPages::none(300 * PAGE + 512).unwrap();
        assert!(!pages.all(0..1));
        pages.note(PAGE + 1..PAGE + 2, true);
        assert!(
            pages.all(PAGE..2 * PAGE) && !pages.all(PAGE - 1..PAGE + 1) && !pages.all(PAGE..2 * PAGE + 1)
        );
        pages.note(60 * PAGE..200 * PAGE, true);
        assert!(pages.all(60 * PAGE..200 * PAGE) && pages.all(64 * PAGE..128 * PAGE));
        assert!(!pages.all(59 * PAGE..200 * PAGE) && !pages.all(60 * PAGE..200 * PAGE + 1));
        pages.note(128 * PAGE - 1..128 * PAGE, false);
        assert!(!pages.all(60 * PAGE..200 * PAGE));
        assert!(pages.all(60 * PAGE..127 * PAGE) && pages.all(128 * PAGE..200 * PAGE));
        // The last page is a part, and nothing is behind it.
        pages.note(0..u64::MAX, true);
        assert!(pages.all(0..300 * PAGE + 512));
        assert!(!pages.all(300 * PAGE..300 * PAGE + 513) && !pages.all(u64::MAX - 1..u64::MAX));
        assert!(!pages.all(5..5), "nothing is not there");
        pages.note(400 * PAGE..500 * PAGE, true);
    }
    #[test]
    fn an_image_of_any_size_takes_bounded_memory() {
        for len in [1 << 50, 1 << 60, i64::MAX as u64, u64::MAX] {
            let pages = PresentPages::none(len).unwrap();
            assert_eq!((pages.words.len() as u64 * 8, pages.len), (32 << 20, len));
            pages.note(0..u64::MAX, true);
            assert!(pages.all(MOST_TRACKED - PAGE..MOST_TRACKED));
            assert!(!pages.all(MOST_TRACKED - PAGE..MOST_TRACKED + 1), "the rest is not tracked");
            assert!(!pages.all(len - 1..len));
            pages.note(MOST_TRACKED..u64::MAX, false);
        }
    }
}
