//! Published crates as one end of a stream, with Paravane as the other.
use super::super::case::{BUFFER, QUEUE_SIZE, SegmentShape};
use super::super::virtio_driver::{self, Adapter};
use super::case::Case;
use super::ends::{ParavaneDevice, ParavaneDriver, layout};
use super::run::{DeviceEnd, DriverEnd, Pair, Wait};
use crate::BenchError;
use crate::error::broken;
use crate::memory::SharedMemory;
use crate::subject::PARAVANE;
use paravane_ring::{DmaArea, QueueAddresses};
use std::hint::black_box;
use std::ptr::NonNull;
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

const VIRTIO_QUEUE: &str = "virtio-queue";

/// Paravane's driver and the device of virtio-queue.
pub(super) fn with_virtio_queue(case: Case) -> Result<Box<Pair>, BenchError> {
    let layout = layout(case)?;
    let size = layout.memory().next_multiple_of(crate::memory::PAGE);
    let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), size)])
        .map_err(|error| broken(VIRTIO_QUEUE, error))?;
    let host = memory.get_host_address(GuestAddress(0)).map_err(|error| broken(VIRTIO_QUEUE, error))?;
    let host = NonNull::new(host).ok_or_else(|| broken(VIRTIO_QUEUE, "guest memory is at address 0"))?;
    // SAFETY: the one region is mapped, page-aligned, for as long as `memory` lives, which is
    // longer than the two ends; vm-memory itself makes no references to its bytes.
    let area = unsafe { SharedMemory::new(host, size) }.area();
    let (driver, addresses) = ParavaneDriver::new(layout, DmaArea { area, addr: 0 })?;
    let device = VirtioQueue::new(case, addresses, memory.clone())?;
    Ok(Pair::new(driver, device, memory))
}

/// The device of virtio-queue.
///
/// [`super::super::virtio_queue`] says why it uses `iter`.
#[repr(align(128))]
struct VirtioQueue {
    queue: Queue,
    taken: Vec<(u16, u32)>,
    memory: GuestMemoryMmap,
}

impl VirtioQueue {
    fn new(case: Case, addresses: QueueAddresses, memory: GuestMemoryMmap) -> Result<Self, BenchError> {
        let mut queue = Queue::new(QUEUE_SIZE).map_err(|error| broken(VIRTIO_QUEUE, error))?;
        let low = |addr: u64| Some(addr as u32);
        queue.set_desc_table_address(low(addresses.desc), Some(0));
        queue.set_avail_ring_address(low(addresses.driver), Some(0));
        queue.set_used_ring_address(low(addresses.device), Some(0));
        queue.set_event_idx(true);
        queue.set_ready(true);
        if !queue.is_valid(&memory) {
            return Err(broken(VIRTIO_QUEUE, "Queue::is_valid returns false"));
        }
        queue.disable_notification(&memory).map_err(|error| broken(VIRTIO_QUEUE, error))?;
        Ok(Self { queue, taken: Vec::with_capacity(case.batch().into()), memory })
    }
}

impl DeviceEnd for VirtioQueue {
    fn serve(&mut self, total: u64, wait: Wait<'_>) -> Result<(), BenchError> {
        let Self { queue, taken, memory } = self;
        let memory = &*memory;
        let mut served = 0;
        while served < total {
            wait.until(|| {
                taken.clear();
                let most = taken.capacity();
                for chain in queue.iter(memory).map_err(|error| broken(VIRTIO_QUEUE, error))?.take(most) {
                    let head = chain.head_index();
                    let mut writable = 0;
                    for descriptor in chain {
                        black_box((descriptor.addr(), descriptor.len()));
                        writable += descriptor.len();
                    }
                    taken.push((head, writable));
                }
                Ok(!taken.is_empty())
            })?;
            for &(head, written) in &*taken {
                queue.add_used(memory, head, written).map_err(|error| broken(VIRTIO_QUEUE, error))?;
            }
            black_box(queue.needs_notification(memory).map_err(|error| broken(VIRTIO_QUEUE, error))?);
            served += taken.len() as u64;
        }
        Ok(())
    }
}

/// The driver of virtio-driver and Paravane's device.
pub(super) fn with_virtio_driver(case: Case) -> Result<Box<Pair>, BenchError> {
    let (driver, addresses, pages) = Adapter::new(case.features())?;
    let area = pages.shared().area();
    let device = ParavaneDevice::new(case, addresses, pages.address(), area)?;
    Ok(Pair::new(VirtioDriver(driver), device, pages))
}

#[repr(align(128))]
struct VirtioDriver(Adapter);

impl DriverEnd for VirtioDriver {
    fn drive(&mut self, total: u64, case: Case, wait: Wait<'_>) -> Result<u64, BenchError> {
        let queue = &mut self.0;
        let buffer = [SegmentShape { len: BUFFER as u32, writable: true }];
        let (batch, outstanding) = (u64::from(case.batch()), u64::from(case.outstanding()));
        let (mut added, mut taken, mut spins) = (0u64, 0u64, 0u64);
        while taken < total {
            let next = batch.min(total - added);
            if next > 0 && added - taken + next <= outstanding {
                for _ in 0..next {
                    queue.add(&buffer).map_err(|error| broken(virtio_driver::NAME, error))?;
                }
                black_box(queue.kick());
                added += next;
            } else {
                spins += wait.until(|| Ok(queue.take().inspect(|_| taken += 1).is_some()))?;
            }
            for _ in 0..batch {
                let Some(id) = queue.take() else { break };
                black_box(id);
                taken += 1;
            }
        }
        if added != taken {
            return Err(broken(PARAVANE, format_args!("{added} buffers became {taken}")));
        }
        Ok(spins)
    }
}
