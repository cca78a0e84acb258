//! Paravane's driver and device as the ends of a stream.
use super::super::case::{BUFFER, QUEUE_SIZE};

use super::case::Case;
use super::run::{DeviceEnd, DriverEnd, Wait};
use crate::BenchError;
use crate::error::broken;
use crate::subject::PARAVANE;
use paravane_ring::device::{self, Batch, QueueConfig};
use paravane_ring::driver::{self, DriverConfig};
use paravane_ring::{DmaArea, QueueAddresses, Segment};
use std::hint::black_box;

/// The configuration of the driver's queue.
pub(crate) fn layout(case: Case) -> Result<DriverConfig, BenchError> {
    DriverConfig::new(QUEUE_SIZE, 0, case.features()).map_err(|error| broken(PARAVANE, error))
}

/// Paravane's driver, alone on its cache lines.
#[repr(align(128))]
pub(super) struct ParavaneDriver {
    queue: driver::Queue,
}

impl ParavaneDriver {
    /// Lays out the queue in `memory`, which must outlive it.
    pub(super) fn new(layout: DriverConfig, memory: DmaArea) -> Result<(Self, QueueAddresses), BenchError> {
        let (mut queue, addresses) =
            driver::Queue::new(layout, memory).map_err(|error| broken(PARAVANE, error))?;
        queue.disable_interrupts();
        Ok((Self { queue }, addresses))
    }
}

impl DriverEnd for ParavaneDriver {
    fn drive(&mut self, total: u64, case: Case, wait: Wait<'_>) -> Result<u64, BenchError> {
        let queue = &mut self.queue;
        let (batch, outstanding) = (u64::from(case.batch()), u64::from(case.outstanding()));
        // The bytes of the buffer are not accessed.
        let buffer = [Segment { addr: 0x10_0000, len: BUFFER as u32 }];
        let (mut added, mut taken, mut spins) = (0u64, 0u64, 0u64);
        while taken < total {
            // A whole batch, or the rest.
            let next = batch.min(total - added);
            if next > 0 && added - taken + next <= outstanding {
                for _ in 0..next {
                    queue.add(&[], &buffer).map_err(|error| broken(PARAVANE, error))?;
                }
                black_box(queue.publish());
                added += next;
            } else {
                // Wait for a used buffer.
                spins += wait.until(|| match queue.pop_used() {
                    Ok(Some(used)) => {
                        black_box(used);
                        taken += 1;
                        Ok(true)
                    }
                    Ok(None) => Ok(false),
                    Err(error) => Err(broken(PARAVANE, error)),
                })?;
            }
            for _ in 0..batch {
                let Some(used) = queue.pop_used().map_err(|error| broken(PARAVANE, error))? else { break };
                black_box(used);
                taken += 1;
            }
        }
        Ok(spins)
    }
}

/// Activates the device side of the queue at `addresses`.
///
/// `area` starts at device address `base` and must outlive the queue.
pub(crate) fn activate(
    case: Case,
    addresses: QueueAddresses,
    base: u64,
    area: paravane_ring::Area,
) -> Result<device::Queue, BenchError> {
    let config =
        QueueConfig::new(addresses, QUEUE_SIZE, case.features()).map_err(|error| broken(PARAVANE, error))?;
    let [desc, driver, device] = config.areas().map(|request| {
        area.slice((request.addr - base) as usize, request.len).expect("the driver laid the queue out here")
    });
    // SAFETY: the areas are those that `areas` requests, in memory that the caller keeps longer
    // than the queue.
    let mut queue =
        unsafe { config.activate(desc, driver, device) }.map_err(|error| broken(PARAVANE, error))?;
    queue.disable_kicks();
    Ok(queue)
}

/// Paravane's device, alone on its cache lines.
#[repr(align(128))]
pub(crate) struct ParavaneDevice {
    queue: device::Queue,
    batch: Batch,
}

impl ParavaneDevice {
    /// Serves the queue at `addresses`; see [`activate`].
    pub(crate) fn new(
        case: Case,
        addresses: QueueAddresses,
        base: u64,
        area: paravane_ring::Area,
    ) -> Result<Self, BenchError> {
        Ok(Self { queue: activate(case, addresses, base, area)?, batch: Batch::new(case.batch().into()) })
    }
}

impl DeviceEnd for ParavaneDevice {
    fn serve(&mut self, total: u64, wait: Wait<'_>) -> Result<(), BenchError> {
        let Self { queue, batch } = self;
        let mut served = 0;
        while served < total {
            wait.until(|| Ok(queue.pop(batch, |_, _| false).map_err(|error| broken(PARAVANE, error))? > 0))?;
            for (chain, readable, writable) in batch.iter() {
                black_box((readable, writable));
                queue.complete(chain.head, chain.writable_len()).map_err(|error| broken(PARAVANE, error))?;
            }
            black_box(queue.publish().map_err(|error| broken(PARAVANE, error))?);
            served += batch.chains().len() as u64;
        }
        Ok(())
    }
}
