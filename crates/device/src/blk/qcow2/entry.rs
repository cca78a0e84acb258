//! Entries of L2 tables, and the numbers that all tables share.
use std::io;

/// The cluster is used once, so that it is written in place. Of L1 entries, too.
pub(super) const COPIED: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;
/// The cluster reads as zeroes (version 3).
pub(super) const ZERO: u64 = 1;
/// Offset of an L2 table, or of a cluster.
pub(super) const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
/// Unit of the length of compressed data.
const COMPRESSED_SECTOR: u64 = 512;

/// Sizes of an image that its tables follow.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    /// log2 of the bytes of a cluster, from 9 to 21.
    pub(super) cluster_bits: u32,
    /// Version of the format.
    pub(super) version: u32,
}

impl Shape {
    /// Bytes of a cluster.
    pub(super) fn cluster(self) -> u64 {
        1 << self.cluster_bits
    }

    /// log2 of the clusters that an L2 table maps.
    pub(super) fn table_bits(self) -> u32 {
        self.cluster_bits - 3
    }

    /// Bytes of the disk that an L2 table maps.
    pub(super) fn table_span(self) -> u64 {
        1 << (self.cluster_bits + self.table_bits())
    }

    /// First offset of the cluster that has `offset`.
    pub(super) fn start(self, offset: u64) -> u64 {
        offset & !(self.cluster() - 1)
    }

    /// First offset of a cluster at or after `offset`.
    pub(super) fn round_up(self, offset: u64) -> u64 {
        offset.checked_next_multiple_of(self.cluster()).unwrap_or(u64::MAX)
    }
}

/// What a cluster of the disk is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Entry {
    /// Not in the image: as the backing file, or zeroes.
    Unallocated,
    /// Zeroes. A cluster may be kept for it.
    Zero { kept: Option<Place> },
    /// A cluster of the file.
    Data(Place),
    /// Compressed data: bytes from `offset` on, in whole sectors.
    Compressed { offset: u64, len: u64 },
}

/// A cluster of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) host: u64,
    /// It is used once.
    pub(super) is_own: bool,
}

impl Entry {
    /// Reads an entry.
    ///
    /// # Errors
    /// The entry is invalid.
    pub(super) fn decode(raw: u64, shape: Shape) -> io::Result<Self> {
        if raw & COMPRESSED != 0 {
            let bits = 62 - (shape.cluster_bits - 8);
            let offset = raw & ((1 << bits) - 1);
            let sectors = ((raw & (COMPRESSED - 1)) >> bits) + 1;
            let len = sectors * COMPRESSED_SECTOR - offset % COMPRESSED_SECTOR;
            return match offset >= shape.cluster() {
                true => Ok(Self::Compressed { offset, len }),
                false => Err(corrupt("compressed data lies in the header")),
            };
        }
        let (host, is_own) = (raw & OFFSET, raw & COPIED != 0);
        if host % shape.cluster() != 0 {
            return Err(corrupt("a cluster is not aligned"));
        }
        let place = (host != 0).then_some(Place { host, is_own });
        match (raw & ZERO != 0, place) {
            (true, _) if shape.version < 3 => Err(corrupt("a cluster of zeroes needs version 3")),
            (true, kept) => Ok(Self::Zero { kept }),
            (false, None) => Ok(Self::Unallocated),
            (false, Some(place)) => Ok(Self::Data(place)),
        }
    }

    /// The entry of a cluster that is written in place.
    pub(super) fn own(host: u64) -> u64 {
        host | COPIED
    }
}

/// What an image says is impossible.
pub(super) fn corrupt(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the image is corrupt: {what}; run `qemu-img check`"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_those_of_the_format() {
        let shape = Shape { cluster_bits: 16, version: 3 };
        let decode = |raw| Entry::decode(raw, shape).unwrap();
        let place = |host, is_own| Place { host, is_own };
        assert_eq!(decode(0), Entry::Unallocated);
        assert_eq!(decode(1), Entry::Zero { kept: None });
        assert_eq!(decode(COPIED | 0x5_0001), Entry::Zero { kept: Some(place(0x5_0000, true)) });
        assert_eq!(decode(0x5_0000), Entry::Data(place(0x5_0000, false)));
        assert_eq!(decode(Entry::own(0x5_0000)), Entry::Data(place(0x5_0000, true)));
        // 62 - 8 bits of offset; two more sectors.
        let compressed = COMPRESSED | 2 << 54 | 0x5_0010;
        assert_eq!(decode(compressed), Entry::Compressed { offset: 0x5_0010, len: 3 * 512 - 0x10 });
        assert!(Entry::decode(0x5_0200, shape).is_err());
        assert!(Entry::decode(COMPRESSED, shape).is_err(), "in the header");
        assert!(Entry::decode(1, Shape { version: 2, ..shape }).is_err());
        for cluster_bits in 9..=21 {
            let shape = Shape { cluster_bits, version: 3 };
            for raw in [u64::MAX, COMPRESSED | (COMPRESSED - 1)] {
                let Ok(Entry::Compressed { offset, len }) = Entry::decode(raw, shape) else { panic!() };
                assert!(offset.checked_add(len).is_some() && len <= 2 * shape.cluster(), "{cluster_bits}");
            }
        }
    }
}
