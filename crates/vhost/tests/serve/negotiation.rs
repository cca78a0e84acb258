//! A new negotiation begins from nothing, however it is announced.
use crate::raw::{Machine, Raw};
use paravane_device::net::{BackEnd, LinkEnd, Net, NetConfig};
use paravane_export::{Endpoint, Export};
use paravane_ring::Segment;
use paravane_spec::feature;
use paravane_spec::net::{CTRL_OK, F_CTRL_VQ, F_GUEST_CSUM, F_GUEST_TSO4, F_MQ};
use paravane_spec::vhost_user::{StateTransfer, VringState, protocol_feature, request};
use paravane_test_support::patience;
use paravane_vhost::ExportConfig;
use std::io;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex};
use std::time::Instant;
use tempfile::TempDir;
use zerocopy::{FromBytes, IntoBytes};

const PAIRS: u16 = 4;
const CONTROL: u32 = 2 * PAIRS as u32;
const OFFLOADS: u64 = F_GUEST_CSUM | F_GUEST_TSO4;
const MULTIQUEUE: u64 = F_MQ | F_CTRL_VQ;

/// What a network was told last.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Told {
    offloads: u64,
    pairs: u16,
}

/// A network that remembers what it was told.
struct Recorder(LinkEnd, Arc<Mutex<Told>>);

impl BackEnd for Recorder {
    type Sender = <LinkEnd as BackEnd>::Sender;
    type Receiver = <LinkEnd as BackEnd>::Receiver;

    fn pairs(&self) -> u16 {
        self.0.pairs()
    }

    fn offloads(&self) -> u64 {
        OFFLOADS
    }

    fn accept(&self, features: u64) -> io::Result<()> {
        self.1.lock().unwrap().offloads = features & OFFLOADS;
        self.0.accept(features)
    }

    fn use_pairs(&self, pairs: u16) -> io::Result<()> {
        self.1.lock().unwrap().pairs = pairs;
        self.0.use_pairs(pairs)
    }

    fn inject(&self, frame: &[u8]) -> io::Result<()> {
        self.0.inject(frame)
    }

    fn sender(&self, pair: u16) -> io::Result<Self::Sender> {
        self.0.sender(pair)
    }

    fn receiver(&self, pair: u16) -> io::Result<Self::Receiver> {
        self.0.receiver(pair)
    }
}

/// A card with a client that drives its control queue.
struct Rig {
    told: Arc<Mutex<Told>>,
    raw: Raw,
    machine: Machine,
    _export: Export,
    _folder: TempDir,
}

impl Rig {
    fn new(features: u64) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let told = Arc::default();
        let network = Recorder(LinkEnd::echo(PAIRS).unwrap(), Arc::clone(&told));
        let card = Net::new(NetConfig::new([2, 0, 0, 0, 0, 1]), network).unwrap();
        let path = folder.path().join("s");
        let config = ExportConfig::new("card", Endpoint::Listen(path.clone()));
        let export = Export::start(config, Box::new(card)).unwrap();
        let raw = Raw::connect(&path);
        let mut machine = Machine::with_index(CONTROL, features, 64, 4);
        machine.attach(&raw, machine.first_base(), false);
        Self { told, raw, machine, _export: export, _folder: folder }
    }

    fn told(&self) -> Told {
        *self.told.lock().unwrap()
    }

    /// Sets the number of queue pairs in the control queue.
    fn set_pairs(&mut self, pairs: u8) {
        let (to, answer) = (Machine::slot(0), Machine::slot(1));
        self.machine.set_bytes(to, [4, 0, pairs, 0]);
        self.machine.set_bytes(answer, [0xff]);
        let at = |offset, len| Segment { addr: self.machine.base + offset, len };
        let (command, answer) = (at(to, 4), at(answer, 1));
        self.machine.queue.add(&[command], &[answer]).unwrap();
        self.machine.kick();
        let start = Instant::now();
        while self.machine.queue.pop_used().unwrap().is_none() {
            assert!(start.elapsed() < patience(), "the command is not answered");
            std::thread::yield_now();
        }
        assert_eq!(self.machine.bytes(Machine::slot(1), 1), [CTRL_OK]);
    }

    /// Stops the control queue, and returns its position.
    fn stop(&self) -> u32 {
        let state = VringState { index: CONTROL, num: 0 };
        let reply = self.raw.ask(request::GET_VRING_BASE, state.as_bytes());
        self.raw.say(request::SET_VRING_ENABLE, &state, &[]);
        VringState::read_from_bytes(&reply).unwrap().num
    }

    /// The ring of another driver.
    fn new_driver(&mut self, features: u64) {
        self.machine = Machine::with_index(CONTROL, features, 64, 4);
        self.machine.share(&self.raw);
    }
}

const ALL: u64 = feature::VERSION_1 | MULTIQUEUE | OFFLOADS;

#[test]
fn offloads_and_pairs_end_with_new_features() {
    let mut rig = Rig::new(ALL);
    rig.set_pairs(4);
    assert_eq!(rig.told(), Told { offloads: OFFLOADS, pairs: 4 });
    rig.stop();
    rig.new_driver(feature::VERSION_1);
    let features = feature::VERSION_1 | paravane_spec::vhost_user::F_PROTOCOL_FEATURES;
    rig.raw.say(request::SET_FEATURES, &features, &[]);
    assert_eq!(rig.told(), Told { offloads: 0, pairs: 1 });
    rig.machine.start(&rig.raw, 0);
    assert_eq!(rig.told(), Told { offloads: 0, pairs: 1 });
}

#[test]
fn offloads_and_pairs_end_with_the_owner() {
    for request in [request::RESET_OWNER, request::SET_OWNER] {
        let mut rig = Rig::new(ALL);
        rig.set_pairs(4);
        rig.stop();
        rig.raw.say(request, &[0_u8; 0][..], &[]);
        assert_eq!(rig.told(), Told { offloads: 0, pairs: 1 }, "request {request}");
    }
}

#[test]
fn an_owner_that_is_set_under_a_live_queue_changes_nothing() {
    let mut rig = Rig::new(ALL);
    rig.set_pairs(3);
    rig.raw.say(request::SET_OWNER, &[0_u8; 0][..], &[]);
    assert_eq!(rig.told(), Told { offloads: OFFLOADS, pairs: 3 });
}

/// Nothing but the positions of the queues tells the two apart.
#[test]
fn pairs_outlive_a_pause_and_not_their_driver() {
    for packed in [0, feature::RING_PACKED] {
        let mut rig = Rig::new(ALL | packed);
        rig.set_pairs(3);
        let base = rig.stop();
        rig.machine.start(&rig.raw, base);
        assert_eq!(rig.told().pairs, 3, "a pause");
        rig.stop();
        rig.new_driver(ALL | packed);
        rig.machine.start(&rig.raw, rig.machine.first_base());
        assert_eq!(rig.told().pairs, 1, "another driver with the same features");
    }
}

/// QEMU says status 0 whenever it stops a machine.
#[test]
fn pairs_outlive_a_pause_by_status() {
    let mut rig = Rig::new(ALL);
    rig.set_pairs(3);
    rig.raw.say(request::SET_STATUS, &0_u64, &[]);
    assert_eq!(rig.told(), Told { offloads: 0, pairs: 1 });
    let base = rig.stop();
    rig.machine.start(&rig.raw, base);
    assert_eq!(rig.told(), Told { offloads: OFFLOADS, pairs: 3 });
    rig.raw.say(request::SET_STATUS, &0_u64, &[]);
    rig.new_driver(ALL);
    rig.machine.start(&rig.raw, 0);
    assert_eq!(rig.told(), Told { offloads: OFFLOADS, pairs: 1 });
}

#[test]
fn a_migration_carries_the_pairs() {
    let mut rig = Rig::new(ALL);
    rig.set_pairs(3);
    let base = rig.stop();
    let transfer = |raw: &Raw, direction, pipe: std::os::fd::BorrowedFd<'_>| {
        let what = StateTransfer { direction, phase: 0 };
        raw.send(request::SET_DEVICE_STATE_FD, what.as_bytes(), &[pipe]).unwrap();
        raw.receive().unwrap();
        u64::read_from_bytes(&raw.ask(request::CHECK_DEVICE_STATE, &[])).unwrap()
    };
    let (mut reader, writer) = io::pipe().unwrap();
    assert_eq!(transfer(&rig.raw, 0, writer.as_fd()), 0);
    drop(writer);
    let mut state = Vec::new();
    io::Read::read_to_end(&mut reader, &mut state).unwrap();

    let there = Rig::new(ALL);
    there.stop();
    let (reader, mut writer) = io::pipe().unwrap();
    io::Write::write_all(&mut writer, &state).unwrap();
    drop(writer);
    assert_eq!(transfer(&there.raw, 1, reader.as_fd()), 0);
    rig.machine.share(&there.raw);
    rig.machine.start(&there.raw, base);
    assert_eq!(there.told(), Told { offloads: OFFLOADS, pairs: 3 });
}

/// No message carries the reset of one queue, so a guest must not rely on it.
#[test]
fn the_reset_of_a_queue_is_not_offered_and_not_refused() {
    let rig = Rig::new(ALL);
    assert_eq!(rig.raw.ask_number(request::GET_FEATURES) & feature::RING_RESET, 0);
    rig.stop();
    // As a client repeats it that an earlier version has served.
    rig.raw.say(request::SET_FEATURES, &(ALL | feature::RING_RESET), &[]);
    assert_ne!(rig.raw.ask_number(request::GET_PROTOCOL_FEATURES) & protocol_feature::RESET_DEVICE, 0);
}
