//! Queues that change hands while frames go both ways.
use super::Guest;
use super::link::{Streams, use_pairs};
use paravane_attach::RingFeatures;
use paravane_device::net::LinkEnd;
use paravane_driver::net::NetOptions;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

/// I/O threads of a guest.
const THREADS: usize = 3;
/// Moves of queues under traffic, at least.
const MOVES: u64 = 5000;

/// Moves the queues of the first of two guests, one at a time.
///
/// Until enough has happened.
fn streams_survive(pairs: u16, rings: RingFeatures, longest_poll: Duration) {
    let (a, b) = LinkEnd::pair(pairs).unwrap();
    let guests = [a, b].map(|end| Guest::with_threads(end, 1500, rings, THREADS, longest_poll));
    let options = NetOptions { pairs, receive_slots: 16, transmit_slots: 16, ..NetOptions::default() };
    let mut drivers = guests.each_ref().map(|guest| guest.driver(options));
    if pairs > 1 {
        for (guest, driver) in guests.iter().zip(&mut drivers) {
            use_pairs(guest, driver, pairs);
        }
    }
    // Few frames at a time, so that both sides sleep again and again: a kick that is lost is a test
    // that waits in vain.
    let (mut moves, mut rounds) = (0, 0);
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let mover = scope.spawn(|| {
            let (mut moves, queues) = (0, 2 * pairs);
            while !done.load(Ordering::Relaxed) {
                let (queue, thread) = ((moves % u64::from(queues)) as u16, (moves / 2) as usize % THREADS);
                guests[0].device.move_queue(queue, thread).unwrap();
                moves += 1;
            }
            moves
        });
        while rounds < 4 || guests[0].moves() < MOVES {
            thread::scope(|scope| {
                for ((guest, driver), (ours, theirs)) in guests.iter().zip(&mut drivers).zip([(1, 9), (9, 1)])
                {
                    let streams = Streams { ours, theirs, frames: 50, longest: 1514 };
                    scope.spawn(move || streams.run(guest, driver));
                }
            });
            rounds += 1;
        }
        done.store(true, Ordering::Relaxed);
        moves = mover.join().unwrap();
    });
    assert!(moves >= MOVES);
    let all = rounds * 50 * u64::from(pairs);
    for guest in &guests {
        guest.device.stop();
        let totals = guest.totals();
        assert_eq!((totals.transmitted, totals.received), (all, all), "{moves} moves");
        assert_eq!(totals.malformed + totals.refused + totals.no_room + totals.unusable, 0);
    }
}

#[test]
fn no_frame_is_lost_while_queues_move() {
    streams_survive(1, RingFeatures::default(), Duration::ZERO);
}

#[test]
fn nor_with_several_packed_ones() {
    streams_survive(3, RingFeatures::default().packed(), Duration::ZERO);
}

#[test]
fn nor_while_they_are_polled() {
    streams_survive(2, RingFeatures::default(), Duration::from_micros(100));
}
