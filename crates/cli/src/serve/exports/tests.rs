use super::*;
use crate::kinds::endpoint::Endpoint;
use crate::kinds::observe::Unobserved;
use crate::kinds::opening::{OpenContext, Opened};
use crate::kinds::rng::RngSpec;
use crate::serve::report::Report;
use crate::serve::sockets::Sockets;
use crate::serve::threads::Threads;
use paravane_device::{Device, QueueHandler};
use paravane_dma::{MappingLimits, MappingPool};
use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Panics when the first client connects.
struct Faulty;

impl Device for Faulty {
    fn device_id(&self) -> u32 {
        paravane_spec::device_id::RNG
    }

    fn features(&self) -> u64 {
        panic!("a mistake")
    }

    fn queue_sizes(&self) -> &[u16] {
        &[16]
    }

    fn read_config(&self, _offset: u32, _out: &mut [u8]) {}

    fn start_queue(&mut self, _index: u16, _features: u64) -> io::Result<Box<dyn QueueHandler>> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

fn open(spec: &DeviceSpec) -> Result<Opening, anyhow::Error> {
    open::open(spec, &mut LinkEnds::default(), &OpenContext::default(), Earlier::default())
}

fn spec(folder: &Path, name: &str) -> (DeviceSpec, PathBuf) {
    let socket = folder.join(name);
    let spec = DeviceSpec {
        name: name.into(),
        endpoint: Endpoint::Listen(socket.clone()),
        workers: Some(1),
        longest_poll: Duration::ZERO,
        latencies: true,
        packed: true,
        kind: Arc::new(RngSpec),
    };
    (spec, socket)
}

fn context() -> ExportContext {
    ExportContext {
        sockets: Sockets::default(),
        opening: OpenContext::default(),
        stop_timeout: paravane_test_support::patience(),
        pool: MappingPool::new(MappingLimits::of_host()),
        shelf: None,
        threads: Threads::start(2).unwrap(),
        inspector: None,
    }
}

fn stop(exports: &Exports) {
    exports.begin_stop();
    wait_for(exports, |report| report.devices.is_empty());
    assert!(exports.is_gone());
}

fn wait_for(exports: &Exports, wanted: impl Fn(&Report) -> bool) -> Report {
    let state = || format!("{:?}", exports.report());
    paravane_test_support::wait_for("a report", state, || {
        exports.advance();
        Some(exports.report()).filter(&wanted)
    })
}

#[test]
fn a_device_that_panics_is_told_of_and_made_anew() {
    let folder = tempfile::tempdir().unwrap();
    let ((faulty, socket), (good, good_socket)) =
        (spec(folder.path(), "faulty"), spec(folder.path(), "good"));
    let device = Box::new(Faulty);
    let opened = Opened { device, observer: Box::new(Unobserved), back_end: "a mistake".into(), hold: None };
    let members = vec![(faulty.clone(), opened.into()), (good.clone(), open(&good).unwrap())];
    let exports = Exports::start(members, context()).unwrap();
    let _good_client = UnixStream::connect(&good_socket).unwrap();
    let _client = UnixStream::connect(&socket).unwrap();
    let report =
        wait_for(&exports, |report| report.devices[0].failed.is_some() && report.devices[1].connected);
    assert_eq!(report.devices[0].failed.as_deref(), Some("a mistake"));
    assert!(!report.devices[0].connected && report.devices[1].failed.is_none());
    // The same devices are asked for: what has failed is made anew, and the other one left alone.
    exports.reload(vec![faulty, good], &Restarts::All);
    let report = wait_for(&exports, |report| !report.last_reload.is_empty());
    assert_eq!(report.last_reload, "1 unchanged, 0 removed, 1 added, 0 failed");
    assert!(report.devices.iter().all(|device| device.failed.is_none()));
    assert!(report.devices[1].connected);
    let _client = UnixStream::connect(&socket).unwrap();
    wait_for(&exports, |report| report.devices[0].connected);
    stop(&exports);
}

/// Storage that answers when told to. Sessions of its device end only then.
#[derive(Clone, Default)]
struct Storage(Arc<(std::sync::Mutex<bool>, std::sync::Condvar)>);

impl Storage {
    fn answer(&self) {
        *self.0.0.lock().unwrap() = true;
        self.0.1.notify_all();
    }

    fn wait(&self) {
        drop(self.0.1.wait_while(self.0.0.lock().unwrap(), |answers| !*answers).unwrap());
    }
}

struct Slow(Storage);

impl Device for Slow {
    fn device_id(&self) -> u32 {
        paravane_spec::device_id::RNG
    }

    fn features(&self) -> u64 {
        0
    }

    fn queue_sizes(&self) -> &[u16] {
        &[16]
    }

    fn read_config(&self, _offset: u32, _out: &mut [u8]) {}

    fn start_queue(&mut self, _index: u16, _features: u64) -> io::Result<Box<dyn QueueHandler>> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn reset(&mut self) {
        self.0.wait();
    }

    fn refresh(&mut self) -> io::Result<bool> {
        self.0.wait();
        Ok(false)
    }
}

/// A device whose storage hangs, and another one, each with a client.
fn slow_and_good(folder: &Path) -> (Exports, Storage, [DeviceSpec; 2], [UnixStream; 2]) {
    let ((slow, slow_socket), (good, good_socket)) = (spec(folder, "slow"), spec(folder, "good"));
    let storage = Storage::default();
    let device = Box::new(Slow(storage.clone()));
    let opened = Opened { device, observer: Box::new(Unobserved), back_end: "slow".into(), hold: None };
    let members = vec![(slow.clone(), opened.into()), (good.clone(), open(&good).unwrap())];
    let exports = Exports::start(members, context()).unwrap();
    let clients = [&slow_socket, &good_socket].map(|socket| UnixStream::connect(socket).unwrap());
    wait_for(&exports, |report| report.devices.iter().all(|device| device.connected));
    (exports, storage, [slow, good], clients)
}

#[test]
fn a_device_that_does_not_stop_delays_no_other_and_its_successor_starts_by_itself() {
    let folder = tempfile::tempdir().unwrap();
    let (exports, storage, [slow, good], _clients) = slow_and_good(folder.path());
    // It is changed, and another one is added.
    let moved = Endpoint::Listen(folder.path().join("moved"));
    let changed = DeviceSpec { workers: Some(2), endpoint: moved, ..slow.clone() };
    let (new, new_socket) = spec(folder.path(), "new");
    exports.reload(vec![changed.clone(), good.clone(), new.clone()], &Restarts::All);
    let report = wait_for(&exports, |report| report.devices.iter().any(|device| device.name == "new"));
    assert!(new_socket.exists() && !folder.path().join("slow").exists());
    let stopping = report.devices.iter().find(|device| device.name == "slow").unwrap();
    assert!(stopping.stopping.is_some() && stopping.workers == 1, "{report:?}");
    assert_eq!(report.waiting.len(), 1, "{report:?}");
    assert!(report.waiting[0].name == "slow" && report.waiting[0].why.contains("device slow to stop"));
    // The outcome is reported, with what is pending.
    let report = wait_for(&exports, |report| !report.last_reload.is_empty());
    let outcome = "1 unchanged, 0 removed, 1 added, 0 failed, 1 still stopping, 1 not started yet";
    assert_eq!(report.last_reload, outcome);
    // The same file once more changes nothing of that.
    exports.reload(vec![changed.clone(), good.clone(), new.clone()], &Restarts::All);
    let report = wait_for(&exports, |report| report.last_reload.starts_with("2 unchanged"));
    assert_eq!((report.devices.len(), report.waiting.len()), (3, 1), "{report:?}");
    storage.answer();
    let report = wait_for(&exports, |report| report.waiting.is_empty() && report.devices.len() == 3);
    assert!(report.devices.iter().all(|device| device.stopping.is_none()), "{report:?}");
    assert_eq!(report.devices[0].workers, 2);
    assert!(report.devices[1].connected, "it was left alone");
    stop(&exports);
}

#[test]
fn storage_that_hangs_delays_no_look_at_the_others() {
    let folder = tempfile::tempdir().unwrap();
    let (exports, storage, [slow, good], _clients) = slow_and_good(folder.path());
    exports.refresh();
    // It is taken out while its thread waits.
    exports.reload(vec![good], &Restarts::All);
    let report = wait_for(&exports, |report| !report.last_reload.is_empty());
    assert!(report.devices.iter().any(|device| device.name == slow.name && device.stopping.is_some()));
    exports.begin_stop();
    wait_for(&exports, |report| report.devices.len() == 1);
    assert!(!exports.is_gone());
    storage.answer();
    wait_for(&exports, |report| report.devices.is_empty());
    assert!(exports.is_gone());
}
