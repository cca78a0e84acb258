//! The client: the crate virtio-driver over vhost-user, one queue, one thread.
//!
//! ```text
//!   connect -> run, any number of times (requests stay in flight between windows) -> drop
//!
//!   run: submit idle requests -> kick -> wait: event or poll -> take, check -> ...
//! ```
//! It works around two defects of version 0.6.1 in packed rings:
//!
//! * Between the store of the event index and the load of the next descriptor's flags, the crate
//!   has no barrier and can miss an interrupt. The client enables interrupts again, with a barrier,
//!   and checks the ring before it sleeps.
//! * The crate counts descriptors since its last look at the event index in 16 bits, and does not
//!   look while kicks are off. It can miss a kick, once in thousands of times that the device
//!   sleeps. The client kicks again after [`PATIENCE`]; `repeated-kicks` counts that.
use super::case::{Case, SPAN, Work};
use crate::Client as Mode;
use crate::disk_connection::{BLOCK, DiskConnection, LONGEST, Wanted, latencies};
use hdrhistogram::Histogram;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::io;
use std::os::fd::AsFd;
use std::path::Path;
use std::time::{Duration, Instant};

/// Time that the client sleeps before it kicks again.
const PATIENCE: Duration = Duration::from_millis(50);
/// Polls of the ring between two readings of the clock.
const LOOKS: u32 = 4096;

/// The figures of a window.
pub(super) struct Window {
    /// Completed requests.
    pub(super) requests: u64,
    /// Length of the window.
    pub(super) elapsed: Duration,
    /// Nanoseconds from before a request is submitted until it is taken back.
    pub(super) latencies: Histogram<u32>,
    /// Longest time without a completion.
    pub(super) longest_gap: Duration,
    /// Number of kicks.
    pub(super) kicks: u64,
    /// Number of times that the client slept.
    pub(super) sleeps: u64,
    /// Number of kicks repeated after [`PATIENCE`].
    pub(super) repeated_kicks: u64,
}

/// A connected driver.
pub(super) struct Client {
    disk: DiskConnection,
    mode: Mode,
    packed: bool,
    work: Work,
    offsets: Offsets,
    /// Per request: time of submission and offset, if in flight.
    requests: Vec<Option<(Instant, u64)>>,
    /// Requests that have just completed.
    completed: Vec<usize>,
}

impl Client {
    /// Connects to a server. `alive` returns its exit status if it has ended.
    ///
    /// # Errors
    /// Why there is no device, in one line.
    pub(super) fn connect(
        socket: &Path,
        case: Case,
        mode: Mode,
        alive: impl FnMut() -> Option<String>,
    ) -> Result<Self, String> {
        let wanted =
            Wanted { packed: case.packed, capacity: SPAN, depth: case.depth, bytes: case.work.bytes };
        let mut client = Self {
            disk: DiskConnection::new(socket, wanted, alive)?,
            mode,
            packed: case.packed,
            work: case.work,
            offsets: Offsets::new(case.work),
            requests: vec![None; case.depth],
            completed: Vec::with_capacity(case.depth),
        };
        client.disk.queue.set_used_notif_enabled(mode == Mode::Event);
        Ok(client)
    }

    /// Keeps all requests in flight for `length`.
    ///
    /// # Errors
    /// What the device did wrong, in one line.
    pub(super) fn run(&mut self, length: Duration) -> Result<Window, String> {
        let mut window = Window {
            requests: 0,
            elapsed: Duration::ZERO,
            latencies: latencies()?,
            longest_gap: Duration::ZERO,
            kicks: 0,
            sleeps: 0,
            repeated_kicks: 0,
        };
        let start = Instant::now();
        let mut now = start;
        for request in 0..self.requests.len() {
            if self.requests[request].is_none() {
                self.submit(request, now)?;
            }
        }
        self.kick(&mut window)?;
        while now < start + length {
            self.wait(&mut window)?;
            for completion in self.disk.queue.completions() {
                if completion.ret != 0 {
                    return Err(format!("a request failed with status {}", completion.ret));
                }
                self.completed.push(completion.context);
            }
            let last = std::mem::replace(&mut now, Instant::now());
            window.longest_gap = window.longest_gap.max(now - last);
            while let Some(request) = self.completed.pop() {
                let (submitted, offset) = self.requests[request].take().ok_or("a request completed twice")?;
                self.check(request, offset)?;
                window.requests += 1;
                window.latencies.saturating_record((now - submitted).as_nanos() as u64);
                self.submit(request, now)?;
            }
            self.kick(&mut window)?;
        }
        window.elapsed = now - start;
        Ok(window)
    }

    /// Makes a request available, without a kick.
    fn submit(&mut self, request: usize, now: Instant) -> Result<(), String> {
        let offset = self.offsets.next();
        let len = self.work.bytes as usize;
        let data = self.disk.buffers.of(request, len);
        for block in 0..self.work.bytes / BLOCK {
            // A write stores the number of the block; a read must replace the stamp by it.
            let stamp = if self.work.write { offset / BLOCK + block } else { u64::MAX };
            self.disk.buffers.set(data, block, stamp);
        }
        // SAFETY: the buffer lives as long as the queue, and only this request uses it until it
        // completes.
        let submitted = unsafe {
            match self.work.write {
                true => self.disk.queue.write_raw(offset, data, len, request),
                false => self.disk.queue.read_raw(offset, data, len, request),
            }
        };
        submitted.map_err(|error| format!("cannot submit a request: {error}"))?;
        self.requests[request] = Some((now, offset));
        Ok(())
    }

    fn check(&self, request: usize, offset: u64) -> Result<(), String> {
        let data = self.disk.buffers.of(request, self.work.bytes as usize);
        for block in 0..self.work.bytes / BLOCK {
            let (wanted, found) = (offset / BLOCK + block, self.disk.buffers.get(data, block));
            if found != wanted {
                return Err(format!("block {wanted} has the number {found:#x}"));
            }
        }
        Ok(())
    }

    fn kick(&mut self, window: &mut Window) -> Result<(), String> {
        if self.disk.queue.avail_notif_needed() {
            window.kicks += 1;
            self.disk.kick.notify().map_err(|error| format!("cannot kick: {error}"))?;
        }
        Ok(())
    }

    /// Waits for a completion.
    fn wait(&mut self, window: &mut Window) -> Result<(), String> {
        let silent = || Err(format!("no answer for {LONGEST:?}"));
        let mut start = None;
        loop {
            for _ in 0..LOOKS {
                if self.disk.queue.completions().has_next() {
                    return Ok(());
                }
                if self.mode == Mode::Event {
                    break;
                }
                std::hint::spin_loop();
            }
            if *start.get_or_insert_with(Instant::now) + LONGEST < Instant::now() {
                return silent();
            }
            if self.mode == Mode::Event {
                self.sleep(window)?;
            }
        }
    }

    /// Sleeps until the device interrupts, or for [`PATIENCE`].
    fn sleep(&mut self, window: &mut Window) -> Result<(), String> {
        if self.packed {
            self.disk.queue.set_used_notif_enabled(true);
            if self.disk.queue.completions().has_next() {
                return Ok(());
            }
        }
        window.sleeps += 1;
        let failed = |error: io::Error| format!("cannot wait: {error}");
        let patience = PollTimeout::try_from(PATIENCE).unwrap_or(PollTimeout::NONE);
        match poll(&mut [PollFd::new(self.disk.call.as_fd(), PollFlags::POLLIN)], patience) {
            Ok(0) => {
                window.repeated_kicks += 1;
                self.disk.kick.notify().map_err(failed)
            }
            Ok(_) => self.disk.call.read().map(drop).or_else(|error| match error.kind() {
                io::ErrorKind::WouldBlock => Ok(()),
                _ => Err(failed(error)),
            }),
            Err(Errno::EINTR) => Ok(()),
            Err(error) => Err(failed(error.into())),
        }
    }
}

/// The sequence of offsets in the image.
struct Offsets {
    work: Work,
    state: u64,
}

impl Offsets {
    fn new(work: Work) -> Self {
        Self { work, state: if work.sequential { 0 } else { 0x9e37_79b9_7f4a_7c15 } }
    }

    fn next(&mut self) -> u64 {
        let Work { sequential, bytes, .. } = self.work;
        let places = SPAN / bytes;
        if sequential {
            let place = self.state % places;
            self.state += 1;
            return place * bytes;
        }
        // xorshift64.
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        self.state % places * bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_are_in_the_image() {
        for sequential in [false, true] {
            let bytes = 128 << 10;
            let mut offsets = Offsets::new(Work { write: false, sequential, bytes });
            let drawn: Vec<u64> = (0..5000).map(|_| offsets.next()).collect();
            assert!(drawn.iter().all(|offset| offset % bytes == 0 && offset + bytes <= SPAN));
            let in_order = drawn.windows(2).filter(|pair| pair[1] == (pair[0] + bytes) % SPAN).count();
            assert_eq!(in_order == drawn.len() - 1, sequential, "{in_order}");
        }
    }
}
