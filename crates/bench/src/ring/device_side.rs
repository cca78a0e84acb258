//! Paravane's device side: a batch is popped, read, completed, published.
use super::case::{Case, QUEUE_SIZE};
use super::scripted::{ScriptedDriver, map};
use crate::BenchError;
use crate::error::{broken, miscounted};
use crate::memory::SharedMemory;
use crate::subject::{PARAVANE, Subject};
use paravane_dma::{Access, AccessGuard, Backing, Handle, InPlace, Memory, Region, RegionConfig};
use paravane_ring::device::{Batch, Queue, QueueConfig, TableMemory};
use paravane_ring::{Area, QueueAddresses};
use std::hint::black_box;
use std::sync::Arc;

/// The subject. Fields drop in order, the memory last.
pub(crate) struct Paravane {
    queue: Queue,
    batch: Batch,
    script: ScriptedDriver,
    handle: Handle,
    size: u16,
    _memory: Memory,
    _region: Arc<Region>,
}

/// Indirect tables, as devices read them.
struct Tables<'a>(&'a AccessGuard<'a>, InPlace<'a>);

impl TableMemory for Tables<'_> {
    #[inline(always)]
    fn in_place(&mut self, addr: u64, len: u32) -> Option<Area> {
        let table = self.1.find(addr, len)?;
        // SAFETY: guest memory, to which nothing makes references, and which stays mapped while the
        // guard lives. The queue uses it only until it returns to the guard's borrower.
        Some(unsafe { Area::new(table, len as usize) })
    }

    fn copy(&mut self, addr: u64, table: &mut [u8]) -> bool {
        // The acquire of the available index already orders the table's fetch.
        self.0.read(addr, table, Access::READ | Access::RELAXED).is_ok()
    }
}

impl Paravane {
    pub(crate) fn new(case: Case) -> Result<Self, BenchError> {
        let region = Region::new(RegionConfig {
            gpa: 0,
            size: map::SIZE as u64,
            backing: Backing::Pages,
            writable: true,
        })
        .map_err(|error| broken(PARAVANE, error))?;
        let memory = Memory::new(vec![Arc::clone(&region)]).map_err(|error| broken(PARAVANE, error))?;
        // SAFETY: the region is mapped for as long as it is held, which is longer than the users of
        // the area; it is page-aligned and nothing makes references to it.
        let shared = unsafe { SharedMemory::new(region.host(), map::SIZE) };
        let script = ScriptedDriver::new(case, shared);
        let addresses = QueueAddresses {
            size: QUEUE_SIZE,
            desc: map::DESC as u64,
            driver: map::AVAIL as u64,
            device: map::USED as u64,
        };
        let config = QueueConfig::new(addresses, QUEUE_SIZE, case.features())
            .map_err(|error| broken(PARAVANE, error))?;
        let [desc, driver, device] = config.areas().map(|request| {
            shared.area().slice(request.addr as usize, request.len).expect("the map has room for the queue")
        });
        // SAFETY: the areas are those that `areas` requests, in memory that is dropped after the
        // queue.
        let queue =
            unsafe { config.activate(desc, driver, device) }.map_err(|error| broken(PARAVANE, error))?;
        Ok(Self {
            queue,
            batch: Batch::new(case.batch.into()),
            script,
            handle: memory.handle(),
            size: case.batch,
            _memory: memory,
            _region: region,
        })
    }
}

impl Subject for Paravane {
    fn run(&mut self, batches: u32) -> Result<u64, BenchError> {
        let Self { queue, batch, script, handle, size, .. } = self;
        let mut sum = 0u64;
        let handle = handle.enter();
        let mut tables = Tables(&handle, handle.in_place());
        for _ in 0..batches {
            script.offer();
            let count = queue.pop_in_place(batch, &mut tables).map_err(|error| broken(PARAVANE, error))?;
            if count != usize::from(*size) {
                return Err(miscounted(PARAVANE, count, *size));
            }
            let served = batch.iter().map(|(chain, readable, writable)| {
                for segment in readable {
                    sum = sum.wrapping_add(segment.addr).wrapping_add(segment.len.into());
                    black_box(());
                }
                for segment in writable {
                    sum = sum.wrapping_add(segment.addr).wrapping_add(segment.len.into());
                    black_box(());
                }
                (chain.head, chain.writable_len())
            });
            queue.complete_all(served).map_err(|error| broken(PARAVANE, error))?;
            let interrupt = queue.publish().map_err(|error| broken(PARAVANE, error))?;
            sum = sum.wrapping_add(interrupt.into());
        }
        Ok(sum)
    }

    fn position(&self) -> u16 {
        self.script.used()
    }
}
