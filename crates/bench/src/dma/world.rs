//! The address spaces that accesses go to.
use super::ours::touch;
use crate::BenchError;
use crate::dma::ops::PAGE;
use crate::ring::{OURS, broken};
use paravane_dma::{Access, Backing, DirtyLog, Domain, Memory, Region, RegionConfig};
use std::sync::{Arc, Mutex, RwLock};
use std::time::Duration;

/// Bytes of guest memory: more than a cache holds, so that accesses at random miss it.
pub(super) const SIZE: u64 = 64 << 20;
/// An odd number far from 1: pages that are neighbours for the device are not in memory.
const STRIDE: u64 = 9973;
/// Where device addresses start: not where guest-physical ones do.
pub(super) const IOVA: u64 = 1 << 32;
/// Nobody else has the guard open when the log is turned on.
const AT_ONCE: Duration = Duration::from_secs(1);

/// What a world is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Shape {
    /// Adjoining regions of the same size.
    pub(super) regions: u64,
    /// Mappings: one of everything, or so many of a page each, scattered.
    pub(super) mappings: u64,
}

impl Shape {
    /// Bytes of device addresses.
    pub(super) fn span(self) -> u64 {
        if self.mappings == 1 { SIZE } else { self.mappings * PAGE }
    }

    /// Every mapping: device address, guest-physical address, bytes. With more than memory has pages, several
    /// mean the same one.
    pub(super) fn map(self) -> impl Iterator<Item = (u64, u64, u64)> {
        let size = if self.mappings == 1 { SIZE } else { PAGE };
        (0..self.mappings).map(move |n| (IOVA + n * size, n * STRIDE % (SIZE / PAGE) * PAGE, size))
    }
}

/// One guest's memory, and a device's address space in front of it: ours, with a log and without; whoever else is
/// measured uses the same pages.
pub(super) struct World {
    pub(super) shape: Shape,
    pub(super) regions: Vec<Arc<Region>>,
    pub(super) plain: Memory,
    pub(super) under_log: Memory,
    pub(super) domain: Domain,
    pub(super) logged: Domain,
    pub(super) mutex: Arc<Mutex<()>>,
    pub(super) rwlock: Arc<RwLock<()>>,
    #[cfg(feature = "peers")]
    pub(super) peers: super::vm_memory::Peers,
}

impl World {
    /// With all pages there, so that no access is the first one to any.
    pub(super) fn touched(shape: Shape) -> Result<Self, BenchError> {
        let world = Self::new(shape)?;
        touch(&world.plain, 0, SIZE)?;
        #[cfg(feature = "peers")]
        world.peers.touch(&world)?;
        Ok(world)
    }

    pub(super) fn new(shape: Shape) -> Result<Self, BenchError> {
        let size = SIZE / shape.regions;
        let regions: Result<Vec<Arc<Region>>, _> = (0..shape.regions)
            .map(|n| {
                Region::new(RegionConfig { gpa: n * size, size, backing: Backing::Pages, writable: true })
            })
            .collect();
        let regions = regions.map_err(ours)?;
        let [plain, under_log] = [0, 1].map(|_| Memory::new(regions.clone()));
        let (plain, under_log) = (plain.map_err(ours)?, under_log.map_err(ours)?);
        let log = DirtyLog::new(SIZE, PAGE).map_err(ours)?;
        under_log.start_log(log, AT_ONCE).map_err(ours)?;
        let (domain, logged) = (Domain::new(&plain), Domain::new(&under_log));
        for (addr, gpa, size) in shape.map() {
            for domain in [&domain, &logged] {
                domain.map(addr, gpa, size, Access::READ | Access::WRITE).map_err(ours)?;
            }
        }
        Ok(Self {
            shape,
            regions,
            plain,
            under_log,
            domain,
            logged,
            mutex: Arc::default(),
            rwlock: Arc::default(),
            #[cfg(feature = "peers")]
            peers: super::vm_memory::Peers::default(),
        })
    }
}

fn ours(error: impl std::fmt::Display) -> BenchError {
    broken(OURS, error)
}
