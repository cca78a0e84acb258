//! The disk in an image without a guest: reads, writes, and where its data is.
use super::Qcow2;
use super::extent::Extent;
use std::io;

impl Qcow2 {
    /// Bytes of a cluster, a power of two.
    pub(crate) fn cluster(&self) -> u64 {
        self.core.shape.cluster()
    }

    /// What is at `offset` of the disk, and for how many bytes; at most `len`, at least 1.
    ///
    /// Both arguments are within the disk.
    pub(crate) fn extent(&self, offset: u64, len: u64) -> io::Result<(Extent, u64)> {
        let _unchanged = self.shared();
        let (extent, found) = self.core.extent(offset, len)?;
        Ok((extent, found.clamp(1, len)))
    }

    /// Fills `into` from `offset` of the disk.
    pub(crate) fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<()> {
        let _unchanged = self.shared();
        self.core.read(into, offset)
    }
}
