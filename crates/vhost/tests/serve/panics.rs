//! A faulty device, and another one beside it.
use crate::driver::Random;
use crate::raw::{Machine, Raw};
use crate::rig::{self, DISK, Rig};
use paravane_device::blk::{Blk, BlkConfig};
use paravane_device::{Device, MappedQueue, QueueHandler, Rest, ServeError, Served, WakeSet};
use paravane_export::{Endpoint, Export, ExportError, ExportStatus};
use paravane_spec::vhost_user::{ConfigAccess, request};
use paravane_test_support::wait_until;
use paravane_vhost::ExportConfig;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use zerocopy::IntoBytes;

/// The place of the next panic, in a disk that works otherwise.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(u8)]
enum Blows {
    /// The service of a queue, with requests in flight.
    Queue = 1,
    /// That, and then the wait for what is in flight.
    QueueAndItsEnd,
    /// The configuration space that the client reads.
    Protocol,
}

#[derive(Clone, Default)]
struct Fuse(Arc<AtomicU8>);

impl Fuse {
    fn light(&self, what: Blows) {
        self.0.store(what as u8, Ordering::Relaxed);
    }

    fn is_lit(&self, what: Blows) -> bool {
        self.0.load(Ordering::Relaxed) == what as u8
    }
}

struct Faulty {
    disk: Blk,
    fuse: Fuse,
}

impl Device for Faulty {
    fn device_id(&self) -> u32 {
        self.disk.device_id()
    }

    fn features(&self) -> u64 {
        self.disk.features()
    }

    fn queue_sizes(&self) -> &[u16] {
        self.disk.queue_sizes()
    }

    fn read_config(&self, offset: u32, out: &mut [u8]) {
        assert!(!self.fuse.is_lit(Blows::Protocol), "the protocol has blown");
        self.disk.read_config(offset, out);
    }

    fn start_queue(&mut self, index: u16, features: u64) -> io::Result<Box<dyn QueueHandler>> {
        let (queue, fuse) = (self.disk.start_queue(index, features)?, self.fuse.clone());
        Ok(Box::new(FaultyQueue { queue, fuse }))
    }
}

struct FaultyQueue {
    queue: Box<dyn QueueHandler>,
    fuse: Fuse,
}

impl QueueHandler for FaultyQueue {
    fn serve(&mut self, queue: &mut MappedQueue) -> Result<Served, ServeError> {
        let served = self.queue.serve(queue)?;
        let blows = self.fuse.is_lit(Blows::Queue) || self.fuse.is_lit(Blows::QueueAndItsEnd);
        assert!(!blows || served.taken == 0, "the queue has blown");
        Ok(served)
    }

    fn register(&mut self, wakes: Option<&WakeSet>) -> io::Result<()> {
        self.queue.register(wakes)
    }

    fn rest(&mut self, arm: bool) -> Rest {
        self.queue.rest(arm)
    }

    fn at_rest(&self) -> bool {
        self.queue.at_rest()
    }

    fn drain(&mut self, queue: &mut MappedQueue, complete: bool) -> Served {
        let served = self.queue.drain(queue, complete);
        assert!(!self.fuse.is_lit(Blows::QueueAndItsEnd), "its end has blown");
        served
    }
}

/// A faulty disk of two queues, each with its own thread.
fn faulty(folder: &Path) -> (Fuse, Export) {
    let image = folder.join("faulty.img");
    std::fs::write(&image, vec![0; DISK]).unwrap();
    let (fuse, config) = (Fuse::default(), BlkConfig { queues: 2, ..BlkConfig::new(image) });
    let disk = Faulty { disk: Blk::open(config).unwrap(), fuse: fuse.clone() };
    let endpoint = Endpoint::Listen(folder.join("faulty.sock"));
    let mut config = ExportConfig::new("faulty", endpoint);
    config.workers = 2;
    (fuse, Export::start(config, Box::new(disk)).unwrap())
}

fn wait_for(export: &Export, wanted: impl Fn(&ExportStatus) -> bool) -> ExportStatus {
    rig::wait_for(|| export.status(), wanted)
}

/// The device has ended: no client, no socket, and the image is unlocked.
///
/// Unless the wait for requests in flight failed.
fn has_ended(export: Export, folder: &Path, words: &str, leaks: bool) {
    let socket = folder.join("faulty.sock");
    let status = wait_for(&export, |status| status.failed.is_some() && !status.connected);
    assert_eq!(status.failed.as_deref(), Some(words));
    assert_eq!((status.protocol_errors, status.last_error), (0, None));
    assert!(export.has_failed() && status.queues.iter().all(|queue| !queue.live));
    wait_until("the end of the socket and of the lock", || {
        !socket.exists() && Blk::open(BlkConfig::new(folder.join("faulty.img"))).is_err() == leaks
    });
    assert!(UnixStream::connect(&socket).is_err());
    assert!(matches!(export.join(), Err(ExportError::Failed(message)) if message == words));
    export.stop();
}

#[test]
fn a_panic_ends_its_device_and_no_other() {
    let good = Rig::new(1);
    let (mut model, mut random) = (vec![0; DISK], Random::new(77));
    let mut neighbour = Machine::new(0, 64, 8);
    let raw = Raw::connect(&good.socket());
    neighbour.attach(&raw, 0, false);
    for blows in [Blows::Queue, Blows::QueueAndItsEnd] {
        let folder = tempfile::tempdir().unwrap();
        let (fuse, export) = faulty(folder.path());
        let (mut faulty_model, mut machine) = (vec![0; DISK], Machine::new(0, 64, 8));
        let client = Raw::connect(&folder.path().join("faulty.sock"));
        machine.attach(&client, 0, false);
        for _ in 0..10 {
            machine.fill(DISK, &mut random);
            machine.finish(&mut faulty_model);
        }
        let status = export.status();
        assert!(status.connected && status.failed.is_none() && !export.has_failed());
        fuse.light(blows);
        machine.fill(DISK, &mut random);
        assert!(client.is_closed());
        has_ended(export, folder.path(), "the queue has blown", blows == Blows::QueueAndItsEnd);
        // The other device is not affected.
        for _ in 0..10 {
            neighbour.fill(DISK, &mut random);
            neighbour.finish(&mut model);
        }
    }
    assert_eq!(good.status().sessions, 1);
}

#[test]
fn a_panic_of_the_protocols_thread_ends_the_device() {
    let folder = tempfile::tempdir().unwrap();
    let (fuse, export) = faulty(folder.path());
    let (mut model, mut random, mut machine) = (vec![0; DISK], Random::new(78), Machine::new(0, 64, 8));
    let client = Raw::connect(&folder.path().join("faulty.sock"));
    machine.attach(&client, 0, false);
    machine.fill(DISK, &mut random);
    machine.finish(&mut model);
    // A queue is live then.
    fuse.light(Blows::Protocol);
    let wanted = ConfigAccess { offset: 0, size: 8, flags: 0 };
    client.send(request::GET_CONFIG, &[wanted.as_bytes(), &[0; 8]].concat(), &[]).unwrap();
    assert!(client.is_closed());
    has_ended(export, folder.path(), "the protocol has blown", false);
}
