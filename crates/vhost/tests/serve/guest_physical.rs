//! Clients whose user addresses are guest-physical (GPA_ADDRESSES).
use crate::driver::Random;
use crate::raw::{Ask, GPA, IOVA, MEMORY, Machine, OPTIONAL, Raw, USER};
use crate::rig::{DISK, Rig};
use paravane_spec::feature::{ACCESS_PLATFORM, EVENT_IDX, RING_PACKED};
use paravane_spec::vhost_user::protocol_feature::GPA_ADDRESSES;
use paravane_spec::vhost_user::{Iotlb, MemoryRegion, MemoryTable, SingleRegion, VringState, iotlb, request};
use std::os::fd::AsFd;
use zerocopy::{FromBytes, IntoBytes};

fn machine(features: u64) -> Machine {
    let mut machine = Machine::new(features, 64, 16);
    machine.protocol = GPA_ADDRESSES;
    machine
}

fn ends_with(rig: &Rig, raw: &Raw, error: &str) {
    assert!(raw.is_closed(), "{error}");
    rig.wait_for(|status| status.last_error.as_ref().is_some_and(|last| last.contains(error)));
}

#[test]
fn rings_are_found_by_their_guest_physical_addresses() {
    let rig = Rig::new(1);
    let mut model = vec![0; DISK];
    let mut random = Random::new(21);
    for features in [0, EVENT_IDX, RING_PACKED | EVENT_IDX] {
        let mut machine = machine(features);
        let raw = Raw::connect(&rig.socket());
        let base = machine.first_base();
        machine.attach(&raw, base, false);
        for _ in 0..20 {
            machine.fill(DISK, &mut random);
            machine.finish(&mut model);
        }
        // The region leaves and returns; the queue continues.
        let region = SingleRegion { padding: 0, region: machine.region() };
        raw.say(request::REM_MEM_REG, &region, &[]);
        raw.say(request::ADD_MEM_REG, &region, &[machine.memory.fd().unwrap()]);
        machine.fill(DISK, &mut random);
        machine.finish(&mut model);
        let status = rig.status();
        assert_eq!((status.protocol_errors, status.protocol_features & GPA_ADDRESSES), (0, GPA_ADDRESSES));
    }
}

#[test]
fn translations_name_guest_physical_addresses() {
    let rig = Rig::new(1);
    let mut model = vec![0; DISK];
    let mut machine = machine(ACCESS_PLATFORM);
    let raw = Raw::connect(&rig.socket());
    machine.attach(&raw, 0, false);
    let all = Iotlb {
        iova: IOVA,
        size: MEMORY,
        user: GPA,
        perm: iotlb::READ | iotlb::WRITE,
        kind: iotlb::UPDATE,
        ..Iotlb::default()
    };
    raw.say(request::IOTLB_MSG, &all, &[]);
    machine.ask(0, Ask::Write(7), 0, 4096);
    machine.kick();
    machine.finish(&mut model);
    // A user address of the VMM means nothing.
    let refused = Iotlb { user: USER, ..all };
    let reply = raw.ask(request::IOTLB_MSG, refused.as_bytes());
    assert_eq!(u64::read_from_bytes(&reply).unwrap(), 1);
    assert_eq!(rig.status().refused_translations, 1);
}

#[test]
fn a_region_with_another_user_address_ends_the_session() {
    let rig = Rig::new(1);
    let machine = machine(0);
    let region = MemoryRegion { user: USER, ..machine.region() };
    for request in [request::SET_MEM_TABLE, request::ADD_MEM_REG] {
        let raw = Raw::connect(&rig.socket());
        raw.begin_with(machine.features, GPA_ADDRESSES);
        let payload = match request {
            request::ADD_MEM_REG => SingleRegion { padding: 0, region }.as_bytes().to_vec(),
            _ => [MemoryTable { regions: 1, padding: 0 }.as_bytes(), region.as_bytes()].concat(),
        };
        raw.send(request, &payload, &[machine.memory.fd().unwrap()]).unwrap();
        ends_with(&rig, &raw, "need the same with GPA_ADDRESSES");
    }
}

#[test]
fn a_ring_at_a_user_address_ends_the_session() {
    let rig = Rig::new(1);
    let mut machine = machine(0);
    let raw = Raw::connect(&rig.socket());
    raw.begin_with(machine.features, GPA_ADDRESSES);
    machine.share(&raw);
    machine.protocol = 0;
    raw.say(request::SET_VRING_NUM, &VringState { index: 0, num: 64 }, &[]);
    raw.say(request::SET_VRING_ADDR, &machine.vring_addr(), &[]);
    raw.say(request::SET_VRING_ENABLE, &VringState { index: 0, num: 1 }, &[]);
    raw.send(request::SET_VRING_KICK, 0_u64.as_bytes(), &[machine.kick.as_fd()]).unwrap();
    ends_with(&rig, &raw, "is not in the client's memory");
}

#[test]
fn the_kind_of_address_stays_while_memory_is_shared() {
    let rig = Rig::new(1);
    for (first, then) in [(0, GPA_ADDRESSES), (GPA_ADDRESSES, 0)] {
        let mut machine = machine(0);
        machine.protocol = first;
        let raw = Raw::connect(&rig.socket());
        machine.attach(&raw, 0, false);
        let offered = raw.ask_number(request::GET_PROTOCOL_FEATURES);
        raw.say(request::SET_PROTOCOL_FEATURES, &(offered & !OPTIONAL | first), &[]);
        let changed = offered & !OPTIONAL | then;
        raw.send(request::SET_PROTOCOL_FEATURES, changed.as_bytes(), &[]).unwrap();
        ends_with(&rig, &raw, "cannot change GPA_ADDRESSES");
    }
}
