//! `--holder` with a network card on a TAP device: numbered frames in both directions, kills and reloads.
//!
//! Each frame has a number. Whatever arrives has a larger one than what came before: no frame is doubled,
//! and none overtakes another. Frames that the kernel has for the guest while no daemon runs all arrive.
//!
//! Needs root, /dev/net/tun and the program `ip`; the network is one of the test's own.
use crate::daemon::{Daemon, Folder, paravane, patience, status, without_sandbox};
use crate::raw::{GPA, Raw, USER, put};
use paravane_dma::{Backing, Region, RegionConfig};
use paravane_ring::driver::{DriverConfig, Queue};
use paravane_ring::{Area, DmaArea, QueueAddresses, Segment};
use paravane_spec::feature;
use paravane_spec::vhost_user::{MemoryRegion, MemoryTable, VringAddr, VringState, request};
use paravane_test_support::{in_own_network, ip};
use rustix::event::{EventfdFlags, eventfd};
use rustix::process::Signal;
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Instant;
use zerocopy::IntoBytes;

/// Size of the guest's memory, of a ring with what belongs to it, and of a buffer, in bytes.
const MEMORY: u64 = 1 << 20;
const RING: u64 = 64 << 10;
const BUFFER: u64 = 2048;
/// Descriptors of a queue.
const SIZE: u16 = 64;
/// virtio's header before each frame.
const HEADER: usize = 12;
/// Bytes of a frame.
const FRAME: usize = 64;
/// An EtherType for experiments (IEEE 802), so that frames of the host are told from ours.
const TYPE: u16 = 0x88b5;
const RX: usize = 0;
const TX: usize = 1;

fn frame(number: u64) -> [u8; FRAME] {
    let mut frame = [0xff; FRAME];
    frame[6..12].copy_from_slice(&[2, 0, 0, 0, 0, 7]);
    frame[12..14].copy_from_slice(&TYPE.to_be_bytes());
    frame[14..22].copy_from_slice(&number.to_le_bytes());
    frame
}

/// The number of one of our frames.
fn number(frame: &[u8]) -> Option<u64> {
    (frame.get(12..14)? == TYPE.to_be_bytes())
        .then(|| u64::from_le_bytes(std::array::from_fn(|byte| frame[14 + byte])))
}

/// The host's side of the interface.
struct Host(OwnedFd);

impl Host {
    fn new(interface: &str) -> Self {
        let name = std::ffi::CString::new(interface).unwrap();
        // SAFETY: plain system calls; the address lives until `bind` has returned.
        unsafe {
            let kind = libc::SOCK_RAW | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
            let socket = libc::socket(libc::AF_PACKET, kind, TYPE.to_be().into());
            assert!(socket >= 0, "{}", std::io::Error::last_os_error());
            let mut address: libc::sockaddr_ll = std::mem::zeroed();
            address.sll_family = libc::AF_PACKET as u16;
            address.sll_protocol = TYPE.to_be();
            address.sll_ifindex = libc::if_nametoindex(name.as_ptr()).cast_signed();
            let len = size_of_val(&address) as libc::socklen_t;
            assert_eq!(libc::bind(socket, (&raw const address).cast(), len), 0);
            Self(OwnedFd::from_raw_fd(socket))
        }
    }

    fn send(&self, number: u64) {
        rustix::io::write(&self.0, &frame(number)).unwrap();
    }

    fn receive(&self) -> Option<u64> {
        let mut bytes = [0; 2048];
        let len = rustix::io::read(&self.0, &mut bytes).ok()?;
        number(&bytes[..len])
    }
}

/// A queue of the guest.
struct Lane {
    queue: Queue,
    addresses: QueueAddresses,
    kick: OwnedFd,
    call: OwnedFd,
    /// The buffer of each identifier in flight.
    flying: Vec<Option<(paravane_ring::driver::BufferId, u64)>>,
}

/// A guest with a card of one pair of queues.
struct Guest {
    memory: Arc<Region>,
    lanes: [Lane; 2],
    features: u64,
}

impl Guest {
    fn new(features: u64) -> Self {
        let features = features | feature::VERSION_1;
        let config = RegionConfig { gpa: 0, size: MEMORY, backing: Backing::Pages, writable: true };
        let memory = Region::new(config).unwrap();
        let lane = |index: u64| {
            let event = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
            let at = (index * RING) as usize;
            // SAFETY: the region is kept beside the queue, and is written to as shared memory is.
            let area = unsafe { Area::new(memory.host().add(at), RING as usize) };
            let layout = DriverConfig::new(SIZE, 0, features).unwrap();
            let (mut queue, addresses) =
                Queue::new(layout, DmaArea { area, addr: GPA + index * RING }).unwrap();
            queue.ready();
            Lane { queue, addresses, kick: event(), call: event(), flying: vec![None; usize::from(SIZE) / 2] }
        };
        let lanes = [lane(0), lane(1)];
        Self { memory, lanes, features }
    }

    fn attach(&self, raw: &Raw) {
        raw.begin(self.features);
        let region = MemoryRegion { gpa: GPA, size: MEMORY, user: USER, offset: 0 };
        let table = [MemoryTable { regions: 1, padding: 0 }.as_bytes(), region.as_bytes()].concat();
        raw.say(request::SET_MEM_TABLE, &*table, &[self.memory.fd().unwrap()]);
        for (index, lane) in (0..).zip(&self.lanes) {
            let state = |num: u32| VringState { index, num };
            let QueueAddresses { desc, driver, device, .. } = lane.addresses;
            let place = |at| at - GPA + USER;
            let addr = VringAddr {
                index,
                flags: 0,
                desc: place(desc),
                driver: place(driver),
                device: place(device),
                log: 0,
            };
            let packed = self.features & feature::RING_PACKED != 0;
            raw.say(request::SET_VRING_NUM, &state(SIZE.into()), &[]);
            raw.say(request::SET_VRING_BASE, &state(if packed { 0x8000_8000 } else { 0 }), &[]);
            raw.say(request::SET_VRING_ADDR, &addr, &[]);
            raw.say(request::SET_VRING_CALL, &u64::from(index), &[lane.call.as_fd()]);
            raw.say(request::SET_VRING_KICK, &u64::from(index), &[lane.kick.as_fd()]);
            raw.say(request::SET_VRING_ENABLE, &state(1), &[]);
        }
    }

    /// Offset of a buffer.
    fn buffer(lane: usize, slot: usize) -> u64 {
        2 * RING + (lane * usize::from(SIZE) + slot) as u64 * BUFFER
    }

    /// Makes buffers available in all free slots.
    fn fill(&mut self, lane: usize, mut next: impl FnMut() -> u64) {
        let memory = Arc::clone(&self.memory);
        let Lane { queue, kick, flying, .. } = &mut self.lanes[lane];
        for (slot, place) in flying.iter_mut().enumerate().filter(|(_, place)| place.is_none()) {
            let at = Self::buffer(lane, slot);
            let id = match lane {
                TX => {
                    put(&memory, at, [0; HEADER].into_iter().chain(frame(next())));
                    let segment = Segment { addr: GPA + at, len: (HEADER + FRAME) as u32 };
                    queue.add(&[segment], &[])
                }
                _ => queue.add(&[], &[Segment { addr: GPA + at, len: BUFFER as u32 }]),
            };
            *place = Some((id.unwrap(), at));
        }
        if queue.publish() {
            rustix::io::write(kick, &1_u64.to_ne_bytes()).unwrap();
        }
    }

    /// Takes used buffers, and returns the frames in them.
    fn reap(&mut self, lane: usize) -> Vec<Vec<u8>> {
        let memory = Arc::clone(&self.memory);
        let Lane { queue, flying, .. } = &mut self.lanes[lane];
        let mut all = Vec::new();
        // A buffer that the device returns twice, or never had, latches the queue.
        while let Some(used) = queue.pop_used().unwrap() {
            let of = |place: &Option<(paravane_ring::driver::BufferId, u64)>| {
                place.is_some_and(|(id, _)| id == used.id)
            };
            let slot = flying.iter().position(of).unwrap();
            let (_, at) = flying[slot].take().unwrap();
            let from = memory.host().as_ptr().wrapping_add(at as usize);
            let len = used.len as usize;
            // SAFETY: inside the region, which others have as shared memory.
            let byte = |at| unsafe { AtomicU8::from_ptr(from.add(at)) }.load(Ordering::Relaxed);
            all.push((HEADER.min(len)..len).map(byte).collect());
        }
        all
    }
}

/// Frames that arrived, by number.
#[derive(Default)]
struct Arrived {
    last: Option<u64>,
    count: u64,
}

impl Arrived {
    fn note(&mut self, number: u64, way: &str) {
        assert!(self.last < Some(number), "{way}: frame {number} after {:?}", self.last);
        (self.last, self.count) = (Some(number), self.count + 1);
    }
}

fn under_kills(features: u64) {
    let folder = Folder::new();
    ip("tuntap add pv0 mode tap");
    ip("link set pv0 up");
    let hold = folder.text("hold");
    let mut holder = Daemon::spawn(paravane().args(["hold", "--socket", &hold]).args(without_sandbox()));
    holder.wait_for("ready");
    let control = folder.text("control");
    let write = |workers: u64| {
        let card = "[[net]]\nname = \"n\"\ntap = \"pv0\"\nsocket = \"s\"\n";
        folder.write("d.toml", &format!("[daemon]\nholder = \"hold\"\n{card}workers = {workers}\n"))
    };
    let file = write(1);
    let start = || Daemon::start(&["--config", &file, "--control", &control]);
    let mut daemon = start();
    let raw = Raw::connect(&folder.path("s"));
    let mut guest = Guest::new(features);
    guest.attach(&raw);
    let host = Host::new("pv0");
    let (mut out, mut back) = (Arrived::default(), Arrived::default());
    let (mut sent, mut host_sent, mut done) = (0, 0, 0);
    let kills = std::env::var("PARAVANE_KILLS").map_or(20, |kills| kills.parse().unwrap());
    for round in 0..kills {
        // Some frames in either direction; the last ones of them are under way when the daemon dies.
        let (enough, enough_back) = (done + 100 + round % 60, back.count + 20);
        let end = Instant::now() + patience();
        while done < enough || back.count < enough_back {
            guest.fill(TX, || {
                sent += 1;
                sent
            });
            guest.fill(RX, || 0);
            if host_sent < back.last.unwrap_or(0) + 100 {
                host_sent += 1;
                host.send(host_sent);
            }
            done += guest.reap(TX).len() as u64;
            guest
                .reap(RX)
                .iter()
                .filter_map(|frame| number(frame))
                .for_each(|n| back.note(n, "to the guest"));
            while let Some(number) = host.receive() {
                out.note(number, "to the host");
            }
            assert!(Instant::now() < end, "{done} of {enough}, {back_count} back", back_count = back.count);
        }
        // Some frames are being sent.
        guest.fill(TX, || {
            sent += 1;
            sent
        });
        if round % 2 == 0 {
            std::thread::yield_now();
        }
        if round % 3 == 1 {
            // The card is opened again with the descriptors that are kept.
            write(1 + round % 2);
            let output = paravane().args(["reload", "--control", &control]).output().unwrap();
            let text = String::from_utf8_lossy(&output.stdout);
            assert!(text.contains("its session goes on"), "{text}");
        }
        daemon.signal(Signal::KILL);
        daemon.wait();
        // The kernel has them for the guest.
        let kept = host_sent + 10;
        while host_sent < kept {
            host_sent += 1;
            host.send(host_sent);
        }
        daemon = start();
        let before = back.count;
        while back.last < Some(kept) {
            guest.fill(RX, || 0);
            guest
                .reap(RX)
                .iter()
                .filter_map(|frame| number(frame))
                .for_each(|n| back.note(n, "to the guest"));
            assert!(Instant::now() < end, "frames of the kernel's queue are lost: {:?} of {kept}", back.last);
        }
        assert!(back.count >= before + 10, "frames of the kernel's queue are lost");
    }
    let report = status(&control);
    let card = &report["devices"][0];
    assert_eq!((&card["sessions"], &card["protocol_errors"]), (&1.into(), &0.into()), "{report}");
    eprintln!(
        "{kills} kills: {sent} frames sent, {} arrived; {host_sent} sent to the guest, {} arrived",
        out.count, back.count
    );
    // At most a batch for each kill is lost on the way out.
    assert!(out.count + 64 * (kills + 1) >= sent, "{} of {sent} frames arrived", out.count);
}

#[test]
fn no_frame_is_doubled_and_the_kernel_keeps_its_frames() {
    in_own_network("no_frame_is_doubled_and_the_kernel_keeps_its_frames", || under_kills(0));
}

#[test]
fn no_frame_is_doubled_on_packed_queues() {
    in_own_network("no_frame_is_doubled_on_packed_queues", || under_kills(feature::RING_PACKED));
}
