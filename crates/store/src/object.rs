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
use crate::{Connector, Job, Location, Store, StoreLimits, StoreQueue, StoreStatus, Target};
use origin::Origin;
use pending::{End, PendingJob, Waiter};
use queue::{Lane, MOST_BYTES, ObjectQueue};
use shared::ObjectShared;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};

/// An object of an HTTP or S3 server, for reading.
#[derive(Debug)]
pub struct Object {
    shared: Arc<ObjectShared>,
    closed: Arc<AtomicBool>,
    users: Mutex<Users>,
    /// Bytes that were here, of calls of `perform` and of queues that are gone.
    hit_bytes: AtomicU64,
}

/// Who may wait for chunks.
#[derive(Debug, Default)]
struct Users {
    lanes: Vec<Arc<Lane>>,
    jobs: Vec<Weak<PendingJob>>,
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
            users: Mutex::default(),
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
        let mut users = lock(&self.users);
        users.lanes.retain(|lane| {
            let lives = Arc::strong_count(lane) > 1;
            if !lives {
                self.hit_bytes.fetch_add(lane.hit_bytes.load(Ordering::Relaxed), Ordering::Relaxed);
            }
            lives
        });
        users.lanes.push(queue.lane().clone());
        Ok(Box::new(queue))
    }

    unsafe fn perform(&self, job: Job) -> i32 {
        let (pieces, offset) = match job {
            Job::Read { pieces, offset } => (pieces, offset),
            Job::Flush => return 0,
            Job::Write { .. } | Job::Discard { .. } | Job::Zeroes { .. } => return -libc::EROFS,
        };
        let source = &self.shared.source;
        if source.is_unusable() {
            return -libc::EIO;
        }
        // SAFETY: the caller's promise.
        let len = unsafe { pieces.bytes() }.min(MOST_BYTES);
        let len = len.min(source.layout.size().saturating_sub(offset));
        if len == 0 {
            return 0;
        }
        // SAFETY: the caller's promise.
        match unsafe { source.read(pieces, offset, len, false) } {
            Found::Copied { .. } => {
                self.hit_bytes.fetch_add(len, Ordering::Relaxed);
                return len as i32;
            }
            Found::Failed(error) => return -error,
            Found::Absent | Found::Later => {}
        }
        let (first, last) = source.layout.chunks(offset, len);
        let waiter = Arc::new(Waiter::default());
        let end = End::Thread(waiter.clone());
        // SAFETY: the caller's promise holds until the job has ended, for which this call waits.
        let job = unsafe { PendingJob::new(pieces, offset, len, last - first + 1, end) };
        {
            let jobs = &mut lock(&self.users).jobs;
            jobs.retain(|job| job.strong_count() > 0);
            jobs.push(Arc::downgrade(&job));
        }
        source.want([&job]);
        if self.closed.load(Ordering::SeqCst) {
            job.fail(-libc::EIO);
        }
        waiter.wait()
    }

    fn size(&self) -> u64 {
        self.shared.source.layout.size()
    }

    fn limits(&self) -> StoreLimits {
        StoreLimits {
            read_only: true,
            block: 1,
            physical_block: 4096,
            discard_block: 4096,
            discard: false,
            zeroes: false,
        }
    }

    fn status(&self) -> StoreStatus {
        let mut status = self.shared.source.status();
        if let Some(cache) = &mut status.cache {
            let lanes = &lock(&self.users).lanes;
            let hits = lanes.iter().map(|lane| lane.hit_bytes.load(Ordering::Relaxed)).sum::<u64>();
            cache.hit_bytes = hits + self.hit_bytes.load(Ordering::Relaxed);
        }
        status
    }

    fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        let users = lock(&self.users);
        users.lanes.iter().for_each(|lane| lane.fail(-libc::EIO));
        users.jobs.iter().filter_map(Weak::upgrade).for_each(|job| job.fail(-libc::EIO));
    }
}
