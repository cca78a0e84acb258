//! Guest memory, and the one guard through which devices reach it.
//!
//! ```text
//! RegionConfig -> Region (memfd, mapped) --+      FileRange -> Region (a client's file, guarded: Alarm)
//!                                          v
//!                       Memory (published snapshot, can be swapped)  <--- start_log, stop_log: DirtyLog
//!                          | handle()                ^ replace(regions)         | harvest
//!                          |                                                    v
//!                          |     Domain (IOVA -> guest-physical: map, unmap)  DirtyPages (report, merge, count)
//!                          |        | handle()
//!                          v        v
//!                       Handle (one a queue): keeps snapshot and translations from batch to batch
//!                          | open()            sees what was published, announces that it is inside
//!                          v
//!                       AccessGuard (one a batch)
//!                          read / write / read_obj / write_obj / fill     bytes, copied, in order (Access)
//!                          map -> Mapping, MappingGuard                           host memory, held while the guard lives
//!                          | drop              marks what was written, announces that it is outside
//! ```
//! **Who waits for whom.** Accesses wait for nobody. Who changes something publishes it and, where the caller must know
//! that nobody goes by the old state any more, waits for the guards that are open ([`Memory::synchronize`],
//! [`Domain::unmap`]), with a timeout that names the holder. Nobody waits for a holder whose guard is shut, nor does a
//! slow holder make another one wait.
//!
//! Guest memory is never behind a Rust reference. Copies are made of relaxed atomic words or one string
//! instruction ([`Access`] states what is promised about order), and mappings are raw pointers with a guard.
mod access;
mod access_guard;
mod cache;
mod copy;
mod domain;
mod error;
#[cfg(not(miri))]
mod fault_guard;
mod handle;
#[cfg(feature = "vm-memory")]
pub mod interop;
mod line_set;
mod log;
mod mapping;
mod memory;
mod pages;
mod pending_marks;
mod pin_table;
#[cfg(not(miri))]
mod quota;
mod ram;
mod reader_slot;
mod region;
mod snapshot;
mod sync;
mod table;
#[cfg(not(miri))]
mod view;
mod words;

pub use access::Access;
pub use access_guard::AccessGuard;
pub use domain::{Domain, Miss};
pub use error::{Busy, BusyWith, DmaError, DomainError, LogError, MemoryError, QuotaError};
#[cfg(not(miri))]
pub use fault_guard::{Alarm, is_lost};
pub use handle::Handle;
pub use log::DirtyLog;
pub use mapping::{GuestRange, HostSlice, Mapping, MappingGuard};
pub use memory::{Lent, Memory};
pub use pages::DirtyPages;
pub use paravane_spec::queue::Segment;
#[cfg(not(miri))]
pub use quota::{HEADROOM, MAX_CLIENT_MAPPINGS, MappingLimits, MappingPool, MappingQuota, headroom};
pub use region::{Backing, FileRange, Region, RegionConfig};
#[cfg(not(miri))]
pub use view::{FileView, NotWritten};
