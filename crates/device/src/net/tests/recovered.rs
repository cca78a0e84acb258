//! Frames that were in flight when a process died.
use super::rig::{Card, DATA, HEADER, frame, layouts};
use crate::net::LinkEnd;
use crate::{Device, MappedQueue};
use paravane_dma::{Access, Backing, Mapping, Memory, Region, RegionConfig};
use paravane_ring::device::{State, tracking_bytes};
use paravane_spec::feature::{IN_ORDER, RING_PACKED};

const TX: usize = 1;

/// Tracking of queues, in memory that outlives a process.
struct Tracking {
    memory: Memory,
    len: usize,
}

impl Tracking {
    fn new(size: u16, packed: bool) -> Self {
        let len = tracking_bytes(size, packed);
        let size = (len as u64).next_multiple_of(4096);
        let config = RegionConfig { gpa: 0, size, backing: Backing::Pages, writable: true };
        Self { memory: Memory::new(vec![Region::new(config).unwrap()]).unwrap(), len }
    }

    fn mapping(&self) -> Mapping {
        let mut handle = self.memory.handle();
        handle.enter().map(0, self.len, Access::READ | Access::WRITE | Access::RELAXED).unwrap()
    }
}

/// The transmit queue goes on in another process.
fn next_process(card: &mut Card<LinkEnd>, tracking: &Tracking) {
    let packed = card.features & RING_PACKED != 0;
    let start =
        if packed { State::Packed { avail: 0x8000, used: 0x8000 } } else { State::Split { avail: 0 } };
    let (addresses, features) = (card.lanes[TX].addresses, card.features);
    let size = card.net.queue_sizes()[TX];
    let memory = card.memory.handle();
    let live = MappedQueue::resume(addresses, size, features, memory, Some(start), Some(tracking.mapping()));
    card.lanes[TX].live = live.unwrap();
    card.lanes[TX].handler = card.net.start_queue(TX as u16, features).unwrap();
}

#[test]
fn frames_that_may_have_been_sent_are_not_sent_again() {
    for layout in layouts().into_iter().filter(|layout| layout & IN_ORDER == 0) {
        let mut card = Card::without(LinkEnd::echo(1).unwrap(), (RING_PACKED | IN_ORDER) & !layout);
        let tracking = Tracking::new(64, layout & RING_PACKED != 0);
        next_process(&mut card, &tracking);
        let send = |card: &mut Card<LinkEnd>, count: u8| {
            for number in 0..count {
                card.send_at(TX, DATA + u64::from(number) * 2048, [0; HEADER], &frame(60, number));
            }
        };
        for round in 0..5 {
            send(&mut card, 3);
            assert_eq!(card.settle(TX).len(), 3);
            // A process takes some, sends some of them perhaps, and dies.
            send(&mut card, 7);
            let taken = {
                let batch = card.lanes[TX].live.begin_batch();
                batch.memory.pop(batch.queue, batch.chains).unwrap()
            };
            assert_eq!(taken, 7);
            next_process(&mut card, &tracking);
            send(&mut card, 2);
            let used = card.settle(TX);
            assert_eq!(used.len(), 9, "the driver gets all of them back");
            let totals = card.totals();
            assert_eq!((totals.transmitted, totals.refused), (5 * (round + 1), 7 * (round + 1)));
        }
    }
}
