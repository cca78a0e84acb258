//! Kicks and interrupts without eventfds, or without any descriptor; and resets.
use crate::driver::Random;
use crate::raw::{Machine, Raw};
use crate::rig::{DISK, Rig};
use paravane_spec::status::DRIVER_OK;
use paravane_spec::vhost_user::{VRING_NO_FD, VringState, request};
use paravane_test_support::patience;
use rustix::event::{EventfdFlags, eventfd};
use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::time::Instant;
use zerocopy::{FromBytes, IntoBytes};

/// Continues until all is done, without waiting for interrupts.
fn finish(machine: &mut Machine, model: &mut [u8]) {
    let start = Instant::now();
    while machine.in_flight() > 0 {
        assert!(start.elapsed() < patience(), "{} in flight", machine.in_flight());
        machine.reap(model);
        std::thread::yield_now();
    }
}

#[test]
fn a_queue_without_kicks_is_looked_at() {
    let rig = Rig::new(1);
    let (mut model, mut random) = (vec![0; DISK], Random::new(31));
    let mut machine = Machine::new(0, 64, 8);
    let raw = Raw::connect(&rig.socket());
    machine.attach(&raw, 0, false);
    raw.say(request::SET_VRING_KICK, &VRING_NO_FD, &[]);
    raw.say(request::SET_VRING_CALL, &VRING_NO_FD, &[]);
    // Nothing reads the old end any more.
    machine.kick = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    for _ in 0..50 {
        machine.fill(DISK, &mut random);
        finish(&mut machine, &mut model);
    }
}

#[test]
fn pipes_serve_as_eventfds_and_a_full_one_blocks_no_thread() {
    let rig = Rig::new(1);
    let (mut model, mut random) = (vec![0; DISK], Random::new(32));
    let mut machine = Machine::new(0, 64, 8);
    let raw = Raw::connect(&rig.socket());
    machine.attach(&raw, 0, false);
    let (kicked, kick) = std::io::pipe().unwrap();
    let (mut called, call) = std::io::pipe().unwrap();
    raw.say(request::SET_VRING_KICK, &0_u64, &[kicked.as_fd()]);
    raw.say(request::SET_VRING_CALL, &0_u64, &[call.as_fd()]);
    drop((kicked, call));
    machine.kick = kick.into();
    let mut eight = [0; 8];
    for _ in 0..50 {
        machine.fill(DISK, &mut random);
        // Waits for an interrupt.
        called.read_exact(&mut eight).unwrap();
        finish(&mut machine, &mut model);
    }
    // More interrupts than fit; nothing reads them.
    let (called, mut call) = std::io::pipe().unwrap();
    rustix::fs::fcntl_setfl(&call, rustix::fs::OFlags::NONBLOCK).unwrap();
    let error = loop {
        if let Err(error) = call.write_all(&[0; 4096]) {
            break error;
        }
    };
    assert_eq!(error.kind(), ErrorKind::WouldBlock);
    // From here on a write would block.
    rustix::fs::fcntl_setfl(&call, rustix::fs::OFlags::empty()).unwrap();
    raw.say(request::SET_VRING_CALL, &0_u64, &[call.as_fd()]);
    for _ in 0..20 {
        machine.fill(DISK, &mut random);
        finish(&mut machine, &mut model);
    }
    drop(called);
}

/// SIGPIPE: Rust programs ignore it, and so do tests.
///
/// Others end by it, unless the writing thread blocks it.
#[test]
fn a_pipe_without_a_reader_ends_no_process() {
    let rig = Rig::new(1);
    let (mut model, mut random) = (vec![0; DISK], Random::new(33));
    let mut machine = Machine::new(0, 64, 8);
    let raw = Raw::connect(&rig.socket());
    machine.attach(&raw, 0, false);
    let (called, call) = std::io::pipe().unwrap();
    raw.say(request::SET_VRING_CALL, &0_u64, &[call.as_fd()]);
    drop((called, call));
    for _ in 0..5 {
        machine.fill(DISK, &mut random);
        finish(&mut machine, &mut model);
    }
    // SIGPIPE is number 13.
    let (mut threads, pipe) = (0, 1_u64 << 12);
    for task in std::fs::read_dir(format!("/proc/{}/task", rig.process())).unwrap() {
        // A thread of another test may have ended.
        let Ok(status) = std::fs::read_to_string(task.unwrap().path().join("status")) else { continue };
        let field = |name| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
        let name = field("Name:").unwrap_or_default();
        if name.starts_with("protocol") || name.starts_with("io0") {
            let blocked = u64::from_str_radix(field("SigBlk:").unwrap(), 16).unwrap();
            assert_ne!(blocked & pipe, 0, "{name} has to block it");
            threads += 1;
        }
    }
    assert!(threads >= 2, "an export has two threads at least, found were {threads}");
}

#[test]
fn an_eventfd_that_is_full_does_not_keep_an_export_from_stopping() {
    let mut rig = Rig::new(1);
    let mut machine = Machine::new(0, 64, 8);
    let raw = Raw::connect(&rig.socket());
    machine.attach(&raw, 0, false);
    // Its counter has room for one less than what would block us.
    let full = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    rustix::io::write(&full, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    raw.send(request::SET_VRING_CALL, 0_u64.as_bytes(), &[full.as_fd()]).unwrap();
    let start = Instant::now();
    rig.stop();
    assert!(start.elapsed() < patience());
}

#[test]
fn a_device_that_is_reset_begins_anew() {
    let rig = Rig::new(1);
    let (mut model, mut random) = (vec![0; DISK], Random::new(33));
    let raw = Raw::connect(&rig.socket());
    for round in 0..4 {
        let mut machine = Machine::new(0, 64, 8);
        machine.attach(&raw, 0, false);
        raw.say(request::SET_STATUS, &u64::from(DRIVER_OK), &[]);
        assert_eq!(raw.ask_number(request::GET_STATUS), u64::from(DRIVER_OK));
        machine.fill(DISK, &mut random);
        machine.finish(&mut model);
        match round % 3 {
            0 => raw.say(request::SET_STATUS, &0_u64, &[]),
            1 => raw.say(request::RESET_DEVICE, &[0_u8; 0], &[]),
            // A queue that is reset alone (RING_RESET) is stopped, and starts with another ring.
            _ => {
                let reply = raw.ask(request::GET_VRING_BASE, VringState::default().as_bytes());
                let base = VringState::read_from_bytes(&reply).unwrap().num;
                assert_ne!(base, 0, "a machine that moves is asked for it");
            }
        }
        let status = rig.status();
        assert!(!status.queues[0].live && status.connected);
        if round % 3 < 2 {
            assert_eq!(raw.ask_number(request::GET_STATUS), 0);
        }
        if round % 3 == 1 {
            assert_eq!(status.queues[0].size, 0);
        }
    }
}

/// What the guest writes goes elsewhere (`share=off` on a memfd): kicks come, and the ring stays empty.
#[test]
fn kicks_of_a_ring_that_stays_empty_are_reported_and_others_are_not() {
    for kicks in [2, 1] {
        let rig = Rig::new(1);
        let (mut model, mut random) = (vec![0; DISK], Random::new(35));
        let mut machine = Machine::new(0, 64, 8);
        let raw = Raw::connect(&rig.socket());
        machine.attach(&raw, 0, false);
        for kick in 1..=kicks {
            rustix::io::write(&machine.kick, &1_u64.to_ne_bytes()).unwrap();
            rig.wait_for(|status| status.queues[0].kicks == kick);
        }
        if kicks == 2 {
            let status = rig.wait_for(|status| status.last_error.is_some());
            assert!(status.last_error.unwrap().contains("its ring stays empty"), "{kicks}");
        }
        // The session goes on.
        machine.fill(DISK, &mut random);
        finish(&mut machine, &mut model);
        let status = rig.wait_for(|status| status.queues[0].completed > 0);
        assert_eq!((status.last_error.is_some(), status.protocol_errors), (kicks == 2, 0));
    }
}
