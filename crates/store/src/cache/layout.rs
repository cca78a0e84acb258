//! Where the chunks of an object begin and end.

/// Most chunks of an object: their states take 4 bytes each.
const MOST_CHUNKS: u64 = 1 << 24;

/// An object in chunks of one size; the last one may be shorter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    size: u64,
    shift: u32,
}

impl Layout {
    /// An object of `size` bytes in chunks of `chunk_bytes`.
    ///
    /// # Errors
    /// What is wrong.
    pub(crate) fn new(size: u64, chunk_bytes: u32) -> Result<Self, String> {
        if !chunk_bytes.is_power_of_two() || !(4 << 10..=4 << 20).contains(&chunk_bytes) {
            return Err(format!(
                "a chunk has {chunk_bytes} bytes; it must be a power of two from 4096 to 4194304"
            ));
        }
        let layout = Self { size, shift: chunk_bytes.trailing_zeros() };
        if size >> layout.shift >= MOST_CHUNKS {
            let most = MOST_CHUNKS << layout.shift;
            return Err(format!(
                "has {size} bytes; with chunks of {chunk_bytes} bytes an object has less than {most}"
            ));
        }
        Ok(layout)
    }

    /// Bytes of the object.
    pub(crate) fn size(self) -> u64 {
        self.size
    }

    /// Bytes of a chunk.
    pub(crate) fn chunk_bytes(self) -> u32 {
        1 << self.shift
    }

    /// Number of chunks.
    pub(crate) fn count(self) -> u64 {
        self.size.div_ceil(u64::from(self.chunk_bytes()))
    }

    /// Where a chunk begins.
    pub(crate) fn start(self, chunk: u64) -> u64 {
        chunk << self.shift
    }

    /// Bytes of one chunk.
    pub(crate) fn len(self, chunk: u64) -> usize {
        (self.size - self.start(chunk)).min(u64::from(self.chunk_bytes())) as usize
    }

    /// First and last chunk of a range that is not empty and in the object.
    pub(crate) fn chunks(self, offset: u64, len: u64) -> (u64, u64) {
        (offset >> self.shift, (offset + len - 1) >> self.shift)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_chunk_is_shorter() {
        let layout = Layout::new(10_000, 4096).unwrap();
        assert_eq!((layout.count(), layout.len(0), layout.len(2)), (3, 4096, 1808));
        assert_eq!(layout.chunks(4095, 2), (0, 1));
        assert_eq!(layout.chunks(8192, 1808), (2, 2));
        assert_eq!(Layout::new(8192, 4096).unwrap().count(), 2);
    }

    #[test]
    fn sizes_that_a_server_makes_up_are_refused() {
        assert!(Layout::new(u64::MAX, 4096).unwrap_err().contains("68719476736"));
        assert!(Layout::new(1 << 36, 4096).is_err());
        assert!(Layout::new((1 << 36) - 1, 4096).is_ok());
        for chunk in [0, 2048, 5000, 8 << 20] {
            assert!(Layout::new(1, chunk).unwrap_err().contains("power of two"));
        }
    }
}
