//! Where the bytes of a disk image lie.
//!
//! ```text
//!   Location ("nbd://...") --open--> Store, shared by the queues of a disk
//!                                      | queue
//!                                      v
//!   push(head, Job)* -> submit ->  StoreQueue, one for each virtqueue  -> reap: Outcome*
//!                                      '-- register: descriptors that wake its owner when jobs have ended
//! ```
//! A store takes reads, writes, flushes, discards and zeroes for memory in pieces, and completes
//! them in a queue that an I/O thread polls or sleeps on. It knows nothing of virtqueues
//! or formats: a disk image is a format over a store. The server is not trusted: what it sends is
//! checked, and an error of it is an error of the jobs.
//!
//! | file | content |
//! |---|---|
//! | `store` | [`Store`] and [`StoreQueue`]: the cut |
//! | `rest` | [`Rest`] and [`WakeSet`]: how a queue sleeps |
//! | `job` | [`Job`], its memory ([`Pieces`]), its [`Outcome`] |
//! | `location` | [`Location`]: paths and URLs |
//! | `open` | [`open()`]: a location becomes a store |
//! | [`mod@file`] | files: the system calls of jobs, and a ring of io_uring for a queue |
//! | [`nbd`] | a store behind an NBD server |
//! | `object` | `Object`: an object of an HTTP or S3 server, read by ranges (feature `http`) |
//! | `cache` | chunks of objects that are kept on this host (feature `http`) |
//! | `rbd` | images of Ceph |
//! | `named_files` | [`NamedFiles`]: certificates, keys and digests, read before a sandbox closes |
//! | `connect` | [`Connector`]: how a store gets connections, in a sandbox or not |
#[cfg(feature = "http")]
mod cache;
mod connect;
pub mod file;
mod job;
mod location;
mod named_files;
pub mod nbd;
#[cfg(feature = "http")]
mod object;
mod open;
#[cfg(feature = "rbd")]
pub mod rbd;
mod rest;
mod store;

#[cfg(feature = "http")]
pub use cache::CacheConfig;
pub use connect::{Connector, Direct, Target};
pub use job::{Job, Outcome, Pieces};
pub use location::{
    HttpLocation, Location, LocationError, NbdLocation, ObjectFiles, RbdLocation, S3Location, TlsFiles,
    Written, without_secrets,
};
pub use named_files::NamedFiles;
#[cfg(feature = "http")]
pub use object::{Object, ObjectError, ObjectOptions};
pub use open::{CacheFolder, OpenOptions, StoreError, open, open_ahead, target};
pub use rest::{Rest, WakeSet, WakeSource};
pub use store::{CacheStatus, Link, Store, StoreExtent, StoreLimits, StoreQueue, StoreStatus};
