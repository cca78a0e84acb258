//! Checks the refcounts of an image's own tables before it is written to.
//!
//! ```text
//!   header --> refcount table --> refcount blocks: a count for every cluster of the file
//!      '-----> L1 table --------> L2 tables -----> data
//! ```
//! A writer allocates clusters whose count is 0. So clusters in use must have a count. Two cases
//! matter:
//!
//! - A **corrupt image** may count its own tables as free, which would then become a guest's data. Such
//!   an image is refused here.
//! - A **killed process** of an earlier version may have left tables that are in use and not counted. The next
//!   writer would reallocate the table's cluster. Tables that nothing else uses are counted here.
//!
//! The check is cheap: it reads the refcount table, the L1 table, and a count for each cluster that they
//! name. An image of 1 TiB with clusters of 64 KiB has 512 refcount blocks and 2,048 L2 tables: 24 KiB of
//! tables, and a read of two bytes for each of them. Both tables are limited to 32 MiB. Data clusters are
//! checked by [`super::rebuild`], if the last writer has not closed the image.
use super::header::Header;
use paravane_store::Store;
use std::io;
use std::sync::Arc;
use thiserror::Error;

/// The refcounts of a qcow2 image are wrong, so that writing would corrupt it.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RefcountError {
    /// Reading or updating the tables failed.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// A cluster of the image's own structures has refcount 0.
    #[error("cluster {cluster} is {role}, but has refcount 0; `qemu-img check -r all` repairs it")]
    Free {
        /// Number of the cluster in the file.
        cluster: u64,
        /// Use of the cluster.
        role: ClusterRole,
    },
    /// Two of the image's own structures share a cluster.
    #[error("cluster {cluster} is {role}, but has a second use; `qemu-img check` reports it")]
    Shared {
        /// Number of the cluster in the file.
        cluster: u64,
        /// One use of the cluster.
        role: ClusterRole,
    },
    /// A refcount block is beyond the end of the file.
    #[error(
        "cluster {cluster} is {role}, but lies beyond the end of the file; `qemu-img check -r all` repairs it"
    )]
    Outside {
        /// Number of the cluster in the file.
        cluster: u64,
        /// Use of the cluster.
        role: ClusterRole,
    },
    /// A cluster has more uses than it counts, which nothing but a full check may repair.
    #[error(
        "cluster {cluster} is used {uses} times, but has refcount {count}; `qemu-img check -r all` repairs it"
    )]
    Uses {
        /// Number of the cluster in the file.
        cluster: u64,
        /// Number of entries that name it.
        uses: u64,
        /// Its refcount.
        count: u64,
    },
}

/// Use of a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum ClusterRole {
    /// Cluster 0.
    Header,
    /// Part of the refcount table.
    RefcountTable,
    /// A refcount block.
    RefcountBlock,
    /// Part of the L1 table.
    L1Table,
    /// An L2 table.
    L2Table,
    /// Data, or a table of an internal snapshot.
    Data,
}

impl std::fmt::Display for ClusterRole {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Header => "the header",
            Self::RefcountTable => "the refcount table",
            Self::RefcountBlock => "a refcount block",
            Self::L1Table => "the L1 table",
            Self::L2Table => "an L2 table",
            Self::Data => "data",
        })
    }
}

/// Bits of the offset in an entry of the refcount table, and of the L1 table.
const BLOCK_OFFSET: u64 = 0xffff_ffff_ffff_fe00;
const L2_OFFSET: u64 = 0x00ff_ffff_ffff_fe00;

/// The refcount structures of an image.
struct RefcountTables<'a> {
    file: &'a Arc<dyn Store>,
    /// log2 of the bytes of a cluster.
    cluster_bits: u32,
    /// log2 of the bits of a count.
    count_bits: u32,
    /// Offsets of the refcount blocks; 0 where there is none.
    blocks: Vec<u64>,
}

/// Checks the refcounts of an image's structures, and adds missing ones.
///
/// A killed process may not have written them. The file has `size` bytes.
///
/// # Errors
/// See [`RefcountError`].
pub(super) fn check_and_repair(
    file: &Arc<dyn Store>,
    size: u64,
    header: &Header,
) -> Result<(), RefcountError> {
    let &Header { cluster_bits, refcount_order: count_bits, .. } = header;
    let (l1_offset, l1_entries) = header.l1_table;
    let (table_offset, table_entries) = header.refcount_table;
    let cluster = header.cluster();
    let blocks = table(file, table_offset, table_entries, BLOCK_OFFSET)?;
    let l2_tables = table(file, l1_offset, l1_entries, L2_OFFSET)?;
    if blocks.iter().chain(&l2_tables).any(|offset| offset % cluster != 0) {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "a table is not aligned to clusters").into());
    }

    let part = |offset: u64, bytes: u64| offset / cluster..(offset + bytes).div_ceil(cluster);
    let named = |offsets: &[u64], role| {
        let there = offsets.iter().filter(|offset| **offset != 0);
        there.map(move |offset| (offset / cluster, role)).collect::<Vec<_>>()
    };
    let mut used = vec![(0, ClusterRole::Header)];
    used.extend(part(table_offset, table_entries * 8).map(|at| (at, ClusterRole::RefcountTable)));
    used.extend(part(l1_offset, l1_entries * 8).map(|at| (at, ClusterRole::L1Table)));
    used.extend(named(&blocks, ClusterRole::RefcountBlock));
    used.extend(named(&l2_tables, ClusterRole::L2Table));
    used.sort_unstable();
    if let Some(twice) = used.windows(2).find(|two| two[0].0 == two[1].0) {
        return Err(RefcountError::Shared { cluster: twice[1].0, role: twice[1].1 });
    }
    let end = size.div_ceil(cluster);
    let outside =
        |(cluster, role): &&(u64, ClusterRole)| *cluster >= end && *role == ClusterRole::RefcountBlock;
    if let Some(&(cluster, role)) = used.iter().find(outside) {
        return Err(RefcountError::Outside { cluster, role });
    }
    let tables = RefcountTables { file, cluster_bits, count_bits, blocks };
    let mut left = 0_u64;
    for (cluster, role) in used {
        if !tables.is_counted(cluster)? {
            // A killed process leaves none of the first two: the header exists from the start, and
            // a new refcount table is entered into it after its counts have been written.
            if matches!(role, ClusterRole::Header | ClusterRole::RefcountTable) || !tables.count(cluster)? {
                return Err(RefcountError::Free { cluster, role });
            }
            left += 1;
        }
    }
    if left > 0 {
        tracing::warn!(
            clusters = left,
            "the last writer of a qcow2 image was killed; repaired the refcounts of its tables"
        );
    }
    Ok(())
}

impl RefcountTables<'_> {
    /// Place of a cluster's count; `None`: it has no block.
    ///
    /// Offset of its first byte, number of bytes, and lowest bit in the first.
    fn place(&self, cluster: u64) -> Option<(u64, usize, u64)> {
        let per_block = 1 << (self.cluster_bits + 3 - self.count_bits);
        let block = usize::try_from(cluster / per_block).ok().and_then(|at| self.blocks.get(at));
        let bit = (cluster % per_block) << self.count_bits;
        block.filter(|offset| **offset != 0).map(|offset| {
            let bytes = (1_usize << self.count_bits).div_ceil(8);
            (offset + bit / 8, bytes, bit % 8)
        })
    }

    fn is_counted(&self, cluster: u64) -> io::Result<bool> {
        let Some((offset, bytes, bit)) = self.place(cluster) else { return Ok(false) };
        let mut count = [0; 8];
        let count = &mut count[..bytes];
        self.file.read_up_to(count, offset)?;
        let mask = if self.count_bits < 3 { (1 << (1 << self.count_bits)) - 1 } else { 0xff };
        Ok(count.iter().any(|byte| byte >> bit & mask != 0))
    }

    /// Sets a count of 0 to 1. `false` if it has no place.
    fn count(&self, cluster: u64) -> io::Result<bool> {
        let Some((offset, bytes, bit)) = self.place(cluster) else { return Ok(false) };
        let lowest = offset + bytes as u64 - 1;
        let mut byte = [0];
        self.file.read_up_to(&mut byte, lowest)?;
        byte[0] |= 1 << bit;
        self.file.write_all_at(&byte, lowest)?;
        Ok(true)
    }
}

/// The entries of a table, without their flags.
fn table(file: &Arc<dyn Store>, offset: u64, entries: u64, mask: u64) -> io::Result<Vec<u64>> {
    let mut bytes = vec![0; entries as usize * 8];
    file.read_up_to(&mut bytes, offset)?;
    let (entries, _) = bytes.as_chunks();
    Ok(entries.iter().map(|entry| u64::from_be_bytes(*entry) & mask).collect())
}
