//! Paravane's access guard as a target.
use super::timing::{MemoryAccess, Target, refused};
use crate::BenchError;
use paravane_dma::{Access, AccessGuard, Domain, Handle, Memory};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};

/// The order that follows from the direction (the default).
pub(crate) const BY_DIRECTION: u32 = Access::empty().bits();
/// No order.
pub(crate) const RELAXED: u32 = Access::RELAXED.bits();
/// A full barrier.
pub(crate) const FULL: u32 = Access::FULL.bits();

/// A handle that enters a guard for each batch.
///
/// The flags of its accesses are constants, as in a device.
pub(crate) struct Paravane<const ACCESS: u32 = BY_DIRECTION>(Handle);

impl<const ACCESS: u32> Paravane<ACCESS> {
    /// Accesses guest-physical addresses.
    pub(crate) fn direct(memory: &Memory) -> Self {
        Self(memory.handle())
    }

    /// Accesses device addresses.
    pub(crate) fn behind(domain: &Domain) -> Self {
        Self(domain.handle())
    }
}

/// Writes `len` bytes at `addr`, so that the host allocates their pages.
pub(crate) fn touch(memory: &Memory, addr: u64, len: u64) -> Result<(), BenchError> {
    memory.handle().enter().fill(addr, 0, len as usize, Access::RELAXED).map_err(refused)
}

/// The guard of [`Paravane`].
pub(crate) struct ParavaneGuard<'a, const ACCESS: u32>(AccessGuard<'a>);

impl<const ACCESS: u32> Target for Paravane<ACCESS> {
    type AccessGuard<'a> = ParavaneGuard<'a, ACCESS>;

    #[inline(always)]
    fn enter(&mut self) -> ParavaneGuard<'_, ACCESS> {
        ParavaneGuard(self.0.enter())
    }
}

impl<const ACCESS: u32> ParavaneGuard<'_, ACCESS> {
    const FLAGS: Access = Access::from_bits_truncate(ACCESS);
}

impl<const ACCESS: u32> MemoryAccess for ParavaneGuard<'_, ACCESS> {
    #[inline(always)]
    fn read(&self, addr: u64, out: &mut [u8]) -> Result<(), BenchError> {
        self.0.read(addr, out, Self::FLAGS).map_err(refused)
    }

    #[inline(always)]
    fn write(&self, addr: u64, data: &[u8]) -> Result<(), BenchError> {
        self.0.write(addr, data, Self::FLAGS).map_err(refused)
    }

    #[inline(always)]
    fn read4(&self, addr: u64) -> Result<u32, BenchError> {
        self.0.read_obj(addr, Self::FLAGS).map_err(refused)
    }

    #[inline(always)]
    fn write4(&self, addr: u64, value: u32) -> Result<(), BenchError> {
        self.0.write_obj(addr, &value, Self::FLAGS).map_err(refused)
    }
}

/// A lock of an address space, taken for each access.
pub(crate) trait SpaceLock: Send + Sync {
    /// The guard of the lock.
    type Held<'a>
    where
        Self: 'a;

    /// Takes the lock for reading.
    fn acquire(&self) -> Self::Held<'_>;
}

impl SpaceLock for Mutex<()> {
    type Held<'a> = MutexGuard<'a, ()>;

    #[inline(always)]
    fn acquire(&self) -> MutexGuard<'_, ()> {
        self.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SpaceLock for RwLock<()> {
    type Held<'a> = RwLockReadGuard<'a, ()>;

    #[inline(always)]
    fn acquire(&self) -> RwLockReadGuard<'_, ()> {
        self.read().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The same guard, with a lock of the address space taken for each access.
///
/// The 2020 series compares a mutex and a reader-writer semaphore here.
pub(crate) struct Locked<L> {
    ours: Paravane,
    lock: Arc<L>,
}

impl<L> Locked<L> {
    /// `lock` is that of the address space.
    pub(crate) fn new(ours: Paravane, lock: Arc<L>) -> Self {
        Self { ours, lock }
    }
}

/// The guard of [`Locked`].
pub(crate) struct LockedGuard<'a, L> {
    open: ParavaneGuard<'a, BY_DIRECTION>,
    lock: &'a L,
}

impl<L: SpaceLock> Target for Locked<L> {
    type AccessGuard<'a>
        = LockedGuard<'a, L>
    where
        L: 'a;

    #[inline(always)]
    fn enter(&mut self) -> LockedGuard<'_, L> {
        LockedGuard { open: self.ours.enter(), lock: &self.lock }
    }
}

impl<L: SpaceLock> MemoryAccess for LockedGuard<'_, L> {
    #[inline(always)]
    fn read(&self, addr: u64, out: &mut [u8]) -> Result<(), BenchError> {
        let _held = self.lock.acquire();
        self.open.read(addr, out)
    }

    #[inline(always)]
    fn write(&self, addr: u64, data: &[u8]) -> Result<(), BenchError> {
        let _held = self.lock.acquire();
        self.open.write(addr, data)
    }

    #[inline(always)]
    fn read4(&self, addr: u64) -> Result<u32, BenchError> {
        let _held = self.lock.acquire();
        self.open.read4(addr)
    }

    #[inline(always)]
    fn write4(&self, addr: u64, value: u32) -> Result<(), BenchError> {
        let _held = self.lock.acquire();
        self.open.write4(addr, value)
    }
}
