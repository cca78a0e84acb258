//! Entropy device (virtio specification, section 5.4).
use crate::{Device, QueueHandler};

/// An entropy source fed by getrandom(2).
#[derive(Debug, Default)]
pub struct Rng {
    _private: (),
}

impl Rng {
    /// One queue.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }
}

impl Device for Rng {
    fn device_id(&self) -> u32 {
        paravane_spec::device_id::RNG
    }
    fn features(&self) -> u64 {
        todo!()
    }
    fn queue_sizes(&self) -> &[u16] {
        todo!()
    }
    fn read_config(&self, offset: u32, out: &mut [u8]) {
        let _ = offset;
        out.fill(0);
    }
    fn start_queue(&mut self, index: u16, features: u64) -> std::io::Result<Box<dyn QueueHandler>> {
        let _ = (index, features);
        todo!()
    }
}
