//! The two ends of a stream: ours, and how a pair of ends is made.
use super::super::case::{BUFFER, QUEUE_SIZE};
use super::super::subject::{OURS, broken};
use super::{Case, Place, Shot, Wait};
use crate::BenchError;
use crate::memory::Pages;
use paravane_ring::device::{self, Batch, QueueConfig};
use paravane_ring::driver::{self, DriverConfig};
use paravane_ring::{DmaArea, QueueAddresses, Segment};
use std::hint::black_box;

/// The driver of a stream, on a thread of its own. One call a shot, so that the loop is compiled for the queue.
pub(crate) trait DriverEnd: Send {
    /// Moves `total` buffers and returns how often it found none used and waited.
    ///
    /// # Errors
    /// The queue refused, or the device does not answer.
    fn drive(&mut self, total: u64, case: Case, wait: Wait<'_>) -> Result<u64, BenchError>;
}

/// The device of a stream.
pub(crate) trait DeviceEnd: Send {
    /// Serves `total` buffers.
    ///
    /// # Errors
    /// The queue refused, or the driver does not come.
    fn serve(&mut self, total: u64, wait: Wait<'_>) -> Result<(), BenchError>;
}

/// Two ends of one queue, and its memory.
pub(crate) struct Pair {
    driver: Box<dyn DriverEnd>,
    device: Box<dyn DeviceEnd>,
    _memory: Box<dyn Send>,
}

impl Pair {
    /// Puts two ends together. `memory` is kept until they are gone.
    pub(crate) fn new(
        driver: impl DriverEnd + 'static,
        device: impl DeviceEnd + 'static,
        memory: impl Send + 'static,
    ) -> Box<Self> {
        Box::new(Self { driver: Box::new(driver), device: Box::new(device), _memory: Box::new(memory) })
    }

    /// See [`super::shoot`].
    pub(crate) fn shoot(&mut self, case: Case, place: &Place, total: u64) -> Result<Shot, BenchError> {
        super::shoot(&mut *self.driver, &mut *self.device, case, place, total)
    }
}

/// The subjects of a case that run in this process, ours first.
pub(crate) fn names(case: Case) -> Vec<&'static str> {
    let mut names = vec![OURS];
    // Neither knows IN_ORDER; virtio-queue has no packed ring, and virtio-driver's fails at one descriptor.
    if cfg!(feature = "peers") && !case.in_order && !case.packed {
        names.extend(["virtio-queue", "virtio-driver"]);
    }
    names
}

/// Makes the subject called `name`: ours at both ends, or a peer at one and ours at the other.
///
/// # Errors
/// It could not be set up.
pub(crate) fn pair(case: Case, name: &str) -> Result<Box<Pair>, BenchError> {
    match name {
        #[cfg(feature = "peers")]
        "virtio-queue" => super::peer_ends::with_virtio_queue(case),
        #[cfg(feature = "peers")]
        "virtio-driver" => super::peer_ends::with_virtio_driver(case),
        _ => {
            let layout = layout(case)?;
            let pages = Pages::new(layout.memory());
            let area = pages.place().area();
            let (driver, addresses) = OurDriver::new(layout, DmaArea { area, addr: 0 })?;
            let device = OurDevice::new(case, addresses, 0, area)?;
            Ok(Pair::new(driver, device, pages))
        }
    }
}

/// Our driver's layout of the queue.
pub(crate) fn layout(case: Case) -> Result<DriverConfig, BenchError> {
    DriverConfig::new(QUEUE_SIZE, 0, case.features()).map_err(|error| broken(OURS, error))
}

/// Our driver, alone on its cache lines.
#[repr(align(128))]
pub(super) struct OurDriver {
    queue: driver::Queue,
}

impl OurDriver {
    /// Lays the queue out in `memory`, which must outlive it.
    pub(super) fn new(layout: DriverConfig, memory: DmaArea) -> Result<(Self, QueueAddresses), BenchError> {
        let (mut queue, addresses) =
            driver::Queue::new(layout, memory).map_err(|error| broken(OURS, error))?;
        queue.disable_interrupts();
        Ok((Self { queue }, addresses))
    }
}

impl DriverEnd for OurDriver {
    fn drive(&mut self, total: u64, case: Case, wait: Wait<'_>) -> Result<u64, BenchError> {
        let queue = &mut self.queue;
        let (batch, outstanding) = (u64::from(case.batch()), u64::from(case.outstanding()));
        // Nobody touches the buffer's bytes.
        let buffer = [Segment { addr: 0x10_0000, len: BUFFER as u32 }];
        let (mut added, mut taken, mut spins) = (0u64, 0u64, 0u64);
        while taken < total {
            // A whole batch, or what is left.
            let next = batch.min(total - added);
            if next > 0 && added - taken + next <= outstanding {
                for _ in 0..next {
                    queue.add(&[], &buffer).map_err(|error| broken(OURS, error))?;
                }
                black_box(queue.publish());
                added += next;
            } else {
                // Nothing else to do than to wait for a buffer.
                spins += wait.until(|| match queue.pop_used() {
                    Ok(Some(used)) => {
                        black_box(used);
                        taken += 1;
                        Ok(true)
                    }
                    Ok(None) => Ok(false),
                    Err(error) => Err(broken(OURS, error)),
                })?;
            }
            for _ in 0..batch {
                let Some(used) = queue.pop_used().map_err(|error| broken(OURS, error))? else { break };
                black_box(used);
                taken += 1;
            }
        }
        Ok(spins)
    }
}

/// The device's side of the queue at `addresses`. `area` has the device address `base`, and must outlive it.
pub(crate) fn activate(
    case: Case,
    addresses: QueueAddresses,
    base: u64,
    area: paravane_ring::Area,
) -> Result<device::Queue, BenchError> {
    let config =
        QueueConfig::new(addresses, QUEUE_SIZE, case.features()).map_err(|error| broken(OURS, error))?;
    let [desc, driver, device] = config.areas().map(|request| {
        area.slice((request.addr - base) as usize, request.len).expect("the driver laid the queue out here")
    });
    // SAFETY: the areas are what was asked for, in memory that the caller keeps longer than the queue.
    let mut queue = unsafe { config.activate(desc, driver, device) }.map_err(|error| broken(OURS, error))?;
    queue.disable_kicks();
    Ok(queue)
}

/// Our device, alone on its cache lines.
#[repr(align(128))]
pub(crate) struct OurDevice {
    queue: device::Queue,
    batch: Batch,
}

impl OurDevice {
    /// Takes the queue at `addresses` into use. `area` has the device address `base`, and must outlive it.
    pub(crate) fn new(
        case: Case,
        addresses: QueueAddresses,
        base: u64,
        area: paravane_ring::Area,
    ) -> Result<Self, BenchError> {
        Ok(Self { queue: activate(case, addresses, base, area)?, batch: Batch::new(case.batch().into()) })
    }
}

impl DeviceEnd for OurDevice {
    fn serve(&mut self, total: u64, wait: Wait<'_>) -> Result<(), BenchError> {
        let Self { queue, batch } = self;
        let mut served = 0;
        while served < total {
            wait.until(|| Ok(queue.pop(batch, |_, _| false).map_err(|error| broken(OURS, error))? > 0))?;
            for (chain, readable, writable) in batch.iter() {
                black_box((readable, writable));
                queue.complete(chain.head, chain.writable_len()).map_err(|error| broken(OURS, error))?;
            }
            black_box(queue.publish().map_err(|error| broken(OURS, error))?);
            served += batch.chains().len() as u64;
        }
        Ok(())
    }
}
