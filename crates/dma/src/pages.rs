//! Dirty pages taken from a log: reported, merged and counted.
use crate::LogError;
use crate::bitmap::{WORD_BITS, bits, shift_of};
use std::ops::Range;

/// Set of pages of one range of guest-physical memory.
///
/// [`DirtyPages::words`] has the format of KVM_GET_DIRTY_LOG, of QEMU's bitmaps and of VFIO's DMA
/// logging report: page n of the range is bit n % 64 of word n / 64. Bits beyond the end of the
/// range are 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirtyPages {
    start: u64,
    end: u64,
    shift: u32,
    words: Vec<u64>,
}

impl DirtyPages {
    /// Makes an empty set for `gpa .. gpa + len`, in pages of `page_size` bytes.
    ///
    /// `page_size` is a power of two, at least 4096; `gpa` is a multiple of it; the last page may
    /// be partial.
    ///
    /// # Errors
    /// The page size is invalid, the range starts inside a page, or it ends beyond the address
    /// space.
    pub fn new(gpa: u64, len: u64, page_size: u64) -> Result<Self, LogError> {
        let shift = shift_of(page_size)?;
        let Some(end) = gpa.checked_add(len).filter(|_| gpa.is_multiple_of(page_size)) else {
            return Err(LogError::Range { gpa, len, page_size });
        };
        let words = len.div_ceil(page_size).div_ceil(WORD_BITS);
        Ok(Self { start: gpa, end, shift, words: vec![0; words as usize] })
    }

    /// Address range of the set.
    #[must_use]
    pub fn range(&self) -> Range<u64> {
        self.start..self.end
    }

    /// Page size in bytes.
    #[must_use]
    pub fn page_size(&self) -> u64 {
        1 << self.shift
    }

    /// Bitmap of the set.
    #[must_use]
    pub fn words(&self) -> &[u64] {
        &self.words
    }

    /// Number of pages in the set.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.words.iter().map(|word| u64::from(word.count_ones())).sum()
    }

    /// Whether the page at `gpa` is in the set.
    #[must_use]
    pub fn contains(&self, gpa: u64) -> bool {
        let Some(page) = gpa.checked_sub(self.start).map(|at| at >> self.shift) else { return false };
        self.words.get((page / WORD_BITS) as usize).is_some_and(|word| word >> (page % WORD_BITS) & 1 != 0)
    }

    /// Addresses of the pages in the set, ascending.
    pub fn iter(&self) -> impl Iterator<Item = u64> {
        self.words.iter().zip(0_u64..).flat_map(move |(&word, number)| {
            bits(word).map(move |bit| self.start + ((number * WORD_BITS + bit) << self.shift))
        })
    }

    /// Removes all pages.
    pub fn clear(&mut self) {
        self.words.fill(0);
    }

    /// Adds a bitmap of the same range in pages of `page_size` bytes.
    ///
    /// KVM's log of a memory slot, for example.
    ///
    /// Ignores pages beyond the range.
    ///
    /// # Errors
    /// The page size is invalid.
    pub fn merge(&mut self, bitmap: &[u64], page_size: u64) -> Result<(), LogError> {
        let shift = shift_of(page_size)?;
        for (&word, number) in bitmap.iter().zip(0_u64..) {
            self.add_relative(number * WORD_BITS, shift, word);
        }
        Ok(())
    }

    /// Adds these pages to a bitmap.
    ///
    /// `bitmap` covers `gpa .. gpa + len` in pages of `page_size` bytes.
    ///
    /// As VFIO_DEVICE_FEATURE_DMA_LOGGING_REPORT, it only sets bits. A larger page is set
    /// if any part of it is in the set; of smaller pages all parts are set.
    ///
    /// # Errors
    /// The page size is invalid, or the bitmap is too short.
    pub fn report(&self, gpa: u64, len: u64, page_size: u64, bitmap: &mut [u64]) -> Result<(), LogError> {
        let mut wanted = Self::new(gpa, len, page_size)?;
        if bitmap.len() < wanted.words.len() {
            return Err(LogError::Bitmap { words: bitmap.len() as u64, needed: wanted.words.len() as u64 });
        }
        for addr in self.iter() {
            wanted.add(addr, self.shift);
        }
        for (theirs, ours) in bitmap.iter_mut().zip(&wanted.words) {
            *theirs |= ours;
        }
        Ok(())
    }

    /// Adds a word of a log whose bit 0 is page `page` of all memory.
    pub(crate) fn add_word(&mut self, page: u64, shift: u32, word: u64) {
        if word == 0 {
            return;
        }
        let start = self.start >> shift;
        if shift == self.shift && page >= start && (page - start).is_multiple_of(WORD_BITS) {
            return self.add_relative(page - start, shift, word);
        }
        for bit in bits(word) {
            self.add((page + bit) << shift, shift);
        }
    }

    /// Adds a word whose bit 0 is page `page` of the range.
    fn add_relative(&mut self, page: u64, shift: u32, word: u64) {
        if shift == self.shift {
            // Pages of the same size: a word at a time.
            let pages = (self.end - self.start).div_ceil(1 << shift);
            if let Some(ours) = self.words.get_mut((page / WORD_BITS) as usize) {
                let beyond = (page + WORD_BITS).saturating_sub(pages).min(WORD_BITS);
                *ours |= word & u64::MAX.checked_shr(beyond as u32).unwrap_or(0);
            }
            return;
        }
        for bit in bits(word) {
            let Some(addr) = (page + bit).checked_mul(1 << shift).and_then(|at| at.checked_add(self.start))
            else {
                return;
            };
            self.add(addr, shift);
        }
    }

    /// Adds a page of 1 << `shift` bytes at `addr`, as far as it is inside.
    fn add(&mut self, addr: u64, shift: u32) {
        let last = addr.saturating_add((1 << shift) - 1).min(self.end.saturating_sub(1));
        let first = addr.max(self.start);
        if first > last {
            return;
        }
        for page in (first - self.start) >> self.shift..=(last - self.start) >> self.shift {
            if let Some(word) = self.words.get_mut((page / WORD_BITS) as usize) {
                *word |= 1 << (page % WORD_BITS);
            }
        }
    }
}
