//! Migration: positions, and a log of written pages.
use crate::driver::Random;
use crate::raw::{Ask, GPA, MEMORY, MOST, Machine, Raw};
use crate::rig::{DISK, Rig};
use paravane_spec::feature;
use paravane_spec::vhost_user::{
    F_LOG_ALL, F_PROTOCOL_FEATURES, LOG_PAGE, LogArea, VringState, protocol_feature, request,
};
use rustix::fs::{MemfdFlags, memfd_create};
use std::collections::BTreeSet;
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use zerocopy::FromBytes;

/// Log in a file that is not sealed, some pages into it, like that of some clients.
struct Log {
    file: File,
    area: LogArea,
}

impl Log {
    fn new() -> Self {
        let file = File::from(memfd_create("log", MemfdFlags::CLOEXEC).unwrap());
        let size = (GPA + MEMORY) / LOG_PAGE / 8;
        let area = LogArea { size, offset: 8192 };
        file.set_len(area.offset + size).unwrap();
        Self { file, area }
    }

    /// Takes the marks, and clears them.
    fn take(&self) -> BTreeSet<u64> {
        let mut bytes = vec![0; self.area.size as usize];
        self.file.read_exact_at(&mut bytes, self.area.offset).unwrap();
        self.file.write_all_at(&vec![0; bytes.len()], self.area.offset).unwrap();
        let marked = |page: &u64| bytes[(page / 8) as usize] >> (page % 8) & 1 != 0;
        (0..self.area.size * 8).filter(marked).collect()
    }
}

fn page(offset: u64) -> u64 {
    (GPA + offset) / LOG_PAGE
}

fn stop(raw: &Raw) -> u32 {
    let reply = raw.ask(request::GET_VRING_BASE, zerocopy::IntoBytes::as_bytes(&VringState::default()));
    VringState::read_from_bytes(&reply).unwrap().num
}

fn every_written_page_is_marked(features: u64) {
    let rig = Rig::new(1);
    let mut model = vec![0; DISK];
    let mut machine = Machine::new(features, 64, 32);
    let raw = Raw::connect(&rig.socket());
    let base = machine.first_base();
    machine.attach(&raw, base, false);
    let accepted = machine.features | F_PROTOCOL_FEATURES;
    let log = Log::new();
    raw.send(request::SET_LOG_BASE, zerocopy::IntoBytes::as_bytes(&log.area), &[log.file.as_fd()]).unwrap();
    assert_eq!(raw.receive().unwrap().0.request, request::SET_LOG_BASE);
    machine.ask(0, Ask::Read, 0, MOST);
    machine.kick();
    machine.finish(&mut model);
    assert_eq!(log.take(), BTreeSet::new(), "the log was not on yet");

    raw.say(request::SET_FEATURES, &(accepted | F_LOG_ALL), &[]);
    let mut random = Random::new(5);
    let mut requests = 1;
    for round in 0..200 {
        let mut wanted = BTreeSet::new();
        let mut forbidden = BTreeSet::new();
        let slot = random.below(32);
        let at = Machine::slot(slot);
        // A status byte, and data that crosses into the next page.
        wanted.insert(page(at));
        if round % 2 == 0 {
            machine.ask(slot, Ask::Read, random.below(64) * 512, MOST);
            wanted.insert(page(at + 512 + MOST as u64 - 1));
        } else {
            machine.ask(slot, Ask::Write(round as u8), random.below(64) * 512, MOST);
            forbidden.insert(page(at + 512 + MOST as u64 - 1));
        }
        // The used ring, or the descriptor that is marked used.
        let used = if features & feature::RING_PACKED == 0 {
            machine.addresses.device
        } else {
            machine.addresses.desc
        };
        wanted.insert(used / LOG_PAGE);
        machine.kick();
        machine.finish(&mut model);
        requests += 1;
        // The mark is made when the batch ends, perhaps after the interrupt: the queue is drained
        // first.
        let position = stop(&raw);
        let marked = log.take();
        assert!(marked.is_superset(&wanted), "round {round}: {wanted:x?} are not all in {marked:x?}");
        assert!(marked.is_disjoint(&forbidden), "round {round}: nobody wrote to {forbidden:x?}");
        if features & feature::RING_PACKED == 0 {
            assert_eq!(position, requests);
        }
        machine.start(&raw, position);
    }

    raw.say(request::SET_FEATURES, &accepted, &[]);
    log.take();
    machine.ask(0, Ask::Read, 0, MOST);
    machine.kick();
    machine.finish(&mut model);
    assert_eq!(log.take(), BTreeSet::new(), "the log is off");
}

#[test]
fn every_page_that_a_split_queue_writes_is_marked() {
    every_written_page_is_marked(0);
}

#[test]
fn every_page_that_a_packed_queue_writes_is_marked() {
    every_written_page_is_marked(feature::RING_PACKED | feature::EVENT_IDX);
}

/// Moves a guest from server to server, stopped under load each time.
///
/// Nothing is lost, and nothing stays in flight.
pub(crate) fn moves(features: u64) {
    moves_with(features, 0);
}

/// As [`moves`], with the protocol features `protocol`.
///
/// With GET_VRING_BASE_INFLIGHT, requests stay in flight while the guest moves, and the next server
/// does them.
fn moves_with(features: u64, protocol: u64) {
    let tracked = protocol & protocol_feature::GET_VRING_BASE_INFLIGHT != 0;
    let mut rig = Rig::new(1);
    let mut model = vec![0; DISK];
    let mut machine = Machine::new(features, 64, 16);
    machine.protocol = protocol;
    let mut base = machine.first_base();
    let mut random = Random::new(9);
    for _ in 0..10 {
        let raw = Raw::connect(&rig.socket());
        machine.attach(&raw, base, tracked);
        for _ in 0..20 {
            machine.fill(DISK, &mut random);
            machine.wait(paravane_test_support::patience());
            machine.reap(&mut model);
        }
        machine.fill(DISK, &mut random);
        base = stop(&raw);
        machine.reap(&mut model);
        drop(raw);
        rig.stop();
        rig.start(1);
    }
    let raw = Raw::connect(&rig.socket());
    machine.attach(&raw, base, tracked);
    machine.finish(&mut model);
    assert!(std::fs::read(rig.image()).unwrap() == model);
}

#[test]
fn a_split_queue_moves_from_server_to_server() {
    moves(feature::EVENT_IDX);
}

#[test]
fn a_split_queue_moves_with_requests_in_flight() {
    moves_with(feature::EVENT_IDX, protocol_feature::GET_VRING_BASE_INFLIGHT);
}

#[test]
fn a_packed_queue_moves_with_requests_in_flight() {
    let protocol = protocol_feature::GET_VRING_BASE_INFLIGHT | protocol_feature::GPA_ADDRESSES;
    moves_with(feature::RING_PACKED | feature::EVENT_IDX, protocol);
}

/// Requests of a queue that stops and starts in one session.
#[test]
fn a_disabled_queue_leaves_its_requests_until_it_is_enabled() {
    let rig = Rig::new(1);
    let mut model = vec![0; DISK];
    let mut machine = Machine::new(0, 64, 16);
    machine.protocol = protocol_feature::GET_VRING_BASE_INFLIGHT;
    let raw = Raw::connect(&rig.socket());
    machine.attach(&raw, 0, true);
    let mut random = Random::new(31);
    for _ in 0..50 {
        machine.fill(DISK, &mut random);
        raw.say(request::SET_VRING_ENABLE, &VringState { index: 0, num: 0 }, &[]);
        raw.say(request::SET_VRING_ENABLE, &VringState { index: 0, num: 1 }, &[]);
        machine.reap(&mut model);
    }
    machine.finish(&mut model);
}

#[test]
fn requests_are_left_only_where_they_are_recorded() {
    let rig = Rig::new(1);
    let raw = Raw::connect(&rig.socket());
    let protocol = protocol_feature::GET_VRING_BASE_INFLIGHT;
    raw.send(request::SET_PROTOCOL_FEATURES, zerocopy::IntoBytes::as_bytes(&protocol), &[]).unwrap();
    assert!(raw.is_closed());
    assert!(rig.wait_for(|status| status.protocol_errors == 1).last_error.unwrap().contains("not offered"));
    // Without a region, a stop completes what is in flight.
    let mut model = vec![0; DISK];
    let mut machine = Machine::new(0, 64, 16);
    machine.protocol = protocol;
    let raw = Raw::connect(&rig.socket());
    machine.attach(&raw, 0, false);
    machine.fill(DISK, &mut Random::new(32));
    let in_flight = machine.in_flight();
    rig.wait_for(|status| status.queues[0].taken == in_flight as u64);
    stop(&raw);
    assert_eq!(machine.reap(&mut model), in_flight);
}

#[test]
fn a_packed_queue_moves_from_server_to_server() {
    moves(feature::RING_PACKED | feature::EVENT_IDX);
}
