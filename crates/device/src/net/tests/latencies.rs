//! Records of frames in both directions, with a clock that only the test moves.
use super::rig::{Card, DATA, HEADER, frame, layouts};
use crate::latency::Stage;
use crate::latency::rig::Watch;
use crate::net::operation::{FRAME_IN, FRAME_OUT};
use crate::net::{BackEnd, Generator, Limited, LinkEnd, Net, NetConfig};
use crate::rig::{becomes_readable, segment};
use crate::{Device, Limiter, Rate, RateLimit};
use std::num::NonZeroU64;
use std::sync::Arc;

const RX: usize = 0;
const TX: usize = 1;

fn watch<B: BackEnd>(card: &mut Card<B>) -> [Watch; 2] {
    [RX, TX].map(|lane| Watch::of(&mut card.lanes[lane].live))
}

#[test]
fn frames_of_both_directions_are_counted_once() {
    for features in layouts() {
        let net = Net::new(
            NetConfig { queue_size: 64, ..NetConfig::new(super::rig::MAC) },
            LinkEnd::echo(1).unwrap(),
        );
        let net = net.unwrap();
        let features = net.features() | features;
        let mut card = Card::with(net, features);
        let [rx, tx] = watch(&mut card);
        for round in 1..=4 {
            for number in 0..20 {
                card.add(RX, &[], &[segment(DATA + 0x2_0000 + number * 2048, 2000)]);
                card.send_at(TX, DATA + number * 0x800, [0; HEADER], &frame(100, number as u8));
            }
            card.lanes[TX].live.latency().announce();
            tx.wait(90);
            assert_eq!(card.settle(TX).len(), 20);
            card.lanes[RX].live.latency().announce();
            rx.wait(40);
            assert_eq!(card.settle(RX).len(), 20);
            assert_eq!(tx.operations(), [(&FRAME_OUT, round * 20 * 90, round * 20)]);
            assert_eq!(rx.operations(), [(&FRAME_IN, round * 20 * 40, round * 20)]);
        }
        assert!(tx.stages().contains(&(Stage::Ring, 80 * 90, 80)));
        assert!(rx.stages().contains(&(Stage::Ring, 80 * 40, 80)));
        assert_eq!(tx.latency.snapshot().batch.unwrap().buckets, [(20, 4)]);
        assert_eq!(rx.latency.snapshot().batch.unwrap().buckets, [(20, 4)]);
    }
}

#[test]
fn a_frame_that_waits_for_a_buffer_waits_in_the_ring() {
    let mut card = Card::new(Generator::new(1, 1, 60).unwrap());
    let [rx, _] = watch(&mut card);
    assert_eq!(card.settle(RX).len(), 0);
    rx.wait(800);
    card.add(RX, &[], &[segment(DATA, 2000)]);
    assert_eq!(card.serve(RX).unwrap().completed, 1);
    assert_eq!(rx.operations(), [(&FRAME_IN, 800, 1)]);
    let stages = [(Stage::Ring, 800, 1), (Stage::Host, 0, 1), (Stage::Interrupt, 0, 1)];
    assert_eq!(rx.stages(), stages);
}

#[test]
fn a_rate_limit_shows_as_throttled_in_both_directions() {
    let limiter = || {
        let ops = Some(Rate { per_second: NonZeroU64::new(200).unwrap(), burst: 0 });
        Limiter::new(RateLimit { bytes: None, ops })
    };
    let none = || Limiter::new(RateLimit::default());
    for lane in [RX, TX] {
        let (transmit, receive): (Arc<Limiter>, _) =
            if lane == TX { (limiter(), none()) } else { (none(), limiter()) };
        let mut card = Card::new(Limited::new(LinkEnd::echo(1).unwrap(), transmit, receive));
        let watches = watch(&mut card);
        for number in 0..3 {
            card.add(RX, &[], &[segment(DATA + 0x2_0000 + number * 2048, 2000)]);
            card.send_at(TX, DATA + number * 0x800, [0; HEADER], &frame(100, number as u8));
        }
        if lane == RX {
            assert_eq!(card.settle(TX).len(), 3);
        }
        let (mut done, mut held) = (0, 0);
        loop {
            done += card.settle(lane).len();
            if done == 3 {
                break;
            }
            // The limit holds it, and so the time that passes now counts.
            held += 1;
            watches[lane].wait(1000);
            assert!(becomes_readable(&card.lanes[lane].wakes), "nothing wakes the queue");
        }
        assert!(held > 0);
        let stages = watches[lane].stages();
        assert_eq!(watches[lane].count(), 3);
        let sum = |wanted| stages.iter().find(|(stage, ..)| *stage == wanted).map_or(0, |(_, sum, _)| *sum);
        assert!(sum(Stage::Throttled) >= held * 1000, "{stages:?} after {held}");
        assert_eq!((sum(Stage::Ring), sum(Stage::Host), sum(Stage::Interrupt)), (0, 0, 0), "{stages:?}");
    }
}

#[test]
fn a_stop_records_what_it_completes() {
    let mut card = Card::new(Limited::new(
        LinkEnd::echo(1).unwrap(),
        Limiter::new(RateLimit {
            bytes: None,
            ops: Some(Rate { per_second: NonZeroU64::new(1).unwrap(), burst: 0 }),
        }),
        Limiter::new(RateLimit::default()),
    ));
    let [_, tx] = watch(&mut card);
    for number in 0..3 {
        card.send_at(TX, DATA + number * 0x800, [0; HEADER], &frame(100, number as u8));
    }
    let sent = card.settle(TX).len() as u64;
    assert!(sent < 3);
    let lane = &mut card.lanes[TX];
    let drained = lane.handler.drain(&mut lane.live, true);
    lane.live.latency().finish();
    assert_eq!(sent + u64::from(drained.completed), 3);
    assert_eq!(tx.count(), 3);
}
