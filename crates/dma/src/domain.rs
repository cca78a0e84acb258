//! Domain: the address space of a device behind an IOMMU.
//!
//! ```text
//! device address (IOVA) --domain: Table--> guest-physical --snapshot: regions--> host
//!
//!  map:    [lock] store leaves [unlock]                the next walk sees them, nothing waits
//!  unmap:  [lock] clear leaves, change += 1 [unlock] | synchronize: every live access guard dropped,
//!          every mapping of the range dropped | free emptied nodes
//! ```
//! A handle walks the tree when its cache misses. Nothing cached outlives a batch in which `change`
//! has grown: a removed translation may be used until the batch ends that found it, and
//! [`Domain::unmap`] waits for that end. Misses are not cached, so that mapping disturbs nobody.
use crate::reader_slot::ReaderSlots;
use crate::sync::{AtomicU64, Mutex, MutexGuard};
use crate::table::{PAGE_SHIFT, Table, Unlinked};
use crate::{Access, DomainError, Handle, Memory};
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock, PoisonError};
use std::time::Duration;

const PAGE: u64 = 1 << PAGE_SHIFT;
/// Size of a node of the tree in bytes.
const NODE: u64 = size_of::<crate::table::Node>() as u64;
/// Default limit of the tables in bytes: enough for 16 million scattered pages.
const TABLES: u64 = 256 << 20;

/// Access that found no translation, or one that forbids it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Miss {
    /// Address of the first byte.
    pub addr: u64,
    /// Missing directions.
    pub access: Access,
    /// Whether there is a translation that forbids the access.
    pub denied: bool,
}

/// Address space of a device: translates IOVAs to guest-physical addresses.
///
/// Cheap to clone; clones are the same domain.
#[derive(Clone, Debug)]
pub struct Domain {
    memory: Memory,
    shared: Arc<Shared>,
}

/// State that all handles share.
pub(crate) struct Shared {
    table: Table,
    /// Grows with each removal.
    change: AtomicU64,
    changing: Mutex<Changing>,
    readers: ReaderSlots,
    on_miss: OnceLock<Box<dyn Fn(Miss) + Send + Sync>>,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("change", &self.change).finish_non_exhaustive()
    }
}

/// State that only the thread that changes the table uses.
#[derive(Debug)]
struct Changing {
    nodes: u64,
    most: u64,
    pages: u64,
    /// Nodes that may still have a walker.
    limbo: Vec<Unlinked>,
}

impl Changing {
    /// Keeps nodes that could not be freed, and their capacity.
    fn keep(&mut self, mut unlinked: Vec<Unlinked>) {
        if self.limbo.is_empty() {
            self.limbo = unlinked;
        } else if self.limbo.try_reserve(unlinked.len()).is_ok() {
            self.limbo.append(&mut unlinked);
        }
        // Another removal left some there meanwhile, and there is no memory: these nodes are never
        // freed.
    }
}

impl Domain {
    /// Makes an empty address space in front of `memory`. Its tables may take 256 MiB.
    #[must_use]
    pub fn new(memory: &Memory) -> Self {
        Self::with_limit(memory, TABLES)
    }

    /// As [`Domain::new`], with a limit of the tables in bytes.
    ///
    /// A page far from all others takes up to 20 KiB, one among many 8 bytes. Splitting large
    /// mappings by unmapping parts of them may take as much again.
    #[must_use]
    pub fn with_limit(memory: &Memory, bytes: u64) -> Self {
        let changing = Changing { nodes: 0, most: bytes / NODE, pages: 0, limbo: Vec::new() };
        let shared = Shared {
            table: Table::new(),
            change: AtomicU64::new(0),
            changing: Mutex::new(changing),
            readers: ReaderSlots::new(),
            on_miss: OnceLock::new(),
        };
        Self { memory: memory.clone(), shared: Arc::new(shared) }
    }

    /// Sets the hook to call for each access that lacks a translation or a permission.
    ///
    /// The first hook stays.
    ///
    /// The hook runs before the access returns its error, inside its batch. It must not wait for a
    /// translation, nor change the domain: an unmapping waits for that batch. It reports the miss
    /// (vhost: `VHOST_IOTLB_MISS`); the device ends its batch, and tries again when it learns that
    /// the translation exists.
    pub fn on_miss(&self, hook: impl Fn(Miss) + Send + Sync + 'static) {
        let _ = self.shared.on_miss.set(Box::new(hook));
    }

    /// Maps `size` bytes of device addresses at `addr` to guest-physical `gpa`.
    ///
    /// `access` is the set of allowed directions: READ, WRITE or both. Whether there is memory is
    /// checked by each access.
    ///
    /// # Errors
    /// The range is not whole pages, ends beyond either address space, or is mapped in part; the
    /// tables have reached their limit, or the host has no memory for them. Nothing was changed.
    pub fn map(&self, addr: u64, gpa: u64, size: u64, access: Access) -> Result<(), DomainError> {
        let (first, last) = pages(addr, size)?;
        pages(gpa, size)?;
        let shared = &*self.shared;
        let mut changing = shared.lock();
        if let Some(page) = shared.table.first_mapped(first, last) {
            return Err(DomainError::Overlap { addr: page << PAGE_SHIFT });
        }
        if changing.nodes + Table::nodes_to_insert(first, last) > changing.most {
            return Err(DomainError::Full { limit: changing.most * NODE });
        }
        let inserted = shared.table.insert(first, last, gpa, access);
        changing.nodes += inserted.unwrap_or_else(|made| made);
        inserted.map_err(|_| DomainError::NoMemory)?;
        changing.pages += last - first + 1;
        Ok(())
    }

    /// Unmaps `size` bytes of device addresses from `addr` on.
    ///
    /// Returns the number of bytes that were mapped.
    ///
    /// The pieces need not be those that were mapped. When it returns without an error, no access
    /// and no mapping touches them through this domain any more.
    ///
    /// # Errors
    /// The range is not whole pages, or ends beyond the address space: nothing was changed.
    ///
    /// A batch or a mapping lasts longer than `timeout`: no new access finds the translation, but
    /// the holder that the error names may still use it. Repeat the call to continue to wait; do
    /// not reuse the memory before it succeeds.
    ///
    /// Splitting larger mappings takes more tables than twice the limit, or than the host has
    /// memory for: nothing was changed.
    pub fn unmap(&self, addr: u64, size: u64, timeout: Duration) -> Result<u64, DomainError> {
        let (first, last) = pages(addr, size)?;
        let shared = &*self.shared;
        let mut changing = shared.lock();
        if changing.nodes + Table::NODES_TO_REMOVE > changing.most.saturating_mul(2) {
            return Err(DomainError::Full { limit: changing.most * NODE });
        }
        // Nodes that earlier calls could not free have been out of the tree for as long as those
        // unlinked now. Room for all nodes is kept from one removal to the next.
        let room = changing.nodes + Table::NODES_TO_REMOVE;
        let limbo = &mut changing.limbo;
        if limbo.try_reserve(room as usize).is_err() {
            return Err(DomainError::NoMemory);
        }
        let mut unlinked = std::mem::take(limbo);
        let known = unlinked.len() as u64;
        let Some((removed, made)) = shared.table.remove(first, last, &mut unlinked) else {
            changing.limbo = unlinked;
            return Err(DomainError::NoMemory);
        };
        changing.nodes = changing.nodes + made + known - unlinked.len() as u64;
        changing.pages -= removed;
        // Release: the cleared leaves come before it; pairs with the Acquire load in `change`.
        let change = shared.change.fetch_add(1, Ordering::Release) + 1;
        drop(changing);
        let addrs = u128::from(addr)..u128::from(addr) + u128::from(size);
        if let Err(busy) = shared.readers.synchronize(timeout, Some((addrs, change))) {
            shared.lock().keep(unlinked);
            return Err(busy.into());
        }
        for node in unlinked.drain(..) {
            // SAFETY: it was unlinked before `change` grew. Walks happen inside access guards;
            // `synchronize` has seen each guard of this domain dropped since, and a later one
            // starts at the root, where the node is no longer found.
            unsafe { node.free() };
        }
        shared.lock().keep(unlinked);
        Ok(removed << PAGE_SHIFT)
    }

    /// Unmaps everything.
    ///
    /// # Errors
    /// As [`Domain::unmap`].
    pub fn clear(&self, timeout: Duration) -> Result<u64, DomainError> {
        // All but the last page in one go, since a size of 2^64 does not fit in a u64.
        let most = self.unmap(0, u64::MAX - (PAGE - 1), timeout)?;
        Ok(most.saturating_add(self.unmap(u64::MAX - (PAGE - 1), PAGE, timeout)?))
    }

    /// Number of bytes that are mapped.
    #[must_use]
    pub fn mapped(&self) -> u64 {
        self.shared.lock().pages.saturating_mul(PAGE)
    }

    /// Size of the tables in bytes.
    #[must_use]
    pub fn table_bytes(&self) -> u64 {
        self.shared.lock().nodes * NODE
    }

    /// Makes a handle for one holder whose addresses this domain translates.
    #[must_use]
    pub fn handle(&self) -> Handle {
        Handle::new(self.memory.published(), Some(Arc::clone(&self.shared)))
    }

    /// Memory behind the domain.
    #[must_use]
    pub fn memory(&self) -> &Memory {
        &self.memory
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Changing> {
        // No code under the lock panics.
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Number of the last change, for comparison.
    #[inline(always)]
    pub(crate) fn change(&self) -> u64 {
        // Acquire: pairs with the Release in `unmap`: a thread that sees its number finds none of
        // the leaves that it cleared.
        self.change.load(Ordering::Acquire)
    }

    pub(crate) fn readers(&self) -> &ReaderSlots {
        &self.readers
    }

    pub(crate) fn table(&self) -> &Table {
        &self.table
    }

    #[cold]
    pub(crate) fn missed(&self, miss: Miss) {
        if let Some(hook) = self.on_miss.get() {
            hook(miss);
        }
    }
}

/// First and last page number of `size` bytes from `addr` on.
fn pages(addr: u64, size: u64) -> Result<(u64, u64), DomainError> {
    if size == 0 || !size.is_multiple_of(PAGE) || !addr.is_multiple_of(PAGE) {
        return Err(DomainError::Unaligned { addr, size });
    }
    let Some(last) = addr.checked_add(size - 1) else {
        return Err(DomainError::Wraps { addr, size });
    };
    Ok((addr >> PAGE_SHIFT, last >> PAGE_SHIFT))
}
