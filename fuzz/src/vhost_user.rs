//! A hostile vhost-user client: bytes and descriptors through a socket.
//!
//! It writes its guest memory, and removes it.
//!
//! Promises: no panic; at most one answer per message, in order; a session that ends leaves nothing
//! mapped and no queue live; the next client is served.
use arbitrary::{Result, Unstructured};
use paravane_device::Device;
use paravane_device::blk::{Blk, BlkConfig, EngineChoice};
use paravane_dma::MappingQuota;
use paravane_export::SharedStatus;
use paravane_export::protocol::Session as _;
use paravane_export::socket::{Connection, Received};
use paravane_io::{DeviceThreads, IoPool};
use paravane_spec::feature;
use paravane_spec::vhost_user::{
    ConfigAccess, F_LOG_ALL, F_PROTOCOL_FEATURES, Header, Inflight, Iotlb, LogArea, MemoryRegion,
    MemoryTable, SingleRegion, VRING_NO_FD, VringAddr, VringState, flags, iotlb, request,
};
use paravane_vhost::message::{FRAMING, MAX_PAYLOAD, split};
use paravane_vhost::session::{Offer, VhostSession};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::io::IoSlice;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;
use zerocopy::{FromBytes, IntoBytes};

/// Bytes of each of the client's files.
const FILE: u64 = 64 * 1024;
/// Guest-physical and client address of the first file.
const GPA: u64 = 0x10_0000;
const USER: u64 = 0x7000_0000_0000;
/// Most messages of one input: each may wake a thread.
const STEPS: usize = 200;
/// Most clients of one input.
const CLIENTS: usize = 4;

/// Runs one input.
pub fn vhost_user(data: &[u8]) {
    let mut u = Unstructured::new(data);
    // This thread answers requests and writes to the client's descriptors. The fuzzer's `main` is
    // not Rust's, so SIGPIPE is not ignored.
    paravane_io::outlive_pipes();
    let mut server = server();
    let mut steps = STEPS;
    for _ in 0..CLIENTS {
        if client(&mut server, &mut u, &mut steps).is_err() || u.is_empty() {
            return;
        }
    }
}

/// The state that outlives clients.
struct Server {
    threads: Arc<DeviceThreads>,
    /// `None`: a session has it.
    disk: Option<Box<dyn Device>>,
    status: Arc<SharedStatus>,
}

fn server() -> MutexGuard<'static, Server> {
    static SERVER: OnceLock<Mutex<Server>> = OnceLock::new();
    let server = SERVER.get_or_init(|| {
        let image = tempfile::NamedTempFile::new().expect("a file");
        image.as_file().set_len(FILE).expect("a disk");
        let config = BlkConfig {
            queues: 2,
            queue_size: 16,
            engine: EngineChoice::Threads,
            ..BlkConfig::new(image.path())
        };
        let disk = Blk::open(config).expect("a disk");
        let pool = Arc::new(IoPool::own(1, Duration::ZERO, "fuzz").expect("a thread"));
        let status = Arc::new(SharedStatus::new("fuzz", 2, MappingQuota::default()));
        Mutex::new(Server { threads: Arc::new(pool.device(|| ())), disk: Some(Box::new(disk)), status })
    });
    // A panic ends a fuzzer. In a test, the next input still finds a valid server.
    server.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The client's side.
struct Client {
    socket: UnixStream,
    files: [OwnedFd; 2],
    kick: OwnedFd,
    call: OwnedFd,
    /// Both ends of the socket for requests of the back end. Nothing reads from it.
    back: (UnixStream, OwnedFd),
}

impl Client {
    fn new(socket: UnixStream) -> Self {
        let file = || {
            let file = memfd_create("fuzz", MemfdFlags::CLOEXEC).expect("a memfd");
            ftruncate(&file, FILE).expect("its size");
            file
        };
        let event = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("an eventfd");
        let (ours, theirs) = UnixStream::pair().expect("sockets");
        let back = (ours, theirs.into());
        Self { socket, files: [file(), file()], kick: event(), call: event(), back }
    }

    /// A random kind of descriptor.
    fn fd(&self, u: &mut Unstructured<'_>) -> Result<OwnedFd> {
        let copy = |fd: &OwnedFd| fd.try_clone().expect("descriptors");
        Ok(match u.int_in_range(0..=9)? {
            0..=3 => copy(&self.files[0]),
            4 => copy(&self.files[1]),
            5 => copy(&self.kick),
            6 => copy(&self.call),
            7 => std::io::pipe().expect("a pipe").0.into(),
            8 => std::io::pipe().expect("a pipe").1.into(),
            _ => UnixStream::pair().expect("sockets").0.into(),
        })
    }

    /// Sends a message in one or two parts; ignores a closed connection.
    fn send(&self, u: &mut Unstructured<'_>, bytes: &[u8], fds: &[OwnedFd]) -> Result<()> {
        let cut = if u.ratio(1, 8)? { u.choose_index(bytes.len() + 1)? } else { 0 };
        let (first, second) = bytes.split_at(cut);
        let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(&fds));
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        for piece in [first, second].into_iter().filter(|piece| !piece.is_empty()) {
            let _ = sendmsg(&self.socket, &[IoSlice::new(piece)], &mut control, flags);
            control.clear();
        }
        Ok(())
    }
}

/// Runs one client; the next one uses the rest of the input.
fn client(server: &mut Server, u: &mut Unstructured<'_>, steps: &mut usize) -> Result<()> {
    let Server { threads, disk, status } = server;
    let (ours, theirs) = UnixStream::pair().expect("sockets");
    ours.set_nonblocking(true).expect("a flag");
    let client = Client::new(ours);
    let mut connection = Connection::new(theirs.into(), &FRAMING);
    let offer = Offer { packed: true, in_order: true };
    // A panic of a client before has lost it.
    let Some(device) = disk.take() else { return Ok(()) };
    let Ok(mut session) = VhostSession::new(device, Arc::clone(threads), Arc::clone(status), offer) else {
        panic!("too few descriptors")
    };
    let mut result = Ok(());
    while result.is_ok() && *steps > 0 && !u.is_empty() {
        *steps -= 1;
        result = step(&client, &mut session, u);
        if !serve(&client, &mut session, &mut connection) {
            break;
        }
    }
    *disk = Some(Box::new(session).end());
    let status = status.read();
    assert_eq!(status.memory, 0);
    assert!(status.queues.iter().all(|queue| !queue.live && queue.error.is_none()), "{status:?}");
    result
}

/// Receives all answers; returns `false` if the session has ended.
fn serve(client: &Client, session: &mut VhostSession, connection: &mut Connection) -> bool {
    loop {
        match connection.receive() {
            Err(_) | Ok(Received::Closed) => return false,
            Ok(Received::Nothing) => return true,
            Ok(Received::Message(fds)) => {
                let (header, _) = split(connection.message()).expect("a whole header");
                let (answer, result) = session.answer(connection.message(), fds);
                if let Some((bytes, fd)) = answer {
                    let (said, rest) = Header::read_from_prefix(&bytes).expect("a header");
                    assert_eq!(said.request, header.request);
                    assert_eq!(said.flags, flags::VERSION | flags::REPLY);
                    assert_eq!(said.size as usize, rest.len());
                    let _ = connection.send(&bytes, fd.as_ref().map(AsFd::as_fd));
                    let _ = std::io::Read::read(&mut &client.socket, &mut [0; MAX_PAYLOAD]);
                }
                if result.is_err() {
                    return false;
                }
            }
        }
    }
}

fn step(client: &Client, session: &mut VhostSession, u: &mut Unstructured<'_>) -> Result<()> {
    match u.int_in_range(0..=15)? {
        // Random bytes.
        0 => {
            let len = u.int_in_range(0..=64)?;
            let bytes = u.bytes(len.min(u.len()))?.to_vec();
            let fds = fds(client, u)?;
            client.send(u, &bytes, &fds)
        }
        // A valid header, then random bytes.
        1 => {
            let len = u.int_in_range(0..=300_usize)?;
            let payload = u.bytes(len.min(u.len()))?.to_vec();
            let fds = fds(client, u)?;
            message(client, u, request::GET_FEATURES, &payload, &fds, true)
        }
        // Steps of the driver.
        2 | 3 => {
            let file = &client.files[u.choose_index(2)?];
            let at = u.int_in_range(0..=0x3fff_u64)?;
            let len = u.int_in_range(1..=32_usize)?;
            let bytes = u.bytes(len.min(u.len()))?;
            let _ = rustix::io::pwrite(file, bytes, at);
            let _ = rustix::io::write(&client.kick, &1_u64.to_ne_bytes());
            Ok(())
        }
        4 => {
            if u.ratio(1, 8)? {
                let _ = ftruncate(&client.files[u.choose_index(2)?], u.int_in_range(0..=FILE)?);
            }
            let _ = session.tick();
            session.config_changed();
            let _ = session.woken(0);
            Ok(())
        }
        // The messages that start a queue.
        5 => set_up(client, u),
        _ => likely(client, u),
    }
}

fn fds(client: &Client, u: &mut Unstructured<'_>) -> Result<Vec<OwnedFd>> {
    let count = if u.ratio(1, 16)? { u.int_in_range(0..=12)? } else { u.int_in_range(0..=1)? };
    (0..count).map(|_| client.fd(u)).collect()
}

/// Sends a message, sometimes with another request or wrong flags.
fn message(
    client: &Client,
    u: &mut Unstructured<'_>,
    request: u32,
    payload: &[u8],
    fds: &[OwnedFd],
    any: bool,
) -> Result<()> {
    let request = if any { u.int_in_range(0..=50)? } else { request };
    let mut flags = flags::VERSION;
    if u.arbitrary()? {
        flags |= flags::NEED_REPLY;
    }
    if u.ratio(1, 64)? {
        flags = u.arbitrary()?;
    }
    let size = payload.len() as u32;
    let bytes = [Header { request, flags, size }.as_bytes(), payload].concat();
    client.send(u, &bytes, fds)
}

fn region(u: &mut Unstructured<'_>) -> Result<MemoryRegion> {
    let mut region = MemoryRegion { gpa: GPA, size: FILE, user: USER, offset: 0 };
    if u.ratio(1, 4)? {
        region.gpa = GPA + FILE;
        region.user = USER + 2 * FILE;
    }
    if u.ratio(1, 8)? {
        region = MemoryRegion {
            gpa: u.arbitrary::<u64>()? & !0xfff,
            size: u.int_in_range(0..=FILE)?,
            user: u.arbitrary()?,
            offset: u.int_in_range(0..=32_u64)? * 4096,
        };
    }
    Ok(region)
}

fn features(u: &mut Unstructured<'_>) -> Result<u64> {
    let some: u64 = u.arbitrary()?;
    let mask =
        feature::RING_PACKED | feature::EVENT_IDX | feature::INDIRECT_DESC | feature::IN_ORDER | F_LOG_ALL;
    // Chosen by an unused bit: without translations the queue cannot be served.
    let mask = if some >> 56 == 0xff { mask | feature::ACCESS_PLATFORM } else { mask };
    Ok(if u.ratio(1, 16)? { some } else { feature::VERSION_1 | F_PROTOCOL_FEATURES | some & mask })
}

/// A translation that is mostly added or removed for pages in use.
fn translation(u: &mut Unstructured<'_>) -> Result<Iotlb> {
    let near = [USER, GPA][u.choose_index(2)?];
    let kind = if u.arbitrary()? { iotlb::UPDATE } else { iotlb::INVALIDATE };
    let mut said = Iotlb {
        iova: near + u.int_in_range(0..=15_u64)? * 0x1000,
        size: u.int_in_range(0..=4_u64)? * 0x1000,
        user: USER + u.int_in_range(0..=15_u64)? * 0x1000,
        perm: u.int_in_range(0..=3)?,
        kind,
        padding: [0; 6],
    };
    if u.ratio(1, 8)? {
        (said.iova, said.size, said.user) = (u.arbitrary()?, u.arbitrary()?, u.arbitrary()?);
    }
    if u.ratio(1, 64)? {
        said.kind = u.arbitrary()?;
    }
    Ok(said)
}

fn index(u: &mut Unstructured<'_>) -> Result<u32> {
    Ok(if u.ratio(1, 32)? { u.arbitrary()? } else { u.int_in_range(0..=1)? })
}

fn vring_addr(u: &mut Unstructured<'_>, index: u32) -> Result<VringAddr> {
    let place = |u: &mut Unstructured<'_>, at: u64| {
        Ok(if u.ratio(1, 16)? { u.arbitrary()? } else { USER + u64::from(index) * 0x2000 + at })
    };
    let (desc, driver, device) = (place(u, 0)?, place(u, 0x800)?, place(u, 0x1000)?);
    Ok(VringAddr { index, flags: u.int_in_range(0..=1)?, desc, driver, device, log: GPA + 0x1000 })
}

/// The messages of a well-behaved client for one queue.
fn set_up(client: &Client, u: &mut Unstructured<'_>) -> Result<()> {
    let say = |u: &mut Unstructured<'_>, request, payload: &[u8], fds: &[&OwnedFd]| {
        let fds: Vec<_> = fds.iter().map(|fd| fd.try_clone().expect("descriptors")).collect();
        message(client, u, request, payload, &fds, false)
    };
    let index = u.int_in_range(0..=1)?;
    let features = features(u)?;
    let base = if features & feature::RING_PACKED != 0 { 0x8000_8000 } else { 0 };
    let state = |num| VringState { index, num };
    let protocol: u64 = 0x9b22b;
    say(u, request::SET_PROTOCOL_FEATURES, protocol.as_bytes(), &[])?;
    say(u, request::SET_FEATURES, features.as_bytes(), &[])?;
    if u.arbitrary()? {
        let inflight = Inflight { size: 8192, queues: 2, queue_size: 16, ..Inflight::default() };
        say(u, request::SET_INFLIGHT_FD, inflight.as_bytes(), &[&client.files[1]])?;
    }
    let region = MemoryRegion { gpa: GPA, size: FILE, user: USER, offset: 0 };
    let table = [MemoryTable { regions: 1, padding: 0 }.as_bytes(), region.as_bytes()].concat();
    say(u, request::SET_MEM_TABLE, &table, &[&client.files[0]])?;
    if features & feature::ACCESS_PLATFORM != 0 {
        say(u, request::SET_BACKEND_REQ_FD, &[], &[&client.back.1])?;
        // Rings have client addresses, buffers guest-physical ones.
        for iova in [USER, GPA] {
            let said = Iotlb { iova, size: FILE, user: USER, perm: 3, kind: iotlb::UPDATE, padding: [0; 6] };
            say(u, request::IOTLB_MSG, said.as_bytes(), &[])?;
        }
    }
    say(u, request::SET_VRING_NUM, state(16).as_bytes(), &[])?;
    say(u, request::SET_VRING_BASE, state(base).as_bytes(), &[])?;
    let addr = VringAddr { index, ..vring_addr(u, index)? };
    say(u, request::SET_VRING_ADDR, addr.as_bytes(), &[])?;
    say(u, request::SET_VRING_CALL, u64::from(index).as_bytes(), &[&client.call])?;
    say(u, request::SET_VRING_KICK, u64::from(index).as_bytes(), &[&client.kick])?;
    say(u, request::SET_VRING_ENABLE, state(1).as_bytes(), &[])
}

/// A message of the right size, with likely values.
fn likely(client: &Client, u: &mut Unstructured<'_>) -> Result<()> {
    let state = |u: &mut Unstructured<'_>, num| Ok(VringState { index: index(u)?, num });
    let mut request = u.int_in_range(1..=44)?;
    // Unknown requests end a session; keep them rare.
    if matches!(request, 19 | 20 | 23 | 26..=30 | 33 | 35 | 41 | 44) && !u.ratio(1, 16)? {
        request = request::GET_VRING_BASE;
    }
    let mut fds = Vec::new();
    let payload = match request {
        request::SET_FEATURES => features(u)?.as_bytes().to_vec(),
        request::SET_PROTOCOL_FEATURES => (u.arbitrary::<u64>()? & 0x9b22b).as_bytes().to_vec(),
        request::SET_MEM_TABLE => {
            let regions = u.int_in_range(0..=3)?;
            let mut bytes = MemoryTable { regions, padding: 0 }.as_bytes().to_vec();
            for _ in 0..regions {
                bytes.extend_from_slice(region(u)?.as_bytes());
                fds.push(client.fd(u)?);
            }
            bytes
        }
        request::ADD_MEM_REG => {
            fds.push(client.fd(u)?);
            SingleRegion { padding: 0, region: region(u)? }.as_bytes().to_vec()
        }
        request::REM_MEM_REG => SingleRegion { padding: 0, region: region(u)? }.as_bytes().to_vec(),
        request::SET_LOG_BASE => {
            fds.push(client.fd(u)?);
            let (size, offset) = (u.int_in_range(0..=4096)?, u.int_in_range(0..=16_u64)? * 8);
            LogArea { size, offset }.as_bytes().to_vec()
        }
        request::SET_VRING_NUM => {
            let num = if u.ratio(1, 8)? { u.arbitrary()? } else { 1 << u.int_in_range(0..=4)? };
            state(u, num)?.as_bytes().to_vec()
        }
        request::SET_VRING_BASE => {
            let num = if u.arbitrary()? { u.arbitrary()? } else { 0 };
            state(u, num)?.as_bytes().to_vec()
        }
        request::GET_VRING_BASE => state(u, 0)?.as_bytes().to_vec(),
        request::SET_VRING_ENABLE => {
            let num = u.int_in_range(0..=2)?;
            state(u, num)?.as_bytes().to_vec()
        }
        request::SET_VRING_ADDR => {
            let index = index(u)?;
            vring_addr(u, index)?.as_bytes().to_vec()
        }
        request::SET_VRING_KICK | request::SET_VRING_CALL | request::SET_VRING_ERR => {
            let index = u64::from(index(u)?);
            if u.ratio(1, 4)? {
                (index | VRING_NO_FD).as_bytes().to_vec()
            } else {
                fds.push(client.fd(u)?);
                index.as_bytes().to_vec()
            }
        }
        request::GET_CONFIG | request::SET_CONFIG => {
            let size = u.int_in_range(0..=64)?;
            let access =
                ConfigAccess { offset: u.int_in_range(0..=300)?, size, flags: u.int_in_range(0..=1)? };
            [access.as_bytes(), &vec![0; size as usize]].concat()
        }
        request::GET_INFLIGHT_FD | request::SET_INFLIGHT_FD => {
            if request == request::SET_INFLIGHT_FD {
                fds.push(client.fd(u)?);
            }
            let size = u.int_in_range(0..=FILE)?;
            let inflight =
                Inflight { size, offset: 0, queues: u.int_in_range(0..=3)?, queue_size: 16, padding: 0 };
            inflight.as_bytes().to_vec()
        }
        request::SET_STATUS => u64::from(u.arbitrary::<u8>()?).as_bytes().to_vec(),
        request::SET_DEVICE_STATE_FD => {
            fds.push(client.fd(u)?);
            [u.int_in_range(0..=2_u32)?.as_bytes(), &[0; 4]].concat()
        }
        request::IOTLB_MSG => translation(u)?.as_bytes().to_vec(),
        request::SET_BACKEND_REQ_FD | request::SET_LOG_FD => {
            fds.push(client.fd(u)?);
            Vec::new()
        }
        _ => Vec::new(),
    };
    message(client, u, request, &payload, &fds, false)
}
