//! Our driver and the host's network stack, on a TAP device in a new network.
//!
//! Needs root, /dev/net/tun and the program `ip`.
use super::{Driver, Guest};
use paravane_attach::RingFeatures;
use paravane_device::net::Tap;
use paravane_driver::net::NetOptions;
use paravane_test_support::{in_own_network, ip, patience, wait_until};
use std::net::UdpSocket;
use std::thread;

const MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
const HOST: [u8; 4] = [10, 77, 0, 1];
const US: [u8; 4] = [10, 77, 0, 2];
const ALL: [u8; 6] = [0xff; 6];

pub(super) use paravane_test_support::skip as skipped;

/// The guest, and its driver, at an interface with an address.
pub(super) fn guest(queues: u16) -> Guest {
    let tap = Tap::open("pv0", queues).unwrap();
    ip("addr add 10.77.0.1/24 dev pv0");
    ip("link set pv0 up");
    Guest::new(tap, 1500, RingFeatures::default())
}

/// An ARP packet: 1 asks, 2 answers.
fn arp(kind: u8, to: [u8; 6], target: [u8; 4]) -> Vec<u8> {
    let ethernet = [to.as_slice(), &MAC, &[8, 6]].concat();
    let packet = [[0, 1, 8, 0, 6, 4, 0, kind].as_slice(), &MAC, &US, &to, &target].concat();
    [ethernet, packet].concat()
}

/// The sum of 16-bit words that IP headers carry.
fn checksum(bytes: &[u8]) -> [u8; 2] {
    let mut sum: u32 = bytes.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1])).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    (!(sum as u16)).to_be_bytes()
}

/// A UDP datagram from our port to port 7 of the host.
///
/// Its checksum is left out, as IPv4 allows.
pub(super) fn datagram(to: [u8; 6], port: u16, payload: &[u8]) -> Vec<u8> {
    let len = |more: usize| ((payload.len() + more) as u16).to_be_bytes();
    let mut ip = [[0x45, 0].as_slice(), &len(28), &[0, 0, 0x40, 0, 64, 17, 0, 0], &US, &HOST].concat();
    let sum = checksum(&ip);
    ip[10..12].copy_from_slice(&sum);
    let udp = [port.to_be_bytes().as_slice(), &7_u16.to_be_bytes(), &len(8), &[0, 0]].concat();
    [to.as_slice(), &MAC, &[8, 0], &ip, &udp, payload].concat()
}

/// A host with an IP address: answers ARP requests, and sends its own.
pub(super) struct IpHost<'a> {
    pub(super) guest: &'a Guest,
    pub(super) driver: Driver,
}

impl IpHost<'_> {
    pub(super) fn send(&mut self, frame: &[u8]) {
        while !self.driver.send(0, frame).unwrap() {
            self.guest.sleep(&mut self.driver, "a sent frame");
        }
        self.driver.kick();
    }

    /// The next frame for which `wanted` is true, on any pair.
    pub(super) fn next(&mut self, wanted: impl Fn(&[u8]) -> bool) -> Vec<u8> {
        let mut out = [0; 1518];
        loop {
            let mut busy = false;
            for pair in 0..self.driver.pairs_set_up() {
                while let Some(len) = self.driver.receive(pair, &mut out).unwrap() {
                    busy = true;
                    let frame = &out[..len];
                    if frame[12..14] == [8, 6] && frame[21] == 1 && frame[38..42] == US {
                        let asker = frame[6..12].try_into().unwrap();
                        self.send(&arp(2, asker, HOST));
                    }
                    if wanted(frame) {
                        self.driver.kick();
                        return frame.to_vec();
                    }
                }
            }
            self.driver.kick();
            if !busy {
                self.guest.sleep(&mut self.driver, "a frame from the host");
            }
        }
    }

    /// The host's address, by asking.
    pub(super) fn ask_for_host(&mut self) -> [u8; 6] {
        self.send(&arp(1, ALL, HOST));
        let answer = self.next(|frame| frame[12..14] == [8, 6] && frame[21] == 2 && frame[28..32] == HOST);
        answer[6..12].try_into().unwrap()
    }
}

/// Sends back every datagram that comes to port 7, `count` of them.
fn echo_server(count: usize) -> thread::JoinHandle<()> {
    let socket = UdpSocket::bind("10.77.0.1:7").unwrap();
    socket.set_read_timeout(Some(patience())).unwrap();
    thread::spawn(move || {
        let mut buffer = [0; 2000];
        for _ in 0..count {
            let (len, from) = socket.recv_from(&mut buffer).unwrap();
            socket.send_to(&buffer[..len], from).unwrap();
        }
    })
}

/// What a datagram from port 7 to `port` carries, if the frame is one.
pub(super) fn payload(frame: &[u8], port: u16) -> Option<&[u8]> {
    let ip = frame[12..14] == [8, 0] && frame.len() >= 42 && frame[23] == 17;
    let ours = ip && frame[34..36] == 7_u16.to_be_bytes() && frame[36..38] == port.to_be_bytes();
    let len = usize::from(u16::from_be_bytes(frame.get(38..40)?.try_into().ok()?));
    ours.then(|| frame.get(42..34 + len)).flatten()
}

#[test]
fn datagrams_go_to_the_host_and_come_back() {
    in_own_network("machine::net_tests::tap::datagrams_go_to_the_host_and_come_back", || {
        const COUNT: usize = 300;
        let guest = guest(1);
        let mut us = IpHost { guest: &guest, driver: guest.driver(NetOptions::default()) };
        let server = echo_server(COUNT);
        let host = us.ask_for_host();
        for n in 0..COUNT {
            let sent: Vec<u8> = (0..n * 4 + 1).map(|at| (at * 7 + n) as u8).collect();
            us.send(&datagram(host, 4000, &sent));
            let back = us.next(|frame| payload(frame, 4000).is_some());
            assert_eq!(payload(&back, 4000), Some(&sent[..]), "datagram {n}");
        }
        server.join().unwrap();
        assert_eq!(guest.totals().refused, 0);
    });
}

#[test]
fn flows_come_on_all_pairs() {
    in_own_network("machine::net_tests::tap::flows_come_on_all_pairs", || {
        const COUNT: usize = 200;
        let guest = guest(2);
        let mut us =
            IpHost { guest: &guest, driver: guest.driver(NetOptions { pairs: 2, ..NetOptions::default() }) };
        us.driver.ask_for_pairs(2).unwrap();
        while us.driver.answer().unwrap().is_none() {
            guest.sleep(&mut us.driver, "the answer to a command");
        }
        assert_eq!(us.driver.pairs(), 2);
        let server = echo_server(COUNT);
        let host = us.ask_for_host();
        // Each port is a flow, which the kernel keeps to one queue. The flows come on either.
        let mut on = [0; 2];
        for n in 0..COUNT as u16 {
            let port = 4000 + n;
            // Sent on either pair, too: the kernel answers there.
            let frame = datagram(host, port, &n.to_le_bytes());
            assert!(us.driver.send(n % 2, &frame).unwrap());
            us.driver.kick();
            let mut out = [0; 1518];
            'wait: loop {
                for pair in 0..2 {
                    while let Some(len) = us.driver.receive(pair, &mut out).unwrap() {
                        if out[12..14] == [8, 6] && out[21] == 1 && out[38..42] == US {
                            us.send(&arp(2, host, HOST));
                        } else if payload(&out[..len], port) == Some(&n.to_le_bytes()) {
                            on[usize::from(pair)] += 1;
                            break 'wait;
                        }
                    }
                }
                us.driver.kick();
                guest.sleep(&mut us.driver, "a datagram");
            }
        }
        server.join().unwrap();
        assert!(on[0] > 0 && on[1] > 0 && on[0] + on[1] == COUNT, "{on:?}");
    });
}

#[test]
fn frames_for_a_driver_without_buffers_wait_and_do_not_keep_the_thread_busy() {
    in_own_network("machine::net_tests::tap::frames_for_a_driver_without_buffers", || {
        let guest = guest(1);
        let options = NetOptions { receive_slots: 1, ..NetOptions::default() };
        let mut us = IpHost { guest: &guest, driver: guest.driver(options) };
        let host = us.ask_for_host();
        // The host has more to say than there is room for.
        let socket = UdpSocket::bind("10.77.0.1:7").unwrap();
        ip("neigh replace 10.77.0.2 lladdr 02:00:00:00:00:01 dev pv0");
        for n in 0..20_u8 {
            socket.send_to(&[n], "10.77.0.2:4000").unwrap();
        }
        // On a busy host the thread gets to them late.
        wait_until("an interval in which the thread has nothing to do", || {
            let (received, before) = (guest.totals().received, seconds(&guest));
            thread::sleep(std::time::Duration::from_millis(300));
            seconds(&guest) - before < 0.15 && guest.totals().received == received
        });
        for n in 0..20_u8 {
            let frame = us.next(|frame| payload(frame, 4000).is_some());
            assert_eq!(payload(&frame, 4000), Some(&[n][..]));
        }
        assert_ne!(host, MAC);
    });
}

/// Processor time of the guest's I/O threads, in seconds.
fn seconds(guest: &Guest) -> f64 {
    let mut seconds = 0.0;
    for thread in guest.pool.ids() {
        let stat = std::fs::read_to_string(format!("/proc/self/task/{thread}/stat")).unwrap();
        let (_, rest) = stat.split_once(") ").unwrap();
        let ticks = |field: usize| rest.split(' ').nth(field).and_then(|n| n.parse::<f64>().ok());
        seconds += (ticks(11).unwrap_or(0.0) + ticks(12).unwrap_or(0.0)) / 100.0;
    }
    seconds
}
