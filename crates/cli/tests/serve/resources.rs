//! Resources that a client can consume, and those reserved for others.
//!
//! SECURITY.md lists them.
use crate::daemon::{Daemon, Folder, patience, skip, status};
use crate::driver::Random;
use crate::raw::{Machine, Raw};
use paravane_ring::Segment;
use paravane_spec::feature::{ACCESS_PLATFORM, VERSION_1};
use paravane_spec::vhost_user::{
    Inflight, Iotlb, LogArea, MemoryRegion, MemoryTable, SingleRegion, VringAddr, VringState, iotlb, request,
};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit};
use serde_json::Value;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};
use zerocopy::{FromBytes, IntoBytes};

const MIB: u64 = 1 << 20;
const TIB: u64 = 1 << 40;
/// Bytes of an image that `Folder::image` makes.
const DISK: usize = 1 << 20;

/// A sparse file.
fn memfd(size: u64) -> OwnedFd {
    let file = memfd_create("resources", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, size).unwrap();
    file
}

/// Devices of one daemon.
struct Host {
    daemon: Daemon,
    folder: Folder,
}

impl Host {
    /// Devices of this kind and these names.
    fn start(kind: &str, names: &[&str], options: &[&str]) -> Self {
        let folder = Folder::new();
        let mut file = String::new();
        for name in names {
            folder.image(&format!("{name}.img"));
            file += &format!("[[{kind}]]\nname = \"{name}\"\nsocket = \"{name}.sock\"\n");
            if kind == "blk" {
                file += &format!("image = \"{name}.img\"\n");
            }
        }
        let (file, control) = (folder.write("d.toml", &file), folder.text("control"));
        let daemon = Daemon::start(&[&["--config", &file, "--control", &control], options].concat());
        Self { daemon, folder }
    }

    fn disks(names: &[&str], options: &[&str]) -> Self {
        Self::start("blk", names, options)
    }

    fn connect(&self, name: &str) -> Raw {
        Raw::connect(&self.folder.path(&format!("{name}.sock")))
    }

    /// A client that only shares memory.
    fn sharer(&self, name: &str) -> Raw {
        let raw = self.connect(name);
        raw.begin(0);
        raw
    }

    /// Status of a device.
    fn device(&self, name: &str) -> Value {
        let status = status(&self.folder.text("control"));
        let devices = status["devices"].as_array().unwrap();
        devices.iter().find(|device| device["name"] == name).unwrap().clone()
    }

    fn wait_for(&self, name: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        let end = Instant::now() + patience();
        loop {
            let device = self.device(name);
            if wanted(&device) {
                return device;
            }
            assert!(Instant::now() < end, "still {device}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// What it said of the last session of a device that it ended.
    fn last_error(&self, name: &str) -> String {
        let device = self.wait_for(name, |device| device["connected"] == false);
        device["last_error"].as_str().unwrap_or_default().to_owned()
    }

    /// A number of kB in the process's status.
    fn kilobytes(&self, field: &str) -> u64 {
        let text = std::fs::read_to_string(format!("/proc/{}/status", self.daemon.pid())).unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix(&format!("{field}:"))).unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    }

    /// Bytes of its mappings whose names contain `name`.
    fn mapped(&self, name: &str) -> u64 {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", self.daemon.pid())).unwrap();
        let size = |line: &str| {
            let (start, end) = line.split_whitespace().next().unwrap().split_once('-').unwrap();
            let [start, end] = [start, end].map(|number| u64::from_str_radix(number, 16).unwrap());
            end - start
        };
        maps.lines().filter(|line| line.contains(name)).map(size).sum()
    }

    /// Descriptors of the process.
    fn files(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.daemon.pid())).unwrap().count()
    }

    /// Threads of the process, without those that the kernel has for io_uring, and without spare I/O
    /// threads: a busy host makes I/O threads look blocked.
    fn threads(&self) -> usize {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.daemon.pid())).unwrap();
        let names = tasks.filter_map(|task| std::fs::read_to_string(task.unwrap().path().join("comm")).ok());
        names.filter(|name| !name.starts_with("iou-") && !name.starts_with("io-spare")).count()
    }

    /// A working client on a free device.
    fn neighbour(&self, name: &str) -> Neighbour {
        let raw = self.connect(name);
        let mut machine = Machine::new(0, 64, 4);
        machine.attach(&raw, 0, false);
        let model = std::fs::read(self.folder.path(&format!("{name}.img"))).unwrap();
        Neighbour { _raw: raw, machine, model, random: Random::new(3) }
    }
}

struct Neighbour {
    _raw: Raw,
    machine: Machine,
    model: Vec<u8>,
    random: Random,
}

impl Neighbour {
    fn works(&mut self) {
        for _ in 0..10 {
            self.machine.fill(DISK, &mut self.random);
            self.machine.finish(&mut self.model);
        }
    }
}

/// Shares a part of a file at an address that no other part has.
///
/// `false`: it is refused, and the session over.
fn share(raw: &Raw, number: u64, size: u64, file: &OwnedFd) -> bool {
    let at = (1 << 46) + number * (1 << 40);
    let region = MemoryRegion { gpa: at, size, user: at, offset: 0 };
    let region = SingleRegion { padding: 0, region };
    if raw.send(request::ADD_MEM_REG, region.as_bytes(), &[file.as_fd()]).is_err() {
        return false;
    }
    raw.receive().is_ok_and(|(_, reply, _)| reply == 0_u64.as_bytes())
}

/// Shares regions until one is refused; then connects again with the accepted.
fn share_all_that_can_be(host: &Host, name: &str, size: u64) -> (Raw, u64) {
    let file = memfd(size);
    let raw = host.sharer(name);
    let count = (0..64).take_while(|number| share(&raw, *number, size, &file)).count() as u64;
    drop(raw);
    let raw = host.sharer(name);
    assert!((0..count).all(|number| share(&raw, number, size, &file)));
    (raw, count)
}

#[test]
fn a_client_cannot_map_more_than_its_share() {
    let host = Host::disks(&["greedy", "good"], &[]);
    let mut good = host.neighbour("good");
    let raw = host.sharer("greedy");
    let huge = memfd(64 * TIB);
    assert!(!share(&raw, 0, 64 * TIB, &huge), "half of the address space was given to one client");
    let error = host.last_error("greedy");
    assert!(
        error.contains("64 TiB more for this client") && error.contains("raise max-client-memory"),
        "{error}"
    );
    good.works();

    let limit = host.device("greedy")["max_memory"].as_u64().unwrap();
    let raw = host.sharer("greedy");
    let quarter = (limit / 4) & !0xfff;
    let at = |number: u64| (number << 47, number << 47);
    for number in 0..4 {
        let (gpa, user) = at(number);
        let region =
            SingleRegion { padding: 0, region: MemoryRegion { gpa, size: quarter, user, offset: 0 } };
        raw.say(request::ADD_MEM_REG, &region, &[huge.as_fd()]);
    }
    assert_eq!(host.device("greedy")["memory"], 4 * quarter);
    assert!(!share(&raw, 63, MIB, &huge));
    good.works();
    drop((good, raw));
    host.wait_for("greedy", |device| device["memory"] == 0);
    host.neighbour("good").works();
}

#[test]
fn what_maps_a_log_or_memory_in_flight_counts_as_well() {
    let host = Host::disks(&["greedy"], &["--max-client-memory", "1M"]);
    let file = memfd(TIB);
    let raw = host.sharer("greedy");
    let log = LogArea { size: 2 * MIB, offset: 0 };
    raw.send(request::SET_LOG_BASE, log.as_bytes(), &[file.as_fd()]).unwrap();
    assert!(raw.is_closed());
    let error = host.last_error("greedy");
    assert!(error.contains("2 MiB more") && error.contains("limit 1 MiB"), "{error}");

    let raw = host.sharer("greedy");
    let inflight = Inflight { size: TIB, queues: 1, queue_size: 64, ..Inflight::default() };
    raw.send(request::SET_INFLIGHT_FD, inflight.as_bytes(), &[file.as_fd()]).unwrap();
    assert!(raw.is_closed());
    let error = host.last_error("greedy");
    assert!(error.contains("1 TiB more") && error.contains("raise max-client-memory"), "{error}");
}

#[test]
fn greedy_clients_leave_the_others_their_share() {
    let options = ["--max-memory", "1G", "--max-client-memory", "1G"];
    let host = Host::disks(&["a", "b", "c", "good"], &options);
    // Half of a gigabyte is reserved for four devices, the other half is first come, first served.
    let greedy = ["a", "b", "c"].map(|name| share_all_that_can_be(&host, name, 64 * MIB));
    assert_eq!(greedy.each_ref().map(|(_, count)| *count), [10, 2, 2]);
    let mut good = host.neighbour("good");
    good.works();
    drop(good);
    let raw = host.sharer("good");
    let file = memfd(64 * MIB);
    assert!(share(&raw, 0, 64 * MIB, &file) && share(&raw, 1, 64 * MIB, &file));
    assert!(!share(&raw, 2, 64 * MIB, &file));
    let error = host.last_error("good");
    assert!(
        error.contains("limit of 1 GiB for all clients") && error.contains("raise max-memory"),
        "{error}"
    );
    drop(greedy);
    host.wait_for("a", |device| device["connected"] == false);
    host.neighbour("good").works();
}

#[test]
fn a_client_replaces_its_memory_within_its_share() {
    let host = Host::disks(&["vm"], &[]);
    let raw = host.connect("vm");
    let mut machine = Machine::new(0, 64, 4);
    machine.attach(&raw, 0, false);
    // Old and new are mapped at the same time.
    let size = (host.device("vm")["max_memory"].as_u64().unwrap() / 2 - 64 * MIB) & !0xfff;
    let table = |regions: &[MemoryRegion]| {
        let head = MemoryTable { regions: regions.len() as u32, padding: 0 };
        [head.as_bytes(), regions.as_bytes()].concat()
    };
    let more = MemoryRegion { gpa: 1 << 46, size, user: 1 << 46, offset: 0 };
    let mut model = vec![0; DISK];
    let mut random = Random::new(5);
    for _ in 0..5 {
        let file = memfd(size);
        let table = table(&[machine.region(), more]);
        raw.say(request::SET_MEM_TABLE, &*table, &[machine.memory.fd().unwrap(), file.as_fd()]);
        machine.fill(DISK, &mut random);
        machine.finish(&mut model);
    }
    assert_eq!(host.device("vm")["protocol_errors"], 0);
}

#[test]
fn clients_with_all_their_regions_leave_room_for_others() {
    const TEST: &str = "clients_with_all_their_regions_leave_room_for_others";
    const CLIENTS: usize = 66;
    // A descriptor for each region, and half of them is what clients may have.
    let most = getrlimit(Resource::Nofile).maximum;
    if most.is_some_and(|most| most < 20_000) {
        return skip(TEST, format!("a process may have {most:?} descriptors, and 20000 are needed"));
    }
    let names: Vec<_> = (0..CLIENTS).map(|number| format!("d{number}")).collect();
    let names: Vec<_> = names.iter().map(String::as_str).collect();
    let host = Host::start("rng", &names, &[]);
    let file = memfd(MIB);
    let clients: Vec<_> = names
        .iter()
        .map(|name| {
            let raw = host.sharer(name);
            for number in 0..64 {
                assert!(share(&raw, number, MIB, &file), "region {number} of {name}");
            }
            raw
        })
        .collect();
    assert_eq!(host.device("d65")["memory"], 64 * MIB);
    drop(clients);
    host.wait_for("d0", |device| device["memory"] == 0);
}

/// The scattered pages of an IOMMU: each takes tables of its own.
fn scattered(number: u64) -> Iotlb {
    let iova = number << 30;
    Iotlb { iova, size: 4096, user: 1 << 46, perm: 3, kind: iotlb::UPDATE, ..Iotlb::default() }
}

#[test]
fn a_full_address_space_is_one_clients_error() {
    // The limits are such that they do not help.
    let host =
        Host::disks(&["greedy", "good", "late"], &["--max-memory", "100T", "--max-client-memory", "100T"]);
    let mut good = host.neighbour("good");
    good.works();
    let space = host.kilobytes("VmSize") * 1024 + 1024 * MIB;
    let limit = Rlimit { current: Some(space), maximum: Some(space) };
    prlimit(Pid::from_raw(host.daemon.pid() as i32), Resource::As, limit).unwrap();

    // What is refused ends the session; those before it can be had again.
    let file = memfd(TIB);
    let mut sizes: Vec<u64> = Vec::new();
    let begin = |sizes: &[u64]| {
        let raw = host.connect("greedy");
        raw.begin(ACCESS_PLATFORM);
        let mapped = (0..).zip(sizes).all(|(number, size)| share(&raw, number, *size, &file));
        mapped.then_some(raw)
    };
    let mut size = 1024 * MIB;
    while size >= 4096 && sizes.len() < 63 {
        sizes.push(size);
        if begin(&sizes).is_none() {
            sizes.pop();
            size /= 2;
        }
    }
    let error = host.last_error("greedy");
    assert!(error.contains("would be left to the process") || error.contains("Cannot allocate"), "{error}");
    let raw = begin(&sizes).expect("as before");
    let mut refused = 0;
    for number in 0..20_000 {
        if raw.send(request::IOTLB_MSG, scattered(number).as_bytes(), &[]).is_err() {
            break;
        }
        let Ok((_, reply, _)) = raw.receive() else { break };
        refused += u64::read_from_bytes(&reply).unwrap();
    }
    println!("{refused} translations were refused, {} regions mapped", sizes.len());
    good.works();
    assert_eq!(host.device("good")["connected"], true);
    drop(raw);
    host.wait_for("greedy", |device| device["connected"] == false && device["memory"] == 0);
    host.neighbour("late").works();
    host.neighbour("greedy").works();
    assert_eq!(host.device("good")["protocol_errors"], 0);
}

#[test]
fn a_clients_translations_take_bounded_memory() {
    let host = Host::disks(&["greedy"], &[]);
    let before = host.kilobytes("VmRSS");
    let raw = host.connect("greedy");
    raw.begin(ACCESS_PLATFORM);
    assert!(share(&raw, 0, MIB, &memfd(MIB)));
    for number in 0..10_000 {
        raw.say(request::IOTLB_MSG, scattered(number).as_bytes(), &[]);
    }
    let grown = host.kilobytes("VmRSS") - before;
    // Tables for all of them would take 80 MiB and more; 64 MiB is the most that one client has.
    assert!(grown < 72 << 10, "{grown} kB for translations");
}

#[test]
fn the_largest_queues_take_bounded_memory_and_give_it_back() {
    const SIZE: u64 = 32768;
    let folder = Folder::new();
    let (image, socket, control) = (folder.image("vm.img"), folder.text("s"), folder.text("control"));
    let arguments = ["blk", "--image", &image, "--socket", &socket, "--queues", "4", "--control", &control];
    let engine: &[&str] = match paravane_device::blk::io_uring_available() {
        Ok(()) => &["--engine", "io_uring"],
        Err(_) => &[],
    };
    let daemon = Daemon::start(&[&arguments[..], engine, &["--queue-size", "32768"]].concat());
    let host = Host { daemon, folder };
    // For each entry of a ring: one of 64 bytes to submit, its index, and two of 16 bytes to complete.
    let most = 4 * (SIZE * (64 + 4 + 2 * 16) + (1 << 16));
    let file = memfd(4 * MIB);
    let before = host.kilobytes("VmData");
    let session = || {
        let raw = Raw::connect(&host.folder.path("s"));
        raw.begin(VERSION_1);
        assert!(share(&raw, 0, 4 * MIB, &file));
        let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
        for index in 0..4 {
            let state = |num| VringState { index, num };
            raw.say(request::SET_VRING_NUM, &state(SIZE as u32), &[]);
            let desc = 1 << 46;
            let (driver, device) = (desc + 16 * SIZE, desc + 2 * MIB);
            let addr = VringAddr { index, flags: 0, desc, driver, device, log: 0 };
            raw.say(request::SET_VRING_ADDR, &addr, &[]);
            raw.say(request::SET_VRING_KICK, &u64::from(index), &[event.as_fd()]);
            raw.say(request::SET_VRING_ENABLE, &state(1), &[]);
        }
        assert!(host.device("blk")["queues"].as_array().unwrap().iter().all(|queue| queue["live"] == true));
        let grown = host.kilobytes("VmData").saturating_sub(before);
        let rings = host.mapped("io_uring");
        assert!(rings <= most && (rings > 0 || engine.is_empty()), "{rings} bytes of rings, at most {most}");
        assert_eq!((host.kilobytes("VmLck"), host.kilobytes("VmPin")), (0, 0), "nothing else is locked");
        drop(raw);
        host.wait_for("blk", |device| device["connected"] == false);
        assert_eq!(host.mapped("io_uring"), 0);
        grown
    };
    let first = session();
    assert!(first < 4 * (16 << 10), "{first} kB for four queues");
    for _ in 0..10 {
        session();
    }
    let last = session();
    assert!(last < first + (16 << 10), "{first} kB at first, {last} kB in the end");
}

/// A page of each 2 MiB is used, which takes the most tables.
#[test]
fn page_tables_take_a_part_of_what_is_mapped() {
    const SIZE: u64 = 1 << 30;
    let host = Host::start("rng", &["a"], &[]);
    let raw = host.connect("a");
    let mut machine = Machine::new(0, 64, 1);
    machine.attach(&raw, 0, false);
    let before = host.kilobytes("VmPTE");
    assert!(share(&raw, 0, SIZE, &memfd(SIZE)));
    for number in 0..SIZE / (2 * MIB) {
        let addr = (1 << 46) + number * 2 * MIB;
        machine.queue.add(&[], &[Segment { addr, len: 1 }]).unwrap();
        machine.kick();
        while machine.queue.pop_used().unwrap().is_none() {
            machine.wait(patience());
        }
    }
    let grown = host.kilobytes("VmPTE") - before;
    let most = (SIZE >> 10) / 512;
    assert!(grown > most / 2, "{grown} kB: is that all?");
    // A table of each higher level.
    assert!(grown <= most + 64, "{grown} kB of page tables, at most {most}");
    drop(raw);
    host.wait_for("a", |device| device["connected"] == false);
    assert!(host.kilobytes("VmPTE") <= before + 64);
}

#[test]
fn clients_take_no_threads_and_few_descriptors() {
    let host = Host::disks(&["a", "b"], &[]);
    let (threads, files) = (host.threads(), host.files());
    let raw = host.connect("a");
    let mut machine = Machine::new(0, 64, 4);
    machine.attach(&raw, 0, true);
    let file = memfd(MIB);
    for number in 0..63 {
        assert!(share(&raw, number, MIB, &file));
    }
    // A message that does not end, with descriptors on each byte.
    let many = [file.as_fd(); 8];
    raw.send_bytes(&[request::SET_MEM_TABLE as u8], &many).unwrap();
    host.neighbour("b").works();
    assert_eq!(host.threads(), threads);
    let taken = host.files() - files;
    // 64 regions; a queue's kick twice, call and error; alarm, ticker, in-flight memory, socket; 8;
    // the engine's.
    assert!(taken <= 96, "{taken} descriptors");
    drop(raw);
    host.wait_for("a", |device| device["connected"] == false);
    host.wait_for("b", |device| device["connected"] == false);
    let end = Instant::now() + patience();
    while host.files() > files {
        assert!(Instant::now() < end, "{} descriptors are left", host.files() - files);
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn clients_that_wait_for_their_turn_take_nothing() {
    let host = Host::disks(&["a", "b"], &[]);
    let _first = host.sharer("a");
    let (threads, files) = (host.threads(), host.files());
    let socket = host.folder.path("a.sock");
    let mut waiting = Vec::new();
    // The socket takes some, and refuses the others.
    for _ in 0..100 {
        use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let end = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
        if connect(&end, &SocketAddrUnix::new(&*socket).unwrap()).is_ok() {
            waiting.push(UnixStream::from(end));
        }
    }
    assert!((1..=32).contains(&waiting.len()), "{} wait", waiting.len());
    assert_eq!((host.threads(), host.files()), (threads, files));
    assert_eq!(host.device("a")["sessions"], 1);
    host.neighbour("b").works();
}

/// All devices are on one I/O thread. A client that blocks it is disconnected, and the others go on.
#[test]
fn a_full_eventfd_blocks_no_thread_that_devices_share() {
    let host = Host::disks(&["greedy", "good"], &["--io-threads", "1"]);
    let mut good = host.neighbour("good");
    for _ in 0..3 {
        let mut greedy = host.neighbour("greedy");
        let full = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
        rustix::io::write(&full, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        // The session may end before the answer.
        let _ = greedy._raw.send(request::SET_VRING_CALL, 0_u64.as_bytes(), &[full.as_fd()]);
        greedy.machine.fill(DISK, &mut greedy.random);
        for _ in 0..50 {
            good.works();
        }
        let error = host.last_error("greedy");
        assert!(error.contains("call eventfd"), "{error}");
    }
    let device = host.device("good");
    assert_eq!((&device["sessions"], &device["protocol_errors"]), (&1.into(), &0.into()));
}
