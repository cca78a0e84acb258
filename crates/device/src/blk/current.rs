//! The image that the queues of a disk use, and its replacement while they run.
//!
//! ```text
//!   Current::replace   gate odd: each queue takes nothing new, and says when nothing is in flight
//!      all idle ------> the last one replaces the image, gate even: queues go on with it
//!      a timeout -----> gate even: queues go on with the same image
//! ```
//! A queue looks at the gate once a batch: one load of a word that it shares with nobody who writes.
//! All else is under a lock, and happens only when the gate has changed. Whoever changes the gate
//! then signals each queue's descriptor, so that a thread that sleeps looks, too.
//!
//! The switch is atomic for the driver: while a request is in flight no queue uses the other image,
//! and once a queue uses it, none uses the old one.
use super::engine::Engine;
use super::full::Full;
use super::image::Image;
use paravane_store::file::Mapped;
use paravane_store::{StoreQueue, eventfd, lock, signal};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

/// An image, and the engine that does its I/O.
#[derive(Clone, Debug)]
pub(super) struct Attached {
    pub(super) image: Arc<Image>,
    pub(super) engine: Engine,
}

impl Attached {
    /// The image, if it is mapped and has the disk's layout.
    pub(super) fn mapped_disk(&self) -> Option<Arc<Mapped>> {
        self.engine.mapped.clone().filter(|_| self.image.qcow2.is_none())
    }
}

/// The image in use.
#[derive(Debug)]
pub(super) struct Current {
    /// Odd: queues are held. It changes when they have to look.
    gate: AtomicU64,
    state: Mutex<CurrentState>,
    /// A queue has become idle, has gone on or has ended.
    changed: Condvar,
    /// Locked while the size of the disk must stay.
    sizing: Mutex<()>,
    pub(super) full: Arc<Full>,
}

#[derive(Debug)]
struct CurrentState {
    attached: Attached,
    /// Number of replacements.
    generation: u64,
    queues: Vec<LiveQueue>,
    next: u64,
    /// What to replace it with, while queues are held.
    pending: Option<Attached>,
    /// Images that were replaced, and their engines: to end one takes a while.
    replaced: Vec<Attached>,
    retired: Vec<Box<dyn StoreQueue>>,
}

/// A live queue.
#[derive(Debug)]
struct LiveQueue {
    id: u64,
    jobs: u16,
    event: Arc<OwnedFd>,
    progress: Progress,
    /// Queue of an image that comes, and the number of that image.
    prepared: Option<(u64, Box<dyn StoreQueue>)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Progress {
    Running,
    /// Nothing is in flight, and it takes nothing while the gate is odd.
    Idle,
    /// As `Idle`, and no thread serves it, maybe for long.
    Resting,
}

impl Current {
    pub(super) fn new(attached: Attached, full: Arc<Full>) -> Arc<Self> {
        let state = CurrentState {
            attached,
            generation: 0,
            queues: Vec::new(),
            next: 0,
            pending: None,
            replaced: Vec::new(),
            retired: Vec::new(),
        };
        Arc::new(Self {
            gate: AtomicU64::new(0),
            state: Mutex::new(state),
            changed: Condvar::new(),
            sizing: Mutex::default(),
            full,
        })
    }

    /// The image and its engine.
    pub(super) fn attached(&self) -> Attached {
        lock(&self.state).attached.clone()
    }

    /// The image.
    pub(super) fn image(&self) -> Arc<Image> {
        lock(&self.state).attached.image.clone()
    }

    /// The image, and the number of replacements before it.
    pub(super) fn numbered(&self) -> (u64, Arc<Image>) {
        let state = lock(&self.state);
        (state.generation, state.attached.image.clone())
    }

    /// Keeps the size of the disk.
    pub(super) fn keep_size(&self) -> MutexGuard<'_, ()> {
        lock(&self.sizing)
    }

    /// As [`Current::keep_size`]; `None`: somebody has it, maybe for long.
    pub(super) fn try_keep_size(&self) -> Option<MutexGuard<'_, ()>> {
        match self.sizing.try_lock() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Updates the size of the disk; see [`Image::look`]. It stays as it is during a snapshot.
    pub(super) fn look(&self) -> io::Result<u64> {
        let image = self.image();
        match self.try_keep_size() {
            Some(_kept) => image.look(),
            None => Ok(image.sectors()),
        }
    }

    /// Number of live queues.
    pub(super) fn queues(&self) -> usize {
        lock(&self.state).queues.len()
    }

    /// Takes a queue in, with room for `jobs` jobs. It makes an engine for what is attached.
    pub(super) fn join(self: &Arc<Self>, jobs: u16) -> io::Result<(Follower, Attached)> {
        let event = eventfd()?;
        let mut state = lock(&self.state);
        let id = state.next;
        state.next += 1;
        // Acquire: pairs with the release in `turn_gate`. The lock orders, too.
        let gate = self.gate.load(Ordering::Acquire);
        let held = is_odd(gate);
        let progress = if held { Progress::Idle } else { Progress::Running };
        state.queues.push(LiveQueue { id, jobs, event: event.clone(), progress, prepared: None });
        let (generation, attached) = (state.generation, state.attached.clone());
        drop(state);
        let follower = Follower { current: self.clone(), id, event, gate, generation, held, is_idle: held };
        Ok((follower, attached))
    }

    /// Changes the gate by `step`, and has all queues look at it.
    fn turn_gate(&self, state: &CurrentState, step: u64) {
        // Release: for what the queue reads without the lock, which is nothing; it pairs with the
        // acquire in `Follower::has_changed` all the same.
        self.gate.fetch_add(step, Ordering::Release);
        for queue in &state.queues {
            // Fails only if the counter is full, and so readable.
            signal(&queue.event);
        }
    }

    /// Has all queues try again what waits for room.
    pub(super) fn retry(&self) {
        self.turn_gate(&lock(&self.state), 2);
    }

    /// Makes a queue of `attached`, which will be in use, for each live queue.
    ///
    /// # Errors
    /// The host refuses a resource.
    pub(super) fn prepare(&self, attached: &Attached) -> io::Result<()> {
        let queues: Vec<_> = lock(&self.state).queues.iter().map(|queue| (queue.id, queue.jobs)).collect();
        for (id, jobs) in queues {
            let engine = attached.engine.queue(jobs)?;
            let mut state = lock(&self.state);
            let next = state.generation + 1;
            // A queue that ends meanwhile needs none.
            let queue = state.queues.iter_mut().find(|queue| queue.id == id);
            let old = queue.and_then(|queue| queue.prepared.replace((next, engine)));
            drop(state);
            drop(old);
        }
        Ok(())
    }

    /// Replaces the image while queues are held and nothing is in flight. Returns the length of the pause.
    ///
    /// The last queue that has nothing in flight does it, which saves a switch of threads.
    ///
    /// `None`: requests in flight have taken longer than `patience`, and queues go on with the same
    /// image. One caller at a time.
    pub(super) fn replace(&self, attached: Attached, patience: Duration) -> Option<Duration> {
        let begin = Instant::now();
        let mut state = lock(&self.state);
        for queue in &mut state.queues {
            if queue.progress == Progress::Idle {
                queue.progress = Progress::Running;
            }
        }
        state.pending = Some(attached);
        self.turn_gate(&state, 1);
        // There may be no queue.
        self.replace_if_idle(&mut state);
        loop {
            let is_replaced = state.pending.is_none();
            if is_replaced && !state.queues.iter().any(|queue| queue.progress == Progress::Idle) {
                return Some(begin.elapsed());
            }
            let left = patience.saturating_sub(begin.elapsed());
            if left.is_zero() {
                let pending = state.pending.take();
                if pending.is_some() {
                    self.turn_gate(&state, 1);
                }
                drop(state);
                // A queue that has not gone on yet does so when its thread runs.
                return pending.is_none().then(|| begin.elapsed());
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Replaces the image, if that is wanted and nothing is in flight.
    fn replace_if_idle(&self, state: &mut CurrentState) {
        if state.queues.iter().any(|queue| queue.progress == Progress::Running) {
            return;
        }
        if let Some(attached) = state.pending.take() {
            let old = std::mem::replace(&mut state.attached, attached);
            state.replaced.push(old);
            state.generation += 1;
            self.turn_gate(state, 1);
        }
    }

    /// Ends the engines of replaced images, and those that were prepared in vain.
    pub(super) fn clear(&self) {
        let (retired, replaced, prepared): (_, _, Vec<_>) = {
            let mut state = lock(&self.state);
            let (retired, replaced) =
                (std::mem::take(&mut state.retired), std::mem::take(&mut state.replaced));
            let prepared = state.queues.iter_mut().filter_map(|queue| queue.prepared.take());
            (retired, replaced, prepared.collect())
        };
        drop((retired, replaced, prepared));
    }
}

/// One queue's part. Dropped: the queue has ended, and nothing of it is in flight.
#[derive(Debug)]
pub(super) struct Follower {
    /// Where requests that find no room are counted.
    pub(super) current: Arc<Current>,
    id: u64,
    /// Signalled when the gate has changed.
    pub(super) event: Arc<OwnedFd>,
    /// The gate as it was seen last.
    gate: u64,
    /// Number of the image that it uses.
    generation: u64,
    /// It takes nothing new.
    pub(super) held: bool,
    /// Others know that nothing is in flight.
    is_idle: bool,
}

/// Replacement of a queue's image.
#[derive(Debug)]
pub(super) struct Replacement {
    pub(super) attached: Attached,
    /// Its queue, if one was prepared.
    pub(super) engine: Option<Box<dyn StoreQueue>>,
}

fn is_odd(gate: u64) -> bool {
    gate % 2 == 1
}

/// The value of a gate that never is: a queue that comes back looks.
const UNSEEN: u64 = u64::MAX;

impl Follower {
    /// Whether [`Follower::look`] has something to see.
    pub(super) fn has_changed(&self) -> bool {
        // Acquire: pairs with the release in `turn_gate`.
        self.current.gate.load(Ordering::Acquire) != self.gate
    }

    /// Sees why the gate has changed. Returns the image to use from now on, if it is another one.
    ///
    /// With a replacement, nothing of the queue is in flight.
    #[cold]
    pub(super) fn look(&mut self) -> Option<Replacement> {
        let mut state = lock(&self.current.state);
        // Under the lock the gate does not change.
        self.gate = self.current.gate.load(Ordering::Acquire);
        self.held = is_odd(self.gate);
        let generation = state.generation;
        let attached = (!self.held && generation != self.generation).then(|| state.attached.clone());
        let queue = state.queues.iter_mut().find(|queue| queue.id == self.id)?;
        if self.held {
            self.is_idle = match queue.progress {
                Progress::Running => false,
                Progress::Idle | Progress::Resting => true,
            };
            if self.is_idle {
                queue.progress = Progress::Idle;
            }
            return None;
        }
        (queue.progress, self.is_idle) = (Progress::Running, false);
        // A late queue may find one for the image after this one.
        let prepared = queue.prepared.take_if(|(of, _)| attached.is_some() && *of == generation);
        let engine = prepared.map(|(_, engine)| engine);
        drop(state);
        self.current.changed.notify_all();
        self.generation = generation;
        attached.map(|attached| Replacement { attached, engine })
    }

    /// Tells that nothing of a held queue is in flight.
    #[cold]
    pub(super) fn idle(&mut self) {
        if std::mem::replace(&mut self.is_idle, true) {
            return;
        }
        self.progress(Progress::Idle);
    }

    /// Tells that nothing is in flight, and that the queue looks before it takes something.
    #[cold]
    pub(super) fn rest(&mut self) {
        self.gate = UNSEEN;
        self.progress(Progress::Resting);
    }

    fn progress(&self, progress: Progress) {
        let mut state = lock(&self.current.state);
        if let Some(queue) = state.queues.iter_mut().find(|queue| queue.id == self.id) {
            queue.progress = progress;
        }
        self.current.replace_if_idle(&mut state);
        drop(state);
        self.current.changed.notify_all();
    }

    /// Gives up an engine whose image was replaced. It ends when there is time.
    pub(super) fn retire(&self, engine: Box<dyn StoreQueue>) {
        lock(&self.current.state).retired.push(engine);
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        let prepared = {
            let mut state = lock(&self.current.state);
            let at = state.queues.iter().position(|queue| queue.id == self.id);
            let left = at.map(|at| state.queues.swap_remove(at));
            self.current.replace_if_idle(&mut state);
            left
        };
        self.current.changed.notify_all();
        drop(prepared);
    }
}
