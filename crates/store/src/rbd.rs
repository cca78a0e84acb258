//! Images of Ceph (RBD), through the host's librbd.
//!
//! ```text
//!   rbd:pool/image --open--> Connection (ceph.conf, keyring) -> Image (lock) -> Session
//!                                                                     queues --^   ^-- SizeWatch
//! ```
//! **Libraries.** librbd and librados are loaded when the first image is opened; a build needs
//! neither. They make threads (16 for each image) and connections of their own: to the
//! monitors (TCP ports 3300 and 6789) and to each OSD (ports 6800 to 7568), for as long as the image
//! is open.
//!
//! **Credentials.** Configuration and keyring are read by [`Rbd::open`] and not again.
//!
//! **Durability.** librbd's cache is off, whatever the configuration says: a write that has been
//! acknowledged is on the OSDs, also when this process dies. An image whose own settings turn the
//! cache on is refused.
//!
//! **Exclusive lock.** A writer holds it while the image is open, so that a second one fails at once.
//! The lock of a client that died is broken after 30 s, or at once if it is named
//! ([`RbdOptions::dead_owner`]). librbd then tells the cluster to refuse that client (it blocklists
//! it), so that no write of the dead lands after a write of the living. A live client to whom that
//! happens finds [`Link::Unusable`](crate::Link::Unusable).
//!
//! **Outages.** Requests wait in librbd until their OSD is back, without a bound. librbd tells of no
//! connection, so that an OSD that is dead, one that hangs, and a network that is cut look the same: a
//! state with requests that are older than 5 s is [`Link::Stalled`](crate::Link::Stalled).
//! `rados_osd_op_timeout` in the configuration lets them fail instead; a write that has failed so
//! may still land later.
//!
//! | file | content |
//! |---|---|
//! | `library` | the functions of librbd and librados |
//! | `options`, `error` | how to open an image, and why that fails |
//! | `bounded` | calls that may wait without end |
//! | `discard` | the smallest discard that frees space |
//! | `extents` | which parts hold data |
//! | `connection` | settings, credentials, pool |
//! | `image` | the image: lock, size, settings |
//! | `flight` | one request and its buffer |
//! | `ended` | where requests arrive that have ended |
//! | `watch` | is told of changes of the image |
//! | `session` | the image as its queues share it |
//! | `transfer` | copies between pieces and buffers |
//! | `queue` | the jobs of a virtqueue |
mod bounded;
mod connection;
mod discard;
mod ended;
mod error;
mod extents;
mod flight;
mod image;
mod library;
mod options;
mod queue;
mod session;
mod watch;

pub use error::{RbdError, RbdReason};
pub use library::LibraryError;
pub use options::RbdOptions;

use crate::store::perform_in_queue;
use crate::{Job, RbdLocation, Store, StoreExtent, StoreLimits, StoreQueue, StoreStatus};
use bounded::bounded;
use connection::{Connection, Names};
use discard::PHYSICAL_BLOCK;
use image::RbdImage;
use library::Library;
use queue::RbdQueue;
use session::RbdSession;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// Time to take the lock of a client that died: its watch ends after 30 s.
const LOCK_TIME: Duration = Duration::from_secs(60);
/// What a call has beyond the time in which the libraries themselves give up.
const GRACE: Duration = Duration::from_secs(5);

/// Loads librbd and librados, which a process in a sandbox cannot do any more.
///
/// [`Rbd::open`] does it otherwise.
///
/// # Errors
/// They are missing, or too old.
pub fn load() -> Result<(), LibraryError> {
    Library::get().map(drop)
}

/// An open image of Ceph.
#[derive(Debug)]
pub struct Rbd {
    session: Arc<RbdSession>,
}

impl Rbd {
    /// Connects to the cluster and opens an image.
    ///
    /// Waits up to [`RbdOptions::timeout`], and up to 60 s more for the lock of a client that died.
    ///
    /// # Errors
    /// The libraries are missing; the cluster does not answer, or refuses the user; the image is
    /// unknown or in use.
    pub fn open(location: &RbdLocation, options: &RbdOptions) -> Result<Self, RbdError> {
        Self::connect(location, options).map_err(|reason| RbdError { location: location.to_string(), reason })
    }

    fn connect(location: &RbdLocation, options: &RbdOptions) -> Result<Self, RbdReason> {
        let library = Library::get()?;
        let names = Arc::new(Names::new(location)?);
        let wait = |time, work: Box<dyn FnOnce() -> Result<RbdImage, RbdReason> + Send>| {
            bounded(time, work).unwrap_or_else(|error| match error.kind() {
                io::ErrorKind::TimedOut => Err(RbdReason::no_answer(&names, time)),
                _ => Err(RbdReason::Host(error)),
            })
        };
        let (theirs, named) = (options.clone(), Arc::clone(&names));
        let mut image = wait(
            options.timeout + GRACE,
            Box::new(move || {
                let connection = Connection::open(library, &named, theirs.timeout)?;
                RbdImage::open(connection, &named, &theirs)
            }),
        )?;
        if options.lock && !image.read_only {
            if image.has_lock() {
                let dead = options.dead_owner.clone();
                image = wait(
                    options.timeout + LOCK_TIME,
                    Box::new(move || image.lock(dead.as_deref()).map(|()| image)),
                )?;
            } else {
                tracing::warn!(
                    %location,
                    "the image has no exclusive lock: nothing keeps a second client from writing; \
                     rbd feature enable IMAGE exclusive-lock"
                );
            }
        }
        let session = RbdSession::new(image, location.to_string(), options.timeout);
        Ok(Self { session: session.map_err(RbdReason::Host)? })
    }

    /// The client that holds the exclusive lock: this one, if it was opened with the lock.
    ///
    /// A successor passes it as [`RbdOptions::dead_owner`] when this process has died. May block.
    #[must_use]
    pub fn lock_owner(&self) -> Option<String> {
        let session = Arc::clone(&self.session);
        bounded(Duration::from_secs(30), move || session.image().lock_owner()).ok().flatten()
    }
}

impl Store for Rbd {
    fn queue(&self, jobs: u16) -> io::Result<Box<dyn StoreQueue>> {
        Ok(Box::new(RbdQueue::new(Arc::clone(&self.session), jobs)?))
    }

    unsafe fn perform(&self, job: Job) -> i32 {
        // SAFETY: the caller's promise.
        unsafe { perform_in_queue(self, job) }
    }

    fn size(&self) -> u64 {
        self.session.size()
    }

    fn refresh(&self) -> io::Result<u64> {
        self.session.refresh()
    }

    fn set_size(&self, size: u64) -> io::Result<()> {
        self.session.resize(size)
    }

    /// Of a clone, everything is called data.
    fn extents(&self, offset: u64, len: u64) -> io::Result<Vec<StoreExtent>> {
        self.session.extents(offset, len)
    }

    fn limits(&self) -> StoreLimits {
        let image = self.session.image();
        let read_only = image.read_only;
        StoreLimits {
            read_only,
            block: 1,
            physical_block: PHYSICAL_BLOCK,
            discard_block: image.discard_block,
            discard: !read_only,
            zeroes: !read_only,
        }
    }

    fn status(&self) -> StoreStatus {
        self.session.status()
    }

    fn close(&self) {
        self.session.close();
    }
}
