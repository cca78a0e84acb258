//! Paravane's driver side: a batch is added, published, taken back.
use super::case::{BUFFER, Case, QUEUE_SIZE};
use super::scripted::ScriptedDevice;
use crate::BenchError;
use crate::error::{broken, miscounted};
use crate::memory::Pages;
use crate::subject::{PARAVANE, Subject};
use paravane_ring::driver::{DriverConfig, Queue};
use paravane_ring::{DmaArea, Segment};

/// The subject. Fields drop in order, the memory last.
pub(crate) struct Paravane {
    queue: Queue,
    script: ScriptedDevice,
    /// One buffer per chain of a batch.
    buffers: Vec<Buffer>,
    _pages: Pages,
}

/// The segments of a buffer.
struct Buffer {
    readable: Vec<Segment>,
    writable: Vec<Segment>,
}

impl Paravane {
    pub(crate) fn new(case: Case) -> Result<Self, BenchError> {
        let tables = if case.indirect { case.descriptors() } else { 0 };
        let layout = DriverConfig::new(QUEUE_SIZE, tables, case.features())
            .map_err(|error| broken(PARAVANE, error))?;
        let pages = Pages::new(layout.memory());
        let shared = pages.shared();
        let (queue, addresses) = Queue::new(layout, DmaArea { area: shared.area(), addr: pages.address() })
            .map_err(|error| broken(PARAVANE, error))?;
        let script = ScriptedDevice::at(case, shared, pages.address(), addresses);
        // The script touches no buffer, so any address is valid.
        let buffers = (0..u64::from(case.batch))
            .map(|slot| {
                let mut buffer = Buffer { readable: Vec::new(), writable: Vec::new() };
                let mut addr = 0x10_0000 + slot * BUFFER as u64;
                for segment in case.segments() {
                    let list = if segment.writable { &mut buffer.writable } else { &mut buffer.readable };
                    list.push(Segment { addr, len: segment.len });
                    addr += u64::from(segment.len);
                }
                buffer
            })
            .collect();
        Ok(Self { queue, script, buffers, _pages: pages })
    }
}

impl Subject for Paravane {
    fn run(&mut self, batches: u32) -> Result<u64, BenchError> {
        let Self { queue, script, buffers, .. } = self;
        let mut sum = 0u64;
        for _ in 0..batches {
            for buffer in &*buffers {
                queue.add(&buffer.readable, &buffer.writable).map_err(|error| broken(PARAVANE, error))?;
            }
            sum = sum.wrapping_add(queue.publish().into());
            script.serve();
            let mut count = 0;
            while let Some(used) = queue.pop_used().map_err(|error| broken(PARAVANE, error))? {
                sum = sum.wrapping_add(used.len.into());
                count += 1;
            }
            if count != buffers.len() {
                return Err(miscounted(PARAVANE, count, buffers.len() as u16));
            }
        }
        Ok(sum)
    }

    fn position(&self) -> u16 {
        self.script.available()
    }
}
