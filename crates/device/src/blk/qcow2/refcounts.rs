//! Whether an image's own tables are counted, before it is opened for writing.
//!
//! ```text
//!   header --> refcount table --> refcount blocks: a count for every cluster of the file
//!      '-----> L1 table --------> L2 tables -----> data
//! ```
//! Who writes to an image takes clusters whose count is 0 for free. So what is in use has to be counted. Two things are at
//! stake:
//!
//! - A **broken image** may say that its own header is free. imago 0.2.6 takes cluster 0 then, for a refcount block perhaps, and
//!   an entry 0 in the refcount table means that there is no block: it would make the same one again and again, calling itself
//!   until the stack is used up. Such an image is refused here, and [`Storage`](super::storage::Storage) sees to it that none
//!   becomes one later.
//! - A process that was **killed** leaves tables that are in use and not counted: imago enters a new L2 table into the L1 table at
//!   once, and writes the refcount block with the next flush. The next one to write would give the table's cluster away. Tables
//!   that nothing else uses are counted here instead.
//!
//! Data are not looked at (their L2 entries are written after their counts), so it stays cheap: the refcount table and the L1
//! table are read, and a count for each cluster that they name. An image of 1 TiB with clusters of 64 KiB has 512 refcount blocks
//! and 2,048 L2 tables: 24 KiB of tables, and a read of two bytes for each of them. Both tables are at most 32 MiB, as with
//! imago.
use super::header::{Header, read};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use thiserror::Error;

/// Why an image is not written to.
#[derive(Debug, Error)]
pub enum RefcountError {
    /// {0}
    #[error(transparent)]
    Io(#[from] io::Error),
    /// cluster {cluster} is {role} and counted as free (`qemu-img check -r all` repairs that)
    #[error("cluster {cluster} is {role} and counted as free (`qemu-img check -r all` repairs that)")]
    Free {
        /// Its number in the file.
        cluster: u64,
        /// What it is used for.
        role: ClusterRole,
    },
    /// cluster {cluster} is {role} and something else, too (`qemu-img check` says what)
    #[error("cluster {cluster} is {role} and something else, too (`qemu-img check` says what)")]
    Shared {
        /// Its number in the file.
        cluster: u64,
        /// One of the things that it is used for.
        role: ClusterRole,
    },
    /// cluster {cluster} is {role} and lies behind the end of the file (`qemu-img check -r all` repairs that)
    #[error(
        "cluster {cluster} is {role} and lies behind the end of the file (`qemu-img check -r all` repairs that)"
    )]
    Outside {
        /// Its number in the file.
        cluster: u64,
        /// What it is used for.
        role: ClusterRole,
    },
}

/// What a cluster is that is not data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ClusterRole {
    /// Cluster 0.
    Header,
    /// A part of the refcount table.
    RefcountTable,
    /// A refcount block.
    RefcountBlock,
    /// A part of the L1 table.
    L1Table,
    /// An L2 table.
    L2Table,
}

impl std::fmt::Display for ClusterRole {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Header => "the header",
            Self::RefcountTable => "the refcount table",
            Self::RefcountBlock => "a refcount block",
            Self::L1Table => "the L1 table",
            Self::L2Table => "an L2 table",
        })
    }
}

/// Where the offset is in an entry of the refcount table, and of the L1 table.
const BLOCK_OFFSET: u64 = 0xffff_ffff_ffff_fe00;
const L2_OFFSET: u64 = 0x00ff_ffff_ffff_fe00;

/// Where the tables are.
struct Tables<'a> {
    file: &'a File,
    /// log2 of the bytes of a cluster.
    cluster_bits: u32,
    /// log2 of the bits of a count.
    count_bits: u32,
    /// Offsets of the refcount blocks; 0 where there is none.
    blocks: Vec<u64>,
}

/// Checks that the tables of an image of `size` bytes are counted, and counts those that a killed process left uncounted.
///
/// # Errors
/// See [`RefcountError`].
pub(super) fn settle(file: &File, size: u64, header: &Header) -> Result<(), RefcountError> {
    let &Header { cluster_bits, refcount_order: count_bits, .. } = header;
    let (l1_offset, l1_entries) = header.l1_table;
    let (table_offset, table_entries) = header.refcount_table;
    let cluster = header.cluster();
    let blocks = table(file, table_offset, table_entries, BLOCK_OFFSET)?;
    let l2_tables = table(file, l1_offset, l1_entries, L2_OFFSET)?;
    if blocks.iter().chain(&l2_tables).any(|offset| offset % cluster != 0) {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "a table lies across clusters").into());
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
    let tables = Tables { file, cluster_bits, count_bits, blocks };
    let mut left = 0_u64;
    for (cluster, role) in used {
        if !tables.is_counted(cluster)? {
            // A process that is killed leaves none of the first two: the header has been there from the first moment, and
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
            "a qcow2 image was left without counts for some of its tables: counted"
        );
    }
    Ok(())
}

impl Tables<'_> {
    /// Where a cluster's count is: offset of its first byte, bytes, and its lowest bit in the first of them. `None` if no block
    /// counts it.
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
        read(self.file, count, offset)?;
        let mask = if self.count_bits < 3 { (1 << (1 << self.count_bits)) - 1 } else { 0xff };
        Ok(count.iter().any(|byte| byte >> bit & mask != 0))
    }

    /// Makes a count of 0 one of 1; says whether it has a place.
    fn count(&self, cluster: u64) -> io::Result<bool> {
        let Some((offset, bytes, bit)) = self.place(cluster) else { return Ok(false) };
        let lowest = offset + bytes as u64 - 1;
        let mut byte = [0];
        read(self.file, &mut byte, lowest)?;
        byte[0] |= 1 << bit;
        self.file.write_all_at(&byte, lowest)?;
        Ok(true)
    }
}

/// The entries of a table, without their flags.
fn table(file: &File, offset: u64, entries: u64, mask: u64) -> io::Result<Vec<u64>> {
    let mut bytes = vec![0; entries as usize * 8];
    read(file, &mut bytes, offset)?;
    let (entries, _) = bytes.as_chunks();
    Ok(entries.iter().map(|entry| u64::from_be_bytes(*entry) & mask).collect())
}
