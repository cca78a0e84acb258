//! A check of a qcow2 image's refcounts against its references.
//!
//! The same errors as `qemu-img check`, without a process. Leaks are no errors; they are counted.
use std::collections::{HashMap, HashSet};

/// Offset of a cluster in an entry of the L1 table or of an L2 table.
pub(super) const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
const BLOCK_OFFSET: u64 = 0xffff_ffff_ffff_fe00;
const COPIED: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;
const ZERO: u64 = 1;
/// Incompatible feature bits: refcounts may be wrong.
const DIRTY: u64 = 1;
/// Autoclear feature bit: the bitmaps are those of the disk.
const BITMAPS: u64 = 1;
/// Header extension of bitmaps.
const BITMAPS_EXTENSION: u32 = 0x2385_2875;

/// What is checked of an image.
#[derive(Debug, Default)]
pub(super) struct Checked {
    /// The first error.
    pub(super) error: Option<String>,
    /// The dirty mark is set: refcounts may be wrong.
    pub(super) is_dirty: bool,
    /// The image says that its bitmaps are those of the disk.
    pub(super) has_valid_bitmaps: bool,
    /// Clusters that are counted and not used.
    pub(super) leaks: u64,
}

/// Checks an image.
///
/// # Errors
/// It is no qcow2 image.
pub(super) fn check(image: &[u8]) -> Result<Checked, String> {
    let mut walk = Walk::new(image).ok_or("the header is not that of a qcow2 image")?;
    let error = walk.run().err();
    Ok(Checked {
        error,
        is_dirty: walk.version > 2 && walk.u64(72) & DIRTY != 0,
        has_valid_bitmaps: walk.version > 2 && walk.u64(88) & BITMAPS != 0,
        leaks: walk.leaks(),
    })
}

/// Reads the disk of the first internal snapshot, without compressed clusters.
///
/// `disk` has what it reads as; where the image has nothing, `base` has it.
///
/// # Errors
/// It reads as something else.
pub(super) fn compare_snapshot(image: &[u8], base: &[u8], disk: &[u8]) -> Result<(), String> {
    let walk = Walk::new(image).ok_or("the header is not that of a qcow2 image")?;
    let entry = walk.u64(64);
    let (l1, entries) = (walk.u64(entry), u64::from(walk.u32(entry + 8)));
    let per_table = walk.cluster / 8;
    let none = vec![0; walk.cluster as usize];
    let part = |bytes: &[u8], start: usize| {
        let mut part = none.clone();
        let there = bytes.get(start..bytes.len().min(start + none.len())).unwrap_or_default();
        part[..there.len()].copy_from_slice(there);
        part
    };
    for number in 0..(disk.len() as u64).div_ceil(walk.cluster) {
        let start = (number * walk.cluster) as usize;
        let l2 = match number / per_table {
            table if table < entries => walk.u64(l1 + table * 8) & OFFSET,
            _ => return Err("the L1 table of the snapshot is short".into()),
        };
        let entry = if l2 == 0 { 0 } else { walk.u64(l2 + number % per_table * 8) };
        let found = match entry & OFFSET {
            _ if entry & ZERO != 0 => none.clone(),
            0 => part(base, start),
            offset => part(image, offset as usize),
        };
        if found != part(disk, start) {
            return Err(format!("the internal snapshot has changed: cluster {number} of its disk"));
        }
    }
    Ok(())
}

struct Walk<'a> {
    image: &'a [u8],
    version: u32,
    cluster: u64,
    cluster_bits: u32,
    count_order: u32,
    references: HashMap<u64, u64>,
    blocks: Vec<u64>,
}

impl<'a> Walk<'a> {
    fn new(image: &'a [u8]) -> Option<Self> {
        let mut walk = Self {
            image,
            version: 0,
            cluster: 0,
            cluster_bits: 0,
            count_order: 4,
            references: HashMap::new(),
            blocks: Vec::new(),
        };
        walk.version = walk.u32(4);
        walk.cluster_bits = walk.u32(20);
        if image.len() < 72 || &image[..4] != b"QFI\xfb" || !(9..=21).contains(&walk.cluster_bits) {
            return None;
        }
        walk.cluster = 1 << walk.cluster_bits;
        if walk.version > 2 {
            walk.count_order = walk.u32(96).min(6);
        }
        Some(walk)
    }

    fn bytes<const N: usize>(&self, offset: u64) -> [u8; N] {
        let start = offset as usize;
        let there = start.checked_add(N).and_then(|end| self.image.get(start..end));
        there.map_or([0; N], |bytes| std::array::from_fn(|at| bytes[at]))
    }

    fn u16(&self, offset: u64) -> u16 {
        u16::from_be_bytes(self.bytes(offset))
    }

    fn u32(&self, offset: u64) -> u32 {
        u32::from_be_bytes(self.bytes(offset))
    }

    /// Zero beyond the end.
    fn u64(&self, offset: u64) -> u64 {
        u64::from_be_bytes(self.bytes(offset))
    }

    /// Counts references to the clusters of a range.
    fn refer(&mut self, what: &str, offset: u64, len: u64) -> Result<(), String> {
        if len == 0 {
            return Ok(());
        }
        let end = offset.checked_add(len).ok_or_else(|| format!("{what} is far away"))?;
        // The last cluster may be cut.
        if end.saturating_sub(self.image.len() as u64) >= self.cluster {
            return Err(format!("{what} at {offset:#x} lies beyond the end of the file"));
        }
        for cluster in offset >> self.cluster_bits..=(end - 1) >> self.cluster_bits {
            *self.references.entry(cluster).or_insert(0) += 1;
        }
        Ok(())
    }

    fn aligned(&self, what: &str, offset: u64) -> Result<(), String> {
        match offset.is_multiple_of(self.cluster) {
            true => Ok(()),
            false => Err(format!("{what} at {offset:#x} is not aligned")),
        }
    }

    fn run(&mut self) -> Result<(), String> {
        self.refer("header", 0, self.cluster)?;
        let (table, clusters) = (self.u64(48), u64::from(self.u32(56)));
        self.aligned("refcount table", table)?;
        self.refer("refcount table", table, clusters * self.cluster)?;
        for entry in 0..clusters * self.cluster / 8 {
            let block = self.u64(table + entry * 8) & BLOCK_OFFSET;
            self.blocks.push(block);
            if block != 0 {
                self.aligned("refcount block", block)?;
                self.refer("refcount block", block, self.cluster)?;
            }
        }
        let (l1, entries) = (self.u64(40), u64::from(self.u32(36)));
        self.l1(l1, entries)?;
        let (count, at) = (self.u32(60), self.u64(64));
        self.snapshots(at, count)?;
        self.bitmaps()?;
        self.compare()?;
        self.copied(l1, entries)
    }

    fn snapshots(&mut self, at: u64, count: u32) -> Result<(), String> {
        let mut entry = at;
        for _ in 0..count {
            let (l1, entries) = (self.u64(entry), u64::from(self.u32(entry + 8)));
            let (id, name) = (u64::from(self.u16(entry + 12)), u64::from(self.u16(entry + 14)));
            let extra = u64::from(self.u32(entry + 36));
            self.l1(l1, entries)?;
            entry = (entry + 40 + extra + id + name).next_multiple_of(8);
        }
        if count > 0 {
            self.aligned("snapshot table", at)?;
            self.refer("snapshot table", at, entry - at)?;
        }
        Ok(())
    }

    /// Counts an L1 table and what it refers to.
    fn l1(&mut self, offset: u64, entries: u64) -> Result<(), String> {
        self.aligned("L1 table", offset)?;
        self.refer("L1 table", offset, entries * 8)?;
        for entry in 0..entries {
            let l2 = self.u64(offset + entry * 8) & OFFSET;
            if l2 == 0 {
                continue;
            }
            self.aligned("L2 table", l2)?;
            self.refer("L2 table", l2, self.cluster)?;
            for at in (l2..l2 + self.cluster).step_by(8) {
                self.data(self.u64(at))?;
            }
        }
        Ok(())
    }

    fn data(&mut self, entry: u64) -> Result<(), String> {
        if entry & COMPRESSED != 0 {
            let bits = 62 - (self.cluster_bits - 8);
            let offset = entry & ((1 << bits) - 1);
            let sectors = (entry & !COPIED & !COMPRESSED) >> bits;
            let len = (sectors + 1) * 512 - (offset & 511);
            return self.refer("compressed data", offset, len);
        }
        let offset = entry & OFFSET;
        if offset == 0 {
            return Ok(());
        }
        self.aligned(if entry & ZERO != 0 { "cluster of zeroes" } else { "data" }, offset)?;
        self.refer("data", offset, self.cluster)
    }

    fn bitmaps(&mut self) -> Result<(), String> {
        if self.version < 3 || self.u64(88) & BITMAPS == 0 {
            return Ok(());
        }
        let mut at = u64::from(self.u32(100));
        while at + 8 <= self.cluster && self.u32(at) != 0 {
            let (kind, len) = (self.u32(at), u64::from(self.u32(at + 4)));
            if kind == BITMAPS_EXTENSION {
                let (count, size, directory) = (self.u32(at + 8), self.u64(at + 16), self.u64(at + 24));
                return self.bitmap_directory(directory, size, count);
            }
            at += 8 + len.next_multiple_of(8);
        }
        Ok(())
    }

    fn bitmap_directory(&mut self, directory: u64, size: u64, count: u32) -> Result<(), String> {
        self.aligned("bitmap directory", directory)?;
        self.refer("bitmap directory", directory, size)?;
        let mut entry = directory;
        for _ in 0..count {
            let (table, len) = (self.u64(entry), u64::from(self.u32(entry + 8)));
            let (name, extra) = (u64::from(self.u16(entry + 18)), u64::from(self.u32(entry + 20)));
            self.aligned("bitmap table", table)?;
            self.refer("bitmap table", table, len * 8)?;
            for number in 0..len {
                let offset = self.u64(table + number * 8) & OFFSET;
                if offset != 0 {
                    self.refer("bitmap", offset, self.cluster)?;
                }
            }
            entry += (24 + extra + name).next_multiple_of(8);
        }
        Ok(())
    }

    /// The refcount of a cluster.
    fn count(&self, cluster: u64) -> u64 {
        let per_block = 1 << (self.cluster_bits + 3 - self.count_order);
        let block = self.blocks.get((cluster / per_block) as usize).copied().unwrap_or(0);
        if block == 0 {
            return 0;
        }
        let bit = (cluster % per_block) << self.count_order;
        let at = block + bit / 8;
        match self.count_order {
            3 => self.bytes::<1>(at)[0].into(),
            4 => self.u16(at).into(),
            5 => self.u32(at).into(),
            6 => self.u64(at),
            order => u64::from(self.bytes::<1>(at)[0]) >> (bit % 8) & ((1 << (1 << order)) - 1),
        }
    }

    /// Clusters that are counted and not used, also beyond the end of the file.
    fn leaks(&self) -> u64 {
        let per_block = 1 << (self.cluster_bits + 3 - self.count_order);
        let mut leaked = HashSet::new();
        for (number, block) in (0..).zip(&self.blocks).filter(|(_, block)| **block != 0) {
            let start = (*block as usize).min(self.image.len());
            let bytes = &self.image[start..self.image.len().min(start + self.cluster as usize)];
            for (at, _) in (0..).zip(bytes).filter(|(_, byte)| **byte != 0) {
                let counts = at * 8 >> self.count_order..=(at * 8 + 7) >> self.count_order;
                let clusters = counts.map(|count: u64| number * per_block + count);
                leaked.extend(clusters.filter(|cluster| self.count(*cluster) > 0));
            }
        }
        leaked.iter().filter(|cluster| !self.references.contains_key(cluster)).count() as u64
    }

    fn compare(&self) -> Result<(), String> {
        let mut wrong: Vec<_> = self
            .references
            .iter()
            .map(|(cluster, references)| (*cluster, *references, self.count(*cluster)))
            .filter(|(_, references, count)| count < references)
            .collect();
        wrong.sort_unstable();
        match wrong.first() {
            None => Ok(()),
            Some((cluster, references, count)) => Err(format!(
                "cluster {cluster} has {references} references and refcount {count} ({} such clusters)",
                wrong.len()
            )),
        }
    }

    /// Whether the marks of clusters that have one reference agree with the refcounts.
    fn copied(&self, l1: u64, entries: u64) -> Result<(), String> {
        let wrong = |what: &str, entry: u64, offset: u64| {
            let count = self.count(offset >> self.cluster_bits);
            match (count == 1) == (entry & COPIED != 0) {
                true => Ok(()),
                false => Err(format!("{what} {entry:#x} has a wrong COPIED mark; its refcount is {count}")),
            }
        };
        for number in 0..entries {
            let entry = self.u64(l1 + number * 8);
            let l2 = entry & OFFSET;
            if l2 == 0 {
                continue;
            }
            wrong("L1 entry", entry, l2)?;
            for at in (l2..l2 + self.cluster).step_by(8) {
                let entry = self.u64(at);
                if entry & COMPRESSED != 0 {
                    if entry & COPIED != 0 {
                        return Err(format!("compressed L2 entry {entry:#x} has a COPIED mark"));
                    }
                } else if entry & OFFSET != 0 {
                    wrong("L2 entry", entry, entry & OFFSET)?;
                }
            }
        }
        Ok(())
    }
}
