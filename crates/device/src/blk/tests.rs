//! Requests as a driver makes them, and what must come back.
mod block_device;
mod clusters;
mod copies;
mod data;
mod direct;
mod disk;
mod fake_queue;
mod full;
mod held;
mod images;
mod in_flight;
mod in_place;
mod latencies;
mod limited;
mod lost;
mod malformed;
mod mapped;
mod model;
mod open;
mod qcow2;
mod qcow2_kinds;
mod resize;
mod snapshot;
mod stores;

use super::handler::{DiskQueue, Handler};
use super::{Blk, BlkConfig, EngineChoice, io_uring_available};
use crate::ServeError;
use crate::rig::{DATA, Rig, segment, skipped};
use fake_queue::FakeQueue;
use held::{Held, Orders};
use paravane_dma::Segment;
use paravane_ring::QueueError;
use paravane_ring::driver::Used;
use paravane_spec::blk::{self, DiscardRange, RequestHeader};
use std::io::Write;
use std::path::Path;
use std::sync::{Arc, LazyLock, Mutex};
use tempfile::NamedTempFile;
use zerocopy::IntoBytes;

/// Where the parts of a plain request lie.
const HEADER: u64 = DATA;
const STATUS: u64 = DATA + 0x1000;
const PAYLOAD: u64 = DATA + 0x10_0000;
const ROOM: u64 = DATA + 0x20_0000;

/// What a status byte is before the device writes it.
const UNTOUCHED: u8 = 0xee;

/// How a disk is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Way {
    engine: EngineChoice,
    direct: bool,
    registered_buffers: bool,
}

impl From<EngineChoice> for Way {
    fn from(engine: EngineChoice) -> Self {
        Self { engine, direct: false, registered_buffers: false }
    }
}

/// The ways that this host lets us test.
fn ways(test: &str) -> Vec<Way> {
    let mut ways = vec![EngineChoice::Immediate.into(), EngineChoice::Threads.into()];
    let direct = &*DIRECT_BLOCK;
    match direct {
        Ok(512) => ways.push(Way { direct: true, ..EngineChoice::Immediate.into() }),
        Ok(block) => skipped(&format!("{test} past the page cache"), format!("it takes blocks of {block}")),
        Err(why) => skipped(&format!("{test} past the page cache"), why),
    }
    match io_uring_available() {
        Ok(()) => {
            let plain = Way::from(EngineChoice::IoUring);
            let registered = Way { registered_buffers: true, ..plain };
            ways.extend([plain, registered]);
            if let Ok(512) = direct {
                ways.push(Way { direct: true, ..registered });
            }
        }
        Err(why) => skipped(&format!("{test} with io_uring"), why.to_string()),
    }
    ways
}

/// Whether its image is in memory, and copied from and to directly.
fn is_mapped(disk: &Blk) -> bool {
    disk.engine() == "immediate, mapped"
}

/// Bytes of a block past the page cache, where our files are.
static DIRECT_BLOCK: LazyLock<Result<u64, String>> = LazyLock::new(|| {
    let file = image(&[0; 4096]);
    let disk = Blk::open(BlkConfig { direct: true, ..config(&file, EngineChoice::Immediate) });
    disk.map(|disk| disk.current.image().file.block).map_err(|why| why.to_string())
});

/// Bytes that tell where they are.
fn pattern(len: usize, seed: u64) -> Vec<u8> {
    (0..len as u64)
        .map(|at| ((at ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8 ^ seed as u8)
        .collect()
}

fn image(content: &[u8]) -> NamedTempFile {
    let mut file = NamedTempFile::new().unwrap();
    file.write_all(content).unwrap();
    file
}

fn content(file: &NamedTempFile) -> Vec<u8> {
    std::fs::read(file.path()).unwrap()
}

fn config(file: &NamedTempFile, way: impl Into<Way>) -> BlkConfig {
    config_at(file.path(), way)
}

fn config_at(path: &Path, way: impl Into<Way>) -> BlkConfig {
    let Way { engine, direct, registered_buffers } = way.into();
    BlkConfig { engine, direct, registered_buffers, ..BlkConfig::new(path) }
}

fn rig(file: &NamedTempFile, way: impl Into<Way>) -> Rig<Blk> {
    Rig::new(Blk::open(config(file, way)).unwrap())
}

fn header(kind: u32, sector: u64) -> [u8; 16] {
    let header = RequestHeader { kind: kind.to_le(), reserved: 0, sector: sector.to_le() };
    header.as_bytes().try_into().unwrap()
}

fn range(sector: u64, num_sectors: u32, flags: u32) -> Vec<u8> {
    let range =
        DiscardRange { sector: sector.to_le(), num_sectors: num_sectors.to_le(), flags: flags.to_le() };
    range.as_bytes().to_vec()
}

/// The handler of a queue, with a host that follows the test's orders.
fn held_handler(disk: &Blk, orders: Arc<Mutex<Orders>>, features: u64) -> Handler {
    let (follower, attached) = disk.current.join(256).unwrap();
    let engine = Box::new(FakeQueue::new(Held { image: attached.image.clone(), orders }));
    let (id, errors) = (disk.serial.get(), disk.errors());
    let (index, size, limiter) = (0, 256, None);
    Handler::new(DiskQueue { index, size, features, follower, attached, engine, id, limiter, errors })
        .unwrap()
}

/// An answered request.
#[derive(Debug, PartialEq, Eq)]
struct Answer {
    status: u8,
    used: u32,
    data: Vec<u8>,
}

impl Rig<Blk> {
    /// A request in common framing: header, payload, room and status.
    ///
    /// Each has a descriptor.
    fn request(&mut self, kind: u32, sector: u64, payload: &[u8], room: usize) -> Answer {
        self.poke(HEADER, &header(kind, sector));
        self.poke(PAYLOAD, payload);
        self.poke(ROOM, &vec![UNTOUCHED; room]);
        self.poke(STATUS, &[UNTOUCHED]);
        let mut readable = vec![segment(HEADER, 16)];
        if !payload.is_empty() {
            readable.push(segment(PAYLOAD, payload.len()));
        }
        let mut writable = Vec::new();
        if room > 0 {
            writable.push(segment(ROOM, room));
        }
        writable.push(segment(STATUS, 1));
        let used = self.one(&readable, &writable).unwrap();
        Answer { status: self.peek(STATUS, 1)[0], used: used.len, data: self.peek(ROOM, room) }
    }

    /// Status of a request that returns no data.
    fn status(&mut self, kind: u32, sector: u64, payload: &[u8]) -> u8 {
        let answer = self.request(kind, sector, payload, 0);
        assert_eq!(answer.used, 1, "the status byte is what was written");
        answer.status
    }

    fn read(&mut self, sector: u64, len: usize) -> Vec<u8> {
        let answer = self.request(blk::T_IN, sector, &[], len);
        assert_eq!((answer.status, answer.used), (blk::S_OK, len as u32 + 1));
        answer.data
    }

    /// One chain, whatever it is.
    fn one(&mut self, readable: &[Segment], writable: &[Segment]) -> Result<Used, ServeError> {
        let id = self.add(readable, writable);
        let used = self.run()?;
        assert_eq!(used.len(), 1);
        assert_eq!(used[0].id, id);
        Ok(used[0])
    }

    /// One chain that must latch the queue, for good.
    fn latches(&mut self, readable: &[Segment], writable: &[Segment]) -> QueueError {
        let error = match self.one(readable, writable) {
            Err(ServeError::Queue(error)) => error,
            other => panic!("the queue did not latch: {other:?}"),
        };
        assert_eq!(self.live.queue().error(), Some(error));
        match self.serve() {
            Err(ServeError::Queue(again)) => assert_eq!(again, error),
            other => panic!("the queue did not stay latched: {other:?}"),
        }
        error
    }
}
