//! Queues in another process: same device, rings, I/O thread and memory.
//!
//! ```text
//!  this process                                  the other: this program once more, `child_main`
//!    machine, transport, ioeventfds, irqfds         a device, its queues, an I/O thread
//!    spawn ----- what the device is (arguments), its image --------------->  makes it
//!    start ----- guest memory, addresses, kick eventfd, call eventfd ----->  QueueStart, put on its thread
//!    stop  <---- position -------------------------------------------------  taken off, drained
//!    figures <-- kicks, interrupts, CPU time, frames ----------------------
//!    guest's kick ---- ioeventfd ----------------------------------------->  served
//!    guest's interrupt <---- irqfd ----------------------------------------
//! ```
//! Both ends are one program and one user, so they trust each other. A process of another program
//! would speak vhost-user.
mod child;
mod message;

pub(crate) use child::child_main;

use crate::guest::{Card, OneDevice, Peer};
use message::{Answer, Request, kind};
use paravane_device::net::Totals;
use paravane_io::{Loan, QueueBackend};
use paravane_vmm::{QueueServer, ServerFigures};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// First argument of the process.
const FIRST_ARGUMENT: &str = "serve-queues";

/// The process, as the machine sees it.
#[derive(Debug)]
pub(super) struct Process(Arc<End>);

/// Our end. The process ends when this is dropped.
#[derive(Debug)]
struct End {
    socket: Mutex<UnixStream>,
    child: Mutex<Child>,
    /// Queues that the machine has asked it to serve, and those that it has served.
    asked: AtomicUsize,
    started: AtomicUsize,
}

impl Process {
    /// Starts a process that serves `device` of a machine with `memory` bytes of RAM. `image`: of a disk.
    ///
    /// # Errors
    /// The host refuses.
    pub(super) fn spawn(memory: u64, device: OneDevice<'_>, image: BorrowedFd<'_>) -> io::Result<Arc<Self>> {
        let (ours, theirs) = UnixStream::pair()?;
        let device = match device {
            OneDevice::Disk(_) => DISK.to_owned(),
            OneDevice::Card(card) => net_argument(&card),
        };
        let child = Command::new(std::env::current_exe()?)
            .args([FIRST_ARGUMENT, &memory.to_string(), &device])
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            .spawn()?;
        let (asked, started) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let end = End { socket: Mutex::new(ours), child: Mutex::new(child), asked, started };
        end.tell(&Request::of(kind::IMAGE), image)?;
        // The answer comes when the device is made.
        end.ask(&Request::of(kind::FIGURES), None)?;
        Ok(Arc::new(Self(Arc::new(end))))
    }

    /// Checks that it has served all queues.
    ///
    /// # Errors
    /// This process has served some.
    pub(super) fn check(&self) -> Result<(), String> {
        // Relaxed: the machine's threads have ended.
        let [asked, started] = [&self.0.asked, &self.0.started].map(|count| count.load(Ordering::Relaxed));
        if asked > 0 && asked == started {
            return Ok(());
        }
        Err(format!("the other process served {started} of {asked} queues"))
    }
}

impl QueueServer for Process {
    fn backend(&self, _device: usize, queue: u16) -> Box<dyn QueueBackend> {
        self.0.asked.fetch_add(1, Ordering::Relaxed);
        Box::new(Queue { end: Arc::clone(&self.0), queue })
    }

    fn figures(&self) -> ServerFigures {
        let Answer { kicks, interrupts, cpu_ns, .. } = self.0.figures();
        ServerFigures { kicks, interrupts, cpu_s: cpu_ns as f64 * 1e-9 }
    }

    fn totals(&self, _device: usize) -> Option<Totals> {
        let Answer { transmitted, received, .. } = self.0.figures();
        Some(Totals { transmitted, received, ..Totals::default() })
    }
}

impl End {
    fn socket(&self) -> MutexGuard<'_, UnixStream> {
        self.socket.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell(&self, request: &Request, fd: BorrowedFd<'_>) -> io::Result<()> {
        message::send(&self.socket(), request, Some(fd))
    }

    fn ask(&self, request: &Request, fd: Option<BorrowedFd<'_>>) -> io::Result<Answer> {
        let socket = self.socket();
        message::send(&socket, request, fd)?;
        let (answer, _): (Answer, _) = message::receive(&socket)?;
        match answer.refused {
            0 => Ok(answer),
            _ => Err(io::Error::other("the other process refuses; its message is on stderr")),
        }
    }

    /// Counters so far; zeroes if the process has ended.
    fn figures(&self) -> Answer {
        self.ask(&Request::of(kind::FIGURES), None).unwrap_or_default()
    }
}

impl Drop for End {
    fn drop(&mut self) {
        let _ = self.socket().shutdown(std::net::Shutdown::Both);
        // It ends by itself when the socket does.
        let _ = self.child.lock().unwrap_or_else(PoisonError::into_inner).wait();
    }
}

/// A queue that the process serves.
struct Queue {
    end: Arc<End>,
    queue: u16,
}

impl QueueBackend for Queue {
    fn name(&self) -> &'static str {
        "another process"
    }

    fn start(&mut self, loan: &mut Loan<'_>) -> io::Result<()> {
        let message = loan.message.ok_or_else(|| io::Error::other("its interrupts have no eventfd"))?;
        let [region] = loan.memory.regions() else {
            return Err(io::Error::other("guest memory is more than one region"));
        };
        let request = Request {
            queue: self.queue.into(),
            size: loan.addresses.size.into(),
            desc: loan.addresses.desc,
            driver: loan.addresses.driver,
            device_area: loan.addresses.device,
            features: loan.features,
            base: loan.parked.state().vring_base(),
            ..Request::of(kind::START)
        };
        let Some(file) = region.fd() else { return Err(io::Error::other("guest memory cannot be shared")) };
        self.end.tell(&Request::of(kind::MEMORY), file)?;
        self.end.tell(&Request::of(kind::KICK), loan.kick.as_fd())?;
        self.end.ask(&request, Some(message.as_fd()))?;
        self.end.started.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn stop(&mut self) -> io::Result<u32> {
        let request = Request { queue: self.queue.into(), ..Request::of(kind::STOP) };
        Ok(self.end.ask(&request, None)?.base as u32)
    }
}

/// Argument for a disk.
const DISK: &str = "disk";

fn net_argument(&Card { peer, frames, size, reply }: &Card) -> String {
    let peer = match peer {
        Peer::Echo => "echo-peer",
        Peer::Sink => "sink",
        Peer::Source => "source",
    };
    format!("net,{peer},{frames},{size},{reply}")
}

/// Parses what [`net_argument`] writes; `None`: it is something else.
fn net_of(argument: &str) -> Option<Card> {
    let mut parts = argument.strip_prefix("net,")?.split(',');
    let peer = match parts.next()? {
        "echo-peer" => Peer::Echo,
        "sink" => Peer::Sink,
        "source" => Peer::Source,
        _ => return None,
    };
    let frames = parts.next()?.parse().ok()?;
    let size = parts.next()?.parse().ok()?;
    let reply = parts.next()?.parse().ok()?;
    Some(Card { peer, frames, size, reply })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_card_survives_the_command_line() {
        for peer in [Peer::Echo, Peer::Sink, Peer::Source] {
            let card = Card { peer, frames: 77, size: 1514, reply: 60 };
            assert_eq!(net_of(&net_argument(&card)), Some(card));
        }
        for nonsense in ["", "disk", "net", "net,far,1,60,60", "net,sink,1,60", "net,sink,x,60,60"] {
            assert_eq!(net_of(nonsense), None, "{nonsense}");
        }
    }
}
