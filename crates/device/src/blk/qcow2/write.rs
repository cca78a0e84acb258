//! Writes: into clusters that the disk has, or into new ones.
//!
//! ```text
//!   new cluster from the reserve -> data into it -> if data of the old place would be missed: sync
//!      -> entry in the L2 table -> complete
//! ```
//! Where the disk read as zeroes before, no order is needed: the new cluster reads as zeroes until its
//! data is there. Elsewhere, the entry is written when the data is durable, so that a crash shows the
//! old or the new data. Writes that wait for that share a sync.
use super::entry::{Entry, Place};
use super::layer::Core;
use super::tables::Tables;
use std::io;
use std::sync::MutexGuard;

/// Most clusters that are allocated at once.
const AT_ONCE: u64 = 2048;

/// A cluster of the disk that gets one of the file.
#[derive(Debug)]
struct Move {
    /// What it was.
    old: Entry,
    /// Number of its cluster in the file.
    host: u64,
    /// The cluster is of the reserve.
    is_new: bool,
    /// It reads as zeroes until now.
    was_zero: bool,
}

/// Clusters of the disk from `first` on that get clusters of the file.
#[derive(Debug)]
struct Allocation {
    first: u64,
    moves: Vec<Move>,
}

/// What the next bytes of a write need.
#[derive(Debug)]
enum WriteStep {
    /// They lie at an offset in the file.
    InPlace {
        host: u64,
        len: u64,
    },
    Allocate(Allocation),
}

impl Core {
    /// Writes data. No cluster is freed meanwhile: the caller sees to that.
    ///
    /// `entered` is told of new clusters, as offsets on the disk and in the file.
    pub(super) fn write(
        &self,
        mut data: &[u8],
        mut offset: u64,
        entered: &dyn Fn(u64, u64),
    ) -> io::Result<()> {
        if !self.is_writable {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        while !data.is_empty() {
            let done = match self.next_step(offset, data.len() as u64)? {
                WriteStep::InPlace { host, len } => {
                    self.io.write(&data[..len as usize], host)?;
                    len
                }
                WriteStep::Allocate(allocation) => {
                    let end = (allocation.first + allocation.moves.len() as u64) << self.shape.cluster_bits;
                    let len = (end - offset).min(data.len() as u64);
                    self.allocate(allocation, &data[..len as usize], offset, entered)?;
                    len
                }
            };
            data = &data[done as usize..];
            offset += done;
        }
        Ok(())
    }

    fn next_step(&self, offset: u64, len: u64) -> io::Result<WriteStep> {
        let bits = self.shape.cluster_bits;
        let mut most = AT_ONCE;
        let mut tables = self.tables();
        loop {
            if tables.is_allocating(offset >> bits) {
                tables = self.wait(tables);
                continue;
            }
            let (entry, run) = tables.map.lookup(&self.io, offset, len)?;
            if let Entry::Data(Place { host, is_own: true }) = entry {
                self.check_inside(host)?;
                return Ok(WriteStep::InPlace { host, len: run });
            }
            let old = self.to_move(&mut tables, offset, len, most)?;
            let (new, missing) = self.needed(&tables, offset >> bits, &old)?;
            if tables.reserve.len >= new + missing {
                return Ok(WriteStep::Allocate(self.begin(&mut tables, offset >> bits, old)?));
            }
            match self.fill(tables, new + missing) {
                Ok(filled) => tables = filled,
                // There may be room for one.
                Err(error) if error.raw_os_error() == Some(libc::ENOSPC) && most > 1 => {
                    most = 1;
                    tables = self.tables();
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Checks that a cluster that is written in place begins in the file.
    fn check_inside(&self, host: u64) -> io::Result<()> {
        match host < self.io.size()?.max(1).next_multiple_of(self.shape.cluster()) {
            true => Ok(()),
            false => Err(super::entry::corrupt("a cluster lies outside of the file")),
        }
    }

    /// What the next clusters are that a write has to move.
    fn to_move(&self, tables: &mut Tables, offset: u64, len: u64, most: u64) -> io::Result<Vec<Entry>> {
        let bits = self.shape.cluster_bits;
        let (first, last) = (offset >> bits, (offset + len - 1) >> bits);
        let mut old = Vec::new();
        for cluster in first..=last.min(first + most - 1) {
            let (entry, _) = tables.map.lookup(&self.io, cluster << bits, 1)?;
            if matches!(entry, Entry::Data(Place { is_own: true, .. })) || tables.is_allocating(cluster) {
                break;
            }
            old.push(entry);
        }
        Ok(old)
    }

    /// Clusters that a write needs, for data and for L2 tables.
    fn needed(&self, tables: &Tables, first: u64, old: &[Entry]) -> io::Result<(u64, u64)> {
        let new = old.iter().filter(|entry| kept(entry).is_none()).count() as u64;
        let mut missing = 0;
        for index in self.indices(tables, first, old.len() as u64) {
            missing += u64::from(!matches!(tables.map.table(index)?, Some((_, true))));
        }
        Ok((new, missing))
    }

    /// Numbers of the L2 tables for clusters.
    fn indices(&self, tables: &Tables, first: u64, len: u64) -> std::ops::RangeInclusive<u64> {
        let bits = self.shape.cluster_bits;
        tables.map.index(first << bits)..=tables.map.index((first + len.max(1) - 1) << bits)
    }

    /// Takes clusters from the reserve, which has enough.
    fn begin(
        &self,
        tables: &mut MutexGuard<'_, Tables>,
        first: u64,
        old: Vec<Entry>,
    ) -> io::Result<Allocation> {
        let bits = self.shape.cluster_bits;
        for index in self.indices(tables, first, old.len() as u64) {
            self.own_table(tables, index)?;
        }
        let mut moves = Vec::with_capacity(old.len());
        for old in old {
            let host = match kept(&old) {
                Some(host) => host >> bits,
                None => tables.reserve.take().ok_or_else(|| io::Error::from_raw_os_error(libc::ENOSPC))?,
            };
            moves.push(Move { old, host, is_new: kept(&old).is_none(), was_zero: false });
        }
        tables.allocating.push(first..first + moves.len() as u64);
        Ok(Allocation { first, moves })
    }

    /// Gives the disk an L2 table that is used once. The reserve has a cluster for it.
    pub(super) fn own_table(&self, tables: &mut Tables, index: u64) -> io::Result<()> {
        let old = match tables.map.table(index)? {
            Some((_, true)) => return Ok(()),
            Some((shared, false)) => Some(shared),
            None => None,
        };
        let bits = self.shape.cluster_bits;
        let new = tables.reserve.take().ok_or_else(|| io::Error::from_raw_os_error(libc::ENOSPC))? << bits;
        tables.map.forget(new);
        let Some(shared) = old else {
            // It reads as zeroes, durably: nothing is allocated.
            return tables.map.set_table(&self.io, index, new);
        };
        let mut entries = vec![0; self.shape.cluster() as usize];
        let copied = self.io.read(&mut entries, shared).and_then(|()| self.io.write(&entries, new));
        if let Err(error) = copied.and_then(|()| self.io.sync()) {
            tables.pending.push(new >> bits);
            return Err(error);
        }
        tables.map.set_table(&self.io, index, new)?;
        tables.pending.push(shared >> bits);
        Ok(())
    }

    /// Writes data into new clusters, and enters them.
    fn allocate(
        &self,
        mut allocation: Allocation,
        data: &[u8],
        offset: u64,
        entered: &dyn Fn(u64, u64),
    ) -> io::Result<()> {
        let filled = self.fill_moves(&mut allocation, data, offset);
        let bits = self.shape.cluster_bits;
        let Allocation { first, moves } = allocation;
        let mut tables = self.tables();
        let done = match filled {
            Ok(()) => {
                let raw: Vec<u64> = moves.iter().map(|moved| Entry::own(moved.host << bits)).collect();
                tables.map.set(&self.io, first << bits, &raw)
            }
            Err(error) => {
                // They may have data, and were never named.
                moves.iter().filter(|moved| moved.is_new).for_each(|moved| tables.pending.push(moved.host));
                Err(error)
            }
        };
        if done.is_ok() {
            for (number, moved) in (first..).zip(&moves) {
                // Clusters that are kept stay where they are.
                if moved.is_new {
                    tables.pending.push_entry(moved.old, bits);
                }
                entered(number << bits, moved.host << bits);
            }
        }
        let range = first..first + moves.len() as u64;
        tables.allocating.retain(|allocating| *allocating != range);
        self.changed.notify_all();
        done
    }

    /// Writes data, and what must not be missing around it, into clusters that nothing names yet.
    fn fill_moves(&self, allocation: &mut Allocation, data: &[u8], offset: u64) -> io::Result<()> {
        let (bits, cluster) = (self.shape.cluster_bits, self.shape.cluster());
        let end = offset + data.len() as u64;
        let mut is_ordered = false;
        // Data that is yet to be written, at an offset in the file.
        let mut run: (u64, std::ops::Range<usize>) = (0, 0..0);
        for (number, moved) in (allocation.first..).zip(&mut allocation.moves) {
            let (start, host) = (number << bits, moved.host << bits);
            moved.was_zero = self.is_zero_entry(moved.old, start, cluster)?;
            is_ordered |= !moved.was_zero || !moved.is_new;
            let part = offset.max(start)..end.min(start + cluster);
            let of_data = (part.start - offset) as usize..(part.end - offset) as usize;
            let at = host + (part.start - start);
            let is_whole = part.end - part.start == cluster;
            if is_whole || moved.was_zero && moved.is_new {
                if run.0 + run.1.len() as u64 == at && run.1.end == of_data.start {
                    run.1.end = of_data.end;
                    continue;
                }
                self.write_run(&run, data)?;
                run = (at, of_data);
                continue;
            }
            let mut whole = vec![0; cluster as usize];
            if !moved.was_zero {
                self.read_entry(moved.old, &mut whole, start)?;
            }
            whole[(part.start - start) as usize..][..of_data.len()].copy_from_slice(&data[of_data]);
            self.io.write(&whole, host)?;
        }
        self.write_run(&run, data)?;
        if is_ordered { self.sync() } else { Ok(()) }
    }

    fn write_run(&self, (at, part): &(u64, std::ops::Range<usize>), data: &[u8]) -> io::Result<()> {
        match part.is_empty() {
            true => Ok(()),
            false => self.io.write(&data[part.clone()], *at),
        }
    }
}

/// The cluster that is kept for zeroes, and may be written to.
fn kept(entry: &Entry) -> Option<u64> {
    match entry {
        Entry::Zero { kept: Some(Place { host, is_own: true }) } => Some(*host),
        _ => None,
    }
}
