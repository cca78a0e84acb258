//! Queues in a helper process: same devices, rings, I/O thread and memory.
//!
//! ```text
//!  this process                                  the helper: this program once more, `helper_main`
//!    machine, transports, ioeventfds, irqfds        devices, their queues, an I/O thread
//!    spawn ----- what the devices are (arguments), guest memory, images ---->  makes them
//!    start ----- addresses, kick eventfd, call eventfd ------------------->    QueueStart, put on its thread
//!    stop  <---- done ----------------------------------------------------     taken off, drained
//!    figures <-- kicks, interrupts, CPU time, frames ---------------------
//!    guest's kick ---- ioeventfd ----------------------------------------->    served
//!    guest's interrupt <---- irqfd ---------------------------------------
//! ```
//! Both ends are one program and one user, so they trust each other. That the other has died is an
//! error, or nothing. It is for comparison: a process of another program would speak vhost-user.
mod child;
mod message;

pub use child::helper_main;

use crate::config::{DiskConfig, NetConfig, Network, RunConfig};
use crate::error::RunError;
use crate::lock::lock;
use message::{Answer, Request, kind};
use paravane_attach::{QueueProcess, RemoteQueue};
use paravane_device::net::Totals;
use paravane_dma::Region;
use paravane_io::QueueKey;
use paravane_notify::Notifier;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};

/// First argument of a helper.
const FIRST_ARGUMENT: &str = "serve-queues";

/// Counters of a helper.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct HelperFigures {
    /// Kicks that reached a device.
    pub(crate) kicks: u64,
    /// Interrupts raised.
    pub(crate) interrupts: u64,
    /// CPU seconds of the process.
    pub(crate) cpu_s: f64,
}

/// Our end of a helper. The process ends when this is dropped.
pub(crate) struct Helper {
    socket: Mutex<UnixStream>,
    child: Mutex<Child>,
}

impl Helper {
    /// Starts a helper with the disks and cards of `config`, in this order.
    ///
    /// # Errors
    /// The host refuses.
    pub(crate) fn spawn(
        config: &RunConfig,
        region: &Arc<Region>,
        images: &[BorrowedFd<'_>],
    ) -> Result<Self, RunError> {
        let refused = |source| RunError::Os { what: "start the helper process", source };
        let (ours, theirs) = UnixStream::pair().map_err(refused)?;
        let mut command = Command::new(std::env::current_exe().map_err(refused)?);
        command.arg(FIRST_ARGUMENT).arg(region.size().to_string());
        command.args(config.disks.iter().map(disk_argument)).args(config.nets.iter().map(net_argument));
        let child = command
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            .spawn()
            .map_err(refused)?;
        let helper = Self { socket: Mutex::new(ours), child: Mutex::new(child) };
        helper.tell(&Request::of(kind::MEMORY), region.fd()).map_err(refused)?;
        for image in images {
            helper.tell(&Request::of(kind::IMAGE), *image).map_err(refused)?;
        }
        // The answer comes when the devices are made.
        helper.ask(&Request::of(kind::FIGURES), None).map_err(refused)?;
        Ok(helper)
    }

    /// Counters so far; zeroes if the helper has ended.
    pub(crate) fn figures(&self) -> HelperFigures {
        let Ok(answer) = self.ask(&Request::of(kind::FIGURES), None) else { return HelperFigures::default() };
        let Answer { kicks, interrupts, cpu_ns, .. } = answer;
        HelperFigures { kicks, interrupts, cpu_s: cpu_ns as f64 * 1e-9 }
    }

    /// Counters of card `device` so far; zeroes if the helper has ended.
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
            _ => Err(io::Error::other("the helper process refuses; its message is on stderr")),
        }
    }
}

impl QueueProcess for Helper {
    fn start(&self, queue: &RemoteQueue, kick: &Notifier, call: &Notifier) -> io::Result<()> {
        let RemoteQueue { key, features, addresses } = *queue;
        let request = Request {
            device: key.device as u32,
            queue: key.queue.into(),
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

    fn stop(&self, key: QueueKey, complete: bool) {
        let request = Request {
            device: key.device as u32,
            queue: key.queue.into(),
            complete: complete.into(),
            ..Request::of(kind::STOP)
        };
        if let Err(error) = self.ask(&request, None) {
            let QueueKey { device, queue } = key;
            tracing::error!(device, queue, "the helper process does not stop the queue: {error}");
        }
    }
}

impl Drop for Helper {
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
        Network::EchoPeer => "echo-peer",
        Network::Sink => "sink",
        Network::Source => "source",
        // Refused before.
        Network::Tap(_) | Network::TapFds(_) | Network::Link(_) => "other",
    };
    let NetConfig { queues, frames, size, .. } = net;
    format!("net,{far},{queues},{frames},{size},{}", net.reply())
}

/// Parses what [`net_argument`] writes; `None`: it is something else.
fn net_of(argument: &str) -> Option<NetConfig> {
    let mut parts = argument.strip_prefix("net,")?.split(',');
    let network = match parts.next()? {
        "echo" => Network::Echo,
        "echo-peer" => Network::EchoPeer,
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
        for network in [Network::Echo, Network::EchoPeer, Network::Sink, Network::Source] {
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
