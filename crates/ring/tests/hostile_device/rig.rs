//! The queue under test, on memory that a device writes; for both layouts.
use crate::memory::{BASE, Memory};
use paravane_ring::driver::{BufferId, DriverConfig, Full, Queue, Used};
use paravane_ring::{QueueAddresses, QueueError, Segment};

pub(crate) const SIZE: u16 = 8;

pub(crate) fn seg(len: u32) -> Segment {
    Segment { addr: 0x9000_0000, len }
}

/// A device that writes anything, at position `at` of its ring.
pub(crate) struct Hostile<At> {
    pub(crate) memory: Memory,
    pub(crate) queue: Queue,
    pub(crate) ring: QueueAddresses,
    pub(crate) at: At,
}

impl<At> Hostile<At> {
    pub(crate) fn start(indirect: u16, features: u64, at: At) -> Self {
        let layout = DriverConfig::new(SIZE, indirect, features).unwrap();
        let memory = Memory::new(layout.memory());
        let (queue, ring) = Queue::new(layout, memory.dma()).unwrap();
        Self { memory, queue, ring, at }
    }

    pub(crate) fn add(&mut self, readable: &[Segment], writable: &[Segment]) -> BufferId {
        let id = self.queue.add(readable, writable).unwrap();
        self.queue.publish();
        id
    }

    /// The next look at the ring fails with `error`, and the queue takes nothing.
    #[track_caller]
    pub(crate) fn fails_with(&mut self, error: QueueError) {
        assert_eq!(self.queue.pop_used(), Err(error));
        self.is_latched(error);
    }

    #[track_caller]
    pub(crate) fn is_latched(&mut self, error: QueueError) {
        assert_eq!(self.queue.error(), Some(error));
        let before = self.all();
        assert_eq!(self.queue.pop_used(), Err(error));
        assert_eq!(self.queue.take_used(&mut [Used::default(); 4]), Err(error));
        assert_eq!(self.queue.room(), 0);
        assert_eq!(self.queue.add(&[seg(1)], &[]), Err(Full { needed: 1, free: 0 }));
        assert!(!self.queue.publish());
        assert!(self.all() == before, "nothing more is published");
    }

    fn all(&self) -> Vec<u8> {
        let mut all = vec![0; self.memory.dma().area.len()];
        assert!(self.memory.fetch(BASE, &mut all));
        all
    }
}
