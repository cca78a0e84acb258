//! Where data clusters lie in the image file, as far as it is known.
use std::sync::atomic::{AtomicU64, Ordering};
use zerocopy::FromZeros;

/// Most slots: 8 MiB, which the kernel provides as they are used. They cover 64 GiB of a disk with
/// clusters of 64 KiB.
const MOST_SLOTS: u64 = 1 << 20;

/// A cache of the mapping from clusters of the disk to clusters of the file.
///
/// A slot holds both numbers in one word, so that a reader needs no lock: in the upper half what the
/// slot's index lacks of the disk's cluster, in the lower half the file's cluster. 0 is an empty
/// slot, since cluster 0 of the file is the header. Clusters whose numbers do not fit are left out.
#[derive(Debug)]
pub(super) struct ClusterMap {
    slots: Box<[AtomicU64]>,
    /// log2 of the cluster size in bytes.
    cluster_bits: u32,
    /// log2 of the number of slots.
    slot_bits: u32,
}

impl ClusterMap {
    /// For clusters of `cluster` bytes, a power of two, and a disk of `size` bytes.
    ///
    /// `None` if the host has no memory.
    pub(super) fn new(cluster: u64, size: u64) -> Option<Self> {
        let slots = (size / cluster + 1).min(MOST_SLOTS).next_power_of_two();
        Some(Self {
            slots: <[AtomicU64]>::new_box_zeroed_with_elems(slots as usize).ok()?,
            cluster_bits: cluster.ilog2(),
            slot_bits: slots.ilog2(),
        })
    }

    /// Bytes of a cluster.
    pub(super) fn cluster(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// The slot of a cluster of the disk, and the upper half of its content.
    fn slot(&self, cluster: u64) -> (&AtomicU64, u64) {
        (&self.slots[(cluster & (self.slots.len() as u64 - 1)) as usize], cluster >> self.slot_bits)
    }

    /// The file's cluster for a cluster of the disk.
    fn get(&self, cluster: u64) -> Option<u64> {
        let (slot, tag) = self.slot(cluster);
        // Relaxed: the lock that keeps mappings in place orders this (see `Qcow2::tables`).
        let word = slot.load(Ordering::Relaxed);
        let found = word & u64::from(u32::MAX);
        (word >> 32 == tag && found != 0).then_some(found)
    }

    /// Finds `offset` of the disk: its offset in the file, and how many bytes are there in a row.
    ///
    /// At most `len`.
    pub(super) fn find(&self, offset: u64, len: u64) -> Option<(u64, u64)> {
        let first = offset >> self.cluster_bits;
        let host = self.get(first)?;
        let within = offset & (self.cluster() - 1);
        let mut found = self.cluster() - within;
        let mut next = 1;
        while found < len && self.get(first.checked_add(next)?) == Some(host + next) {
            found += self.cluster();
            next += 1;
        }
        Some(((host << self.cluster_bits) + within, found.min(len)))
    }

    /// Enters the whole clusters of `len` bytes at `offset` of the disk, which lie at `host`.
    pub(super) fn insert(&self, offset: u64, host: u64, len: u64) {
        let mask = self.cluster() - 1;
        if (offset | host) & mask != 0 {
            return;
        }
        let (first, host) = (offset >> self.cluster_bits, host >> self.cluster_bits);
        for number in 0..len >> self.cluster_bits {
            let (slot, tag) = self.slot(first + number);
            let found = host + number;
            if found != 0 && found <= u64::from(u32::MAX) && tag <= u64::from(u32::MAX) {
                // Relaxed: as above.
                slot.store(tag << 32 | found, Ordering::Relaxed);
            }
        }
    }

    /// Forgets all clusters that `len` bytes at `offset` of the disk touch.
    pub(super) fn forget(&self, offset: u64, len: u64) {
        let first = offset >> self.cluster_bits;
        let last = offset.saturating_add(len) >> self.cluster_bits;
        // Relaxed: as above.
        if last - first >= self.slots.len() as u64 {
            return self.slots.iter().for_each(|slot| slot.store(0, Ordering::Relaxed));
        }
        (first..=last).for_each(|cluster| self.slot(cluster).0.store(0, Ordering::Relaxed));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_of_clusters_is_found_as_one() {
        let map = ClusterMap::new(4096, 1 << 20).unwrap();
        assert_eq!(map.find(0, 1), None);
        map.insert(8192, 40960, 3 * 4096 + 100);
        assert_eq!(map.find(8192, 4096), Some((40960, 4096)));
        assert_eq!(map.find(8192 + 512, 1 << 20), Some((40960 + 512, 3 * 4096 - 512)));
        assert_eq!(map.find(5 * 4096, 1), None, "a part of a cluster is not entered");
        map.insert(5 * 4096, 4096, 4096);
        assert_eq!(map.find(4 * 4096, 8192), Some((49152, 4096)), "elsewhere in the file");
        map.forget(3 * 4096 + 4095, 2);
        assert_eq!(map.find(8192, 1 << 20), Some((40960, 4096)));
        assert_eq!((map.find(3 * 4096, 1), map.find(4 * 4096, 1)), (None, None));
        map.forget(0, u64::MAX);
        assert_eq!((map.find(8192, 1), map.find(5 * 4096, 1)), (None, None));
    }

    #[test]
    fn clusters_that_share_a_slot_are_told_apart() {
        let map = ClusterMap::new(512, 2 * 512).unwrap();
        let far = 4 * 512;
        map.insert(0, 1024, 512);
        assert_eq!((map.find(0, 512), map.find(far, 512)), (Some((1024, 512)), None));
        map.insert(far, 2048, 512);
        assert_eq!((map.find(0, 512), map.find(far, 512)), (None, Some((2048, 512))));
    }

    #[test]
    fn what_does_not_fit_is_left_out() {
        let map = ClusterMap::new(512, 512).unwrap();
        map.insert(0, 0, 512);
        assert_eq!(map.find(0, 512), None, "the header");
        map.insert(0, 1 << 41, 512);
        assert_eq!(map.find(0, 512), None);
        map.insert(1 << 42, 512, 512);
        assert_eq!(map.find(1 << 42, 512), None);
        map.insert(0, (1 << 41) - 512, 512);
        assert_eq!(map.find(0, 1), Some(((1 << 41) - 512, 1)));
        assert_eq!(map.find(u64::MAX, 1), None);
    }

    #[test]
    fn a_large_disk_has_no_more_slots() {
        assert_eq!(ClusterMap::new(512, u64::MAX).unwrap().slots.len(), MOST_SLOTS as usize);
    }
}
