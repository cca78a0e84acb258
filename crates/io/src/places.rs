//! Places of queues: the thread that has each.
//!
//! ```text
//!   put on: added --> at a thread --moved: locked meanwhile--> at another thread
//!                        '--- taken off: removed first, then the lock is waited for
//! ```
use crate::activity::Activity;
use crate::isolation::Isolation;
use crate::spares::Spares;
use crate::{IoThread, QueueKey, QueueWork};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Unblocks the threads that signal a client.
pub(crate) type Unblock = Arc<dyn Fn() + Send + Sync>;

/// What the pool, its devices and its watcher share.
pub(crate) struct Shared {
    pub(crate) threads: Box<[Arc<IoThread>]>,
    /// Threads that take over; of a pool that devices share.
    pub(crate) spares: Arc<Spares>,
    pub(crate) isolation: Isolation,
    longest_poll: Duration,
    deal: Deal,
    pub(crate) devices: Arc<Devices>,
    pub(crate) places: Mutex<HashMap<QueueKey, Arc<Place>>>,
}

/// How the queues of devices start on the threads of a pool that is not balanced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Spread {
    /// All queues of a device on one thread; devices are assigned round-robin.
    #[default]
    Devices,
    /// Queues are assigned round-robin, beginning with another thread for each device.
    Queues,
}

/// Which thread a queue starts on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Deal {
    /// The one with the fewest queues.
    Balanced,
    /// By the numbers of device and queue.
    Fixed(Spread),
    /// By the number of the queue: there is one device.
    Own,
}

/// The devices of a pool: how to unblock a thread that serves one of them.
#[derive(Default)]
pub(crate) struct Devices {
    next: Mutex<usize>,
    unblock: Mutex<HashMap<usize, Unblock>>,
}

/// Where a queue is.
pub(crate) struct Place {
    /// Its thread. Locked while the queue moves.
    pub(crate) thread: Mutex<Arc<IoThread>>,
    pub(crate) work: Arc<QueueWork>,
    /// When it was moved last.
    pub(crate) moved: Mutex<Option<Instant>>,
    /// Changes of thread.
    pub(crate) moves: AtomicU64,
}

/// Place of a queue now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PlaceNow {
    /// Index of its thread; `None`: it moves now, or its device has its own thread for a while.
    pub(crate) thread: Option<usize>,
    /// Changes of thread since it was put on the first one.
    pub(crate) moves: u64,
}

impl Place {
    pub(crate) fn new(thread: Arc<IoThread>, work: Arc<QueueWork>) -> Self {
        Self { thread: Mutex::new(thread), work, moved: Mutex::default(), moves: AtomicU64::new(0) }
    }
}

impl Devices {
    /// Takes a device in. Returns its number.
    pub(crate) fn add(&self, unblock: Unblock) -> usize {
        let device = {
            let mut next = self.next.lock();
            *next += 1;
            *next - 1
        };
        self.unblock.lock().insert(device, unblock);
        device
    }

    /// Unblocks a thread that signals the client of `device`.
    pub(crate) fn unblock(&self, device: usize) {
        let unblock = self.unblock.lock().get(&device).cloned();
        if let Some(unblock) = unblock {
            unblock();
        }
    }
}

impl Shared {
    pub(crate) fn new(
        threads: usize,
        longest_poll: Duration,
        activity: Option<&Arc<Activity>>,
        deal: Deal,
        name: impl Fn(usize) -> String,
    ) -> io::Result<Arc<Self>> {
        let devices = Arc::<Devices>::default();
        let spares = Arc::<Spares>::default();
        let start = |number| {
            let thread = match activity {
                Some(activity) => IoThread::start(name(number), longest_poll, activity, &spares)?,
                None => IoThread::spawn(name(number), longest_poll)?,
            };
            Ok(Arc::new(freed(thread, &devices)))
        };
        let threads = (0..threads.max(1)).map(start).collect::<io::Result<_>>();
        let threads = threads.inspect_err(|_| spares.close())?;
        let places = Mutex::default();
        Ok(Arc::new(Self {
            threads,
            spares,
            isolation: Isolation::default(),
            longest_poll,
            deal,
            devices,
            places,
        }))
    }

    /// Ends the threads.
    pub(crate) fn end(&self) {
        self.threads.iter().for_each(|thread| thread.quit());
        self.spares.close();
    }

    /// Longest poll of a queue whose device says nothing else.
    pub(crate) fn longest_poll(&self) -> Duration {
        self.longest_poll
    }

    /// Records where a queue is.
    pub(crate) fn add(&self, key: QueueKey, place: Place) {
        self.places.lock().insert(key, Arc::new(place));
    }

    /// Forgets a queue. Returns the thread that has it, and keeps it.
    pub(crate) fn remove(&self, key: QueueKey) -> Option<Arc<IoThread>> {
        let place = self.places.lock().remove(&key)?;
        let thread = place.thread.lock();
        Some(Arc::clone(&thread))
    }

    /// The thread that has a queue; `None`: there is no such queue, or it moves now.
    ///
    /// A move may have to wait for a client.
    pub(crate) fn thread_of(&self, key: QueueKey) -> Option<Arc<IoThread>> {
        let place = self.places.lock().get(&key).cloned()?;
        let thread = place.thread.try_lock()?;
        Some(Arc::clone(&thread))
    }

    /// Where a queue is. `None`: there is no such queue.
    pub(crate) fn place(&self, key: QueueKey) -> Option<PlaceNow> {
        let place = self.places.lock().get(&key).cloned()?;
        let thread = place.thread.try_lock().and_then(|thread| self.number(&thread));
        // Relaxed: a statistic.
        Some(PlaceNow { thread, moves: place.moves.load(Ordering::Relaxed) })
    }

    /// Forgets a device without queues.
    pub(crate) fn forget(&self, device: usize) {
        // Its own threads may still signal its client when they end.
        if self.deal != Deal::Own {
            self.devices.unblock.lock().remove(&device);
            self.isolation.forget(device);
        }
    }

    /// The thread for a queue.
    pub(crate) fn choose(&self, key: QueueKey) -> Arc<IoThread> {
        let by_number = match self.deal {
            Deal::Fixed(Spread::Devices) => key.device,
            Deal::Fixed(Spread::Queues) => key.device + usize::from(key.queue),
            Deal::Own | Deal::Balanced => usize::from(key.queue),
        } % self.threads.len();
        if self.deal != Deal::Balanced {
            return Arc::clone(&self.threads[by_number]);
        }
        if let Some(thread) = self.isolation.thread(key.device) {
            return thread;
        }
        let mut counts = vec![0_usize; self.threads.len()];
        for place in self.places.lock().values() {
            // One that moves now is counted at neither end.
            if let Some(thread) = place.thread.try_lock()
                && let Some(number) = self.number(&thread)
            {
                counts[number] += 1;
            }
        }
        // Of those with equally many, another one for each device and queue.
        let first = key.device.wrapping_add(usize::from(key.queue));
        let order = (0..self.threads.len()).map(|number| (first + number) % self.threads.len());
        let alive = order.filter(|&number| self.threads[number].is_alive());
        Arc::clone(&self.threads[alive.min_by_key(|&number| counts[number]).unwrap_or(by_number)])
    }

    /// Index of a thread that devices share.
    pub(crate) fn number(&self, thread: &Arc<IoThread>) -> Option<usize> {
        self.threads.iter().position(|other| Arc::ptr_eq(other, thread))
    }

    /// Has the waits for a thread unblock it.
    pub(crate) fn freed(&self, thread: IoThread) -> IoThread {
        freed(thread, &self.devices)
    }

    /// The queues, with their places.
    pub(crate) fn places(&self) -> Vec<(QueueKey, Arc<Place>)> {
        self.places.lock().iter().map(|(key, place)| (*key, Arc::clone(place))).collect()
    }
}

/// Has the waits for a thread unblock it.
fn freed(thread: IoThread, devices: &Arc<Devices>) -> IoThread {
    let (devices, setting) = (Arc::clone(devices), Arc::clone(&thread.setting));
    thread.freed_by(move || {
        if let (_, Some(device)) = setting.counters.now() {
            devices.unblock(device);
        }
        setting.blocked().into_iter().for_each(|device| devices.unblock(device));
    })
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("threads", &self.threads).finish_non_exhaustive()
    }
}
