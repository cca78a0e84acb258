//! Where the clusters of the disk are: the L1 table, in memory, and the L2 tables, cached.
use super::entry::{COPIED, Entry, OFFSET, Shape, corrupt};
use super::header::Header;
use super::io::Io;
use super::slices::Slices;
use paravane_store::Store;
use std::io;
use std::ops::Range;
use std::sync::Arc;

/// Most bytes of L2 tables in memory, for each image. They map 128 GiB in clusters of 64 KiB.
const CACHE: u64 = 16 << 20;

/// See the module.
#[derive(Debug)]
pub(super) struct Map {
    shape: Shape,
    l1: Vec<u64>,
    l1_offset: u64,
    slices: Slices,
    /// Ranges of the file that are no L2 table and no data: header, L1 table, refcount table.
    reserved: Vec<Range<u64>>,
}

impl Map {
    /// Reads the L1 table.
    pub(super) fn read(source: &Arc<dyn Store>, header: &Header) -> io::Result<Self> {
        let shape = Shape { cluster_bits: header.cluster_bits, version: header.version };
        let (l1_offset, entries) = header.l1_table;
        let mut map = Self {
            shape,
            l1: read_table(source, l1_offset, entries)?,
            l1_offset,
            slices: Slices::new(shape.cluster(), CACHE),
            reserved: Vec::new(),
        };
        map.reserve(header.refcount_table);
        Ok(map)
    }

    /// Sets the place of the refcount table: its offset and entries.
    pub(super) fn reserve(&mut self, (offset, entries): (u64, u64)) {
        let table = |offset: u64, entries: u64| offset..self.shape.round_up(offset + entries * 8);
        self.reserved = vec![
            0..self.shape.cluster(),
            table(self.l1_offset, self.l1.len() as u64),
            table(offset, entries),
        ];
    }

    /// Offset and entries of the L1 table.
    pub(super) fn l1_table(&self) -> (u64, u64) {
        (self.l1_offset, self.l1.len() as u64)
    }

    /// The L1 table as bytes of the file, with `entries` entries.
    pub(super) fn l1_bytes(&self, entries: usize) -> Vec<u8> {
        let mut bytes: Vec<u8> = self.l1.iter().take(entries).flat_map(|entry| entry.to_be_bytes()).collect();
        bytes.resize(entries * 8, 0);
        bytes
    }

    /// The L1 table is elsewhere from now on, with `entries` entries.
    pub(super) fn move_l1(&mut self, offset: u64, entries: usize, refcount_table: (u64, u64)) {
        self.l1_offset = offset;
        self.l1.resize(entries, 0);
        self.reserve(refcount_table);
    }

    /// Number of the L2 table for an offset of the disk.
    pub(super) fn index(&self, offset: u64) -> u64 {
        offset >> (self.shape.cluster_bits + self.shape.table_bits())
    }

    /// An L2 table: its offset, and whether it is used once. `None`: there is none.
    pub(super) fn table(&self, index: u64) -> io::Result<Option<(u64, bool)>> {
        let raw = usize::try_from(index).ok().and_then(|index| self.l1.get(index)).copied().unwrap_or(0);
        match raw & OFFSET {
            0 => Ok(None),
            offset if offset % self.shape.cluster() != 0 => Err(corrupt("an L2 table is not aligned")),
            offset => {
                self.check(offset)?;
                Ok(Some((offset, raw & COPIED != 0)))
            }
        }
    }

    /// Checks that a cluster is not that of another structure.
    fn check(&self, host: u64) -> io::Result<()> {
        match self.reserved.iter().any(|reserved| reserved.contains(&host)) {
            true => Err(corrupt("a cluster is used twice, once for the image's own tables")),
            false => Ok(()),
        }
    }

    /// Enters an L2 table that is used once.
    pub(super) fn set_table(&mut self, io: &Io, index: u64, offset: u64) -> io::Result<()> {
        let raw = Entry::own(offset);
        let Some(entry) = usize::try_from(index).ok().and_then(|index| self.l1.get_mut(index)) else {
            return Err(corrupt("the L1 table is too short"));
        };
        io.write(&raw.to_be_bytes(), self.l1_offset + index * 8)?;
        *entry = raw;
        Ok(())
    }

    /// What is at `offset` of the disk, and for how many bytes: at most `len`, which is not 0.
    ///
    /// A run of data is contiguous in the file.
    pub(super) fn lookup(&mut self, io: &Io, offset: u64, len: u64) -> io::Result<(Entry, u64)> {
        let cluster = self.shape.cluster();
        let within = offset & (cluster - 1);
        let first = self.entry(io, offset)?;
        let mut found = self.run_of(first, offset)? - if first.1 { 0 } else { within };
        while found < len {
            let (entry, is_run) = self.entry(io, offset + found)?;
            if is_run && first.0 == Entry::Unallocated {
                found += self.run_of((entry, is_run), offset + found)?;
                continue;
            }
            if entry != follows(first.0, within + found) {
                break;
            }
            found += cluster;
        }
        let entry = match first.0 {
            Entry::Data(place) => Entry::Data(super::entry::Place { host: place.host + within, ..place }),
            other => other,
        };
        Ok((entry, found.min(len)))
    }

    /// Bytes from `offset` on that an entry stands for: the rest of a missing L2 table, or a cluster.
    fn run_of(&self, (_, is_run): (Entry, bool), offset: u64) -> io::Result<u64> {
        let span = self.shape.table_span();
        Ok(if is_run { span - (offset & (span - 1)) } else { self.shape.cluster() })
    }

    /// The entry for an offset, and whether its whole L2 table is missing.
    fn entry(&mut self, io: &Io, offset: u64) -> io::Result<(Entry, bool)> {
        let Some((table, _)) = self.table(self.index(offset))? else { return Ok((Entry::Unallocated, true)) };
        let raw = self.slices.long(io, self.place(table, offset))?;
        let entry = Entry::decode(raw, self.shape)?;
        if let Entry::Data(place) | Entry::Zero { kept: Some(place) } = entry {
            self.check(place.host)?;
        }
        Ok((entry, false))
    }

    /// Offset in the file of the entry for an offset of the disk.
    fn place(&self, table: u64, offset: u64) -> u64 {
        let number = (offset >> self.shape.cluster_bits) & ((1 << self.shape.table_bits()) - 1);
        table + number * 8
    }

    /// Writes the entries for clusters of the disk from `offset` on, whose L2 tables are used once.
    pub(super) fn set(&mut self, io: &Io, mut offset: u64, raw: &[u64]) -> io::Result<()> {
        let mut rest = raw;
        while !rest.is_empty() {
            let Some((table, true)) = self.table(self.index(offset))? else {
                return Err(corrupt("an L2 table is missing"));
            };
            let place = self.place(table, offset);
            let in_slice = (self.slices.slice - (place & (self.slices.slice - 1))) / 8;
            let (now, later) = rest.split_at(rest.len().min(in_slice as usize));
            let bytes: Vec<u8> = now.iter().flat_map(|entry| entry.to_be_bytes()).collect();
            self.slices.write(io, &bytes, place)?;
            offset += (now.len() as u64) << self.shape.cluster_bits;
            rest = later;
        }
        Ok(())
    }

    /// A cluster of the file is something else from now on.
    pub(super) fn forget(&mut self, host: u64) {
        self.slices.forget(host, self.shape.cluster());
    }
}

/// The entry that continues a run, `past` bytes after the start of its first cluster.
fn follows(first: Entry, past: u64) -> Entry {
    match first {
        Entry::Data(place) => {
            Entry::Data(super::entry::Place { host: place.host.saturating_add(past), ..place })
        }
        // Kept clusters do not matter to a reader, but they tell runs apart.
        Entry::Unallocated | Entry::Zero { kept: None } => first,
        // Never equal to what is found: an entry of one cluster.
        Entry::Zero { kept: Some(_) } | Entry::Compressed { .. } => Entry::Compressed { offset: 0, len: 0 },
    }
}

/// The entries of a table. Bytes beyond the end of the file are zeroes.
pub(super) fn read_table(source: &Arc<dyn Store>, offset: u64, entries: u64) -> io::Result<Vec<u64>> {
    // At most 32 MiB: `Header::read` has checked that.
    let mut bytes = vec![0; entries as usize * 8];
    source.read_up_to(&mut bytes, offset)?;
    let (entries, _) = bytes.as_chunks();
    Ok(entries.iter().map(|entry| u64::from_be_bytes(*entry)).collect())
}
