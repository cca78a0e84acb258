//! The disk in an image without a guest: reads, writes, and where its data is.
use super::Qcow2;
use imago::Mapping;
use paravane_store::Job;
use std::io;

/// What is at an offset of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// Data.
    Data,
    /// Zeroes, by a mark in the image.
    Zeroes,
    /// Nothing in the image: reads as zeroes, or as the backing file that was left out.
    Hole,
}

impl Qcow2 {
    /// Bytes of a cluster, a power of two.
    pub(in crate::blk) fn cluster(&self) -> u64 {
        self.cluster
    }

    /// What is at `offset` of the disk, and for how many bytes; at most `len`, at least 1.
    ///
    /// Both arguments are within the disk.
    pub(in crate::blk) fn extent(&self, offset: u64, len: u64) -> io::Result<(Extent, u64)> {
        self.guarded(|| {
            let access = self.read()?;
            let _unchanged = self.tables.read();
            let (mapping, found) = access.get_mapping(offset, len)?;
            let extent = match mapping {
                Mapping::Zero { explicit: true, .. } => Extent::Zeroes,
                Mapping::Zero { .. } | Mapping::Eof { .. } => Extent::Hole,
                _ => Extent::Data,
            };
            match found.min(len) {
                0 => Err(io::Error::new(io::ErrorKind::InvalidData, "a table maps no bytes")),
                found => Ok((extent, found)),
            }
        })
    }

    /// Fills `into` from `offset` of the disk.
    pub(in crate::blk) fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<()> {
        self.guarded(|| self.read()?.read(into, offset))
    }

    /// Writes `data` at `offset` of the disk.
    pub(in crate::blk) fn write_at(&self, data: &[u8], offset: u64) -> io::Result<()> {
        self.guarded(|| self.write_data(data, offset))
    }

    /// Makes a range read as zeroes, whatever a backing file has there.
    pub(in crate::blk) fn zero(&self, offset: u64, len: u64) -> io::Result<()> {
        self.guarded(|| self.try_perform(Job::Zeroes { offset, len, unmap: true }).map(drop))
    }

    /// Makes all writes durable.
    pub(in crate::blk) fn sync_all(&self) -> io::Result<()> {
        self.guarded(|| self.sync().map(drop))
    }
}
