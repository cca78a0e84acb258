//! A client's memory: which files it is in, and what its addresses mean.
//!
//! ```text
//!   SET_MEM_TABLE, ADD_MEM_REG, REM_MEM_REG --> slots --> dma::Memory (published; queues see it when they next look)
//!   user address --slots--> guest-physical address --dma--> host
//! ```
//! A region that is named again as it was, file and all, keeps its mapping, so that queues whose rings lie there need not
//! be stopped. A client may take its file away at any time: the region is lost then, and [`ClientMemory::lost`] tells.
use paravane_dma::{Alarm, FileRange, Memory, MemoryError, Region};
use paravane_spec::vhost_user::MemoryRegion;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use thiserror::Error;

use crate::message::SharedRegion;

/// Most regions of one client.
pub const MAX_SLOTS: usize = 64;

/// Regions are mapped in pages of this many bytes.
const PAGE: u64 = 4096;

/// Why memory cannot be shared so.
#[derive(Debug, Error)]
pub enum TableError {
    /// a region of {size:#x} bytes at {addr:#x} wraps around the end of the address space, or is empty
    #[error(
        "a region of {size:#x} bytes at {addr:#x} wraps around the end of the address space, or is empty"
    )]
    Extent {
        /// Its address, guest-physical or in the client, or its offset in the file.
        addr: u64,
        /// Its bytes.
        size: u64,
    },
    /// the regions at user addresses {first:#x} and {second:#x} overlap
    #[error("the regions at user addresses {first:#x} and {second:#x} overlap")]
    Overlap {
        /// The one that is there.
        first: u64,
        /// The one that is new.
        second: u64,
    },
    /// more than {MAX_SLOTS} regions
    #[error("more than {MAX_SLOTS} regions")]
    TooMany,
    /// there is no region of {size:#x} bytes at guest-physical {gpa:#x} and user address {user:#x}
    #[error("there is no region of {size:#x} bytes at guest-physical {gpa:#x} and user address {user:#x}")]
    Unknown {
        /// Guest-physical address.
        gpa: u64,
        /// Its address in the client.
        user: u64,
        /// Bytes.
        size: u64,
    },
    /// {0}
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// its file: {0}
    #[error("its file: {0}")]
    File(#[source] io::Error),
}

/// One region.
#[derive(Clone, Debug)]
struct Slot {
    said: MemoryRegion,
    /// Device and inode number.
    file: (u64, u64),
    region: Arc<Region>,
}

/// All regions of a client.
#[derive(Debug)]
pub struct ClientMemory {
    slots: Vec<Slot>,
    memory: Memory,
    alarm: Arc<Alarm>,
}

impl ClientMemory {
    /// No memory yet.
    ///
    /// # Errors
    /// The process has no descriptors left.
    pub fn new() -> Result<Self, TableError> {
        let alarm = Alarm::new().map_err(TableError::File)?;
        Ok(Self { slots: Vec::new(), memory: Memory::new(Vec::new())?, alarm })
    }

    /// What devices see.
    #[must_use]
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Rings when one of the files was made shorter.
    #[must_use]
    pub fn alarm(&self) -> &Arc<Alarm> {
        &self.alarm
    }

    /// Whether memory is gone that the client has shared.
    #[must_use]
    pub fn lost(&self) -> bool {
        self.slots.iter().any(|slot| slot.region.lost())
    }

    /// These are all regions from now on.
    ///
    /// # Errors
    /// They cannot be; nothing has changed then.
    pub fn set(&mut self, regions: Vec<SharedRegion>) -> Result<(), TableError> {
        let mut slots = Vec::with_capacity(regions.len());
        for region in regions {
            let slot = self.slot(region)?;
            no_overlap(&slots, &slot)?;
            slots.push(slot);
        }
        self.publish(slots)
    }

    /// One more.
    ///
    /// # Errors
    /// It cannot be; nothing has changed then.
    pub fn add(&mut self, region: SharedRegion) -> Result<(), TableError> {
        if self.slots.len() >= MAX_SLOTS {
            return Err(TableError::TooMany);
        }
        let slot = self.slot(region)?;
        no_overlap(&self.slots, &slot)?;
        let mut slots = self.slots.clone();
        slots.push(slot);
        self.publish(slots)
    }

    /// One less: the one at these addresses, wherever it was in its file. It stays mapped for as long as something in
    /// flight uses it.
    ///
    /// # Errors
    /// There is no such region.
    pub fn remove(&mut self, region: MemoryRegion) -> Result<(), TableError> {
        let MemoryRegion { gpa, size, user, .. } = region;
        let mut slots = self.slots.clone();
        let same = |slot: &Slot| (slot.said.gpa, slot.said.size, slot.said.user) == (gpa, size, user);
        let at = slots.iter().position(same).ok_or(TableError::Unknown { gpa, user, size })?;
        slots.remove(at);
        self.publish(slots)
    }

    /// Guest-physical address of what the client knows at `user`, and the region that it is in.
    #[must_use]
    pub fn find(&self, user: u64) -> Option<(u64, &Arc<Region>)> {
        self.slots.iter().find_map(|slot| {
            let inside = user.checked_sub(slot.said.user).filter(|inside| *inside < slot.said.size)?;
            Some((slot.said.gpa + inside, &slot.region))
        })
    }

    /// Guest-physical address of `size` bytes from `user` on, which are in one region.
    #[must_use]
    pub fn find_range(&self, user: u64, size: u64) -> Option<u64> {
        let (gpa, _) = self.find(user)?;
        let (last, _) = self.find(user.checked_add(size.checked_sub(1)?)?)?;
        (last.checked_sub(gpa) == Some(size - 1)).then_some(gpa)
    }

    fn publish(&mut self, slots: Vec<Slot>) -> Result<(), TableError> {
        self.memory.replace(slots.iter().map(|slot| Arc::clone(&slot.region)).collect())?;
        self.slots = slots;
        Ok(())
    }

    fn slot(&self, shared: SharedRegion) -> Result<Slot, TableError> {
        let SharedRegion { region: said, file } = shared;
        for addr in [said.gpa, said.user, said.offset] {
            if said.size == 0 || addr.checked_add(said.size - 1).is_none() {
                return Err(TableError::Extent { addr, size: said.size });
            }
        }
        let found = rustix::fs::fstat(&file).map_err(|error| TableError::File(error.into()))?;
        let id = (found.st_dev, found.st_ino);
        let known = self.slots.iter().find(|slot| slot.file == id && slot.said == said);
        let region = match known.filter(|slot| !slot.region.lost()) {
            Some(slot) => Arc::clone(&slot.region),
            None => self.map(said, file)?,
        };
        Ok(Slot { said, file: id, region })
    }

    fn map(&self, said: MemoryRegion, file: OwnedFd) -> Result<Arc<Region>, TableError> {
        // The rest of the last page is there as well: files are mapped in pages.
        let size = said
            .size
            .checked_next_multiple_of(PAGE)
            .ok_or(TableError::Extent { addr: said.gpa, size: said.size })?;
        let range = FileRange { gpa: said.gpa, size, offset: said.offset, writable: true };
        Ok(Region::guarded(range, file, &self.alarm)?)
    }
}

impl AsFd for ClientMemory {
    /// Readable when memory may have been lost.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.alarm.as_fd()
    }
}

fn no_overlap(slots: &[Slot], new: &Slot) -> Result<(), TableError> {
    // Differences, so that nothing overflows at the end of the address space.
    let overlap = |slot: &&Slot| {
        let (a, b) = (&slot.said, &new.said);
        if a.user <= b.user { b.user - a.user < a.size } else { a.user - b.user < b.size }
    };
    match slots.iter().find(overlap) {
        Some(slot) => Err(TableError::Overlap { first: slot.said.user, second: new.said.user }),
        None => Ok(()),
    }
}
