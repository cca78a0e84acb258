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
mod access;
mod error;
mod handle;
mod memory;
mod region;

pub use access::Access;
pub use error::{DmaError, MemoryError};
pub use handle::{Handle, Hold, HostSlice, Mapping};
pub use memory::Memory;
pub use paravane_spec::queue::Segment;
pub use region::{Backing, Region, RegionConfig};
