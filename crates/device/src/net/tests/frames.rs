//! Frames of any size through buffers of any shape, whole and in order.
use super::rig::{BASE, Card, DATA, HEADER, SIZE, frame, layouts};
use crate::Device;
use crate::latency::rig::Watch;
use crate::net::{Generator, LinkEnd, Net, NetConfig, Totals};
use crate::rig::{allocations, segment};
use paravane_dma::Segment;
use paravane_ring::driver::Used;
use paravane_spec::net::{F_MRG_RXBUF, MAX_FRAME};
use proptest::prelude::*;
use std::collections::VecDeque;

/// Receive queue and transmit queue.
const RX: usize = 0;
const TX: usize = 1;

/// What an echo makes of a frame.
fn echoed(sent: &[u8]) -> Vec<u8> {
    [&sent[6..12], &sent[..6], &sent[12..]].concat()
}

#[test]
fn a_frame_comes_back_with_its_addresses_swapped() {
    for layout in layouts() {
        let net =
            Net::new(NetConfig { queue_size: 64, ..NetConfig::new(super::MAC) }, LinkEnd::echo(1).unwrap())
                .unwrap();
        let features = net.features() | layout;
        let mut card = Card::with(net, features);
        for round in 0..200_u8 {
            let sent = frame(60 + usize::from(round), round);
            card.poke(DATA + 0x1_0000, &[0xee; 2048]);
            card.add(RX, &[], &[segment(DATA + 0x1_0000, 2000)]);
            card.send_at(TX, DATA, [0; HEADER], &sent);
            assert_eq!(card.settle(TX).len(), 1);
            let used = card.settle(RX);
            assert_eq!(used.iter().map(|used| used.len as usize).collect::<Vec<_>>(), [HEADER + sent.len()]);
            let got = card.peek(DATA + 0x1_0000, 2048);
            assert_eq!(got[..HEADER], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0]);
            assert_eq!(got[HEADER..HEADER + sent.len()], echoed(&sent));
            assert!(got[HEADER + sent.len()..].iter().all(|&byte| byte == 0xee));
        }
        let totals = card.totals();
        assert_eq!((totals.transmitted, totals.received), (200, 200));
        assert_eq!(totals.transmitted_bytes, totals.received_bytes);
        assert_eq!(totals.malformed + totals.refused + totals.no_room + totals.unusable, 0);
    }
}

#[test]
fn an_answer_has_the_length_that_was_asked_for() {
    for len in [14, 60, 61, 1038] {
        let mut card = Card::new(LinkEnd::echo_of_len(1, len).unwrap());
        // A long one first, so that its remains would show.
        for (size, fill) in [(1500, 1), (60, 2), (14, 3)] {
            let sent = frame(size, fill);
            card.add(RX, &[], &[segment(DATA + 0x1_0000, 2000)]);
            card.send_at(TX, DATA, [0; HEADER], &sent);
            assert_eq!(card.settle(TX).len(), 1);
            assert_eq!(
                card.settle(RX).iter().map(|used| used.len as usize).collect::<Vec<_>>(),
                [HEADER + len]
            );
            let mut expected = echoed(&sent);
            expected.resize(len, 0);
            assert_eq!(card.peek(DATA + 0x1_0000 + HEADER as u64, len), expected);
        }
    }
    for len in [0, 13, MAX_FRAME + 1] {
        assert_eq!(LinkEnd::echo_of_len(1, len).unwrap_err().kind(), std::io::ErrorKind::InvalidInput);
    }
}

#[test]
fn a_spout_numbers_its_frames_through() {
    for (layout, len) in layouts().into_iter().flat_map(|layout| [(layout, 64), (layout, 9000)]) {
        let net = NetConfig { queue_size: 64, ..NetConfig::new(super::MAC) };
        let net = Net::new(net, Generator::new(1, 500, len).unwrap()).unwrap();
        let features = net.features() | layout;
        let mut card = Card::with(net, features);
        let mut number = 0_u64;
        for buffers in [1, 8, 9, 20, 3].into_iter().cycle() {
            for n in 0..buffers {
                card.add(RX, &[], &[segment(DATA + n * 10_000, HEADER + len)]);
            }
            let used = card.settle(RX);
            let mut expected: Vec<u8> = (0..len).map(|at| at as u8).collect();
            for n in 0..used.len() as u64 {
                expected[14..22].copy_from_slice(&number.to_le_bytes());
                assert_eq!(card.peek(DATA + n * 10_000 + HEADER as u64, len), expected);
                number += 1;
            }
            assert!(used.iter().all(|used| used.len as usize == HEADER + len));
            if (used.len() as u64) < buffers {
                break;
            }
        }
        assert_eq!((number, card.totals().received_bytes), (500, 500 * len as u64));
    }
}

#[test]
fn serving_allocates_nothing() {
    let mut card = Card::new(LinkEnd::echo(1).unwrap());
    let _watches = [TX, RX].map(|lane| Watch::of(&mut card.lanes[lane].live));
    let sent = frame(1000, 0);
    for round in 0..4 {
        for n in 0..16 {
            card.add(RX, &[], &[segment(DATA + 0x1_0000 + n * 2048, 600)]);
        }
        for n in 0..8 {
            card.send_at(TX, DATA + n * 2048, [0; HEADER], &sent);
        }
        let before = allocations::count();
        assert_eq!(card.serve(TX).unwrap().completed, 8);
        assert_eq!(card.serve(RX).unwrap().completed, 16);
        // The echo's first frames make the storage for those that follow.
        assert!(round == 0 || allocations::count() == before);
        card.settle(TX);
        card.settle(RX);
    }
}

#[test]
fn a_queue_that_waits_for_frames_wants_no_kicks_and_has_nothing_in_flight() {
    let mut card = Card::new(LinkEnd::echo(1).unwrap());
    card.add(RX, &[], &[segment(DATA, 2000)]);
    assert!(card.settle(RX).is_empty());
    assert!(!card.lanes[RX].handler.rest(false).kicks());
    assert_eq!(card.lanes[RX].live.queue().in_flight(), 0);
    assert!(card.lanes[TX].handler.rest(false).kicks());
    // One buffer, two frames: now it is buffers that it waits for.
    card.send_at(TX, DATA + 4096, [0; HEADER], &frame(60, 1));
    card.send_at(TX, DATA + 8192, [0; HEADER], &frame(60, 2));
    card.settle(TX);
    assert_eq!(card.settle(RX).len(), 1);
    assert!(card.lanes[RX].handler.rest(false).kicks());
}

#[test]
fn half_a_frame_is_given_back_empty_when_the_queue_stops() {
    let mut card = Card::new(LinkEnd::echo(1).unwrap());
    card.add(RX, &[], &[segment(DATA, 100)]);
    card.send_at(TX, DATA + 4096, [0; HEADER], &frame(500, 1));
    card.settle(TX);
    assert!(card.settle(RX).is_empty());
    let lane = &mut card.lanes[RX];
    assert_eq!(lane.live.queue().in_flight(), 1);
    let served = lane.handler.drain(&mut lane.live, true);
    assert_eq!((served.completed, lane.live.queue().in_flight()), (1, 0));
    assert_eq!(lane.driver.pop_used().unwrap().map(|used| used.len), Some(0));
    assert_eq!(card.totals().no_room, 1);
    // And the one after it starts from its beginning.
    card.restart();
    card.add(RX, &[], &[segment(DATA, 100)]);
    card.send_at(TX, DATA + 4096, [0; HEADER], &frame(60, 2));
    card.settle(TX);
    assert_eq!(card.settle(RX).iter().map(|used| used.len).collect::<Vec<_>>(), [72]);
}

/// Buffers at places of their own: each a list of lengths.
#[derive(Clone, Debug)]
struct Shape(Vec<usize>);

impl Shape {
    fn len(&self) -> usize {
        self.0.iter().sum()
    }

    /// Its segments, from `at` on, with a byte between any two.
    fn place(&self, at: &mut u64) -> Vec<Segment> {
        let one = |&len: &usize| {
            let segment = segment(*at, len);
            *at += len as u64 + 1;
            segment
        };
        self.0.iter().map(one).collect()
    }
}

fn shape(longest: usize) -> impl Strategy<Value = Shape> {
    let len = prop_oneof![3 => 1..40_usize, 1 => 1..=longest];
    prop::collection::vec(len, 1..8).prop_map(Shape)
}

fn frame_len() -> impl Strategy<Value = usize> {
    prop_oneof![8 => 14..200_usize, 3 => 200..4000_usize, 1 => 4000..=MAX_FRAME]
}

/// Bytes that the driver must find, buffer by buffer.
///
/// By the rules, and without any of the device's code.
fn expected(frames: &[Vec<u8>], shapes: &[Shape], mergeable: bool) -> (Vec<Vec<u8>>, Totals) {
    let mut totals = Totals::default();
    let mut buffers: Vec<Vec<u8>> = Vec::new();
    let mut shapes: VecDeque<usize> = shapes.iter().map(Shape::len).collect();
    for frame in frames {
        let mut parts: Vec<Vec<u8>> = Vec::new();
        let mut rest = echoed(frame);
        let mut dropped = false;
        while !rest.is_empty() || parts.is_empty() {
            let Some(room) = shapes.pop_front() else { return (buffers, totals) };
            if parts.is_empty() && room < HEADER {
                buffers.push(Vec::new());
                totals.unusable += 1;
                continue;
            }
            let head = if parts.is_empty() { HEADER } else { 0 };
            if !mergeable && room < head + rest.len() {
                buffers.push(Vec::new());
                dropped = true;
                break;
            }
            let now = rest.len().min(room - head);
            let mut part = vec![0; head];
            part.extend(rest.drain(..now));
            parts.push(part);
        }
        if dropped {
            totals.no_room += 1;
            continue;
        }
        let count = parts.len() as u16;
        parts[0][10..12].copy_from_slice(&count.to_le_bytes());
        buffers.extend(parts);
        totals.received += 1;
        totals.received_bytes += frame.len() as u64;
    }
    (buffers, totals)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn frames_fill_buffers_of_any_shape_as_the_rules_say(
        lens in prop::collection::vec(frame_len(), 1..12),
        shapes in prop::collection::vec(shape(3000), 1..64),
        mergeable: bool,
        pieces in 1..9_usize,
        late in 0..64_usize,
    ) {
        let refused = if mergeable { 0 } else { F_MRG_RXBUF };
        let mut card = Card::without(LinkEnd::echo(1).unwrap(), refused);
        let frames: Vec<Vec<u8>> = lens.iter().enumerate().map(|(n, &len)| frame(len, n as u8)).collect();
        let (mut at, mut places) = (DATA, Vec::new());
        for shape in &shapes {
            places.push(shape.place(&mut at));
        }
        card.poke(DATA, &vec![0xee; (at - DATA) as usize]);
        let end = at;

        // Some buffers are there first, then come the frames, each in pieces, then the other
        // buffers.
        let early = shapes.len() - late.min(shapes.len());
        let offer = |card: &mut Card<LinkEnd>, places: &[Vec<Segment>]| {
            for segments in places {
                card.add(RX, &[], segments);
            }
        };
        offer(&mut card, &places[..early]);
        for frame in &frames {
            let bytes = [vec![0; HEADER], frame.clone()].concat();
            let piece = bytes.len().div_ceil(pieces);
            let mut segments = Vec::new();
            for chunk in bytes.chunks(piece) {
                card.poke(at, chunk);
                segments.push(segment(at, chunk.len()));
                at += chunk.len() as u64 + 3;
            }
            prop_assert!(at < BASE + SIZE);
            card.add(TX, &segments, &[]);
        }
        prop_assert_eq!(card.settle(TX).len(), frames.len());
        let mut used: Vec<Used> = card.settle(RX);
        offer(&mut card, &places[early..]);
        used.extend(card.settle(RX));

        let (buffers, mut totals) = expected(&frames, &shapes, mergeable);
        let lens: Vec<usize> = used.iter().map(|used| used.len as usize).collect();
        prop_assert_eq!(lens, buffers.iter().map(Vec::len).collect::<Vec<_>>());
        for (buffer, segments) in buffers.iter().zip(&places) {
            let got: Vec<u8> = segments.iter().flat_map(|s| card.peek(s.addr, s.len as usize)).collect();
            prop_assert_eq!(&got[..buffer.len()], &buffer[..]);
            if !buffer.is_empty() {
                prop_assert!(got[buffer.len()..].iter().all(|&byte| byte == 0xee));
            }
        }
        // Between the buffers nothing was written.
        for pair in places.concat().windows(2) {
            let gap = pair[0].addr + u64::from(pair[0].len);
            prop_assert!(gap >= end || card.peek(gap, 1) == [0xee]);
        }
        totals.transmitted = frames.len() as u64;
        totals.transmitted_bytes = frames.iter().map(|frame| frame.len() as u64).sum();
        prop_assert_eq!(card.totals(), totals);
    }
}
