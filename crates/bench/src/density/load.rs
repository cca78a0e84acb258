//! The client: all disks in one thread, which requests wake at a fixed rate.
//!
//! ```text
//!   timer ----> submit to the next disk -> kick
//!   call of a disk ----> take its completions, check
//! ```
//! Both arrive at one epoll instance. The thread sleeps in between, or polls.
use super::disks::{BLOCKS, Disks, SMALL, stamp};
use crate::Client as Mode;
use crate::disk_connection::{BLOCK, DiskConnection, LONGEST, Wanted, latencies};
use hdrhistogram::Histogram;
use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::time::TimeSpec;
use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};
use std::io;
use std::time::{Duration, Instant};

/// Requests in flight of all disks together, if each has at least [`FEWEST`].
const SLOTS: usize = 64;
/// Least requests in flight of a disk.
const FEWEST: usize = 2;
/// Token of the timer; disks have their numbers.
const TIMER: u64 = u64::MAX;
/// Events taken at once.
const EVENTS: usize = 64;

/// The figures of a window.
pub(super) struct Window {
    /// Requests completed.
    pub(super) requests: u64,
    /// Length of the window.
    pub(super) elapsed: Duration,
    /// Nanoseconds from before a request is submitted until it is taken back.
    pub(super) latencies: Histogram<u32>,
}

/// Clients of several disks.
pub(super) struct Clients {
    disks: Vec<Disk>,
    epoll: Epoll,
    timer: TimerFd,
    mode: Mode,
    /// The disk of the next request.
    next: usize,
}

struct Disk {
    number: usize,
    connection: DiskConnection,
    /// Per request: time of submission and block, if in flight.
    requests: Vec<Option<(Instant, u64)>>,
    next_block: u64,
}

impl Clients {
    /// Connects to the first `count` disks, with at most `depth` requests in flight each.
    ///
    /// # Errors
    /// Which disk does not work, and why, in one line.
    pub(super) fn connect(
        disks: &Disks,
        count: usize,
        depth: Option<usize>,
        mode: Mode,
        mut alive: impl FnMut() -> Option<String>,
    ) -> Result<Self, String> {
        let text = |error: Errno| error.to_string();
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).map_err(text)?;
        let timer =
            TimerFd::new(ClockId::CLOCK_MONOTONIC, TimerFlags::TFD_CLOEXEC | TimerFlags::TFD_NONBLOCK)
                .map_err(text)?;
        epoll.add(&timer, EpollEvent::new(EpollFlags::EPOLLIN, TIMER)).map_err(text)?;
        let mut clients = Self { disks: Vec::with_capacity(count), epoll, timer, mode, next: 0 };
        let depth = depth.unwrap_or((SLOTS / count).max(FEWEST));
        for number in 0..count {
            let wanted = Wanted { packed: false, capacity: SMALL, depth, bytes: BLOCK };
            let mut connection = DiskConnection::new(&disks.socket(number), wanted, &mut alive)
                .map_err(|error| format!("disk {number}: {error}"))?;
            connection.queue.set_used_notif_enabled(true);
            let event = EpollEvent::new(EpollFlags::EPOLLIN, number as u64);
            clients.epoll.add(&*connection.call, event).map_err(text)?;
            clients.disks.push(Disk { number, connection, requests: vec![None; depth], next_block: 0 });
        }
        Ok(clients)
    }

    /// Submits `rate` requests a second for `length`, to the disks in turn.
    ///
    /// A disk whose requests are all in flight misses its turn: the rate is then lower.
    ///
    /// # Errors
    /// What a device did wrong, in one line.
    pub(super) fn run(&mut self, rate: u32, length: Duration) -> Result<Window, String> {
        let mut window = Window { requests: 0, elapsed: Duration::ZERO, latencies: latencies()? };
        let interval = Duration::from_secs(1) / rate;
        let period = Expiration::IntervalDelayed(interval.into(), TimeSpec::from(interval));
        self.timer.set(period, TimerSetTimeFlags::empty()).map_err(|error| error.to_string())?;
        let start = Instant::now();
        let mut submitted = 0;
        let mut now = start;
        while now < start + length {
            self.wait(&mut window)?;
            now = Instant::now();
            let due = ((now - start).as_nanos() / interval.as_nanos()) as u64;
            for _ in submitted..due {
                let turn = self.next;
                self.next = (self.next + 1) % self.disks.len();
                self.disks[turn].submit(now)?;
            }
            submitted = submitted.max(due);
        }
        window.elapsed = now - start;
        self.timer.unset().map_err(|error| error.to_string())?;
        // The next window begins without requests in flight.
        while self.disks.iter().any(Disk::is_busy) {
            if now.elapsed() > LONGEST {
                return Err(format!("no answer for {LONGEST:?}"));
            }
            self.wait(&mut window)?;
        }
        Ok(window)
    }

    /// Waits for the timer or a completion, and takes completions.
    fn wait(&mut self, window: &mut Window) -> Result<(), String> {
        let timeout = match self.mode {
            Mode::Poll => EpollTimeout::ZERO,
            Mode::Event => EpollTimeout::from(100_u8),
        };
        let mut events = [EpollEvent::empty(); EVENTS];
        let count = match self.epoll.wait(&mut events, timeout) {
            Ok(count) => count,
            Err(Errno::EINTR) => 0,
            Err(error) => return Err(error.to_string()),
        };
        for event in &events[..count] {
            match self.disks.get_mut(event.data() as usize) {
                Some(disk) => disk.complete(window)?,
                // It was read: more expirations may have come since.
                None => drop(self.timer.wait()),
            }
        }
        Ok(())
    }
}

impl Disk {
    fn is_busy(&self) -> bool {
        self.requests.iter().any(Option::is_some)
    }

    /// Submits a read and kicks, unless all requests are in flight.
    fn submit(&mut self, now: Instant) -> Result<(), String> {
        let Some(request) = self.requests.iter().position(Option::is_none) else { return Ok(()) };
        let block = self.next_block;
        self.next_block = (block + 1) % BLOCKS;
        let DiskConnection { queue, buffers, kick, .. } = &mut self.connection;
        let data = buffers.of(request, BLOCK as usize);
        buffers.set(data, 0, u64::MAX);
        // SAFETY: the buffer lives as long as the queue, and only this request uses it until it
        // completes.
        unsafe { queue.read_raw(block * BLOCK, data, BLOCK as usize, request) }
            .map_err(|error| format!("disk {}: cannot submit a request: {error}", self.number))?;
        self.requests[request] = Some((now, block));
        if queue.avail_notif_needed() {
            kick.notify().map_err(|error| format!("disk {}: cannot kick: {error}", self.number))?;
        }
        Ok(())
    }

    /// Takes all completions.
    fn complete(&mut self, window: &mut Window) -> Result<(), String> {
        let DiskConnection { queue, buffers, call, .. } = &mut self.connection;
        let failed = |what: &dyn std::fmt::Display| format!("disk {}: {what}", self.number);
        match call.read() {
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => return Err(failed(&error)),
            _ => {}
        }
        let now = Instant::now();
        for completion in queue.completions() {
            if completion.ret != 0 {
                return Err(failed(&format_args!("a request failed with status {}", completion.ret)));
            }
            let request = self.requests[completion.context].take();
            let (submitted, block) = request.ok_or_else(|| failed(&"a request completed twice"))?;
            let found = buffers.get(buffers.of(completion.context, BLOCK as usize), 0);
            if found != stamp(self.number, block) {
                return Err(failed(&format_args!("block {block} has the number {found:#x}")));
            }
            window.requests += 1;
            window.latencies.saturating_record((now - submitted).as_nanos() as u64);
        }
        Ok(())
    }
}
