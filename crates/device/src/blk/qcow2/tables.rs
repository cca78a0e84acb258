//! The tables of an open image, and which clusters of the file are free.
//!
//! ```text
//!   free --fill: counted, zeroed, synced--> reserve --take--> data or an L2 table
//!    ^                                                            |
//!    '--release: punched, not counted <-- synced <-- pending <----' its last mapping is removed
//! ```
//! **What is on the disk at any moment.** A cluster that a table names is counted before: the reserve is
//! durable before any of it is used, so a crash leaves clusters that are counted and not used (leaks),
//! and never the opposite. Clusters of the reserve read as zeroes, so a mapping whose data is not there
//! yet shows zeroes, which is what was there before. A cluster is free again only when the removal of
//! its mapping is durable.
use super::counts::Counts;
use super::entry::{Entry, Place, Shape};
use super::map::Map;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

/// Most bytes of the reserve, which is what a crash leaks at most.
const MOST_RESERVE: u64 = 16 << 20;
/// Bytes of the first reserve. Each next one is twice as large.
const FIRST_RESERVE: u64 = 1 << 20;
/// Most clusters of the reserve.
const MOST_CLUSTERS: u64 = 4096;
/// Most runs of clusters that wait to be free.
const MOST_PENDING: usize = 4096;

/// See the module.
#[derive(Debug)]
pub(super) struct Tables {
    pub(super) map: Map,
    /// `None`: the image is open for reading.
    pub(super) counts: Option<Counts>,
    pub(super) reserve: Reserve,
    pub(super) pending: Pending,
    /// A thread is filling the reserve.
    pub(super) is_filling: bool,
    /// Clusters of the disk that are being allocated.
    pub(super) allocating: Vec<Range<u64>>,
    /// The refcount table has no room to grow in a storage of a fixed size.
    pub(super) is_table_full: bool,
    /// No cluster of the file before this one is free.
    pub(super) first_free: u64,
}

impl Tables {
    pub(super) fn new(map: Map, counts: Option<Counts>, shape: Shape) -> Self {
        // Version 2 has no mark that would have the next start look for leaks.
        let most = if shape.version < 3 { FIRST_RESERVE } else { MOST_RESERVE };
        Self {
            map,
            counts,
            reserve: Reserve::new(shape.cluster(), most),
            pending: Pending::default(),
            is_filling: false,
            allocating: Vec::new(),
            is_table_full: false,
            first_free: 0,
        }
    }

    /// Whether a cluster of the disk is being allocated.
    pub(super) fn is_allocating(&self, cluster: u64) -> bool {
        self.allocating.iter().any(|range| range.contains(&cluster))
    }
}

/// Clusters of the file that are counted, read as zeroes, and are not used. All of that is durable.
#[derive(Debug)]
pub(super) struct Reserve {
    runs: VecDeque<Range<u64>>,
    /// Number of clusters.
    pub(super) len: u64,
    /// Clusters of the next one.
    next: u64,
    most: u64,
}

impl Reserve {
    fn new(cluster: u64, most: u64) -> Self {
        let most = (most / cluster).clamp(1, MOST_CLUSTERS);
        Self { runs: VecDeque::new(), len: 0, next: (FIRST_RESERVE / cluster).clamp(1, most), most }
    }

    /// Number of clusters to add, for a request that needs `least`.
    pub(super) fn next(&self, least: u64) -> u64 {
        self.next.max(least)
    }

    pub(super) fn add(&mut self, runs: Vec<Range<u64>>) {
        self.next = (self.next * 2).min(self.most);
        self.len += runs.iter().map(|run| run.end - run.start).sum::<u64>();
        self.runs.extend(runs);
    }

    /// Takes a cluster.
    pub(super) fn take(&mut self) -> Option<u64> {
        let first = self.runs.front_mut()?;
        let taken = first.start;
        first.start += 1;
        if first.is_empty() {
            self.runs.pop_front();
        }
        self.len -= 1;
        Some(taken)
    }

    /// Takes all.
    pub(super) fn take_all(&mut self) -> Vec<Range<u64>> {
        self.len = 0;
        self.runs.drain(..).collect()
    }
}

/// Clusters of the file that lose a use, once the removal of their mapping is durable.
#[derive(Debug, Default)]
pub(super) struct Pending {
    /// Clusters that lose one.
    pub(super) runs: Vec<Range<u64>>,
    /// Clusters that may lose several: those of compressed data.
    pub(super) shared: BTreeMap<u64, u64>,
}

impl Pending {
    pub(super) fn is_empty(&self) -> bool {
        self.runs.is_empty() && self.shared.is_empty()
    }

    /// Whether it is time to release them.
    pub(super) fn is_long(&self) -> bool {
        self.runs.len() + self.shared.len() > MOST_PENDING
    }

    /// Adds a cluster.
    pub(super) fn push(&mut self, cluster: u64) {
        match self.runs.last_mut() {
            Some(last) if last.end == cluster => last.end += 1,
            _ => self.runs.push(cluster..cluster + 1),
        }
    }

    /// Adds what an entry that is replaced refers to.
    pub(super) fn push_entry(&mut self, old: Entry, cluster_bits: u32) {
        match old {
            Entry::Data(Place { host, .. }) | Entry::Zero { kept: Some(Place { host, .. }) } => {
                self.push(host >> cluster_bits);
            }
            Entry::Compressed { offset, len } => self.push_bytes(offset..offset + len, cluster_bits),
            Entry::Zero { kept: None } | Entry::Unallocated => {}
        }
    }

    /// Adds a use of each cluster that has some of these bytes of the file.
    fn push_bytes(&mut self, bytes: Range<u64>, cluster_bits: u32) {
        for cluster in bytes.start >> cluster_bits..=(bytes.end - 1) >> cluster_bits {
            *self.shared.entry(cluster).or_default() += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reserve_grows_up_to_its_limit() {
        for cluster in [512, 65536, 2 << 20] {
            let mut reserve = Reserve::new(cluster, MOST_RESERVE);
            let mut most = 0;
            for _ in 0..20 {
                let next = reserve.next(1);
                most = most.max(next);
                reserve.add(std::iter::once(0..next).collect());
                assert_eq!(reserve.len, next);
                for number in 0..next {
                    assert_eq!(reserve.take(), Some(number));
                }
                assert_eq!((reserve.take(), reserve.len), (None, 0));
            }
            assert_eq!(most, (MOST_RESERVE / cluster).min(MOST_CLUSTERS));
        }
    }

    #[test]
    fn pending_clusters_are_joined() {
        let mut pending = Pending::default();
        [3, 4, 5, 7].into_iter().for_each(|cluster| pending.push(cluster));
        assert_eq!(pending.runs, [3..6, 7..8]);
        pending.push_bytes(0x1_ff00..0x2_0001, 16);
        pending.push_bytes(0x1_0000..0x1_0200, 16);
        assert_eq!(pending.shared, BTreeMap::from([(1, 2), (2, 1)]));
        assert!(!pending.is_empty() && !pending.is_long());
    }
}
