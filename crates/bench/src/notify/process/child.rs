//! The process that serves queues.
use super::message::{self, Answer, Request, kind};
use super::{DISK, FIRST_ARGUMENT, net_of};
use nix::time::{ClockId, clock_gettime};
use paravane_device::blk::{Blk, BlkConfig};
use paravane_device::net::Counters;
use paravane_device::{Device, ServeError, State};
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

/// Serves queues until the parent ends; `None`: this is not such a process.
pub(crate) fn child_main() -> Option<ExitCode> {
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
    let _ = writeln!(io::stderr(), "the process that serves queues: {what}");
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

/// The device, and the thread that serves its queues.
struct Server {
    ram: u64,
    memory: Option<Memory>,
    device: Box<dyn Device>,
    /// Of a network card.
    frames: Option<Arc<Counters>>,
    thread: IoThread,
    counts: Arc<Counts>,
    /// The kick eventfd of the next queue.
    kick: Option<Notifier>,
}

fn serve(arguments: &[String]) -> io::Result<()> {
    let socket = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let [ram, device] = arguments else { return Err(odd("arguments are missing")) };
    let (device, frames) = make_device(device, descriptor(&socket, kind::IMAGE)?)?;
    let mut server = Server {
        ram: ram.parse().map_err(|_| odd("the first argument is not a size"))?,
        memory: None,
        device,
        frames,
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

fn make_device(argument: &str, image: File) -> io::Result<CountedDevice> {
    if argument == DISK {
        // The parent's disk has the lock.
        let config = BlkConfig { lock: false, ..BlkConfig::new("image") };
        return Ok((Box::new(Blk::of(image, config).map_err(io::Error::other)?), None));
    }
    let card = net_of(argument).ok_or_else(|| odd("an argument does not name a device"))?;
    let (device, frames) = card.open()?;
    Ok((device, Some(frames)))
}

impl Server {
    fn obey(&mut self, socket: &UnixStream, request: &Request, file: Option<File>) -> io::Result<()> {
        let answer = match request.kind {
            kind::MEMORY => {
                let config = RegionConfig { gpa: 0, size: self.ram, backing: Backing::Pages, writable: true };
                let file = file.ok_or_else(|| odd("guest memory is missing"))?;
                if self.memory.is_none() {
                    let region = Region::open(config, file.into()).map_err(io::Error::other)?;
                    self.memory = Some(Memory::new(vec![region]).map_err(io::Error::other)?);
                }
                return Ok(());
            }
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
                let taken = self.thread.take_off(key(request));
                match taken.map(|queue| queue.leave()) {
                    Some(Ok((position, _))) => {
                        Answer { base: position.vring_base().into(), ..Answer::default() }
                    }
                    // The queue has failed, and said so.
                    Some(Err(_)) | None => Answer { refused: 1, ..Answer::default() },
                }
            }
            kind::FIGURES => self.figures(),
            _ => return Err(odd("unknown request")),
        };
        message::send(socket, &answer, None)
    }

    fn start(&mut self, request: &Request, call: Notifier) -> io::Result<()> {
        let kick = self.kick.take().ok_or_else(|| odd("the kick eventfd is missing"))?;
        let memory = self.memory.as_ref().ok_or_else(|| odd("guest memory is missing"))?;
        let addresses = QueueAddresses {
            size: request.size as u16,
            desc: request.desc,
            driver: request.driver,
            device: request.device_area,
        };
        let events = Arc::new(ParentEvents { call, counts: Arc::clone(&self.counts) });
        let kicks = Arc::new(HostNotifier::of(kick)).into();
        let position = State::from_vring_base(request.base, request.features).map_err(io::Error::other)?;
        let start = QueueStart::new(key(request), addresses, request.features, memory.handle());
        let queue = start.at(position).build(&mut *self.device, kicks, events).map_err(io::Error::other)?;
        self.thread.put_on(queue).map_err(|refused| refused.source)
    }

    /// Counters, with the frames of a card.
    fn figures(&self) -> Answer {
        let totals = self.frames.as_ref().map(|frames| frames.totals()).unwrap_or_default();
        let cpu = clock_gettime(ClockId::CLOCK_PROCESS_CPUTIME_ID).map_or(Duration::ZERO, Duration::from);
        Answer {
            kicks: self.counts.kicks.load(Ordering::Relaxed),
            interrupts: self.counts.interrupts.load(Ordering::Relaxed),
            cpu_ns: cpu.as_nanos() as u64,
            transmitted: totals.transmitted,
            received: totals.received,
            ..Answer::default()
        }
    }
}

fn key(request: &Request) -> QueueKey {
    QueueKey { device: 0, queue: request.queue as u16 }
}
