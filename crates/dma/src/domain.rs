//! Domain: the address space of a device behind an IOMMU.
use crate::translations::{PAGE, Translations};
use crate::{Access, DomainError, Handle, Memory, Miss};
use std::sync::Arc;
use std::time::Duration;

/// Default limit of the tables in bytes: enough for 16 million scattered pages.
const TABLES: u64 = 256 << 20;

/// Address space of a device: translates IOVAs to guest-physical addresses.
///
/// Cheap to clone; clones are the same domain.
#[derive(Clone, Debug)]
pub struct Domain {
    memory: Memory,
    translations: Arc<Translations>,
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
        Self { memory: memory.clone(), translations: Translations::new(bytes) }
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
        self.translations.on_miss(hook);
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
        self.translations.map(addr, gpa, size, access)
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
        self.translations.unmap(addr, size, timeout)
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
        self.translations.mapped()
    }

    /// Size of the tables in bytes.
    #[must_use]
    pub fn table_bytes(&self) -> u64 {
        self.translations.table_bytes()
    }

    /// Makes a handle for one holder whose addresses this domain translates.
    #[must_use]
    pub fn handle(&self) -> Handle {
        Handle::new(self.memory.published(), Some(Arc::clone(&self.translations)))
    }

    /// Memory behind the domain.
    #[must_use]
    pub fn memory(&self) -> &Memory {
        &self.memory
    }
}
