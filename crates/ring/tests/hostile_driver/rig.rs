//! The queue under test, on memory that a driver writes; for both layouts.
use crate::memory::{BASE, Memory};
use paravane_ring::device::{Batch, MAX_CHAIN, Queue};
use paravane_ring::{QueueAddresses, QueueError, Segment};
use paravane_spec::split::{DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE};

pub(crate) const DESC: u64 = BASE;
pub(crate) const DRIVER: u64 = BASE + 0x800;
pub(crate) const DEVICE: u64 = BASE + 0xc00;
/// An indirect table of the greatest length, and one entry more.
pub(crate) const TABLE: u64 = BASE + 0x1000;
pub(crate) const MEMORY: usize = 0x1000 + 16 * (MAX_CHAIN + 1);
pub(crate) const DATA: u64 = 0x9000_0000;

// The same in both layouts.
pub(crate) const NEXT: u16 = DESC_F_NEXT;
pub(crate) const WRITE: u16 = DESC_F_WRITE;
pub(crate) const INDIRECT: u16 = DESC_F_INDIRECT;

pub(crate) fn addresses(size: u16) -> QueueAddresses {
    QueueAddresses { size, desc: DESC, driver: DRIVER, device: DEVICE }
}

pub(crate) fn seg(addr: u64, len: u32) -> Segment {
    Segment { addr, len }
}

/// A driver that writes anything, at position `at` of its ring.
pub(crate) struct Hostile<At> {
    pub(crate) memory: Memory,
    pub(crate) queue: Queue,
    pub(crate) batch: Batch,
    pub(crate) at: At,
    size: u16,
}

impl<At> Hostile<At> {
    pub(crate) fn start(size: u16, features: u64, at: At) -> Self {
        let memory = Memory::new(MEMORY);
        let queue = memory.activate(addresses(size), features);
        Self { memory, queue, batch: Batch::new(8), at, size }
    }

    /// Writes a descriptor: address, length, and the two halves at its end.
    pub(crate) fn desc_at(&self, at: u64, addr: u64, len: u32, [third, last]: [u16; 2]) {
        self.memory.put(at, 8, addr);
        self.memory.put(at + 8, 8, u64::from(len) | u64::from(third) << 32 | u64::from(last) << 48);
    }

    pub(crate) fn pop(&mut self) -> Result<usize, QueueError> {
        self.queue.pop_in_place(&mut self.batch, self.memory.dma())
    }

    /// The next pop fails with `error`, the queue latches it, and stays silent.
    #[track_caller]
    pub(crate) fn dies_of(&mut self, error: QueueError) {
        assert_eq!(self.pop(), Err(error));
        self.is_latched(error);
    }

    #[track_caller]
    pub(crate) fn is_latched(&mut self, error: QueueError) {
        assert_eq!(self.batch.chains(), []);
        assert_eq!(self.queue.error(), Some(error));
        // A wish for no kicks is all that may still be written.
        self.queue.disable_kicks();
        let before = self.all();
        assert_eq!(self.pop(), Err(error));
        assert_eq!(self.queue.publish(), Err(error));
        assert_eq!(self.queue.arm_kicks(), Err(error));
        for id in 0..self.size {
            assert_eq!(self.queue.complete(id, 0), Err(error));
            assert_eq!(self.queue.complete_all([(id, 0)]), Err(error));
        }
        let other = QueueError::Request { head: 0, what: "too late" };
        assert_eq!(self.queue.fail(other), error, "the first error stays");
        assert!(self.all() == before, "nothing more is published");
        assert_eq!(self.pop(), Err(error));
    }

    fn all(&self) -> Vec<u8> {
        let mut all = vec![0; MEMORY];
        assert!(self.memory.fetch(BASE, &mut all));
        all
    }

    /// One chain is popped, with these segments.
    #[track_caller]
    pub(crate) fn pops(&mut self, id: u16, readable: &[Segment], writable: &[Segment]) {
        assert_eq!(self.pop(), Ok(1));
        let chain = self.batch.chains()[0];
        assert_eq!(chain.head, id);
        assert_eq!((self.batch.readable(&chain), self.batch.writable(&chain)), (readable, writable));
        let bytes = |part: &[Segment]| part.iter().map(|segment| segment.len).sum();
        assert_eq!((chain.readable_len(), chain.writable_len()), (bytes(readable), bytes(writable)));
    }
}
