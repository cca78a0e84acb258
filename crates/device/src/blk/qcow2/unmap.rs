//! Discards, zeroes, and another size of the disk. Nothing else uses the clusters meanwhile.
use super::entry::{Entry, Place, ZERO};
use super::header::MAX_ENTRIES;
use super::layer::Core;
use super::tables::Tables;
use std::io;
use std::sync::MutexGuard;
use std::sync::atomic::Ordering;

/// Offsets of fields in the header.
const SIZE: u64 = 24;
const L1_ENTRIES: u64 = 36;

/// What becomes of clusters that are unmapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unmap {
    /// Anything: a hint.
    Discard,
    /// They read as zeroes.
    Zero,
    /// They are beyond the end of the disk.
    Cut,
}

impl Core {
    /// Whether whole clusters can be zeroed without writing zeroes.
    pub(super) fn can_mark_zeroes(&self) -> bool {
        self.shape.version >= 3 || !self.has_backing
    }

    /// Unmaps the whole clusters of a range. What they were is free after the next [`Core::settle`].
    ///
    /// `Unmap::Zero` needs [`Core::can_mark_zeroes`].
    pub(super) fn unmap(&self, offset: u64, len: u64, how: Unmap) -> io::Result<()> {
        let end = self.shape.start(offset.saturating_add(len));
        let mut at = self.shape.round_up(offset);
        self.mark()?;
        while at < end {
            let table_end = (at | (self.shape.table_span() - 1)).saturating_add(1);
            self.unmap_in_table(at, table_end.min(end), how)?;
            at = table_end;
            let is_long = self.tables().pending.is_long();
            if is_long {
                self.settle()?;
            }
        }
        Ok(())
    }

    /// Unmaps clusters that one L2 table maps.
    fn unmap_in_table(&self, from: u64, to: u64, how: Unmap) -> io::Result<()> {
        let bits = self.shape.cluster_bits;
        let mut tables = self.tables();
        let index = tables.map.index(from);
        if tables.map.table(index)?.is_none() && (how != Unmap::Zero || !self.has_backing) {
            return Ok(());
        }
        let mut at = from;
        while at < to {
            let (old, _) = tables.map.lookup(&self.io, at, 1)?;
            let Some(raw) = self.unmapped(old, how) else {
                at += self.shape.cluster();
                continue;
            };
            tables = self.owned(tables, index)?;
            // As many as become the same, so that they are written at once.
            let (mut olds, mut end) = (vec![old], at + self.shape.cluster());
            while end < to {
                let (next, _) = tables.map.lookup(&self.io, end, 1)?;
                if self.unmapped(next, how) != Some(raw) {
                    break;
                }
                olds.push(next);
                end += self.shape.cluster();
            }
            tables.map.set(&self.io, at, &vec![raw; olds.len()])?;
            olds.into_iter().for_each(|old| tables.pending.push_entry(old, bits));
            at = end;
        }
        Ok(())
    }

    /// The new entry of a cluster. `None`: it stays.
    fn unmapped(&self, old: Entry, how: Unmap) -> Option<u64> {
        match (old, how) {
            (Entry::Unallocated, Unmap::Zero) if self.has_backing => Some(ZERO),
            (Entry::Unallocated, _) => None,
            (_, Unmap::Cut) => Some(0),
            (Entry::Zero { kept: None }, _) => None,
            _ if self.shape.version >= 3 => Some(ZERO),
            // It would show the backing file's data: worse than what is there.
            _ if self.has_backing => None,
            _ => Some(0),
        }
    }

    /// Gives the disk an L2 table that is used once.
    fn owned<'a>(
        &'a self,
        mut tables: MutexGuard<'a, Tables>,
        index: u64,
    ) -> io::Result<MutexGuard<'a, Tables>> {
        loop {
            if matches!(tables.map.table(index)?, Some((_, true))) {
                return Ok(tables);
            }
            match tables.reserve.len {
                0 => tables = self.fill(tables, 1)?,
                _ => self.own_table(&mut tables, index)?,
            }
        }
    }

    /// Makes everything durable, and frees what waits for it. Nobody reads what is to be free.
    pub(super) fn settle(&self) -> io::Result<()> {
        let pending = std::mem::take(&mut self.tables().pending);
        self.io.sync()?;
        self.release(pending)
    }

    /// Sets the size of the disk in bytes.
    pub(super) fn resize(&self, size: u64) -> io::Result<()> {
        let old = self.size();
        match size < old {
            true => self.unmap(size, self.shape.round_up(old) - size, Unmap::Cut)?,
            false => self.prepare_growth(old, size)?,
        }
        // A crash before leaves the old size; after, the new one.
        self.settle()?;
        self.io.write(&size.to_be_bytes(), SIZE)?;
        self.io.sync()?;
        // Relaxed: see `Core::size`.
        self.size.store(size, Ordering::Relaxed);
        Ok(())
    }

    /// Makes room in the L1 table, and zeroes of what a smaller disk did not show.
    fn prepare_growth(&self, old: u64, size: u64) -> io::Result<()> {
        let entries = size.div_ceil(self.shape.table_span());
        if entries > MAX_ENTRIES {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "the L1 table would be larger than 32 MiB",
            ));
        }
        if entries > self.tables().map.l1_table().1 {
            self.grow_l1(entries)?;
        }
        let below = self.below.as_ref().map_or(Ok(0), super::layer::Below::size)?;
        let shown = self.shape.round_up(old).max(below.min(size)).min(size);
        self.zero(old, shown - old, &|_, _| {})
    }

    fn grow_l1(&self, entries: u64) -> io::Result<()> {
        let clusters = (entries * 8).div_ceil(self.shape.cluster());
        let first = self.allocate_run(clusters)?;
        let (bits, mut tables) = (self.shape.cluster_bits, self.tables());
        let mut bytes = tables.map.l1_bytes(entries as usize);
        bytes.resize((clusters << bits) as usize, 0);
        self.io.write(&bytes, first << bits)?;
        self.io.sync()?;
        let place = [&(entries as u32).to_be_bytes()[..], &(first << bits).to_be_bytes()].concat();
        self.io.write(&place, L1_ENTRIES)?;
        let (old_offset, old_entries) = tables.map.l1_table();
        let refcount_table = tables.counts.as_ref().map_or((0, 0), |counts| counts.table());
        tables.map.move_l1(first << bits, entries as usize, refcount_table);
        let old = old_offset >> bits;
        tables.pending.runs.push(old..old + (old_entries * 8).div_ceil(self.shape.cluster()));
        Ok(())
    }

    /// Makes a range read as zeroes: whole clusters by marks, if that can be, and the rest by writes.
    pub(super) fn zero(&self, offset: u64, len: u64, entered: &dyn Fn(u64, u64)) -> io::Result<()> {
        let end = offset + len;
        let from = self.shape.round_up(offset).min(end);
        // The end of the disk is that of its last cluster, too.
        let to = if end >= self.size() { self.shape.round_up(end) } else { self.shape.start(end) }.max(from);
        self.write_zeroes(offset, from - offset, entered)?;
        match self.can_mark_zeroes() {
            true => self.unmap(from, to - from, Unmap::Zero)?,
            false => self.write_zeroes(from, to.min(end) - from, entered)?,
        }
        self.write_zeroes(to.min(end), end - to.min(end), entered)
    }

    /// Makes a range read as zeroes, in the clusters that it has; those that it has not are marked.
    pub(super) fn zero_in_place(&self, offset: u64, len: u64, entered: &dyn Fn(u64, u64)) -> io::Result<()> {
        let (mut at, end) = (offset, offset + len);
        while at < end {
            let (entry, run) = self.lookup(at, end - at)?;
            match entry {
                Entry::Data(Place { is_own: true, .. }) => self.write_zeroes(at, run, entered)?,
                Entry::Zero { .. } => {}
                _ => self.zero(at, run, entered)?,
            }
            at += run;
        }
        Ok(())
    }

    /// Writes zeroes where the disk does not read as zeroes.
    pub(super) fn write_zeroes(&self, offset: u64, len: u64, entered: &dyn Fn(u64, u64)) -> io::Result<()> {
        const ZEROES: u64 = 64 << 10;
        let (mut at, end) = (offset, offset + len);
        let mut zeroes = Vec::new();
        while at < end {
            let (entry, run) = self.lookup(at, end - at)?;
            let run = run.min(self.shape.cluster().max(ZEROES));
            if let Entry::Data(Place { host, is_own: true }) = entry
                && (host | run) & (self.shape.cluster() - 1) == 0
            {
                self.io.zero(host, run, false)?;
            } else if !self.is_zero_entry(entry, at, run)? {
                let now = run.min(ZEROES);
                zeroes.resize(now as usize, 0);
                self.write(&zeroes, at, entered)?;
                at += now;
                continue;
            }
            at += run;
        }
        Ok(())
    }
}
