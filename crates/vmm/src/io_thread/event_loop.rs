//! What an I/O thread does all day.
//!
//! ```text
//!            kick, completion                    nothing progressed
//!  sleeping ------------------> serving ---------------------------------> arm kicks
//!     ^                         ^   |  budget used up: the others first       |  |
//!     |                         |   +-> ready list --+                        |  |
//!     |                         +--------------------+                        |  |
//!     |                         ^------------------- more is available -------+  |
//!     +---------------------------------- the next buffer brings a kick ---------+
//! ```
//! A round costs nothing for queues that have nothing to do.
use super::host_queue::HostQueue;
use super::{Message, NotPutOn};
use crate::guard::lock;
use crate::tally::Tally;
use paravane_device::ServeError;
use paravane_notify::Notifier;
use rustix::event::{Timespec, epoll};
use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::Receiver;

/// Events taken from epoll at once.
const EVENTS: usize = 32;
/// Token of the control notifier.
const CONTROL: u64 = u64::MAX;

pub(super) struct EventLoop {
    poll: OwnedFd,
    control: Arc<Notifier>,
    receiver: Receiver<Message>,
    seats: Vec<Option<Seat>>,
    /// Seats of the queues that are to be served without waiting for an event, each once. Has room for all.
    ready: VecDeque<usize>,
    tally: Arc<Tally>,
}

/// A queue while this thread has it.
struct Seat {
    queue: Box<HostQueue>,
    /// It is in the ready list.
    ready: bool,
}

impl EventLoop {
    pub(super) fn new(
        control: Arc<Notifier>,
        receiver: Receiver<Message>,
        tally: Arc<Tally>,
    ) -> io::Result<Self> {
        let poll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&poll, &*control, epoll::EventData::new_u64(CONTROL), epoll::EventFlags::IN)?;
        Ok(Self { poll, control, receiver, seats: Vec::new(), ready: VecDeque::new(), tally })
    }

    pub(super) fn run(&mut self) {
        let mut events = Vec::with_capacity(EVENTS);
        loop {
            let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
            let timeout = if self.ready.is_empty() { None } else { Some(&at_once) };
            events.clear();
            match epoll::wait(&self.poll, rustix::buffer::spare_capacity(&mut events), timeout) {
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
            // Those that become ready meanwhile have their turn in the next round.
            for _ in 0..self.ready.len() {
                self.serve_next();
            }
            // Messages come last: they free and reuse seats that events of this round may still name.
            if control && !self.obey_all() {
                break;
            }
        }
        self.stop_all();
    }

    fn obey_all(&mut self) -> bool {
        // Taken before the messages are read: a message sent later signals again.
        let _ = self.control.take();
        while let Ok(message) = self.receiver.try_recv() {
            // A receiver that has gone away does not want to know.
            match message {
                Message::PutOn(queue, done) => drop(done.send(self.put_on(queue))),
                Message::TakeOff(key, done) => {
                    let holds = |seat: &Option<Seat>| seat.as_ref().is_some_and(|seat| seat.queue.key == key);
                    let seat = self.seats.iter().position(holds);
                    drop(done.send(seat.and_then(|seat| self.take_off(seat))));
                }
                Message::Quit => return false,
            }
        }
        true
    }

    fn put_on(&mut self, mut queue: Box<HostQueue>) -> Result<(), NotPutOn> {
        let number = self.seats.iter().position(Option::is_none).unwrap_or_else(|| {
            self.seats.push(None);
            self.seats.len() - 1
        });
        self.ready.reserve(self.seats.len().saturating_sub(self.ready.len()));
        let token = (number as u64) << 1;
        if let Err(source) = queue.listen(&self.poll, token, token | 1) {
            return Err(NotPutOn { queue: Some(queue), source });
        }
        self.seats[number] = Some(Seat { queue, ready: false });
        Ok(())
    }

    fn take_off(&mut self, number: usize) -> Option<Box<HostQueue>> {
        let Seat { queue, ready } = self.seats.get_mut(number)?.take()?;
        if ready {
            self.ready.retain(|&other| other != number);
        }
        queue.ignore(&self.poll);
        Some(queue)
    }

    fn event(&mut self, token: u64) {
        let number = usize::try_from(token >> 1).unwrap_or(usize::MAX);
        let Some(Some(seat)) = self.seats.get_mut(number) else { return };
        if token & 1 == 0 {
            seat.queue.take_kicks(&self.tally);
        }
        if !std::mem::replace(&mut seat.ready, true) {
            self.ready.push_back(number);
        }
    }

    /// Serves the queue whose turn it is.
    fn serve_next(&mut self) {
        let Some(number) = self.ready.pop_front() else { return };
        let Some(Some(seat)) = self.seats.get_mut(number) else { return };
        seat.ready = false;
        match seat.queue.serve() {
            Ok(false) => {}
            Ok(true) => {
                seat.ready = true;
                self.ready.push_back(number);
            }
            Err(error) => self.fail(number, &error),
        }
    }

    /// The queue is out of order until its driver resets it.
    fn fail(&mut self, number: usize, error: &ServeError) {
        let Some(queue) = self.take_off(number) else { return };
        let (key, transport) = (queue.key, Arc::clone(&queue.transport));
        tracing::warn!(device = key.device, queue = key.queue, "queue stopped: {error}");
        self.tally.fault(key.device, error.to_string());
        queue.abandon();
        lock(&transport).needs_reset();
    }

    fn stop_all(&mut self) {
        for number in 0..self.seats.len() {
            if let Some(queue) = self.take_off(number) {
                queue.stop(true, &self.tally);
            }
        }
    }
}
