//! The event loop of an I/O thread.
//!
//! ```text
//!             kick, completion                     nothing left, and not worth polling
//!  asleep ---------------------> ready, served ----------------------------------------> arm, look once more
//!     ^                          ^  ^    |  budget used up: the others first                |  |
//!     |                          |  |    +--> ready                                         |  |
//!     |                          |  |    |                                                  |  |
//!     |      found work          |  |    '--> polled (no kicks asked for) -- for so long -->|  |
//!     |                          |  '------------'                                          |  |
//!     |                          '----------------------- more is available ----------------+  |
//!     '------------------------------------------------------ the next work wakes the thread --'
//! ```
//! A round looks at queues that are ready or polled; the others cost nothing. While a queue is
//! polled the thread does not sleep, and asks every [`SLICE`] for events of the others; and all the time
//! if only an event tells of work of that queue, such as bytes from a server, and it has few requests
//! in flight.
//!
//! [`PollWindow`] decides how long a queue is polled: not at all unless work has lately followed
//! soon after work. No clock is read where polling is off.
//!
//! While there are several queues, a turn ends after [`TURN`], so that none keeps the others waiting.
//! If the code that serves a queue panics, that queue ends, and the others are served on.
//!
//! [`BatchDelay`] decides how long a polled queue whose work comes fast is left alone, up to some
//! microseconds, so that more is taken at once.
use super::host_queue::{HostQueue, Turn};
use super::{Activity, Counters, Message, NotPutOn, caught};
use paravane_device::{LogDevice, ServeError};
use paravane_notify::{BatchDelay, Notifier, PollWindow};
use rustix::event::{Timespec, epoll};
use std::collections::VecDeque;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

/// Most events taken from epoll at once.
const EVENTS: usize = 32;
/// Token of the control notifier.
const CONTROL: u64 = u64::MAX;
/// Longest time that events wait while queues are polled.
const SLICE: Duration = Duration::from_micros(10);
/// Longest turn of a queue among several, except for its last batch.
const TURN: Duration = Duration::from_micros(100);

/// Parts of an event loop.
pub(super) struct Setting {
    /// Signalled after each message.
    pub(super) control: Arc<Notifier>,
    /// The messages.
    pub(super) receiver: Receiver<Message>,
    /// Longest poll of a queue before the thread waits for its kick; 0: no polling.
    pub(super) longest_poll: Duration,
    /// Counters.
    pub(super) counters: Arc<Counters>,
    /// Told when the thread wakes; `None`: nobody watches it.
    ///
    /// A watched thread measures how long it serves each queue.
    pub(super) activity: Option<Arc<Activity>>,
}

pub(super) struct EventLoop {
    epoll: Arc<OwnedFd>,
    setting: Setting,
    entries: Vec<Option<Entry>>,
    /// Number of queues.
    count: usize,
    /// Index of the entry whose code runs, or ran last.
    serving: Option<usize>,
    /// Device that log lines name; of a thread that devices share.
    named: Option<Arc<str>>,
    /// Indices of entries to serve without waiting for an event, each once.
    ///
    /// Has room for all.
    ready: VecDeque<usize>,
    /// Indices of entries that are polled, each once. Has room for all.
    polled: Vec<usize>,
    /// Last look at the polled queues.
    looked: Option<Instant>,
}

/// A queue while this thread has it.
struct Entry {
    queue: Box<HostQueue>,
    state: State,
    window: PollWindow,
    delay: BatchDelay,
    /// Chains taken since its work last ran dry.
    taken: u32,
    /// When its work ran dry; `None`: never, or polling is off.
    dry: Option<Instant>,
    /// Time from then to the event that woke it.
    gap: Option<Duration>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// An event wakes it.
    Asleep,
    /// In the ready list.
    Ready,
    /// In the list of those that are polled, from then on, until then at the latest.
    Polled { from: Instant, until: Instant },
}

impl EventLoop {
    pub(super) fn new(setting: Setting) -> io::Result<Self> {
        let epoll = Arc::new(epoll::create(epoll::CreateFlags::CLOEXEC)?);
        let control = epoll::EventData::new_u64(CONTROL);
        epoll::add(&epoll, &*setting.control, control, epoll::EventFlags::IN)?;
        Ok(Self {
            epoll,
            setting,
            entries: Vec::new(),
            count: 0,
            serving: None,
            named: None,
            ready: VecDeque::new(),
            polled: Vec::new(),
            looked: None,
        })
    }

    pub(super) fn run(&mut self) {
        let mut events = Vec::with_capacity(EVENTS);
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut asked = None;
        loop {
            if !self.polled.is_empty() {
                let now = self.poll();
                // Work that was found comes first, unless events have waited long enough.
                if !self.ready.is_empty() && asked.is_some_and(|asked| now < asked + SLICE) {
                    self.serve_ready();
                    continue;
                }
                asked = Some(now);
            }
            let busy = !(self.ready.is_empty() && self.polled.is_empty());
            events.clear();
            self.serving = None;
            if !busy {
                self.setting.counters.set_awake(false);
            }
            let timeout = busy.then_some(&at_once);
            match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), timeout) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => {
                    tracing::error!("epoll_wait: {error}");
                    break;
                }
            }
            if !busy {
                self.setting.counters.set_awake(true);
                if let Some(activity) = &self.setting.activity {
                    activity.wake();
                }
            }
            let mut control = false;
            for event in &events {
                match event.data.u64() {
                    CONTROL => control = true,
                    token => self.event(token),
                }
            }
            self.serve_ready();
            // Messages come last: they free and reuse entries that events of this round may still
            // name.
            if control && !self.obey_all() {
                break;
            }
        }
        self.stop_all();
    }

    fn obey_all(&mut self) -> bool {
        // Taken before the messages are read: a message sent later signals again.
        let _ = self.setting.control.take();
        while let Ok(message) = self.setting.receiver.try_recv() {
            // A receiver that has gone away needs no answer.
            match message {
                Message::PutOn(queue, done) => drop(done.send(self.put_on(queue))),
                Message::TakeOff(key, done) => {
                    let holds =
                        |entry: &Option<Entry>| entry.as_ref().is_some_and(|entry| entry.queue.key() == key);
                    let entry = self.entries.iter().position(holds);
                    drop(done.send(entry.and_then(|entry| self.take_off(entry))));
                }
                Message::LookAgain(device) => self.look_again(device),
                Message::Renew(device) => self.renew(device),
                Message::Run(device, task) => {
                    self.setting.counters.begin_turn(device);
                    if let Err(words) = caught(task) {
                        tracing::error!("a task on an I/O thread panicked: {words}");
                    }
                    self.setting.counters.end_turn();
                }
                Message::Quit => return false,
            }
        }
        true
    }

    fn look_again(&mut self, device: usize) {
        for (number, entry) in self.entries.iter_mut().enumerate() {
            let Some(entry) = entry else { continue };
            if entry.queue.key().device != device
                || !entry.queue.minds_memory()
                || entry.state == State::Ready
            {
                continue;
            }
            if let State::Polled { .. } = entry.state {
                self.polled.retain(|&other| other != number);
            }
            entry.state = State::Ready;
            self.ready.push_back(number);
        }
    }

    /// Has the queues of `device` apply settings that have changed, and serves them once.
    fn renew(&mut self, device: usize) {
        for number in 0..self.entries.len() {
            let Some(entry) = &mut self.entries[number] else { continue };
            if entry.queue.key().device != device {
                continue;
            }
            self.serving = Some(number);
            let renewed = entry.queue.renew_within(&self.epoll, news(number));
            let longest = entry.queue.longest_poll().unwrap_or(self.setting.longest_poll);
            (entry.window, entry.dry) = (PollWindow::new(longest), None);
            if let State::Polled { .. } = entry.state {
                self.polled.retain(|&other| other != number);
            }
            if entry.state != State::Ready {
                entry.state = State::Ready;
                self.ready.push_back(number);
            }
            if let Err(error) = renewed {
                self.fail(number, &error.into());
            }
        }
    }

    fn put_on(&mut self, mut queue: Box<HostQueue>) -> Result<(), NotPutOn> {
        let number = self.entries.iter().position(Option::is_none).unwrap_or_else(|| {
            self.entries.push(None);
            self.entries.len() - 1
        });
        self.ready.reserve(self.entries.len().saturating_sub(self.ready.len()));
        self.polled.reserve(self.entries.len().saturating_sub(self.polled.len()));
        let listens = queue.renew().and_then(|()| queue.listen(&self.epoll, kicks(number), news(number)));
        if let Err(source) = listens {
            return Err(NotPutOn { queue: Some(queue), source });
        }
        let window = PollWindow::new(queue.longest_poll().unwrap_or(self.setting.longest_poll));
        let delay = BatchDelay::new(queue.preferred_batch());
        // Served once in any case: work that arrived while the queue had no thread may wake nobody.
        self.entries[number] =
            Some(Entry { queue, state: State::Ready, window, delay, taken: 0, dry: None, gap: None });
        self.ready.push_back(number);
        self.count += 1;
        Ok(())
    }

    fn take_off(&mut self, number: usize) -> Option<Box<HostQueue>> {
        let Entry { mut queue, state, .. } = self.entries.get_mut(number)?.take()?;
        self.count -= 1;
        match state {
            State::Asleep => {}
            State::Ready => self.ready.retain(|&other| other != number),
            State::Polled { .. } => self.polled.retain(|&other| other != number),
        }
        queue.ignore(&self.epoll);
        Some(queue)
    }

    fn event(&mut self, token: u64) {
        let number = usize::try_from(token >> 1).unwrap_or(usize::MAX);
        let Some(Some(entry)) = self.entries.get_mut(number) else { return };
        entry.queue.announce();
        if token & 1 == 0 {
            entry.queue.take_kicks();
        }
        match entry.state {
            State::Ready => return,
            State::Asleep => entry.gap = entry.dry.map(|dry| dry.elapsed()),
            // An event of its other descriptor, or a kick that was under way.
            State::Polled { .. } => {
                entry.window.found();
                self.polled.retain(|&other| other != number);
            }
        }
        entry.state = State::Ready;
        self.ready.push_back(number);
    }

    /// Polls until a queue has work, polling ends, or it is time to ask for events.
    ///
    /// Polls once if a queue is ready already. Returns the time.
    fn poll(&mut self) -> Instant {
        let start = Instant::now();
        let mut now = start;
        let (mut fruitful, mut fruitless) = (0, 0);
        let mut asks = false;
        loop {
            for at in (0..self.polled.len()).rev() {
                let number = self.polled[at];
                let Some(Some(entry)) = self.entries.get_mut(number) else { continue };
                let State::Polled { from, until } = entry.state else { continue };
                if now < from {
                    continue;
                }
                self.serving = Some(number);
                let has_work = entry.queue.has_work();
                asks |= has_work.is_none();
                if has_work == Some(true) {
                    // At the last poll, or when its work ran dry.
                    let looked = self.looked.filter(|looked| *looked >= from).or(entry.dry);
                    entry.queue.announce_since(looked.map_or(Duration::ZERO, |looked| now - looked));
                    fruitful += 1;
                    entry.window.found();
                    entry.state = State::Ready;
                    self.polled.swap_remove(at);
                    self.ready.push_back(number);
                } else if now >= until {
                    fruitless += 1;
                    self.polled.swap_remove(at);
                    self.sleep(number);
                }
            }
            self.looked = Some(now);
            if asks || !self.ready.is_empty() || self.polled.is_empty() || now >= start + SLICE {
                break;
            }
            std::hint::spin_loop();
            now = Instant::now();
        }
        self.setting.counters.poll(now - start, fruitful, fruitless);
        now
    }

    /// Waits for an event before the queue is served again, unless there is work now.
    fn sleep(&mut self, number: usize) {
        let Some(Some(entry)) = self.entries.get_mut(number) else { return };
        self.serving = Some(number);
        match entry.queue.arm() {
            Ok(false) => entry.state = State::Asleep,
            Ok(true) => {
                entry.state = State::Ready;
                self.ready.push_back(number);
            }
            Err(error) => {
                entry.state = State::Asleep;
                self.fail(number, &error);
            }
        }
    }

    /// Gives a turn to each queue that is ready.
    ///
    /// A queue that becomes ready meanwhile has its turn in the next round.
    fn serve_ready(&mut self) {
        for _ in 0..self.ready.len() {
            let Some(number) = self.ready.pop_front() else { return };
            self.serve(number);
        }
    }

    fn serve(&mut self, number: usize) {
        let Some(Some(entry)) = self.entries.get_mut(number) else { return };
        entry.state = State::Asleep;
        self.serving = Some(number);
        self.setting.counters.begin_turn(entry.queue.key().device);
        let length = entry.window.length();
        let enough = if length.is_zero() { 0 } else { entry.delay.enough() };
        let is_watched = self.setting.activity.is_some();
        if is_watched && self.named.as_ref().map(Arc::as_ptr) != entry.queue.name().map(Arc::as_ptr) {
            self.named = entry.queue.name().cloned();
            LogDevice::set(self.named.clone());
        }
        let start = (is_watched || self.count > 1).then(Instant::now);
        let until = start.filter(|_| self.count > 1).map(|start| start + TURN);
        let turn = entry.queue.serve(length.is_zero(), enough, until);
        self.setting.counters.end_turn();
        let mut now = None;
        if is_watched && let Some(start) = start {
            let end = Instant::now();
            entry.queue.was_busy(end - start);
            now = Some(end);
        }
        match turn {
            Ok(Turn::More { taken }) => {
                entry.taken += taken;
                entry.state = State::Ready;
                self.ready.push_back(number);
            }
            Ok(Turn::Dry { taken, worked }) => {
                // A kick without work says nothing about the rate.
                let gap = entry.gap.take().filter(|_| worked);
                gap.into_iter().for_each(|gap| entry.window.slept(gap));
                let taken = std::mem::take(&mut entry.taken) + taken;
                let mut pause = Duration::ZERO;
                if entry.window.enabled() && worked {
                    let now = now.unwrap_or_else(Instant::now);
                    if let Some(before) = entry.dry.replace(now) {
                        pause = entry.delay.turn(taken, now - before);
                    }
                }
                // After a false alarm the queue is not polled again.
                match entry.dry.filter(|_| worked && !length.is_zero() && entry.queue.can_poll()) {
                    Some(dry) => {
                        entry.state = State::Polled { from: dry + pause, until: dry + length };
                        self.polled.push(number);
                    }
                    None if length.is_zero() => {}
                    None => self.sleep(number),
                }
            }
            Err(error) => self.fail(number, &error),
        }
    }

    /// Takes off a queue that has failed.
    fn fail(&mut self, number: usize, error: &ServeError) {
        if let Some(queue) = self.take_off(number) {
            queue.fail(error);
        }
    }

    /// After a panic: ends the queue whose code ran. `false`: it was none of them.
    pub(super) fn recover(&mut self, message: &str) -> bool {
        self.setting.counters.end_turn();
        let Some(number) = self.serving.take() else { return false };
        let Some(Entry { queue, .. }) = self.entries.get_mut(number).and_then(Option::take) else {
            return false;
        };
        self.count -= 1;
        self.ready.retain(|&other| other != number);
        self.polled.retain(|&other| other != number);
        end(queue, &self.epoll, message);
        true
    }

    /// After a panic of our own: ends all queues.
    pub(super) fn give_up(&mut self, message: &str) {
        for entry in self.entries.drain(..).flatten() {
            end(entry.queue, &self.epoll, message);
        }
    }

    fn stop_all(&mut self) {
        for number in 0..self.entries.len() {
            if let Some(queue) = self.take_off(number) {
                queue.stop(true);
            }
        }
    }
}

/// Token of the kicks of an entry.
fn kicks(number: usize) -> u64 {
    (number as u64) << 1
}

/// Token of the handler's events of an entry.
fn news(number: usize) -> u64 {
    kicks(number) | 1
}

/// After a panic: waits for what is in flight, and ends the queue.
fn end(queue: Box<HostQueue>, epoll: &OwnedFd, message: &str) {
    let (number, events) = (queue.key().queue, queue.events());
    // If it panics again it is leaked: the host may still write to its memory, which it keeps
    // mapped.
    let mut queue = ManuallyDrop::new(queue);
    let done = caught(|| {
        queue.ignore(epoll);
        queue.forget();
        drop(ManuallyDrop::into_inner(queue));
    });
    if let Err(words) = done {
        tracing::error!("queue cannot be stopped after a panic: {words}");
    }
    events.panicked(number, message);
}
