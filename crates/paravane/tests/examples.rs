//! Runs each example as a program and checks what a client of it sees.
//!
//! The client is the front end of the crate vhost with the driver side of our queues.
//!
//! `cargo test -p paravane --features full` builds the examples before the tests run. With `--test
//! examples` it does not, and the tests run those that were built last.
use paravane::dma::{Backing, Region, RegionConfig};
use paravane::ring::driver::{DriverConfig, Queue};
use paravane::ring::{Area, DmaArea, Segment};
use paravane::spec::{blk, feature};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::Read;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};
use vhost::vhost_user::message::{VhostUserProtocolFeatures, VhostUserVirtioFeatures};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vmm_sys_util::eventfd::EventFd;

/// How long a program may take for one step.
const PATIENCE: Duration = Duration::from_secs(60);
const GPA: u64 = 0x10_0000;
const MEMORY: u64 = 1 << 20;
/// Offsets of the request and of the answer in the client's memory.
///
/// The queue lies before them.
const REQUEST: usize = 0x8000;
const ANSWER: usize = 0x9000;

/// A running example. It is killed when this is dropped.
struct Example(Child);

impl Example {
    fn start(name: &str, arguments: &[&Path]) -> Self {
        // target/debug/deps/examples-... and target/debug/examples/NAME.
        let test = std::env::current_exe().unwrap();
        let program = test.parent().unwrap().with_file_name("examples").join(name);
        assert!(
            program.exists(),
            "{} is missing: run cargo test -p paravane --features full",
            program.display()
        );
        Self(Command::new(program).args(arguments).stdout(Stdio::piped()).spawn().unwrap())
    }

    /// Waits until it ends, and returns what it has printed.
    fn output(mut self) -> String {
        let mut text = String::new();
        self.0.stdout.take().unwrap().read_to_string(&mut text).unwrap();
        assert!(self.0.wait().unwrap().success(), "{text}");
        text
    }
}

impl Drop for Example {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn memory() -> Arc<Region> {
    let config = RegionConfig { gpa: GPA, size: MEMORY, backing: Backing::Pages, writable: true };
    Region::new(config).unwrap()
}

/// The bytes of a region.
fn area(region: &Region) -> Area {
    // SAFETY: the callers keep the region for as long as they use the area, and no reference is
    // made to its bytes.
    unsafe { Area::new(region.host(), region.size() as usize) }
}

fn connect(socket: &Path) -> Frontend {
    let end = Instant::now() + PATIENCE;
    loop {
        match Frontend::connect(socket, 1) {
            Ok(client) => return client,
            Err(error) => assert!(Instant::now() < end, "{}: {error}", socket.display()),
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn share(client: &mut Frontend, region: &Region, gpa: u64) {
    let info = VhostUserMemoryRegionInfo {
        guest_phys_addr: gpa,
        memory_size: region.size(),
        userspace_addr: region.host().as_ptr() as u64,
        mmap_offset: 0,
        mmap_handle: region.fd().unwrap().as_raw_fd(),
    };
    client.set_mem_table(&[info]).unwrap();
}

/// A VMM with one queue.
struct Client {
    // The queue goes before its memory.
    queue: Queue,
    area: Area,
    kick: EventFd,
    call: EventFd,
    _frontend: Frontend,
    _region: Arc<Region>,
}

impl Client {
    fn connect(socket: &Path) -> Self {
        let mut frontend = connect(socket);
        frontend.set_owner().unwrap();
        let offered = frontend.get_features().unwrap();
        let protocol = VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();
        assert_eq!(offered & (protocol | feature::VERSION_1), protocol | feature::VERSION_1, "{offered:#x}");
        frontend.set_features(protocol | feature::VERSION_1).unwrap();
        // This client's addresses are not guest-physical.
        let protocol_features =
            frontend.get_protocol_features().unwrap() - VhostUserProtocolFeatures::GPA_ADDRESSES;
        frontend.set_protocol_features(protocol_features).unwrap();

        let region = memory();
        share(&mut frontend, &region, GPA);
        let area = area(&region);
        let config = DriverConfig::new(16, 0, feature::VERSION_1).unwrap();
        let (queue, at) = Queue::new(config, DmaArea { area, addr: GPA }).unwrap();
        let host = |gpa: u64| gpa - GPA + region.host().as_ptr() as u64;
        let (kick, call) = (EventFd::new(0).unwrap(), EventFd::new(0).unwrap());
        let addresses = VringConfigData {
            queue_max_size: at.size,
            queue_size: at.size,
            flags: 0,
            desc_table_addr: host(at.desc),
            used_ring_addr: host(at.device),
            avail_ring_addr: host(at.driver),
            log_addr: None,
        };
        frontend.set_vring_num(0, at.size).unwrap();
        frontend.set_vring_addr(0, &addresses).unwrap();
        frontend.set_vring_base(0, 0).unwrap();
        frontend.set_vring_call(0, &call).unwrap();
        frontend.set_vring_kick(0, &kick).unwrap();
        frontend.set_vring_enable(0, true).unwrap();
        Self { queue, area, kick, call, _frontend: frontend, _region: region }
    }

    /// Sends `request` and returns the answer, which has room for `room` bytes.
    fn request(&mut self, request: &[u8], room: usize) -> Vec<u8> {
        assert!(self.area.write(REQUEST, request));
        let token = self.queue.enable_interrupts();
        let segment = |at: usize, len: usize| Segment { addr: GPA + at as u64, len: len as u32 };
        self.queue.add(&[segment(REQUEST, request.len())], &[segment(ANSWER, room)]).unwrap();
        if self.queue.publish() {
            self.kick.write(1).unwrap();
        }
        while !self.queue.poll(token) {
            // SAFETY: the eventfd is open.
            let call = unsafe { BorrowedFd::borrow_raw(self.call.as_raw_fd()) };
            let timeout = Timespec::try_from(PATIENCE).unwrap();
            let ready = poll(&mut [PollFd::from_borrowed_fd(call, PollFlags::IN)], Some(&timeout)).unwrap();
            assert_eq!(ready, 1, "no interrupt");
            self.call.read().unwrap();
        }
        let used = self.queue.pop_used().unwrap().unwrap();
        let mut answer = vec![0; used.len as usize];
        assert!(self.area.read(ANSWER, &mut answer));
        answer
    }
}

#[test]
fn a_disk_is_written_and_read() {
    let folder = tempfile::tempdir().unwrap();
    let (image, socket) = (folder.path().join("disk.img"), folder.path().join("disk.sock"));
    std::fs::write(&image, vec![0; 1 << 20]).unwrap();
    let _example = Example::start("vhost_user_disk", &[&image, &socket]);
    let mut client = Client::connect(&socket);

    let header = |kind: u32, sector: u64| {
        [&kind.to_le_bytes()[..], &0_u32.to_le_bytes(), &sector.to_le_bytes()].concat()
    };
    let data: Vec<u8> = (0..512).map(|at| at as u8).collect();
    let status = client.request(&[header(blk::T_OUT, 7), data.clone()].concat(), 1);
    assert_eq!(status, [blk::S_OK]);
    let answer = client.request(&header(blk::T_IN, 7), 513);
    assert_eq!((&answer[..512], answer[512]), (&data[..], blk::S_OK));
    assert_eq!(&std::fs::read(&image).unwrap()[7 * 512..8 * 512], data);
}

#[test]
fn a_custom_device_answers() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("echo.sock");
    let _example = Example::start("custom_device", &[&socket]);
    let mut client = Client::connect(&socket);
    for number in 0..100 {
        let answer = client.request(format!("message {number}").as_bytes(), 64);
        assert_eq!(String::from_utf8(answer).unwrap(), format!("MESSAGE {number}"));
    }
}

#[test]
fn a_custom_device_answers_behind_mmio() {
    assert_eq!(Example::start("custom_device", &[]).output(), "HELLO FROM VIRTIO-MMIO\n");
}

#[test]
fn a_clients_memory_is_read_and_written_by_vm_memory() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("memory.sock");
    let example = Example::start("vm_memory", &[&socket]);
    let client = connect(&socket);
    let region = memory();
    let area = area(&region);
    let text = b"a client's text, of 32 bytes ...";
    assert!(area.write(0x1000, text));
    client.set_owner().unwrap();
    share(&mut { client }, &region, 0);

    let output = example.output();
    assert_eq!(output, "0x100000 bytes at 0x0\ndirty page at 0x3000\n");
    let mut answer = [0; 32];
    assert!(area.read(0x3000, &mut answer));
    assert_eq!(answer, text.to_ascii_uppercase()[..]);
}
