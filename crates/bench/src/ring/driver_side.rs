//! Our driver side, as a driver uses it: a batch added, published, and taken back.
use super::case::{BUFFER, Case, QUEUE_SIZE};
use super::scripted::ScriptedDevice;
use super::subject::{OURS, Subject, broken, miscounted};
use crate::BenchError;
use crate::memory::Pages;
use paravane_ring::driver::{DriverConfig, Queue};
use paravane_ring::{DmaArea, Segment};

/// The subject. Fields drop in order, the memory last.
pub(crate) struct Ours {
    queue: Queue,
    script: ScriptedDevice,
    /// One buffer for every chain of a batch.
    buffers: Vec<Buffer>,
    _pages: Pages,
}

/// A buffer as the queue is told of it.
struct Buffer {
    readable: Vec<Segment>,
    writable: Vec<Segment>,
}

impl Ours {
    pub(crate) fn new(case: Case) -> Result<Self, BenchError> {
        let tables = if case.indirect { case.descriptors } else { 0 };
        let layout =
            DriverConfig::new(QUEUE_SIZE, tables, case.features()).map_err(|error| broken(OURS, error))?;
        let pages = Pages::new(layout.memory());
        let place = pages.place();
        let (queue, addresses) = Queue::new(layout, DmaArea { area: place.area(), addr: pages.address() })
            .map_err(|error| broken(OURS, error))?;
        let script = ScriptedDevice::at(case, place, pages.address(), addresses);
        // The scripted device touches no buffer, so any address will do.
        let buffers = (0..u64::from(case.batch))
            .map(|slot| {
                let mut buffer = Buffer { readable: Vec::new(), writable: Vec::new() };
                let mut addr = 0x10_0000 + slot * BUFFER as u64;
                for piece in case.pieces() {
                    let list = if piece.writable { &mut buffer.writable } else { &mut buffer.readable };
                    list.push(Segment { addr, len: piece.len });
                    addr += u64::from(piece.len);
                }
                buffer
            })
            .collect();
        Ok(Self { queue, script, buffers, _pages: pages })
    }
}

impl Subject for Ours {
    fn run(&mut self, batches: u32) -> Result<u64, BenchError> {
        let Self { queue, script, buffers, .. } = self;
        let mut sum = 0u64;
        for _ in 0..batches {
            for buffer in &*buffers {
                queue.add(&buffer.readable, &buffer.writable).map_err(|error| broken(OURS, error))?;
            }
            sum = sum.wrapping_add(queue.publish().into());
            script.serve();
            let mut count = 0;
            while let Some(used) = queue.pop_used().map_err(|error| broken(OURS, error))? {
                sum = sum.wrapping_add(used.len.into());
                count += 1;
            }
            if count != buffers.len() {
                return Err(miscounted(OURS, count, buffers.len() as u16));
            }
        }
        Ok(sum)
    }

    fn position(&self) -> u16 {
        self.script.available()
    }
}
