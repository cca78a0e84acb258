//! A store in memory that records what is done to it.
//!
//! It stands for each place where the bytes of an image can lie. A file, a block device, an NBD
//! export and a Ceph image do the same jobs: a format is over either.
use super::log::{Action, Change, Clock, Event, Kept};
use paravane_store::{
    Job, Outcome, Pieces, Rest, Store, StoreLimits, StoreQueue, StoreStatus, WakeSet, WakeSource,
};
use paravane_test_support::Random;
use rustix::event::{EventfdFlags, eventfd};
use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// How a store behaves.
#[derive(Clone, Copy, Debug)]
pub(super) struct Behaviour {
    /// Its size can be set, as that of a file. Otherwise it is fixed, as that of an NBD export.
    pub(super) grows: bool,
    pub(super) zeroes: bool,
    pub(super) discard: bool,
    /// A discarded range reads as garbage; otherwise as zeroes.
    pub(super) garbage: bool,
    /// Offsets and lengths are multiples of it.
    pub(super) block: u32,
    pub(super) read_only: bool,
    /// Flushes are answered, and make nothing durable.
    pub(super) forgets_flushes: bool,
    /// Orders the jobs of a queue that are in flight together.
    pub(super) seed: u64,
}

/// See the module.
#[derive(Debug)]
pub(super) struct RecordedStore {
    name: &'static str,
    behaviour: Behaviour,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    clock: Clock,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    bytes: Vec<u8>,
    events: Vec<Event>,
}

impl RecordedStore {
    pub(super) fn new(name: &'static str, bytes: Vec<u8>, behaviour: Behaviour, clock: Clock) -> Arc<Self> {
        let state = Mutex::new(State { bytes, events: Vec::new() });
        Arc::new(Self { name, behaviour, shared: Arc::new(Shared { clock, state }) })
    }

    /// What was done so far.
    pub(super) fn events(&self) -> Vec<Event> {
        self.shared.lock().events.clone()
    }

    /// The bytes as they are now.
    pub(super) fn bytes(&self) -> Vec<u8> {
        self.shared.lock().bytes.clone()
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does a job that was asked for at tick `begun`. Returns its result and the number of its event.
    ///
    /// # Safety
    /// As [`Store::perform`].
    unsafe fn perform(&self, behaviour: &Behaviour, job: Job, begun: u64) -> (i32, Option<usize>) {
        let mut state = self.lock();
        let size = state.bytes.len() as u64;
        if behaviour.read_only && !matches!(job, Job::Read { .. } | Job::Flush) {
            return (-libc::EROFS, None);
        }
        let (change, durable, result) = match job {
            // SAFETY: the caller's promise.
            Job::Read { pieces, offset } => return (unsafe { read(&state.bytes, pieces, offset) }, None),
            Job::Flush if behaviour.forgets_flushes => return (0, None),
            Job::Flush => {
                let number = state.push(&self.clock, Action::Flush { begun });
                return (0, Some(number));
            }
            Job::Write { pieces, offset, durable } => {
                // SAFETY: the caller's promise.
                let data = unsafe { gather(pieces) };
                if offset.saturating_add(data.len() as u64) > size {
                    return (-libc::ENOSPC, None);
                }
                let len = data.len() as i32;
                (Change::Write { offset, data }, durable, len)
            }
            Job::Zeroes { .. } if !behaviour.zeroes => return (-libc::EOPNOTSUPP, None),
            Job::Discard { .. } if !behaviour.discard => return (-libc::EOPNOTSUPP, None),
            Job::Zeroes { offset, len, .. } | Job::Discard { offset, len }
                if offset.saturating_add(len) > size =>
            {
                return (-libc::ENOSPC, None);
            }
            Job::Zeroes { offset, len, .. } => (Change::Zeroes { offset, len }, false, 0),
            Job::Discard { offset, len } => {
                (Change::Discard { offset, len, garbage: behaviour.garbage }, false, 0)
            }
        };
        change.apply(&mut state.bytes, &Kept::All);
        let number = state.push(&self.clock, Action::Change { change, durable });
        (result, Some(number))
    }

    fn told(&self, number: Option<usize>) {
        if let Some(number) = number {
            self.lock().events[number].told = self.clock.tick();
        }
    }
}

impl State {
    fn push(&mut self, clock: &Clock, action: Action) -> usize {
        self.events.push(Event { at: clock.tick(), told: u64::MAX, action });
        self.events.len() - 1
    }
}

/// # Safety
/// The pieces are valid.
unsafe fn gather(pieces: Pieces) -> Arc<[u8]> {
    let mut data = Vec::new();
    // SAFETY: the caller's promise.
    for piece in unsafe { pieces.slices() } {
        // SAFETY: the same; the memory is copied at once.
        data.extend_from_slice(unsafe { std::slice::from_raw_parts(piece.ptr.cast_const(), piece.len) });
    }
    data.into()
}

/// # Safety
/// The pieces are valid, to be written.
unsafe fn read(bytes: &[u8], pieces: Pieces, offset: u64) -> i32 {
    let mut rest = bytes.get(offset as usize..).unwrap_or_default();
    let mut done = 0;
    // SAFETY: the caller's promise.
    for piece in unsafe { pieces.slices() } {
        let now = piece.len.min(rest.len());
        // SAFETY: the caller's promise; no reference to the memory exists.
        unsafe { std::ptr::copy_nonoverlapping(rest.as_ptr(), piece.ptr, now) };
        rest = &rest[now..];
        done += now;
    }
    done as i32
}

impl Store for RecordedStore {
    fn queue(&self, _jobs: u16) -> io::Result<Box<dyn StoreQueue>> {
        Ok(Box::new(RecordedQueue {
            behaviour: self.behaviour,
            shared: self.shared.clone(),
            random: Random::new(self.behaviour.seed),
            jobs: Vec::new(),
            done: Vec::new(),
            event: Arc::new(eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?),
            wakes: None,
        }))
    }

    unsafe fn perform(&self, job: Job) -> i32 {
        let begun = self.shared.clock.tick();
        // SAFETY: the caller's promise.
        let (result, number) = unsafe { self.shared.perform(&self.behaviour, job, begun) };
        self.shared.told(number);
        result
    }

    fn size(&self) -> u64 {
        self.shared.lock().bytes.len() as u64
    }

    fn set_size(&self, size: u64) -> io::Result<()> {
        if !self.behaviour.grows {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let mut state = self.shared.lock();
        let change = Change::Size(size);
        change.apply(&mut state.bytes, &Kept::All);
        let number = state.push(&self.shared.clock, Action::Change { change, durable: false });
        drop(state);
        self.shared.told(Some(number));
        Ok(())
    }

    fn limits(&self) -> StoreLimits {
        let Behaviour { read_only, block, discard, zeroes, .. } = self.behaviour;
        StoreLimits { read_only, block, physical_block: 4096, discard_block: 4096, discard, zeroes }
    }

    fn status(&self) -> StoreStatus {
        StoreStatus { location: format!("recorded:///{}", self.name), ..StoreStatus::default() }
    }
}

/// Jobs of a queue: done when they are submitted, in any order, and told in any order.
#[derive(Debug)]
struct RecordedQueue {
    behaviour: Behaviour,
    shared: Arc<Shared>,
    random: Random,
    /// Jobs with the ticks at which they were pushed.
    jobs: Vec<(u16, Job, u64)>,
    done: Vec<(u16, i32, Option<usize>)>,
    event: Arc<OwnedFd>,
    wakes: Option<WakeSource>,
}

impl StoreQueue for RecordedQueue {
    fn register(&mut self, wakes: Option<&WakeSet>) -> io::Result<()> {
        WakeSource::register(&mut self.wakes, &self.event, wakes)
    }

    fn rest(&mut self, arm: bool) -> Rest {
        if arm {
            let _ = rustix::io::read(&self.event, &mut [0; 8]);
        }
        Rest::serve_if(!self.done.is_empty())
    }

    unsafe fn push(&mut self, head: u16, job: Job) -> io::Result<()> {
        self.jobs.push((head, job, self.shared.clock.tick()));
        Ok(())
    }

    fn submit(&mut self) -> io::Result<()> {
        if self.jobs.is_empty() {
            return Ok(());
        }
        while !self.jobs.is_empty() {
            let (head, job, begun) = self.jobs.swap_remove(self.random.below(self.jobs.len()));
            // SAFETY: the memory is valid until the outcome is reaped.
            let (result, number) = unsafe { self.shared.perform(&self.behaviour, job, begun) };
            let place = self.random.below(self.done.len() + 1);
            self.done.insert(place, (head, result, number));
        }
        rustix::io::write(&self.event, &1u64.to_ne_bytes())?;
        Ok(())
    }

    fn reap(&mut self, outcomes: &mut VecDeque<Outcome>) {
        for (head, result, number) in self.done.drain(..) {
            self.shared.told(number);
            // SAFETY: the job has ended, and this is its only outcome.
            outcomes.push_back(unsafe { Outcome::new(head, result) });
        }
    }

    fn wait(&mut self) -> io::Result<()> {
        self.submit()
    }

    fn cancel(&mut self) {}
}
