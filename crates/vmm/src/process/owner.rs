//! The process that owns queues.
use super::message::{self, Answer, Request, kind};
use super::{GUARD, net_of};
use crate::crew::Crew;
use crate::footprint;
use crate::nets;
use paravane_device::blk::{Blk, BlkConfig};
use paravane_device::net::Counters;
use paravane_device::{Device, MappedQueue, ServeError};
use paravane_dma::{Backing, Memory, Region, RegionConfig};
use paravane_io::{HostQueue, QueueEvents, QueueKey};
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

/// If this process was started to own queues, does that until its parent is done; `None` if it was not. To be called first
/// thing in `main`.
#[must_use]
pub fn owner_main() -> Option<ExitCode> {
    // Those of other processes may be no text.
    let mut arguments = std::env::args_os().skip(1);
    if arguments.next()? != GUARD {
        return None;
    }
    let arguments: Vec<_> = arguments.map(|argument| argument.to_string_lossy().into_owned()).collect();
    Some(match own(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            complain(&error);
            ExitCode::FAILURE
        }
    })
}

/// Writes a line to stderr, which may be closed.
fn complain(what: &dyn std::fmt::Display) {
    let _ = writeln!(io::stderr(), "the queues' owner: {what}");
}

/// A device, and what counts a card's frames.
type Owned = (Box<dyn Device>, Option<Arc<Counters>>);

/// Kicks and interrupts of all queues. Relaxed: statistics.
#[derive(Default)]
struct Counts {
    kicks: AtomicU64,
    interrupts: AtomicU64,
}

/// A queue's way to its driver, which is the parent's business.
struct ParentSite {
    call: Notifier,
    counts: Arc<Counts>,
}

impl QueueEvents for ParentSite {
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

struct Owner {
    memory: Memory,
    devices: Vec<Owned>,
    crew: Crew,
    counts: Arc<Counts>,
    /// Where the kicks of the next queue come.
    kick: Option<Notifier>,
}

fn own(arguments: &[String]) -> io::Result<()> {
    let socket = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let (size, devices) = arguments.split_first().ok_or_else(|| odd("there are no arguments"))?;
    let size = size.parse().map_err(|_| odd("its first argument is no size"))?;
    let config = RegionConfig { gpa: 0, size, backing: Backing::Pages, writable: true };
    let region = Region::open(config, descriptor(&socket, kind::MEMORY)?.into()).map_err(io::Error::other)?;
    let devices = devices.iter().map(|argument| device(argument, &socket)).collect::<io::Result<_>>()?;
    let mut owner = Owner {
        memory: Memory::new(vec![region]).map_err(io::Error::other)?,
        devices,
        crew: Crew::spawn(0..1, false, Duration::ZERO)?,
        counts: Arc::default(),
        kick: None,
    };
    // The socket's end is the parent's wish that this one ends.
    while let Ok((request, file)) = message::receive(&socket) {
        owner.obey(&socket, &request, file)?;
    }
    owner.crew.quit();
    Ok(())
}

fn odd(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// The descriptor that must come next.
fn descriptor(socket: &UnixStream, kind: u32) -> io::Result<File> {
    let (request, file): (Request, _) = message::receive(socket)?;
    file.filter(|_| request.kind == kind).ok_or_else(|| odd("something else came than was due"))
}

fn device(argument: &str, socket: &UnixStream) -> io::Result<Owned> {
    if let Some(read_only) = argument.strip_prefix("disk,") {
        let image = descriptor(socket, kind::IMAGE)?;
        let config = BlkConfig { read_only: read_only == "1", ..BlkConfig::new("image") };
        return Ok((Box::new(Blk::of(image, config).map_err(io::Error::other)?), None));
    }
    let net = net_of(argument).ok_or_else(|| odd("an argument is no device"))?;
    let mut cards = nets::cards(&[net]).map_err(io::Error::other)?;
    let card = cards.pop().ok_or_else(|| odd("an argument is no device"))?;
    Ok((card.device, Some(card.counters)))
}

impl Owner {
    fn obey(&mut self, socket: &UnixStream, request: &Request, file: Option<File>) -> io::Result<()> {
        let answer = match request.kind {
            kind::KICK => {
                self.kick = file.map(|file| OwnedFd::from(file).into());
                return Ok(());
            }
            kind::START => {
                let started = file.ok_or_else(|| odd("there is no eventfd")).and_then(|file| {
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
                let taken = self.crew.thread(0).and_then(|thread| thread.take_off(key));
                if let Some(stopping) = taken {
                    stopping.stop(request.complete != 0);
                }
                Answer::default()
            }
            kind::FIGURES => self.figures(request.device as usize),
            _ => return Err(odd("an unknown request came")),
        };
        message::send(socket, &answer, None)
    }

    fn start(&mut self, request: &Request, call: Notifier) -> io::Result<()> {
        let key = QueueKey { device: request.device as usize, queue: request.queue as u16 };
        let kick = self.kick.take().ok_or_else(|| odd("there is no eventfd for its kicks"))?;
        let (device, _) = self.devices.get_mut(key.device).ok_or_else(|| odd("there is no such device"))?;
        let addresses = QueueAddresses {
            size: request.size as u16,
            desc: request.desc,
            driver: request.driver,
            device: request.device_area,
        };
        let live =
            MappedQueue::start(addresses, request.max_size as u16, request.features, self.memory.handle())
                .map_err(io::Error::other)?;
        let handler = device.start_queue(key.queue, request.features)?;
        let kicks = Arc::new(HostNotifier::of(kick)).into();
        let site = Arc::new(ParentSite { call, counts: Arc::clone(&self.counts) });
        let queue = Box::new(HostQueue::new(key, live, handler, kicks, site, Arc::default()));
        let thread = self.crew.thread(0).ok_or_else(|| odd("there is no I/O thread"))?;
        thread.put_on(queue).map_err(|refused| refused.source)
    }

    /// What was counted, of card `device` if it is one.
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
