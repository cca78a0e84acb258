//! I/O threads for devices.
//!
//! ```text
//!   IoPool::shared: some threads for many devices, watched            IoPool::own: threads of one device
//!     a queue goes to the thread with the fewest queues, and          IoPool::fixed: of many devices
//!     moves while it is live, if the threads are not equally busy       a queue's numbers say its thread
//!                     '------------------ IoPool::device --> DeviceThreads ----'
//!                                                             |  QueueSet: put_on, begin_take_off -> TakingOff
//! ```
//! A place is locked while its queue moves, so a queue is taken off the thread that has it.
use crate::host_queue::QueueSettings;
use crate::moves::MoveError;
use crate::places::{Deal, Place, PlaceNow, Shared, Spread};
use crate::watch::Watch;
use crate::{HostQueue, IoThread, IoThreadFigures, NotPutOn, QueueKey, TakingOff, Tasks, caught};
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// I/O threads for the queues of one device or of many.
#[derive(Debug)]
pub struct IoPool {
    // Dropped first: it is stopped before the threads.
    watch: Option<Watch>,
    pub(crate) shared: Arc<Shared>,
}

impl IoPool {
    /// Starts `threads` threads (at least one) that devices share.
    ///
    /// One more thread watches them: it balances their load, and unblocks those that a client has
    /// blocked for more than 10 ms. It sleeps while they do. Another one waits to take over from a
    /// thread that is blocked by something else; while threads are blocked there are more of them, up
    /// to 64. A device whose memory has blocked a thread has one of its own, until that has not
    /// happened for 30 s; up to 64 devices have.
    ///
    /// A queue that is polled is so for at most `longest_poll`, unless its device says otherwise.
    ///
    /// # Errors
    /// The host refuses threads or descriptors.
    pub fn shared(threads: usize, longest_poll: Duration) -> io::Result<Self> {
        let activity = Arc::default();
        let shared = Shared::new(threads, longest_poll, Some(&activity), Deal::Balanced, |number| {
            format!("io{number}")
        })?;
        shared.spares.refill();
        let watch = Watch::start(&shared, activity).inspect_err(|_| shared.end())?;
        Ok(Self { watch: Some(watch), shared })
    }

    /// Starts `threads` threads (at least one) for one device of this name.
    ///
    /// # Errors
    /// The host refuses threads or descriptors.
    pub fn own(threads: usize, longest_poll: Duration, name: &str) -> io::Result<Self> {
        let name = |number| format!("io{number}-{name}");
        Ok(Self { watch: None, shared: Shared::new(threads, longest_poll, None, Deal::Own, name)? })
    }

    /// Starts `threads` threads (at least one) that devices share, without a watcher.
    ///
    /// Devices have the numbers from 0 on, in their order; `spread` says where their queues start.
    ///
    /// # Errors
    /// The host refuses threads or descriptors.
    pub fn fixed(threads: usize, longest_poll: Duration, spread: Spread) -> io::Result<Self> {
        let name = |number| format!("io{number}");
        Ok(Self { watch: None, shared: Shared::new(threads, longest_poll, None, Deal::Fixed(spread), name)? })
    }

    /// Takes a device in. `unblock` is called as that of [`IoThread::freed_by`].
    pub fn device(self: &Arc<Self>, unblock: impl Fn() + Send + Sync + 'static) -> DeviceThreads {
        let device = self.shared.devices.add(Arc::new(unblock));
        let settings = QueueSettings::new(self.shared.longest_poll());
        DeviceThreads { pool: Arc::clone(self), device, settings }
    }

    /// Kernel's numbers of the threads; see [`IoThread::id`].
    #[must_use]
    pub fn ids(&self) -> Vec<i32> {
        self.shared.threads.iter().map(|thread| thread.id()).collect()
    }

    /// Counters of the threads.
    #[must_use]
    pub fn figures(&self) -> Vec<IoThreadFigures> {
        self.shared.threads.iter().map(|thread| thread.figures()).collect()
    }
}

impl Drop for IoPool {
    fn drop(&mut self) {
        drop(self.watch.take());
        self.shared.end();
    }
}

/// The threads of a pool as one device uses them.
#[derive(Debug)]
pub struct DeviceThreads {
    pool: Arc<IoPool>,
    device: usize,
    settings: Arc<QueueSettings>,
}

impl DeviceThreads {
    /// Has the queues of this device polled for at most `longest` \[as the pool\].
    #[must_use]
    pub fn polling_for(self, longest: Duration) -> Self {
        self.settings.poll_for(longest);
        self
    }

    /// As [`DeviceThreads::polling_for`], of a device in use; [`DeviceThreads::renew`] applies it.
    pub fn poll_for(&self, longest: Duration) {
        self.settings.poll_for(longest);
    }

    /// Has live queues apply settings of the device that have changed.
    ///
    /// These are [`DeviceThreads::poll_for`], [`QueueWork::measure`](crate::QueueWork::measure), and those of
    /// [`paravane_device::QueueHandler::renew`]. Returns at once. What is in flight stays so.
    pub fn renew(&self) {
        // A queue that moves meanwhile looks when it is put on its thread.
        let own = self.shared().isolation.thread(self.device);
        for thread in self.shared().threads.iter().chain(&own) {
            thread.renew(self.device);
        }
    }

    /// Number of the device in its pool.
    #[must_use]
    pub fn number(&self) -> usize {
        self.device
    }

    /// Name of a queue of this device.
    #[must_use]
    pub fn key(&self, queue: u16) -> QueueKey {
        QueueKey { device: self.device, queue }
    }

    fn shared(&self) -> &Shared {
        &self.pool.shared
    }

    /// The threads that have some of these queues.
    fn serving(&self, queues: Range<u16>) -> Vec<Arc<IoThread>> {
        let mut threads: Vec<Arc<IoThread>> = Vec::new();
        for thread in queues.filter_map(|queue| self.shared().thread_of(self.key(queue))) {
            if !threads.iter().any(|other| Arc::ptr_eq(other, &thread)) {
                threads.push(thread);
            }
        }
        threads
    }

    /// Kernel's numbers of the threads that have some of these queues; all, if it has its own.
    #[must_use]
    pub fn ids(&self, queues: Range<u16>) -> Vec<i32> {
        if self.pool.watch.is_none() {
            return self.pool.ids();
        }
        self.serving(queues).into_iter().map(|thread| thread.id()).collect()
    }

    /// Puts a queue on a thread; see [`IoThread::put_on`].
    ///
    /// # Errors
    /// The kernel's wait set is full, or the thread has ended.
    pub fn put_on(&self, mut queue: Box<HostQueue>) -> Result<(), NotPutOn> {
        let shared = self.shared();
        let (key, thread) = (queue.key(), shared.choose(queue.key()));
        queue.set_up(Arc::clone(&self.settings));
        let place = Place::new(Arc::clone(&thread), Arc::clone(queue.work()));
        thread.put_on(queue)?;
        shared.add(key, place);
        Ok(())
    }

    /// Takes a queue back; see [`IoThread::take_off`].
    pub fn take_off(&self, key: QueueKey) -> Option<Box<HostQueue>> {
        self.begin_take_off(key)?.wait()
    }

    /// Begins [`DeviceThreads::take_off`] and returns at once, unless the queue moves now.
    ///
    /// `None`: there is no such queue. See [`IoThread::begin_take_off`].
    #[must_use]
    pub fn begin_take_off(&self, key: QueueKey) -> Option<TakingOff> {
        Some(self.shared().remove(key)?.begin_take_off(key))
    }

    /// Where a queue is. `None`: there is no such queue.
    pub(crate) fn place(&self, queue: u16) -> Option<PlaceNow> {
        self.shared().place(self.key(queue))
    }

    /// See [`QueueSet::move_to`](crate::QueueSet::move_to).
    pub(crate) fn move_to(&self, queue: u16, thread: usize) -> Result<(), MoveError> {
        self.shared().move_to(self.key(queue), thread)
    }

    /// The thread that runs the tasks of a queue.
    fn thread(&self, queue: u16) -> &IoThread {
        let threads = &self.shared().threads;
        &threads[(self.device + usize::from(queue)) % threads.len()]
    }

    /// Returns a handle that runs tasks for a queue on one of the threads.
    #[must_use]
    pub fn tasks(&self, queue: u16) -> Tasks {
        self.thread(queue).tasks_of(self.device)
    }

    /// Waits until all earlier tasks for a queue have run.
    pub fn finish_tasks(&self, queue: u16) {
        self.thread(queue).finish_tasks_of(self.device);
    }

    /// See [`IoThread::look_again`]; for these queues.
    ///
    /// A queue that moves meanwhile is served once in any case.
    pub fn look_again(&self, queues: Range<u16>) {
        for thread in self.serving(queues) {
            thread.look_again(self.device);
        }
    }

    /// Ends all queues of this device, after a panic of their owner.
    pub fn abandon(&self) {
        let keys = self.shared().places().into_iter().map(|(key, _)| key);
        for queue in keys.filter(|key| key.device == self.device).filter_map(|key| self.take_off(key)) {
            if let Err(words) = caught(|| queue.stop(false)) {
                tracing::error!("queue cannot be stopped after a panic: {words}");
            }
        }
    }
}

impl Drop for DeviceThreads {
    fn drop(&mut self) {
        self.shared().forget(self.device);
    }
}
