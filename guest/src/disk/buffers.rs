//! Memory for the data of requests.
use paravane_driver::DmaArea;

/// The memory of the slots: one buffer each, side by side.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Buffers {
    memory: DmaArea,
    each: usize,
}

impl Buffers {
    /// `memory` is cut into buffers of `each` bytes.
    pub(crate) fn new(memory: DmaArea, each: usize) -> Self {
        Self { memory, each }
    }

    /// First `len` bytes of a slot's buffer; `None`: no such slot, or it is shorter.
    pub(crate) fn slot(&self, slot: usize, len: usize) -> Option<DmaArea> {
        if len > self.each {
            return None;
        }
        self.memory.slice(slot.checked_mul(self.each)?, len)
    }
}
