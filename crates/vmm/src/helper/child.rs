//! The helper process.
use super::message::{self, Answer, Request, kind};
use super::{FIRST_ARGUMENT, net_of};
use crate::machine::footprint;
use crate::machine::nets;
use paravane_device::blk::{Blk, BlkConfig};
use paravane_device::net::Counters;
use paravane_device::{Device, ServeError};
use paravane_dma::{Backing, Memory, Region, RegionConfig};
use paravane_io::{IoThread, QueueEvents, QueueKey, QueueStart};
use paravane_notify::{HostNotifier, Notifier};
use paravane_spec::queue::QueueAddresses;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Serves queues until the parent ends; `None`: this is no helper process.
///
/// Call it first thing in `main`.
#[must_use]
pub fn helper_main() -> Option<ExitCode> {
    // Those of other processes may be no text.
    let mut arguments = std::env::args_os().skip(1);
    if arguments.next()? != FIRST_ARGUMENT {
        return None;
    }
    let arguments: Vec<_> = arguments.map(|argument| argument.to_string_lossy().into_owned()).collect();
    Some(match serve(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            complain(&error);
            ExitCode::FAILURE
        }
    })
}

/// Writes a line to stderr, which may be closed.
fn complain(what: &dyn std::fmt::Display) {
    let _ = writeln!(io::stderr(), "helper process: {what}");
}

/// A device, and the counters of a card.
type CountedDevice = (Box<dyn Device>, Option<Arc<Counters>>);

/// Kicks and interrupts of all queues. Relaxed: statistics.
#[derive(Default)]
struct Counts {
    kicks: AtomicU64,
    interrupts: AtomicU64,
}

/// Where queues report: to the driver by the parent's eventfd, and to counters.
struct ParentEvents {
    call: Notifier,
    counts: Arc<Counts>,
}

impl QueueEvents for ParentEvents {
    fn used_buffer(&self, _queue: u16) {
        self.counts.interrupts.fetch_add(1, Ordering::Relaxed);
        self.call.signal();
    }

    fn kicked(&self, _queue: u16, count: u64) {
        self.counts.kicks.fetch_add(count, Ordering::Relaxed);
    }

    fn failed(&self, queue: u16, error: &ServeError) {
        complain(&format!("queue {queue} stopped: {error}"));
    }
}

/// The devices, and the thread that serves their queues.
struct Server {
    memory: Memory,
    devices: Vec<CountedDevice>,
    thread: IoThread,
    counts: Arc<Counts>,
    /// The kick eventfd of the next queue.
    kick: Option<Notifier>,
}

fn serve(arguments: &[String]) -> io::Result<()> {
    let socket = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let (size, devices) = arguments.split_first().ok_or_else(|| odd("arguments are missing"))?;
    let size = size.parse().map_err(|_| odd("the first argument is not a size"))?;
    let config = RegionConfig { gpa: 0, size, backing: Backing::Pages, writable: true };
    let region = Region::open(config, descriptor(&socket, kind::MEMORY)?.into()).map_err(io::Error::other)?;
    let devices = devices.iter().map(|argument| device(argument, &socket)).collect::<io::Result<_>>()?;
    let mut server = Server {
        memory: Memory::new(vec![region]).map_err(io::Error::other)?,
        devices,
        thread: IoThread::spawn("io0".into(), Duration::ZERO)?,
        counts: Arc::default(),
        kick: None,
    };
    // The parent closes the socket to end this process.
    while let Ok((request, file)) = message::receive(&socket) {
        server.obey(&socket, &request, file)?;
    }
    server.thread.quit();
    Ok(())
}

fn odd(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// Receives the next descriptor, which must be of this kind.
fn descriptor(socket: &UnixStream, kind: u32) -> io::Result<File> {
    let (request, file): (Request, _) = message::receive(socket)?;
    file.filter(|_| request.kind == kind).ok_or_else(|| odd("a message is out of order"))
}

fn device(argument: &str, socket: &UnixStream) -> io::Result<CountedDevice> {
    if let Some(read_only) = argument.strip_prefix("disk,") {
        let image = descriptor(socket, kind::IMAGE)?;
        let config = BlkConfig { read_only: read_only == "1", ..BlkConfig::new("image") };
        return Ok((Box::new(Blk::of(image, config).map_err(io::Error::other)?), None));
    }
    let net = net_of(argument).ok_or_else(|| odd("an argument does not name a device"))?;
    let mut cards = nets::cards(&[net]).map_err(io::Error::other)?;
    let card = cards.pop().ok_or_else(|| odd("an argument does not name a device"))?;
    Ok((card.device, Some(card.counters)))
}

impl Server {
    fn obey(&mut self, socket: &UnixStream, request: &Request, file: Option<File>) -> io::Result<()> {
        let answer = match request.kind {
            kind::KICK => {
                self.kick = file.map(|file| OwnedFd::from(file).into());
                return Ok(());
            }
            kind::START => {
                let started = file.ok_or_else(|| odd("the call eventfd is missing")).and_then(|file| {
                    let call = Notifier::from(OwnedFd::from(file));
                    self.start(request, call)
                });
                if let Err(error) = &started {
                    complain(error);
                }
                Answer { refused: started.is_err().into(), ..Answer::default() }
            }
            kind::STOP => {
                let queue = request.queue as u16;
                let key = QueueKey { device: request.device as usize, queue };
                let taken = self.thread.take_off(key);
                if let Some(stopping) = taken {
                    stopping.stop(request.complete != 0);
                }
                Answer::default()
            }
            kind::FIGURES => self.figures(request.device as usize),
            _ => return Err(odd("unknown request")),
        };
        message::send(socket, &answer, None)
    }

    fn start(&mut self, request: &Request, call: Notifier) -> io::Result<()> {
        let key = QueueKey { device: request.device as usize, queue: request.queue as u16 };
        let kick = self.kick.take().ok_or_else(|| odd("the kick eventfd is missing"))?;
        let (device, _) = self.devices.get_mut(key.device).ok_or_else(|| odd("there is no such device"))?;
        let addresses = QueueAddresses {
            size: request.size as u16,
            desc: request.desc,
            driver: request.driver,
            device: request.device_area,
        };
        let events = Arc::new(ParentEvents { call, counts: Arc::clone(&self.counts) });
        let kicks = Arc::new(HostNotifier::of(kick)).into();
        let start = QueueStart::new(key, addresses, request.features, self.memory.handle());
        let queue = start.build(&mut **device, kicks, events).map_err(io::Error::other)?;
        self.thread.put_on(queue).map_err(|refused| refused.source)
    }

    /// Counters, with those of card `device` if it is one.
    fn figures(&self, device: usize) -> Answer {
        let card = self.devices.get(device).and_then(|(_, counters)| counters.as_ref());
        let totals = card.map(|counters| counters.totals()).unwrap_or_default();
        Answer {
            refused: 0,
            kicks: self.counts.kicks.load(Ordering::Relaxed),
            interrupts: self.counts.interrupts.load(Ordering::Relaxed),
            cpu_ns: (footprint::cpu_seconds() * 1e9) as u64,
            transmitted: totals.transmitted,
            received: totals.received,
        }
    }
}
