//! A client's memory: which files it is in, and what its addresses mean.
//!
//! ```text
//!   SET_MEM_TABLE, ADD_MEM_REG, REM_MEM_REG --> regions --> dma::Memory (published; queues see it when they next look)
//!   user address --regions--> guest-physical address --dma--> host
//! ```
//! A region that is named again as it was, file and all, keeps its mapping, so that queues whose rings lie there need not
//! be stopped. A client may take its file away at any time: the region is lost then, and [`ClientMemory::lost`] tells.
//!
//! The client's quota bounds what is mapped. A new table is mapped before the old one is unmapped, so both count for a moment.
use paravane_dma::{Alarm, FileRange, MappingQuota, Memory, MemoryError, Region};
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
#[non_exhaustive]
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
struct ClientRegion {
    said: MemoryRegion,
    /// Device and inode number.
    file: (u64, u64),
    region: Arc<Region>,
    /// How often it was added: so often it is to be removed. QEMU (7.2) adds and removes each region once for every pair of a
    /// card's queues.
    times: u32,
}

/// The regions of a client, now or after a change.
#[derive(Clone, Debug, Default)]
pub struct ClientRegions(Vec<ClientRegion>);

/// All memory of a client.
#[derive(Debug)]
pub struct ClientMemory {
    regions: ClientRegions,
    memory: Memory,
    alarm: Arc<Alarm>,
    quota: MappingQuota,
}

impl ClientMemory {
    /// No memory yet; all that will be mapped counts in `quota`.
    ///
    /// # Errors
    /// The process has no descriptors left.
    pub fn new(quota: MappingQuota) -> Result<Self, TableError> {
        let alarm = Alarm::new().map_err(TableError::File)?;
        Ok(Self { regions: ClientRegions::default(), memory: Memory::new(Vec::new())?, alarm, quota })
    }

    /// What the client may have mapped.
    #[must_use]
    pub fn quota(&self) -> &MappingQuota {
        &self.quota
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
        self.regions.0.iter().any(|slot| slot.region.lost())
    }

    /// The regions as they are.
    #[must_use]
    pub fn regions(&self) -> &ClientRegions {
        &self.regions
    }

    /// What they would be with these and no others.
    ///
    /// # Errors
    /// They cannot be.
    pub fn with_all(&self, regions: Vec<SharedRegion>) -> Result<ClientRegions, TableError> {
        let mut all = ClientRegions::default();
        for region in regions {
            all.push(self.client_region(region)?)?;
        }
        Ok(all)
    }

    /// What they would be with one more, or the same once more.
    ///
    /// # Errors
    /// It cannot be.
    pub fn with(&self, region: SharedRegion) -> Result<ClientRegions, TableError> {
        let mut regions = self.regions.clone();
        let new = self.client_region(region)?;
        match regions.0.iter_mut().find(|slot| slot.file == new.file && slot.said == new.said) {
            Some(slot) if !slot.region.lost() => slot.times = slot.times.saturating_add(1),
            _ => regions.push(new)?,
        }
        Ok(regions)
    }

    /// What they would be without the one at these addresses, wherever it is in its file.
    ///
    /// # Errors
    /// There is no such region.
    pub fn without(&self, region: MemoryRegion) -> Result<ClientRegions, TableError> {
        let MemoryRegion { gpa, size, user, .. } = region;
        let mut regions = self.regions.clone();
        let same = |slot: &ClientRegion| (slot.said.gpa, slot.said.size, slot.said.user) == (gpa, size, user);
        let at = regions.0.iter().position(same).ok_or(TableError::Unknown { gpa, user, size })?;
        regions.0[at].times -= 1;
        if regions.0[at].times == 0 {
            regions.0.remove(at);
        }
        Ok(regions)
    }

    /// Devices see these from now on. What is left out stays mapped for as long as something in flight uses it.
    ///
    /// # Errors
    /// Two overlap in guest-physical memory, or are not covered by the log that is on; nothing has changed then.
    pub fn publish(&mut self, regions: ClientRegions) -> Result<(), TableError> {
        self.memory.replace(regions.0.iter().map(|slot| Arc::clone(&slot.region)).collect())?;
        self.regions = regions;
        Ok(())
    }

    fn client_region(&self, shared: SharedRegion) -> Result<ClientRegion, TableError> {
        let SharedRegion { region: said, file } = shared;
        for addr in [said.gpa, said.user, said.offset] {
            if said.size == 0 || addr.checked_add(said.size - 1).is_none() {
                return Err(TableError::Extent { addr, size: said.size });
            }
        }
        let found = rustix::fs::fstat(&file).map_err(|error| TableError::File(error.into()))?;
        let id = (found.st_dev, found.st_ino);
        let known = self.regions.0.iter().find(|slot| slot.file == id && slot.said == said);
        let region = match known.filter(|slot| !slot.region.lost()) {
            Some(slot) => Arc::clone(&slot.region),
            None => self.map(said, file)?,
        };
        Ok(ClientRegion { said, file: id, region, times: 1 })
    }

    fn map(&self, said: MemoryRegion, file: OwnedFd) -> Result<Arc<Region>, TableError> {
        // The rest of the last page is there as well: files are mapped in pages.
        let size = said
            .size
            .checked_next_multiple_of(PAGE)
            .ok_or(TableError::Extent { addr: said.gpa, size: said.size })?;
        let range = FileRange { gpa: said.gpa, size, offset: said.offset, writable: true };
        Ok(Region::guarded(range, file, &self.alarm, &self.quota)?)
    }
}

impl AsFd for ClientMemory {
    /// Readable when memory may have been lost.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.alarm.as_fd()
    }
}

impl ClientRegions {
    /// Guest-physical address of what the client knows at `user`, and the region that it is in.
    #[must_use]
    pub fn find(&self, user: u64) -> Option<(u64, &Arc<Region>)> {
        self.slot_of(user).map(|(slot, inside)| (slot.said.gpa + inside, &slot.region))
    }

    /// Guest-physical address of what the client knows at `user`, and the bytes from there to the end of the region, at
    /// least 1.
    pub(crate) fn rest(&self, user: u64) -> Option<(u64, u64)> {
        self.slot_of(user).map(|(slot, inside)| (slot.said.gpa + inside, slot.said.size - inside))
    }

    /// What the client knows at `user` is in, and how far inside.
    fn slot_of(&self, user: u64) -> Option<(&ClientRegion, u64)> {
        self.0.iter().find_map(|slot| {
            let inside = user.checked_sub(slot.said.user).filter(|inside| *inside < slot.said.size)?;
            Some((slot, inside))
        })
    }

    fn push(&mut self, new: ClientRegion) -> Result<(), TableError> {
        if self.0.len() >= MAX_SLOTS {
            return Err(TableError::TooMany);
        }
        // Differences, so that nothing overflows at the end of the address space.
        let overlap = |slot: &&ClientRegion| {
            let (a, b) = (&slot.said, &new.said);
            if a.user <= b.user { b.user - a.user < a.size } else { a.user - b.user < b.size }
        };
        if let Some(slot) = self.0.iter().find(overlap) {
            return Err(TableError::Overlap { first: slot.said.user, second: new.said.user });
        }
        self.0.push(new);
        Ok(())
    }
}
