//! A card that may send and receive no more than its limits.
use super::rig::{Card, DATA, HEADER, frame};
use crate::net::{BackEnd, Generator, Limited, LinkEnd};
use crate::rig::{becomes_readable, segment};
use crate::{Limiter, Rate, RateLimit};
use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::{Duration, Instant};

const RX: usize = 0;
const TX: usize = 1;

fn frames(per_second: u64, burst: u64) -> Arc<Limiter> {
    let ops = Some(Rate { per_second: NonZeroU64::new(per_second).unwrap(), burst });
    Limiter::new(RateLimit { bytes: None, ops })
}

fn bytes(per_second: u64, burst: u64) -> Arc<Limiter> {
    let bytes = Some(Rate { per_second: NonZeroU64::new(per_second).unwrap(), burst });
    Limiter::new(RateLimit { bytes, ops: None })
}

fn none() -> Arc<Limiter> {
    Limiter::new(RateLimit::default())
}

/// Serves a queue until the driver has `count` buffers back.
///
/// Sleeps whenever an I/O thread would. Returns how often it slept.
fn sleep_through<B: BackEnd>(card: &mut Card<B>, lane: usize, count: usize) -> u32 {
    let (mut done, mut sleeps) = (0, 0);
    loop {
        done += card.settle(lane).len();
        if done >= count {
            return sleeps;
        }
        sleeps += 1;
        assert!(becomes_readable(&card.lanes[lane].wakes), "nothing wakes the queue");
    }
}

#[test]
fn frames_are_sent_at_the_rate_and_none_is_lost() {
    for limiter in [frames(500, 5), bytes(500 * 100, 5 * 100)] {
        let mut card = Card::new(Limited::new(LinkEnd::echo(1).unwrap(), limiter, none()));
        let start = Instant::now();
        for number in 0..30_u64 {
            card.add(RX, &[], &[segment(DATA + 0x1_0000 + number * 0x1000, 2000)]);
            card.send_at(TX, DATA + number * 0x800, [0; HEADER], &frame(100, number as u8));
        }
        let shortest = Duration::from_millis((30 - 6) * 1000 / 500 - 1);
        let done = card.settle(TX).len();
        // A busy host may have taken all of the time already.
        let is_held = start.elapsed() < shortest;
        assert!(!is_held || done < 30 && !card.lanes[TX].handler.rest(false).kicks(), "{done}");
        let sleeps = sleep_through(&mut card, TX, 30 - done);
        assert!(start.elapsed() >= shortest);
        assert!((u32::from(is_held)..=40).contains(&sleeps), "{sleeps}");
        assert_eq!(card.settle(RX).len(), 30);
        assert_eq!(card.totals().transmitted, 30);
        assert!(card.lanes[TX].handler.rest(false).kicks());
    }
}

#[test]
fn frames_that_are_dropped_count_too() {
    let (end, _far) = LinkEnd::pair(1).unwrap();
    let mut card = Card::new(Limited::new(end, frames(1, 5), none()));
    for number in 0..30_u64 {
        card.send_at(TX, DATA + number * 0x800, [0; HEADER], &frame(100, number as u8));
    }
    card.settle(TX);
    let refused = card.totals().refused;
    assert!((5..30).contains(&refused), "{refused}");
}

#[test]
fn frames_come_in_at_the_rate_and_do_not_wake_who_may_not_take_them() {
    let mut card = Card::new(Limited::new(LinkEnd::echo(1).unwrap(), none(), frames(200, 0)));
    let start = Instant::now();
    for number in 0..10_u64 {
        card.add(RX, &[], &[segment(DATA + 0x1_0000 + number * 0x1000, 2000)]);
        card.send_at(TX, DATA + number * 0x800, [0; HEADER], &frame(60, number as u8));
    }
    assert_eq!(card.settle(TX).len(), 10);
    let shortest = Duration::from_millis(9 * 1000 / 200 - 1);
    let done = card.settle(RX).len();
    // A busy host may have taken all of the time already.
    let is_held = start.elapsed() < shortest;
    assert!(!is_held || done < 10, "{done}");
    let sleeps = sleep_through(&mut card, RX, 10 - done);
    assert!(start.elapsed() >= shortest);
    assert!((u32::from(is_held)..=20).contains(&sleeps), "{sleeps}");
    assert_eq!(card.totals().received, 10);
    // When the limit no longer holds the queue, a frame wakes it again.
    std::thread::sleep(Duration::from_millis(10));
    card.add(RX, &[], &[segment(DATA + 0x1_0000, 2000)]);
    assert_eq!(card.settle(RX).len(), 0);
    card.send_at(TX, DATA, [0; HEADER], &frame(60, 1));
    assert_eq!(card.settle(TX).len(), 1);
    sleep_through(&mut card, RX, 1);
}

#[test]
fn a_frame_that_waits_for_buffers_is_let_in_once() {
    let mut card = Card::new(Limited::new(Generator::new(1, 3, 60).unwrap(), none(), frames(1000, 0)));
    for _ in 0..3 {
        assert_eq!(card.settle(RX).len(), 0);
        card.add(RX, &[], &[segment(DATA, 2000)]);
        sleep_through(&mut card, RX, 1);
    }
    assert_eq!(card.totals().received, 3);
}

#[test]
fn a_limited_card_offers_no_way_past_its_limit() {
    let limited = Limited::new(LinkEnd::echo(2).unwrap(), frames(9, 0), frames(9, 0));
    assert_eq!((limited.pairs(), limited.offloads()), (2, LinkEnd::echo(2).unwrap().offloads()));
    let card = Card::new(limited);
    assert!(card.lanes.iter().all(|lane| lane.handler.tap().is_none()));
}

/// No frame in an hour, once one has passed.
fn hardly_any() -> RateLimit {
    RateLimit { bytes: Some(Rate { per_second: NonZeroU64::MIN, burst: 0 }), ops: None }
}

#[test]
fn limits_are_put_on_and_taken_off_live_queues() {
    let (transmit, receive) = (none(), none());
    let mut card = Card::new(Limited::new(LinkEnd::echo(1).unwrap(), transmit.clone(), receive.clone()));
    let send = |card: &mut Card<_>, count: u64| {
        for number in 0..count {
            card.add(RX, &[], &[segment(DATA + 0x1_0000 + number * 0x1000, 2000)]);
            card.send_at(TX, DATA + number * 0x800, [0; HEADER], &frame(60, number as u8));
        }
    };
    send(&mut card, 3);
    assert_eq!((card.settle(TX).len(), card.settle(RX).len()), (3, 3));
    // Out: one passes, the others wait until the limit is lifted.
    transmit.set(hardly_any());
    card.lanes[TX].handler.renew().unwrap();
    send(&mut card, 3);
    assert_eq!((card.settle(TX).len(), card.settle(RX).len()), (1, 1));
    assert!(!card.lanes[TX].handler.rest(false).kicks() && transmit.times_held() > 0);
    transmit.set(RateLimit::default());
    card.lanes[TX].handler.renew().unwrap();
    assert_eq!((card.settle(TX).len(), card.settle(RX).len()), (2, 2));
    assert!(card.lanes[TX].handler.rest(false).kicks());
    // In: the same.
    receive.set(hardly_any());
    card.lanes[RX].handler.renew().unwrap();
    send(&mut card, 3);
    assert_eq!((card.settle(TX).len(), card.settle(RX).len()), (3, 1));
    receive.set(RateLimit::default());
    card.lanes[RX].handler.renew().unwrap();
    assert_eq!(card.settle(RX).len(), 2);
    assert_eq!((card.totals().transmitted, card.totals().received), (9, 9));
}
