//! The cable: back-pressure, ends that come and go, checksums.
use super::rig::{Card, DATA, HEADER, frame};
use crate::Device;
use crate::net::{BackEnd, LinkEnd, Net, NetConfig};
use crate::rig::{allocations, becomes_readable, readable, segment};
use paravane_spec::net::F_GUEST_CSUM;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

const RX: usize = 0;
const TX: usize = 1;
/// Frames that a lane holds.
const LANE: usize = 128;

fn cards() -> (Card<LinkEnd>, Card<LinkEnd>) {
    let (a, b) = LinkEnd::pair(1).unwrap();
    (Card::new(a), Card::new(b))
}

/// Sends `count` frames, numbered from `first`.
///
/// Returns how many the queue gave back.
fn send(card: &mut Card<LinkEnd>, first: usize, count: usize) -> usize {
    for n in first..first + count {
        card.send_at(TX, DATA + (n % 64) as u64 * 4096, [0; HEADER], &frame(60 + n % 40, n as u8));
    }
    card.settle(TX).len()
}

/// Receives all frames, and checks that their numbers go on from `first`.
fn receive(card: &mut Card<LinkEnd>, first: usize) -> usize {
    let mut count = 0;
    loop {
        for n in 0..64 {
            card.add(RX, &[], &[segment(DATA + 0x20_0000 + n * 4096, 2000)]);
        }
        let used = card.settle(RX);
        for (n, used) in used.iter().enumerate() {
            let sent = first + count;
            assert_eq!(used.len as usize, HEADER + 60 + sent % 40);
            let got = card.peek(DATA + 0x20_0000 + n as u64 * 4096 + HEADER as u64, 60 + sent % 40);
            assert_eq!(got, frame(60 + sent % 40, sent as u8), "frame {sent}");
            count += 1;
        }
        // The rest is requested again.
        if used.len() < 64 {
            card.restart();
            return count;
        }
    }
}

#[test]
fn both_ways_at_once() {
    let (mut a, mut b) = cards();
    for round in 0..5 {
        assert_eq!(send(&mut a, round * 40, 40), 40);
        assert_eq!(send(&mut b, round * 50, 50), 50);
        assert_eq!(receive(&mut b, round * 40), 40);
        assert_eq!(receive(&mut a, round * 50), 50);
    }
}

#[test]
fn a_full_lane_makes_the_sender_wait_and_loses_nothing() {
    let (mut a, mut b) = cards();
    let mut sent = 0;
    let mut back = 0;
    while back == sent {
        back += send(&mut a, sent, 32);
        sent += 32;
    }
    assert_eq!((back, sent), (LANE, LANE + 32));
    assert!(!a.lanes[TX].handler.rest(false).kicks(), "kicks would be of no use");
    assert_eq!(a.lanes[TX].live.queue().in_flight(), 32);
    assert!(!readable(&a.lanes[TX].wakes));
    // One buffer makes room for one frame, and the sender is woken for it.
    b.add(RX, &[], &[segment(DATA, 2000)]);
    assert_eq!(b.settle(RX).len(), 1);
    assert!(becomes_readable(&a.lanes[TX].wakes));
    assert_eq!(a.settle(TX).len(), 1);
    assert!(!readable(&a.lanes[TX].wakes));
    let mut got = 1;
    while got < sent {
        // Frames wait in the lane across a restart of the receiving side only as far as they are
        // new, so no restart.
        for n in 0..16 {
            b.add(RX, &[], &[segment(DATA + n * 4096, 2000)]);
        }
        for (n, used) in b.settle(RX).iter().enumerate() {
            assert_eq!(used.len as usize, HEADER + 60 + got % 40);
            let bytes = b.peek(DATA + n as u64 * 4096 + HEADER as u64, 60 + got % 40);
            assert_eq!(bytes, frame(60 + got % 40, got as u8), "frame {got}");
            got += 1;
        }
        a.settle(TX);
    }
    assert_eq!(a.lanes[TX].live.queue().in_flight(), 0);
    assert!(a.lanes[TX].handler.rest(false).kicks());
    assert_eq!((a.totals().transmitted, b.totals().received), (sent as u64, sent as u64));
    assert_eq!(a.totals().refused, 0);
}

#[test]
fn a_receiver_that_sleeps_is_woken_and_one_that_works_is_not() {
    let (mut a, mut b) = cards();
    b.add(RX, &[], &[segment(DATA, 2000)]);
    b.add(RX, &[], &[segment(DATA + 4096, 2000)]);
    b.settle(RX);
    assert!(!readable(&b.lanes[RX].wakes));
    send(&mut a, 0, 1);
    assert!(becomes_readable(&b.lanes[RX].wakes));
    assert_eq!(b.serve(RX).unwrap().completed, 1);
    assert_eq!(b.settle(RX).len(), 1);
    assert!(!readable(&b.lanes[RX].wakes));
}

#[test]
fn frames_without_a_receiver_are_dropped() {
    let (a, b) = LinkEnd::pair(1).unwrap();
    let mut a = Card::new(a);
    assert_eq!(send(&mut a, 0, 5), 5);
    assert_eq!(a.totals().refused, 5);
    let mut b = Card::new(b);
    assert_eq!(send(&mut a, 5, 1), 1);
    assert_eq!(receive(&mut b, 5), 1);
}

#[test]
fn frames_for_an_end_that_is_held_wait_for_its_receiver() {
    let (a, b) = LinkEnd::pair(1).unwrap();
    let hold = b.hold();
    let mut a = Card::new(a);
    assert_eq!(send(&mut a, 0, 5), 0);
    assert!(!readable(&a.lanes[TX].wakes));
    let mut b = Card::new(b);
    assert!(becomes_readable(&a.lanes[TX].wakes));
    for n in 0..5 {
        b.add(RX, &[], &[segment(DATA + n * 4096, 2000)]);
    }
    assert_eq!((a.settle(TX).len(), b.settle(RX).len()), (5, 5));
    b.lanes.clear();
    assert_eq!(send(&mut a, 5, 1), 0);
    drop(hold);
    assert!(becomes_readable(&a.lanes[TX].wakes));
    assert_eq!(a.settle(TX).len(), 1);
    assert_eq!((a.totals().transmitted, a.totals().refused), (5, 1));
}

#[test]
fn the_carrier_is_that_of_the_peer_s_driver() {
    let (a, b) = LinkEnd::pair(1).unwrap();
    let changes = Arc::new(AtomicUsize::new(0));
    let told = Arc::clone(&changes);
    a.tell_change(Box::new(move || {
        told.fetch_add(1, Ordering::Relaxed);
    }));
    assert!(!a.has_carrier());
    let hold = b.hold();
    assert!(a.has_carrier(), "its peer comes back");
    drop(hold);
    assert_eq!((a.has_carrier(), changes.load(Ordering::Relaxed)), (false, 1));
    let receiver = b.receiver(0).unwrap();
    assert_eq!((a.has_carrier(), changes.load(Ordering::Relaxed)), (true, 2));
    drop(receiver);
    assert_eq!((a.has_carrier(), changes.load(Ordering::Relaxed)), (false, 3));
    assert!(LinkEnd::echo(1).unwrap().has_carrier());
    // Its driver is told only where that is said.
    let mut card = Net::new(NetConfig::new([2, 0, 0, 0, 0, 1]), a).unwrap();
    assert_eq!(card.link_is_up(), Some(true));
    card.follow_carrier(true);
    assert_eq!(card.link_is_up(), Some(false));
}

#[test]
fn a_receiver_that_goes_away_sets_its_senders_free() {
    let (mut a, mut b) = cards();
    for n in 0..5 {
        send(&mut a, n * 32, 32);
    }
    assert_eq!(a.lanes[TX].live.queue().in_flight(), 32);
    b.lanes.clear();
    assert!(becomes_readable(&a.lanes[TX].wakes));
    assert_eq!(a.settle(TX).len(), 32);
    assert_eq!(a.totals().refused, 32);
    // A new life starts without the frames of the old one.
    b.restart();
    b.add(RX, &[], &[segment(DATA, 2000)]);
    assert!(b.settle(RX).is_empty());
    send(&mut a, 0, 1);
    assert_eq!(b.settle(RX).len(), 1);
}

#[test]
fn what_waits_for_room_is_given_back_or_forgotten_when_the_queue_ends() {
    for complete in [true, false] {
        let (mut a, _b) = cards();
        for n in 0..5 {
            send(&mut a, n * 32, 32);
        }
        let lane = &mut a.lanes[TX];
        let served = lane.handler.drain(&mut lane.live, complete);
        assert_eq!(served.completed, if complete { 32 } else { 0 });
        assert_eq!(a.totals().refused, 32);
    }
}

#[test]
fn a_checksum_is_finished_for_a_driver_that_wants_it_so() {
    let header = [1, 0, 0, 0, 0, 0, 14, 0, 2, 0, 0, 0];
    let mut sent = frame(64, 0);
    sent[16..18].fill(0);
    for refused in [0, F_GUEST_CSUM] {
        let (a, b) = LinkEnd::pair(1).unwrap();
        let (mut a, mut b) = (Card::new(a), Card::without(b, refused));
        a.send_at(TX, DATA, header, &sent);
        a.settle(TX);
        b.add(RX, &[], &[segment(DATA, 2000)]);
        assert_eq!(b.settle(RX).len(), 1);
        let got = b.peek(DATA, HEADER + 64);
        if refused == 0 {
            assert_eq!(got[..10], header[..10]);
            assert_eq!(got[HEADER..], sent);
            continue;
        }
        assert_eq!(got[..10], [0; 10]);
        // All words together, the checksum among them, make all ones.
        let words = got[HEADER + 14..].chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1]));
        let sum: u32 = words.sum();
        assert_eq!((sum & 0xffff) + (sum >> 16), 0xffff);
    }
}

#[test]
fn where_a_card_is_now_is_told_to_the_far_side() {
    let (mut a, mut b) = cards();
    let mac = [0x52, 0x54, 0, 1, 2, 3];
    a.net.announce(mac);
    b.add(RX, &[], &[segment(DATA, 2000)]);
    let used = b.settle(RX);
    assert_eq!(used.iter().map(|used| used.len as usize).collect::<Vec<_>>(), [HEADER + 60]);
    let got = b.peek(DATA, HEADER + 60);
    // No checksum is open, no segments; it is in one buffer.
    assert_eq!(got[..HEADER], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0]);
    assert_eq!(got[HEADER..][..6], [0xff; 6]);
    assert_eq!(got[HEADER + 6..][..6], mac);
    assert_eq!(got[HEADER + 12..][..2], [0x80, 0x35]);
    assert_eq!((&got[HEADER + 22..][..6], &got[HEADER + 32..][..6]), (&mac[..], &mac[..]));
    // An echo has no far side, and a lane may be full or without a receiver.
    Card::new(LinkEnd::echo(1).unwrap()).net.announce(mac);
    for _ in 0..2 * LANE {
        a.net.announce(mac);
    }
    drop(b);
    a.net.announce(mac);
}

#[test]
fn a_card_has_buffers_while_its_peer_receives_and_no_more_than_its_frames_need() {
    let (a, b) = LinkEnd::pair(1).unwrap();
    let held = a.buffers();
    assert_eq!(held(), 0, "no peer receives yet");
    let (mut a, mut b) = (Card::new(a), Card::new(b));
    assert_eq!(held(), 0, "nothing was sent yet");
    for round in 0..20 {
        send(&mut a, round * 10, 10);
        assert_eq!(receive(&mut b, round * 10), 10);
    }
    // `receive` starts the card anew each time, which gives them back.
    assert_eq!(held(), 0);
    send(&mut a, 0, 10);
    assert_eq!(held(), 10);
    for _ in 0..5 {
        send(&mut a, 0, 32);
    }
    assert_eq!(held(), LANE, "which is full");
    b.lanes.clear();
    assert_eq!(held(), 0);
    a.settle(TX);
    assert_eq!(held(), 0, "no peer receives");
}

#[test]
fn a_lane_allocates_nothing_once_it_has_its_buffers() {
    let (mut a, mut b) = cards();
    for round in 0..3 {
        let before = allocations::count();
        for n in 0..64 {
            b.add(RX, &[], &[segment(DATA + 0x20_0000 + n * 4096, 2000)]);
            a.send_at(TX, DATA + n * 4096, [0; HEADER], &frame(60, n as u8));
        }
        let ours = allocations::count() - before;
        let served = [a.serve(TX).unwrap().completed, b.serve(RX).unwrap().completed];
        let all = allocations::count() - before;
        assert_eq!(served, [64, 64]);
        assert!(round == 0 || all == ours, "{} allocations", all - ours);
        a.settle(TX);
        b.settle(RX);
    }
}
