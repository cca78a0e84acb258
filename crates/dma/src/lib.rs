//! Guest memory, and the one door through which devices reach it.
//!
//! ```text
//! RegionConfig -> Region (memfd, mapped) --+
//!                                          v
//!                       Memory (published snapshot, can be swapped)
//!                          | handle()                ^ replace(regions)
//!                          v                         |
//!   Handle (one a queue): refresh() at batch boundaries pins the newest snapshot
//!     read / write / read_obj / write_obj / fill     bytes, copied, in order (Access)
//!     map -> Mapping                                 host memory, held while the guard lives
//! ```
//!
//! Guest memory is never behind a Rust reference. Copies are made of relaxed atomic words or one string
//! instruction ([`Access`] states what is promised about order), and mappings are raw pointers with a guard.
mod access;
mod copy;
mod error;
mod handle;
mod mapping;
mod memory;
mod ram;
mod region;
mod snapshot;
mod sync;

pub use access::Access;
pub use error::{DmaError, MemoryError};
pub use handle::Handle;
pub use mapping::{Hold, HostSlice, Mapping};
pub use memory::Memory;
pub use paravane_spec::queue::Segment;
pub use region::{Backing, Region, RegionConfig};
