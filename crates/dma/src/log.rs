//! Dirty log: the guest-physical pages that devices have written.
use crate::bitmap::{LOG_PAGE, WORD_BITS, mask, shift_of};
use crate::sync::{AtomicU64, fence};
use crate::words::Words;
#[cfg(not(any(loom, miri)))]
use crate::{Alarm, MappingQuota};
use crate::{DirtyPages, LogError};
use std::ops::Range;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Highest end of a log.
///
/// Its bitmap takes 8 GiB of address space; untouched pages take no memory.
const MAX_END: u64 = 1 << 48;

/// Bitmap of guest-physical pages, one bit per page from address 0.
///
/// Page n is bit n % 64 of word n / 64. The memory can be shared by descriptor: with pages of 4 KiB
/// it has the format of vhost's log.
///
/// # Order
///
/// ```text
///   device                                 the process that copies the memory
///   1. write the data                      1. harvest: exchange the word with 0
///   2. full fence (once per batch)         2. full fence
///   3. bit set? done : set it              3. copy the pages that were found
/// ```
/// **Data first, mark second.** A harvested mark has its data visible: the fences release and
/// acquire. A mark made after the harvest is found by the next one. The remaining case is a mark
/// that is not made because the bit is still set: the device loads the bit, the harvest exchanges
/// it, and the page is copied, without the data if the device's store may still wait behind its
/// load. That is the store-buffering shape, and the two full fences forbid it: if the load of step
/// 3 saw the bit from before the exchange, the copy sees the data.
///
/// A mark *before* the data would be wrong with any fences: harvest and copy can fall between the
/// two.
///
/// The fence makes the relaxed test sound, and is expensive relative to a write of 4 bytes. So an
/// access guard notes its writes (`PendingMarks`) and marks
/// them together, at the latest when it is dropped. A harvest never waits; after the last guard was
/// dropped, one more harvest finds everything. The same holds if another process harvests (vhost's
/// log): it needs the same exchange and fence.
#[derive(Debug)]
pub struct DirtyLog {
    words: Words,
    shift: u32,
}

impl DirtyLog {
    /// Makes a clean log for addresses below `end`.
    ///
    /// `page_size` is in bytes, a power of two, at least 4096.
    ///
    /// # Errors
    /// The page size is invalid, `end` is above 2^48, or the host refuses the memory.
    pub fn new(end: u64, page_size: u64) -> Result<Arc<Self>, LogError> {
        let shift = shift_of(page_size)?;
        if end > MAX_END {
            return Err(LogError::Addresses { end, most: MAX_END });
        }
        let words = end.div_ceil(page_size).div_ceil(WORD_BITS);
        Ok(Arc::new(Self { words: Words::new(words as usize)?, shift }))
    }

    /// Attaches to a log that another process made and harvests (vhost's log).
    ///
    /// Maps `size` bytes of `file` from `offset` on, both multiples of 8, one bit per 4 KiB. Set
    /// bits stay set.
    ///
    /// # Errors
    /// The file is shorter, or is not sealed against shrinking.
    pub fn attach(file: OwnedFd, offset: u64, size: u64) -> Result<Arc<Self>, LogError> {
        let count = usize::try_from(size / 8).unwrap_or(usize::MAX);
        Ok(Arc::new(Self { words: Words::attach(file, offset, count)?, shift: LOG_PAGE.trailing_zeros() }))
    }

    /// As [`DirtyLog::attach`], for a file that need not be sealed.
    ///
    /// If the file shrinks, an access to the missing part does not end this process: the log
    /// becomes [`lost`](DirtyLog::lost), and `alarm` is raised. The mapping counts in `quota`.
    ///
    /// # Errors
    /// The file is shorter, the quota is used up, or the process has no room for one more protected
    /// mapping.
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

    /// Whether the file was truncated.
    ///
    /// Its marks are then lost, and a migration that uses them must fail.
    #[must_use]
    pub fn lost(&self) -> bool {
        self.words.lost()
    }

    /// Page size in bytes.
    #[must_use]
    pub fn page_size(&self) -> u64 {
        1 << self.shift
    }

    /// First address that has no bit.
    #[must_use]
    pub fn end(&self) -> u64 {
        (self.words.words().len() as u64 * WORD_BITS) << self.shift
    }

    /// File with the bits, for the process that harvests them.
    ///
    /// For vhost, send it by `VHOST_USER_SET_LOG_BASE`. It is sealed against changes of size.
    #[must_use]
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.words.fd()
    }

    /// Size in bytes of the bitmap in [`DirtyLog::fd`].
    #[must_use]
    pub fn size(&self) -> u64 {
        self.words.words().len() as u64 * 8
    }

    #[inline(always)]
    pub(crate) fn shift(&self) -> u32 {
        self.shift
    }

    /// Marks the pages of `gpa .. gpa + len`.
    ///
    /// The caller has made the fence. Memory beyond the log was removed, and is ignored.
    pub(crate) fn mark(&self, gpa: u64, len: u64) {
        if len > 0 {
            self.mark_pages(gpa >> self.shift, gpa.saturating_add(len - 1) >> self.shift);
        }
    }

    /// Whether the page of `gpa` is marked now.
    #[inline(always)]
    pub(crate) fn is_marked(&self, gpa: u64) -> bool {
        let page = gpa >> self.shift;
        let word = self.words.words().get((page / WORD_BITS) as usize);
        // Relaxed: it may have changed when the caller looks at the answer. A caller that has made
        // the fence and finds it set need not set it: as in `mark_pages`.
        word.is_some_and(|word| word.load(Ordering::Relaxed) >> (page % WORD_BITS) & 1 != 0)
    }

    /// Marks the page around an address.
    ///
    /// The caller has made the fence. An address beyond the log is ignored.
    pub(crate) fn mark_page_of(&self, gpa: u64) {
        let page = gpa >> self.shift;
        if let Some(word) = self.words.words().get((page / WORD_BITS) as usize)
            && !self.is_marked(gpa)
        {
            // Relaxed: as in `mark_pages`.
            word.fetch_or(1 << (page % WORD_BITS), Ordering::Relaxed);
        }
    }

    /// Marks pages `first..=last`. The caller has made the fence.
    pub(crate) fn mark_pages(&self, first: u64, last: u64) {
        let words = self.words.words();
        let from = (first / WORD_BITS) as usize;
        let to = ((last / WORD_BITS) as usize).min(words.len().saturating_sub(1));
        let Some(words) = words.get(from..=to) else { return };
        for (number, word) in (first / WORD_BITS..).zip(words) {
            let mask = mask(first, last, number);
            // Relaxed: ordered after the data by the fence that was made.
            if word.load(Ordering::Relaxed) & mask != mask {
                // Relaxed: the same fence releases the data; it pairs with the one behind the
                // exchange in `harvest`.
                word.fetch_or(mask, Ordering::Relaxed);
            }
        }
    }

    /// Moves the marks of the pages that `pages` covers from this log to `pages`.
    ///
    /// A second harvest finds only changes since the first. After it returns, the caller may
    /// copy the pages found: [`DirtyLog`] explains why the copy is complete.
    ///
    /// A page of the log that is larger than those of `pages` sets them all. A page that `pages`
    /// covers in part loses its mark too: cover whole pages of the log, as regions do.
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
        // Pairs with the fence before the test and the mark in `mark_pages`: what the caller copies
        // from here on is at least as new as what any device had written whose mark was found, or
        // that found its bit still set.
        fence(Ordering::SeqCst);
    }
}

/// Clears the bits of `mask`; returns those that were set.
fn take(word: &AtomicU64, mask: u64) -> u64 {
    // Relaxed: a mark that is not seen yet is found by the next harvest, and a clean word need not
    // be written.
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

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

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
