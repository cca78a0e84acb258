//! The thread between a console's port and its host's side.
//!
//! ```text
//!   nobody reads --accept; a pseudo-terminal is opened--> attached --end of the stream--> nobody reads
//!                                                        output: until the descriptor has no room
//!                                                        input: while the port has room
//! ```
use super::back_end::BackEnd;
use super::port::Port;
use crate::LogDevice;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// Stack of the thread.
const STACK: usize = 128 << 10;
/// Bytes of one read or write.
const CHUNK: usize = 16 << 10;
/// Time between two looks at what has no event: an unopened pseudo-terminal, a full disk.
const LOOK: Duration = Duration::from_millis(200);

/// The thread. It ends when this is dropped.
#[derive(Debug)]
pub(super) struct Pump {
    port: Arc<Port>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Pump {
    pub(super) fn start(port: Arc<Port>, back_end: BackEnd) -> io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let mut work = Work::new(Arc::clone(&port), back_end, Arc::clone(&stop))?;
        let device = LogDevice::current();
        let run = move || {
            let _named = LogDevice::enter(device);
            while work.step() {}
        };
        let thread = std::thread::Builder::new().name("console".into()).stack_size(STACK).spawn(run)?;
        Ok(Self { port, stop, thread: Some(thread) })
    }
}

impl Drop for Pump {
    fn drop(&mut self) {
        // Relaxed: the wakeup orders it.
        self.stop.store(true, Ordering::Relaxed);
        self.port.host.wake();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread of a console has panicked");
        }
    }
}

/// An open stream, or two.
struct Line {
    output: OwnedFd,
    /// `None` for a log, and once the input has ended.
    input: Option<OwnedFd>,
}

/// What a transfer came to.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Moved {
    Some,
    Nothing,
    /// The descriptor has an error that time may mend.
    Later,
    /// The stream has ended.
    Ended,
}

struct Work {
    port: Arc<Port>,
    stop: Arc<AtomicBool>,
    back_end: BackEnd,
    line: Option<Line>,
    /// An error was logged, and has lasted since.
    failing: bool,
    bytes: Box<[u8; CHUNK]>,
}

impl Work {
    fn new(port: Arc<Port>, back_end: BackEnd, stop: Arc<AtomicBool>) -> io::Result<Self> {
        let line = match &back_end {
            BackEnd::Socket(listener) => {
                listener.set_nonblocking(true)?;
                None
            }
            BackEnd::Pty(pty) => {
                set_nonblocking(&pty.fd)?;
                None
            }
            BackEnd::Log(file) => Some(Line { output: file.try_clone()?.into(), input: None }),
            BackEnd::Streams { input, output } => {
                Some(Line { output: output.try_clone()?, input: Some(input.try_clone()?) })
            }
        };
        port.set_attached(line.is_some());
        Ok(Self { port, stop, back_end, line, failing: false, bytes: Box::new([0; CHUNK]) })
    }

    /// Moves what can be moved, and sleeps if that is nothing. `false`: the thread ends.
    fn step(&mut self) -> bool {
        // Relaxed: the wakeup orders it.
        if self.stop.load(Ordering::Relaxed) {
            return false;
        }
        if self.line.is_none() {
            match self.attach() {
                Ok(true) => {}
                Ok(false) => self.sleep(false),
                Err(error) => {
                    if !std::mem::replace(&mut self.failing, true) {
                        tracing::warn!("cannot accept a reader of the console, tries again: {error}");
                    }
                    self.sleep(true);
                }
            }
            return true;
        }
        let output = self.write();
        let input = if output == Moved::Ended { Moved::Ended } else { self.read() };
        match (output, input) {
            (_, Moved::Ended) => self.detach(),
            (Moved::Some, _) | (_, Moved::Some) => {}
            (output, _) => self.sleep(output == Moved::Later),
        }
        true
    }

    /// Takes a reader, if there is one.
    fn attach(&mut self) -> io::Result<bool> {
        let output = match &self.back_end {
            BackEnd::Socket(listener) => match listener.accept() {
                Ok((stream, _)) => {
                    stream.set_nonblocking(true)?;
                    OwnedFd::from(stream)
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(error),
            },
            BackEnd::Pty(pty) if is_open(&pty.fd) => pty.fd.try_clone()?,
            BackEnd::Pty(_) | BackEnd::Log(_) | BackEnd::Streams { .. } => return Ok(false),
        };
        self.line = Some(Line { input: Some(output.try_clone()?), output });
        self.failing = false;
        self.port.set_attached(true);
        Ok(true)
    }

    fn detach(&mut self) {
        self.line = None;
        self.port.set_attached(false);
    }

    fn write(&mut self) -> Moved {
        let Some(line) = &self.line else { return Moved::Ended };
        let len = self.port.peek_output(&mut self.bytes[..]);
        if len == 0 {
            return Moved::Nothing;
        }
        let written = if matches!(self.back_end, BackEnd::Socket(_)) {
            // A reader that has gone is no signal for the process.
            rustix::net::send(&line.output, &self.bytes[..len], rustix::net::SendFlags::NOSIGNAL)
        } else {
            rustix::io::write(&line.output, &self.bytes[..len])
        };
        match written {
            Ok(written) => {
                self.failing = false;
                self.port.remove_output(written);
                Moved::Some
            }
            Err(Errno::INTR) => Moved::Some,
            Err(Errno::AGAIN) => Moved::Nothing,
            Err(error) if matches!(self.back_end, BackEnd::Log(_)) => {
                if !std::mem::replace(&mut self.failing, true) {
                    tracing::warn!("cannot write to the console's log, tries again: {error}");
                }
                Moved::Later
            }
            Err(_) => Moved::Ended,
        }
    }

    fn read(&mut self) -> Moved {
        let Some(input) = self.line.as_ref().and_then(|line| line.input.as_ref()) else {
            return Moved::Nothing;
        };
        let room = self.port.input_room().min(CHUNK);
        // Streams are shared with other programs, so they are left blocking.
        if room == 0 || matches!(self.back_end, BackEnd::Streams { .. }) && !is_ready(input, PollFlags::IN) {
            return Moved::Nothing;
        }
        match rustix::io::read(input, &mut self.bytes[..room]) {
            Ok(0) if matches!(self.back_end, BackEnd::Streams { .. }) => {
                // The output goes on.
                if let Some(line) = &mut self.line {
                    line.input = None;
                }
                Moved::Nothing
            }
            Ok(0) => Moved::Ended,
            Ok(read) => {
                self.port.put_input(&self.bytes[..read]);
                Moved::Some
            }
            Err(Errno::INTR) => Moved::Some,
            Err(Errno::AGAIN) => Moved::Nothing,
            Err(_) => Moved::Ended,
        }
    }

    /// Waits for an event. `later`: for a time, as an error has none.
    fn sleep(&self, later: bool) {
        self.port.host.arm();
        // Relaxed: the wakeup orders it.
        if self.stop.load(Ordering::Relaxed) {
            return;
        }
        let mut fds = vec![PollFd::new(&self.port.host, PollFlags::IN)];
        let mut timeout = later.then_some(LOOK);
        match (&self.line, &self.back_end) {
            (None, BackEnd::Socket(listener)) if !later => fds.push(PollFd::new(listener, PollFlags::IN)),
            (None, _) => timeout = Some(LOOK),
            (Some(line), _) => {
                if let Some(input) = &line.input
                    && self.port.input_room() > 0
                {
                    fds.push(PollFd::new(input, PollFlags::IN));
                }
                if !later && self.port.has_output() {
                    fds.push(PollFd::new(&line.output, PollFlags::OUT));
                }
            }
        }
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        // An error, as for a signal: the next step looks again.
        let _ = poll(&mut fds, timeout.as_ref());
    }
}

/// Whether a program has a pseudo-terminal open.
fn is_open(pty: &OwnedFd) -> bool {
    !events(pty, PollFlags::OUT).contains(PollFlags::HUP)
}

fn is_ready(fd: &OwnedFd, wanted: PollFlags) -> bool {
    // At the end of a stream a read returns at once, too.
    events(fd, wanted).intersects(wanted | PollFlags::HUP)
}

fn events(fd: &OwnedFd, wanted: PollFlags) -> PollFlags {
    let mut fds = [PollFd::new(fd, wanted)];
    let none = Timespec { tv_sec: 0, tv_nsec: 0 };
    match poll(&mut fds, Some(&none)) {
        Ok(_) => fds[0].revents(),
        Err(_) => PollFlags::empty(),
    }
}

fn set_nonblocking(fd: impl AsFd) -> io::Result<()> {
    Ok(fcntl_setfl(&fd, fcntl_getfl(&fd)? | OFlags::NONBLOCK)?)
}
