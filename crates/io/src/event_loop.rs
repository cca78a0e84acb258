//! What an I/O thread does all day.
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
//! A round looks at the queues that are ready and at those that are polled, so the others cost nothing. While one
//! queue is polled the thread does not sleep, and asks every [`SLICE`] what has come for the others.
//!
//! How long a queue is polled is its [`PollWindow`]'s business: not at all unless work has lately come soon after the last
//! was done. No clock is read where polling is off.
//!
//! A queue that is polled and whose work comes fast may be left alone for some microseconds before it is looked at again, so that
//! more is taken at once: its [`GatherWindow`] says for how long.
use super::host_queue::{HostQueue, Turn};
use super::{Counters, Message, NotPutOn, caught};
use paravane_device::ServeError;
use paravane_notify::{GatherWindow, Notifier, PollWindow};
use rustix::event::{Timespec, epoll};
use std::collections::VecDeque;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

/// Events taken from epoll at once.
const EVENTS: usize = 32;
/// Token of the control notifier.
const CONTROL: u64 = u64::MAX;
/// How long events may wait while queues are polled.
const SLICE: Duration = Duration::from_micros(10);

/// What an event loop is given.
pub(super) struct Setting {
    /// Says that messages have come.
    pub(super) control: Arc<Notifier>,
    /// The messages.
    pub(super) receiver: Receiver<Message>,
    /// Longest poll of a queue before it is slept; 0: none.
    pub(super) longest_poll: Duration,
    /// What it counts.
    pub(super) counters: Arc<Counters>,
}

pub(super) struct EventLoop {
    epoll: OwnedFd,
    setting: Setting,
    seats: Vec<Option<Seat>>,
    /// Seats of the queues that are to be served without waiting for an event, each once. Has room for all.
    ready: VecDeque<usize>,
    /// Seats of the queues that are polled, each once. Has room for all.
    polled: Vec<usize>,
}

/// A queue while this thread has it.
struct Seat {
    queue: Box<HostQueue>,
    state: State,
    window: PollWindow,
    gather: GatherWindow,
    /// Chains taken since its work last ran dry.
    taken: u32,
    /// When its work ran dry; `None` if that was never, or polling is off.
    dry: Option<Instant>,
    /// How long after that an event woke it.
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
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let control = epoll::EventData::new_u64(CONTROL);
        epoll::add(&epoll, &*setting.control, control, epoll::EventFlags::IN)?;
        Ok(Self { epoll, setting, seats: Vec::new(), ready: VecDeque::new(), polled: Vec::new() })
    }

    pub(super) fn run(&mut self) {
        let mut events = Vec::with_capacity(EVENTS);
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut asked = None;
        loop {
            if !self.polled.is_empty() {
                let now = self.poll();
                // What was found is served first, unless others have waited for long enough.
                if !self.ready.is_empty() && asked.is_some_and(|asked| now < asked + SLICE) {
                    self.serve_ready();
                    continue;
                }
                asked = Some(now);
            }
            let busy = !(self.ready.is_empty() && self.polled.is_empty());
            events.clear();
            let timeout = busy.then_some(&at_once);
            match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), timeout) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => {
                    tracing::error!("epoll_wait: {error}");
                    break;
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
            // Messages come last: they free and reuse seats that events of this round may still name.
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
            // A receiver that has gone away does not want to know.
            match message {
                Message::PutOn(queue, done) => drop(done.send(self.put_on(queue))),
                Message::TakeOff(key, done) => {
                    let holds =
                        |seat: &Option<Seat>| seat.as_ref().is_some_and(|seat| seat.queue.key() == key);
                    let seat = self.seats.iter().position(holds);
                    drop(done.send(seat.and_then(|seat| self.take_off(seat))));
                }
                Message::LookAgain(device) => self.look_again(device),
                Message::Run(task) => task(),
                Message::Quit => return false,
            }
        }
        true
    }

    fn look_again(&mut self, device: usize) {
        for (number, seat) in self.seats.iter_mut().enumerate() {
            let Some(seat) = seat else { continue };
            if seat.queue.key().device != device || !seat.queue.minds_memory() || seat.state == State::Ready {
                continue;
            }
            if let State::Polled { .. } = seat.state {
                self.polled.retain(|&other| other != number);
            }
            seat.state = State::Ready;
            self.ready.push_back(number);
        }
    }

    fn put_on(&mut self, mut queue: Box<HostQueue>) -> Result<(), NotPutOn> {
        let number = self.seats.iter().position(Option::is_none).unwrap_or_else(|| {
            self.seats.push(None);
            self.seats.len() - 1
        });
        self.ready.reserve(self.seats.len().saturating_sub(self.ready.len()));
        self.polled.reserve(self.seats.len().saturating_sub(self.polled.len()));
        let token = (number as u64) << 1;
        if let Err(source) = queue.listen(&self.epoll, token, token | 1) {
            return Err(NotPutOn { queue: Some(queue), source });
        }
        let window = PollWindow::new(self.setting.longest_poll);
        let gather = GatherWindow::new(queue.gathers());
        // It is served once, whether or not there is anything: what came while it was nobody's may wake nobody.
        self.seats[number] =
            Some(Seat { queue, state: State::Ready, window, gather, taken: 0, dry: None, gap: None });
        self.ready.push_back(number);
        Ok(())
    }

    fn take_off(&mut self, number: usize) -> Option<Box<HostQueue>> {
        let Seat { queue, state, .. } = self.seats.get_mut(number)?.take()?;
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
        let Some(Some(seat)) = self.seats.get_mut(number) else { return };
        if token & 1 == 0 {
            seat.queue.take_kicks();
        }
        match seat.state {
            State::Ready => return,
            State::Asleep => seat.gap = seat.dry.map(|dry| dry.elapsed()),
            // The other of its two sides has something, or a kick was under way.
            State::Polled { .. } => {
                seat.window.found();
                self.polled.retain(|&other| other != number);
            }
        }
        seat.state = State::Ready;
        self.ready.push_back(number);
    }

    /// Looks at the queues that are polled until one has work, or nobody wants to be polled any more, or the slice is
    /// over; once, if others have work already. Returns the time.
    fn poll(&mut self) -> Instant {
        let start = Instant::now();
        let mut now = start;
        let (mut fruitful, mut fruitless) = (0, 0);
        loop {
            for at in (0..self.polled.len()).rev() {
                let number = self.polled[at];
                let Some(Some(seat)) = self.seats.get_mut(number) else { continue };
                let State::Polled { from, until } = seat.state else { continue };
                if now < from {
                    continue;
                }
                if seat.queue.has_work() {
                    fruitful += 1;
                    seat.window.found();
                    seat.state = State::Ready;
                    self.polled.swap_remove(at);
                    self.ready.push_back(number);
                } else if now >= until {
                    fruitless += 1;
                    self.polled.swap_remove(at);
                    self.sleep(number);
                }
            }
            if !self.ready.is_empty() || self.polled.is_empty() || now >= start + SLICE {
                break;
            }
            std::hint::spin_loop();
            now = Instant::now();
        }
        self.setting.counters.poll(now - start, fruitful, fruitless);
        now
    }

    /// The queue is not looked at again before an event comes, unless there is something now.
    fn sleep(&mut self, number: usize) {
        let Some(Some(seat)) = self.seats.get_mut(number) else { return };
        match seat.queue.arm() {
            Ok(false) => seat.state = State::Asleep,
            Ok(true) => {
                seat.state = State::Ready;
                self.ready.push_back(number);
            }
            Err(error) => {
                seat.state = State::Asleep;
                self.fail(number, &error);
            }
        }
    }

    /// Gives a turn to each of those that are ready. Who becomes ready meanwhile has it in the next round.
    fn serve_ready(&mut self) {
        for _ in 0..self.ready.len() {
            let Some(number) = self.ready.pop_front() else { return };
            self.serve(number);
        }
    }

    fn serve(&mut self, number: usize) {
        let Some(Some(seat)) = self.seats.get_mut(number) else { return };
        seat.state = State::Asleep;
        self.setting.counters.turn();
        let length = seat.window.length();
        let enough = if length.is_zero() { 0 } else { seat.gather.enough() };
        match seat.queue.serve(length.is_zero(), enough) {
            Ok(Turn::More { taken }) => {
                seat.taken += taken;
                seat.state = State::Ready;
                self.ready.push_back(number);
            }
            Ok(Turn::Dry { taken, worked }) => {
                // A kick that brought no work teaches nothing.
                let gap = seat.gap.take().filter(|_| worked);
                gap.into_iter().for_each(|gap| seat.window.slept(gap));
                let taken = std::mem::take(&mut seat.taken) + taken;
                let mut pause = Duration::ZERO;
                if seat.window.enabled() && worked {
                    let now = Instant::now();
                    if let Some(before) = seat.dry.replace(now) {
                        pause = seat.gather.turn(taken, now - before);
                    }
                }
                // What looked like work and was none is not polled for again.
                match seat.dry.filter(|_| worked && !length.is_zero() && seat.queue.can_poll()) {
                    Some(dry) => {
                        seat.state = State::Polled { from: dry + pause, until: dry + length };
                        self.polled.push(number);
                    }
                    None if length.is_zero() => {}
                    None => self.sleep(number),
                }
            }
            Err(error) => self.fail(number, &error),
        }
    }

    /// The queue is out of order until its driver resets it.
    fn fail(&mut self, number: usize, error: &ServeError) {
        if let Some(queue) = self.take_off(number) {
            queue.fail(error);
        }
    }

    /// After a panic: what is in flight is waited for, and no queue is served any more.
    pub(super) fn give_up(&mut self) {
        for seat in self.seats.drain(..).flatten() {
            // One that panics once more is left where it is: the host may still write to its memory, which it keeps mapped.
            let mut queue = ManuallyDrop::new(seat.queue);
            let done = caught(|| {
                queue.forget();
                drop(ManuallyDrop::into_inner(queue));
            });
            if let Err(words) = done {
                tracing::error!("a queue cannot be stopped: {words}");
            }
        }
    }

    fn stop_all(&mut self) {
        for number in 0..self.seats.len() {
            if let Some(queue) = self.take_off(number) {
                queue.stop(true);
            }
        }
    }
}
