//! Quotas: limits of the memory that clients have mapped, each and together.
use crate::QuotaError;
use crate::sigbus;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Most protected mappings of one client.
///
/// Twice the 64 regions that vhost-user allows, because a new table is mapped before the old one is
/// unmapped, and as many again for requests in flight, in-flight regions and dirty logs.
pub const MAX_CLIENT_MAPPINGS: u64 = 256;

/// Address space in bytes that client mappings must leave to the process.
///
/// Threads and small allocations need it: they cannot each report failure.
pub const HEADROOM: usize = 64 << 20;

/// Most bytes of one client's translation tables.
const MAX_CLIENT_TABLES: u64 = 64 << 20;
/// Fewest bytes of one client's translation tables, with any number of clients.
const MIN_CLIENT_TABLES: u64 = 1 << 20;

/// Limits of clients' mappings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MappingLimits {
    /// Most bytes mapped for one client.
    pub max_client_memory: u64,
    /// Most bytes mapped for all clients together.
    pub max_memory: u64,
    /// Most protected mappings of all clients together.
    ///
    /// One client has at most [`MAX_CLIENT_MAPPINGS`].
    pub max_mappings: u64,
    /// Most bytes of all clients' translation tables.
    ///
    /// Each client gets an equal part, from 1 MiB to 64 MiB.
    pub max_tables: u64,
    /// Maps files of any file system that is not FUSE [only those in memory].
    ///
    /// Whoever owns the file system, or one below it, can then stop threads that use the memory.
    pub any_file: bool,
}

impl MappingLimits {
    /// Highest useful value of [`max_mappings`](Self::max_mappings).
    ///
    /// The rest of the process's table is for images.
    pub const MOST_MAPPINGS: u64 = sigbus::MAX_MAPPINGS as u64 / 4 * 3;

    /// Derives limits from this host.
    ///
    /// - All clients: half of the address space (2^47 bytes, or RLIMIT_AS).
    /// - One client: 8 times RAM and swap, at least 1 TiB, at most half of the limit of all
    ///   clients.
    /// - Mappings: three quarters of `vm.max_map_count`, at most half of RLIMIT_NOFILE, since each
    ///   keeps a descriptor open.
    /// - Translation tables: a sixteenth of RAM.
    #[must_use]
    pub fn of_host() -> Self {
        Self::from_host(&Host::ask())
    }

    fn from_host(host: &Host) -> Self {
        let max_memory = host.address_space / 2;
        let generous = host.memory.saturating_mul(8).max(1 << 40);
        let maps = host.max_map_count / 4 * 3;
        Self {
            max_client_memory: generous.min(max_memory / 2),
            max_memory,
            max_mappings: maps.min(host.max_files / 2).min(Self::MOST_MAPPINGS),
            max_tables: host.ram / 16,
            any_file: false,
        }
    }
}

/// Checks that this process can have `bytes` more of memory. Allocates nothing.
///
/// # Errors
/// The address space, RLIMIT_AS, RLIMIT_DATA or the host's commit limit does not allow it.
pub fn headroom(bytes: usize) -> io::Result<()> {
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at an address of the kernel's choice replaces nothing.
    let start = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, protection, MapFlags::PRIVATE) }
        .map_err(|error| {
            let what = format!("less than {} MiB would be left to the process ({error})", bytes >> 20);
            io::Error::new(io::ErrorKind::OutOfMemory, what)
        })?;
    // SAFETY: the mapping was just made, and no other code knows of it.
    Ok(unsafe { munmap(start, bytes) }?)
}

/// Resources of the host.
#[derive(Debug)]
struct Host {
    address_space: u64,
    ram: u64,
    /// RAM and swap in bytes.
    memory: u64,
    max_map_count: u64,
    max_files: u64,
}

impl Host {
    fn ask() -> Self {
        use rustix::process::{Resource, getrlimit};
        let info = rustix::system::sysinfo();
        // `unsigned long` or narrower, by architecture.
        #[allow(clippy::useless_conversion, reason = "narrower on some architectures")]
        let bytes = |units| u64::from(units).saturating_mul(u64::from(info.mem_unit));
        let (ram, swap) = (bytes(info.totalram), bytes(info.totalswap));
        let maps = std::fs::read_to_string("/proc/sys/vm/max_map_count").ok();
        Self {
            address_space: getrlimit(Resource::As).current.unwrap_or(u64::MAX).min(1 << 47),
            ram,
            memory: ram.saturating_add(swap),
            // The kernel's default.
            max_map_count: maps.and_then(|text| text.trim().parse().ok()).unwrap_or(65530),
            max_files: getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX),
        }
    }
}

/// Bytes and mappings of one client.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Use {
    bytes: u64,
    mappings: u64,
}

/// Pool of mappings that all clients of a process share.
///
/// ```text
///   MappingLimits --> MappingPool  --quota()--> MappingQuota --lease()--> MappingLease
///                     (a process)               (a client)                (a mapping)
/// ```
/// **Guaranteed share.** Half of the pool is divided evenly among the quotas. A client below its
/// share is never refused because of the others; beyond it, clients take from the other half, first
/// come, first served. So a few greedy clients cannot lock the others out.
///
/// **A lease counts** the bytes that the host maps, rounding to huge pages included, and one
/// mapping. It ends when the memory is unmapped, so a client that replaces its memory pays for both
/// until the old mapping is gone.
#[derive(Debug)]
pub struct MappingPool {
    limits: MappingLimits,
    /// One entry per quota; `None` if free.
    uses: Mutex<Vec<Option<Use>>>,
}

impl MappingPool {
    /// Makes an empty pool.
    #[must_use]
    pub fn new(limits: MappingLimits) -> Arc<Self> {
        Arc::new(Self { limits, uses: Mutex::default() })
    }

    /// Limits of the pool.
    #[must_use]
    pub fn limits(&self) -> MappingLimits {
        self.limits
    }

    /// Makes a quota for one more client.
    ///
    /// It reduces the guaranteed shares: make all quotas before the first client is served.
    #[must_use]
    pub fn quota(self: &Arc<Self>) -> MappingQuota {
        let mut uses = self.lock();
        let free = uses.iter().position(Option::is_none);
        let index = free.unwrap_or_else(|| {
            uses.push(None);
            uses.len() - 1
        });
        uses[index] = Some(Use::default());
        drop(uses);
        MappingQuota(Arc::new(Member { pool: Arc::clone(self), index }))
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Option<Use>>> {
        // Each change under the lock is one assignment.
        self.uses.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Quota of one client. Cheap to clone; clones are the same quota.
#[derive(Clone, Debug)]
pub struct MappingQuota(Arc<Member>);

#[derive(Debug)]
struct Member {
    pool: Arc<MappingPool>,
    index: usize,
}

impl Drop for Member {
    fn drop(&mut self) {
        self.pool.lock()[self.index] = None;
    }
}

/// A quota alone in a pool with the limits of the host.
impl Default for MappingQuota {
    fn default() -> Self {
        MappingPool::new(MappingLimits::of_host()).quota()
    }
}

impl MappingQuota {
    /// Limits of the pool.
    #[must_use]
    pub fn limits(&self) -> MappingLimits {
        self.0.pool.limits
    }

    /// Bytes mapped.
    #[must_use]
    pub fn mapped(&self) -> u64 {
        self.used().bytes
    }

    /// Number of protected mappings.
    #[must_use]
    pub fn mappings(&self) -> u64 {
        self.used().mappings
    }

    /// Most bytes of this client's translation tables.
    ///
    /// See [`Domain::with_limit`](crate::Domain::with_limit).
    #[must_use]
    pub fn max_tables(&self) -> u64 {
        let clients = self.0.pool.lock().iter().flatten().count() as u64;
        (self.limits().max_tables / clients.max(1)).clamp(MIN_CLIENT_TABLES, MAX_CLIENT_TABLES)
    }

    fn used(&self) -> Use {
        self.0.pool.lock()[self.0.index].unwrap_or_default()
    }

    /// Counts one mapping of `bytes`, until the lease is dropped.
    pub(crate) fn lease(&self, bytes: u64) -> Result<MappingLease, QuotaError> {
        let MappingLimits { max_client_memory, max_memory, max_mappings, .. } = self.limits();
        let mut uses = self.0.pool.lock();
        let mine = uses[self.0.index].unwrap_or_default();
        let new = Use { bytes: mine.bytes.saturating_add(bytes), mappings: mine.mappings + 1 };
        if new.bytes > max_client_memory {
            let (mapped, limit) = (mine.bytes, max_client_memory);
            return Err(QuotaError::ClientMemory { wanted: bytes, mapped, limit });
        }
        if new.mappings > MAX_CLIENT_MAPPINGS {
            return Err(QuotaError::ClientMappings { limit: MAX_CLIENT_MAPPINGS });
        }
        let others = || uses.iter().enumerate().filter(|(index, _)| *index != self.0.index);
        let others = || others().filter_map(|(_, used)| *used);
        let room = |limit, of: fn(Use) -> u64| room(limit, others().map(of));
        if new.bytes > room(max_memory, |used| used.bytes) {
            return Err(QuotaError::Memory { wanted: bytes, mapped: mine.bytes, limit: max_memory });
        }
        if new.mappings > room(max_mappings, |used| used.mappings) {
            return Err(QuotaError::Mappings { mapped: mine.mappings, limit: max_mappings });
        }
        uses[self.0.index] = Some(new);
        Ok(MappingLease { quota: self.clone(), bytes })
    }
}

/// Part of `limit` that one client may have.
///
/// `others` yields the use of each other client. Each keeps its guaranteed share.
fn room(limit: u64, others: impl Iterator<Item = u64> + Clone) -> u64 {
    let share = limit / 2 / (others.clone().count() as u64 + 1);
    let used = others.clone().fold(0, u64::saturating_add);
    let reserved = others.map(|used| used.max(share)).fold(0, u64::saturating_add);
    // Shares shrink when a quota is added: then the others may use more than the rest.
    limit.saturating_sub(reserved).max(share.min(limit.saturating_sub(used)))
}

/// One counted mapping. Drop it after the memory is unmapped.
#[derive(Debug)]
pub(crate) struct MappingLease {
    quota: MappingQuota,
    bytes: u64,
}

impl Drop for MappingLease {
    fn drop(&mut self) {
        let Member { pool, index } = &*self.quota.0;
        if let Some(used) = &mut pool.lock()[*index] {
            used.bytes -= self.bytes;
            used.mappings -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIB: u64 = 1 << 40;

    fn pool(max_client_memory: u64, max_memory: u64, max_mappings: u64) -> Arc<MappingPool> {
        MappingPool::new(MappingLimits {
            max_client_memory,
            max_memory,
            max_mappings,
            max_tables: 1 << 30,
            any_file: false,
        })
    }

    #[test]
    fn a_lease_counts_until_it_is_dropped() {
        let quota = pool(100, 1000, 10).quota();
        let lease = quota.lease(60).unwrap();
        assert_eq!((quota.mapped(), quota.mappings()), (60, 1));
        let error = quota.lease(41).unwrap_err();
        assert!(matches!(error, QuotaError::ClientMemory { wanted: 41, mapped: 60, limit: 100 }), "{error}");
        let other = quota.lease(40).unwrap();
        drop(lease);
        assert_eq!((quota.mapped(), quota.mappings()), (40, 1));
        assert!(quota.lease(u64::MAX).is_err());
        drop(other);
        assert_eq!((quota.mapped(), quota.mappings()), (0, 0));
    }

    #[test]
    fn a_lone_client_may_have_all_that_there_is() {
        let pool = pool(u64::MAX, 100, 10);
        let quota = pool.quota();
        let lease = quota.lease(100).unwrap();
        assert!(matches!(quota.lease(1), Err(QuotaError::Memory { .. })));
        drop(lease);
        let leases: Vec<_> = (0..10).map(|_| quota.lease(1).unwrap()).collect();
        assert!(matches!(quota.lease(1), Err(QuotaError::Mappings { .. })));
        drop(leases);
    }

    #[test]
    fn a_client_has_a_fixed_number_of_mappings() {
        let quota = pool(u64::MAX, u64::MAX, u64::MAX).quota();
        let leases: Vec<_> = (0..MAX_CLIENT_MAPPINGS).map(|_| quota.lease(1).unwrap()).collect();
        assert!(matches!(quota.lease(1), Err(QuotaError::ClientMappings { .. })));
        drop(leases);
        assert!(quota.lease(1).is_ok());
    }

    #[test]
    fn greedy_clients_leave_the_others_their_share() {
        let pool = pool(u64::MAX, 8000, 800);
        let greedy: Vec<_> = (0..3).map(|_| pool.quota()).collect();
        let honest = pool.quota();
        let mut leases = Vec::new();
        for quota in &greedy {
            while let Ok(lease) = quota.lease(100) {
                leases.push(lease);
            }
        }
        let taken: u64 = greedy.iter().map(MappingQuota::mapped).sum();
        assert_eq!(taken, 7000, "all but one share of four in the half");
        let lease = honest.lease(1000).unwrap();
        assert!(honest.lease(1).is_err(), "nothing is left");
        drop(lease);
        leases.clear();
        assert!(honest.lease(5000).is_ok());
    }

    /// With the kernel's default of `vm.max_map_count`.
    #[test]
    fn a_thousand_clients_have_two_dozen_mappings_each_beside_greedy_ones() {
        let pool = pool(u64::MAX, u64::MAX, 65530 / 4 * 3);
        let quotas: Vec<_> = (0..1000).map(|_| pool.quota()).collect();
        let (greedy, honest) = quotas.split_at(100);
        let mut leases = Vec::new();
        for quota in greedy {
            leases.extend(std::iter::from_fn(|| quota.lease(1).ok()));
        }
        for quota in honest.iter().step_by(50) {
            leases.extend((0..24).map(|_| quota.lease(1).unwrap()));
        }
    }

    #[test]
    fn a_quota_that_comes_late_has_what_the_others_leave() {
        let pool = pool(u64::MAX, 1000, 100);
        let first = pool.quota();
        let lease = first.lease(900).unwrap();
        let second = pool.quota();
        assert!(second.lease(101).is_err());
        assert!(second.lease(100).is_ok(), "its share is 250, and 100 are left");
        drop(lease);
        let _lease = second.lease(750).unwrap();
        assert!(second.lease(1).is_err(), "the first one's share");
        assert!(first.lease(250).is_ok());
    }

    #[test]
    fn a_quota_that_goes_gives_its_share_back() {
        let pool = pool(u64::MAX, 1000, 100);
        let (first, second) = (pool.quota(), pool.quota());
        let lease = second.lease(10).unwrap();
        drop(second);
        assert!(first.lease(751).is_err(), "its lease lives");
        drop(lease);
        assert!(first.lease(1000).is_ok());
        let third = pool.quota();
        assert_eq!(third.mapped(), 0);
    }

    #[test]
    fn limits_follow_from_what_the_host_has() {
        let host = |address_space, memory, max_map_count, max_files| Host {
            address_space,
            ram: memory,
            memory,
            max_map_count,
            max_files,
        };
        let large = MappingLimits::from_host(&host(1 << 47, 512 << 30, 65530, 1 << 20));
        assert_eq!((large.max_memory, large.max_client_memory), (64 * TIB, 4 * TIB));
        assert_eq!(large.max_mappings, 49146);
        let small = MappingLimits::from_host(&host(1 << 47, 4 << 30, 65530, 1024));
        assert_eq!((small.max_client_memory, small.max_mappings), (TIB, 512));
        let tight = MappingLimits::from_host(&host(8 << 30, 4 << 30, 1 << 30, u64::MAX));
        assert_eq!((tight.max_memory, tight.max_client_memory), (4 << 30, 2 << 30));
        assert_eq!(tight.max_mappings, MappingLimits::MOST_MAPPINGS);
        assert!(MappingLimits::of_host().max_mappings > 0);
    }

    #[test]
    fn tables_are_divided_evenly() {
        let pool = pool(1, 1, 1);
        let quotas: Vec<_> = (0..64).map(|_| pool.quota()).collect();
        assert_eq!(quotas[0].max_tables(), 16 << 20);
        drop(quotas);
        assert_eq!(pool.quota().max_tables(), 64 << 20);
    }
}
