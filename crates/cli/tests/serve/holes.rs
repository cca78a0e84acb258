//! A client that punches holes into its memory while its queue uses it.
//!
//! ```text
//!   client: populates 1 GiB of its memory and punches it out again, all the time
//!   daemon: a page fault there waits for the end of the hole, 0.15 s; the neighbour does not
//! ```
use crate::daemon::{Daemon, Folder, patience, skip};
use crate::driver::Random;
use crate::raw::{Machine, Raw, get};
use paravane_dma::Region;
use paravane_ring::Segment;
use paravane_spec::vhost_user::{MemoryRegion, SingleRegion, request};
use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, ftruncate, memfd_create};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

/// Bytes of the memory with holes, and where the guest has it.
const SIZE: u64 = 1 << 30;
const FAR: u64 = 1 << 41;
/// Bytes of an image that `Folder::image` makes.
const DISK: usize = 1 << 20;
/// Requests of the neighbour, one after the other, while a request of the client is blocked.
///
/// A thread that serves both queues gets to the client's request before the second or third one.
const IN_A_ROW: usize = 6;

/// A client that does this until it is dropped.
struct Client {
    ends: Arc<AtomicBool>,
    /// Odd while a hole is punched.
    holes: Arc<AtomicU64>,
    /// Odd from a kick until the client has seen that the request is done.
    requests: Arc<AtomicU64>,
    memory: Arc<Region>,
    /// Place of the used ring's index.
    used: u64,
    threads: Vec<JoinHandle<()>>,
}

impl Client {
    fn start(socket: &Path) -> Self {
        let file = memfd_create("holes", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, SIZE).unwrap();
        let raw = Raw::connect(socket);
        let mut machine = Machine::new(0, 64, 1);
        machine.attach(&raw, 0, false);
        let region = MemoryRegion { gpa: FAR, size: SIZE, user: FAR, offset: 0 };
        let region = SingleRegion { padding: 0, region };
        raw.send(request::ADD_MEM_REG, region.as_bytes(), &[file.as_fd()]).unwrap();
        assert_eq!(raw.receive().unwrap().1, 0_u64.as_bytes());
        let (memory, used) = (Arc::clone(&machine.memory), machine.addresses.device - machine.base + 2);
        let (ends, holes, requests) = (Arc::<AtomicBool>::default(), Arc::default(), Arc::default());
        let puncher = {
            let (ends, holes) = (Arc::clone(&ends), Arc::clone(&holes));
            std::thread::spawn(move || punch(&file, &ends, &holes))
        };
        let guest = {
            let (ends, requests) = (Arc::clone(&ends), Arc::clone(&requests));
            std::thread::spawn(move || {
                ask(&mut machine, &ends, &requests);
                drop(raw);
            })
        };
        Self { ends, holes, requests, memory, used, threads: vec![puncher, guest] }
    }

    /// The hole that is being punched now, and the request that waits; `None`: neither.
    fn now(&self) -> Option<(u64, u64)> {
        let [hole, request] = [&self.holes, &self.requests].map(|number| number.load(Ordering::Acquire));
        let done = u16::from_le_bytes(get(&self.memory, self.used, 2).try_into().unwrap());
        let waits = request % 2 == 1 && done == (request / 2) as u16;
        (hole % 2 == 1 && waits).then_some((hole, request))
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        self.threads.drain(..).for_each(|thread| drop(thread.join()));
    }
}

fn punch(file: &OwnedFd, ends: &AtomicBool, holes: &AtomicU64) {
    while !ends.load(Ordering::Relaxed) {
        fallocate(file, FallocateFlags::empty(), 0, SIZE).unwrap();
        holes.fetch_add(1, Ordering::AcqRel);
        fallocate(file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 0, SIZE).unwrap();
        holes.fetch_add(1, Ordering::AcqRel);
    }
}

/// Asks for random bytes, one page after the other.
fn ask(machine: &mut Machine, ends: &AtomicBool, requests: &AtomicU64) {
    let mut random = Random::new(5);
    while !ends.load(Ordering::Relaxed) {
        let addr = FAR + random.below((SIZE / 4096) as usize) as u64 * 4096;
        machine.queue.add(&[], &[Segment { addr, len: 4096 }]).unwrap();
        machine.kick();
        requests.fetch_add(1, Ordering::AcqRel);
        while machine.queue.pop_used().unwrap().is_none() {
            machine.wait(Duration::from_millis(100));
        }
        requests.fetch_add(1, Ordering::AcqRel);
    }
}

fn available_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    line.and_then(|line| line.trim().trim_end_matches(" kB").parse().ok()).unwrap_or(0) << 10
}

#[test]
fn a_client_that_punches_holes_holds_up_no_neighbour() {
    if available_bytes() < 3 * SIZE {
        return skip("a_client_that_punches_holes_holds_up_no_neighbour", "it takes 3 GiB of free memory");
    }
    let folder = Folder::new();
    folder.image("good.img");
    let devices = "[[rng]]\nname = \"holes\"\nsocket = \"holes.sock\"\n\
                   [[blk]]\nname = \"good\"\nimage = \"good.img\"\nsocket = \"good.sock\"\n";
    let file = folder.write("d.toml", devices);
    let mut daemon = Daemon::start(&["--config", &file, "--control", "off", "--io-threads", "1"]);
    let raw = Raw::connect(&folder.path("good.sock"));
    let mut good = Machine::new(0, 64, 1);
    good.attach(&raw, 0, false);
    let mut model = std::fs::read(folder.path("good.img")).unwrap();
    let mut random = Random::new(3);
    let client = Client::start(&folder.path("holes.sock"));
    let end = Instant::now() + 4 * patience();
    let mut seen = 0;
    while seen < 3 {
        assert!(Instant::now() < end, "the neighbour waits for the client's memory; {seen} times it did not");
        let Some(before) = client.now() else {
            std::thread::yield_now();
            continue;
        };
        for _ in 0..IN_A_ROW {
            good.fill(DISK, &mut random);
            good.finish(&mut model);
        }
        seen += usize::from(client.now() == Some(before));
    }
    drop(client);
    drop(raw);
    daemon.wait_for("its queues get a thread of their own");
    assert!(daemon.end().0.success());
}
