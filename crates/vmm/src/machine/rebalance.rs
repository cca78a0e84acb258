//! Moves queues from busy I/O threads to idle ones while the machine runs.
//!
//! ```text
//!   every PERIOD:  what each queue did --> advise --> at most one move
//! ```
use crate::lock::lock;
use crate::machine::balance::{Load, advise};
use crate::machine::bus::Bus;
use paravane_attach::{AttachedDevice, MoveError, QueueStatus};
use paravane_io::QueueKey;
use std::collections::HashMap;
use std::io;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

/// Interval between decisions.
const PERIOD: Duration = Duration::from_millis(50);
/// Stack of its thread.
const STACK: usize = 128 << 10;

/// The thread that moves queues.
pub(crate) struct Rebalancer(Mutex<Option<(Sender<()>, JoinHandle<()>)>>);

impl Rebalancer {
    /// Starts the thread, for the devices on `bus`, which `threads` I/O threads serve.
    ///
    /// # Errors
    /// The host refuses a thread.
    pub(crate) fn spawn(bus: Arc<Bus>, threads: usize) -> io::Result<Self> {
        let (sender, ended) = channel();
        let run = move || {
            let mut before = HashMap::new();
            while ended.recv_timeout(PERIOD) == Err(RecvTimeoutError::Timeout) {
                step(bus.devices(), threads, &mut before);
            }
        };
        let thread = std::thread::Builder::new().name("rebalance".into()).stack_size(STACK).spawn(run)?;
        Ok(Self(Mutex::new(Some((sender, thread)))))
    }

    /// Ends the thread: no queue is moved afterwards.
    pub(crate) fn stop(&self) {
        if let Some((sender, thread)) = lock(&self.0).take() {
            drop(sender);
            if thread.join().is_err() {
                tracing::error!("the thread that moves queues panicked");
            }
        }
    }
}

impl Drop for Rebalancer {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Moves one queue, if the work done since `before` makes it worth it.
///
/// `before` is updated.
fn step(devices: &[AttachedDevice], threads: usize, before: &mut HashMap<(usize, u16), u64>) {
    let mut loads: Vec<Load> = devices.iter().flat_map(loads).collect();
    for load in &mut loads {
        let earlier = before.insert((load.key.device, load.key.queue), load.work).unwrap_or(load.work);
        load.work -= earlier.min(load.work);
    }
    let Some((key, to)) = advise(threads, &loads) else { return };
    let Some(device) = devices.get(key.device) else { return };
    match device.move_queue(key.queue, to) {
        Ok(()) => tracing::debug!(device = key.device, queue = key.queue, to, "queue moved"),
        // It was stopped meanwhile.
        Err(MoveError::NotLive { .. }) => {}
        Err(error) => tracing::warn!(device = key.device, queue = key.queue, "queue not moved: {error}"),
    }
}

/// What each live queue of `device` has done since its first start.
fn loads(device: &AttachedDevice) -> Vec<Load> {
    let load = |queue: &QueueStatus| Load {
        key: QueueKey { device: device.number(), queue: queue.queue },
        thread: queue.thread,
        work: queue.work,
    };
    device.queues().iter().filter(|queue| queue.live).map(load).collect()
}
