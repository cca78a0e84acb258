//! Refcounts: the refcount table, in memory, and its blocks, cached.
//!
//! ```text
//!   refcount table --> blocks, each a cluster --> a count for each cluster of the file
//! ```
//! A region of clusters whose block is missing is free.
use super::entry::{Shape, corrupt};
use super::header::{Header, MAX_OFFSET};
use super::io::Io;
use super::map::read_table;
use super::slices::Slices;
use paravane_store::Store;
use std::io;
use std::ops::Range;
use std::sync::Arc;

/// Most bytes of blocks in memory.
const CACHE: u64 = 2 << 20;
/// Bits of the offset in an entry of the refcount table.
const BLOCK_OFFSET: u64 = 0xffff_ffff_ffff_fe00;

/// See the module.
#[derive(Debug)]
pub(super) struct Counts {
    pub(super) shape: Shape,
    /// log2 of the bits of a count.
    order: u32,
    table: Vec<u64>,
    offset: u64,
    cache: Slices,
}

impl Counts {
    /// Reads the refcount table.
    pub(super) fn read(source: &Arc<dyn Store>, header: &Header) -> io::Result<Self> {
        let shape = Shape { cluster_bits: header.cluster_bits, version: header.version };
        let (offset, entries) = header.refcount_table;
        let cache = Slices::new(shape.cluster(), CACHE);
        let table = read_table(source, offset, entries)?;
        Ok(Self { shape, order: header.refcount_order, table, offset, cache })
    }

    /// Offset and entries of the refcount table.
    pub(super) fn table(&self) -> (u64, u64) {
        (self.offset, self.table.len() as u64)
    }

    /// The table as bytes of the file, with `entries` entries.
    pub(super) fn table_bytes(&self, entries: usize) -> Vec<u8> {
        let mut bytes: Vec<u8> =
            self.table.iter().take(entries).flat_map(|entry| entry.to_be_bytes()).collect();
        bytes.resize(entries * 8, 0);
        bytes
    }

    /// The table is elsewhere from now on: at `offset`, with these entries.
    pub(super) fn move_table(&mut self, offset: u64, bytes: &[u8]) {
        let (entries, _) = bytes.as_chunks();
        self.table = entries.iter().map(|entry| u64::from_be_bytes(*entry)).collect();
        self.offset = offset;
    }

    /// log2 of the clusters that a block counts.
    pub(super) fn block_bits(&self) -> u32 {
        self.shape.cluster_bits + 3 - self.order
    }

    /// Number of the block of a cluster.
    pub(super) fn block_of(&self, cluster: u64) -> u64 {
        cluster >> self.block_bits()
    }

    /// Offsets of all blocks, which may be invalid; 0 where there is none.
    pub(super) fn blocks(&self) -> impl Iterator<Item = u64> {
        self.table.iter().map(|raw| raw & BLOCK_OFFSET)
    }

    /// Offset of a block. `None`: it is missing.
    pub(super) fn block(&self, number: u64) -> io::Result<Option<u64>> {
        let raw = usize::try_from(number).ok().and_then(|number| self.table.get(number)).copied();
        match raw.unwrap_or(0) & BLOCK_OFFSET {
            0 => Ok(None),
            offset if offset % self.shape.cluster() != 0 || offset >= MAX_OFFSET => {
                Err(corrupt("a refcount block is not aligned"))
            }
            offset => Ok(Some(offset)),
        }
    }

    /// Enters a block whose content is durable. The table has room for it.
    pub(super) fn set_block(&mut self, io: &Io, number: u64, offset: u64) -> io::Result<()> {
        let Some(entry) = usize::try_from(number).ok().and_then(|number| self.table.get_mut(number)) else {
            return Err(corrupt("the refcount table is too short"));
        };
        self.cache.forget(offset, self.shape.cluster());
        io.write(&offset.to_be_bytes(), self.offset + number * 8)?;
        *entry = offset;
        Ok(())
    }

    /// Counts in a slice of a block.
    fn slice_bits(&self) -> u32 {
        self.cache.slice.ilog2() + 3 - self.order
    }

    /// The count of a cluster.
    pub(super) fn get(&mut self, io: &Io, cluster: u64) -> io::Result<u64> {
        let Some(block) = self.block(self.block_of(cluster))? else { return Ok(0) };
        let (start, number) = self.slice_of(block, cluster);
        let order = self.order;
        Ok(count(self.cache.get(io, start)?, order, number))
    }

    /// The slice of a block with the count of a cluster, and its number there.
    fn slice_of(&self, block: u64, cluster: u64) -> (u64, usize) {
        let within = cluster & ((1 << self.block_bits()) - 1);
        let slice = within >> self.slice_bits();
        (block + slice * self.cache.slice, (within & ((1 << self.slice_bits()) - 1)) as usize)
    }

    /// Changes the counts of clusters whose blocks exist, in the file, too.
    ///
    /// # Errors
    /// A block is missing, or a count is out of range: then those before are changed.
    pub(super) fn change(
        &mut self,
        io: &Io,
        mut run: Range<u64>,
        change: impl Fn(u64) -> Option<u64>,
    ) -> io::Result<()> {
        while run.start < run.end {
            let Some(block) = self.block(self.block_of(run.start))? else {
                return Err(corrupt("a refcount block is missing"));
            };
            let (start, first) = self.slice_of(block, run.start);
            let (order, most) = (self.order, (1_usize << self.slice_bits()) - first);
            let now = usize::try_from(run.end - run.start).unwrap_or(usize::MAX).min(most);
            let mut bytes = self.cache.get(io, start)?.to_vec();
            for number in first..first + now {
                let new = change(count(&bytes, order, number)).filter(|new| fits(*new, order));
                set_count(
                    &mut bytes,
                    order,
                    number,
                    new.ok_or_else(|| corrupt("a refcount is out of range"))?,
                );
            }
            let changed = first << order >> 3..(((first + now) << order) + 7) >> 3;
            let at = start + changed.start as u64;
            self.cache.write(io, &bytes[changed], at)?;
            run.start += now as u64;
        }
        Ok(())
    }

    /// A block that counts only `own` of its clusters, once, as bytes of the file.
    pub(super) fn new_block(&self, own: Range<u64>) -> Vec<u8> {
        let mut bytes = vec![0; self.shape.cluster() as usize];
        let mask = (1 << self.block_bits()) - 1;
        for cluster in own {
            set_count(&mut bytes, self.order, (cluster & mask) as usize, 1);
        }
        bytes
    }

    /// Finds up to `want` free clusters in `within`, in runs of at least `least` clusters.
    pub(super) fn find(
        &mut self,
        io: &Io,
        want: u64,
        within: Range<u64>,
        least: u64,
    ) -> io::Result<Vec<Range<u64>>> {
        let (mut runs, mut found): (Vec<Range<u64>>, u64) = (Vec::new(), 0);
        let mut run = within.start..within.start;
        let mut at = within.start;
        while at < within.end && found + (run.end - run.start) < want {
            let (is_free, until) = self.same_until(io, at)?;
            let until = until.min(within.end);
            if is_free {
                run.end = until.min(at + (want - found - (run.end - run.start)));
                at = run.end;
                continue;
            }
            keep(&mut runs, &mut found, &run, least);
            at = until;
            run = at..at;
        }
        keep(&mut runs, &mut found, &run, least);
        Ok(runs)
    }

    /// Whether `cluster` is free, and where that ends, as far as its slice or missing block tells.
    pub(super) fn same_until(&mut self, io: &Io, cluster: u64) -> io::Result<(bool, u64)> {
        let Some(block) = self.block(self.block_of(cluster))? else {
            return Ok((true, (self.block_of(cluster) + 1) << self.block_bits()));
        };
        let (start, first) = self.slice_of(block, cluster);
        let (order, end) = (self.order, 1_usize << self.slice_bits());
        let slice = self.cache.get(io, start)?;
        let is_free = count(slice, order, first) == 0;
        let same = (first..end).take_while(|number| (count(slice, order, *number) == 0) == is_free).count();
        Ok((is_free, cluster + same as u64))
    }

    /// Numbers of the blocks that are missing for clusters of these runs.
    pub(super) fn missing(&self, runs: &[Range<u64>]) -> io::Result<Vec<u64>> {
        let mut missing = Vec::new();
        for run in runs.iter().filter(|run| !run.is_empty()) {
            for number in self.block_of(run.start)..=self.block_of(run.end - 1) {
                if self.block(number)?.is_none() && missing.last() != Some(&number) {
                    missing.push(number);
                }
            }
        }
        Ok(missing)
    }
}

/// Adds a run that is long enough.
fn keep(runs: &mut Vec<Range<u64>>, found: &mut u64, run: &Range<u64>, least: u64) {
    let len = run.end - run.start;
    if len > 0 && len >= least {
        runs.push(run.clone());
        *found += len;
    }
}

/// Whether a count can be stored.
fn fits(value: u64, order: u32) -> bool {
    order == 6 || value >> (1 << order) == 0
}

/// A count in a slice.
pub(super) fn count(slice: &[u8], order: u32, number: usize) -> u64 {
    match order {
        0..=2 => {
            let bit = number << order;
            u64::from(slice[bit / 8] >> (bit % 8)) & ((1 << (1 << order)) - 1)
        }
        _ => {
            let bytes = 1 << (order - 3);
            slice[number * bytes..][..bytes].iter().fold(0, |sum, byte| sum << 8 | u64::from(*byte))
        }
    }
}

/// Sets a count in a slice; it fits.
pub(super) fn set_count(slice: &mut [u8], order: u32, number: usize, value: u64) {
    match order {
        0..=2 => {
            let bit = number << order;
            let mask = ((1_u16 << (1 << order)) - 1) as u8;
            let byte = &mut slice[bit / 8];
            *byte = *byte & !(mask << (bit % 8)) | (value as u8 & mask) << (bit % 8);
        }
        _ => {
            let bytes = 1 << (order - 3);
            slice[number * bytes..][..bytes].copy_from_slice(&value.to_be_bytes()[8 - bytes..]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_of_every_width_are_kept_apart() {
        for order in 0..=6 {
            let mut slice = vec![0; 64];
            let numbers = 512 >> order;
            for number in 0..numbers {
                set_count(&mut slice, order, number, (number % 2) as u64);
            }
            for number in 0..numbers {
                assert_eq!(count(&slice, order, number), (number % 2) as u64, "{order} {number}");
            }
            let most = if order == 6 { u64::MAX } else { (1 << (1 << order)) - 1 };
            assert!(fits(most, order) && (order == 6 || !fits(most + 1, order)));
            set_count(&mut slice, order, 2, most);
            let found: Vec<_> = (1..4).map(|number| count(&slice, order, number)).collect();
            assert_eq!(found, [1, most, 1]);
        }
    }
}
