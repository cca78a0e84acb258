//! A server that is killed, again and again, while it writes.
use crate::driver::Dice;
use crate::raw::{Machine, Raw};
use crate::rig::DISK;
use paravane_device::blk::{Blk, BlkConfig};
use paravane_spec::feature;
use paravane_vhost::{Endpoint, Export, ExportConfig};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

const FOLDER: &str = "PARAVANE_TEST_SERVE_FOLDER";

/// Not a test: what the tests below start, and kill.
#[test]
#[ignore = "runs until it is killed"]
fn server() {
    let folder = PathBuf::from(std::env::var_os(FOLDER).unwrap());
    let mut config = ExportConfig::new("killed", Endpoint::Listen(folder.join("vhost.sock")));
    config.in_order = true;
    let disk = Blk::open(BlkConfig::new(folder.join("disk.img"))).unwrap();
    let _export = Export::start(config, Box::new(disk)).unwrap();
    loop {
        std::thread::park();
    }
}

struct Server(Child);

impl Server {
    fn start(folder: &Path) -> Self {
        let this = std::env::current_exe().unwrap();
        let mut command = Command::new(this);
        command.args(["--exact", "killed::server", "--ignored", "--nocapture"]).env(FOLDER, folder);
        Self(command.stdout(Stdio::null()).spawn().unwrap())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // SIGKILL.
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

fn survive(features: u64, kills: usize, seed: u64) {
    let folder = tempfile::tempdir().unwrap();
    let image = folder.path().join("disk.img");
    std::fs::write(&image, vec![0; DISK]).unwrap();
    let mut model = vec![0; DISK];
    let mut dice = Dice::new(seed);
    let mut machine = Machine::new(features, 64, 16);
    // Where a queue in order stands is told by what it has used; of others the in-flight memory tells.
    let base_of = |machine: &Machine| match features & feature::IN_ORDER {
        0 => machine.first_base(),
        _ => (machine.done & 0xffff) as u32,
    };
    let mut interrupted = 0;
    for _ in 0..kills {
        let server = Server::start(folder.path());
        let raw = Raw::connect(&folder.path().join("vhost.sock"));
        let base = base_of(&machine);
        machine.attach(&raw, base, true);
        // All that the dead one has left is done, and an interrupt tells.
        machine.finish(&mut model);
        // At any moment of what it does.
        let life = Duration::from_micros(dice.below(20_000) as u64);
        let killer = std::thread::spawn(move || {
            std::thread::sleep(life);
            drop(server);
        });
        while !killer.is_finished() {
            machine.fill(DISK, &mut dice);
            machine.wait(Duration::from_millis(1));
            machine.reap(&mut model);
        }
        killer.join().unwrap();
        machine.reap(&mut model);
        interrupted += machine.in_flight();
    }
    assert!(interrupted > kills, "only {interrupted} requests were in flight when a server died");
    let _server = Server::start(folder.path());
    let raw = Raw::connect(&folder.path().join("vhost.sock"));
    let base = base_of(&machine);
    machine.attach(&raw, base, true);
    machine.finish(&mut model);
    assert!(std::fs::read(&image).unwrap() == model, "the disk is not what was written");
}

#[test]
fn what_was_in_flight_in_a_split_queue_is_done_once() {
    survive(0, 25, 11);
}

#[test]
fn what_was_in_flight_in_a_split_queue_with_event_index_is_done_once() {
    survive(feature::EVENT_IDX, 25, 12);
}

#[test]
fn what_was_in_flight_in_a_packed_queue_is_done_once() {
    survive(feature::RING_PACKED, 25, 13);
}

#[test]
fn what_was_in_flight_in_a_packed_queue_with_event_index_is_done_once() {
    survive(feature::RING_PACKED | feature::EVENT_IDX, 25, 14);
}

#[test]
fn what_was_in_flight_in_a_split_queue_in_order_is_done_once() {
    survive(feature::IN_ORDER | feature::EVENT_IDX, 25, 15);
}
