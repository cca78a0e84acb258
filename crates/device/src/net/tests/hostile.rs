//! Drivers that break the rules, one named way a test.
use super::rig::{BASE, Card, DATA, HEADER, SIZE, frame};
use crate::ServeError;
use crate::net::{LinkEnd, Totals};
use crate::rig::segment;
use paravane_ring::QueueError;
use paravane_spec::net::{F_CSUM, F_MRG_RXBUF, MAX_FRAME};

const RX: usize = 0;
const TX: usize = 1;

fn card() -> Card<LinkEnd> {
    Card::new(LinkEnd::echo(1).unwrap())
}

fn malformed(count: u64) -> Totals {
    Totals { malformed: count, ..Totals::default() }
}

/// The queue goes on after what it was given.
fn still_works(card: &mut Card<LinkEnd>) {
    let before = card.totals().received;
    card.add(RX, &[], &[segment(DATA + 0x10_0000, 2000)]);
    card.send_at(TX, DATA + 0x11_0000, [0; HEADER], &frame(64, 5));
    assert_eq!(card.settle(TX).len(), 1);
    assert_eq!(card.settle(RX).len(), 1);
    assert_eq!(card.totals().received, before + 1);
}

#[test]
fn a_chain_shorter_than_a_header_is_given_back() {
    let mut card = card();
    for len in 1..=HEADER {
        card.add(TX, &[segment(DATA, len)], &[]);
    }
    assert_eq!(card.settle(TX).len(), HEADER);
    assert_eq!(card.totals(), malformed(HEADER as u64));
    still_works(&mut card);
}

#[test]
fn a_frame_shorter_than_its_addresses_is_given_back() {
    let mut card = card();
    for len in 1..14 {
        card.send_at(TX, DATA, [0; HEADER], &vec![0; len]);
        assert_eq!(card.settle(TX).len(), 1);
    }
    assert_eq!(card.totals(), malformed(13));
    card.send_at(TX, DATA, [0; HEADER], &frame(14, 0));
    card.settle(TX);
    assert_eq!(card.totals().transmitted, 1);
}

#[test]
fn a_frame_longer_than_any_is_given_back() {
    let mut card = card();
    card.add(TX, &[segment(DATA, HEADER + MAX_FRAME + 1)], &[]);
    let huge = segment(DATA, 4 << 20);
    card.add(TX, &[huge; 31], &[]);
    assert_eq!(card.settle(TX).len(), 2);
    assert_eq!(card.totals(), malformed(2));
    still_works(&mut card);
    card.add(TX, &[segment(DATA, HEADER + MAX_FRAME)], &[]);
    card.settle(TX);
    assert_eq!(card.totals().transmitted, 2);
}

#[test]
fn a_chain_that_is_to_be_written_is_no_frame() {
    let mut card = card();
    card.poke(DATA, &[0xee; 4096]);
    card.add(TX, &[], &[segment(DATA, 100)]);
    card.add(TX, &[segment(DATA, 100)], &[segment(DATA + 100, 100)]);
    assert_eq!(card.settle(TX).iter().map(|used| used.len).collect::<Vec<_>>(), [0, 0]);
    assert_eq!(card.totals(), malformed(2));
    assert_eq!(card.peek(DATA, 4096), [0xee; 4096]);
    still_works(&mut card);
}

#[test]
fn a_header_that_lies_is_given_back() {
    let lies: [[u8; HEADER]; 6] = [
        // A checksum that begins behind the frame; one that ends there; one in the addresses.
        [1, 0, 0, 0, 0, 0, 64, 0, 0, 0, 0, 0],
        [1, 0, 0, 0, 0, 0, 34, 0, 0xff, 0xff, 0, 0],
        [1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        // To be segmented, which the link does not do; into nothing; in an unknown way.
        [1, 1, 54, 0, 100, 0, 34, 0, 16, 0, 0, 0],
        [1, 5, 54, 0, 0, 0, 34, 0, 6, 0, 0, 0],
        [0, 0x77, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    ];
    let mut card = card();
    for lie in lies {
        card.send_at(TX, DATA, lie, &frame(64, 0));
        assert_eq!(card.settle(TX).len(), 1);
    }
    assert_eq!(card.totals(), malformed(lies.len() as u64));
    still_works(&mut card);
}

/// Header of a frame without offloads in one buffer.
const PLAIN: [u8; HEADER] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0];

#[test]
fn a_header_means_nothing_if_no_offload_was_negotiated() {
    let mut card = Card::without(LinkEnd::echo(1).unwrap(), F_CSUM);
    card.add(RX, &[], &[segment(DATA + 0x10_0000, 2000)]);
    card.send_at(TX, DATA, [0xff; HEADER], &frame(64, 0));
    card.settle(TX);
    card.settle(RX);
    assert_eq!((card.totals().transmitted, card.totals().malformed, card.totals().received), (1, 0, 1));
    assert_eq!(card.peek(DATA + 0x10_0000, HEADER), PLAIN);
}

#[test]
fn a_header_is_right_whatever_the_buffer_held() {
    let mut card = card();
    let at = DATA + 0x10_0000;
    for before in [[0xee; HEADER], PLAIN, PLAIN, PLAIN, [0; HEADER], PLAIN, [1; HEADER]] {
        card.poke(at, &before);
        card.add(RX, &[], &[segment(at, 2000)]);
        card.send_at(TX, DATA, [0; HEADER], &frame(64, 7));
        card.settle(TX);
        assert_eq!(card.settle(RX).len(), 1);
        assert_eq!(card.peek(at, HEADER), PLAIN, "over {before:?}");
        assert_eq!(card.peek(at + HEADER as u64 + 12, 52), frame(64, 7)[12..]);
    }
}

#[test]
fn frames_outside_memory_latch_the_queue() {
    for addr in [0, BASE + SIZE, BASE + SIZE - 20, u64::MAX - 100] {
        let mut card = card();
        card.add(TX, &[segment(addr, 100)], &[]);
        let error = card.serve(TX).unwrap_err();
        assert!(matches!(error, ServeError::Queue(QueueError::Address { .. })), "{error}");
        assert!(card.lanes[TX].live.queue().error().is_some());
        assert!(card.serve(TX).is_err());
        card.restart();
        still_works(&mut card);
    }
}

#[test]
fn a_queue_that_breaks_after_some_frames_can_be_stopped() {
    for lane in [RX, TX] {
        for complete in [true, false] {
            let mut card = card();
            for n in 0..3 {
                card.add(RX, &[], &[segment(DATA + 0x10_0000 + n * 4096, 2000)]);
                card.send_at(TX, DATA + n * 4096, [0; HEADER], &frame(64, 0));
            }
            card.settle(TX);
            card.settle(RX);
            // The available index of a split queue, behind its flags.
            let index = card.lanes[lane].addresses.driver + 2;
            card.poke(index, &[0xff, 0x7f]);
            if lane == RX {
                card.send_at(TX, DATA, [0; HEADER], &frame(64, 0));
                card.settle(TX);
            }
            for _ in 0..2 {
                let error = card.serve(lane).unwrap_err();
                assert!(matches!(error, ServeError::Queue(QueueError::AvailIndex { .. })), "{error}");
            }
            let stopped = &mut card.lanes[lane];
            assert_eq!(stopped.handler.drain(&mut stopped.live, complete).completed, 0);
            card.restart();
            still_works(&mut card);
        }
    }
}

#[test]
fn buffers_outside_memory_latch_the_queue() {
    for addr in [0, BASE + SIZE, BASE + SIZE - 20, u64::MAX - 100] {
        let mut card = card();
        card.add(RX, &[], &[segment(addr, 100)]);
        // While no frame needs it, it is not looked at.
        assert!(card.settle(RX).is_empty());
        card.send_at(TX, DATA, [0; HEADER], &frame(64, 0));
        card.settle(TX);
        let error = card.serve(RX).unwrap_err();
        assert!(matches!(error, ServeError::Queue(QueueError::Address { .. })), "{error}");
        card.restart();
        still_works(&mut card);
    }
}

#[test]
fn buffers_that_no_frame_fits_into_are_given_back_empty() {
    let mut card = card();
    card.poke(DATA, &[0xee; 4096]);
    card.add(RX, &[segment(DATA, 100)], &[]);
    card.add(RX, &[segment(DATA, 100)], &[segment(DATA + 100, 2000)]);
    card.add(RX, &[], &[segment(DATA, HEADER - 1)]);
    card.add(RX, &[], &[segment(DATA + 200, 4), segment(DATA + 300, 7)]);
    card.send_at(TX, DATA + 4096, [0; HEADER], &frame(64, 0));
    card.settle(TX);
    assert_eq!(card.settle(RX).iter().map(|used| used.len).collect::<Vec<_>>(), [0; 4]);
    assert_eq!(card.totals().unusable, 4);
    assert_eq!(card.peek(DATA, 4096), [0xee; 4096]);
    // The frame still waits for one that is large enough.
    card.add(RX, &[], &[segment(DATA, 2000)]);
    assert_eq!(card.settle(RX).iter().map(|used| used.len).collect::<Vec<_>>(), [76]);
}

#[test]
fn without_merging_a_frame_that_does_not_fit_is_dropped() {
    let mut card = Card::without(LinkEnd::echo(1).unwrap(), F_MRG_RXBUF);
    for len in [HEADER + 64, HEADER + 63] {
        card.add(RX, &[], &[segment(DATA, len)]);
        card.send_at(TX, DATA + 4096, [0; HEADER], &frame(64, 0));
        card.settle(TX);
    }
    assert_eq!(card.settle(RX).iter().map(|used| used.len).collect::<Vec<_>>(), [76, 0]);
    let totals = card.totals();
    assert_eq!((totals.received, totals.no_room), (1, 1));
    still_works(&mut card);
}

#[test]
fn a_frame_that_the_whole_queue_has_no_room_for_is_dropped() {
    let mut card = card();
    for n in 0..64 {
        card.add(RX, &[], &[segment(DATA + n * 64, 20)]);
    }
    card.send_at(TX, DATA + 0x1_0000, [0; HEADER], &frame(2000, 0));
    card.settle(TX);
    assert_eq!(card.settle(RX).iter().map(|used| used.len).collect::<Vec<_>>(), [0; 64]);
    assert_eq!(card.totals().no_room, 1);
    still_works(&mut card);
}

#[test]
fn a_driver_that_offers_useless_buffers_for_ever_does_not_keep_the_thread() {
    let mut card = card();
    card.send_at(TX, DATA, [0; HEADER], &frame(64, 0));
    card.settle(TX);
    for n in 0..64 {
        card.add(RX, &[], &[segment(DATA + n, 1)]);
    }
    let served = card.serve(RX).unwrap();
    assert_eq!((served.taken, served.completed), (64, 64));
    assert_eq!(card.settle(RX).len(), 64);
    assert!(card.lanes[RX].handler.rest(false).kicks());
    still_works(&mut card);
}
