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
//! If the code that serves a queue panics, that queue ends, and the others are served on. If it blocks,
//! another thread goes on with the loop (`lend`).
//!
//! [`BatchDelay`] decides how long a polled queue whose work comes fast is left alone, up to some
//! microseconds, so that more is taken at once.
mod lend;
pub(crate) mod parts;

use crate::activity::Activity;
use crate::host_queue::{HostQueue, Turn};
use crate::queue_key::QueueKey;
use paravane_device::LogDevice;
use paravane_notify::{BatchDelay, Notifier, PollWindow};
use parts::{Entry, EventLoop, Message, NotPutOn, Setting, State, Tenure};
use rustix::event::{Timespec, epoll};
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, channel};
use std::time::{Duration, Instant};

/// Most events taken from epoll at once.
const EVENTS: usize = 32;
/// Token of the control notifier.
const CONTROL: u64 = u64::MAX;
/// Longest time that events wait while queues are polled.
const SLICE: Duration = Duration::from_micros(10);
/// Longest turn of a queue among several, except for its last batch.
const TURN: Duration = Duration::from_micros(100);

impl EventLoop {
    /// Makes a loop without queues, and what others need to reach it.
    ///
    /// `activity` is told when the loop's thread wakes; then another thread can take the loop.
    pub(super) fn new(
        longest_poll: Duration,
        activity: Option<Arc<Activity>>,
    ) -> io::Result<(Box<Self>, Setting)> {
        let (sender, receiver) = channel();
        let control = Notifier::new(false).map_err(io::Error::other)?;
        let epoll = Arc::new(epoll::create(epoll::CreateFlags::CLOEXEC)?);
        epoll::add(&epoll, &control, epoll::EventData::new_u64(CONTROL), epoll::EventFlags::IN)?;
        let this = Box::new(Self {
            epoll: Arc::clone(&epoll),
            receiver,
            entries: Vec::new(),
            count: 0,
            lent: None,
            blocked: Vec::new(),
            tasks: Vec::new(),
            quits: false,
            named: None,
            ready: VecDeque::new(),
            polled: Vec::new(),
            looked: None,
        });
        Ok((this, Setting::new(sender, control, longest_poll, activity, epoll)))
    }

    /// Runs until the loop ends. `None`: another thread has the loop.
    fn run(mut self: Box<Self>, tenure: &Tenure<'_>) -> Option<()> {
        self.go_on(tenure);
        let mut events = Vec::with_capacity(EVENTS);
        // Another thread may have been among the messages.
        let mut this = self.obey_all(tenure)?;
        let mut asked = None;
        while !this.quits {
            if !this.polled.is_empty() {
                let now;
                (this, now) = this.poll(tenure)?;
                // Work that was found comes first, unless events have waited long enough.
                if !this.ready.is_empty() && asked.is_some_and(|asked| now < asked + SLICE) {
                    this = this.serve_ready(tenure)?;
                    continue;
                }
                asked = Some(now);
            }
            let control = this.wait(&mut events, tenure.setting);
            this = this.serve_ready(tenure)?;
            // Messages come last: they free and reuse entries that events of this round may still
            // name.
            if control {
                this = this.obey_all(tenure)?;
            }
        }
        this.stop_all(tenure)
    }

    /// Waits for events, and notes them. Returns whether there are messages.
    fn wait(&mut self, events: &mut Vec<epoll::Event>, setting: &Setting) -> bool {
        let busy = !(self.ready.is_empty() && self.polled.is_empty());
        events.clear();
        if !busy {
            setting.counters.set_awake(false);
        }
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        let timeout = busy.then_some(&at_once);
        match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(events), timeout) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => {
                tracing::error!("epoll_wait: {error}");
                self.quits = true;
            }
        }
        if !busy {
            setting.counters.set_awake(true);
            if let Some(activity) = &setting.activity {
                activity.wake();
            }
        }
        let mut control = false;
        for event in &*events {
            match event.data.u64() {
                CONTROL => control = true,
                token => self.event(token),
            }
        }
        control
    }

    /// Does what messages say. `None`: another thread has the loop.
    fn obey_all(mut self: Box<Self>, tenure: &Tenure<'_>) -> Option<Box<Self>> {
        let setting = tenure.setting;
        // Taken before the messages are read: a message sent later signals again.
        let _ = setting.control.take();
        self = self.run_tasks(tenure)?;
        while let Ok(message) = self.receiver.try_recv() {
            // A receiver that has gone away needs no answer.
            match message {
                Message::PutOn(queue, done) => drop(done.send(self.put_on(queue, setting))),
                Message::TakeOff(key, done) => self.wish(key, done),
                Message::LookAgain(device) => self.look_again(device),
                Message::Renew(device) => self.renew(device, setting),
                Message::Run(device, task) => {
                    self.tasks.push((device, task));
                    self = self.run_tasks(tenure)?;
                }
                Message::Back(returned) => {
                    self.take_back(returned, setting);
                    self = self.run_tasks(tenure)?;
                }
                Message::Quit => self.quits = true,
            }
        }
        Some(self)
    }

    fn look_again(&mut self, device: usize) {
        for number in 0..self.entries.len() {
            let Some(Some(entry)) = self.entries.get(number) else { continue };
            let minds = entry.queue.as_ref().is_some_and(|queue| queue.minds_memory());
            if entry.key.device == device && minds && !matches!(entry.state, State::Ready | State::Held) {
                self.make_ready(number);
            }
        }
    }

    /// Has a queue served in the next round.
    fn make_ready(&mut self, number: usize) {
        if self.set_aside(number, State::Ready).is_some() {
            self.ready.push_back(number);
        }
    }

    /// Has the queues of `device` apply settings that have changed, and serves them once.
    ///
    /// One that is away does so when it is back.
    fn renew(&mut self, device: usize, setting: &Setting) {
        for number in 0..self.entries.len() {
            let Some(entry) = &mut self.entries[number] else { continue };
            if entry.key.device == device {
                entry.renews = true;
                self.renew_one(number, setting);
            }
        }
    }

    /// Renews a queue that is to be, if it is here.
    fn renew_one(&mut self, number: usize, setting: &Setting) {
        let Some(Some(entry)) = self.entries.get_mut(number) else { return };
        let Some(queue) = entry.queue.as_mut().filter(|_| entry.renews) else { return };
        let renewed = queue.renew_within(&self.epoll, news(number));
        entry.window = PollWindow::new(queue.longest_poll().unwrap_or(setting.longest_poll));
        (entry.dry, entry.renews) = (None, false);
        match renewed {
            Ok(()) if entry.state != State::Held => self.make_ready(number),
            Ok(()) => {}
            Err(error) => {
                if let Some(queue) = self.take_off(number) {
                    queue.fail(&error.into());
                }
            }
        }
    }

    /// Gives a queue a new state, in no list. `None`: there is no such queue.
    fn set_aside(&mut self, number: usize, state: State) -> Option<&Entry> {
        let entry = self.entries.get_mut(number)?.as_mut()?;
        match std::mem::replace(&mut entry.state, state) {
            State::Asleep | State::Away | State::Held => {}
            State::Ready => self.ready.retain(|&other| other != number),
            State::Polled { .. } => self.polled.retain(|&other| other != number),
        }
        Some(entry)
    }

    fn put_on(&mut self, mut queue: Box<HostQueue>, setting: &Setting) -> Result<(), NotPutOn> {
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
        let window = PollWindow::new(queue.longest_poll().unwrap_or(setting.longest_poll));
        let delay = BatchDelay::new(queue.preferred_batch());
        let (key, name) = (queue.key(), queue.name().cloned());
        // Served once in any case: work that arrived while the queue had no thread may wake nobody.
        self.entries[number] = Some(Entry {
            queue: Some(queue),
            key,
            name,
            wanted: None,
            renews: false,
            state: State::Ready,
            window,
            delay,
            taken: 0,
            dry: None,
            gap: None,
        });
        self.ready.push_back(number);
        self.count += 1;
        Ok(())
    }

    /// Gives a queue to `done`, when it is here.
    fn wish(&mut self, key: QueueKey, done: SyncSender<Option<Box<HostQueue>>>) {
        let holds = |entry: &Option<Entry>| entry.as_ref().is_some_and(|entry| entry.key == key);
        let number = self.entries.iter().position(holds);
        match number.and_then(|number| self.entries[number].as_mut()) {
            Some(entry) if entry.queue.is_none() => entry.wanted = Some(done),
            // A receiver that has gone away needs no answer.
            _ => drop(done.send(number.and_then(|number| self.take_off(number)))),
        }
    }

    fn take_off(&mut self, number: usize) -> Option<Box<HostQueue>> {
        let mut queue = self.remove(number)?;
        queue.ignore(&self.epoll);
        Some(queue)
    }

    /// Forgets an entry. Returns its queue, if that is here.
    fn remove(&mut self, number: usize) -> Option<Box<HostQueue>> {
        self.set_aside(number, State::Asleep)?;
        self.count -= 1;
        self.entries[number].take()?.queue
    }

    fn event(&mut self, token: u64) {
        let number = usize::try_from(token >> 1).unwrap_or(usize::MAX);
        let Some(Some(entry)) = self.entries.get_mut(number) else { return };
        // One that is away is served once when it is back.
        let Some(queue) = &mut entry.queue else { return };
        queue.announce();
        if token & 1 == 0 {
            queue.take_kicks();
        }
        match entry.state {
            State::Ready | State::Away | State::Held => return,
            State::Asleep => entry.gap = entry.dry.map(|dry| dry.elapsed()),
            // An event of its other descriptor, or a kick that was under way.
            State::Polled { .. } => entry.window.found(),
        }
        self.make_ready(number);
    }

    /// Polls until a queue has work, polling ends, or it is time to ask for events.
    ///
    /// Polls once if a queue is ready already. Returns the time. `None`: another thread has the loop.
    fn poll(self: Box<Self>, tenure: &Tenure<'_>) -> Option<(Box<Self>, Instant)> {
        let start = Instant::now();
        let mut now = start;
        let (mut this, mut found) = (self, Found::default());
        loop {
            for at in (0..this.polled.len()).rev() {
                let Some(&number) = this.polled.get(at) else { continue };
                this = this.poll_one(number, now, &mut found, tenure)?;
            }
            this.looked = Some(now);
            if found.asks || !this.ready.is_empty() || this.polled.is_empty() || now >= start + SLICE {
                break;
            }
            std::hint::spin_loop();
            now = Instant::now();
        }
        tenure.setting.counters.poll(now - start, found.fruitful, found.fruitless);
        Some((this, now))
    }

    fn poll_one(
        mut self: Box<Self>,
        number: usize,
        now: Instant,
        found: &mut Found,
        tenure: &Tenure<'_>,
    ) -> Option<Box<Self>> {
        let Some(Some(entry)) = self.entries.get(number) else { return Some(self) };
        let State::Polled { from, until } = entry.state else { return Some(self) };
        if now < from {
            return Some(self);
        }
        if is_blocked(&self.blocked, entry.key) {
            self.set_aside(number, State::Held);
            return Some(self);
        }
        let looked = self.looked;
        let (mut this, has_work) = self.lend(number, tenure, |queue| Ok(queue.has_work()))?;
        let (Some(has_work), Some(Some(entry))) = (has_work, this.entries.get_mut(number)) else {
            return Some(this);
        };
        found.asks |= has_work.is_none();
        if has_work == Some(true) {
            // At the last poll, or when its work ran dry.
            let looked = looked.filter(|looked| *looked >= from).or(entry.dry);
            if let Some(queue) = &mut entry.queue {
                queue.announce_since(looked.map_or(Duration::ZERO, |looked| now - looked));
            }
            found.fruitful += 1;
            entry.window.found();
            this.make_ready(number);
        } else if now >= until {
            found.fruitless += 1;
            this.set_aside(number, State::Asleep);
            return this.sleep(number, tenure);
        }
        Some(this)
    }

    /// Waits for an event before the queue is served again, unless there is work now.
    fn sleep(self: Box<Self>, number: usize, tenure: &Tenure<'_>) -> Option<Box<Self>> {
        let (mut this, more) = self.lend(number, tenure, HostQueue::arm)?;
        if more == Some(true) {
            this.make_ready(number);
        }
        Some(this)
    }

    /// Gives a turn to each queue that is ready.
    ///
    /// A queue that becomes ready meanwhile has its turn in the next round.
    fn serve_ready(self: Box<Self>, tenure: &Tenure<'_>) -> Option<Box<Self>> {
        let mut this = self;
        for _ in 0..this.ready.len() {
            let Some(number) = this.ready.pop_front() else { break };
            this = this.serve(number, tenure)?;
        }
        Some(this)
    }

    fn serve(mut self: Box<Self>, number: usize, tenure: &Tenure<'_>) -> Option<Box<Self>> {
        let Some(Some(entry)) = self.entries.get_mut(number) else { return Some(self) };
        if is_blocked(&self.blocked, entry.key) {
            entry.state = State::Held;
            return Some(self);
        }
        entry.state = State::Asleep;
        let setting = tenure.setting;
        setting.counters.count_turn();
        let length = entry.window.length();
        let enough = if length.is_zero() { 0 } else { entry.delay.enough() };
        let is_watched = setting.activity.is_some();
        if is_watched && self.named.as_ref().map(Arc::as_ptr) != entry.name.as_ref().map(Arc::as_ptr) {
            self.named = entry.name.clone();
            LogDevice::set(self.named.clone());
        }
        let start = (is_watched || self.count > 1).then(Instant::now);
        let until = start.filter(|_| self.count > 1).map(|start| start + TURN);
        let (mut this, turn) = self.lend(number, tenure, |queue| {
            let turn = queue.serve(length.is_zero(), enough, until)?;
            let mut end = None;
            if is_watched && let Some(start) = start {
                let now = Instant::now();
                queue.was_busy(now - start);
                end = Some(now);
            }
            let worked = matches!(turn, Turn::Dry { worked: true, .. });
            Ok((turn, end, worked && !length.is_zero() && queue.can_poll()))
        })?;
        // None: the queue has ended.
        let Some((turn, end, can_poll)) = turn else { return Some(this) };
        match this.served(number, turn, end, can_poll) {
            false => Some(this),
            true => this.sleep(number, tenure),
        }
    }

    /// Notes how a turn ended. Returns whether the queue must be told to wake its thread.
    fn served(&mut self, number: usize, turn: Turn, end: Option<Instant>, can_poll: bool) -> bool {
        let Some(Some(entry)) = self.entries.get_mut(number) else { return false };
        let length = entry.window.length();
        match turn {
            Turn::More { taken } => {
                entry.taken += taken;
                entry.state = State::Ready;
                self.ready.push_back(number);
            }
            Turn::Dry { taken, worked } => {
                // A kick without work says nothing about the rate.
                let gap = entry.gap.take().filter(|_| worked);
                gap.into_iter().for_each(|gap| entry.window.slept(gap));
                let taken = std::mem::take(&mut entry.taken) + taken;
                let mut pause = Duration::ZERO;
                if entry.window.enabled() && worked {
                    let now = end.unwrap_or_else(Instant::now);
                    if let Some(before) = entry.dry.replace(now) {
                        pause = entry.delay.turn(taken, now - before);
                    }
                }
                // After a false alarm the queue is not polled again.
                match entry.dry.filter(|_| can_poll) {
                    Some(dry) => {
                        entry.state = State::Polled { from: dry + pause, until: dry + length };
                        self.polled.push(number);
                    }
                    None => return !length.is_zero(),
                }
            }
        }
        false
    }

    /// Stops all queues, those that are away as well, when they are back.
    fn stop_all(self: Box<Self>, tenure: &Tenure<'_>) -> Option<()> {
        let (mut this, mut events) = (self, Vec::with_capacity(EVENTS));
        loop {
            for number in 0..this.entries.len() {
                let Some(Some(Entry { queue: Some(_), key, .. })) = this.entries.get(number) else {
                    continue;
                };
                let device = key.device;
                if let Some(queue) = this.take_off(number) {
                    this = this.run_task(device, Box::new(move || queue.stop(true)), tenure)?;
                }
            }
            if this.count == 0 && this.blocked.is_empty() {
                return Some(());
            }
            this.wait(&mut events, tenure.setting);
            this = this.obey_all(tenure)?;
        }
    }
}

/// Whether a queue waits for another one of its device.
fn is_blocked(blocked: &[usize], key: QueueKey) -> bool {
    !blocked.is_empty() && blocked.contains(&key.device)
}

/// What polling has found.
#[derive(Default)]
struct Found {
    fruitful: u64,
    fruitless: u64,
    /// Only the descriptor of a queue tells of its work.
    asks: bool,
}

/// Token of the kicks of an entry.
fn kicks(number: usize) -> u64 {
    (number as u64) << 1
}

/// Token of the handler's events of an entry.
fn news(number: usize) -> u64 {
    kicks(number) | 1
}
