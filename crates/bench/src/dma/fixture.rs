//! The address spaces that are accessed.
use super::paravane::touch;
use super::shape::{SIZE, Shape};
use crate::BenchError;
use crate::dma::ops::PAGE;
use crate::error::broken;
use crate::subject::PARAVANE;
use paravane_dma::{Access, Backing, DirtyLog, Domain, Memory, Region, RegionConfig};
use std::sync::{Arc, Mutex, RwLock};
use std::time::Duration;

/// Time limit for turning the log on; no guard is live then.
const AT_ONCE: Duration = Duration::from_secs(1);

/// Guest memory and device address spaces, with a dirty log and without.
///
/// All subjects access the same pages.
pub(super) struct Fixture {
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

impl Fixture {
    /// Makes a fixture and touches all its pages.
    pub(super) fn touched(shape: Shape) -> Result<Self, BenchError> {
        let fixture = Self::new(shape)?;
        touch(&fixture.plain, 0, SIZE)?;
        #[cfg(feature = "peers")]
        fixture.peers.touch()?;
        Ok(fixture)
    }

    /// Makes a fixture.
    pub(super) fn new(shape: Shape) -> Result<Self, BenchError> {
        let size = SIZE / shape.regions;
        let regions: Result<Vec<Arc<Region>>, _> = (0..shape.regions)
            .map(|n| {
                Region::new(RegionConfig { gpa: n * size, size, backing: Backing::Pages, writable: true })
            })
            .collect();
        let regions = regions.map_err(failed)?;
        let [plain, under_log] = [0, 1].map(|_| Memory::new(regions.clone()));
        let (plain, under_log) = (plain.map_err(failed)?, under_log.map_err(failed)?);
        let log = DirtyLog::new(SIZE, PAGE).map_err(failed)?;
        under_log.start_log(log, AT_ONCE).map_err(failed)?;
        let (domain, logged) = (Domain::new(&plain), Domain::new(&under_log));
        for (addr, gpa, size) in shape.map() {
            for domain in [&domain, &logged] {
                domain.map(addr, gpa, size, Access::READ | Access::WRITE).map_err(failed)?;
            }
        }
        #[cfg(feature = "peers")]
        let peers = super::vm_memory::Peers::new(shape, regions.clone());
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
            peers,
        })
    }
}

fn failed(error: impl std::fmt::Display) -> BenchError {
    broken(PARAVANE, error)
}
