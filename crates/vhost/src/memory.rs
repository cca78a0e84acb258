//! Guest memory of a client: its shared regions, and its addresses.
//!
//! ```text
//!   SET_MEM_TABLE, ADD_MEM_REG, REM_MEM_REG --> regions --> dma::Memory (published; queues see it in their next batch)
//!   user address --regions--> guest-physical address --dma--> host
//! ```
//! With GPA_ADDRESSES the client has no user addresses: those of its regions and messages are
//! guest-physical. Each region then says the same address twice, so that the lookup is the same.
//!
//! A region that is sent again unchanged, file included, keeps its mapping, so that queues whose
//! rings are in it need not stop. A client may truncate its file at any time: the region is then
//! lost, and [`ClientMemory::lost`] returns true.
//!
//! The client's quota limits what is mapped. A new table is mapped before the old one is unmapped,
//! so both count for a moment.
use paravane_dma::{Alarm, FileRange, MappingQuota, Memory, MemoryError, Region};
use paravane_spec::vhost_user::MemoryRegion;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use thiserror::Error;

use crate::message::SharedRegion;

/// Most regions of one client.
pub const MAX_SLOTS: usize = 64;

/// Regions are mapped in pages of this size in bytes.
const PAGE: u64 = 4096;

/// Memory region that cannot be shared.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TableError {
    /// Empty region, or one that wraps.
    #[error("region of {size:#x} bytes at {addr:#x} is empty or wraps around the end of the address space")]
    Extent {
        /// Its guest-physical address, user address, or offset in the file.
        addr: u64,
        /// Size in bytes.
        size: u64,
    },
    /// Two regions that overlap in the client's address space.
    #[error("regions at user addresses {first:#x} and {second:#x} overlap")]
    Overlap {
        /// User address of the existing region.
        first: u64,
        /// User address of the new region.
        second: u64,
    },
    /// Region whose user address is not its guest-physical one, with GPA_ADDRESSES.
    #[error("region at guest-physical {gpa:#x} has user address {user:#x}: need the same with GPA_ADDRESSES")]
    NotGuestPhysical {
        /// Guest-physical address.
        gpa: u64,
        /// User address.
        user: u64,
    },
    /// Full memory table.
    #[error("more than {MAX_SLOTS} memory regions")]
    TooMany,
    /// REM_MEM_REG of a region that is not in the table.
    #[error("no region of {size:#x} bytes at guest-physical {gpa:#x} and user address {user:#x}")]
    Unknown {
        /// Guest-physical address.
        gpa: u64,
        /// User address.
        user: u64,
        /// Size in bytes.
        size: u64,
    },
    /// Region that cannot be mapped.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// File that cannot be examined.
    #[error("cannot examine its file: {0}")]
    File(#[source] io::Error),
}

/// One region and its mapping.
#[derive(Clone, Debug)]
struct ClientRegion {
    layout: MemoryRegion,
    /// Device and inode number.
    file: (u64, u64),
    region: Arc<Region>,
    /// Number of times that it was added, and must be removed.
    ///
    /// QEMU (7.2) adds and removes each region once for every queue pair of a network device.
    times: u32,
}

/// Regions of a client, current or after a change.
#[derive(Clone, Debug, Default)]
pub struct ClientRegions(Vec<ClientRegion>);

/// All memory of a client.
#[derive(Debug)]
pub struct ClientMemory {
    regions: ClientRegions,
    memory: Memory,
    alarm: Arc<Alarm>,
    quota: MappingQuota,
    /// User addresses are guest-physical (GPA_ADDRESSES).
    guest_physical: bool,
}

impl ClientMemory {
    /// Makes an empty memory, whose mappings count in `quota`.
    ///
    /// # Errors
    /// The process has too few descriptors left.
    pub fn new(quota: MappingQuota) -> Result<Self, TableError> {
        let alarm = Alarm::new().map_err(TableError::File)?;
        Ok(Self {
            regions: ClientRegions::default(),
            memory: Memory::new(Vec::new())?,
            alarm,
            quota,
            guest_physical: false,
        })
    }

    /// Turns guest-physical user addresses on or off (GPA_ADDRESSES).
    ///
    /// Returns `false`, and changes nothing, if there are regions that the change would alter.
    #[must_use]
    pub(crate) fn use_guest_physical(&mut self, on: bool) -> bool {
        let allowed = on == self.guest_physical || self.regions.0.is_empty();
        if allowed {
            self.guest_physical = on;
        }
        allowed
    }

    /// Quota of the client's mappings.
    #[must_use]
    pub fn quota(&self) -> &MappingQuota {
        &self.quota
    }

    /// Memory as devices see it.
    #[must_use]
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Alarm that is raised when the client truncates a file.
    #[must_use]
    pub fn alarm(&self) -> &Arc<Alarm> {
        &self.alarm
    }

    /// Whether the client truncated the file of a region.
    #[must_use]
    pub fn lost(&self) -> bool {
        self.regions.0.iter().any(|entry| entry.region.lost())
    }

    /// Current regions.
    #[must_use]
    pub fn regions(&self) -> &ClientRegions {
        &self.regions
    }

    /// Regions after SET_MEM_TABLE: these and no others.
    ///
    /// # Errors
    /// A region is invalid or cannot be mapped.
    pub fn with_all(&self, regions: Vec<SharedRegion>) -> Result<ClientRegions, TableError> {
        let mut all = ClientRegions::default();
        for region in regions {
            all.push(self.client_region(region)?)?;
        }
        Ok(all)
    }

    /// Regions after ADD_MEM_REG: one more, or a known one added again.
    ///
    /// # Errors
    /// The region is invalid or cannot be mapped.
    pub fn with(&self, region: SharedRegion) -> Result<ClientRegions, TableError> {
        let mut regions = self.regions.clone();
        let new = self.client_region(region)?;
        match regions.0.iter_mut().find(|entry| entry.file == new.file && entry.layout == new.layout) {
            Some(entry) if !entry.region.lost() => entry.times = entry.times.saturating_add(1),
            _ => regions.push(new)?,
        }
        Ok(regions)
    }

    /// Regions after REM_MEM_REG: without the one at these addresses.
    ///
    /// Its offset in the file does not matter.
    ///
    /// # Errors
    /// There is no such region.
    pub fn without(&self, region: MemoryRegion) -> Result<ClientRegions, TableError> {
        let MemoryRegion { gpa, size, user, .. } = region;
        let mut regions = self.regions.clone();
        let same = |entry: &ClientRegion| {
            (entry.layout.gpa, entry.layout.size, entry.layout.user) == (gpa, size, user)
        };
        let at = regions.0.iter().position(same).ok_or(TableError::Unknown { gpa, user, size })?;
        regions.0[at].times -= 1;
        if regions.0[at].times == 0 {
            regions.0.remove(at);
        }
        Ok(regions)
    }

    /// Publishes regions to devices.
    ///
    /// Removed ones stay mapped while something in flight uses them.
    ///
    /// # Errors
    /// Two overlap in guest-physical memory, or the active dirty log does not cover them. Nothing
    /// changes then.
    pub fn publish(&mut self, regions: ClientRegions) -> Result<(), TableError> {
        self.memory.replace(regions.0.iter().map(|entry| Arc::clone(&entry.region)).collect())?;
        self.regions = regions;
        Ok(())
    }

    /// Sets how often each region was added, as an earlier process counted.
    ///
    /// Returns `false`, and changes nothing, if the counts do not fit the regions.
    #[must_use]
    pub(crate) fn set_times(&mut self, times: &[u32]) -> bool {
        let fits = times.len() == self.regions.0.len() && !times.contains(&0);
        if fits {
            self.regions.0.iter_mut().zip(times).for_each(|(entry, times)| entry.times = *times);
        }
        fits
    }

    fn client_region(&self, shared: SharedRegion) -> Result<ClientRegion, TableError> {
        let SharedRegion { region: layout, file } = shared;
        for addr in [layout.gpa, layout.user, layout.offset] {
            if layout.size == 0 || addr.checked_add(layout.size - 1).is_none() {
                return Err(TableError::Extent { addr, size: layout.size });
            }
        }
        if self.guest_physical && layout.user != layout.gpa {
            return Err(TableError::NotGuestPhysical { gpa: layout.gpa, user: layout.user });
        }
        let found = rustix::fs::fstat(&file).map_err(|error| TableError::File(error.into()))?;
        let id = (found.st_dev, found.st_ino);
        let known = self.regions.0.iter().find(|entry| entry.file == id && entry.layout == layout);
        let region = match known.filter(|entry| !entry.region.lost()) {
            Some(entry) => Arc::clone(&entry.region),
            None => self.map(layout, file)?,
        };
        Ok(ClientRegion { layout, file: id, region, times: 1 })
    }

    fn map(&self, layout: MemoryRegion, file: OwnedFd) -> Result<Arc<Region>, TableError> {
        // Files are mapped in pages, so the rest of the last page is there as well.
        let size = layout
            .size
            .checked_next_multiple_of(PAGE)
            .ok_or(TableError::Extent { addr: layout.gpa, size: layout.size })?;
        let range = FileRange { gpa: layout.gpa, size, offset: layout.offset, writable: true };
        Ok(Region::guarded(range, file, &self.alarm, &self.quota)?)
    }
}

impl AsFd for ClientMemory {
    /// Readable when memory may be lost.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.alarm.as_fd()
    }
}

impl ClientRegions {
    /// Returns the guest-physical address for a user address, and its region.
    #[must_use]
    pub fn find(&self, user: u64) -> Option<(u64, &Arc<Region>)> {
        self.entry_at(user).map(|(entry, inside)| (entry.layout.gpa + inside, &entry.region))
    }

    /// Returns the guest-physical address for a user address.
    ///
    /// Also returns the number of bytes up to the end of the region (at least 1).
    pub(crate) fn rest(&self, user: u64) -> Option<(u64, u64)> {
        self.entry_at(user).map(|(entry, inside)| (entry.layout.gpa + inside, entry.layout.size - inside))
    }

    /// Returns the region that holds a user address, and the offset in it.
    fn entry_at(&self, user: u64) -> Option<(&ClientRegion, u64)> {
        self.0.iter().find_map(|entry| {
            let inside = user.checked_sub(entry.layout.user).filter(|inside| *inside < entry.layout.size)?;
            Some((entry, inside))
        })
    }

    /// All regions, each with its file and how often it was added.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (MemoryRegion, Option<BorrowedFd<'_>>, u32)> {
        self.0.iter().map(|entry| (entry.layout, entry.region.fd(), entry.times))
    }

    fn push(&mut self, new: ClientRegion) -> Result<(), TableError> {
        if self.0.len() >= MAX_SLOTS {
            return Err(TableError::TooMany);
        }
        // Compares differences, which cannot overflow at the end of the address space.
        let overlap = |entry: &&ClientRegion| {
            let (a, b) = (&entry.layout, &new.layout);
            if a.user <= b.user { b.user - a.user < a.size } else { a.user - b.user < b.size }
        };
        if let Some(entry) = self.0.iter().find(overlap) {
            return Err(TableError::Overlap { first: entry.layout.user, second: new.layout.user });
        }
        self.0.push(new);
        Ok(())
    }
}
