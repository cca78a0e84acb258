//! Reads of an image and of the layers below it.
use super::compressed::Inflated;
use super::entry::{Entry, Place, Shape};
use super::extent::Extent;
use super::header::{DIRTY, Header};
use super::io::Io;
use super::tables::Tables;
use paravane_store::Store;
use paravane_store::lock;
use rustix::fs::SeekFrom;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// The bytes of a disk, for an image above it.
#[derive(Clone, Debug)]
pub(crate) enum Below {
    Raw(Arc<Io>),
    Qcow2(Arc<Core>),
}

/// An open image.
#[derive(Debug)]
pub(crate) struct Core {
    pub(super) io: Io,
    pub(super) shape: Shape,
    /// Bytes of the disk.
    pub(super) size: AtomicU64,
    /// Locked for look-ups and changes, never while data moves.
    tables: Mutex<Tables>,
    /// A change has ended that others wait for.
    pub(super) changed: Condvar,
    /// What the image does not hold itself. `None`: zeroes.
    pub(super) below: Option<Below>,
    /// The header names a backing file, so that what is unallocated need not be zeroes.
    pub(super) has_backing: bool,
    pub(super) is_writable: bool,
    /// Incompatible features of the header, without the mark of [`Core::mark`].
    pub(super) incompatible: u64,
    /// The header says that the image was not closed.
    pub(super) is_marked: AtomicBool,
    pub(super) inflated: Inflated,
}

impl Below {
    /// The bytes of a file, through the page cache, or of a store.
    pub(crate) fn raw(source: Arc<dyn Store>) -> io::Result<Self> {
        Ok(Self::Raw(Arc::new(Io::new(source)?)))
    }

    /// Size of the disk in bytes.
    pub(crate) fn size(&self) -> io::Result<u64> {
        match self {
            Self::Raw(io) => io.size(),
            Self::Qcow2(core) => Ok(core.size()),
        }
    }

    /// Fills `into`, with zeroes beyond the end.
    pub(super) fn read(&self, into: &mut [u8], offset: u64) -> io::Result<()> {
        let inside = self.size()?.saturating_sub(offset).min(into.len() as u64) as usize;
        let (data, rest) = into.split_at_mut(inside);
        rest.fill(0);
        match self {
            Self::Raw(io) => io.read(data, offset),
            Self::Qcow2(core) => core.read(data, offset),
        }
    }

    /// Whether a range is known to read as zeroes, as far as the tables and the file system tell.
    pub(super) fn is_zero(&self, offset: u64, len: u64) -> io::Result<bool> {
        let len = self.size()?.saturating_sub(offset).min(len);
        match self {
            _ if len == 0 => Ok(true),
            Self::Raw(io) => {
                match io.regular_file().map(|file| rustix::fs::seek(file, SeekFrom::Data(offset))) {
                    Some(Ok(data)) => Ok(data >= offset + len),
                    Some(Err(rustix::io::Errno::NXIO)) => Ok(true),
                    Some(Err(_)) | None => Ok(false),
                }
            }
            Self::Qcow2(core) => core.is_zero(offset, len),
        }
    }

    /// What is at `offset`, and for how many bytes: at most `len`, at least 1.
    fn extent(&self, offset: u64, len: u64) -> io::Result<(Extent, u64)> {
        let inside = match self.size()?.saturating_sub(offset) {
            0 => return Ok((Extent::Hole, len)),
            inside => inside.min(len),
        };
        match self {
            Self::Qcow2(core) => core.extent(offset, inside),
            Self::Raw(io) => {
                let (zeroes, found) = io.zeroes(offset, inside)?;
                Ok((if zeroes { Extent::Hole } else { Extent::Data }, found))
            }
        }
    }
}

impl Core {
    /// An image that is open without the layers below it. It is writable if `tables` has refcounts.
    pub(super) fn new(io: Io, shape: Shape, header: &Header, tables: Tables) -> Self {
        Self {
            io,
            shape,
            size: AtomicU64::new(header.size),
            is_writable: tables.counts.is_some(),
            tables: Mutex::new(tables),
            changed: Condvar::new(),
            below: None,
            has_backing: header.backing.is_some(),
            incompatible: header.incompatible & !DIRTY,
            is_marked: AtomicBool::new(header.is_dirty()),
            inflated: Inflated::default(),
        }
    }

    /// The tables.
    pub(super) fn tables(&self) -> MutexGuard<'_, Tables> {
        // Nothing panics while it is locked; if it did, each change of the file is whole.
        lock(&self.tables)
    }

    /// Waits for [`Core::changed`].
    pub(super) fn wait<'a>(&self, tables: MutexGuard<'a, Tables>) -> MutexGuard<'a, Tables> {
        self.changed.wait(tables).unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes of the disk.
    pub(super) fn size(&self) -> u64 {
        // Relaxed: requests are checked against it, and it orders nothing.
        self.size.load(Ordering::Relaxed)
    }

    /// What is at `offset`, and for how many bytes: at most `len`, which is not 0.
    pub(super) fn lookup(&self, offset: u64, len: u64) -> io::Result<(Entry, u64)> {
        self.tables().map.lookup(&self.io, offset, len)
    }

    /// Fills `into`. What it reads stays where it is meanwhile: the caller sees to that.
    pub(super) fn read(&self, mut into: &mut [u8], mut offset: u64) -> io::Result<()> {
        while !into.is_empty() {
            let (entry, len) = self.lookup(offset, into.len() as u64)?;
            let (now, later) = into.split_at_mut(len as usize);
            self.read_entry(entry, now, offset)?;
            offset += len;
            into = later;
        }
        Ok(())
    }

    /// Fills `into` with what an entry stands for; `offset` is that of the disk.
    pub(super) fn read_entry(&self, entry: Entry, into: &mut [u8], offset: u64) -> io::Result<()> {
        match (entry, &self.below) {
            (Entry::Data(Place { host, .. }), _) => self.io.read(into, host),
            (Entry::Compressed { offset: host, len }, _) => {
                let within = (offset - self.shape.start(offset)) as usize;
                self.inflated.read(&self.io, (host, len), self.shape.cluster(), into, within)
            }
            (Entry::Unallocated, Some(below)) => below.read(into, offset),
            (Entry::Unallocated, None) | (Entry::Zero { .. }, _) => {
                into.fill(0);
                Ok(())
            }
        }
    }

    /// Whether a range is known to read as zeroes.
    pub(super) fn is_zero(&self, mut offset: u64, mut len: u64) -> io::Result<bool> {
        while len > 0 {
            let (entry, now) = self.lookup(offset, len)?;
            if !self.is_zero_entry(entry, offset, now)? {
                return Ok(false);
            }
            offset += now;
            len -= now;
        }
        Ok(true)
    }

    /// Whether what an entry stands for is known to read as zeroes.
    pub(super) fn is_zero_entry(&self, entry: Entry, offset: u64, len: u64) -> io::Result<bool> {
        match (entry, &self.below) {
            (Entry::Zero { .. }, _) => Ok(true),
            (Entry::Unallocated, None) => Ok(true),
            (Entry::Unallocated, Some(below)) => below.is_zero(offset, len),
            (Entry::Data(_) | Entry::Compressed { .. }, _) => Ok(false),
        }
    }

    /// What is at `offset` of the disk, and for how many bytes: at most `len`, at least 1.
    pub(super) fn extent(&self, offset: u64, len: u64) -> io::Result<(Extent, u64)> {
        let (entry, found) = self.lookup(offset, len)?;
        match (entry, &self.below) {
            // Clusters that were allocated and never written. Others write to what is open for writing.
            (Entry::Data(Place { host, .. }), _) if !self.is_writable => {
                let (zeroes, found) = self.io.zeroes(host, found)?;
                Ok((if zeroes { Extent::Zeroes } else { Extent::Data }, found))
            }
            (Entry::Data(_) | Entry::Compressed { .. }, _) => Ok((Extent::Data, found)),
            (Entry::Zero { .. }, _) => Ok((Extent::Zeroes, found)),
            (Entry::Unallocated, Some(below)) => below.extent(offset, found),
            (Entry::Unallocated, None) => Ok((Extent::Hole, found)),
        }
    }
}
