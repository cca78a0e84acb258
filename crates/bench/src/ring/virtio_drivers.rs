//! Driver side of the crate virtio-drivers, with memory sharing for free.
//!
//! `add` stores the available index each time. `pop_used` takes the buffers again, so the loop
//! rebuilds their slices; this is part of the cost. `peek_used` names the next used buffer, as a
//! driver with several buffers in flight needs it.
use super::case::{BUFFER, Case, QUARTER, QUEUE_SIZE, Shape};
use super::scripted::ScriptedDevice;
use crate::BenchError;
use crate::error::{broken, miscounted};
use crate::memory::{PAGE, Pages, SharedMemory};
use crate::subject::Subject;
use paravane_spec::split;
use std::ptr::NonNull;
use virtio_drivers::queue::VirtQueue;
use virtio_drivers::transport::{DeviceStatus, DeviceType, InterruptStatus, Transport};
use virtio_drivers::{BufferDirection, Hal, PhysAddr};
use zerocopy::{FromBytes, Immutable, IntoBytes};

const NAME: &str = "virtio-drivers";

/// A platform where device addresses are those of the process, and sharing is free.
struct Identity;

// SAFETY: pages come zeroed and page-aligned from the allocator, unaliased until deallocated.
// Sharing does nothing, and only the caller touches a buffer.
unsafe impl Hal for Identity {
    fn dma_alloc(pages: usize, _direction: BufferDirection) -> (PhysAddr, NonNull<u8>) {
        Pages::new(pages * PAGE).into_raw()
    }

    unsafe fn dma_dealloc(_paddr: PhysAddr, vaddr: NonNull<u8>, pages: usize) -> i32 {
        // SAFETY: the caller returns what `dma_alloc` gave, with the same number of pages.
        drop(unsafe { Pages::from_raw(vaddr, pages * PAGE) });
        0
    }

    unsafe fn mmio_phys_to_virt(_paddr: PhysAddr, _size: usize) -> NonNull<u8> {
        unreachable!("only the PCI transport of the crate calls this")
    }

    #[inline]
    unsafe fn share(buffer: NonNull<[u8]>, _direction: BufferDirection) -> PhysAddr {
        buffer.cast::<u8>().as_ptr().expose_provenance() as u64
    }

    #[inline]
    unsafe fn unshare(_paddr: PhysAddr, _buffer: NonNull<[u8]>, _direction: BufferDirection) {}
}

/// A transport that records the addresses of the rings.
#[derive(Default)]
struct Recorder {
    avail: PhysAddr,
    used: PhysAddr,
}

impl Transport for Recorder {
    fn device_type(&self) -> DeviceType {
        DeviceType::EntropySource
    }

    fn read_device_features(&mut self) -> u64 {
        0
    }

    fn write_driver_features(&mut self, _driver_features: u64) {}

    fn max_queue_size(&mut self, _queue: u16) -> u32 {
        QUEUE_SIZE.into()
    }

    fn notify(&mut self, _queue: u16) {}

    fn get_status(&self) -> DeviceStatus {
        DeviceStatus::DRIVER_OK
    }

    fn set_status(&mut self, _status: DeviceStatus) {}

    fn set_guest_page_size(&mut self, _guest_page_size: u32) {}

    fn requires_legacy_layout(&self) -> bool {
        false
    }

    fn queue_set(&mut self, _queue: u16, _size: u32, _desc: PhysAddr, avail: PhysAddr, used: PhysAddr) {
        (self.avail, self.used) = (avail, used);
    }

    fn queue_unset(&mut self, _queue: u16) {}

    fn queue_used(&mut self, _queue: u16) -> bool {
        false
    }

    fn ack_interrupt(&mut self) -> InterruptStatus {
        InterruptStatus::empty()
    }

    fn read_config_generation(&self) -> u32 {
        0
    }

    fn read_config_space<T: FromBytes + IntoBytes>(&self, _offset: usize) -> virtio_drivers::Result<T> {
        Err(virtio_drivers::Error::ConfigSpaceMissing)
    }

    fn write_config_space<T: IntoBytes + Immutable>(
        &mut self,
        _offset: usize,
        _value: T,
    ) -> virtio_drivers::Result<()> {
        Err(virtio_drivers::Error::ConfigSpaceMissing)
    }
}

/// A buffer of `R` readable and `W` writable segments.
struct Buffer<const R: usize, const W: usize, const LEN: usize> {
    readable: [[u8; LEN]; R],
    writable: [[u8; LEN]; W],
}

/// The subject for one shape of buffers.
struct Peer<const R: usize, const W: usize, const LEN: usize> {
    queue: VirtQueue<Identity, { QUEUE_SIZE as usize }>,
    script: ScriptedDevice,
    /// One buffer per chain of a batch.
    buffers: Vec<Buffer<R, W, LEN>>,
}

/// Makes the subject.
pub(crate) fn peer(case: Case) -> Result<Box<dyn Subject>, BenchError> {
    Ok(if case.shape == Shape::One {
        Box::new(Peer::<0, 1, BUFFER>::new(case)?)
    } else {
        Box::new(Peer::<1, 3, QUARTER>::new(case)?)
    })
}

/// Whether a case has this subject: its buffers have segments of one length.
pub(crate) fn has(case: Case) -> bool {
    matches!(case.shape, Shape::One | Shape::Four)
}

impl<const R: usize, const W: usize, const LEN: usize> Peer<R, W, LEN> {
    fn new(case: Case) -> Result<Self, BenchError> {
        let mut transport = Recorder::default();
        let queue =
            VirtQueue::new(&mut transport, 0, case.indirect, false).map_err(|error| broken(NAME, error))?;
        let ring_at = |addr: PhysAddr, len| {
            let ptr = NonNull::new(std::ptr::with_exposed_provenance_mut(addr as usize));
            // SAFETY: the queue reported this address. The ring has the length of the specification
            // for this queue size (the event field is unused), and lives as long as the queue,
            // which lives as long as the script.
            ptr.map(|ptr| unsafe { SharedMemory::new(ptr, len) })
                .ok_or_else(|| broken(NAME, "a ring is at address 0"))
        };
        let size = usize::from(QUEUE_SIZE);
        let avail = ring_at(transport.avail, split::AVAIL_RING + size * split::AVAIL_ENTRY)?;
        let used = ring_at(transport.used, split::USED_RING + size * split::USED_ENTRY)?;
        let buffers =
            (0..case.batch).map(|_| Buffer { readable: [[0; LEN]; R], writable: [[0; LEN]; W] }).collect();
        Ok(Self { queue, script: ScriptedDevice::split(case, avail, used), buffers })
    }
}

impl<const R: usize, const W: usize, const LEN: usize> Subject for Peer<R, W, LEN> {
    fn run(&mut self, batches: u32) -> Result<u64, BenchError> {
        let Self { queue, script, buffers } = self;
        let mut sum = 0u64;
        for _ in 0..batches {
            for buffer in &mut *buffers {
                let inputs = buffer.readable.each_ref().map(|segment| &segment[..]);
                let mut outputs = buffer.writable.each_mut().map(|segment| &mut segment[..]);
                // SAFETY: the buffer lives as long as the queue, and is not touched until it is
                // popped.
                unsafe { queue.add(&inputs, &mut outputs) }.map_err(|error| broken(NAME, error))?;
            }
            sum = sum.wrapping_add(queue.should_notify().into());
            script.serve();
            let mut count = 0;
            while let Some(token) = queue.peek_used() {
                // The script keeps the order, so the next used buffer is the next one added.
                let Some(buffer) = buffers.get_mut(count) else { break };
                let inputs = buffer.readable.each_ref().map(|segment| &segment[..]);
                let mut outputs = buffer.writable.each_mut().map(|segment| &mut segment[..]);
                // SAFETY: the same buffer was added under this token.
                let len = unsafe { queue.pop_used(token, &inputs, &mut outputs) }
                    .map_err(|error| broken(NAME, error))?;
                sum = sum.wrapping_add(len.into());
                count += 1;
            }
            if count != buffers.len() {
                return Err(miscounted(NAME, count, buffers.len() as u16));
            }
        }
        Ok(sum)
    }

    fn position(&self) -> u16 {
        self.script.available()
    }
}
