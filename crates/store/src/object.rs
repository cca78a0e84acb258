//! Objects of HTTP and S3 servers, read by ranges.
//!
//! ```text
//!   ObjectQueue --- chunk is here: copied at once ----------------------------.
//!        '- PendingJob -> Board (a flight for each chunk) -> run of chunks      Outcome
//!                           |   thread http-fetch            | GET, Range, If-Match
//!                           |                                v
//!                           '------- deliver <--- checked <--- server
//! ```
//! Opening asks for the first byte, which tells the size and the object's tag. Each later request is
//! for this tag only, and each answer is checked before a byte of it is used: status, range, length
//! and tag, and the digest if there are some. A changed object makes the store unusable for good.
//!
//! Users of one object in one process share it: cache, connections, and requests. The options and
//! the connector are those of the first.
//!
//! | file | content |
//! |---|---|
//! | `options`, `error`, `credentials`, `origin` | what is opened, and where requests go; why not |
//! | `answer` | what an answer must say (pure) |
//! | `dialer`, `tls`, `client` | connections, and requests over them |
//! | `digests` | digests of chunks that the operator has named |
//! | `pending`, `board` | jobs that wait; which chunks are wanted and in which order |
//! | `link`, `source`, `fetch` | state of the server; an object that is open; the thread that fetches |
//! | `shared`, `queue` | users of one object; jobs of one virtqueue |
mod answer;
mod board;
mod client;
mod credentials;
mod dialer;
mod digests;
mod error;
mod fetch;
mod link;
mod options;
mod origin;
mod pending;
mod queue;
mod shared;
mod source;
mod tls;

pub(crate) use credentials::read as read_credentials;
pub(crate) use digests::{Digests, read as read_digests};
pub use error::ObjectError;
pub use options::ObjectOptions;

use crate::cache::{CacheConfig, Found};
use crate::lock::lock;
use crate::store::perform_in_queue;
use crate::{Connector, Job, Location, Store, StoreLimits, StoreQueue, StoreStatus, Target};
use origin::Origin;
use queue::{Lane, ObjectQueue};
use shared::ObjectShared;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// An object of an HTTP or S3 server, for reading.
#[derive(Debug)]
pub struct Object {
    shared: Arc<ObjectShared>,
    closed: Arc<AtomicBool>,
    /// Of the queues, which may wait for chunks.
    lanes: Mutex<Vec<Arc<Lane>>>,
    /// Bytes that were here, of calls of `perform` and of queues that are gone.
    hit_bytes: AtomicU64,
}

impl Object {
    /// Opens an object, with a cache in a folder or in memory. Blocks until its server has answered.
    ///
    /// # Errors
    /// See [`ObjectError`].
    pub fn open(
        location: &Location,
        options: &ObjectOptions,
        cache: Option<&CacheConfig>,
        connector: Arc<dyn Connector>,
    ) -> Result<Self, ObjectError> {
        Ok(Self {
            shared: shared::open(location, options, cache, connector)?,
            closed: Arc::default(),
            lanes: Mutex::default(),
            hit_bytes: AtomicU64::new(0),
        })
    }

    /// The server that an object needs connections to.
    ///
    /// # Errors
    /// The location is no object, or is wrong.
    pub fn target(location: &Location) -> Result<Target, ObjectError> {
        // The server does not depend on the rights.
        Ok(Origin::anonymous(location)?.target())
    }
}

impl Store for Object {
    fn queue(&self, jobs: u16) -> io::Result<Box<dyn StoreQueue>> {
        let queue = ObjectQueue::new(self.shared.clone(), jobs, self.closed.clone())?;
        let mut lanes = lock(&self.lanes);
        lanes.retain(|lane| {
            let lives = Arc::strong_count(lane) > 1;
            if !lives {
                self.hit_bytes.fetch_add(lane.hit_bytes.load(Ordering::Relaxed), Ordering::Relaxed);
            }
            lives
        });
        lanes.push(queue.begun.lane.clone());
        Ok(Box::new(queue))
    }

    unsafe fn perform(&self, job: Job) -> i32 {
        let source = &self.shared.source;
        if let Job::Read { pieces, offset } = job
            && !source.is_unusable()
        {
            // SAFETY: the caller's promise.
            let len = unsafe { source.readable(pieces, offset) };
            // SAFETY: the caller's promise.
            let found = (len > 0).then(|| unsafe { source.read(pieces, offset, len, false) });
            if let Some(Found::Copied { .. }) = found {
                self.hit_bytes.fetch_add(len, Ordering::Relaxed);
                return len as i32;
            }
        }
        // SAFETY: the caller's promise.
        unsafe { perform_in_queue(self, job) }
    }

    fn size(&self) -> u64 {
        self.shared.source.layout.size()
    }

    fn limits(&self) -> StoreLimits {
        StoreLimits { read_only: true, discard: false, zeroes: false, ..StoreLimits::FILE }
    }

    fn status(&self) -> StoreStatus {
        let mut status = self.shared.source.status();
        if let Some(cache) = &mut status.cache {
            let lanes = lock(&self.lanes);
            let hits = lanes.iter().map(|lane| lane.hit_bytes.load(Ordering::Relaxed)).sum::<u64>();
            cache.hit_bytes = hits + self.hit_bytes.load(Ordering::Relaxed);
        }
        status
    }

    fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        lock(&self.lanes).iter().for_each(|lane| lane.fail(-libc::EIO));
    }
}
