//! Two guests on a cable, and one with an echo.
use super::{Driver, Guest, frame};
use paravane_attach::RingFeatures;
use paravane_device::net::LinkEnd;
use paravane_driver::net::NetOptions;
use paravane_test_support::patience;
use std::thread;

/// A driver's half of two streams, one each way, on each of its pairs.
pub(super) struct Streams {
    /// Number of what is sent on pair 0; the others follow.
    pub(super) ours: u64,
    pub(super) theirs: u64,
    pub(super) frames: u64,
    pub(super) longest: usize,
}

impl Streams {
    /// Sends and receives until both are done.
    ///
    /// Every frame must come, in order, as it was sent.
    pub(super) fn run(&self, guest: &Guest, driver: &mut Driver) {
        let pairs = driver.pairs();
        let mut sent = vec![0; pairs.into()];
        let mut received = vec![0; pairs.into()];
        let mut out = vec![0; self.longest];
        loop {
            let mut busy = false;
            for pair in 0..pairs {
                let (stream, at) = (u64::from(pair), usize::from(pair));
                while sent[at] < self.frames
                    && driver.send(pair, &frame(self.ours + stream, sent[at], self.longest)).unwrap()
                {
                    sent[at] += 1;
                    busy = true;
                }
                while let Some(len) = driver.receive(pair, &mut out).unwrap() {
                    let expected = frame(self.theirs + stream, received[at], self.longest);
                    assert!(out[..len] == expected, "frame {} on pair {pair}", received[at]);
                    received[at] += 1;
                    busy = true;
                }
            }
            driver.kick();
            if sent.iter().chain(&received).all(|&count| count == self.frames) {
                return;
            }
            if !busy {
                let what = format!("{} sent {sent:?}, received {received:?}", self.ours);
                guest.sleep(driver, &what);
            }
        }
    }
}

/// Uses all pairs that the driver has set up.
pub(super) fn use_pairs(guest: &Guest, driver: &mut Driver, pairs: u16) {
    driver.ask_for_pairs(pairs).unwrap();
    loop {
        match driver.answer().unwrap() {
            Some(agreed) => return assert!(agreed),
            None => guest.sleep(driver, "the answer to a command"),
        }
    }
}

/// Streams both ways between two guests, each in its thread.
fn stream(pairs: u16, rings: RingFeatures, mtu: u16, frames: u64, options: NetOptions) {
    let (a, b) = LinkEnd::pair(pairs).unwrap();
    let guests = [a, b].map(|end| Guest::new(end, mtu, rings));
    let mut drivers = guests.each_ref().map(|guest| guest.driver(options));
    if pairs > 1 {
        for (guest, driver) in guests.iter().zip(&mut drivers) {
            use_pairs(guest, driver, pairs);
        }
    }
    let longest = options.frame;
    thread::scope(|scope| {
        for ((guest, driver), (ours, theirs)) in guests.iter().zip(&mut drivers).zip([(100, 200), (200, 100)])
        {
            let streams = Streams { ours, theirs, frames, longest };
            scope.spawn(move || streams.run(guest, driver));
        }
    });
    let all = frames * u64::from(pairs);
    for guest in &guests {
        // A batch is counted at its end, which the other side need not wait for.
        guest.device.stop();
        let totals = guest.totals();
        assert_eq!((totals.transmitted, totals.received), (all, all));
        assert_eq!(totals.malformed + totals.refused + totals.no_room + totals.unusable, 0);
    }
}

#[test]
fn streams_both_ways_arrive_whole_and_in_order() {
    let split = RingFeatures::default();
    for rings in [split, split.packed(), split.packed().in_order(), split.in_order()] {
        stream(1, rings, 1500, 3000, NetOptions::default());
    }
}

#[test]
fn large_frames_in_small_buffers() {
    // Sixteen buffers hold less than the largest frame and a half, so the sender has to wait for
    // nearly each.
    let options = NetOptions {
        receive_slots: 32,
        transmit_slots: 4,
        frame: 65535 + 14,
        receive_slot: 4096,
        ..NetOptions::default()
    };
    stream(1, RingFeatures::default(), 65535, 200, options);
}

#[test]
fn one_slot_each_way() {
    let options = NetOptions { receive_slots: 1, transmit_slots: 1, ..NetOptions::default() };
    stream(1, RingFeatures::default(), 1500, 500, options);
}

#[test]
fn several_pairs_at_once() {
    stream(3, RingFeatures::default(), 1500, 1000, NetOptions { pairs: 3, ..NetOptions::default() });
}

#[test]
fn requests_and_answers() {
    for rings in [RingFeatures::default(), RingFeatures::default().packed().in_order()] {
        let guest = Guest::new(LinkEnd::echo(1).unwrap(), 1500, rings);
        let mut driver = guest.driver(NetOptions::default());
        let mut out = [0; 1514];
        for n in 0..1000 {
            let request = frame(1, n, 1514);
            assert!(driver.send(0, &request).unwrap());
            driver.kick();
            let len = loop {
                match driver.receive(0, &mut out).unwrap() {
                    Some(len) => break len,
                    None => guest.sleep(&mut driver, "an echo"),
                }
            };
            assert_eq!((&out[..6], &out[6..12]), (&request[6..12], &request[..6]));
            assert_eq!(out[12..len], request[12..]);
        }
    }
}

#[test]
fn a_driver_that_polls_needs_no_interrupt() {
    let guest = Guest::new(LinkEnd::echo(1).unwrap(), 1500, RingFeatures::default());
    let mut driver = guest.driver(NetOptions::default());
    let mut out = [0; 1514];
    let poller = driver.poller(0).unwrap();
    let token = driver.position(0).unwrap();
    driver.disable_interrupts();
    let start = std::time::Instant::now();
    assert!(driver.send(0, &frame(1, 0, 100)).unwrap());
    driver.kick();
    while !poller.poll(token) {
        assert!(start.elapsed() < patience(), "no news");
        thread::yield_now();
    }
    assert!(driver.has_news(0, token));
    assert!(driver.receive(0, &mut out).unwrap().is_some());
}

#[test]
fn a_card_that_is_reset_under_traffic_starts_anew() {
    let (a, b) = LinkEnd::pair(1).unwrap();
    let guests = [a, b].map(|end| Guest::new(end, 1500, RingFeatures::default()));
    let options = NetOptions { receive_slots: 16, transmit_slots: 16, ..NetOptions::default() };
    let mut b = guests[1].driver(options);
    for round in 0..50 {
        // More than the cable holds and fewer than it needs to be still; then the driver goes and
        // comes back.
        let mut a = guests[0].driver(options);
        for n in 0..round {
            if !a.send(0, &frame(1, n, 200)).unwrap() {
                break;
            }
        }
        a.kick();
        let mut out = [0; 1514];
        while b.receive(0, &mut out).unwrap().is_some() {}
        b.kick();
    }
    // And in the end both are well. First the one whose frames may still wait goes, then the one
    // who would get them.
    let mut a = guests[0].driver(options);
    b = guests[1].driver(options);
    thread::scope(|scope| {
        let [one, two] = &guests;
        scope.spawn(|| Streams { ours: 1, theirs: 2, frames: 500, longest: 1514 }.run(one, &mut a));
        scope.spawn(|| Streams { ours: 2, theirs: 1, frames: 500, longest: 1514 }.run(two, &mut b));
    });
}
