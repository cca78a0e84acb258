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
//! | [`pieces`] | parts of the memory of jobs, and copies of it |
//! | `location` | [`Location`]: paths and URLs |
//! | `open` | [`open()`]: a location becomes a store |
//! | [`mod@file`] | files: `FileStore`, the system calls of jobs; rings of io_uring, threads and mappings for queues |
//! | [`nbd`] | a store behind an NBD server |
//! | `object` | `Object`: an object of an HTTP or S3 server, read by ranges (feature `http`) |
//! | `cache` | chunks of objects that are kept on this host (feature `http`) |
//! | `rbd` | images of Ceph |
//! | `lock` | [`lock()`]: locks without poison |
//! | `log_device` | [`LogDevice`]: the device that a thread works for |
//! | `named_files` | [`NamedFiles`]: certificates, keys and digests, read before a sandbox closes |
//! | `connect` | [`Connector`]: how a store gets connections, in a sandbox or not |
//!
//! # Files
//!
//! * Where the bytes of an image lie: `Store` and `StoreQueue` are the cut, `file` the system calls
//!   of jobs on a file and the engines of its queues (`uring` a ring of io_uring, `registered` guest
//!   memory in it, `threads` a pool, `immediate` the queue's thread, `mapped` copies, `beside` two of
//!   these), `Job`, `Pieces` and `Outcome` what passes it, `rest` how a queue sleeps (`Rest`,
//!   `WakeSet`; of handlers, too), `Location` a path or URL, `Connector` how a store gets its
//!   connections, `NamedFiles` the certificates, keys and digests that locations name, read before
//!   a sandbox closes.
//! * `object` (feature `http`) reads objects of HTTP and S3 servers by ranges, with a thread that
//!   fetches; `cache` keeps their chunks, in files that survive a kill or in memory; its `batch`
//!   reads several in one system call.
//! * `nbd` is the client of NBD servers: `reply` decodes what a server sends (pure), `session` is
//!   one connection, `channel` a connection over its losses with the jobs of all its queues,
//!   `member` one of them, `watched` what the wake set of an I/O thread has of a queue, `reconnect`
//!   the thread that makes it again.
//! * `rbd`, a feature, has images of Ceph: `library` is the only place that names functions of
//!   librbd, `flight` one request of it with a buffer of its own (librbd never has guest memory),
//!   `session` the image as its queues share it, `queue` the jobs of a virtqueue.
#[cfg(feature = "http")]
mod cache;
mod connect;
mod event;
pub mod file;
mod job;
mod location;
mod lock;
mod log_device;
mod named_files;
pub mod nbd;
#[cfg(feature = "http")]
mod object;
mod open;
pub mod pieces;
#[cfg(any(feature = "http", feature = "rbd"))]
mod posted;
#[cfg(feature = "rbd")]
pub mod rbd;
mod rest;
mod store;

#[cfg(feature = "http")]
pub use cache::CacheConfig;
pub use connect::{Connector, Direct, Target};
pub use event::{clear, eventfd, signal};
pub use job::{Job, Outcome, Pieces};
pub use location::{
    HttpLocation, Location, LocationError, NbdLocation, ObjectFiles, RbdLocation, S3Location, TlsFiles,
    Written, without_secrets,
};
pub use lock::lock;
pub use log_device::LogDevice;
pub use named_files::NamedFiles;
#[cfg(feature = "http")]
pub use object::{Object, ObjectError, ObjectOptions};
pub use open::{CacheFolder, OpenOptions, StoreError, open, open_ahead, target};
pub use rest::{Rest, WakeSet, WakeSource};
pub use store::{CacheStatus, Link, Store, StoreExtent, StoreLimits, StoreQueue, StoreStatus};
