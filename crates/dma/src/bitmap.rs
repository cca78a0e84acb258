//! Bitmap format of dirty pages, in logs and reports.
//!
//! Page n is bit n % 64 of word n / 64.
use crate::LogError;

/// Number of bits in a word.
pub(crate) const WORD_BITS: u64 = 64;

/// Smallest page of a log in bytes, and the page of vhost's log.
pub(crate) const LOG_PAGE: u64 = 4096;

/// Base-2 logarithm of `page_size`.
pub(crate) fn shift_of(page_size: u64) -> Result<u32, LogError> {
    if page_size < LOG_PAGE || !page_size.is_power_of_two() {
        return Err(LogError::PageSize(page_size));
    }
    Ok(page_size.trailing_zeros())
}

/// Bits of word `number` that stand for pages `first..=last`.
pub(crate) fn mask(first: u64, last: u64, number: u64) -> u64 {
    let start = number * WORD_BITS;
    let low = first.saturating_sub(start).min(WORD_BITS - 1) as u32;
    let high = (last - start).min(WORD_BITS - 1) as u32;
    (u64::MAX << low) & (u64::MAX >> (WORD_BITS as u32 - 1 - high))
}

/// Indices of the bits that are set.
pub(crate) fn bits(mut word: u64) -> impl Iterator<Item = u64> {
    std::iter::from_fn(move || {
        let bit = (word != 0).then(|| u64::from(word.trailing_zeros()))?;
        word &= word - 1;
        Some(bit)
    })
}

#[cfg(test)]
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
}
