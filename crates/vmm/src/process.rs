//! Queues that another process owns: the same devices, rings and I/O thread, on the same memory.
//!
//! ```text
//!  this process                                  the owner: this program once more, `owner_main`
//!    machine, transports, ioeventfds, irqfds        devices, their queues, an I/O thread
//!    spawn ----- what the devices are (arguments), guest memory, images ---->  makes them
//!    start ----- addresses, kick eventfd, call eventfd ------------------->    MappedQueue::start, put on its thread
//!    stop  <---- done ----------------------------------------------------     taken off, drained
//!    figures <-- kicks, interrupts, CPU time, frames ---------------------
//!    guest's kick ---- ioeventfd ----------------------------------------->    served
//!    guest's interrupt <---- irqfd ---------------------------------------
//! ```
//! Both ends are one program and one user, so neither mistrusts the other; that the other dies is an error, or nothing.
//! It is for comparison: a process of another program would speak vhost-user.
mod message;
mod owner;

pub use owner::owner_main;

use crate::config::{DiskConfig, NetConfig, Network, RunConfig};
use crate::error::RunError;
use crate::guard::lock;
use message::{Answer, Request, kind};
use paravane_device::net::Totals;
use paravane_dma::Region;
use paravane_io::QueueKey;
use paravane_notify::Notifier;
use paravane_spec::queue::QueueAddresses;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};

/// The first argument of an owner.
const GUARD: &str = "own-queues";

/// One queue, as the owner is told.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QueueToStart {
    pub(crate) device: usize,
    pub(crate) queue: u16,
    pub(crate) max_size: u16,
    pub(crate) features: u64,
    pub(crate) addresses: QueueAddresses,
}

/// What the owner has counted.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct OwnerFigures {
    /// Kicks that reached a device.
    pub(crate) kicks: u64,
    /// Interrupts raised.
    pub(crate) interrupts: u64,
    /// CPU seconds of the process.
    pub(crate) cpu_s: f64,
}

/// Our end of the process. Dropped, it ends.
pub(crate) struct Process {
    socket: Mutex<UnixStream>,
    child: Mutex<Child>,
}

impl Process {
    /// Starts the owner of the disks and cards of `config`, which are its devices in this order.
    ///
    /// # Errors
    /// The host refuses.
    pub(crate) fn spawn(
        config: &RunConfig,
        region: &Arc<Region>,
        images: &[BorrowedFd<'_>],
    ) -> Result<Self, RunError> {
        let refused = |source| RunError::Os { what: "start the queues' owner", source };
        let (ours, theirs) = UnixStream::pair().map_err(refused)?;
        let mut command = Command::new(std::env::current_exe().map_err(refused)?);
        command.arg(GUARD).arg(region.size().to_string());
        command.args(config.disks.iter().map(disk_argument)).args(config.nets.iter().map(net_argument));
        let child = command
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            .spawn()
            .map_err(refused)?;
        let process = Self { socket: Mutex::new(ours), child: Mutex::new(child) };
        process.tell(&Request::of(kind::MEMORY), region.fd()).map_err(refused)?;
        for image in images {
            process.tell(&Request::of(kind::IMAGE), *image).map_err(refused)?;
        }
        // When this is answered it has made its devices.
        process.ask(&Request::of(kind::FIGURES), None).map_err(refused)?;
        Ok(process)
    }

    /// Hands a queue over; its kicks come by `kick`, and it interrupts by `call`.
    ///
    /// # Errors
    /// The owner refuses it, or is gone.
    pub(crate) fn start(&self, start: &QueueToStart, kick: &Notifier, call: &Notifier) -> io::Result<()> {
        let QueueToStart { device, queue, max_size, features, addresses } = *start;
        let request = Request {
            device: device as u32,
            queue: queue.into(),
            max_size: max_size.into(),
            size: addresses.size.into(),
            desc: addresses.desc,
            driver: addresses.driver,
            device_area: addresses.device,
            features,
            ..Request::of(kind::START)
        };
        self.tell(&Request::of(kind::KICK), kick.as_fd())?;
        self.ask(&request, Some(call.as_fd())).map(drop)
    }

    /// Takes a queue back: when this returns, nothing of it is in flight, unless the owner is gone.
    pub(crate) fn stop(&self, key: QueueKey, complete: bool) {
        let request = Request {
            device: key.device as u32,
            queue: key.queue.into(),
            complete: complete.into(),
            ..Request::of(kind::STOP)
        };
        if let Err(error) = self.ask(&request, None) {
            tracing::error!(
                device = key.device,
                queue = key.queue,
                "the queue's owner does not stop it: {error}"
            );
        }
    }

    /// What it has counted so far; nothing if it is gone.
    pub(crate) fn figures(&self) -> OwnerFigures {
        let Ok(answer) = self.ask(&Request::of(kind::FIGURES), None) else { return OwnerFigures::default() };
        let Answer { kicks, interrupts, cpu_ns, .. } = answer;
        OwnerFigures { kicks, interrupts, cpu_s: cpu_ns as f64 * 1e-9 }
    }

    /// What card `device` has counted so far; nothing if the owner is gone.
    pub(crate) fn totals(&self, device: usize) -> Totals {
        let request = Request { device: device as u32, ..Request::of(kind::FIGURES) };
        let Ok(Answer { transmitted, received, .. }) = self.ask(&request, None) else {
            return Totals::default();
        };
        Totals { transmitted, received, ..Totals::default() }
    }

    fn tell(&self, request: &Request, fd: BorrowedFd<'_>) -> io::Result<()> {
        message::send(&lock(&self.socket), request, Some(fd))
    }

    fn ask(&self, request: &Request, fd: Option<BorrowedFd<'_>>) -> io::Result<Answer> {
        let socket = lock(&self.socket);
        message::send(&socket, request, fd)?;
        let (answer, _): (Answer, _) = message::receive(&socket)?;
        match answer.refused {
            0 => Ok(answer),
            _ => Err(io::Error::other("it refuses; what it has to say is on stderr")),
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = lock(&self.socket).shutdown(std::net::Shutdown::Both);
        // It ends by itself when the socket does.
        let _ = lock(&self.child).wait();
    }
}

fn disk_argument(disk: &DiskConfig) -> String {
    format!("disk,{}", u8::from(disk.read_only))
}

fn net_argument(net: &NetConfig) -> String {
    let far = match net.network {
        Network::Echo => "echo",
        Network::Station => "station",
        Network::Sink => "sink",
        Network::Source => "source",
        // Refused before.
        Network::Tap(_) | Network::TapFds(_) | Network::Link(_) => "other",
    };
    let NetConfig { queues, frames, size, .. } = net;
    format!("net,{far},{queues},{frames},{size},{}", net.reply())
}

/// What [`net_argument`] has written; `None` if it is nothing of the kind.
fn net_of(argument: &str) -> Option<NetConfig> {
    let mut parts = argument.strip_prefix("net,")?.split(',');
    let network = match parts.next()? {
        "echo" => Network::Echo,
        "station" => Network::Station,
        "sink" => Network::Sink,
        "source" => Network::Source,
        _ => return None,
    };
    let queues = parts.next()?.parse().ok()?;
    let frames = parts.next()?.parse().ok()?;
    let size = parts.next()?.parse().ok()?;
    let reply = Some(parts.next()?.parse().ok()?);
    Some(NetConfig { network, queues, frames, size, reply, ..NetConfig::default() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_card_survives_the_command_line() {
        for network in [Network::Echo, Network::Station, Network::Sink, Network::Source] {
            let net = NetConfig {
                network,
                queues: 3,
                frames: 77,
                size: 1514,
                reply: Some(60),
                ..NetConfig::default()
            };
            assert_eq!(net_of(&net_argument(&net)), Some(net));
        }
        for nonsense in ["", "disk,0", "net", "net,far,1,1,60,60", "net,echo,1,1,60", "net,echo,x,1,60,60"] {
            assert_eq!(net_of(nonsense), None, "{nonsense}");
        }
    }
}
