//! Device side of the crate virtio-queue, over one region of vm-memory.
//!
//! It takes chains in the cheapest way that the crate offers: one `iter` per batch, with memory by
//! plain reference (`pop_descriptor_chain` reads the available index for each chain). The iterator
//! borrows the queue, so heads and lengths are kept until it is dropped. `add_used` publishes each
//! chain.
use super::case::{Case, QUEUE_SIZE};
use super::scripted::{ScriptedDriver, map};
use crate::BenchError;
use crate::error::{broken, miscounted};
use crate::memory::SharedMemory;
use crate::subject::Subject;
use std::ptr::NonNull;
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{Address, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

const NAME: &str = "virtio-queue";

/// The subject. Fields drop in order, the memory last.
pub(crate) struct Peer {
    queue: Queue,
    taken: Vec<(u16, u32)>,
    script: ScriptedDriver,
    size: u16,
    memory: GuestMemoryMmap,
}

impl Peer {
    pub(crate) fn new(case: Case) -> Result<Self, BenchError> {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), map::SIZE)])
            .map_err(|error| broken(NAME, error))?;
        let host = memory.get_host_address(GuestAddress(0)).map_err(|error| broken(NAME, error))?;
        let host = NonNull::new(host).ok_or_else(|| broken(NAME, "guest memory is at address 0"))?;
        // SAFETY: the one region is mapped, page-aligned, for as long as `memory` lives, which is
        // longer than the users of the area; vm-memory itself makes no references to its bytes.
        let shared = unsafe { SharedMemory::new(host, map::SIZE) };
        let script = ScriptedDriver::new(case, shared);
        let mut queue = Queue::new(QUEUE_SIZE).map_err(|error| broken(NAME, error))?;
        queue.set_desc_table_address(Some(map::DESC as u32), Some(0));
        queue.set_avail_ring_address(Some(map::AVAIL as u32), Some(0));
        queue.set_used_ring_address(Some(map::USED as u32), Some(0));
        queue.set_ready(true);
        if !queue.is_valid(&memory) {
            return Err(broken(NAME, "Queue::is_valid returns false"));
        }
        Ok(Self { queue, taken: Vec::with_capacity(case.batch.into()), script, size: case.batch, memory })
    }
}

impl Subject for Peer {
    fn run(&mut self, batches: u32) -> Result<u64, BenchError> {
        let Self { queue, taken, script, size, memory, .. } = self;
        let memory = &*memory;
        let mut sum = 0u64;
        for _ in 0..batches {
            script.offer();
            taken.clear();
            for chain in queue.iter(memory).map_err(|error| broken(NAME, error))? {
                let head = chain.head_index();
                let mut writable = 0;
                for descriptor in chain {
                    sum =
                        sum.wrapping_add(descriptor.addr().raw_value()).wrapping_add(descriptor.len().into());
                    if descriptor.is_write_only() {
                        writable += descriptor.len();
                    }
                }
                taken.push((head, writable));
            }
            if taken.len() != usize::from(*size) {
                return Err(miscounted(NAME, taken.len(), *size));
            }
            for &(head, written) in &*taken {
                queue.add_used(memory, head, written).map_err(|error| broken(NAME, error))?;
            }
            let interrupt = queue.needs_notification(memory).map_err(|error| broken(NAME, error))?;
            sum = sum.wrapping_add(interrupt.into());
        }
        Ok(sum)
    }

    fn position(&self) -> u16 {
        self.script.used()
    }
}
