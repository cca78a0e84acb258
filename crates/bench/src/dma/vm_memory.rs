//! The crate vm-memory on the same pages: plain, with bitmap, behind an IOMMU.
use super::ops::PAGE;
use super::shape::{SIZE, Shape};
use super::timing::{MemoryAccess, Target};
use crate::BenchError;
use crate::error::broken;
use paravane_dma::Region;
use std::cell::OnceCell;
use std::fmt::Display;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};
use vm_memory::bitmap::AtomicBitmap;
use vm_memory::iommu::{Error, Iommu, Iotlb, IotlbIterator, IovaRange};
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemory, GuestMemoryMmap, IommuMemory, Permissions};

/// Name in results.
const NAME: &str = "vm-memory";

/// Plain memory.
pub(super) type Plain = GuestMemoryMmap<()>;
/// Memory with a dirty bitmap, which is always on.
pub(super) type Logged = GuestMemoryMmap<AtomicBitmap>;
/// Memory behind an IOMMU, logged by device address.
pub(super) type Translated = IommuMemory<Plain, Table>;

/// An IOMMU with all mappings in its IOTLB, the only store of the crate.
#[derive(Debug)]
pub(super) struct Table(RwLock<Iotlb>);

impl Iommu for Table {
    type IotlbGuard<'a> = RwLockReadGuard<'a, Iotlb>;

    fn translate(
        &self,
        iova: GuestAddress,
        length: usize,
        access: Permissions,
    ) -> Result<IotlbIterator<Self::IotlbGuard<'_>>, Error> {
        let guard = self.0.read().unwrap_or_else(PoisonError::into_inner);
        Iotlb::lookup(guard, iova, length, access).map_err(|_| Error::CannotResolve {
            iova_range: IovaRange { base: iova, length },
            reason: "not mapped".to_owned(),
        })
    }
}

fn failed(error: impl Display) -> BenchError {
    broken(NAME, error)
}

/// The regions in the form that the crate takes.
fn ranges(regions: &[Arc<Region>]) -> Result<Vec<(GuestAddress, usize, Option<FileOffset>)>, BenchError> {
    let range = |region: &Arc<Region>| {
        let file = region.fd().map(|file| file.try_clone_to_owned()).transpose().map_err(failed)?;
        let file = file.map(|file| FileOffset::new(file.into(), 0));
        Ok((GuestAddress(region.gpa()), region.size() as usize, file))
    };
    regions.iter().map(range).collect()
}

/// The crate's views of guest memory, made on first use.
pub(super) struct Peers {
    shape: Shape,
    regions: Vec<Arc<Region>>,
    plain: OnceCell<Peer<Plain>>,
    logged: OnceCell<Peer<Logged>>,
    translated: OnceCell<Peer<Translated>>,
}

/// The value of `cell`, made on first use.
fn once<T: Clone>(cell: &OnceCell<T>, make: impl FnOnce() -> Result<T, BenchError>) -> Result<T, BenchError> {
    if let Some(made) = cell.get() {
        return Ok(made.clone());
    }
    let made = make()?;
    Ok(cell.get_or_init(|| made).clone())
}

impl Peers {
    /// Views of `regions`, with the mappings of `shape`.
    pub(super) fn new(shape: Shape, regions: Vec<Arc<Region>>) -> Self {
        Self { shape, regions, plain: OnceCell::new(), logged: OnceCell::new(), translated: OnceCell::new() }
    }

    /// Makes all views and touches every page; each view has separate mappings.
    pub(super) fn touch(&self) -> Result<(), BenchError> {
        fn each_page(memory: &impl GuestMemory) -> Result<(), BenchError> {
            (0..SIZE)
                .step_by(PAGE as usize)
                .try_for_each(|at| memory.write_obj(0_u8, GuestAddress(at)).map_err(failed))
        }
        each_page(&*self.plain()?.0)?;
        each_page(&*self.logged()?.0)?;
        each_page(self.translated()?.0.get_backend())
    }

    /// Guest memory.
    pub(super) fn plain(&self) -> Result<Peer<Plain>, BenchError> {
        once(&self.plain, || {
            Ok(Peer(Arc::new(Plain::from_ranges_with_files(ranges(&self.regions)?).map_err(failed)?)))
        })
    }

    /// Guest memory with a dirty bitmap.
    pub(super) fn logged(&self) -> Result<Peer<Logged>, BenchError> {
        once(&self.logged, || {
            Ok(Peer(Arc::new(Logged::from_ranges_with_files(ranges(&self.regions)?).map_err(failed)?)))
        })
    }

    /// The device's address space.
    pub(super) fn translated(&self) -> Result<Peer<Translated>, BenchError> {
        once(&self.translated, || {
            let backend = Plain::from_ranges_with_files(ranges(&self.regions)?).map_err(failed)?;
            let mut tlb = Iotlb::new();
            for (addr, gpa, size) in self.shape.map() {
                tlb.set_mapping(GuestAddress(addr), GuestAddress(gpa), size as usize, Permissions::ReadWrite)
                    .map_err(failed)?;
            }
            Ok(Peer(Arc::new(IommuMemory::new(backend, Table(RwLock::new(tlb)), true, ()))))
        })
    }
}

/// A view of guest memory as a target. Threads share it.
pub(super) struct Peer<M>(Arc<M>);

impl<M> Clone for Peer<M> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

/// Access by shared reference.
pub(super) struct PeerGuard<'a, M>(&'a M);

impl<M: GuestMemory> Target for Peer<M> {
    type AccessGuard<'a>
        = PeerGuard<'a, M>
    where
        M: 'a;

    #[inline(always)]
    fn enter(&mut self) -> PeerGuard<'_, M> {
        PeerGuard(&self.0)
    }
}

impl<M: GuestMemory> MemoryAccess for PeerGuard<'_, M> {
    #[inline(always)]
    fn read(&self, addr: u64, out: &mut [u8]) -> Result<(), BenchError> {
        self.0.read_slice(out, GuestAddress(addr)).map_err(failed)
    }

    #[inline(always)]
    fn write(&self, addr: u64, data: &[u8]) -> Result<(), BenchError> {
        self.0.write_slice(data, GuestAddress(addr)).map_err(failed)
    }

    #[inline(always)]
    fn read4(&self, addr: u64) -> Result<u32, BenchError> {
        self.0.read_obj(GuestAddress(addr)).map_err(failed)
    }

    #[inline(always)]
    fn write4(&self, addr: u64, value: u32) -> Result<(), BenchError> {
        self.0.write_obj(value, GuestAddress(addr)).map_err(failed)
    }
}
