//! Exports that go from one owner to the next while clients use them.
use crate::driver::Random;
use crate::iotlb::Iommu;
use crate::raw::{Ask, GPA, MOST, Machine, Raw};
use crate::rig::DISK;
use paravane_device::blk::{Blk, BlkConfig};
use paravane_export::{Endpoint, Export, ExportError, Handover, HandoverError};
use paravane_notify::Notifier;
use paravane_spec::feature::{ACCESS_PLATFORM, EVENT_IDX, IN_ORDER, INDIRECT_DESC, RING_PACKED};
use paravane_spec::vhost_user::{
    F_LOG_ALL, F_PROTOCOL_FEATURES, LOG_PAGE, LogArea, SingleRegion, StateTransfer, VRING_NO_FD, VringState,
    flags, request,
};
use paravane_vhost::ExportConfig;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, memfd_create};
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tempfile::TempDir;
use zerocopy::{FromBytes, IntoBytes};

const LAYOUTS: [u64; 6] = [
    0,
    INDIRECT_DESC | EVENT_IDX,
    IN_ORDER | EVENT_IDX,
    RING_PACKED,
    RING_PACKED | INDIRECT_DESC | EVENT_IDX,
    RING_PACKED | IN_ORDER | INDIRECT_DESC,
];

/// Disk of two queues whose export changes hands.
struct Relay {
    folder: TempDir,
    export: Option<Export>,
}

impl Relay {
    fn new() -> Self {
        Self::on(Endpoint::Listen)
    }

    fn on(endpoint: impl FnOnce(PathBuf) -> Endpoint) -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("disk.img"), vec![0; DISK]).unwrap();
        let mut relay = Self { folder, export: None };
        let config = config(endpoint(relay.socket()));
        relay.export = Some(Export::start(config, relay.disk()).unwrap());
        relay
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("vhost.sock")
    }

    fn disk(&self) -> Box<Blk> {
        let image = self.folder.path().join("disk.img");
        Box::new(Blk::open(BlkConfig { queues: 2, ..BlkConfig::new(image) }).unwrap())
    }

    fn export(&self) -> &Export {
        self.export.as_ref().unwrap()
    }

    /// Takes the state of the export, which ends.
    fn try_take(&mut self) -> Result<Handover, HandoverError> {
        let export = self.export.take().unwrap();
        assert!(export.take_handover().is_none());
        export.begin_hand_over();
        export.join().unwrap();
        let handover = export.take_handover().expect("the export has ended");
        assert!(matches!(export.take_handover(), Some(Err(HandoverError::Stopped))));
        handover
    }

    fn take(&mut self) -> Handover {
        self.try_take().unwrap()
    }

    fn resume(&mut self, endpoint: Endpoint, handover: Handover) {
        self.export = Some(Export::resume(config(endpoint), self.disk(), handover).unwrap());
    }

    fn hand_over(&mut self) {
        let handover = self.take();
        assert!(self.socket().exists(), "the file stays");
        self.resume(Endpoint::Listen(self.socket()), handover);
    }

    fn content(&self) -> Vec<u8> {
        std::fs::read(self.folder.path().join("disk.img")).unwrap()
    }
}

fn config(endpoint: Endpoint) -> ExportConfig {
    let mut config = ExportConfig::new("relay", endpoint);
    config.workers = 2;
    config.in_order = true;
    config
}

/// Starts a second queue with its own memory, in the session of the first.
fn add(raw: &Raw, features: u64) -> Machine {
    let second = Machine::with_index(1, features, 64, 16);
    let region = SingleRegion { padding: 0, region: second.region() };
    raw.say(request::ADD_MEM_REG, &region, &[second.memory.fd().unwrap()]);
    second.start(raw, second.first_base());
    second
}

fn under_load(features: u64, tracked: bool, times: usize) {
    let mut relay = Relay::new();
    let raw = Raw::connect(&relay.socket());
    let mut machine = Machine::new(features, 64, 16);
    machine.attach(&raw, machine.first_base(), tracked);
    // The in-flight region is made for one queue.
    let mut second = (!tracked).then(|| add(&raw, features));
    // Each has its half of the disk.
    let (mut low, mut high) = (vec![0; DISK / 2], vec![0; DISK]);
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let load = scope.spawn(|| {
            let mut random = Random::new(31);
            // Relaxed: it only ends the load.
            while !over.load(Ordering::Relaxed) {
                machine.fill(DISK / 2, &mut random);
                if let Some(second) = &mut second {
                    // One request, which the model of the first does not know.
                    second.ask(0, Ask::Write(random.below(256) as u8), DISK - MOST, MOST);
                    second.kick();
                    second.finish(&mut high);
                }
                machine.finish(&mut low);
            }
        });
        let mut seen = 0;
        for round in 0..times {
            // Some requests are between two handovers.
            while relay.export().status().queues[0].completed < 20 + round as u64 % 7 && !load.is_finished() {
                std::thread::yield_now();
            }
            seen += relay.export().status().queues[0].completed;
            relay.hand_over();
        }
        over.store(true, Ordering::Relaxed);
        load.join().unwrap();
        assert!(seen >= 20 * times as u64);
    });
    // The client is still served; the answer comes when the session has been restored.
    assert_eq!(raw.ask_number(request::GET_QUEUE_NUM), 2);
    let status = relay.export().status();
    assert!(status.connected && status.queues[0].live, "{status:?}");
    assert_eq!((status.sessions, status.protocol_errors, status.last_error), (1, 0, None));
    assert_eq!(status.tracked, tracked);
    let socket = relay.socket();
    relay.export.take().unwrap().stop();
    assert!(!socket.exists(), "the last owner removes the file");
    let content = relay.content();
    assert!(content[..DISK / 2] == low, "{features:#x}");
    assert!(content[DISK - MOST..] == high[DISK - MOST..], "{features:#x}");
}

#[test]
fn a_busy_client_notices_no_handover() {
    for features in LAYOUTS {
        under_load(features, false, 50);
    }
}

#[test]
fn a_busy_client_with_an_inflight_region_notices_no_handover() {
    for features in LAYOUTS {
        under_load(features, true, 25);
    }
}

#[test]
fn the_dirty_log_goes_along() {
    for features in [0, RING_PACKED] {
        let mut relay = Relay::new();
        let mut model = vec![0; DISK];
        let raw = Raw::connect(&relay.socket());
        let mut machine = Machine::new(features, 64, 16);
        machine.attach(&raw, machine.first_base(), false);
        let file = File::from(memfd_create("log", MemfdFlags::CLOEXEC).unwrap());
        let area = LogArea { size: (GPA + (2 << 20)) / LOG_PAGE / 8, offset: 4096 };
        file.set_len(area.offset + area.size).unwrap();
        raw.send(request::SET_LOG_BASE, area.as_bytes(), &[file.as_fd()]).unwrap();
        assert_eq!(raw.receive().unwrap().0.request, request::SET_LOG_BASE);
        let accepted = machine.features | F_PROTOCOL_FEATURES;
        raw.say(request::SET_FEATURES, &(accepted | F_LOG_ALL), &[]);
        for slot in 0..8 {
            relay.hand_over();
            machine.ask(slot, Ask::Read, 0, MOST);
            machine.kick();
            machine.finish(&mut model);
            let state = VringState::default();
            let reply = raw.ask(request::GET_VRING_BASE, state.as_bytes());
            let base = VringState::read_from_bytes(&reply).unwrap().num;
            let page = (GPA + Machine::slot(slot)) / LOG_PAGE;
            let mut byte = [0];
            file.read_exact_at(&mut byte, area.offset + page / 8).unwrap();
            assert_ne!(byte[0] >> (page % 8) & 1, 0, "request {slot} wrote its status there");
            machine.start(&raw, base);
        }
        // It goes on to be off, too.
        raw.say(request::SET_FEATURES, &accepted, &[]);
        relay.hand_over();
        file.write_all_at(&vec![0; area.size as usize], area.offset).unwrap();
        machine.ask(0, Ask::Read, 0, MOST);
        machine.kick();
        machine.finish(&mut model);
        let mut marks = vec![0; area.size as usize];
        file.read_exact_at(&mut marks, area.offset).unwrap();
        assert!(marks.iter().all(|byte| *byte == 0));
        // The log that was stored is used again.
        raw.say(request::SET_FEATURES, &(accepted | F_LOG_ALL), &[]);
    }
}

#[test]
fn translations_and_the_back_channel_go_along() {
    for features in LAYOUTS {
        let features = features | ACCESS_PLATFORM;
        let mut relay = Relay::new();
        let (mut model, mut random) = (vec![0; DISK], Random::new(37));
        let raw = Raw::connect(&relay.socket());
        let mut machine = Machine::new(features, 64, 16);
        machine.attach(&raw, machine.first_base(), false);
        let iommu = Iommu::new(&raw);
        for round in 0..30 {
            machine.fill(DISK, &mut random);
            match round % 3 {
                // Nothing is translated anew: what was known is still known.
                0 => {}
                1 => drop(iommu.answer(&[&machine])),
                _ => iommu.invalidate(0, 0),
            }
            relay.hand_over();
            iommu.finish(&mut machine, &mut model);
            if round % 3 == 0 {
                relay.hand_over();
                // Answered when the queues have started.
                assert_eq!(raw.ask_number(request::GET_QUEUE_NUM), 2);
                assert!(iommu.said().is_none(), "something is missed that is translated");
            }
        }
        assert_eq!(relay.export().status().last_error, None);
        drop(raw);
        relay.export.take().unwrap().stop();
        assert!(relay.content() == model);
    }
}

#[test]
fn a_message_may_arrive_in_parts_at_both() {
    let mut relay = Relay::new();
    let (mut model, mut random) = (vec![0; DISK], Random::new(38));
    let raw = Raw::connect(&relay.socket());
    let mut machine = Machine::new(0, 64, 16);
    machine.attach(&raw, 0, false);
    let call = rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).unwrap();
    let flags = flags::VERSION | flags::NEED_REPLY;
    let message = paravane_vhost::message::message(request::SET_VRING_CALL, flags, &[0; 8]);
    for cut in 1..message.len() {
        // The descriptor comes with the first part.
        raw.send_bytes(&message[..cut], &[call.as_fd()]).unwrap();
        relay.hand_over();
        raw.send_bytes(&message[cut..], &[]).unwrap();
        assert_eq!(raw.receive().unwrap().0.request, request::SET_VRING_CALL);
    }
    machine.call = call;
    machine.fill(DISK, &mut random);
    relay.hand_over();
    machine.finish(&mut model);
}

#[test]
fn a_session_goes_along_at_every_step_of_its_setup() {
    for steps in 0..9 {
        let mut relay = Relay::new();
        let (mut model, mut random) = (vec![0; DISK], Random::new(39));
        let raw = Raw::connect(&relay.socket());
        let mut machine = Machine::new(RING_PACKED, 64, 16);
        let mut step = 0;
        let mut next = |relay: &mut Relay| {
            if step == steps {
                relay.hand_over();
            }
            step += 1;
        };
        next(&mut relay);
        raw.begin(machine.features);
        next(&mut relay);
        machine.share(&raw);
        // Added twice, so that it must be removed twice.
        let region = SingleRegion { padding: 0, region: machine.region() };
        raw.say(request::ADD_MEM_REG, &region, &[machine.memory.fd().unwrap()]);
        next(&mut relay);
        raw.say(request::REM_MEM_REG, &region, &[]);
        let state = |num| VringState { index: 0, num };
        raw.say(request::SET_VRING_NUM, &state(64), &[]);
        raw.say(request::SET_VRING_BASE, &state(machine.first_base()), &[]);
        next(&mut relay);
        raw.say(request::SET_VRING_ADDR, &machine.vring_addr(), &[]);
        raw.say(request::SET_VRING_CALL, &0_u64, &[machine.call.as_fd()]);
        next(&mut relay);
        raw.say(request::SET_VRING_KICK, &0_u64, &[machine.kick.as_fd()]);
        next(&mut relay);
        raw.say(request::SET_VRING_ENABLE, &state(1), &[]);
        raw.say(request::SET_STATUS, &15_u64, &[]);
        next(&mut relay);
        machine.fill(DISK, &mut random);
        machine.finish(&mut model);
        raw.say(request::SET_VRING_ENABLE, &state(0), &[]);
        next(&mut relay);
        assert_eq!(raw.ask_number(request::GET_STATUS), 15);
        assert!(!relay.export().status().queues[0].live);
        raw.say(request::SET_VRING_ENABLE, &state(1), &[]);
        // Without a kick descriptor it is polled.
        raw.say(request::SET_VRING_KICK, &VRING_NO_FD, &[]);
        next(&mut relay);
        machine.fill(DISK, &mut random);
        machine.finish(&mut model);
        assert_eq!(raw.ask_number(request::GET_STATUS), 15);
        relay.export.take().unwrap().stop();
        assert!(relay.content() == model);
    }
}

#[test]
fn a_client_that_connects_meanwhile_is_served() {
    let mut relay = Relay::new();
    let handover = relay.take();
    let waiting = Raw::connect(&relay.socket());
    relay.resume(Endpoint::Listen(relay.socket()), handover);
    let (mut model, mut random) = (vec![0; DISK], Random::new(40));
    let mut machine = Machine::new(0, 64, 16);
    machine.attach(&waiting, 0, false);
    machine.fill(DISK, &mut random);
    machine.finish(&mut model);
    assert_eq!(relay.export().status().sessions, 1);
    // One that waits behind it, too.
    let second = Raw::connect(&relay.socket());
    relay.hand_over();
    drop(waiting);
    assert_ne!(second.ask_number(request::GET_FEATURES), 0, "the first one has left");
    assert_eq!(relay.export().status().sessions, 2);
}

#[test]
fn every_kind_of_endpoint_is_handed_over() {
    let (near, far) = UnixStream::pair().unwrap();
    let mut relay = Relay::on(|_| Endpoint::Connection(near));
    let client = Raw { socket: far };
    for _ in 0..3 {
        assert_ne!(client.ask_number(request::GET_FEATURES), 0);
        let handover = relay.take();
        assert_eq!(handover.fds.len(), 1, "the connection");
        relay.resume(Endpoint::Handover, handover);
    }
    drop(client);
    relay.export().join().unwrap();

    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("vmm.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let mut relay = Relay::on(|_| Endpoint::Connect(path.clone()));
    for _ in 0..2 {
        let client = Raw { socket: listener.accept().unwrap().0 };
        assert_ne!(client.ask_number(request::GET_FEATURES), 0);
        let handover = relay.take();
        relay.resume(Endpoint::Connect(path.clone()), handover);
        assert_ne!(client.ask_number(request::GET_FEATURES), 0);
    }

    let path = folder.path().join("given.sock");
    let given = UnixListener::bind(&path).unwrap();
    let mut relay = Relay::on(|_| Endpoint::Listener(given));
    let client = Raw::connect(&path);
    assert_ne!(client.ask_number(request::GET_FEATURES), 0);
    for endpoint in [Endpoint::Handover, Endpoint::Listen(path.clone())] {
        let handover = relay.take();
        relay.resume(endpoint, handover);
        assert_ne!(client.ask_number(request::GET_FEATURES), 0);
    }
    relay.export.take().unwrap().stop();
    assert!(path.exists(), "its owner removes the file");
}

#[test]
fn another_endpoint_is_refused() {
    let mut relay = Relay::new();
    let client = Raw::connect(&relay.socket());
    assert_ne!(client.ask_number(request::GET_FEATURES), 0);
    let handover = relay.take();
    let other = Endpoint::Listen(relay.folder.path().join("other.sock"));
    let refused = Export::resume(config(other), relay.disk(), handover).unwrap_err();
    assert!(matches!(refused, ExportError::Handover(HandoverError::Endpoint { .. })), "{refused}");
    assert!(client.is_closed());
    let refused = Export::start(config(Endpoint::Handover), relay.disk()).unwrap_err();
    assert!(matches!(refused, ExportError::Handover(HandoverError::Missing)), "{refused}");
    // The file is stale, and a new export replaces it.
    relay.export = Some(Export::start(config(Endpoint::Listen(relay.socket())), relay.disk()).unwrap());
    assert_ne!(Raw::connect(&relay.socket()).ask_number(request::GET_FEATURES), 0);
}

#[test]
fn a_failed_queue_stays_failed() {
    let mut relay = Relay::new();
    let (mut model, mut random) = (vec![0; DISK], Random::new(41));
    let raw = Raw::connect(&relay.socket());
    let mut machine = Machine::new(0, 64, 16);
    machine.attach(&raw, 0, false);
    let mut second = add(&raw, 0);
    // An available index that no driver can have.
    let at = second.addresses.driver - second.addresses.desc;
    second.set_bytes(at + 2, 0x8000_u16.to_le_bytes());
    rustix::io::write(&second.kick, &1_u64.to_ne_bytes()).unwrap();
    while relay.export().status().queues[1].error.is_none() {
        std::thread::yield_now();
    }
    let error = relay.export().status().queues[1].error.clone();
    assert!(error.is_some());
    for _ in 0..3 {
        relay.hand_over();
        machine.fill(DISK, &mut random);
        machine.finish(&mut model);
        let status = relay.export().status();
        assert_eq!((status.queues[1].live, &status.queues[1].error), (false, &error));
    }
    // A driver that starts over can use it.
    let reply = raw.ask(request::GET_VRING_BASE, VringState { index: 1, num: 0 }.as_bytes());
    assert_eq!(VringState::read_from_bytes(&reply).unwrap().index, 1);
    second = Machine::with_index(1, 0, 64, 4);
    let region = SingleRegion { padding: 0, region: second.region() };
    raw.say(request::REM_MEM_REG, &region, &[]);
    raw.say(request::ADD_MEM_REG, &region, &[second.memory.fd().unwrap()]);
    second.start(&raw, 0);
    second.fill(DISK, &mut random);
    second.finish(&mut model);
}

#[test]
fn a_session_with_a_transfer_is_not_handed_over() {
    let mut relay = Relay::new();
    let raw = Raw::connect(&relay.socket());
    raw.begin(0);
    let (read, _write) = rustix::pipe::pipe().unwrap();
    let load = StateTransfer { direction: 1, phase: 0 };
    raw.send(request::SET_DEVICE_STATE_FD, load.as_bytes(), &[read.as_fd()]).unwrap();
    raw.receive().unwrap();
    assert!(matches!(relay.try_take(), Err(HandoverError::Transfer(_))));
    assert!(raw.is_closed() && !relay.socket().exists(), "as if it had been stopped");
}

#[test]
fn a_stopped_export_is_not_handed_over() {
    let mut relay = Relay::new();
    let ended = Arc::new(Notifier::new(false).unwrap());
    let mut config = config(Endpoint::Listen(relay.folder.path().join("second.sock")));
    config.ended = Some(Arc::clone(&ended));
    relay.export().begin_stop();
    relay.export().begin_hand_over();
    relay.export().join().unwrap();
    let handed = relay.export().take_handover();
    assert!(matches!(handed, Some(Err(HandoverError::Stopped))), "{handed:?}");
    relay.export = None;
    let export = Export::start(config, relay.disk()).unwrap();
    export.begin_hand_over();
    let patience = Timespec { tv_sec: 10, tv_nsec: 0 };
    poll(&mut [PollFd::new(&*ended, PollFlags::IN)], Some(&patience)).unwrap();
    let handover = export.take_handover().expect("the end was signalled").unwrap();
    assert_eq!(handover.fds.len(), 1);
}

/// CRC-32, bit by bit.
fn checksum(bytes: &[u8]) -> u32 {
    let bit = |sum: u32| if sum & 1 == 1 { sum >> 1 ^ 0xedb8_8320 } else { sum >> 1 };
    !bytes.iter().fold(!0, |sum, byte| (0..8).fold(sum ^ u32::from(*byte), |sum, _| bit(sum)))
}

#[test]
fn no_forged_record_harms_the_export() {
    let mut relay = Relay::new();
    let raw = Raw::connect(&relay.socket());
    let mut machine = Machine::new(0, 64, 16);
    machine.attach(&raw, 0, true);
    let Handover { record, fds } = relay.take();
    let mut random = Random::new(43);
    let mut served = 0;
    for _ in 0..300 {
        let mut forged = record.clone();
        let end = forged.len() - 4;
        for _ in 0..1 + random.below(4) {
            let at = 16 + random.below(end - 16);
            forged[at] = [0, 1, 0xff, random.below(256) as u8][random.below(4)];
        }
        let sum = checksum(&forged[..end]).to_le_bytes();
        forged[end..].copy_from_slice(&sum);
        let fds: Vec<OwnedFd> = fds.iter().map(|fd| fd.try_clone().unwrap()).collect();
        let forged = Handover { record: forged, fds };
        let Ok(export) = Export::resume(config(Endpoint::Handover), relay.disk(), forged) else { continue };
        export.begin_hand_over();
        export.join().expect("a record makes the device fail");
        served += usize::from(matches!(export.take_handover(), Some(Ok(_))));
    }
    assert!(served > 0, "none is accepted");
}
