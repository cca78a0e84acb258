//! Work on disks.
//!
//! ```text
//!   Lane: one queue of a disk, its requests in flight, its report
//!     | what next?  -> Job (Hash or WriteTest) -> a Work for a slot
//!     | done        -> Job: look at the data, go on to the next phase
//! ```
mod buffers;
mod driver;
mod hash;
mod job;
mod lane;
mod work;
mod write_test;

pub(crate) use buffers::Buffers;
pub(crate) use driver::{Disk, DiskQueue};
pub(crate) use hash::Hash;
pub(crate) use job::Job;
pub(crate) use lane::Lane;
pub(crate) use write_test::{WriteTest, WriteTestParams};

#[cfg(test)]
mod tests;
