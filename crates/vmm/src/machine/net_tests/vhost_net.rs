//! Queues that vhost-net serves for a while each, under traffic with the host.
//!
//! Needs what the tests beside it need, and /dev/vhost-net. `scripts/linux-guest vhost-net` runs
//! these where there is one.
use super::tap::{IpHost, datagram, guest, payload, skipped};
use crate::machine::vhost_net::VhostNet;
use paravane_attach::{AttachedDevice, RingFeatures};
use paravane_device::net::Totals;
use paravane_driver::net::NetOptions;
use paravane_io::LendError;
use paravane_test_support::in_own_network;
use paravane_test_support::patience;
use std::fs::File;
use std::net::UdpSocket;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Times that each queue goes to the kernel and comes back.
const LOANS: usize = 200;

fn with_vhost(name: &str, test: fn()) {
    let name = format!("machine::net_tests::vhost_net::{name}");
    match File::options().read(true).write(true).open("/dev/vhost-net") {
        Ok(_) => in_own_network(&name, test),
        Err(error) => skipped(&name, format!("/dev/vhost-net: {error}")),
    }
}

fn lend(device: &AttachedDevice, queue: u16) {
    device.lend_queue(queue, Box::new(VhostNet::default())).unwrap();
}

/// Sends back every datagram that comes to port 7, as long as some come.
fn echo() {
    let socket = UdpSocket::bind("10.77.0.1:7").unwrap();
    socket.set_read_timeout(Some(patience())).unwrap();
    thread::spawn(move || {
        let mut buffer = [0; 2000];
        while let Ok((len, from)) = socket.recv_from(&mut buffer) {
            socket.send_to(&buffer[..len], from).unwrap();
        }
    });
}

/// One datagram there and back, on pair 0.
fn exchange(us: &mut IpHost<'_>, host: [u8; 6], n: usize) {
    let sent: Vec<u8> = (0..n * 4 % 1400 + 1).map(|at| (at * 7 + n) as u8).collect();
    us.send(&datagram(host, 4000, &sent));
    let back = us.next(|frame| payload(frame, 4000).is_some());
    assert_eq!(payload(&back, 4000), Some(&sent[..]), "datagram {n}");
}

#[test]
fn datagrams_come_back_from_any_owner_of_the_queues() {
    with_vhost("datagrams_come_back_from_any_owner_of_the_queues", || {
        let guest = guest(1);
        let mut us = IpHost { guest: &guest, driver: guest.driver(NetOptions::default()) };
        let host = us.ask_for_host();
        echo();
        let (done, over) = (AtomicUsize::new(0), AtomicBool::new(false));
        // Two more datagrams come back; and what we move is counted, a little later, and what the
        // kernel moves is not.
        let progress = |what: &str, ours: [bool; 2]| {
            let counted = || [guest.totals().received, guest.totals().transmitted];
            let (start, before, first) = (Instant::now(), counted(), done.load(Ordering::Relaxed));
            loop {
                let now = counted();
                let moved = [0, 1].map(|queue| now[queue] > before[queue]);
                if done.load(Ordering::Relaxed) >= first + 2 && moved == ours {
                    return;
                }
                assert!(
                    start.elapsed() < patience(),
                    "{what}: nothing comes back any more, or {moved:?} is ours"
                );
                thread::sleep(Duration::from_micros(100));
            }
        };
        thread::scope(|scope| {
            let lender = scope.spawn(|| {
                let device = &guest.device;
                for n in 0..LOANS {
                    // Which queue goes first, and which comes back first.
                    let (first, second) = if n % 2 == 0 { (0, 1) } else { (1, 0) };
                    let with = |kernel: &[u16]| [0, 1].map(|queue| !kernel.contains(&queue));
                    progress("before", with(&[]));
                    lend(device, first);
                    progress("one is lent", with(&[first]));
                    lend(device, second);
                    progress("both are lent", with(&[0, 1]));
                    device.take_back_queue(if n % 4 < 2 { first } else { second }).unwrap();
                    progress("one is back", with(&[if n % 4 < 2 { second } else { first }]));
                    device.take_back_queue(if n % 4 < 2 { second } else { first }).unwrap();
                    // And as fast as it goes.
                    for queue in [first, second] {
                        lend(device, queue);
                        device.take_back_queue(queue).unwrap();
                    }
                }
                over.store(true, Ordering::Relaxed);
            });
            while !over.load(Ordering::Relaxed) && !lender.is_finished() {
                exchange(&mut us, host, done.load(Ordering::Relaxed));
                done.fetch_add(1, Ordering::Relaxed);
            }
            lender.join().unwrap();
        });
        let Totals { malformed, refused, no_room, unusable, .. } = guest.totals();
        assert_eq!((malformed, refused, no_room, unusable), (0, 0, 0, 0));
        let count = done.into_inner();
        eprintln!("{} loans of a queue, {count} datagrams there and back", 4 * LOANS);
    });
}

#[test]
fn a_reset_takes_the_queues_from_the_kernel() {
    with_vhost("a_reset_takes_the_queues_from_the_kernel", || {
        let guest = guest(1);
        echo();
        for round in 0..20 {
            let mut us = IpHost { guest: &guest, driver: guest.driver(NetOptions::default()) };
            let host = us.ask_for_host();
            for queue in [0, 1] {
                lend(&guest.device, queue);
                exchange(&mut us, host, round);
            }
        }
        // And the machine stops.
        assert!(guest.device.stop().is_some());
        assert!(matches!(guest.device.take_back_queue(0), Err(LendError::NotLent { queue: 0 })));
    });
}

#[test]
fn a_queue_without_a_tap_device_stays_ours() {
    use paravane_device::net::LinkEnd;
    with_vhost("a_queue_without_a_tap_device_stays_ours", || {
        let guest = super::Guest::new(LinkEnd::echo(1).unwrap(), 1500, RingFeatures::default());
        let _driver = guest.driver(NetOptions::default());
        let refused = guest.device.lend_queue(0, Box::new(VhostNet::default()));
        assert!(matches!(refused, Err(LendError::Refused { .. })), "{refused:?}");
        guest.device.move_queue(0, 0).unwrap();
    });
}
