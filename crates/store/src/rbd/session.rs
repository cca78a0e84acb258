//! An open image as all of its queues share it.
use super::bounded::bounded;
use super::ended::EndedRequests;
use super::extents::{listed, window};
use super::flight::Flight;
use super::image::RbdImage;
use super::watch::SizeWatch;
use crate::lock::lock;
use crate::{Link, StoreExtent, StoreStatus};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak, mpsc};
use std::thread;
use std::time::{Duration, Instant};

/// A request in flight for more seconds waits for an OSD that is down or hangs.
///
/// Ceph's own warning (`osd_op_complaint_time`) comes after 30 s; no healthy OSD takes 5 s.
const LATE: u32 = 5;

/// An open image with what is known of it.
#[derive(Debug)]
pub(super) struct RbdSession {
    /// The image until the session ends, and the watch on it.
    open: Option<(SizeWatch, RbdImage)>,
    location: String,
    timeout: Duration,
    start: Instant,
    size: AtomicU64,
    closed: AtomicBool,
    /// Another client has broken the lock; the cluster refuses this one.
    fenced: AtomicBool,
    error: Mutex<Option<String>>,
    queues: Mutex<Vec<Weak<EndedRequests<Flight>>>>,
}

impl RbdSession {
    pub(super) fn new(image: RbdImage, location: String, timeout: Duration) -> io::Result<Arc<Self>> {
        let (changes, changed) = mpsc::sync_channel(1);
        let watch = SizeWatch::new(&image, Arc::new(changes))?;
        let size = image.size()?;
        let session = Arc::new(Self {
            open: Some((watch, image)),
            location,
            timeout,
            start: Instant::now(),
            size: AtomicU64::new(size),
            closed: AtomicBool::new(false),
            fenced: AtomicBool::new(false),
            error: Mutex::default(),
            queues: Mutex::default(),
        });
        let weak = Arc::downgrade(&session);
        let follow = move || {
            while changed.recv().is_ok()
                && let Some(session) = weak.upgrade()
            {
                session.update_size().unwrap_or_else(|error| session.note_error(&error));
            }
        };
        thread::Builder::new().name("rbd-size".into()).spawn(follow)?;
        Ok(session)
    }

    pub(super) fn image(&self) -> &RbdImage {
        // Taken by `drop` only.
        &self.open.as_ref().expect("the session lives").1
    }

    pub(super) fn size(&self) -> u64 {
        // Relaxed: nothing else depends on it.
        self.size.load(Ordering::Relaxed)
    }

    fn update_size(&self) -> io::Result<()> {
        self.size.store(self.image().size()?, Ordering::Relaxed);
        Ok(())
    }

    /// Asks for the size, up to the timeout.
    pub(super) fn refresh(self: &Arc<Self>) -> io::Result<u64> {
        let session = Arc::clone(self);
        bounded(self.timeout, move || session.update_size()).flatten()?;
        Ok(self.size())
    }

    /// Sets the size, up to the timeout.
    pub(super) fn resize(self: &Arc<Self>, size: u64) -> io::Result<()> {
        let session = Arc::clone(self);
        bounded(self.timeout, move || session.image().resize(size).and_then(|()| session.update_size()))
            .flatten()
    }

    /// Which parts of a range hold data, up to the timeout.
    pub(super) fn extents(self: &Arc<Self>, offset: u64, len: u64) -> io::Result<Vec<StoreExtent>> {
        let session = Arc::clone(self);
        let end = offset.saturating_add(len);
        let ask = move || {
            let image = session.image();
            let window = window(offset, end, session.size(), image.stripes()?);
            let Some(window) = window.filter(|window| window.end > offset) else { return Ok(None) };
            let wanted = offset..window.end.min(end);
            Ok(image.data(window)?.map(|parts| listed(wanted, parts)))
        };
        let found: io::Result<_> = bounded(self.timeout, ask).flatten();
        Ok(found?.unwrap_or_else(|| vec![StoreExtent::data(offset, len)]))
    }

    /// Seconds since the session began, from 1 on.
    pub(super) fn second(&self) -> u32 {
        u32::try_from(self.start.elapsed().as_secs()).unwrap_or(u32::MAX - 1) + 1
    }

    /// Registers the end of a queue for [`RbdSession::close`] and [`RbdSession::status`].
    pub(super) fn add(&self, queue: &Arc<EndedRequests<Flight>>) {
        lock(&self.queues).push(Arc::downgrade(queue));
        // A call of `close` meanwhile has not seen it.
        if self.is_closed() {
            queue.posted.signal();
        }
    }

    pub(super) fn remove(&self, queue: &Arc<EndedRequests<Flight>>) {
        lock(&self.queues).retain(|other| !std::ptr::eq(other.as_ptr(), Arc::as_ptr(queue)));
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Makes all jobs fail, those in flight and those to come.
    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::Release);
        lock(&self.queues).iter().filter_map(Weak::upgrade).for_each(|queue| queue.posted.signal());
    }

    /// Keeps an error for observers.
    #[cold]
    pub(super) fn note_error(&self, error: &io::Error) {
        if error.raw_os_error() == Some(libc::ESHUTDOWN) && !self.fenced.swap(true, Ordering::Relaxed) {
            tracing::error!(
                location = self.location,
                "another client has broken the lock of the image and fenced this one off; all requests fail"
            );
        }
        *lock(&self.error) = Some(error.to_string());
    }

    pub(super) fn status(&self) -> StoreStatus {
        let now = self.second();
        let (mut waiting, mut first) = (0, now);
        for queue in lock(&self.queues).iter().filter_map(Weak::upgrade) {
            let late = queue.older_than(now.saturating_sub(LATE));
            waiting += late.count;
            first = first.min(late.first);
        }
        let link = match () {
            () if self.fenced.load(Ordering::Relaxed) => Link::Unusable,
            () if self.is_closed() => Link::Down,
            () if waiting > 0 => Link::Stalled,
            () => Link::Up,
        };
        let error = match link {
            Link::Stalled => {
                Some(format!("{waiting} requests have had no reply for up to {} s", now - first))
            }
            _ => lock(&self.error).clone(),
        };
        StoreStatus {
            location: self.location.clone(),
            link,
            connections: u32::from(link == Link::Up),
            waiting,
            error,
            ..StoreStatus::default()
        }
    }
}

impl Drop for RbdSession {
    fn drop(&mut self) {
        let open = self.open.take();
        // The lock is free when this returns, unless the cluster does not answer.
        if bounded(self.timeout, move || drop(open)).is_err() {
            tracing::warn!(
                location = self.location,
                "the cluster does not answer; the image is closed when it does, or when this process ends"
            );
        }
    }
}
