//! Queues that the vCPU's thread serves in the exits of their kicks.
//!
//! VMMs did this before there were ioeventfds.
//!
//! ```text
//!  kick:        vCPU's thread -------lock--> serve until nothing is left -> back to the guest
//!  completion:  a thread, asleep --> lock--> the same
//! ```
//! For comparison: the vCPU stands still while the device works. The lock is the price that an
//! event loop does not pay.
use crate::host_queue::{HostQueue, Turn};
use crate::queue_key::QueueKey;
use crate::{lock, outlive_pipes};
use paravane_notify::Notifier;
use rustix::event::epoll;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

/// Events taken from epoll at once.
const EVENTS: usize = 32;
/// Token of the notifier that ends the thread.
const QUIT: u64 = u64::MAX;

/// Queues that are served in exits, and a thread for completions.
pub struct Inline {
    shared: Arc<Shared>,
    quit: Notifier,
    thread: Mutex<Option<JoinHandle<()>>>,
}

struct Shared {
    poll: Arc<OwnedFd>,
    queues: Mutex<Vec<Option<Box<HostQueue>>>>,
}

impl Inline {
    /// Starts the thread, without queues.
    ///
    /// # Errors
    /// The host refuses a thread or descriptors.
    pub fn spawn() -> io::Result<Self> {
        let poll = Arc::new(epoll::create(epoll::CreateFlags::CLOEXEC)?);
        let quit = Notifier::new(false).map_err(io::Error::other)?;
        epoll::add(&poll, &quit, epoll::EventData::new_u64(QUIT), epoll::EventFlags::IN)?;
        let shared = Arc::new(Shared { poll, queues: Mutex::default() });
        let of_thread = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("io-inline".into()).spawn(move || {
            outlive_pipes();
            of_thread.run();
        })?;
        Ok(Self { shared, quit, thread: Mutex::new(Some(thread)) })
    }

    /// Takes a queue and serves it once.
    ///
    /// # Errors
    /// The kernel's wait set is full.
    pub fn put_on(&self, mut queue: Box<HostQueue>) -> io::Result<()> {
        let mut queues = lock(&self.shared.queues);
        let number = queues.len() as u64;
        queue.listen(&self.shared.poll, number << 1, number << 1 | 1)?;
        queues.push(Some(queue));
        let number = queues.len() - 1;
        self.shared.serve(&mut queues, number);
        Ok(())
    }

    /// Gives a queue back; `None`: there is no such queue, or it has failed.
    pub fn take_off(&self, key: QueueKey) -> Option<Box<HostQueue>> {
        let mut queues = lock(&self.shared.queues);
        let mut queue =
            queues.iter_mut().find(|queue| queue.as_ref().is_some_and(|queue| queue.key() == key))?.take()?;
        queue.ignore(&self.shared.poll);
        Some(queue)
    }

    /// Serves a queue that was kicked, until nothing is left.
    pub fn kick(&self, key: QueueKey) {
        let mut queues = lock(&self.shared.queues);
        let kicked = (0..).zip(queues.iter_mut()).find_map(|(number, queue)| {
            let queue = queue.as_mut().filter(|queue| queue.key() == key)?;
            queue.kicked_inline();
            Some(number)
        });
        if let Some(number) = kicked {
            self.shared.serve(&mut queues, number);
        }
    }
}

impl Shared {
    fn run(&self) {
        let mut events = Vec::with_capacity(EVENTS);
        loop {
            events.clear();
            match epoll::wait(&self.poll, rustix::buffer::spare_capacity(&mut events), None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return tracing::error!("epoll_wait: {error}"),
            }
            let mut queues = lock(&self.queues);
            for event in &events {
                let token = event.data.u64();
                if token == QUIT {
                    return;
                }
                // No token is used twice, so a late one names nothing.
                let number = usize::try_from(token >> 1).unwrap_or(usize::MAX);
                if let Some(Some(queue)) = queues.get_mut(number) {
                    queue.announce();
                    if token & 1 == 0 {
                        queue.take_kicks();
                    }
                }
                self.serve(&mut queues, number);
            }
        }
    }

    fn serve(&self, queues: &mut [Option<Box<HostQueue>>], number: usize) {
        let Some(slot) = queues.get_mut(number) else { return };
        let Some(queue) = slot else { return };
        loop {
            match queue.serve(true, 0, None) {
                Ok(Turn::More { .. }) => {}
                Ok(Turn::Dry { .. }) => return,
                Err(error) => {
                    if let Some(mut queue) = slot.take() {
                        queue.ignore(&self.poll);
                        queue.fail(&error);
                    }
                    return;
                }
            }
        }
    }
}

impl Drop for Inline {
    fn drop(&mut self) {
        self.quit.signal();
        if let Some(thread) = lock(&self.thread).take()
            && thread.join().is_err()
        {
            tracing::error!("an I/O thread panicked");
        }
    }
}
