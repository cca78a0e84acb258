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
use super::counts::Counts;
use super::entry::OFFSET;
use super::header::Header;
use super::io::Io;
use super::map::read_table;
use super::refcount_error::{ClusterRole, RefcountError};
use paravane_store::Store;
use std::io;
use std::sync::Arc;

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
    (io, counts): (&Io, &mut Counts),
) -> Result<(), RefcountError> {
    let (l1_offset, l1_entries) = header.l1_table;
    let (table_offset, table_entries) = header.refcount_table;
    let cluster = header.cluster();
    let blocks: Vec<u64> = counts.blocks().collect();
    let l2_tables: Vec<u64> =
        read_table(file, l1_offset, l1_entries)?.into_iter().map(|raw| raw & OFFSET).collect();
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
    let mut left = 0_u64;
    for (cluster, role) in used {
        if counts.get(io, cluster)? == 0 {
            // A killed process leaves none of the first two: the header exists from the start, and
            // a new refcount table is entered into it after its counts have been written.
            let is_first = matches!(role, ClusterRole::Header | ClusterRole::RefcountTable);
            if is_first || counts.block(counts.block_of(cluster))?.is_none() {
                return Err(RefcountError::Free { cluster, role });
            }
            counts.change(io, cluster..cluster + 1, |_| Some(1))?;
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
