//! Which guest-physical pages devices have written.
//!
//! ```text
//!   device                                 whoever copies the memory
//!   1. write the data                      1. harvest: exchange the word with 0
//!   2. full fence (once a batch)           2. full fence
//!   3. bit set? done : set it              3. copy the pages that were found
//! ```
//! **The data comes first, the mark second.** A mark that is harvested has its data visible: the fences release and
//! acquire. A mark that comes after the harvest is found by the next one. What is left is the mark that is not made
//! because the bit is still set: the device loads the bit, the harvest exchanges it, and the page is copied - without
//! the data, if the device's store may still be waiting behind its load. That is the store-buffering shape, and the two
//! full fences forbid it: if the load of step 3 saw the bit from before the exchange, the copy sees the data.
//!
//! A mark *before* the data would be wrong whatever the fences: harvest and copy can fall between the two.
//!
//! The fence is what makes the relaxed test sound, and it is dear beside a write of 4 bytes. So a guard remembers what
//! it has written ([`PendingMarks`](crate::pending_marks::PendingMarks)) and marks that together, at the latest when it is
//! closed. A harvest never waits for anyone; after the last guard was closed, one more harvest has everything. The
//! same holds when the one who harvests is another process (vhost's log): it needs the same exchange and fence.
use crate::sync::{AtomicU64, fence};
use crate::words::{WORD_BITS, Words};
#[cfg(not(any(loom, miri)))]
use crate::{Alarm, MappingQuota};
use crate::{DirtyPages, LogError};
use std::ops::Range;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The smallest page of a log, and the page of vhost's.
pub(crate) const LOG_PAGE: u64 = 4096;

/// Addresses up to this can be logged: a bitmap of 8 GiB of address space, hardly any of it touched.
const MOST: u64 = 1 << 48;

/// A bitmap of guest-physical pages, one bit a page from address 0: page n is bit n % 64 of word n / 64. In memory that
/// can be shared by descriptor: with pages of 4 KiB it is vhost's log as it stands.
#[derive(Debug)]
pub struct DirtyLog {
    words: Words,
    shift: u32,
}

impl DirtyLog {
    /// A clean log for addresses below `end`, with pages of `page_size` bytes (a power of two, 4096 at least).
    ///
    /// # Errors
    /// No such page size, an end above 2^48, or the host refuses the memory.
    pub fn new(end: u64, page_size: u64) -> Result<Arc<Self>, LogError> {
        let shift = shift_of(page_size)?;
        if end > MOST {
            return Err(LogError::Addresses { end, most: MOST });
        }
        let words = end.div_ceil(page_size).div_ceil(WORD_BITS);
        Ok(Arc::new(Self { words: Words::new(words as usize)?, shift }))
    }

    /// A log in memory that another process made and harvests: `size` bytes of `file` from `offset` on, both
    /// multiples of 8, one bit for each 4 KiB (vhost's log). What is set there stays set.
    ///
    /// # Errors
    /// The file is shorter, or is not sealed against shrinking.
    pub fn attach(file: OwnedFd, offset: u64, size: u64) -> Result<Arc<Self>, LogError> {
        let count = usize::try_from(size / 8).unwrap_or(usize::MAX);
        Ok(Arc::new(Self { words: Words::attach(file, offset, count)?, shift: LOG_PAGE.trailing_zeros() }))
    }

    /// As [`DirtyLog::attach`], of a file that need not be sealed. If it shrinks, a mark that finds that out is not the end of
    /// this process: the log is [`lost`](DirtyLog::lost), and `alarm` rings. What is mapped is counted in `quota`.
    ///
    /// # Errors
    /// The file is shorter, the quota is used up, or the process has no room for one more guarded mapping.
    #[cfg(not(any(loom, miri)))]
    pub fn guarded(
        file: OwnedFd,
        offset: u64,
        size: u64,
        alarm: &Arc<Alarm>,
        quota: &MappingQuota,
    ) -> Result<Arc<Self>, LogError> {
        let count = usize::try_from(size / 8).unwrap_or(usize::MAX);
        let words = Words::guarded(file, offset, count, alarm, quota)?;
        Ok(Arc::new(Self { words, shift: LOG_PAGE.trailing_zeros() }))
    }

    /// Whether its file has been taken away: what was marked in it is not known to anybody any more, so that a migration that
    /// goes by it must fail.
    #[must_use]
    pub fn lost(&self) -> bool {
        self.words.lost()
    }

    /// Bytes of a page.
    #[must_use]
    pub fn page_size(&self) -> u64 {
        1 << self.shift
    }

    /// The first address that it has no bit for.
    #[must_use]
    pub fn end(&self) -> u64 {
        (self.words.words().len() as u64 * WORD_BITS) << self.shift
    }

    /// The file with the bits, for the process that is to harvest them (vhost: `VHOST_USER_SET_LOG_BASE`). Sealed
    /// against changes of size.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.words.fd()
    }

    /// Bytes of the bitmap in [`DirtyLog::fd`].
    #[must_use]
    pub fn size(&self) -> u64 {
        self.words.words().len() as u64 * 8
    }

    #[inline(always)]
    pub(crate) fn shift(&self) -> u32 {
        self.shift
    }

    /// Marks the pages of `gpa .. gpa + len`; the caller has made the fence. What is not in the log is left out: memory
    /// that is gone.
    pub(crate) fn mark(&self, gpa: u64, len: u64) {
        if len > 0 {
            self.mark_pages(gpa >> self.shift, gpa.saturating_add(len - 1) >> self.shift);
        }
    }

    /// Whether the page of `gpa` is marked at the moment.
    #[inline(always)]
    pub(crate) fn is_marked(&self, gpa: u64) -> bool {
        let page = gpa >> self.shift;
        let word = self.words.words().get((page / WORD_BITS) as usize);
        // Relaxed: it may have changed when the caller looks at the answer. One who has made the fence and finds it set
        // need not set it: as in `mark_pages`.
        word.is_some_and(|word| word.load(Ordering::Relaxed) >> (page % WORD_BITS) & 1 != 0)
    }

    /// Marks the page around an address; the caller has made the fence. One that is not in the log is left out.
    pub(crate) fn mark_page_of(&self, gpa: u64) {
        let page = gpa >> self.shift;
        if let Some(word) = self.words.words().get((page / WORD_BITS) as usize)
            && !self.is_marked(gpa)
        {
            // Relaxed: as in `mark_pages`.
            word.fetch_or(1 << (page % WORD_BITS), Ordering::Relaxed);
        }
    }

    /// Marks pages `first..=last`; the caller has made the fence.
    pub(crate) fn mark_pages(&self, first: u64, last: u64) {
        let words = self.words.words();
        let from = (first / WORD_BITS) as usize;
        let to = ((last / WORD_BITS) as usize).min(words.len().saturating_sub(1));
        let Some(words) = words.get(from..=to) else { return };
        for (number, word) in (first / WORD_BITS..).zip(words) {
            let mask = mask(first, last, number);
            // Relaxed: ordered after the data by the fence that was made.
            if word.load(Ordering::Relaxed) & mask != mask {
                // Relaxed: the same fence releases the data; it pairs with the one behind the exchange in `harvest`.
                word.fetch_or(mask, Ordering::Relaxed);
            }
        }
    }

    /// Takes the marks of the pages that `pages` covers, clears them here and adds them there. Only what changes
    /// between two harvests is in the second. See the head of the module for what may be copied afterwards.
    ///
    /// A page of the log that is larger than those of `pages` sets them all. Of a page that `pages` covers in part,
    /// the mark is taken as well: cover whole pages of the log, as regions do.
    pub fn harvest(&self, pages: &mut DirtyPages) {
        let Range { start, end } = pages.range();
        if start == end {
            return;
        }
        let (first, last) = (start >> self.shift, (end - 1) >> self.shift);
        let words = self.words.words();
        let from = (first / WORD_BITS) as usize;
        for (number, word) in (first / WORD_BITS..=last / WORD_BITS).zip(words.iter().skip(from)) {
            let found = take(word, mask(first, last, number));
            pages.add_word(number * WORD_BITS, self.shift, found);
        }
        // Pairs with the fence before the test and the mark in `mark_pages`: what the caller copies from here on is
        // at least as new as what any device had written whose mark was found, or that found its bit still set.
        fence(Ordering::SeqCst);
    }
}

/// Clears the bits of `mask` and returns those that were set.
fn take(word: &AtomicU64, mask: u64) -> u64 {
    // Relaxed: a mark that is not seen yet is found by the next harvest, and a clean word need not be written.
    if word.load(Ordering::Relaxed) & mask == 0 {
        return 0;
    }
    // Relaxed: the fence at the end of `harvest` acquires what the marks' own fence released.
    if mask == u64::MAX {
        word.swap(0, Ordering::Relaxed)
    } else {
        word.fetch_and(!mask, Ordering::Relaxed) & mask
    }
}

/// Bits of word `number` that stand for pages `first..=last`.
fn mask(first: u64, last: u64, number: u64) -> u64 {
    let start = number * WORD_BITS;
    let low = first.saturating_sub(start).min(WORD_BITS - 1) as u32;
    let high = (last - start).min(WORD_BITS - 1) as u32;
    (u64::MAX << low) & (u64::MAX >> (WORD_BITS as u32 - 1 - high))
}

/// The power of two that `page_size` is.
pub(crate) fn shift_of(page_size: u64) -> Result<u32, LogError> {
    if page_size < LOG_PAGE || !page_size.is_power_of_two() {
        return Err(LogError::PageSize(page_size));
    }
    Ok(page_size.trailing_zeros())
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_mask_has_the_pages_of_its_word() {
        assert_eq!(mask(0, 63, 0), u64::MAX);
        assert_eq!(mask(3, 3, 0), 8);
        assert_eq!(mask(62, 65, 0), 3 << 62);
        assert_eq!(mask(62, 65, 1), 3);
        assert_eq!(mask(10, 1000, 5), u64::MAX);
    }

    #[test]
    fn marks_beyond_the_end_are_dropped() {
        let log = DirtyLog::new(64 * 4096, 4096).expect("a log");
        log.mark(63 * 4096, 1 << 30);
        log.mark(64 * 4096, 1);
        log.mark(u64::MAX - 3, 4);
        let mut pages = DirtyPages::new(0, 64 * 4096, 4096).expect("pages");
        log.harvest(&mut pages);
        assert_eq!(pages.words(), [1 << 63]);
    }
}
