//! Explores the states that a crash can leave, and what comes after.
//!
//! ```text
//!   image over a recorded store --guest: random requests--> log of writes, zeroes, discards, sizes, flushes
//!                                                              |
//!   power loss: any subset of what was not flushed, torn       |      SIGKILL: all that was done so far
//!                                                              v
//!   state --> check: no cluster has more references than its refcount
//!         --> it opens; flushed data is there, other data is old or new
//!         --> the next life: random requests, compared with a model --> check --> crash again
//! ```
//! The recorded store is below any format. A file, a block device, an NBD export and an image of Ceph
//! get the same jobs in the same order, so it stands for all of them.
//!
//! Each run has a seed, and so has a finding: the same kind and seed make the same requests. With
//! more than one request in flight the order of the log depends on threads, too: `--keep` saves the
//! images of a finding.
//!
//! | file | content |
//! |---|---|
//! | `store`, `log` | the recorded store and what was done to it |
//! | `machine`, `guest` | a driver, and the requests it makes |
//! | `stamp`, `model` | content that names its write; what a disk may read as |
//! | `kind`, `make` | the kinds of disks, and their images |
//! | `crash` | the states after a crash |
//! | `check` | refcounts of a qcow2 image |
//! | `life`, `job` | a life of a disk; images that are made and merged |
//! | `record`, `cache` | the holder's record file; the cache of HTTP objects |
//! | `run`, `explore` | a run of one of them; all runs, and findings |
mod cache;
mod check;
mod crash;
mod explore;
mod guest;
mod job;
mod kind;
mod life;
mod log;
mod machine;
mod make;
mod model;
mod record;
mod run;
mod stamp;
mod store;

pub use explore::{Finding, Options, Report, Row, explore, names};

/// What survives: names that begin with one of these. The test holds them to it.
pub const SURVIVE: &[&str] = &["raw", "qcow2", "create", "convert", "commit", "record-file", "http-cache"];
