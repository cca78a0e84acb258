//! A client with an IOMMU: it adds and removes translations page by page.
use crate::driver::Random;
use crate::raw::{Ask, DATA, IOVA, MEMORY, MOST, Machine, Raw, STATUS};
use crate::rig::{self, DISK, Rig};
use paravane_ring::Segment;
use paravane_spec::feature::{ACCESS_PLATFORM, EVENT_IDX, IN_ORDER, INDIRECT_DESC, RING_PACKED};
use paravane_spec::vhost_user::{
    F_PROTOCOL_FEATURES, Header, Iotlb, SingleRegion, VringState, back_end_request, flags, iotlb,
    protocol_feature, request,
};
use paravane_test_support::{patience, wait_for};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::BTreeSet;
use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};
use zerocopy::{FromBytes, IntoBytes};

const PAGE: u64 = 0x1000;
/// All ring layouts that the server offers.
fn layouts() -> impl Iterator<Item = u64> {
    let all = [
        0,
        INDIRECT_DESC | EVENT_IDX,
        RING_PACKED,
        RING_PACKED | INDIRECT_DESC | EVENT_IDX,
        RING_PACKED | IN_ORDER | INDIRECT_DESC,
    ];
    all.into_iter().filter(|layout| rig::IN_ORDER || layout & IN_ORDER == 0)
}

/// The IOMMU's side of a session.
pub(crate) struct Iommu<'a> {
    raw: &'a Raw,
    back: UnixStream,
}

impl<'a> Iommu<'a> {
    /// Call it before queues start.
    pub(crate) fn new(raw: &'a Raw) -> Self {
        let (back, theirs) = UnixStream::pair().unwrap();
        back.set_nonblocking(true).unwrap();
        raw.say(request::SET_BACKEND_REQ_FD, &[0_u8; 0][..], &[theirs.as_fd()]);
        Self { raw, back }
    }

    /// The next message of the device side, if any.
    pub(crate) fn said(&self) -> Option<Iotlb> {
        let mut bytes = [0; size_of::<Header>() + size_of::<Iotlb>()];
        (&mut &self.back).read_exact(&mut bytes).ok()?;
        let (header, said) = bytes.split_at(size_of::<Header>());
        let header = Header::read_from_bytes(header).unwrap();
        assert_eq!((header.request, header.flags), (back_end_request::IOTLB_MSG, flags::VERSION));
        Some(Iotlb::read_from_bytes(said).unwrap())
    }

    /// Waits for the next message of the device side.
    fn heard(&self) -> Iotlb {
        wait_for("a miss", String::new, || self.said())
    }

    /// The pages that are missed, until nothing new arrives for a while.
    fn missed(&self) -> BTreeSet<u64> {
        let mut pages = BTreeSet::new();
        loop {
            let patience =
                Timespec { tv_sec: 0, tv_nsec: if pages.is_empty() { 999_999_999 } else { 50_000_000 } };
            if poll(&mut [PollFd::new(&self.back, PollFlags::IN)], Some(&patience)).unwrap() == 0 {
                return pages;
            }
            let miss = self.heard();
            assert_eq!((miss.kind, miss.iova % PAGE), (iotlb::MISS, 0));
            pages.insert(miss.iova);
        }
    }

    /// Sends a translation; returns the answer: 0 if the device side accepts it.
    fn tell(&self, said: Iotlb) -> u64 {
        u64::read_from_bytes(&self.raw.ask(request::IOTLB_MSG, said.as_bytes())).unwrap()
    }

    fn update(&self, machine: &Machine, iova: u64) {
        assert_eq!(self.tell(machine.translation(iova).expect("no such page")), 0);
    }

    pub(crate) fn invalidate(&self, iova: u64, size: u64) {
        assert_eq!(self.tell(Iotlb { iova, size, kind: iotlb::INVALIDATE, ..Iotlb::default() }), 0);
    }

    /// Answers the misses.
    pub(crate) fn answer(&self, machines: &[&Machine]) -> usize {
        let mut count = 0;
        while let Some(miss) = self.said() {
            assert_eq!(miss.kind, iotlb::MISS);
            let translation = machines.iter().find_map(|machine| machine.translation(miss.iova));
            assert_eq!(self.tell(translation.expect("no such page")), 0);
            count += 1;
        }
        count
    }

    /// Continues until nothing is in flight.
    pub(crate) fn finish(&self, machine: &mut Machine, model: &mut [u8]) {
        let start = Instant::now();
        while machine.in_flight() > 0 {
            assert!(start.elapsed() < patience(), "{} are in flight", machine.in_flight());
            self.answer(&[machine]);
            machine.wait(Duration::from_millis(1));
            machine.reap(model);
        }
    }
}

fn connected(rig: &Rig, features: u64) -> (Raw, Machine) {
    (Raw::connect(&rig.socket()), Machine::new(features | ACCESS_PLATFORM, 64, 16))
}

/// Starts a client with an IOMMU and a queue whose ring is being looked up.
fn begin<'a>(raw: &'a Raw, machine: &mut Machine, tracked: bool) -> Iommu<'a> {
    let base = machine.first_base();
    machine.attach(raw, base, tracked);
    Iommu::new(raw)
}

#[test]
fn it_is_offered_to_clients_that_can_hear_what_is_missed() {
    let rig = Rig::new(1);
    let raw = Raw::connect(&rig.socket());
    let offers = || raw.ask_number(request::GET_FEATURES) & ACCESS_PLATFORM != 0;
    assert!(!offers(), "nothing is known of the client");
    let both = protocol_feature::BACKEND_REQ | protocol_feature::REPLY_ACK;
    raw.send(request::SET_PROTOCOL_FEATURES, protocol_feature::BACKEND_REQ.as_bytes(), &[]).unwrap();
    assert!(!offers());
    raw.say(request::SET_PROTOCOL_FEATURES, &both, &[]);
    assert!(offers());
    raw.say(request::SET_FEATURES, &(ACCESS_PLATFORM | F_PROTOCOL_FEATURES), &[]);
    // The feature cannot be accepted without them.
    raw.send(request::SET_PROTOCOL_FEATURES, protocol_feature::REPLY_ACK.as_bytes(), &[]).unwrap();
    assert!(raw.is_closed());
    assert!(rig.wait_for(|status| status.protocol_errors == 1).last_error.unwrap().contains("not offered"));
}

#[test]
fn requests_are_served_as_translations_come() {
    let rig = Rig::new(1);
    let mut model = std::fs::read(rig.image()).unwrap();
    for (number, layout) in layouts().enumerate() {
        for tracked in [false, layout & IN_ORDER == 0] {
            let (raw, mut machine) = connected(&rig, layout);
            let iommu = begin(&raw, &mut machine, tracked);
            let mut random = Random::new(number as u64 + 77);
            for _ in 0..40 {
                machine.fill(DISK, &mut random);
                iommu.finish(&mut machine, &mut model);
                // Like a strict guest after each request, and sometimes everything.
                match random.below(8) {
                    0 => iommu.invalidate(0, 0),
                    1 => iommu.invalidate(IOVA, MEMORY),
                    _ => (0..16).for_each(|slot| iommu.invalidate(IOVA + Machine::slot(slot), 2 * PAGE)),
                }
            }
            let status = rig.status();
            assert!(status.connected && status.queues[0].error.is_none(), "{status:?}");
            assert_eq!(status.refused_translations, 0);
            drop(raw);
            rig.wait_for(|status| !status.connected);
        }
    }
    rig.wait_for(|status| !status.connected);
    assert!(std::fs::read(rig.image()).unwrap() == model);
}

#[test]
fn translations_go_while_requests_are_under_way() {
    let rig = Rig::new(1);
    let mut model = std::fs::read(rig.image()).unwrap();
    for (number, layout) in layouts().enumerate() {
        let (raw, mut machine) = connected(&rig, layout);
        let iommu = begin(&raw, &mut machine, false);
        let mut random = Random::new(number as u64 + 5);
        for _ in 0..60 {
            machine.fill(DISK, &mut random);
            for _ in 0..random.below(4) {
                iommu.answer(&[&machine]);
                std::thread::sleep(Duration::from_micros(random.below(300) as u64));
            }
            match random.below(3) {
                // The rings too: the queue stops until they are back.
                0 => iommu.invalidate(0, 0),
                1 => iommu.invalidate(IOVA + Machine::slot(random.below(16)), 4 * PAGE),
                _ => {}
            }
            // Nothing is accessed without a translation: no page of any request, if nothing is
            // answered.
            if random.below(4) == 0 {
                while iommu.said().is_some() {}
                iommu.invalidate(0, 0);
                let before = machine.bytes(0, MEMORY as usize);
                std::thread::sleep(Duration::from_millis(1));
                assert!(
                    machine.bytes(0, MEMORY as usize) == before,
                    "memory was written to after it had gone"
                );
                // Earlier misses were not answered, and are reported again in a while.
                std::thread::sleep(Duration::from_millis(100));
                iommu.invalidate(0, 0);
                rustix::io::write(&machine.kick, &1_u64.to_ne_bytes()).unwrap();
            }
            machine.reap(&mut model);
        }
        iommu.finish(&mut machine, &mut model);
        let status = rig.status();
        assert!(status.connected && status.queues[0].error.is_none(), "{status:?}");
        drop(raw);
        rig.wait_for(|status| !status.connected);
    }
}

#[test]
fn a_chain_is_taken_when_all_of_it_is_translated() {
    for layout in layouts() {
        let rig = Rig::new(1);
        let mut model = vec![0; DISK];
        let (raw, mut machine) = connected(&rig, layout);
        let iommu = begin(&raw, &mut machine, false);
        // The ring's areas share a page or two.
        let ring = iommu.missed();
        assert!((1..=3).contains(&ring.len()), "{ring:x?}");
        assert!(!rig.status().queues[0].live);
        ring.iter().for_each(|page| iommu.update(&machine, *page));
        assert!(rig.status().queues[0].live);
        // Its data is in two pages.
        machine.ask(0, Ask::Write(3), 0, MOST);
        machine.kick();
        let at = IOVA + Machine::slot(0);
        let (first, second) = (at & !0xfff, (at + DATA + MOST as u64 - 1) & !0xfff);
        let mut wanted = BTreeSet::from([first]);
        // The first page of a segment is reported.
        assert_eq!(iommu.missed().intersection(&wanted).count(), 1);
        assert_eq!((rig.status().queues[0].taken, machine.reap(&mut model)), (0, 0));
        iommu.update(&machine, first);
        wanted = iommu.missed();
        assert!(wanted.contains(&second), "{wanted:x?}");
        assert_eq!(rig.status().queues[0].taken, 0);
        wanted.iter().for_each(|page| iommu.update(&machine, *page));
        iommu.finish(&mut machine, &mut model);
        // Counted after the driver sees it.
        rig.wait_for(|status| status.queues[0].taken == 1);
    }
}

#[test]
fn a_queue_that_is_never_answered_stops_alone_and_where_it_stands() {
    for features in [0, RING_PACKED] {
        let rig = Rig::new(2);
        let mut model = vec![0; DISK];
        let raw = Raw::connect(&rig.socket());
        let features = features | ACCESS_PLATFORM;
        let mut stuck = Machine::with_index(1, features, 64, 4);
        let mut machine = Machine::new(features, 64, 16);
        let iommu = begin(&raw, &mut machine, false);
        let region = SingleRegion { padding: 0, region: stuck.region() };
        raw.say(request::ADD_MEM_REG, &region, &[stuck.memory.fd().unwrap()]);
        stuck.start(&raw, stuck.first_base());
        // Its ring is translated, and nothing else.
        let mut random = Random::new(9);
        while !rig.status().queues[1].live {
            iommu.answer(&[&machine, &stuck]);
        }
        stuck.ask(0, Ask::Write(1), 0, 512);
        stuck.kick();
        let missed = iommu.heard();
        assert!(stuck.translation(missed.iova).is_some());
        for _ in 0..20 {
            machine.fill(DISK, &mut random);
            while machine.in_flight() > 0 {
                while let Some(miss) = iommu.said() {
                    if machine.translation(miss.iova).is_some() {
                        iommu.update(&machine, miss.iova);
                    }
                }
                machine.wait(Duration::from_millis(1));
                machine.reap(&mut model);
            }
            (0..16).for_each(|slot| iommu.invalidate(IOVA + Machine::slot(slot), 2 * PAGE));
        }
        let status = rig.status();
        assert_eq!((status.queues[1].taken, &status.queues[1].error), (0, &None));
        // It stops at once, and continues from the same position.
        let state = VringState { index: 1, num: 0 };
        let reply = raw.ask(request::GET_VRING_BASE, state.as_bytes());
        let base = VringState::read_from_bytes(&reply).unwrap().num;
        assert_eq!(base, stuck.first_base());
        stuck.start(&raw, base);
        iommu.finish(&mut stuck, &mut model);
        assert_eq!(stuck.done, 1);
        // A client that disconnects with a miss pending is gone.
        machine.fill(DISK, &mut random);
        iommu.heard();
        drop(raw);
        rig.wait_for(|status| !status.connected && status.memory == 0);
        let mut next = Machine::new(0, 64, 4);
        let raw = Raw::connect(&rig.socket());
        next.attach(&raw, 0, false);
        next.ask(0, Ask::Read, 1 << 20, 512);
        next.kick();
        assert!(next.wait(patience()));
    }
}

#[test]
fn what_is_forbidden_is_said_to_be_and_stops_its_queue() {
    for layout in layouts() {
        let rig = Rig::new(1);
        let mut model = vec![0; DISK];
        let (raw, mut machine) = connected(&rig, layout);
        let iommu = begin(&raw, &mut machine, false);
        while !rig.status().queues[0].live {
            iommu.answer(&[&machine]);
        }
        machine.ask(0, Ask::Read, 0, 512);
        let at = IOVA + Machine::slot(0);
        let read_only = Iotlb { perm: iotlb::READ, ..machine.translation(at).unwrap() };
        assert_eq!(iommu.tell(read_only), 0);
        machine.kick();
        let denied = loop {
            let said = iommu.heard();
            if said.kind != iotlb::MISS {
                break said;
            }
            iommu.update(&machine, said.iova);
        };
        assert_eq!((denied.kind, denied.perm), (iotlb::ACCESS_FAIL, iotlb::WRITE));
        assert!((at..at + 0x1000).contains(&denied.iova));
        let status = rig.wait_for(|status| status.queues[0].error.is_some());
        assert!(status.connected);
        assert_eq!(machine.bytes(Machine::slot(0) + DATA, 512), [0xa5; 512]);
        assert_eq!(machine.bytes(Machine::slot(0) + STATUS, 1), [0xff]);
        // The driver starts over, with all permissions.
        raw.ask(request::GET_VRING_BASE, VringState { index: 0, num: 0 }.as_bytes());
        let mut again = Machine::new(layout | ACCESS_PLATFORM, 64, 4);
        let old = SingleRegion { padding: 0, region: machine.region() };
        raw.say(request::REM_MEM_REG, &old, &[]);
        raw.say(request::ADD_MEM_REG, &old, &[again.memory.fd().unwrap()]);
        again.start(&raw, again.first_base());
        again.ask(0, Ask::Write(9), 0, 512);
        again.kick();
        iommu.finish(&mut again, &mut model);
    }
}

#[test]
fn a_ring_that_may_not_be_written_is_refused_and_the_session_goes_on() {
    let rig = Rig::new(1);
    let (raw, mut machine) = connected(&rig, 0);
    let iommu = begin(&raw, &mut machine, false);
    for page in iommu.missed() {
        let said = Iotlb { perm: iotlb::READ, ..machine.translation(page).unwrap() };
        assert_eq!(iommu.tell(said), 0);
    }
    let status = rig.wait_for(|status| status.queues[0].error.is_some());
    assert!(
        status.connected && status.queues[0].error.as_ref().unwrap().contains("device area"),
        "{status:?}"
    );
    assert_eq!(raw.ask_number(request::GET_QUEUE_NUM), 1);
}

#[test]
fn translations_that_mean_nothing_are_refused_and_counted() {
    let rig = Rig::new(1);
    let mut model = vec![0; DISK];
    let (raw, mut machine) = connected(&rig, 0);
    let iommu = begin(&raw, &mut machine, false);
    let good = machine.translation(IOVA).unwrap();
    let garbage = [
        Iotlb { perm: 0, ..good },
        Iotlb { perm: 0xff, ..good },
        Iotlb { size: 0, ..good },
        Iotlb { size: 100, ..good },
        Iotlb { size: u64::MAX, ..good },
        Iotlb { size: MEMORY + PAGE, ..good },
        Iotlb { iova: 1, ..good },
        Iotlb { iova: u64::MAX - 0xfff, size: 2 * PAGE, ..good },
        Iotlb { user: 0, ..good },
        Iotlb { user: good.user + 1, ..good },
        Iotlb { user: u64::MAX, ..good },
    ];
    for said in garbage {
        assert_eq!(iommu.tell(said), 1, "{said:?}");
    }
    assert_eq!(rig.status().refused_translations, garbage.len() as u64);
    machine.ask(0, Ask::Write(1), 512, 512);
    machine.kick();
    iommu.finish(&mut machine, &mut model);
    // An unknown message ends the session.
    drop(raw);
    for (sessions, kind) in (1..).zip([0, iotlb::MISS, iotlb::ACCESS_FAIL, 5, 0xff]) {
        let (raw, mut machine) = connected(&rig, 0);
        let _iommu = begin(&raw, &mut machine, false);
        raw.send(request::IOTLB_MSG, Iotlb { kind, ..good }.as_bytes(), &[]).unwrap();
        assert!(raw.is_closed());
        let status = rig.wait_for(|status| status.protocol_errors == sessions);
        assert!(status.last_error.unwrap().contains("unsupported type"));
    }
}

#[test]
fn memory_that_is_taken_away_takes_its_translations_along() {
    let rig = Rig::new(1);
    let mut model = vec![0; DISK];
    let (raw, mut machine) = connected(&rig, 0);
    let iommu = begin(&raw, &mut machine, false);
    machine.ask(0, Ask::Write(1), 512, 512);
    machine.kick();
    iommu.finish(&mut machine, &mut model);
    let region = SingleRegion { padding: 0, region: machine.region() };
    raw.say(request::REM_MEM_REG, &region, &[]);
    assert!(!rig.status().queues[0].live);
    // The region returns, and its translations are requested again.
    raw.say(request::ADD_MEM_REG, &region, &[machine.memory.fd().unwrap()]);
    machine.ask(0, Ask::Read, 512, 512);
    machine.kick();
    iommu.finish(&mut machine, &mut model);
    assert!(rig.status().queues[0].live);
}

#[test]
fn an_entropy_device_waits_for_translations() {
    let rig = Rig::entropy();
    for layout in [0, INDIRECT_DESC | EVENT_IDX, RING_PACKED | INDIRECT_DESC | EVENT_IDX] {
        let raw = Raw::connect(&rig.socket());
        let mut machine = Machine::new(layout | ACCESS_PLATFORM, 64, 1);
        let iommu = begin(&raw, &mut machine, false);
        for slot in 0..8 {
            // Across the boundary of two pages.
            let at = Machine::slot(slot) + PAGE - 300;
            machine.queue.add(&[], &[Segment { addr: IOVA + at, len: 700 }]).unwrap();
            machine.kick();
            let start = Instant::now();
            let used = loop {
                assert!(start.elapsed() < patience(), "nothing comes");
                iommu.answer(&[&machine]);
                if let Some(used) = machine.queue.pop_used().unwrap() {
                    break used;
                }
            };
            assert_eq!(used.len, 700);
            for half in [at, at + 350] {
                assert!(machine.bytes(half, 350).iter().any(|&byte| byte != 0));
            }
            iommu.invalidate(IOVA + Machine::slot(slot), 2 * PAGE);
        }
        let status = rig.status();
        assert_eq!((status.protocol_errors, &status.queues[0].error), (0, &None));
    }
}
