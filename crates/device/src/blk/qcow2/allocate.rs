//! Fills the reserve, and gives clusters back.
use super::counts::Counts;
use super::entry::corrupt;
use super::header::MAX_ENTRIES;
use super::layer::Core;
use super::tables::{Pending, Tables};
use std::io;
use std::ops::Range;
use std::sync::MutexGuard;
use std::sync::atomic::Ordering;

/// Offset of the incompatible features in the header.
const INCOMPATIBLE: u64 = 72;
/// Offsets of the place of the refcount table in the header.
const REFCOUNT_TABLE: u64 = 48;

impl Core {
    /// Makes all writes durable that have ended.
    ///
    /// After an error, it is not known what is. So no cluster that waits for it is free any more.
    pub(super) fn sync(&self) -> io::Result<()> {
        self.io.sync().inspect_err(|_| self.tables().pending = Pending::default())
    }

    /// Marks the image as not closed: its refcounts may be too high. Version 2 has no mark.
    ///
    /// Whoever opens an image with the mark checks it. Without, a crash costs no more than the
    /// clusters of the reserve, so the mark need not be durable before anything else is.
    pub(super) fn mark(&self) -> io::Result<()> {
        // Relaxed: written twice, it is the same.
        if self.is_marked.swap(true, Ordering::Relaxed) || self.shape.version < 3 {
            return Ok(());
        }
        let marked = self.incompatible | super::header::DIRTY;
        let done = self.io.write(&marked.to_be_bytes(), INCOMPATIBLE);
        done.inspect_err(|_| self.is_marked.store(false, Ordering::Relaxed))
    }

    /// Adds clusters to the reserve, so that it may have `least`, or waits for another thread that does.
    ///
    /// # Errors
    /// ENOSPC: there is no free cluster. Or the storage fails.
    pub(super) fn fill<'a>(
        &'a self,
        mut tables: MutexGuard<'a, Tables>,
        least: u64,
    ) -> io::Result<MutexGuard<'a, Tables>> {
        if tables.is_filling {
            return Ok(self.wait(tables));
        }
        tables.is_filling = true;
        let want = tables.reserve.next(least);
        drop(tables);
        let filled = self.fill_alone(want);
        let mut tables = self.tables();
        tables.is_filling = false;
        self.changed.notify_all();
        tables.reserve.add(filled?);
        Ok(tables)
    }

    /// Finds free clusters, counts them, and makes them zeroes; all of that durably.
    fn fill_alone(&self, want: u64) -> io::Result<Vec<Range<u64>>> {
        let runs = self.count_free(want, 1)?;
        let prepared = self.mark().and_then(|()| self.prepare(&runs)).and_then(|()| self.io.sync());
        if let Err(error) = prepared {
            self.tables().pending.runs.extend(runs);
            return Err(error);
        }
        Ok(runs)
    }

    /// Finds up to `want` free clusters in runs of at least `least`, and counts them.
    fn count_free(&self, want: u64, least: u64) -> io::Result<Vec<Range<u64>>> {
        loop {
            let mut tables = self.tables();
            let tables = &mut *tables;
            let limit = self.limit()?;
            let Some(counts) = &mut tables.counts else { return Err(io::ErrorKind::PermissionDenied.into()) };
            let counted = counts.table().1 << counts.block_bits();
            let limit = if tables.is_table_full { limit.min(counted) } else { limit };
            let runs = counts.find(&self.io, want, tables.first_free..limit, least)?;
            let Some(end) = runs.iter().map(|run| run.end).max() else {
                return Err(io::Error::from_raw_os_error(libc::ENOSPC));
            };
            match self.io.grow(end << self.shape.cluster_bits) {
                // What there is of it is to be used.
                Err(error) if error.raw_os_error() == Some(libc::ENOSPC) && limit != self.limit()? => {
                    continue;
                }
                grown => grown?,
            }
            let missing = counts.missing(&runs)?;
            if missing.is_empty() {
                for (number, run) in runs.iter().enumerate() {
                    let counted = counts.change(&self.io, run.clone(), |count| (count == 0).then_some(1));
                    if let Err(error) = counted {
                        tables.pending.runs.extend(runs[..number].iter().cloned());
                        return Err(error);
                    }
                }
                if least == 1 {
                    tables.first_free = end;
                }
                return Ok(runs);
            }
            match self.add_blocks(tables, &missing, &runs) {
                // The table cannot grow: what it counts now is to be used.
                Err(error) if error.raw_os_error() == Some(libc::ENOSPC) && !tables.is_table_full => {
                    tables.is_table_full = true;
                }
                added => added?,
            }
        }
    }

    /// The first cluster number that cannot be used.
    fn limit(&self) -> io::Result<u64> {
        let end = if self.io.is_fixed() { self.io.size()? } else { super::header::MAX_OFFSET };
        Ok(end >> self.shape.cluster_bits)
    }

    /// Makes clusters read as zeroes.
    fn prepare(&self, runs: &[Range<u64>]) -> io::Result<()> {
        let bits = self.shape.cluster_bits;
        runs.iter().try_for_each(|run| self.io.zero(run.start << bits, (run.end - run.start) << bits, true))
    }

    /// Adds refcount blocks, each in a free cluster that it counts itself.
    fn add_blocks(&self, tables: &mut Tables, missing: &[u64], runs: &[Range<u64>]) -> io::Result<()> {
        let Some(counts) = &mut tables.counts else { return Err(io::ErrorKind::PermissionDenied.into()) };
        if missing.last().is_some_and(|last| *last >= counts.table().1) {
            return self.grow_refcount_table(tables);
        }
        let bits = counts.shape.cluster_bits;
        let own = |number: u64| {
            let first = number << counts.block_bits();
            let run = runs.iter().find(|run| run.end > first)?;
            Some(run.start.max(first))
        };
        let own: Option<Vec<u64>> = missing.iter().map(|number| own(*number)).collect();
        let own = own.ok_or_else(|| corrupt("a refcount block has no place"))?;
        for cluster in &own {
            self.io.write(&counts.new_block(*cluster..cluster + 1), cluster << bits)?;
        }
        self.io.sync()?;
        for (number, cluster) in missing.iter().zip(&own) {
            // Durable with the sync that ends `fill`, before anything names what the block counts.
            counts.set_block(&self.io, *number, cluster << bits)?;
            tables.map.forget(cluster << bits);
        }
        Ok(())
    }

    /// Moves the refcount table to a larger place, behind all clusters that it counts.
    fn grow_refcount_table(&self, tables: &mut Tables) -> io::Result<()> {
        let Some(counts) = &mut tables.counts else { return Err(io::ErrorKind::PermissionDenied.into()) };
        let (bits, block_bits) = (self.shape.cluster_bits, counts.block_bits());
        let (old_offset, old_entries) = counts.table();
        let first = old_entries << block_bits;
        let (mut blocks, mut table) = (1, 1);
        loop {
            let entries = (first >> block_bits) + blocks;
            let room = (entries + entries / 2).min(MAX_ENTRIES).max(entries);
            let larger = (room * 8).div_ceil(self.shape.cluster());
            if (larger, blocks_for(larger, block_bits)) == (table, blocks) {
                break;
            }
            (table, blocks) = (larger.max(table), blocks_for(larger.max(table), block_bits));
        }
        let entries = (table << bits) / 8;
        if entries > MAX_ENTRIES {
            return Err(io::Error::from_raw_os_error(libc::ENOSPC));
        }
        self.write_blocks(counts, first, blocks, table)?;
        let mut bytes = counts.table_bytes(entries as usize);
        for number in 0..blocks {
            let at = ((first >> block_bits) + number) as usize * 8;
            bytes[at..at + 8].copy_from_slice(&((first + number) << bits).to_be_bytes());
        }
        let offset = (first + blocks) << bits;
        self.io.write(&bytes, offset)?;
        self.io.sync()?;
        let place = [&offset.to_be_bytes()[..], &(table as u32).to_be_bytes()].concat();
        self.io.write(&place, REFCOUNT_TABLE)?;
        counts.move_table(offset, &bytes);
        tables.map.reserve((offset, entries));
        let old = old_offset >> bits;
        tables.pending.runs.push(old..old + (old_entries * 8).div_ceil(self.shape.cluster()));
        Ok(())
    }

    /// The first cluster that `blocks` missing blocks in a row would count; the table may end before.
    ///
    /// Without a block, all that it would count is free.
    fn first_uncounted(&self, counts: &Counts, blocks: u64) -> io::Result<u64> {
        let (mut first, mut number) = (0, 0);
        while number < counts.table().1 && number - first < blocks {
            if counts.block(number)?.is_some() {
                first = number + 1;
            }
            number += 1;
        }
        Ok(first << counts.block_bits())
    }

    /// Writes blocks that count themselves and `len` clusters behind them; the first one is at `first`.
    fn write_blocks(&self, counts: &Counts, first: u64, blocks: u64, len: u64) -> io::Result<()> {
        let (bits, block_bits) = (self.shape.cluster_bits, counts.block_bits());
        let end = first + blocks + len;
        self.io.grow(end << bits)?;
        for number in 0..blocks {
            let from = first + (number << block_bits);
            let counted = from.min(end)..end.min(from + (1 << block_bits));
            self.io.write(&counts.new_block(counted), (first + number) << bits)?;
        }
        Ok(())
    }

    /// Allocates clusters in a row, for a table. Their content is anything.
    ///
    /// They are counted durably after the next sync.
    pub(super) fn allocate_run(&self, len: u64) -> io::Result<u64> {
        let mut tables = self.tables();
        while tables.is_filling {
            tables = self.wait(tables);
        }
        tables.is_filling = true;
        let fits_block = tables.counts.as_ref().is_some_and(|counts| len <= 1 << counts.block_bits() >> 1);
        drop(tables);
        let done = self.mark().and_then(|()| match fits_block {
            true => {
                let runs = self.count_free(len, len)?;
                runs.first().map(|run| run.start).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOSPC))
            }
            false => self.allocate_behind(len),
        });
        self.tables().is_filling = false;
        self.changed.notify_all();
        done
    }

    /// Allocates more clusters in a row than a block leaves, where none are counted.
    fn allocate_behind(&self, len: u64) -> io::Result<u64> {
        let mut tables = self.tables();
        let tables = &mut *tables;
        loop {
            let Some(counts) = &mut tables.counts else { return Err(io::ErrorKind::PermissionDenied.into()) };
            let (bits, block_bits) = (self.shape.cluster_bits, counts.block_bits());
            let blocks = blocks_for(len, block_bits);
            let first = self.first_uncounted(counts, blocks)?;
            if (first >> block_bits) + blocks > counts.table().1 {
                self.grow_refcount_table(tables)?;
                continue;
            }
            self.write_blocks(counts, first, blocks, len)?;
            self.io.sync()?;
            for number in 0..blocks {
                let cluster = first + number;
                counts.set_block(&self.io, (first >> block_bits) + number, cluster << bits)?;
                tables.map.forget(cluster << bits);
            }
            return Ok(first + blocks);
        }
    }

    /// Takes a use from clusters whose mappings are removed durably, and frees those that have none left.
    ///
    /// What an error leaves is counted and not used.
    pub(super) fn release(&self, pending: Pending) -> io::Result<()> {
        let bits = self.shape.cluster_bits;
        let mut lost: Vec<(Range<u64>, u64)> = Vec::new();
        for run in pending.runs {
            lost.push((run, 1));
        }
        lost.extend(pending.shared.into_iter().map(|(cluster, times)| (cluster..cluster + 1, times)));
        for (run, times) in lost {
            for (part, is_last) in self.split_by_use(run, times)? {
                if is_last {
                    // Before it can be allocated again.
                    self.io.free(part.start << bits, (part.end - part.start) << bits)?;
                }
                let mut tables = self.tables();
                let tables = &mut *tables;
                let Some(counts) = &mut tables.counts else { return Ok(()) };
                counts.change(&self.io, part.clone(), |count| Some(count.saturating_sub(times)))?;
                if is_last {
                    tables.first_free = tables.first_free.min(part.start);
                }
            }
        }
        Ok(())
    }

    /// Splits a run into parts that are counted, by whether `times` is all that is left of their uses.
    fn split_by_use(&self, run: Range<u64>, times: u64) -> io::Result<Vec<(Range<u64>, bool)>> {
        let mut tables = self.tables();
        let Some(counts) = &mut tables.counts else { return Ok(Vec::new()) };
        let mut parts: Vec<(Range<u64>, bool)> = Vec::new();
        for cluster in run {
            let count = counts.get(&self.io, cluster)?;
            let is_last = count <= times;
            match parts.last_mut() {
                _ if count == 0 => {}
                Some((part, last)) if *last == is_last && part.end == cluster => part.end += 1,
                _ => parts.push((cluster..cluster + 1, is_last)),
            }
        }
        Ok(parts)
    }

    /// Gives the reserve back and removes the mark. Everything is durable then.
    ///
    /// `cut`: the file may become shorter. Nothing is allocated meanwhile.
    pub(super) fn close(&self, cut: bool) -> io::Result<()> {
        if !self.is_writable || !self.is_marked.load(Ordering::Relaxed) {
            return Ok(());
        }
        let pending = std::mem::take(&mut self.tables().pending);
        self.io.sync()?;
        self.release(pending)?;
        let bits = self.shape.cluster_bits;
        {
            let mut tables = self.tables();
            let runs = tables.reserve.take_all();
            let Some(counts) = &mut tables.counts else { return Ok(()) };
            for run in &runs {
                counts.change(&self.io, run.clone(), |count| Some(count.saturating_sub(1)))?;
            }
            if let Some(first) = runs.iter().map(|run| run.start).min() {
                tables.first_free = tables.first_free.min(first);
            }
            let end = self.io.size()?;
            if let (Some(last), true, Some(file)) = (runs.last(), cut, self.io.regular_file())
                && last.end << bits == end
            {
                file.set_len(last.start << bits)?;
            }
        }
        self.io.sync()?;
        if self.is_marked.swap(false, Ordering::Relaxed) && self.shape.version >= 3 {
            self.io.write(&self.incompatible.to_be_bytes(), INCOMPATIBLE)?;
            self.io.sync()?;
        }
        Ok(())
    }
}

/// Blocks that count themselves and `len` clusters.
fn blocks_for(len: u64, block_bits: u32) -> u64 {
    let mut blocks = 1;
    while blocks << block_bits < blocks + len {
        blocks += 1;
    }
    blocks
}
