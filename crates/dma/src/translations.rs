//! Translations of a domain: how they change while handles use them.
//!
//! ```text
//! device address (IOVA) --Table--> guest-physical --snapshot: regions--> host
//!
//!  map:    [lock] store leaves [unlock]                the next walk sees them, nothing waits
//!  unmap:  [lock] clear leaves, change += 1 [unlock] | synchronize: wait until every live access
//!          guard and every mapping of the range is dropped | free emptied nodes
//! ```
//! A handle walks the tree when its cache misses. Nothing cached outlives a batch in which `change`
//! has grown: a removed translation may be used until the batch ends that found it, and
//! [`Translations::unmap`] waits for that end. Misses are not cached, so that mapping disturbs
//! nobody.
use crate::reader_slot::ReaderSlots;
use crate::sync::{AtomicU64, Mutex, MutexGuard};
use crate::table::{Node, PAGE_SHIFT, Table, Unlinked};
use crate::{Access, DomainError};
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock, PoisonError};
use std::time::Duration;

/// Smallest page of a translation in bytes.
pub(crate) const PAGE: u64 = 1 << PAGE_SHIFT;
/// Size of a node of the tree in bytes.
const NODE: u64 = size_of::<Node>() as u64;

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

/// Translations of a domain: state that all of its handles share.
pub(crate) struct Translations {
    table: Table,
    /// Grows with each removal.
    change: AtomicU64,
    changing: Mutex<Changing>,
    readers: ReaderSlots,
    on_miss: OnceLock<Box<dyn Fn(Miss) + Send + Sync>>,
}

impl std::fmt::Debug for Translations {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Translations").field("change", &self.change).finish_non_exhaustive()
    }
}

/// State that only the thread that changes the table uses.
#[derive(Debug)]
struct Changing {
    /// Number of nodes in the table.
    nodes: u64,
    /// Most nodes after a [`Translations::map`].
    most: u64,
    /// Number of pages that are mapped.
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

impl Translations {
    /// Makes an empty table that may take `bytes`.
    pub(crate) fn new(bytes: u64) -> Arc<Self> {
        let changing = Changing { nodes: 0, most: bytes / NODE, pages: 0, limbo: Vec::new() };
        Arc::new(Self {
            table: Table::new(),
            change: AtomicU64::new(0),
            changing: Mutex::new(changing),
            readers: ReaderSlots::new(),
            on_miss: OnceLock::new(),
        })
    }

    /// Sets the hook that [`Translations::missed`] calls. The first hook stays.
    pub(crate) fn on_miss(&self, hook: impl Fn(Miss) + Send + Sync + 'static) {
        let _ = self.on_miss.set(Box::new(hook));
    }

    /// Maps a range of whole pages.
    ///
    /// [`Domain::map`](crate::Domain::map) has the contract.
    pub(crate) fn map(&self, addr: u64, gpa: u64, size: u64, access: Access) -> Result<(), DomainError> {
        let (first, last) = pages(addr, size)?;
        pages(gpa, size)?;
        let mut changing = self.lock();
        if let Some(page) = self.table.first_mapped(first, last) {
            return Err(DomainError::Overlap { addr: page << PAGE_SHIFT });
        }
        if changing.nodes + Table::nodes_to_insert(first, last) > changing.most {
            return Err(DomainError::Full { limit: changing.most * NODE });
        }
        let inserted = self.table.insert(first, last, gpa, access);
        changing.nodes += inserted.unwrap_or_else(|made| made);
        inserted.map_err(|_| DomainError::NoMemory)?;
        changing.pages += last - first + 1;
        Ok(())
    }

    /// Unmaps a range of whole pages. Waits until no access and no mapping uses it.
    ///
    /// [`Domain::unmap`](crate::Domain::unmap) has the contract.
    pub(crate) fn unmap(&self, addr: u64, size: u64, timeout: Duration) -> Result<u64, DomainError> {
        let (first, last) = pages(addr, size)?;
        let mut changing = self.lock();
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
        let Some((removed, made)) = self.table.remove(first, last, &mut unlinked) else {
            changing.limbo = unlinked;
            return Err(DomainError::NoMemory);
        };
        changing.nodes = changing.nodes + made + known - unlinked.len() as u64;
        changing.pages -= removed;
        // Release: the cleared leaves come before it; pairs with the Acquire load in `change`.
        let change = self.change.fetch_add(1, Ordering::Release) + 1;
        drop(changing);
        let addrs = u128::from(addr)..u128::from(addr) + u128::from(size);
        if let Err(busy) = self.readers.synchronize(timeout, Some((addrs, change))) {
            self.lock().keep(unlinked);
            return Err(busy.into());
        }
        for node in unlinked.drain(..) {
            // SAFETY: it was unlinked before `change` grew. Walks happen inside access guards;
            // `synchronize` has seen each guard of this domain dropped since, and a later one
            // starts at the root, where the node is no longer found.
            unsafe { node.free() };
        }
        self.lock().keep(unlinked);
        Ok(removed << PAGE_SHIFT)
    }

    /// Number of bytes that are mapped.
    pub(crate) fn mapped(&self) -> u64 {
        self.lock().pages.saturating_mul(PAGE)
    }

    /// Size of the table in bytes.
    pub(crate) fn table_bytes(&self) -> u64 {
        self.lock().nodes * NODE
    }

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

    /// Reader slots of all handles.
    pub(crate) fn readers(&self) -> &ReaderSlots {
        &self.readers
    }

    /// Table to walk inside an access guard.
    pub(crate) fn table(&self) -> &Table {
        &self.table
    }

    /// Calls the hook.
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
