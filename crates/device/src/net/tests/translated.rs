//! Behind an IOMMU: frames wait for translations that go away, in any state.
use super::rig::{Card, DATA, HEADER, frame};
use crate::net::LinkEnd;
use crate::rig::segment;
use paravane_dma::{Access, Domain};
use std::time::Duration;

const RX: usize = 0;
const TX: usize = 1;
const PAGE: u64 = 4096;

fn cards() -> (Card<LinkEnd>, Card<LinkEnd>) {
    let (a, b) = LinkEnd::pair(1).unwrap();
    (Card::translated(a), Card::translated(b))
}

impl Card<LinkEnd> {
    fn domain(&self) -> &Domain {
        &self.translation.as_ref().unwrap().0
    }

    fn map(&self, at: u64, pages: u64) {
        self.domain().map(at, at, pages * PAGE, Access::READ | Access::WRITE).unwrap();
    }

    /// Removes translations under the invalidation lock.
    fn unmap(&self, at: u64, pages: u64) {
        let _locked = self.translation.as_ref().unwrap().1.lock();
        self.domain().unmap(at, pages * PAGE, Duration::ZERO).unwrap();
    }

    /// Whether the queue is idle, and neither kicks nor polling would help.
    fn waits(&mut self, lane: usize) -> bool {
        let served = self.settle(lane);
        let live = &mut self.lanes[lane].live;
        served.is_empty()
            && live.waits_for_translation()
            && !live.arm_kicks().unwrap()
            && !live.has_available()
    }
}

#[test]
fn a_frame_is_taken_when_its_memory_is_known() {
    let (mut a, mut b) = cards();
    b.map(DATA, 1);
    b.add(RX, &[], &[segment(DATA, 2000)]);
    let at = DATA + PAGE - 30;
    a.send_at(TX, at, [0; HEADER], &frame(100, 1));
    assert!(a.waits(TX));
    a.map(DATA, 1);
    assert!(a.waits(TX), "its second page is missing");
    a.map(DATA + PAGE, 1);
    assert_eq!(a.settle(TX).len(), 1);
    assert_eq!(b.settle(RX).len(), 1);
    assert_eq!(b.peek(DATA + HEADER as u64, 100), frame(100, 1));
}

#[test]
fn what_the_network_had_no_room_for_is_read_when_that_is_possible_again() {
    let (mut a, mut b) = cards();
    a.map(DATA, 64);
    b.map(DATA, 64);
    let (mut sent, mut back) = (0, 0);
    while back == sent {
        for n in sent..sent + 32 {
            a.send_at(TX, DATA + n % 64 * PAGE, [0; HEADER], &frame(60, n as u8));
        }
        sent += 32;
        back += a.settle(TX).len() as u64;
    }
    let first = back % 64;
    a.unmap(DATA + first * PAGE, 1);
    for n in 0..64 {
        b.add(RX, &[], &[segment(DATA + n * PAGE, 2000)]);
    }
    assert_eq!(b.settle(RX).len(), 64);
    assert!(a.waits(TX), "the network has room, and the frame cannot be read");
    a.map(DATA + first * PAGE, 1);
    assert_eq!(a.settle(TX).len() as u64, sent - back);
}

#[test]
fn a_frame_is_finished_when_its_first_buffer_is_there_again() {
    let (mut a, mut b) = cards();
    a.map(DATA, 2);
    b.map(DATA, 4);
    a.send_at(TX, DATA, [0; HEADER], &frame(3000, 5));
    a.settle(TX);
    b.add(RX, &[], &[segment(DATA, 2000)]);
    assert!(b.settle(RX).is_empty(), "it takes two buffers");
    b.unmap(DATA, 1);
    b.add(RX, &[], &[segment(DATA + PAGE, 2000)]);
    assert!(b.waits(RX), "its header is written last, into the first buffer");
    // Buffers of other frames before this one do not matter.
    b.map(DATA, 1);
    assert_eq!(b.settle(RX).iter().map(|used| used.len).sum::<u32>(), 3000 + HEADER as u32);
    assert_eq!(b.peek(DATA + 10, 2), [2, 0], "the number of buffers");
    let got = [b.peek(DATA + HEADER as u64, 1988), b.peek(DATA + PAGE, 1012)].concat();
    assert_eq!(got, frame(3000, 5));
}
