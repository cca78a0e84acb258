//! A thread at the far side of a link, which answers each frame.
//!
//! ```text
//!  asleep on `arrived` ---> a frame ---> copied, answered ---> to the near side ---> asleep
//!                             ^   no buffer is free: asleep on `room`  |
//!                             '----------------------------------------'
//! ```
use super::lane::{Buffer, LANE, Lane, Port};
use crate::LogDevice;
use rustix::event::{PollFd, PollFlags, poll};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

/// Stack of the thread: no buffers live there.
const STACK: usize = 128 << 10;

/// The thread. It ends when this is dropped.
#[derive(Debug)]
pub(super) struct EchoPeer {
    stop: Arc<AtomicBool>,
    /// Port of the echo peer, and port that it answers to.
    ports: [Arc<Port>; 2],
    thread: Option<JoinHandle<()>>,
}

impl EchoPeer {
    /// Starts to answer frames to `here` by frames of `len` bytes to `there`.
    ///
    /// # Errors
    /// The host refuses a thread.
    pub(super) fn start(here: Arc<Port>, there: Arc<Port>, len: usize) -> io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        // Relaxed: as below. All lanes are in use, so that a frame of a pair is answered to that
        // pair.
        here.pairs.store(here.lanes.len() as u16, Ordering::Relaxed);
        for lane in &here.lanes {
            // Relaxed: no sender is there yet.
            lane.open.store(true, Ordering::Relaxed);
        }
        let ports = [Arc::clone(&here), Arc::clone(&there)];
        let work = Work { here, there, len, stop: Arc::clone(&stop) };
        let device = LogDevice::current();
        let run = move || {
            let _named = LogDevice::enter(device);
            work.run();
        };
        let thread = std::thread::Builder::new().name("echo-peer".into()).stack_size(STACK).spawn(run)?;
        Ok(Self { stop, ports, thread: Some(thread) })
    }
}

impl Drop for EchoPeer {
    fn drop(&mut self) {
        // Relaxed: the wakeups order it.
        self.stop.store(true, Ordering::Relaxed);
        let [here, there] = &self.ports;
        here.lanes.iter().for_each(|lane| lane.arrived.wake());
        there.wake_for_room();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread of an echo peer has panicked");
        }
    }
}

struct Work {
    here: Arc<Port>,
    there: Arc<Port>,
    len: usize,
    stop: Arc<AtomicBool>,
}

impl Work {
    fn run(&self) {
        let fds: Vec<BorrowedFd<'_>> = self.here.lanes.iter().map(|lane| lane.arrived.as_fd()).collect();
        let mut frames = Vec::with_capacity(LANE);
        while !self.stopping() {
            let mut answered = false;
            for (lane, pair) in self.here.lanes.iter().zip(0..) {
                lane.frames.take_all(&mut frames);
                for frame in frames.drain(..) {
                    self.answer(&frame, pair);
                    lane.free.push(frame);
                    answered = true;
                }
            }
            if answered {
                self.here.wake_for_room();
                continue;
            }
            self.here.lanes.iter().for_each(|lane| lane.arrived.arm());
            // Ordered by the wakeups: a frame or a stop that is not seen here wakes the thread.
            if self.here.lanes.iter().all(|lane| lane.frames.count() == 0) && !self.stopping() {
                sleep(&fds);
            }
        }
    }

    fn answer(&self, frame: &Buffer, pair: u16) {
        let lane = &self.there.lanes[self.there.lane(pair)];
        let len = frame.len;
        let Some(mut buffer) = self.room(lane, pair, len.max(self.len)) else { return };
        (buffer.header, buffer.len) = (frame.header, len);
        buffer.bytes[..len].copy_from_slice(&frame.bytes[..len]);
        buffer.answer(self.len);
        lane.frames.push(buffer);
        lane.arrived.wake();
    }

    /// A buffer for `len` bytes.
    ///
    /// `None` if there is no receiver any more, or the host has no memory.
    fn room(&self, lane: &Lane, pair: u16, len: usize) -> Option<Buffer> {
        let room = &self.there.room[usize::from(pair)];
        // Relaxed: ordered by the wakeup.
        while lane.open.load(Ordering::Relaxed) && !self.stopping() {
            let buffer = lane.one_buffer(len).ok()?;
            if buffer.is_some() {
                return buffer;
            }
            room.arm();
            if !lane.has_room() && lane.open.load(Ordering::Relaxed) && !self.stopping() {
                sleep(&[room.as_fd()]);
            }
        }
        None
    }

    fn stopping(&self) -> bool {
        // Relaxed: ordered by the wakeups.
        self.stop.load(Ordering::Relaxed)
    }
}

/// Sleeps until one of them is readable.
fn sleep(fds: &[BorrowedFd<'_>]) {
    let mut fds: Vec<PollFd<'_>> =
        fds.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
    // If it is interrupted or refused, the caller checks again.
    let _ = poll(&mut fds, None);
}
