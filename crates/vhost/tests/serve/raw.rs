//! A client that sends valid and invalid messages.
//!
//! It keeps its memory and its queue from server to server.
use crate::driver::Random;
use paravane_dma::{Backing, Region, RegionConfig};
use paravane_ring::driver::{BufferId, DriverConfig, Queue};
use paravane_ring::{Area, DmaArea, QueueAddresses, Segment};
use paravane_spec::vhost_user::{
    F_PROTOCOL_FEATURES, Header, Inflight, Iotlb, MemoryRegion, MemoryTable, VringAddr, VringState, flags,
    iotlb, protocol_feature, request,
};
use paravane_spec::{blk, feature};
use paravane_test_support::{patience, wait_for};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::{IoSlice, IoSliceMut};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Guest-physical and user address of the memory.
pub(crate) const GPA: u64 = 0x4000_0000;
pub(crate) const USER: u64 = 0x7f12_3456_7000;
/// First IOVA of the memory, with an IOMMU.
pub(crate) const IOVA: u64 = 0xffff_0000;
/// Distance between the memories of two machines of one client.
const APART: u64 = 1 << 32;
/// Size of the memory in bytes.
pub(crate) const MEMORY: u64 = 1 << 20;
/// Offset of the requests, and size of each in bytes.
const REQUESTS: u64 = 0x1_0000;
const REQUEST: u64 = 0x2000;
/// Offsets in a request.
pub(crate) const STATUS: u64 = 16;
pub(crate) const DATA: u64 = 512;
/// Protocol features that change messages: accepted where a test asks for them.
pub(crate) const OPTIONAL: u64 = protocol_feature::GPA_ADDRESSES | protocol_feature::GET_VRING_BASE_INFLIGHT;
/// Most bytes of data in a request.
pub(crate) const MOST: usize = 4096;

/// Connection to a server.
pub(crate) struct Raw {
    pub(crate) socket: UnixStream,
}

impl Raw {
    /// Connects to a socket that may have yet to be made.
    pub(crate) fn connect(path: &Path) -> Self {
        let error = || format!("{:?}", UnixStream::connect(path));
        let socket = wait_for("the socket", error, || UnixStream::connect(path).ok());
        socket.set_read_timeout(Some(patience())).unwrap();
        Self { socket }
    }

    /// Sends bytes with descriptors.
    pub(crate) fn send_bytes(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
        }
        let sent = sendmsg(&self.socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?;
        assert_eq!(sent, bytes.len());
        Ok(())
    }

    /// Sends a message that requests an acknowledgement.
    pub(crate) fn send(&self, request: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let flags = flags::VERSION | flags::NEED_REPLY;
        self.send_bytes(&paravane_vhost::message::message(request, flags, payload), fds)
    }

    /// Receives the next reply.
    pub(crate) fn receive(&self) -> io::Result<(Header, Vec<u8>, Option<OwnedFd>)> {
        let mut bytes = vec![0; size_of::<Header>()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut slices = [IoSliceMut::new(&mut bytes)];
        let received = loop {
            match recvmsg(&self.socket, &mut slices, &mut control, RecvFlags::WAITALL) {
                Err(rustix::io::Errno::INTR) => {}
                received => break received?,
            }
        };
        if received.bytes < size_of::<Header>() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let fd = control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
            _ => None,
        });
        let header = Header::read_from_bytes(&bytes).unwrap();
        let mut payload = vec![0; header.size as usize];
        io::Read::read_exact(&mut &self.socket, &mut payload)?;
        assert_eq!(header.flags, flags::VERSION | flags::REPLY);
        Ok((header, payload, fd))
    }

    /// Sends a request, and returns the payload of the reply.
    pub(crate) fn ask(&self, request: u32, payload: &[u8]) -> Vec<u8> {
        self.send(request, payload, &[]).unwrap();
        let (header, reply, _) = self.receive().unwrap();
        assert_eq!(header.request, request);
        reply
    }

    pub(crate) fn ask_number(&self, request: u32) -> u64 {
        u64::read_from_bytes(&self.ask(request, &[])).unwrap()
    }

    /// Sends a request that must be acknowledged with success.
    pub(crate) fn say(
        &self,
        request: u32,
        payload: &(impl IntoBytes + Immutable + ?Sized),
        fds: &[BorrowedFd<'_>],
    ) {
        self.send(request, payload.as_bytes(), fds).unwrap();
        let (header, reply, _) = self.receive().unwrap();
        assert_eq!((header.request, u64::read_from_bytes(&reply).unwrap()), (request, 0));
    }

    /// Begins a session without [`OPTIONAL`].
    pub(crate) fn begin(&self, features: u64) -> u64 {
        self.begin_with(features, 0)
    }

    /// Begins a session with these protocol features of [`OPTIONAL`].
    pub(crate) fn begin_with(&self, features: u64, optional: u64) -> u64 {
        let offered = self.ask_number(request::GET_FEATURES);
        assert_eq!(offered & F_PROTOCOL_FEATURES, F_PROTOCOL_FEATURES);
        let protocol = self.ask_number(request::GET_PROTOCOL_FEATURES);
        assert_ne!(protocol & protocol_feature::REPLY_ACK, 0);
        self.say(request::SET_PROTOCOL_FEATURES, &(protocol & !OPTIONAL | optional), &[]);
        let offered = self.ask_number(request::GET_FEATURES);
        // QEMU before 9 accepts what its user asks for, whatever an entropy source offers.
        let accepted = offered & (features | F_PROTOCOL_FEATURES) | features & feature::ACCESS_PLATFORM;
        self.say(request::SET_FEATURES, &accepted, &[]);
        offered
    }

    /// Whether the server closes the connection, within ten seconds.
    ///
    /// Reads what it still sends.
    pub(crate) fn is_closed(&self) -> bool {
        let mut byte = [0; 64];
        loop {
            match io::Read::read(&mut &self.socket, &mut byte) {
                Ok(0) => return true,
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return true,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Ok(_) => {}
                Err(error) => panic!("still open: {error}"),
            }
        }
    }
}

/// Kind of a request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Ask {
    Read,
    Write(u8),
}

/// Writes bytes at `offset` of a machine's memory.
pub(crate) fn put(memory: &Region, offset: u64, bytes: impl IntoIterator<Item = u8>) {
    let to = memory.host().as_ptr().wrapping_add(offset as usize);
    for (at, byte) in bytes.into_iter().enumerate() {
        assert!(offset + (at as u64) < MEMORY);
        // SAFETY: inside the region, which others have as shared memory.
        unsafe { AtomicU8::from_ptr(to.add(at)) }.store(byte, Ordering::Relaxed);
    }
}

/// `len` bytes at `offset` of a memory.
pub(crate) fn get(memory: &Region, offset: u64, len: usize) -> Vec<u8> {
    assert!(offset + len as u64 <= MEMORY);
    let from = memory.host().as_ptr().wrapping_add(offset as usize);
    // SAFETY: inside the region, which others have as shared memory.
    (0..len).map(|at| unsafe { AtomicU8::from_ptr(from.add(at)) }.load(Ordering::Relaxed)).collect()
}

/// Request in flight.
#[derive(Clone, Copy, Debug)]
struct Flying {
    id: BufferId,
    at: usize,
    len: usize,
    ask: Ask,
}

/// Byte at `index` of a write of `seed`.
fn pattern(seed: u8, index: usize) -> u8 {
    seed.wrapping_add((index / 7) as u8) ^ index as u8
}

/// Guest with one queue of a disk.
pub(crate) struct Machine {
    /// Index of the queue.
    index: u32,
    /// Device address of the memory.
    pub(crate) base: u64,
    pub(crate) memory: Arc<Region>,
    pub(crate) queue: Queue,
    pub(crate) addresses: QueueAddresses,
    pub(crate) features: u64,
    /// Protocol features of [`OPTIONAL`] that it accepts.
    pub(crate) protocol: u64,
    pub(crate) kick: OwnedFd,
    pub(crate) call: OwnedFd,
    pub(crate) inflight: Option<(Inflight, OwnedFd)>,
    flying: Vec<Option<Flying>>,
    /// Number of requests done.
    pub(crate) done: u64,
}

impl Machine {
    pub(crate) fn new(features: u64, size: u16, depth: usize) -> Self {
        Self::with_index(0, features, size, depth)
    }

    /// Makes a machine with a queue of this index, and its own memory.
    pub(crate) fn with_index(index: u32, features: u64, size: u16, depth: usize) -> Self {
        let translated = features & feature::ACCESS_PLATFORM != 0;
        let base = if translated { IOVA } else { GPA } + u64::from(index) * APART;
        let features = features | feature::VERSION_1 | blk::F_FLUSH;
        let config = RegionConfig { gpa: 0, size: MEMORY, backing: Backing::Pages, writable: true };
        let memory = Region::new(config).unwrap();
        // SAFETY: the region is kept beside the queue, and is written to as shared memory is.
        let area = unsafe { Area::new(memory.host(), REQUESTS as usize) };
        let layout = DriverConfig::new(size, 0, features).unwrap();
        let (mut queue, addresses) = Queue::new(layout, DmaArea { area, addr: base }).unwrap();
        queue.ready();
        let event = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let (kick, call) = (event(), event());
        let flying = vec![None; depth];
        let inflight = None;
        Self {
            index,
            base,
            memory,
            queue,
            addresses,
            features,
            protocol: 0,
            kick,
            call,
            inflight,
            flying,
            done: 0,
        }
    }

    /// Region, as in a message.
    pub(crate) fn region(&self) -> MemoryRegion {
        let apart = u64::from(self.index) * APART;
        let first = if self.protocol & protocol_feature::GPA_ADDRESSES != 0 { GPA } else { USER };
        MemoryRegion { gpa: GPA + apart, size: MEMORY, user: first + apart, offset: 0 }
    }

    /// Translation of the page around an IOVA.
    pub(crate) fn translation(&self, iova: u64) -> Option<Iotlb> {
        let iova = iova & !0xfff;
        let inside = iova.checked_sub(self.base).filter(|inside| *inside < MEMORY)?;
        let (user, perm) = (self.region().user + inside, iotlb::READ | iotlb::WRITE);
        Some(Iotlb { iova, size: 0x1000, user, perm, kind: iotlb::UPDATE, ..Iotlb::default() })
    }

    pub(crate) fn vring_addr(&self) -> VringAddr {
        let QueueAddresses { desc, driver, device, .. } = self.addresses;
        let translated = self.features & feature::ACCESS_PLATFORM != 0;
        let place = |at| if translated { at } else { at - self.base + self.region().user };
        VringAddr {
            index: self.index,
            flags: 0,
            desc: place(desc),
            driver: place(driver),
            device: place(device),
            log: device - self.base + self.region().gpa,
        }
    }

    /// Hands the machine to a server; `base` is the position of the queue.
    pub(crate) fn attach(&mut self, raw: &Raw, base: u32, tracked: bool) {
        assert!(self.try_attach(raw, base, tracked), "the queue is not started");
    }

    /// As [`Machine::attach`]. `false`: the server refuses to start the queue.
    pub(crate) fn try_attach(&mut self, raw: &Raw, base: u32, tracked: bool) -> bool {
        raw.begin_with(self.features, self.protocol);
        if tracked {
            if self.inflight.is_none() {
                // The firmware of QEMU 10 makes its queue twice as large as the size in this
                // message.
                let size = self.addresses.size / 2;
                let wanted = Inflight { queues: 1, queue_size: size, ..Inflight::default() };
                raw.send(request::GET_INFLIGHT_FD, wanted.as_bytes(), &[]).unwrap();
                let (_, reply, fd) = raw.receive().unwrap();
                self.inflight = Some((Inflight::read_from_bytes(&reply).unwrap(), fd.unwrap()));
            }
            let (inflight, fd) = self.inflight.as_ref().unwrap();
            raw.say(request::SET_INFLIGHT_FD, inflight, &[fd.as_fd()]);
        }
        self.share(raw);
        self.try_start(raw, base)
    }

    /// Shares its memory, and no other.
    pub(crate) fn share(&self, raw: &Raw) {
        self.share_as(raw, self.memory.fd().unwrap());
    }

    /// Shares its memory in another file.
    pub(crate) fn share_as(&self, raw: &Raw, file: BorrowedFd<'_>) {
        let table = [MemoryTable { regions: 1, padding: 0 }.as_bytes(), self.region().as_bytes()].concat();
        raw.say(request::SET_MEM_TABLE, &*table, &[file]);
    }

    pub(crate) fn start(&self, raw: &Raw, base: u32) {
        assert!(self.try_start(raw, base), "the queue is not started");
    }

    fn try_start(&self, raw: &Raw, base: u32) -> bool {
        let (index, fd_index) = (self.index, u64::from(self.index));
        let state = |num| VringState { index, num };
        raw.say(request::SET_VRING_NUM, &state(self.addresses.size.into()), &[]);
        raw.say(request::SET_VRING_BASE, &state(base), &[]);
        raw.say(request::SET_VRING_ADDR, &self.vring_addr(), &[]);
        raw.say(request::SET_VRING_CALL, &fd_index, &[self.call.as_fd()]);
        raw.say(request::SET_VRING_KICK, &fd_index, &[self.kick.as_fd()]);
        raw.send(request::SET_VRING_ENABLE, state(1).as_bytes(), &[]).unwrap();
        let (header, reply, _) = raw.receive().unwrap();
        assert_eq!(header.request, request::SET_VRING_ENABLE);
        u64::read_from_bytes(&reply).unwrap() == 0
    }

    /// Position of a new queue.
    pub(crate) fn first_base(&self) -> u32 {
        if self.features & feature::RING_PACKED != 0 { 0x8000_8000 } else { 0 }
    }

    pub(crate) fn slot(slot: usize) -> u64 {
        REQUESTS + slot as u64 * REQUEST
    }

    /// `len` bytes at `offset` of the memory.
    pub(crate) fn bytes(&self, offset: u64, len: usize) -> Vec<u8> {
        get(&self.memory, offset, len)
    }

    pub(crate) fn set_bytes(&self, offset: u64, bytes: impl IntoIterator<Item = u8>) {
        put(&self.memory, offset, bytes);
    }

    /// Makes a request available in `slot`, for bytes of the disk from `at` on.
    pub(crate) fn ask(&mut self, slot: usize, ask: Ask, at: usize, len: usize) {
        let offset = Self::slot(slot);
        let kind = if ask == Ask::Read { blk::T_IN } else { blk::T_OUT };
        let header = [kind.to_le_bytes().as_slice(), &[0; 4], &((at / 512) as u64).to_le_bytes()].concat();
        self.set_bytes(offset, header);
        self.set_bytes(offset + STATUS, [0xff]);
        let segment = |at, len: usize| Segment { addr: self.base + offset + at, len: len as u32 };
        let (header, data, status) = (segment(0, 16), segment(DATA, len), segment(STATUS, 1));
        let id = match ask {
            Ask::Read => {
                self.set_bytes(offset + DATA, std::iter::repeat_n(0xa5, len));
                self.queue.add(&[header], &[data, status])
            }
            Ask::Write(seed) => {
                self.set_bytes(offset + DATA, (0..len).map(|index| pattern(seed, index)));
                self.queue.add(&[header, data], &[status])
            }
        };
        let id = id.unwrap();
        assert!(self.flying[slot].replace(Flying { id, at, len, ask }).is_none());
    }

    pub(crate) fn kick(&mut self) {
        if self.queue.publish() {
            rustix::io::write(&self.kick, &1_u64.to_ne_bytes()).unwrap();
        }
    }

    /// Takes used buffers, compares reads with the model, and applies writes to it.
    pub(crate) fn reap(&mut self, model: &mut [u8]) -> usize {
        let mut count = 0;
        // A buffer that the device returns twice, or never had, latches the queue.
        while let Some(used) = self.queue.pop_used().unwrap() {
            let of = |flying: &Option<Flying>| flying.is_some_and(|flying| flying.id == used.id);
            let slot = self.flying.iter().position(of).unwrap();
            let Flying { at, len, ask, .. } = self.flying[slot].take().unwrap();
            assert_eq!(self.bytes(Self::slot(slot) + STATUS, 1), [blk::S_OK]);
            match ask {
                Ask::Read => {
                    let read = self.bytes(Self::slot(slot) + DATA, len);
                    assert!(read == model[at..at + len], "{len} bytes at {at} are not what was written");
                }
                Ask::Write(seed) => {
                    for (index, byte) in model[at..at + len].iter_mut().enumerate() {
                        *byte = pattern(seed, index);
                    }
                }
            }
            count += 1;
        }
        self.done += count as u64;
        count
    }

    /// Makes requests until all parts of the disk are in use.
    ///
    /// Two writes for each read, none over another in flight.
    pub(crate) fn fill(&mut self, disk: usize, random: &mut Random) {
        for slot in 0..self.flying.len() {
            let len = (1 + random.below(MOST / 512)) * 512;
            let at = random.below((disk - MOST) / 512) * 512;
            let clash = |flying: &Flying| flying.at < at + len && at < flying.at + flying.len;
            if self.flying[slot].is_some() || self.flying.iter().flatten().any(clash) {
                continue;
            }
            let ask = if random.below(3) == 0 { Ask::Read } else { Ask::Write(random.below(256) as u8) };
            self.ask(slot, ask, at, len);
        }
        self.kick();
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.flying.iter().flatten().count()
    }

    /// Waits for an interrupt; returns whether one arrived in time.
    pub(crate) fn wait(&mut self, time: Duration) -> bool {
        let token = self.queue.enable_interrupts();
        if self.queue.poll(token) {
            return true;
        }
        let time = Timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos().into() };
        let mut fds = [PollFd::new(&self.call, PollFlags::IN)];
        let came = poll(&mut fds, Some(&time)).unwrap() > 0;
        let _ = rustix::io::read(&self.call, &mut [0; 8]);
        came
    }

    /// Continues until nothing is in flight.
    pub(crate) fn finish(&mut self, model: &mut [u8]) {
        while self.in_flight() > 0 {
            let came = self.wait(patience());
            let done = self.reap(model);
            assert!(came, "no interrupt; {done} requests done without one, {} not done", self.in_flight());
        }
    }
}
