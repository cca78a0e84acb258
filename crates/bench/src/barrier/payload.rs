//! Traffic of a driver and a device on two CPUs, with payloads.
//!
//! ```text
//! driver                                      device
//! tx: number the payload's first word         take a batch
//! post the buffer (batches of 32)             tx: read each payload, check its number
//! take back what is used                      rx: write each payload, numbered
//! rx: check its number                        complete, publish
//! ```
//! The payload of each buffer is one access. The rest of the device is that of `paravane bench
//! ring`. The driver touches only the number of a payload, so that the device is measured.
use super::order::{ORDERS, memory};
use crate::BenchError;
use crate::Row;
use crate::dma::paravane::{BY_DIRECTION, FULL, Paravane, RELAXED};
use crate::dma::timing::{LocalBuffer, MemoryAccess, Origin, Target};
use crate::error::broken;
use crate::machine::ThreadPlacement;
use crate::memory::SharedMemory;
use crate::ring::QUEUE_SIZE;
use crate::ring::stream::ends::{activate, layout};
use crate::ring::stream::{self, DeviceEnd, DriverEnd, Flow, Pair, RunTimes, Wait};
use crate::spread::Spread;
use crate::subject::PARAVANE;
use paravane_ring::device::{self, Batch};
use paravane_ring::driver;
use paravane_ring::{DmaArea, Segment};
use std::fmt;
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Intended length of a run.
pub(super) const RUN_TIME: Duration = Duration::from_millis(10);
/// Runs in one round of one subject; the median run stands for the round.
const RUNS: usize = 9;
/// SharedMemory between the starts of two payloads.
const STRIDE: usize = 64 << 10;
/// Offset of the payloads; the ring is at the start of memory.
const PAYLOADS: usize = 64 << 10;

/// One workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Case {
    /// Whether the device writes.
    receive: bool,
    /// SharedMemory of a payload.
    len: u32,
}

impl Case {
    /// Every workload: payloads of an Ethernet frame, largest TCP and UDP.
    pub(super) fn all() -> Vec<Self> {
        [1500, 65536].into_iter().flat_map(|len| [false, true].map(|receive| Self { receive, len })).collect()
    }

    /// The case of the queue.
    fn stream() -> stream::Case {
        stream::Case { packed: false, in_order: false, flow: Flow::Stream(32) }
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ring/{}/{}", if self.receive { "rx" } else { "tx" }, crate::dma::ops::Bytes(self.len))
    }
}

/// Offset of the payload of buffer number `n`.
fn payload(n: u64) -> usize {
    PAYLOADS + (n % u64::from(QUEUE_SIZE)) as usize * STRIDE
}

/// PayloadDriver payloads.
#[repr(align(128))]
struct PayloadDriver {
    queue: driver::Queue,
    memory: SharedMemory,
    case: Case,
    /// Buffers of all runs so far.
    before: u64,
}

// SAFETY: the memory belongs to the pair, not to a thread; its bytes are accessed atomically, by
// `SharedMemory`.
unsafe impl Send for PayloadDriver {}

impl DriverEnd for PayloadDriver {
    fn drive(&mut self, total: u64, case: stream::Case, wait: Wait<'_>) -> Result<u64, BenchError> {
        let (batch, outstanding) = (u64::from(case.batch()), u64::from(case.outstanding()));
        let end = self.before + total;
        let (mut added, mut taken, mut spins) = (self.before, self.before, 0);
        while taken < end {
            let next = batch.min(end - added);
            if next > 0 && added - taken + next <= outstanding {
                for _ in 0..next {
                    let at = payload(added);
                    let buffer = [Segment { addr: at as u64, len: self.case.len }];
                    if self.case.receive {
                        self.queue.add(&[], &buffer)
                    } else {
                        self.memory.store_u64(at, added);
                        self.queue.add(&buffer, &[])
                    }
                    .map_err(|error| broken(PARAVANE, error))?;
                    added += 1;
                }
                black_box(self.queue.publish());
            } else {
                let before = taken;
                spins += wait.until(|| {
                    taken += self.take()?;
                    Ok(taken > before)
                })?;
            }
            loop {
                let more = self.take()?;
                if more == 0 {
                    break;
                }
                taken += more;
            }
        }
        Ok(spins)
    }
}

impl PayloadDriver {
    /// Takes back one buffer, if one is used.
    fn take(&mut self) -> Result<u64, BenchError> {
        if self.queue.pop_used().map_err(|error| broken(PARAVANE, error))?.is_none() {
            return Ok(0);
        }
        let number = self.before;
        self.before += 1;
        if self.case.receive && self.memory.load_u64(payload(number)) != number {
            return Err(broken(
                PARAVANE,
                format_args!("payload {number} is used before its bytes are visible"),
            ));
        }
        Ok(1)
    }
}

/// Serves payloads in the order asked for.
///
/// One device serves all three orders: the place in memory makes more of a difference than they do.
#[repr(align(128))]
struct PayloadDevice {
    queue: device::Queue,
    batch: Batch,
    guards: (Paravane<RELAXED>, Paravane<BY_DIRECTION>, Paravane<FULL>),
    /// Index of the order.
    order: Arc<AtomicUsize>,
    case: Case,
    own: LocalBuffer,
    before: u64,
}

impl DeviceEnd for PayloadDevice {
    fn serve(&mut self, total: u64, wait: Wait<'_>) -> Result<(), BenchError> {
        let Self { queue, batch, guards, order, case, own, before } = self;
        let ends = (queue, batch, case, own, before);
        // Relaxed: stored before this thread started.
        match order.load(Ordering::Relaxed) {
            0 => serve(ends, &mut guards.0, total, wait),
            1 => serve(ends, &mut guards.1, total, wait),
            _ => serve(ends, &mut guards.2, total, wait),
        }
    }
}

/// The parts of the device that do not depend on the order.
type Ends<'a> = (&'a mut device::Queue, &'a mut Batch, &'a mut Case, &'a mut LocalBuffer, &'a mut u64);

/// A separate function for each order.
#[inline(never)]
fn serve<const ACCESS: u32>(
    (queue, batch, case, own, before): Ends<'_>,
    memory: &mut Paravane<ACCESS>,
    total: u64,
    wait: Wait<'_>,
) -> Result<(), BenchError> {
    let end = *before + total;
    while *before < end {
        wait.until(|| Ok(queue.pop(batch, |_, _| false).map_err(|error| broken(PARAVANE, error))? > 0))?;
        let guard = memory.enter();
        for chain in batch.chains() {
            let bytes = &mut own.bytes()[..case.len as usize];
            let ((&[segment], []) | ([], &[segment])) = batch.segments(chain) else {
                return Err(broken(PARAVANE, "a buffer has several segments"));
            };
            if case.receive {
                bytes[..8].copy_from_slice(&before.to_le_bytes());
                guard.write(segment.addr, bytes)?;
            } else {
                guard.read(segment.addr, bytes)?;
                if bytes[..8] != before.to_le_bytes() {
                    return Err(broken(
                        PARAVANE,
                        format_args!("payload {before} is available before its bytes are visible"),
                    ));
                }
            }
            queue.complete(chain.head, chain.writable_len()).map_err(|error| broken(PARAVANE, error))?;
            *before += 1;
        }
        drop(guard);
        black_box(queue.publish().map_err(|error| broken(PARAVANE, error))?);
    }
    Ok(())
}

/// Samples of an order: nanoseconds per payload, wall time and CPU time.
type Samples = Vec<[f64; 2]>;

/// Both ends of a workload with its samples.
pub(super) struct Workload {
    pub(super) case: Case,
    pair: Box<Pair>,
    order: Arc<AtomicUsize>,
    total: u64,
    samples: [Samples; ORDERS.len()],
}

impl Workload {
    /// Makes both ends and finds the number of buffers that fill a run.
    pub(super) fn new(case: Case, placement: &ThreadPlacement, run: Duration) -> Result<Self, BenchError> {
        let layout = layout(Case::stream())?;
        let size = PAYLOADS + usize::from(QUEUE_SIZE) * STRIDE;
        assert!(layout.memory() <= PAYLOADS);
        let (memory, region) = memory(size as u64)?;
        // SAFETY: the pair keeps the region mapped longer than its ends live; nothing makes
        // references to its bytes.
        let bytes = unsafe { SharedMemory::new(region.host(), size) };
        let (mut queue, addresses) = driver::Queue::new(layout, DmaArea { area: bytes.area(), addr: 0 })
            .map_err(|error| broken(PARAVANE, error))?;
        queue.disable_interrupts();
        let order = Arc::new(AtomicUsize::new(0));
        let device = PayloadDevice {
            queue: activate(Case::stream(), addresses, 0, bytes.area())?,
            batch: Batch::new(Case::stream().batch().into()),
            guards: (Paravane::direct(&memory), Paravane::direct(&memory), Paravane::direct(&memory)),
            order: Arc::clone(&order),
            case,
            own: LocalBuffer::new(case.len as usize),
            before: 0,
        };
        let pair =
            Pair::new(PayloadDriver { queue, memory: bytes, case, before: 0 }, device, (memory, region));
        let mut workload = Self { case, pair, order, total: 1 << 8, samples: Default::default() };
        loop {
            let took = workload.run_once(0, placement)?.time;
            if took >= run / 4 || workload.total >= 1 << 26 {
                let scale = run.as_secs_f64() / took.as_secs_f64().max(1e-6);
                workload.total = ((workload.total as f64 * scale) as u64).clamp(1 << 8, 1 << 26);
                return Ok(workload);
            }
            workload.total *= 4;
        }
    }

    fn run_once(&mut self, order: usize, placement: &ThreadPlacement) -> Result<RunTimes, BenchError> {
        // Relaxed: the thread of the device starts after this.
        self.order.store(order, Ordering::Relaxed);
        self.pair.run_once(Case::stream(), placement, self.total)
    }

    /// Measures one round: the median run of each order. Runs are interleaved.
    pub(super) fn sample(&mut self, placement: &ThreadPlacement, number: usize) -> Result<(), BenchError> {
        let mut runs = [const { Vec::new() }; ORDERS.len()];
        for run in 0..RUNS {
            for turn in 0..ORDERS.len() {
                let order = (turn + run + number) % ORDERS.len();
                runs[order].push(self.run_once(order, placement)?);
            }
        }
        let total = self.total as f64;
        for (samples, runs) in self.samples.iter_mut().zip(&runs) {
            let of = [|run: &RunTimes| run.time, |run: &RunTimes| run.cpu];
            samples.push(of.map(|of| {
                let values: Vec<f64> = runs.iter().map(|run| of(run).as_nanos() as f64 / total).collect();
                Spread::of(&values).map_or(0.0, |spread| spread.median)
            }));
        }
        Ok(())
    }

    /// The rows of all rounds.
    pub(super) fn rows(&self, placement: &ThreadPlacement, origin: &Origin<'_>) -> Vec<Row> {
        let case = self.case.to_string();
        let bits = f64::from(self.case.len) * 8.0;
        let of_order = |(order, samples): (&str, &Samples)| {
            let row = |names, of: &dyn Fn(&[f64; 2]) -> f64| {
                let values: Vec<f64> = samples.iter().map(of).collect();
                origin.row(&case, order, names, &values)
            };
            [
                // Bits per nanosecond are 10^3 Mbit/s.
                row(("rate", "10^6bit/s", placement.method()), &|sample| bits / sample[0] * 1e3),
                row(("time", "ns/payload", placement.method()), &|sample| sample[0]),
                row(("cpu", "ns/payload", "thread clock"), &|sample| sample[1]),
            ]
        };
        ORDERS.into_iter().zip(&self.samples).flat_map(of_order).flatten().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every payload arrives with its number, on one CPU too.
    #[test]
    fn every_payload_is_moved_whole() {
        let placement = ThreadPlacement { cpus: None, real_time: false };
        for case in Case::all() {
            let mut workload = Workload::new(case, &placement, Duration::from_micros(20)).unwrap();
            for (order, name) in ORDERS.into_iter().enumerate() {
                for total in [1, 700] {
                    workload.total = total;
                    workload
                        .run_once(order, &placement)
                        .unwrap_or_else(|error| panic!("{case} {name}: {error}"));
                }
            }
        }
    }
}
