//! The watcher of a pool that devices share.
//!
//! ```text
//!   asleep <--nothing was served for a second-- awake: every 10 ms
//!      '------ a thread wakes: Activity -------->   a thread in the same turn as 10 ms ago: unblock its device,
//!                                                     and have another thread serve the other queues;
//!                                                     if it waits in the kernel: isolate the device
//!                                                   every 100 ms: move a queue from the busiest thread
//! ```
//! A client can block the thread that signals it, by a full eventfd ([`QueueEvents`]), and the thread
//! that uses its memory, by page faults that take long. With threads of its own that is its own loss.
//!
//! [`QueueEvents`]: crate::QueueEvents
use crate::activity::Activity;
use crate::balance::{Load, Move, best_move};
use crate::isolation::{QUIET, TooMany};
use crate::moves::MoveError;
use crate::places::Shared;
use crate::spares::MOST;
use crate::{IoThread, QueueKey};
use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Interval between looks.
const INTERVAL: Duration = Duration::from_millis(10);
/// Looks between two measurements of the load.
const LOOKS: u32 = 10;
/// Looks without a turn after which the watcher sleeps.
const IDLE_LOOKS: u32 = 100;
/// Time for which a queue that was moved stays.
const STAY: Duration = Duration::from_secs(1);
/// Stack of the watcher.
const STACK: usize = 128 << 10;

/// Ends the watcher when it is dropped.
#[derive(Debug)]
pub(crate) struct Watch {
    activity: Arc<Activity>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    pub(crate) fn start(shared: &Arc<Shared>, activity: Arc<Activity>) -> io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let mut watcher = Watcher {
            shared: Arc::clone(shared),
            activity: Arc::clone(&activity),
            stop: Arc::clone(&stop),
            seen: vec![(0, None); shared.threads.len()],
            measured: HashMap::new(),
            since: Instant::now(),
            moves: Arc::default(),
            is_short: false,
            has_warned: false,
        };
        let thread = std::thread::Builder::new().name("io-watch".to_owned()).stack_size(STACK);
        let thread = Some(thread.spawn(move || watcher.run())?);
        Ok(Self { activity, stop, thread })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        // Relaxed: the lock in `interrupt` orders.
        self.stop.store(true, Ordering::Relaxed);
        self.activity.interrupt();
        if let Some(thread) = self.thread.take() {
            while !thread.is_finished() {
                // It may have looked at `stop` before, and waited after.
                self.activity.interrupt();
                std::thread::sleep(Duration::from_micros(50));
            }
            if thread.join().is_err() {
                tracing::error!("the watcher of the I/O threads panicked");
            }
        }
    }
}

struct Watcher {
    shared: Arc<Shared>,
    activity: Arc<Activity>,
    stop: Arc<AtomicBool>,
    /// For each thread its turns at the last look, and the device that it served.
    seen: Vec<(u64, Option<usize>)>,
    /// Busy time of each queue at the last measurement.
    measured: HashMap<QueueKey, u64>,
    since: Instant,
    /// Whether a queue moves.
    moves: Arc<AtomicBool>,
    /// Whether a thread was blocked, and no other one could take over.
    is_short: bool,
    /// Whether a warning has said that too many devices are isolated.
    has_warned: bool,
}

impl Watcher {
    fn run(&mut self) {
        let (mut looks, mut idle) = (0, 0);
        // Relaxed: the lock in `interrupt` orders.
        while !self.stop.load(Ordering::Relaxed) {
            if idle >= IDLE_LOOKS {
                let shared = Arc::clone(&self.shared);
                let stop = Arc::clone(&self.stop);
                self.activity.sleep(|| {
                    let mut threads = shared.threads.iter();
                    stop.load(Ordering::Relaxed) || threads.any(|thread| thread.setting.counters.is_awake())
                });
                (looks, idle) = (0, 0);
                self.measure();
            }
            self.activity.pause(INTERVAL);
            idle = if self.look() { 0 } else { idle + 1 };
            looks += 1;
            if looks >= LOOKS && self.shared.threads.len() > 1 {
                looks = 0;
                let loads = self.measure();
                if let Some(Move { key, from, to }) = best_move(self.shared.threads.len(), &loads) {
                    tracing::debug!(queue = key.queue, from, to, "queue moves to another I/O thread");
                    self.move_to(key, to);
                }
            }
        }
    }

    /// Has a queue moved. That waits for its thread, so another thread does it, if there is one.
    fn move_to(&self, key: QueueKey, to: usize) {
        // Relaxed: it orders nothing.
        if !self.shared.spares.refill() || self.moves.swap(true, Ordering::Relaxed) {
            return;
        }
        let (shared, moves) = (Arc::clone(&self.shared), Arc::clone(&self.moves));
        self.shared.spares.have_done(move || {
            if let Err(error @ (MoveError::Refused { .. } | MoveError::Lost { .. })) = shared.move_to(key, to)
            {
                tracing::warn!("queue not moved: {error}");
            }
            moves.store(false, Ordering::Relaxed);
        });
    }

    /// Unblocks threads that stand still, and has others take over. Returns whether one has begun a
    /// turn, or is in one.
    fn look(&mut self) -> bool {
        let mut is_active = false;
        let shared = Arc::clone(&self.shared);
        for (number, thread) in shared.threads.iter().enumerate() {
            let blocked = thread.setting.blocked();
            is_active |= !blocked.is_empty();
            blocked.into_iter().for_each(|device| shared.devices.unblock(device));
            let now = thread.setting.counters.now();
            let seen = std::mem::replace(&mut self.seen[number], now);
            if now == seen
                && let Some(device) = now.1
            {
                let waits = waits_in_kernel(thread.id());
                shared.devices.unblock(device);
                self.take_over(thread);
                if waits {
                    self.isolate(device);
                }
            }
            is_active |= now.0 != seen.0 || now.1.is_some();
        }
        let (blocking, quiet) = shared.isolation.look(QUIET);
        is_active |= !blocking.is_empty();
        blocking.into_iter().for_each(|device| shared.devices.unblock(device));
        for device in quiet {
            let shared = Arc::clone(&shared);
            self.shared.spares.have_done(move || shared.rejoin(device));
        }
        shared.spares.refill();
        is_active
    }

    /// Gives a device that blocks a thread one of its own.
    fn isolate(&mut self, device: usize) {
        if !self.shared.spares.refill() {
            return;
        }
        match self.shared.isolation.begin(device) {
            Ok(true) => {
                let shared = Arc::clone(&self.shared);
                self.shared.spares.have_done(move || shared.isolate(device));
            }
            Ok(false) => {}
            Err(TooMany) if self.has_warned => {}
            Err(TooMany) => {
                self.has_warned = true;
                tracing::warn!(
                    "{MOST} devices have I/O threads of their own: others that block one get none"
                );
            }
        }
    }

    /// Has another thread serve the queues of one that is blocked, except for the device that blocks it.
    fn take_over(&mut self, thread: &IoThread) {
        if self.shared.spares.has_room() {
            self.is_short = false;
            if let Some(event_loop) = thread.setting.take_over() {
                self.shared.spares.run((Arc::clone(&thread.setting), event_loop));
            }
        } else if !std::mem::replace(&mut self.is_short, true) {
            tracing::warn!(
                "an I/O thread is blocked, and so are all {MOST} spare ones: the devices of that thread wait for \
                 memory of a client"
            );
        }
    }

    /// Loads since the last measurement.
    fn measure(&mut self) -> Vec<Load> {
        let now = Instant::now();
        let time = (now - std::mem::replace(&mut self.since, now)).as_nanos() as u64;
        let mut measured = HashMap::new();
        let mut loads = Vec::new();
        for (key, place) in self.shared.places() {
            let busy = place.work.busy_ns();
            measured.insert(key, busy);
            let Some(before) = self.measured.get(&key) else { continue };
            // One that moves now is counted next time.
            let Some(thread) = place.thread.try_lock().and_then(|thread| self.shared.number(&thread)) else {
                continue;
            };
            let busy = busy.wrapping_sub(*before) * 100 / time.max(1);
            let stays = place.moved.lock().is_some_and(|moved| now - moved < STAY);
            loads.push(Load { key, thread, busy, stays });
        }
        self.measured = measured;
        loads
    }
}

/// Whether a thread waits for something that no signal ends.
///
/// One that waits for a CPU does not, nor one that clears memory. `true` also where /proc does not tell.
fn waits_in_kernel(thread: i32) -> bool {
    let Ok(stat) = std::fs::read_to_string(format!("/proc/self/task/{thread}/stat")) else { return true };
    // proc_pid_stat(5): the state follows the name, which ends with the last parenthesis.
    stat.rsplit_once(") ").is_some_and(|(_, fields)| fields.starts_with('D'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_runs_or_sleeps_does_not_wait_in_the_kernel() {
        let (send, receive) = std::sync::mpsc::channel();
        let (end, wait) = std::sync::mpsc::channel::<()>();
        let sleeps = std::thread::spawn(move || {
            send.send(rustix::thread::gettid().as_raw_nonzero().get()).unwrap();
            let _ = wait.recv();
        });
        let sleeper = receive.recv().unwrap();
        assert!(!waits_in_kernel(rustix::thread::gettid().as_raw_nonzero().get()));
        assert!(!waits_in_kernel(sleeper));
        drop(end);
        sleeps.join().unwrap();
        assert!(waits_in_kernel(-1), "unknown");
    }
}
