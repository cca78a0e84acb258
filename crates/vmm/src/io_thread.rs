//! I/O threads: each owns the queues that were given to it and serves them whenever one of their event
//! file descriptors wakes it.
//!
//! ```text
//!            kick, completion                    nothing progressed
//!  sleeping ------------------> serving ---------------------------------> arm kicks
//!     ^                         ^   |  budget used up: the others first       |  |
//!     |                         |   +-> ready list --+                        |  |
//!     |                         +--------------------+                        |  |
//!     |                         ^------------------- more is available -------+  |
//!     +---------------------------------- the next buffer brings a kick ---------+
//!
//!  start: epoll, then ioeventfd (which signals once), so that no kick is lost
//!  stop:  epoll off, then ioeventfd off, then the notifier tested and served once (unless the device is
//!         being reset), then what is in flight drained, then the handler and its mappings dropped
//! ```
use crate::guard::lock;
use crate::tally::Tally;
use paravane_device::{LiveQueue, QueueHandler, ServeError};
use paravane_notify::{HostNotifier, Interrupts, Notifier, NotifierState, NotifyError};
use paravane_transport::Transport;
use rustix::event::{Timespec, epoll};
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

/// Serves of one queue in a row, before the others get their turn.
const BUDGET: usize = 16;
/// Events taken from epoll at once.
const EVENTS: usize = 32;
/// Token of the control notifier.
const CONTROL: u64 = u64::MAX;
/// How a handler's own descriptor is waited for: each time that it becomes readable, not for as long as it is. A network
/// card that has no buffers must be able to sleep while frames wait.
const NEWS: epoll::EventFlags = epoll::EventFlags::IN.union(epoll::EventFlags::ET);
/// Stack of an I/O thread: no buffers live there.
const STACK: usize = 256 << 10;

/// Names a queue in a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct QueueKey {
    /// Device number.
    pub(crate) device: usize,
    /// Queue index.
    pub(crate) queue: u16,
}

/// All that serving a queue takes.
pub(crate) struct QueueStart {
    /// Whose it is.
    pub(crate) key: QueueKey,
    /// The ring and its memory.
    pub(crate) live: LiveQueue,
    /// The device's part.
    pub(crate) handler: Box<dyn QueueHandler>,
    /// Where kicks arrive.
    pub(crate) notifier: Arc<HostNotifier>,
    /// Whether to ask for an ioeventfd.
    pub(crate) ioeventfd: bool,
    /// The device's interrupts, which know how the driver wants this queue's.
    pub(crate) interrupts: Arc<Interrupts>,
    /// The transport, which is told when the queue fails.
    pub(crate) transport: Arc<Mutex<Box<dyn Transport>>>,
}

enum Message {
    Start(Box<QueueStart>, SyncSender<std::io::Result<()>>),
    Stop { key: QueueKey, complete: bool, done: SyncSender<()> },
    Quit,
}

/// Our end of one I/O thread.
pub(crate) struct IoThread {
    sender: Mutex<Sender<Message>>,
    control: Arc<Notifier>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl IoThread {
    /// Starts a thread that has no queues yet.
    pub(crate) fn spawn(number: usize, tally: Arc<Tally>) -> std::io::Result<Self> {
        let (sender, receiver) = channel();
        let control = Arc::new(Notifier::new(false).map_err(std::io::Error::other)?);
        let poll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&poll, &*control, epoll::EventData::new_u64(CONTROL), epoll::EventFlags::IN)?;
        let mut event_loop =
            EventLoop { poll, control: Arc::clone(&control), receiver, queues: Vec::new(), tally };
        let thread = std::thread::Builder::new()
            .name(format!("io{number}"))
            .stack_size(STACK)
            .spawn(move || event_loop.run())?;
        Ok(Self { sender: Mutex::new(sender), control, thread: Mutex::new(Some(thread)) })
    }

    fn send(&self, message: Message) -> bool {
        let sent = lock(&self.sender).send(message).is_ok();
        self.control.signal();
        sent
    }

    /// Hands a queue over. Returns when its kicks reach the thread.
    ///
    /// # Errors
    /// The kernel's wait set is full, or the thread is gone.
    pub(crate) fn start(&self, start: QueueStart) -> std::io::Result<()> {
        let (done, wait) = sync_channel(1);
        if !self.send(Message::Start(Box::new(start), done)) {
            return Err(std::io::Error::other("the I/O thread has ended"));
        }
        wait.recv().unwrap_or_else(|_| Err(std::io::Error::other("the I/O thread has ended")))
    }

    /// Takes a queue back. When this returns, nothing of it is in flight and its memory is not touched any
    /// more. What was in flight is completed if `complete` is set, else forgotten.
    pub(crate) fn stop(&self, key: QueueKey, complete: bool) {
        let (done, wait) = sync_channel(1);
        if self.send(Message::Stop { key, complete, done }) {
            // An error means that the thread has ended, and with it all its queues.
            let _ = wait.recv();
        }
    }

    /// Ends the thread; queues that it still has are stopped.
    pub(crate) fn quit(&self) {
        self.send(Message::Quit);
        if let Some(thread) = lock(&self.thread).take()
            && thread.join().is_err()
        {
            tracing::error!("an I/O thread panicked");
        }
    }
}

impl Drop for IoThread {
    fn drop(&mut self) {
        self.quit();
    }
}

/// A queue while its thread has it.
struct Owned {
    start: QueueStart,
    /// Signals in the notifier that are our own, not kicks.
    own_signals: u64,
    /// It is to be served without waiting for an event.
    ready: bool,
    /// It has failed and only waits to be stopped.
    failed: bool,
}

struct EventLoop {
    poll: OwnedFd,
    control: Arc<Notifier>,
    receiver: Receiver<Message>,
    queues: Vec<Option<Owned>>,
    tally: Arc<Tally>,
}

impl EventLoop {
    fn run(&mut self) {
        let mut events = Vec::with_capacity(EVENTS);
        loop {
            let ready = self.queues.iter().flatten().any(|queue| queue.ready);
            let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
            events.clear();
            let timeout = if ready { Some(&at_once) } else { None };
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
            for slot in 0..self.queues.len() {
                self.serve(slot);
            }
            // Messages come last: they free and reuse slots that events of this round may still name.
            if control {
                // Taken before the messages are read: a message sent later signals again.
                let _ = self.control.take();
                while let Ok(message) = self.receiver.try_recv() {
                    if !self.obey(message) {
                        self.stop_all();
                        return;
                    }
                }
            }
        }
        self.stop_all();
    }

    fn obey(&mut self, message: Message) -> bool {
        match message {
            Message::Start(start, done) => {
                // A receiver that has gone away does not want to know.
                let _ = done.send(self.start(*start));
            }
            Message::Stop { key, complete, done } => {
                self.stop(|queue| queue.start.key == key, complete);
                let _ = done.send(());
            }
            Message::Quit => return false,
        }
        true
    }

    fn start(&mut self, start: QueueStart) -> std::io::Result<()> {
        let slot = self.queues.iter().position(Option::is_none).unwrap_or_else(|| {
            self.queues.push(None);
            self.queues.len() - 1
        });
        let token = (slot as u64) << 1;
        let notifier = Arc::clone(&start.notifier);
        // What the notifier was born with is answered by the signal that follows: one serve is due anyway.
        let _ = notifier.notifier().take();
        epoll::add(&self.poll, notifier.notifier(), epoll::EventData::new_u64(token), epoll::EventFlags::IN)?;
        if let Some(fd) = start.handler.completion_fd()
            && let Err(error) = epoll::add(&self.poll, fd, epoll::EventData::new_u64(token | 1), NEWS)
        {
            epoll::delete(&self.poll, notifier.notifier())?;
            return Err(error.into());
        }
        let device = start.key.device;
        // After any start every queue is signalled once. An attempt to assign does so itself, also
        // when the host refuses.
        let signalled = start.ioeventfd
            && match notifier.assign() {
                Ok(()) => true,
                Err(error) => {
                    if self.tally.refused() {
                        tracing::warn!(device, "kicks will exit: {error}");
                    }
                    !matches!(error, NotifyError::State { .. })
                }
            };
        if !signalled {
            notifier.notifier().signal();
        }
        self.queues[slot] = Some(Owned { start, own_signals: 1, ready: false, failed: false });
        Ok(())
    }

    fn event(&mut self, token: u64) {
        let slot = usize::try_from(token >> 1).unwrap_or(usize::MAX);
        let Some(Some(queue)) = self.queues.get_mut(slot) else { return };
        if token & 1 == 0 {
            queue.take_kicks(&self.tally);
        }
        queue.ready = !queue.failed;
    }

    fn serve(&mut self, slot: usize) {
        let Some(Some(queue)) = self.queues.get_mut(slot) else { return };
        if !queue.ready {
            return;
        }
        match queue.serve() {
            Ok(more) => queue.ready = more,
            Err(error) => self.fail(slot, &error),
        }
    }

    /// The queue is out of order until its driver resets it.
    fn fail(&mut self, slot: usize, error: &ServeError) {
        let Some(Some(queue)) = self.queues.get_mut(slot) else { return };
        queue.ready = false;
        queue.failed = true;
        let key = queue.start.key;
        tracing::warn!(device = key.device, queue = key.queue, "queue stopped: {error}");
        self.tally.fault(key.device, error.to_string());
        queue.handlers_off(&self.poll);
        queue.start.handler.drain(&mut queue.start.live, false);
        lock(&queue.start.transport).needs_reset();
    }

    fn stop(&mut self, which: impl Fn(&Owned) -> bool, complete: bool) {
        for slot in &mut self.queues {
            if slot.as_ref().is_some_and(&which)
                && let Some(queue) = slot.take()
            {
                queue.stop(&self.poll, &self.tally, complete);
            }
        }
    }

    fn stop_all(&mut self) {
        self.stop(|_| true, true);
    }
}

impl Owned {
    fn take_kicks(&mut self, tally: &Tally) -> u64 {
        let signals = self.start.notifier.notifier().take();
        let own = signals.min(self.own_signals);
        self.own_signals -= own;
        tally.kicked(signals - own);
        signals
    }

    /// Serves until nothing is left (`false`) or the budget is used up (`true`).
    fn serve(&mut self) -> Result<bool, ServeError> {
        let QueueStart { key, live, handler, interrupts, .. } = &mut self.start;
        live.disable_kicks();
        for _ in 0..BUDGET {
            let served = handler.serve(live)?;
            if served.interrupt {
                interrupts.used_buffer(key.queue);
            }
            let idle = served.taken == 0 && served.completed == 0;
            if idle && (!handler.wants_kicks() || !live.arm_kicks()?) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// No event of this queue wakes the thread any more, and its kicks exit again.
    fn handlers_off(&self, poll: &OwnedFd) {
        let notifier = &self.start.notifier;
        if let Err(error) = epoll::delete(poll, notifier.notifier()) {
            tracing::error!("cannot take a kick handler off: {error}");
        }
        if let Some(fd) = self.start.handler.completion_fd()
            && let Err(error) = epoll::delete(poll, fd)
        {
            tracing::error!("cannot take a completion handler off: {error}");
        }
        if notifier.state() == NotifierState::Assigned
            && let Err(error) = notifier.deassign()
        {
            tracing::error!("cannot remove an ioeventfd: {error}");
        }
    }

    fn stop(mut self, poll: &OwnedFd, tally: &Tally, complete: bool) {
        if self.failed {
            return;
        }
        self.handlers_off(poll);
        // A kick may have come before the ioeventfd went.
        let pending = self.take_kicks(tally) > 0 || self.ready;
        if complete
            && pending
            && let Err(error) = self.serve()
        {
            tracing::debug!("the last serve of a queue that is being stopped: {error}");
        }
        let QueueStart { key, live, handler, interrupts, .. } = &mut self.start;
        let in_flight = live.ring().in_flight() > 0;
        handler.drain(live, complete);
        if complete && in_flight && live.ring().error().is_none() {
            // Draining publishes and does not say whether an interrupt is wanted; one too many is harmless.
            interrupts.used_buffer(key.queue);
        }
    }
}
