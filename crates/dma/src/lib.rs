//! Ordered access of devices to guest memory, with translation and dirty logging.
//!
//! A [`Memory`] is a published map of [`Region`]s. Each queue of a device has a [`Handle`] to it,
//! directly or through a [`Domain`] that translates IOVAs. An [`AccessGuard`] lasts for one batch
//! of a queue; every access goes through it.
//!
//! ```text
//! RegionConfig -> Region (memfd) --+      FileRange -> Region (a client's file; protected: Alarm)
//!                                  v
//!               Memory (published snapshot, replaceable) <--- start_log, stop_log: DirtyLog
//!                  | handle()                ^ replace(regions)         | harvest
//!                  |                                                    v
//!                  |     Domain (IOVA -> guest-physical)    DirtyPages (report, merge, count)
//!                  |        | handle()
//!                  v        v
//!               Handle (one per queue): keeps snapshot and translations from batch to batch
//!                  | enter()     begins a read-side critical section; sees all publications
//!                  v
//!               AccessGuard (one per batch)
//!                  read / write / read_obj / write_obj / fill    copies bytes, in order (Access)
//!                  map -> Mapping, MappingGuard                  host memory, beyond the batch too
//!                  | drop        marks written pages, ends the critical section
//! ```
//!
//! # Example
//!
//! ```
//! use paravane_dma::{Access, Backing, Memory, Region, RegionConfig};
//!
//! let config = RegionConfig { gpa: 0x8000_0000, size: 1 << 20, backing: Backing::Pages, writable: true };
//! let memory = Memory::new(vec![Region::new(config)?])?;
//!
//! let mut handle = memory.handle().named("queue 0");
//! let guard = handle.enter(); // one batch
//! guard.write_obj(0x8000_1000, &0x1234_u32, Access::empty())?;
//! assert_eq!(guard.read_obj::<u32>(0x8000_1000, Access::empty())?, 0x1234);
//! drop(guard); // the write is now in the dirty log, if one is on
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Order
//!
//! An access is ordered against the vCPUs by default, and the order follows from its direction: a
//! read acquires, a write releases. On x86-64 this costs no instruction. Two cases need a flag, and
//! only the caller knows them:
//!
//! - [`Access::FULL`]: a load must not pass an earlier store. Use it where a device publishes
//!   something and then reads whether the driver wants a notification.
//! - [`Access::RELAXED`]: the caller orders by other means, for example one fence for a batch.
//!
//! [`Access`] states each promise. It covers accesses by this crate only: system calls on a
//! [`HostSlice`] are ordered by the start and the end of their mapping.
//!
//! # Waiting
//!
//! Accesses never wait. A change is published at once. A caller that must know that the old state
//! is out of use waits for the access guards that are live ([`Memory::synchronize`],
//! [`Domain::unmap`]), with a timeout whose error names the holder. A handle without a live guard
//! is never waited for, and one slow holder does not delay another.
//!
//! # Safety
//!
//! Guest memory is never behind a Rust reference. Copies consist of relaxed atomic words or of one
//! string instruction. Mappings are raw pointers with a [`MappingGuard`] that keeps them valid.
//!
//! # Files
//!
//! * `Region` (memfd, or a client's file), `Memory` (a published snapshot that can be swapped),
//!   `Domain` (a device's address space: `table` is the radix tree, `translations` its changes
//!   while handles use it, `cache` the windows that a handle has found), `Handle` (kept from batch
//!   to batch), `AccessGuard` (every access, live for one batch), `Mapping` and `MappingGuard`
//!   (keep memory mapped), `Access` (direction and order as flags).
//! * `reader_slot` and `pin_table` make a change wait for readers of the old state; `log` has the
//!   dirty log and the argument why no mark is lost, `pending_marks` the writes that a guard has
//!   not marked yet, `pages` the reports; `sigbus` handles faults after a client truncated its
//!   file; `quota` limits what clients have mapped; `view` (`FileView`) is a file copied from and
//!   to guest memory without system calls; `in_place` (`InPlace`) finds memory that is read in
//!   place during a batch, `span` (`ReadSpan`, `WriteSpan`) a buffer that is accessed several times
//!   in it, or copied from and to a `FileView`; `published` is the current snapshot, which handles
//!   pin; `window` is a run of device addresses in one piece of host memory; `bitmap` is the format
//!   of dirty pages.
//! * The modules below are in order, lowest first.
//! * `interop`, a feature, is the only place that names vm-memory.

// Files, lowest first. A file imports only those before it.
//
//   sync, access, error               primitives that models replace; direction and order; errors
//   copy, host_slice                  how bytes move; a piece of mapped memory
//   sigbus, quota                     truncated files; limits of clients' mappings
//   backing, ram, view, meminfo       kinds of pages; host memory; files without system calls; what the host has
//   bitmap, words, pages, log         dirty pages: format, shared words, reports, marks
//   region, window, snapshot          a piece of guest memory; how an access sees it; one map
//   pin_table, reader_slot            mappings of a holder; waiting for holders
//   published, table, translations    the current map; the tree of a domain; its changes
//   line_set, cache, pending_marks    windows found before; writes not marked yet
//   handle, mapping, access_guard     a holder; memory in use in place; one batch
//   in_place, span                    reads in place; one look-up for several accesses
//   memory, domain, interop           guest memory; a device's address space; vm-memory's traits
mod access;
mod access_guard;
mod backing;
mod bitmap;
mod cache;
mod copy;
mod domain;
mod error;
mod handle;
mod host_slice;
mod in_place;
#[cfg(feature = "vm-memory")]
pub mod interop;
mod line_set;
mod log;
mod mapping;
mod meminfo;
mod memory;
mod pages;
mod pending_marks;
mod pin_table;
mod published;
#[cfg(not(miri))]
mod quota;
mod ram;
mod reader_slot;
mod region;
#[cfg(not(miri))]
mod sigbus;
mod snapshot;
mod span;
mod sync;
mod table;
mod translations;
#[cfg(not(miri))]
mod view;
mod window;
mod words;

pub use access::Access;
pub use access_guard::AccessGuard;
pub use backing::Backing;
pub use domain::Domain;
pub use error::{Busy, BusyWith, DmaError, DmaFault, DomainError, LogError, MemoryError, QuotaError};
pub use handle::Handle;
pub use host_slice::HostSlice;
pub use in_place::InPlace;
pub use log::DirtyLog;
pub use mapping::{GuestRange, Mapping, MappingGuard};
pub use meminfo::MemInfo;
pub use memory::{Lent, Memory};
pub use pages::DirtyPages;
pub use paravane_spec::queue::Segment;
#[cfg(not(miri))]
pub use quota::{HEADROOM, MAX_CLIENT_MAPPINGS, MappingLimits, MappingPool, MappingQuota, headroom};
pub use region::{FileRange, Region, RegionConfig};
#[cfg(not(miri))]
pub use sigbus::{Alarm, is_lost};
pub use span::{ReadSpan, WriteSpan};
pub use translations::Miss;
#[cfg(not(miri))]
pub use view::{FileView, NotWritten};
