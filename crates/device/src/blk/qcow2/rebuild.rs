//! Checks and repairs all refcounts of an image that its last writer may not have closed.
//!
//! ```text
//!   all tables -> uses of each cluster, for a window of the file at a time -> compared with the counts
//!      used, not counted: counted          counted, not used: freed
//! ```
//! The order in which this crate writes leaves only the second kind. The first is left by QEMU with
//! `lazy_refcounts`. An image of 1 TiB in clusters of 64 KiB has 128 MiB of L2 tables, all of which are
//! read. The memory for a window is limited. Version 2 has no mark, so its images are checked at each
//! start, if that is quick.
//!
//! **A repair needs no sync.** What a crash loses of it is repaired again: the mark stays until the image
//! is closed, and version 2 is checked again. A freed cluster is used only after the sync of `fill`,
//! which makes its count durable.
use super::counts::Counts;
use super::entry::{Entry, OFFSET, Place, Shape};
use super::header::{Header, MAX_ENTRIES};
use super::io::Io;
use super::map::read_table;
use super::refcount_error::{ClusterRole, RefcountError};
use paravane_store::Store;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Most bytes of L2 tables that are read at each start: those of 128 GiB in clusters of 64 KiB.
const QUICK: u64 = 16 << 20;
/// Clusters of a window: 32 MiB of memory.
const WINDOW: u64 = 16 << 20;
/// Time between two log lines.
const PROGRESS: Duration = Duration::from_secs(5);
/// Most internal snapshots, as in QEMU, and most bytes of their table.
const MOST_SNAPSHOTS: u32 = 65536;
const MOST_SNAPSHOT_BYTES: u64 = 64 << 20;

/// The image that is checked.
struct CheckedImage<'a> {
    source: &'a Arc<dyn Store>,
    header: &'a Header,
    shape: Shape,
    path: &'a Path,
    /// Clusters of the file.
    clusters: u64,
    /// Offsets of L2 tables: of the disk, and of each snapshot.
    l2_tables: Vec<u64>,
    /// Clusters of other structures.
    structures: Vec<Range<u64>>,
}

/// Uses of the clusters of a window.
struct Window {
    range: Range<u64>,
    uses: Vec<u16>,
}

/// What was repaired.
#[derive(Default)]
struct Repaired {
    counted: u64,
    freed: u64,
}

/// Whether the check takes no longer than a start may.
pub(super) fn is_quick(source: &Arc<dyn Store>, header: &Header) -> io::Result<bool> {
    let (offset, entries) = header.l1_table;
    let tables =
        read_table(source, offset, entries)?.into_iter().filter(|raw| raw & OFFSET != 0).count() as u64;
    let snapshots = u64::from(header.snapshots.1) + 1;
    Ok(tables.saturating_mul(snapshots).saturating_mul(header.cluster()) <= QUICK)
}

/// Checks and repairs all refcounts.
///
/// # Errors
/// See [`RefcountError`]; some counts may have been repaired.
pub(super) fn rebuild(
    source: &Arc<dyn Store>,
    path: &Path,
    header: &Header,
    (io, counts): (&Io, &mut Counts),
) -> Result<(), RefcountError> {
    let shape = counts.shape;
    let clusters = source.try_size()?.div_ceil(shape.cluster());
    let mut image =
        CheckedImage { source, header, shape, path, clusters, l2_tables: Vec::new(), structures: Vec::new() };
    if header.is_dirty() {
        tracing::info!(
            path = %path.display(),
            clusters,
            "the last writer of a qcow2 image has not closed it; checking its refcounts"
        );
    }
    image.find_tables(counts)?;
    let (mut repaired, mut from, mut end) = (Repaired::default(), 0, clusters);
    while from < clusters {
        let range = from..clusters.min(from + WINDOW);
        from = range.end;
        let mut window = Window { uses: vec![0; (range.end - range.start) as usize], range };
        end = end.max(image.count_uses(&mut window)?);
        window.repair(io, counts, !header.has_other_owners, &mut repaired)?;
    }
    if !header.has_other_owners {
        repaired.freed += free_behind(io, counts, end)?;
    }
    if header.is_dirty() || repaired.counted + repaired.freed > 0 {
        tracing::warn!(
            path = %path.display(),
            counted = repaired.counted,
            freed = repaired.freed,
            "the refcounts of a qcow2 image that was not closed are checked and repaired"
        );
    }
    Ok(())
}

impl CheckedImage<'_> {
    /// Finds all tables.
    fn find_tables(&mut self, counts: &Counts) -> Result<(), RefcountError> {
        let cluster = self.shape.cluster();
        let part = |offset: u64, len: u64| offset / cluster..offset.saturating_add(len).div_ceil(cluster);
        let (l1_offset, l1_entries) = self.header.l1_table;
        let (table_offset, table_entries) = self.header.refcount_table;
        self.structures = vec![0..1, part(l1_offset, l1_entries * 8), part(table_offset, table_entries * 8)];
        for number in 0..table_entries {
            if let Some(block) = counts.block(number)? {
                self.structures.push(part(block, cluster));
            }
        }
        self.add_l1(l1_offset, l1_entries)?;
        let (table, number) = self.header.snapshots;
        if number > MOST_SNAPSHOTS {
            return Err(invalid("it has more than 65536 snapshots"));
        }
        let mut at = table;
        for _ in 0..number {
            let mut head = [0; 40];
            self.source.read_up_to(&mut head, at)?;
            let word = |at: usize, len: usize| {
                head[at..at + len].iter().fold(0, |sum, byte| sum << 8 | u64::from(*byte))
            };
            let (offset, entries) = (word(0, 8), word(8, 4));
            if offset % cluster != 0 || entries > MAX_ENTRIES {
                return Err(invalid("the L1 table of a snapshot is invalid"));
            }
            self.structures.push(part(offset, entries * 8));
            self.add_l1(offset, entries)?;
            // The head, more data, the names.
            at = at.saturating_add((40 + word(36, 4) + word(12, 2) + word(14, 2)).next_multiple_of(8));
            if at - table > MOST_SNAPSHOT_BYTES {
                return Err(invalid("its snapshots have more than 64 MiB of names"));
            }
        }
        if number > 0 {
            self.structures.push(part(table, at - table));
        }
        match self.structures.iter().find(|range| range.end > self.clusters && range.start >= self.clusters) {
            Some(outside) => {
                Err(RefcountError::Outside { cluster: outside.start, role: ClusterRole::RefcountBlock })
            }
            None => Ok(()),
        }
    }

    /// Adds the L2 tables of an L1 table.
    fn add_l1(&mut self, offset: u64, entries: u64) -> Result<(), RefcountError> {
        for raw in read_table(self.source, offset, entries)? {
            match raw & OFFSET {
                0 => {}
                table if table % self.shape.cluster() != 0 => {
                    return Err(invalid("an L2 table is not aligned"));
                }
                table => self.l2_tables.push(table),
            }
        }
        Ok(())
    }

    /// Counts the uses of a window's clusters. Returns where the last use of any cluster ends.
    fn count_uses(&self, window: &mut Window) -> Result<u64, RefcountError> {
        let (bits, cluster) = (self.shape.cluster_bits, self.shape.cluster());
        self.structures.iter().for_each(|range| window.add(range.clone()));
        let mut bytes = vec![0; cluster as usize];
        let end = self.structures.iter().map(|range| range.end).max();
        let (mut logged, mut end) = (Instant::now(), end.unwrap_or(0));
        for (number, table) in self.l2_tables.iter().enumerate() {
            if table >> bits >= self.clusters {
                return Err(RefcountError::Outside { cluster: table >> bits, role: ClusterRole::L2Table });
            }
            window.add(table >> bits..(table >> bits) + 1);
            bytes.fill(0);
            self.source.read_up_to(&mut bytes, *table)?;
            for raw in bytes.as_chunks().0 {
                let used = match Entry::decode(u64::from_be_bytes(*raw), self.shape)? {
                    Entry::Data(Place { host, .. }) | Entry::Zero { kept: Some(Place { host, .. }) } => {
                        host >> bits..(host >> bits) + 1
                    }
                    // Its last sectors may be beyond the end of the file.
                    Entry::Compressed { offset, len } => offset >> bits..((offset + len - 1) >> bits) + 1,
                    Entry::Unallocated | Entry::Zero { kept: None } => continue,
                };
                if used.start >= self.clusters {
                    return Err(RefcountError::Outside { cluster: used.start, role: ClusterRole::Data });
                }
                end = end.max(used.end);
                window.add(used);
            }
            if logged.elapsed() >= PROGRESS {
                logged = Instant::now();
                tracing::info!(
                    path = %self.path.display(),
                    window = window.range.start / WINDOW + 1,
                    windows = self.clusters.div_ceil(WINDOW),
                    "checked {} of {} L2 tables",
                    number + 1,
                    self.l2_tables.len()
                );
            }
        }
        Ok(end)
    }
}

impl Window {
    /// Adds a use of each cluster.
    fn add(&mut self, used: Range<u64>) {
        for cluster in used.start.max(self.range.start)..used.end.min(self.range.end) {
            let uses = &mut self.uses[(cluster - self.range.start) as usize];
            *uses = uses.saturating_add(1);
        }
    }

    /// Compares uses with counts, and repairs what is safe.
    fn repair(
        &self,
        io: &Io,
        counts: &mut Counts,
        may_free: bool,
        repaired: &mut Repaired,
    ) -> Result<(), RefcountError> {
        let mut unused: Vec<Range<u64>> = Vec::new();
        for (cluster, uses) in self.range.clone().zip(&self.uses) {
            let (count, uses) = (counts.get(io, cluster)?, u64::from(*uses));
            match (uses, count) {
                (0, 0) => {}
                (0, _) if may_free => match unused.last_mut() {
                    Some(last) if last.end == cluster => last.end += 1,
                    _ => unused.push(cluster..cluster + 1),
                },
                (1, 0) if counts.block(counts.block_of(cluster))?.is_some() => {
                    counts.change(io, cluster..cluster + 1, |_| Some(1))?;
                    repaired.counted += 1;
                }
                (uses, count) if count < uses => return Err(RefcountError::Uses { cluster, uses, count }),
                // Too many uses are counted: what is too many is never free.
                _ => {}
            }
        }
        for run in unused {
            repaired.freed += run.end - run.start;
            counts.change(io, run, |_| Some(0))?;
        }
        Ok(())
    }
}

/// Frees clusters from `first` on, beyond the end of the file, which nothing uses. Returns their number.
///
/// A crash may lose a change of the file's size, and keep the counts of what lies behind.
fn free_behind(io: &Io, counts: &mut Counts, first: u64) -> Result<u64, RefcountError> {
    let (bits, mut freed) = (counts.block_bits(), 0);
    for number in counts.block_of(first)..counts.table().1 {
        if counts.block(number)?.is_none() {
            continue;
        }
        let mut at = first.max(number << bits);
        while at < (number + 1) << bits {
            let (is_free, end) = counts.same_until(io, at)?;
            if !is_free {
                counts.change(io, at..end, |_| Some(0))?;
                freed += end - at;
            }
            at = end;
        }
    }
    Ok(freed)
}

fn invalid(what: &str) -> RefcountError {
    RefcountError::Io(io::Error::new(
        io::ErrorKind::InvalidData,
        format!("{what}; `qemu-img check -r all` repairs the image"),
    ))
}
