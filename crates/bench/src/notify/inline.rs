//! Queues that the vCPU's thread serves in the exits of their kicks.
//!
//! VMMs did this before there were ioeventfds.
//!
//! ```text
//!  kick:        vCPU's thread -------lock--> serve until nothing is left -> back to the guest
//!  completion:  a thread, asleep --> lock--> the same
//! ```
//! The vCPU stands still while the device works. The lock is the price that an event loop does not pay.
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::unistd::Pid;
use paravane_device::{MappedQueue, QueueHandler, Rest, ServeError, WakeSet};
use paravane_dma::Memory;
use paravane_io::{Loan, QueueBackend, QueueEvents};
use paravane_notify::Notifier;
use paravane_vmm::{QueueServer, ServerFigures};
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

/// Token of the notifier that ends the thread.
const STOP: u64 = 0;
/// Token of the handler's descriptors.
const NEWS: u64 = 1;

/// Serves the queues of a machine in the exits of their kicks.
#[derive(Debug)]
pub(super) struct Inline {
    /// CPUs for the threads of completions. A queue starts on the vCPU's thread, which may be elsewhere.
    cpus: CpuSet,
}

impl Inline {
    /// With threads where the caller is.
    ///
    /// # Errors
    /// The host does not say where that is.
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { cpus: sched_getaffinity(Pid::from_raw(0))? })
    }
}

impl QueueServer for Inline {
    fn backend(&self, _device: usize, _queue: u16) -> Box<dyn QueueBackend> {
        Box::new(Queue { at_work: None, cpus: self.cpus })
    }

    fn figures(&self) -> ServerFigures {
        // The machine counts kicks and interrupts as those of its own threads.
        ServerFigures::default()
    }
}

/// A queue; at work while it is lent.
struct Queue {
    at_work: Option<AtWork>,
    cpus: CpuSet,
}

struct AtWork {
    served: Arc<Mutex<Served>>,
    stop: Notifier,
    thread: Option<JoinHandle<()>>,
}

struct Served {
    number: u16,
    /// `None`: it has stopped.
    queue: Option<MappedQueue>,
    handler: Option<Box<dyn QueueHandler>>,
    events: Arc<dyn QueueEvents>,
}

fn lock(served: &Mutex<Served>) -> std::sync::MutexGuard<'_, Served> {
    served.lock().unwrap_or_else(PoisonError::into_inner)
}

impl QueueBackend for Queue {
    fn name(&self) -> &'static str {
        "the vCPU"
    }

    fn start(&mut self, loan: &mut Loan<'_>) -> io::Result<()> {
        let memory = Memory::new(loan.memory.regions().to_vec()).map_err(io::Error::other)?;
        let (size, position) = (loan.addresses.size, loan.parked.state());
        let handle = memory.handle();
        let queue = MappedQueue::resume(loan.addresses, size, loan.features, handle, Some(position), None);
        let queue = Some(queue.map_err(io::Error::other)?);
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        let stop = Notifier::new(false).map_err(io::Error::other)?;
        epoll.add(&stop, EpollEvent::new(EpollFlags::EPOLLIN, STOP))?;
        let wakes = WakeSet::new(&Arc::new(epoll.0.try_clone()?), NEWS);
        let handler = loan.handler.as_mut().ok_or_else(|| io::Error::other("its handler is away"))?;
        handler.register(Some(&wakes))?;
        let served = Served { number: loan.queue, queue, handler: None, events: Arc::clone(loan.events) };
        let served = Arc::new(Mutex::new(served));
        let of_thread = Arc::clone(&served);
        let thread = std::thread::Builder::new().name("io-inline".into());
        let cpus = self.cpus;
        let thread = thread.spawn(move || {
            // Where the host refuses, the thread runs where the vCPU's does.
            let _ = sched_setaffinity(Pid::from_raw(0), &cpus);
            wait(&epoll, &of_thread);
        });
        let thread = thread.inspect_err(|_| {
            let _ = handler.register(None);
        })?;
        {
            let mut served = lock(&served);
            served.handler = loan.handler.take();
            served.serve();
        }
        self.at_work = Some(AtWork { served, stop, thread: Some(thread) });
        Ok(())
    }

    fn kick(&mut self) -> bool {
        let Some(at_work) = &self.at_work else { return false };
        let mut served = lock(&at_work.served);
        served.events.kicked(served.number, 1);
        served.serve();
        true
    }

    fn stop(&mut self) -> io::Result<u32> {
        let at_work = self.at_work.as_mut().ok_or_else(|| io::Error::other("it is not at work"))?;
        at_work.stop.signal();
        if let Some(thread) = at_work.thread.take() {
            thread.join().map_err(|_| io::Error::other("its thread has panicked"))?;
        }
        let mut served = lock(&at_work.served);
        let Served { number, queue, handler, events } = &mut *served;
        let (Some(mut queue), Some(handler)) = (queue.take(), handler) else {
            return Err(io::Error::other("it has failed"));
        };
        let _ = handler.register(None);
        if handler.drain(&mut queue, true).interrupt {
            events.used_buffer(*number);
        }
        Ok(queue.park().map_err(io::Error::other)?.state().vring_base())
    }

    fn handler(&mut self) -> Option<Box<dyn QueueHandler>> {
        lock(&self.at_work.take()?.served).handler.take()
    }
}

/// Serves a queue at events of its handler, until it stops.
fn wait(epoll: &Epoll, served: &Mutex<Served>) {
    let mut events = [EpollEvent::empty(); 4];
    loop {
        let count = match epoll.wait(&mut events, EpollTimeout::NONE) {
            Err(nix::errno::Errno::EINTR) => continue,
            Err(_) => return,
            Ok(count) => count,
        };
        if events[..count].iter().any(|event| event.data() == STOP) {
            return;
        }
        lock(served).serve();
    }
}

impl Served {
    /// Serves until nothing is left.
    fn serve(&mut self) {
        if let Err(error) = self.try_serve() {
            self.events.failed(self.number, &error);
            if let (Some(mut queue), Some(handler)) = (self.queue.take(), &mut self.handler) {
                handler.drain(&mut queue, false);
            }
        }
    }

    fn try_serve(&mut self) -> Result<(), ServeError> {
        let Self { number, queue: Some(queue), handler: Some(handler), events } = self else { return Ok(()) };
        queue.disable_kicks();
        loop {
            let served = handler.serve(queue)?;
            if served.interrupt {
                events.used_buffer(*number);
            }
            if served.taken + served.completed == 0 {
                let rest = handler.rest(true);
                if rest != Rest::Serve && !(rest.kicks() && queue.arm_kicks()?) {
                    return Ok(());
                }
            }
        }
    }
}
