//! What a thread does while others may take its event loop.
//!
//! ```text
//!   thread:    takes a queue out -- offers the loop -- serves the queue ------- takes the loop: puts the queue back
//!                                        |             '-- blocked --.    '---- has lost it: sends the queue back
//!   watcher:                             '-- takes the loop <--------'              |
//!   spare thread:                                  '-- serves the other queues -----'-- serves it, too
//! ```
//! A page fault on memory of a client lasts as long as the client likes: while it punches holes into a
//! file of many gigabytes, for instance. So the code that reads or writes such memory runs while the
//! rest of the loop is offered ([`Baton`]): a queue, and its thread, are all that a client can hold up.
//!
//! Until the queue is back, no other queue of its device is served: each would cost a thread.
use super::parts::{Entry, EventLoop, Lent, Message, Returned, Setting, State, Task, Tenure};
use crate::activity::Activity;
use crate::caught;
use crate::counters::Counters;
use crate::host_queue::HostQueue;
use paravane_device::{LogDevice, ServeError};
use paravane_notify::{Baton, Notifier};
use parking_lot::Mutex;
use std::mem::ManuallyDrop;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::mpsc::Sender;
use std::time::Duration;

impl Setting {
    pub(super) fn new(
        sender: Sender<Message>,
        control: Notifier,
        longest_poll: Duration,
        activity: Option<Arc<Activity>>,
        epoll: Arc<OwnedFd>,
    ) -> Self {
        Self {
            sender: Mutex::new(sender),
            control,
            longest_poll,
            counters: Counters::default(),
            activity,
            epoll,
            baton: Mutex::default(),
            blocked: Mutex::default(),
            thread: AtomicI32::new(0),
            ended: AtomicBool::new(false),
        }
    }

    /// Queues a message and wakes the loop. An error means that the loop has ended.
    pub(crate) fn send(&self, message: Message) -> Result<(), Message> {
        let sent = self.sender.lock().send(message);
        self.control.signal();
        sent.map_err(|error| error.0)
    }

    /// Takes the loop from a thread that may be blocked, if it offers it. The caller has it run.
    pub(crate) fn take_over(&self) -> Option<Box<EventLoop>> {
        let baton = Arc::clone(&self.baton.lock());
        let event_loop = baton.take()?;
        if let Some(lent) = &event_loop.lent {
            self.blocked.lock().push(lent.device);
        }
        Some(event_loop)
    }

    /// Devices that block threads which have lost the loop.
    pub(crate) fn blocked(&self) -> Vec<usize> {
        self.blocked.lock().clone()
    }

    /// Kernel's number of the thread that has the loop.
    pub(crate) fn thread(&self) -> i32 {
        // Relaxed: it names a thread and orders nothing.
        self.thread.load(Ordering::Relaxed)
    }

    /// Waits until a thread runs the loop.
    pub(crate) fn wait_for_start(&self) {
        while self.thread() == 0 {
            std::thread::sleep(Duration::from_micros(20));
        }
    }

    /// Whether the loop has ended.
    pub(crate) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// Runs the loop on this thread, until it ends or another thread has it.
    pub(crate) fn run(&self, event_loop: Box<EventLoop>) {
        let baton = self.activity.is_some().then(Arc::<Baton<EventLoop>>::default);
        if let Some(baton) = &baton {
            *self.baton.lock() = Arc::clone(baton);
        }
        self.thread.store(rustix::thread::gettid().as_raw_nonzero().get(), Ordering::Relaxed);
        let tenure = Tenure { setting: self, baton };
        let lost = match caught(|| event_loop.run(&tenure)) {
            Ok(ran) => ran.is_none(),
            Err(words) => {
                tracing::error!("an I/O thread panicked: {words}");
                false
            }
        };
        if !lost {
            // Pairs with the load in `has_ended`: the queues have ended.
            self.ended.store(true, Ordering::Release);
        }
    }
}

impl std::fmt::Debug for Setting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Setting").field("thread", &self.thread()).finish_non_exhaustive()
    }
}

impl Tenure<'_> {
    /// Calls `work` while others may take the loop. `None`: one has.
    ///
    /// Then `work`'s queue is sent to the loop.
    fn without<T>(
        &self,
        mut event_loop: Box<EventLoop>,
        lent: Lent,
        work: impl FnOnce() -> (Option<Box<HostQueue>>, T),
    ) -> Option<(Box<EventLoop>, Option<Box<HostQueue>>, T)> {
        let Lent { number, device } = lent;
        self.setting.counters.begin_use(device);
        let Some(baton) = &self.baton else {
            let (queue, done) = work();
            self.setting.counters.end_use();
            return Some((event_loop, queue, done));
        };
        event_loop.lent = Some(Lent { number, device });
        baton.offer(event_loop);
        let (queue, done) = work();
        if let Some(mut event_loop) = baton.take() {
            event_loop.lent = None;
            self.setting.counters.end_use();
            return Some((event_loop, queue, done));
        }
        LogDevice::set(None);
        let message = Message::Back(Returned { lent: Lent { number, device }, queue });
        if let Err(Message::Back(Returned { queue: Some(queue), .. })) = self.setting.send(message) {
            end(queue, &self.setting.epoll, "the I/O thread has ended");
        }
        None
    }
}

impl EventLoop {
    /// Calls `work` with a queue while others may take the loop. `None`: one has.
    ///
    /// A queue that fails or panics ends. `Some((_, None))`: it has.
    pub(super) fn lend<T>(
        mut self: Box<Self>,
        number: usize,
        tenure: &Tenure<'_>,
        work: impl FnOnce(&mut HostQueue) -> Result<T, ServeError>,
    ) -> Option<(Box<Self>, Option<T>)> {
        let Some(Some(entry)) = self.entries.get_mut(number) else { return Some((self, None)) };
        let Some(queue) = entry.queue.take() else { return Some((self, None)) };
        let lent = Lent { number: Some(number), device: entry.key.device };
        let epoll = &tenure.setting.epoll;
        let (mut this, queue, done) = tenure.without(self, lent, || guarded(queue, epoll, work))?;
        match (queue, this.entries.get_mut(number)) {
            (Some(queue), Some(Some(entry))) => entry.queue = Some(queue),
            _ => drop(this.remove(number)),
        }
        Some((this, done))
    }

    /// Runs the tasks of devices that block no thread. `None`: another thread has the loop.
    pub(super) fn run_tasks(self: Box<Self>, tenure: &Tenure<'_>) -> Option<Box<Self>> {
        let mut this = self;
        while let Some(at) = this.tasks.iter().position(|(device, _)| !this.blocked.contains(device)) {
            let (device, task) = this.tasks.remove(at);
            this = this.run_task(device, task, tenure)?;
        }
        Some(this)
    }

    /// Runs a task of a device while others may take the loop. `None`: one has.
    pub(super) fn run_task(
        self: Box<Self>,
        device: usize,
        task: Task,
        tenure: &Tenure<'_>,
    ) -> Option<Box<Self>> {
        tenure.setting.counters.count_turn();
        let run = || {
            if let Err(words) = caught(task) {
                tracing::error!("a task on an I/O thread panicked: {words}");
            }
            (None, ())
        };
        tenure.without(self, Lent { number: None, device }, run).map(|(this, ..)| this)
    }

    /// Goes on with a loop that another thread has offered.
    pub(super) fn go_on(&mut self, tenure: &Tenure<'_>) {
        let Some(Lent { number, device }) = self.lent.take() else { return };
        tenure.setting.counters.end_use();
        self.named = None;
        self.looked = None;
        self.blocked.push(device);
        let name = number
            .and_then(|number| self.set_aside(number, State::Away))
            .and_then(|entry| entry.name.clone());
        let _named = LogDevice::enter(name);
        tracing::debug!("an I/O thread waits for memory of the client; another one serves the other devices");
    }

    /// Takes back what a thread has that has lost the loop.
    pub(super) fn take_back(&mut self, returned: Returned, setting: &Setting) {
        let Returned { lent: Lent { number, device }, queue } = returned;
        for blocked in [&mut self.blocked, &mut *setting.blocked.lock()] {
            if let Some(at) = blocked.iter().position(|&other| other == device) {
                blocked.swap_remove(at);
            }
        }
        if let Some(number) = number {
            self.put_back(number, queue);
            self.renew_one(number, setting);
        }
        if self.blocked.contains(&device) {
            return;
        }
        for number in 0..self.entries.len() {
            if let Some(Some(entry)) = self.entries.get_mut(number)
                && entry.key.device == device
                && entry.state == State::Held
            {
                self.make_ready(number);
            }
        }
    }

    fn put_back(&mut self, number: usize, queue: Option<Box<HostQueue>>) {
        let Some(Some(entry)) = self.entries.get_mut(number) else { return };
        let has_ended = queue.is_none();
        entry.queue = queue;
        if let Some(wanted) = entry.wanted.take() {
            let queue = self.take_off(number);
            // A receiver that has gone away needs no answer.
            drop(wanted.send(queue));
        } else if has_ended {
            drop(self.remove(number));
        } else {
            // What came meanwhile was ignored.
            if let Some(queue) = &mut entry.queue {
                queue.announce();
                queue.take_kicks();
            }
            self.make_ready(number);
        }
    }
}

/// The loop ends by itself only without queues.
impl Drop for EventLoop {
    fn drop(&mut self) {
        for Entry { queue, wanted, .. } in self.entries.drain(..).flatten() {
            drop(wanted);
            if let Some(queue) = queue {
                end(queue, &self.epoll, "the I/O thread has panicked");
            }
        }
    }
}

/// Calls `work` with a queue, which ends if that fails or panics.
fn guarded<T>(
    queue: Box<HostQueue>,
    epoll: &OwnedFd,
    work: impl FnOnce(&mut HostQueue) -> Result<T, ServeError>,
) -> (Option<Box<HostQueue>>, Option<T>) {
    // A panic must not drop it: the host may still write to its memory.
    let mut queue = ManuallyDrop::new(queue);
    match caught(|| work(&mut queue)) {
        Ok(Ok(done)) => (Some(ManuallyDrop::into_inner(queue)), Some(done)),
        Ok(Err(error)) => {
            fail(ManuallyDrop::into_inner(queue), epoll, &error);
            (None, None)
        }
        Err(words) => {
            tracing::error!("an I/O thread panicked: {words}");
            end(ManuallyDrop::into_inner(queue), epoll, &words);
            (None, None)
        }
    }
}

/// Ends a queue that has failed.
fn fail(mut queue: Box<HostQueue>, epoll: &OwnedFd, error: &ServeError) {
    let (number, events) = (queue.key().queue, queue.events());
    let failed = caught(move || {
        queue.ignore(epoll);
        queue.fail(error);
    });
    if let Err(words) = failed {
        tracing::error!("queue cannot be stopped after an error: {words}");
        events.panicked(number, &words);
    }
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
