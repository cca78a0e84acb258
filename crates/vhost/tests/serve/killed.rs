//! A server that is killed again and again while it writes.
use crate::driver::Random;
use crate::raw::{Machine, Raw};
use crate::rig::{DISK, Disk};
use paravane_spec::feature;
use std::time::Duration;

/// Kills the servers of a disk under load.
///
/// Each request is done once, and the disk has what was written.
pub(crate) fn survive(disk: &Disk, features: u64, kills: usize, seed: u64) {
    let mut model = disk.content();
    let mut random = Random::new(seed);
    let mut machine = Machine::new(features, 64, 16);
    // The used ring gives the position of a queue in order; for others the in-flight region has it.
    let base_of = |machine: &Machine| match features & feature::IN_ORDER {
        0 => machine.first_base(),
        _ => (machine.done & 0xffff) as u32,
    };
    let mut interrupted = 0;
    for _ in 0..kills {
        let server = disk.serve();
        let raw = Raw::connect(&disk.socket());
        let base = base_of(&machine);
        machine.attach(&raw, base, true);
        // All that the dead server left is done, and an interrupt reports it.
        machine.finish(&mut model);
        // At a random moment.
        let life = Duration::from_micros(random.below(20_000) as u64);
        let killer = std::thread::spawn(move || {
            std::thread::sleep(life);
            drop(server);
        });
        while !killer.is_finished() {
            machine.fill(DISK, &mut random);
            machine.wait(Duration::from_millis(1));
            machine.reap(&mut model);
        }
        killer.join().unwrap();
        machine.reap(&mut model);
        interrupted += machine.in_flight();
    }
    assert!(interrupted > kills, "only {interrupted} requests were in flight when a server died");
    let server = disk.serve();
    let raw = Raw::connect(&disk.socket());
    let base = base_of(&machine);
    machine.attach(&raw, base, true);
    machine.finish(&mut model);
    drop(raw);
    server.end();
    assert!(disk.content() == model, "the disk is not what was written");
}

#[test]
fn what_was_in_flight_in_a_split_queue_is_done_once() {
    survive(&Disk::new(), 0, 25, 11);
}

#[test]
fn what_was_in_flight_in_a_split_queue_with_event_index_is_done_once() {
    survive(&Disk::new(), feature::EVENT_IDX, 25, 12);
}

#[test]
fn what_was_in_flight_in_a_packed_queue_is_done_once() {
    survive(&Disk::new(), feature::RING_PACKED, 25, 13);
}

#[test]
fn what_was_in_flight_in_a_packed_queue_with_event_index_is_done_once() {
    survive(&Disk::new(), feature::RING_PACKED | feature::EVENT_IDX, 25, 14);
}
