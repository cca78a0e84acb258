//! A TAP device of this host, in a separate network namespace.
//!
//! Needs root, /dev/net/tun and the program `ip`.
use super::rig::{Card, DATA, HEADER, MAC};
use crate::net::{BackEnd, EncodedHeader, Receiver, Tap, TapError};
use crate::rig::{becomes_readable, segment};
use crate::{Device, HostSide};
use paravane_spec::net::{
    CTRL_OK, F_GUEST_CSUM, F_GUEST_TSO4, F_HOST_TSO4, GSO_ECN, GSO_NONE, GSO_TCPV4, GSO_TCPV6, GSO_UDP_L4,
    Header, S_LINK_UP,
};
use paravane_test_support::{in_own_network, ip};
use std::os::fd::AsRawFd;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

const RX: usize = 0;
const TX: usize = 1;

/// A device with an address, and up.
fn up(queues: u16) -> Tap {
    let tap = Tap::open("pv0", queues).unwrap();
    ip("addr add 10.77.0.1/24 dev pv0");
    ip("link set pv0 up");
    tap
}

#[test]
fn the_mtu_is_that_of_the_interface() {
    in_own_network("the_mtu_is_that_of_the_interface", || {
        let tap = Tap::open("pv0", 1).unwrap();
        assert_eq!(tap.mtu(), Some(1500));
        ip("link set pv0 mtu 9000");
        assert_eq!(tap.mtu(), Some(9000));
        // One that is gone from here tells nothing.
        ip("link set pv0 name pv1");
        assert_eq!(tap.mtu(), None);
    });
}

/// An ARP question for 10.77.0.1 by 10.77.0.2, of `mac`.
fn who_is_the_host(mac: [u8; 6]) -> Vec<u8> {
    let ethernet = [&[0xff; 6], mac.as_slice(), &[8, 6]].concat();
    let arp = [&[0, 1, 8, 0, 6, 4, 0, 1], mac.as_slice(), &[10, 77, 0, 2, 0, 0, 0, 0, 0, 0, 10, 77, 0, 1]];
    [ethernet, arp.concat(), vec![0; 18]].concat()
}

/// The next frame on queue `lane` for which `wanted` is true.
///
/// Others are taken and dropped.
fn next(card: &mut Card<Tap>, lane: usize, wanted: impl Fn(&[u8]) -> bool) -> Vec<u8> {
    loop {
        card.add(lane, &[], &[segment(DATA + 0x10_0000, 40), segment(DATA + 0x10_1000, 2000)]);
        let mut used = card.settle(lane);
        if used.is_empty() {
            assert!(becomes_readable(&card.lanes[lane].wakes), "no frame comes");
            used = card.settle(lane);
        }
        for used in used {
            let len = used.len as usize;
            let bytes = card.peek(DATA + 0x10_0000, 40.min(len));
            let frame = [bytes, card.peek(DATA + 0x10_1000, len.saturating_sub(40))].concat();
            if wanted(&frame[HEADER..]) {
                return frame;
            }
        }
    }
}

fn is_arp_answer(frame: &[u8]) -> bool {
    frame[12..14] == [8, 6] && frame[20..22] == [0, 2]
}

#[test]
fn the_host_answers_an_arp_question() {
    in_own_network("net::tap::the_host_answers_an_arp_question", || {
        let mut card = Card::new(up(1));
        for round in 0..20 {
            card.send_at(TX, DATA + round * 100, [0; HEADER], &who_is_the_host(MAC));
            assert_eq!(card.settle(TX).len(), 1);
            let answer = next(&mut card, RX, is_arp_answer);
            assert_eq!(answer[HEADER..HEADER + 6], MAC);
            assert_eq!(answer[HEADER + 28..HEADER + 32], [10, 77, 0, 1]);
            assert_eq!(answer[10..12], [1, 0], "one buffer");
        }
        assert_eq!(card.totals().transmitted, 20);
        assert_eq!(card.totals().refused, 0);
    });
}

#[test]
fn an_interface_that_is_down_takes_nothing_and_the_queue_goes_on() {
    in_own_network("net::tap::an_interface_that_is_down_takes_nothing_and_the_queue_goes_on", || {
        let mut card = Card::new(Tap::open("pv0", 1).unwrap());
        card.send_at(TX, DATA, [0; HEADER], &who_is_the_host(MAC));
        assert_eq!(card.settle(TX).len(), 1);
        assert!(card.settle(RX).is_empty());
        assert_eq!(card.totals().refused, 1);
        ip("addr add 10.77.0.1/24 dev pv0");
        ip("link set pv0 up");
        card.send_at(TX, DATA, [0; HEADER], &who_is_the_host(MAC));
        card.settle(TX);
        next(&mut card, RX, is_arp_answer);
    });
}

#[test]
fn headers_that_pass_the_rules_do_the_kernel_no_harm() {
    in_own_network("net::tap::headers_that_pass_the_rules_do_the_kernel_no_harm", || {
        let mut card = Card::new(up(1));
        let mut state = 1_u64;
        let mut below = |most: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % most
        };
        for _ in 0..2000 {
            let gso = [GSO_NONE, GSO_TCPV4, GSO_TCPV6, GSO_UDP_L4, GSO_TCPV4 | GSO_ECN][below(5) as usize];
            // Small numbers are the interesting ones.
            let number = |n: u64| if n & 1 == 0 { (n >> 1) as u16 % 100 } else { (n >> 1) as u16 };
            let header = EncodedHeader::from(Header {
                flags: u8::from(below(4) > 0),
                gso_type: gso,
                hdr_len: number(below(1 << 17)),
                gso_size: number(below(1 << 17)),
                csum_start: number(below(1 << 17)),
                csum_offset: below(40) as u16,
                num_buffers: 0,
            })
            .bytes();
            // An IPv4 or IPv6 packet of TCP or UDP, by its look.
            let (v6, protocol) = (below(2) == 0, if below(2) == 0 { 6 } else { 17 });
            let mut frame = who_is_the_host(MAC);
            frame.resize(42 + below(1600) as usize, 0xee);
            let (kind, first, place) = if v6 { ([0x86, 0xdd], 0x60, 20) } else { ([8, 0], 0x45, 23) };
            frame[12..14].copy_from_slice(&kind);
            (frame[14], frame[place]) = (first, protocol);
            card.send_at(TX, DATA, header, &frame);
            assert_eq!(card.settle(TX).len(), 1);
        }
        let totals = card.totals();
        assert_eq!(totals.transmitted + totals.refused + totals.malformed, 2000);
        assert!(totals.malformed > 100 && totals.transmitted > 100, "{totals:?}");
        card.send_at(TX, DATA, [0; HEADER], &who_is_the_host(MAC));
        card.settle(TX);
        next(&mut card, RX, is_arp_answer);
    });
}

#[test]
fn pairs_are_attached_as_the_driver_asks() {
    in_own_network("net::tap::pairs_are_attached_as_the_driver_asks", || {
        let mut card = Card::new(up(3));
        let queues = || {
            let shown = Command::new("ip").args(["-d", "link", "show", "pv0"]).output().unwrap();
            let shown = String::from_utf8(shown.stdout).unwrap();
            let number = |what| shown.split(what).nth(1).unwrap().split(' ').next().unwrap().to_owned();
            (number("numqueues "), number("numdisabled "))
        };
        assert_eq!(queues(), ("1".into(), "2".into()));
        for pairs in [3, 2, 1, 3] {
            card.poke(DATA, &[4, 0, pairs, 0]);
            card.add(6, &[segment(DATA, 4)], &[segment(DATA + 8, 1)]);
            card.settle(6);
            assert_eq!(card.peek(DATA + 8, 1), [CTRL_OK]);
            assert_eq!(queues(), (pairs.to_string(), (3 - pairs).to_string()));
            // No pair fails for being detached.
            for pair in 0..3 {
                card.settle(2 * pair);
            }
        }
        // The answers come on all pairs, and wake also those that were detached when they were
        // first waited for.
        for asker in 2..66 {
            let mut question = who_is_the_host(MAC);
            question[31] = asker;
            card.send_at(1 + 2 * (usize::from(asker) % 3), DATA, [0; HEADER], &question);
            card.settle(1 + 2 * (usize::from(asker) % 3));
        }
        for pair in 0..3 {
            next(&mut card, 2 * pair, is_arp_answer);
        }
        card.net.reset();
        assert_eq!(queues(), ("1".into(), "2".into()));
    });
}

#[test]
fn offloads_are_what_kernel_and_driver_can_do() {
    in_own_network("net::tap::offloads_are_what_kernel_and_driver_can_do", || {
        let tap = up(1);
        let offered = tap.offloads();
        assert_ne!(offered & (F_HOST_TSO4 | F_GUEST_TSO4), 0);
        let shown = || {
            let shown = Command::new("ip").args(["-d", "link", "show", "pv0"]).output().unwrap();
            String::from_utf8(shown.stdout).unwrap()
        };
        // Whatever the driver accepts, in whatever combination, the kernel is asked for something
        // that it does.
        for features in [0, F_GUEST_TSO4, F_GUEST_CSUM, F_GUEST_CSUM | F_GUEST_TSO4, offered] {
            tap.accept(features).unwrap_or_else(|error| panic!("{features:#x}: {error}\n{}", shown()));
        }
        for bit in 0..64 {
            if offered & 1 << bit != 0 {
                tap.accept(offered & !(1 << bit)).unwrap();
                tap.accept(1 << bit).unwrap();
            }
        }
    });
}

#[test]
fn an_inherited_descriptor_is_copied_and_keeps_the_device() {
    in_own_network("net::tap::an_inherited_descriptor_is_copied_and_keeps_the_device", || {
        let theirs = up(1);
        let receiver = theirs.receiver(0).unwrap();
        let ours = Tap::inherited(&[receiver.tap().unwrap().as_raw_fd()]).unwrap();
        assert_eq!((ours.name(), ours.pairs()), ("pv0", 1));
        drop((theirs, receiver));
        let mut card = Card::new(ours);
        card.send_at(TX, DATA, [0; HEADER], &who_is_the_host(MAC));
        assert_eq!(card.settle(TX).len(), 1);
        next(&mut card, RX, is_arp_answer);
    });
}

/// Deletes the interface behind a card's queues, makes another one with `flags`, and uses that.
fn a_successor_is_used(queues: u16, flags: &str) {
    let losses = Arc::new(AtomicUsize::new(0));
    let mut card = Card::new(up(queues));
    let told = Arc::clone(&losses);
    card.net.tell_change(Box::new(move || {
        told.fetch_add(1, Ordering::Relaxed);
    }));
    let ask = |card: &mut Card<Tap>| {
        card.send_at(TX, DATA, [0; HEADER], &who_is_the_host(MAC));
        assert_eq!(card.settle(TX).len(), 1);
    };
    ask(&mut card);
    next(&mut card, RX, is_arp_answer);
    assert_eq!(card.net.look(), HostSide::Present);
    let link_is_up = |card: &Card<Tap>| {
        let mut status = [0; 2];
        card.net.read_config(6, &mut status);
        u16::from_le_bytes(status) & S_LINK_UP != 0
    };
    for round in 1..3 {
        ip("link del pv0");
        // Neither queue stops.
        assert!(card.settle(RX).is_empty());
        ask(&mut card);
        assert_eq!(losses.load(Ordering::Relaxed), round);
        let HostSide::Gone(why) = card.net.look() else { panic!("not noticed") };
        assert!(why.starts_with("pv0: the TAP device was deleted"), "{why}");
        assert!(!link_is_up(&card));
        // Its name is free for whoever makes it anew.
        ip(format!("tuntap add dev pv0 mode tap {flags}").trim_end());
        assert!(matches!(card.net.look(), HostSide::Returned(_)));
        assert!(link_is_up(&card));
        ip("addr add 10.77.0.1/24 dev pv0");
        ip("link set pv0 up");
        ask(&mut card);
        next(&mut card, RX, is_arp_answer);
        assert_eq!(card.net.look(), HostSide::Present);
    }
}

#[test]
fn the_successor_of_a_deleted_interface_is_used() {
    in_own_network("net::tap::the_successor_of_a_deleted_interface_is_used", || {
        a_successor_is_used(1, "");
        ip("link del pv0");
        a_successor_is_used(1, "multi_queue");
        ip("link del pv0");
        a_successor_is_used(3, "multi_queue");
    });
}

#[test]
fn a_successor_that_cannot_be_used_is_named() {
    in_own_network("net::tap::a_successor_that_cannot_be_used_is_named", || {
        let tap = up(2);
        ip("link del pv0");
        // Without an interface, a card can still be reset and set up.
        tap.accept(F_GUEST_CSUM).unwrap();
        tap.use_pairs(1).unwrap();
        ip("tuntap add dev pv0 mode tap");
        let HostSide::Gone(why) = tap.look() else { panic!("two queues of one") };
        assert!(why.contains("single-queue where several are needed (multi_queue)"), "{why}");
        ip("link del pv0");
        ip("tuntap add dev pv0 mode tap multi_queue");
        assert!(matches!(tap.look(), HostSide::Returned(_)));
    });
}

#[test]
fn errors_say_what_is_wrong() {
    for name in ["", "a name", "a/b", "sixteen-bytes-xx"] {
        assert!(matches!(Tap::open(name, 1), Err(TapError::Name(_))), "{name}");
    }
    assert!(matches!(Tap::from_fds(Vec::new()), Err(TapError::NoQueues)));
    let file = tempfile::tempfile().unwrap();
    let number = file.as_raw_fd();
    assert!(matches!(Tap::inherited(&[number]), Err(TapError::NotTap(_))));
    assert!(matches!(Tap::inherited(&[-1]), Err(TapError::Descriptor { number: -1, .. })));
    assert!(matches!(Tap::from_fds(vec![file.into()]), Err(TapError::NotTap(_))));
    in_own_network("net::tap::errors_say_what_is_wrong", || {
        let said = |name| Tap::open(name, 1).unwrap_err().to_string();
        assert!(said("lo").contains("not a TAP device"), "{}", said("lo"));
        ip("tuntap add dev tun0 mode tun");
        assert!(said("tun0").contains("not a TAP device"), "{}", said("tun0"));
        let _tap = Tap::open("pv0", 1).unwrap();
        assert!(said("pv0").contains("is in use"), "{}", said("pv0"));
        // Several queues, of which we want one.
        ip("tuntap add dev pv1 mode tap multi_queue vnet_hdr");
        assert_eq!(Tap::open("pv1", 1).unwrap().name(), "pv1");
        assert!(Tap::open("pv1", 2).is_ok());
        // One, of which we want several.
        ip("tuntap add dev pv2 mode tap vnet_hdr");
        assert!(Tap::open("pv2", 2).unwrap_err().to_string().contains("single-queue"));
    });
}
