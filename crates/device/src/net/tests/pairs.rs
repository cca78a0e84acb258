//! Several pairs of queues, and the queue that controls them.
use super::rig::{Card, DATA, HEADER, frame};
use crate::net::{LinkEnd, Net, NetConfig};
use crate::rig::segment;
use crate::{Device, ServeError};
use paravane_ring::QueueError;
use paravane_spec::net::{CTRL_ERR, CTRL_OK, F_CTRL_VQ, F_GUEST_ANNOUNCE, F_MQ};

/// Queue numbers with three pairs.
const CONTROL: usize = 6;

fn card(refused: u64) -> Card<LinkEnd> {
    Card::without(LinkEnd::echo(3).unwrap(), refused)
}

/// The answer to a command.
fn command(card: &mut Card<LinkEnd>, lane: usize, bytes: &[u8]) -> u8 {
    card.poke(DATA, bytes);
    card.poke(DATA + 100, &[0xee; 2]);
    card.add(lane, &[segment(DATA, bytes.len())], &[segment(DATA + 100, 1)]);
    let used = card.settle(lane);
    assert_eq!(used.iter().map(|used| used.len).collect::<Vec<_>>(), [1]);
    let answer = card.peek(DATA + 100, 2);
    assert_eq!(answer[1], 0xee);
    answer[0]
}

/// Sends from each pair, and says on which pairs the echoes came.
fn come_on(card: &mut Card<LinkEnd>) -> [usize; 3] {
    for pair in 0..3 {
        card.add(2 * pair, &[], &[segment(DATA + 0x1_0000 + pair as u64 * 4096, 2000)]);
        card.add(2 * pair, &[], &[segment(DATA + 0x2_0000 + pair as u64 * 4096, 2000)]);
        card.add(2 * pair, &[], &[segment(DATA + 0x3_0000 + pair as u64 * 4096, 2000)]);
    }
    for pair in 0..3 {
        card.send_at(2 * pair + 1, DATA + 0x4_0000, [0; HEADER], &frame(60, pair as u8));
        assert_eq!(card.settle(2 * pair + 1).len(), 1);
    }
    let came = [0, 1, 2].map(|pair| card.settle(2 * pair).len());
    card.restart();
    came
}

#[test]
fn one_pair_is_in_use_until_the_driver_asks_for_more() {
    let mut card = card(0);
    assert_eq!(come_on(&mut card), [3, 0, 0]);
    for (pairs, came) in [(3, [1, 1, 1]), (2, [2, 1, 0]), (1, [3, 0, 0])] {
        assert_eq!(command(&mut card, CONTROL, &[4, 0, pairs, 0]), CTRL_OK);
        assert_eq!(come_on(&mut card), came);
    }
    // `come_on` has reset the card, so one it is again.
    assert_eq!(come_on(&mut card), [3, 0, 0]);
}

#[test]
fn without_a_control_queue_of_ours_as_many_pairs_are_in_use_as_are_enabled() {
    let mut card = card(0);
    for (enabled, came) in [(6, [1, 1, 1]), (5, [2, 1, 0]), (4, [2, 1, 0]), (2, [3, 0, 0]), (0, [3, 0, 0])] {
        card.net.enable_queues(enabled);
        assert_eq!(come_on(&mut card), came, "{enabled} queues are enabled");
    }
    // The control queue is enabled as well: it is the driver's to say.
    for enabled in 1..=7 {
        card.net.enable_queues(enabled);
    }
    assert_eq!(come_on(&mut card), [3, 0, 0]);
    // Before any of them is started.
    let Card { mut net, features, .. } = card;
    net.reset();
    net.enable_queues(6);
    assert_eq!(come_on(&mut Card::with(net, features)), [1, 1, 1]);
}

#[test]
fn a_driver_that_has_announced_itself_is_believed() {
    let config = NetConfig { announce: true, queue_size: 64, ..NetConfig::new(super::MAC) };
    let net = Net::new(config, LinkEnd::echo(1).unwrap()).unwrap();
    assert_eq!(net.queue_sizes().len(), 3);
    let features = net.features();
    assert_eq!(features & (F_CTRL_VQ | F_GUEST_ANNOUNCE | F_MQ), F_CTRL_VQ | F_GUEST_ANNOUNCE);
    for (refused, answer) in [(0, CTRL_OK), (F_GUEST_ANNOUNCE, CTRL_ERR)] {
        let config = NetConfig { announce: true, queue_size: 64, ..NetConfig::new(super::MAC) };
        let net = Net::new(config, LinkEnd::echo(1).unwrap()).unwrap();
        let mut card = Card::with(net, features & !refused);
        let lane = card.start_queue(2);
        card.lanes.push(lane);
        assert_eq!(command(&mut card, 2, &[3, 0]), answer);
        assert_eq!(command(&mut card, 2, &[3, 1]), CTRL_ERR);
    }
}

#[test]
fn commands_that_make_no_sense_are_answered_so() {
    let mut card = card(0);
    let refused: [&[u8]; 8] = [
        &[4, 0, 0, 0],
        &[4, 0, 4, 0],
        &[4, 0, 0xff, 0xff],
        &[4, 1, 2, 0],
        &[4, 0, 2],
        &[4, 0],
        &[0, 0, 1],
        &[0xff, 0xff, 0xff, 0xff],
    ];
    for bytes in refused {
        assert_eq!(command(&mut card, CONTROL, bytes), CTRL_ERR, "{bytes:?}");
    }
    assert_eq!(command(&mut card, CONTROL, &[4, 0, 3, 0, 9, 9]), CTRL_OK);
}

#[test]
fn a_command_that_is_none_latches_the_queue() {
    for (readable, writable) in [(1, 1), (4, 0)] {
        let mut card = card(0);
        let answer = [segment(DATA + 100, 1)];
        card.add(CONTROL, &[segment(DATA, readable)], &answer[..writable]);
        let error = card.serve(CONTROL).unwrap_err();
        assert!(matches!(error, ServeError::Queue(QueueError::Request { .. })), "{error}");
        assert!(card.lanes[CONTROL].live.queue().error().is_some());
    }
}

#[test]
fn for_a_driver_of_one_pair_the_control_queue_is_the_third() {
    let mut card = card(F_MQ);
    let lane = card.start_queue(2);
    card.lanes.push(lane);
    assert_eq!(command(&mut card, 2, &[4, 0, 2, 0]), CTRL_ERR);
}

#[test]
fn a_driver_without_a_control_queue_has_one_pair() {
    let mut card = card(F_CTRL_VQ | F_MQ);
    assert_eq!(card.lanes.len(), 2);
    assert_eq!(card.net.queue_sizes().len(), 7);
    card.add(0, &[], &[segment(DATA, 2000)]);
    card.send_at(1, DATA + 4096, [0; HEADER], &frame(60, 1));
    card.settle(1);
    assert_eq!(card.settle(0).len(), 1);
}

#[test]
fn another_process_continues_with_the_pairs_that_the_driver_has_set() {
    let mut old = card(0);
    assert_eq!(old.net.commanded_pairs(), 0);
    assert_eq!(command(&mut old, CONTROL, &[4, 0, 3, 0]), CTRL_OK);
    let pairs = old.net.commanded_pairs();
    assert_eq!(pairs, 3);
    let mut new = card(0);
    new.net.restore_pairs(pairs);
    for impossible in [4, u16::MAX] {
        new.net.restore_pairs(impossible);
    }
    assert_eq!(new.net.commanded_pairs(), 3);
    assert_eq!(come_on(&mut new), [1, 1, 1]);
    // A driver that starts over has set none.
    assert_eq!(new.net.commanded_pairs(), 0);
    new.net.restore_pairs(3);
    new.net.restore_pairs(0);
    assert_eq!((new.net.commanded_pairs(), come_on(&mut new)), (0, [3, 0, 0]));
}
