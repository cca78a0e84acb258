//! A TAP device of the host, with offloads.
//!
//! See Linux, Documentation/networking/tuntap.
//!
//! ```text
//!   transmit: our copy of the header, and the frame in guest memory --writev--> kernel
//!   receive:  kernel --read--> our buffer --copy--> buffers of the driver
//! ```
//! Each pair of virtqueues has a queue of the TAP device. Queues that are not in use are detached,
//! so that the kernel steers no frames to them.
//!
//! The length of a frame shows only when it is read, and reading removes it. So each frame is read
//! into a buffer that has room for any.
//!
//! An interface may be deleted while its queues are open, and another one may get its name
//! ([`lost`]).
mod lost;

use super::back_end::{BackEnd, Incoming, Outgoing, Receiver, Sender, Sent};
use super::header::HEADER;
use crate::callback::Callback;
use crate::{HostSide, ServeError, WakeSet, WakeSource, lock};
use paravane_dma::{Access, HostSlice};
use paravane_spec::net::{
    ETH_HEADER, F_CSUM, F_GUEST_CSUM, F_GUEST_ECN, F_GUEST_TSO4, F_GUEST_TSO6, F_GUEST_USO4, F_GUEST_USO6,
    F_HOST_ECN, F_HOST_TSO4, F_HOST_TSO6, F_HOST_USO, MAX_FRAME,
};
use rustix::event::epoll;
use rustix::fs::{Mode, OFlags};
use std::ffi::c_int;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use thiserror::Error;

/// Flags that a device must have.
const NEEDED: c_int = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;

/// Device node that creates TAP devices.
const TUN: &str = "/dev/net/tun";
/// Most pieces of memory of one frame, including our header (IOV_MAX).
const MAX_PIECES: usize = 1024;

/// A TAP device cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TapError {
    /// The name cannot be that of an interface.
    #[error("invalid interface name {0:?}: use 1 to 15 printable ASCII characters, no slashes")]
    Name(String),
    /// No queue or descriptor was given.
    #[error("a TAP device needs at least one queue")]
    NoQueues,
    /// The kernel has no TAP support, or access to its node is denied.
    #[error("cannot open /dev/net/tun: {0}; load the module tun, and check access to the node")]
    Open(io::Error),
    /// The kernel refuses a queue of the interface.
    #[error("{name}: cannot attach to the TAP device: {source}; {why}")]
    Attach {
        /// Name of the interface.
        name: String,
        /// Meaning of the error, and the way out.
        why: &'static str,
        /// Cause.
        source: io::Error,
    },
    /// An inherited descriptor is not open.
    #[error("cannot use descriptor {number} as a TAP device: {source}; the parent process must pass it open")]
    Descriptor {
        /// Number of the descriptor.
        number: i32,
        /// Cause.
        source: io::Error,
    },
    /// The descriptor is something else.
    #[error("the descriptor is not a TAP device: {0}")]
    NotTap(io::Error),
    /// The interface was set up in another mode.
    #[error("{name}: has flags {flags:#x}, but needs IFF_TAP, IFF_NO_PI and IFF_VNET_HDR ({needed:#x})")]
    Flags {
        /// Name of the interface.
        name: String,
        /// Flags of the interface.
        flags: c_int,
        /// Required flags.
        needed: c_int,
    },
    /// Configuring the interface failed.
    #[error("{name}: cannot configure the TAP device ({call}): {source}")]
    Set {
        /// Name of the interface.
        name: String,
        /// The failed operation.
        call: &'static str,
        /// Cause.
        source: io::Error,
    },
}

/// One queue of the device.
#[derive(Debug)]
struct Queue {
    fd: Arc<OwnedFd>,
    /// With several queues, an epoll set of `fd` alone, to wait for in its place.
    ///
    /// A queue can be added to a set only while it is attached, but then stays in it when it is
    /// detached. So it is added at the start.
    wait: Option<Arc<OwnedFd>>,
    /// State that the device shares with its queues.
    shared: Arc<Shared>,
    number: u16,
}

#[derive(Debug)]
struct Shared {
    name: String,
    /// Queues that are attached.
    in_use: AtomicU16,
    /// The interface was deleted.
    is_gone: AtomicBool,
    /// Called when a queue finds that.
    told: Callback<dyn Fn() + Send + Sync>,
}

impl Queue {
    fn is_in_use(&self) -> bool {
        // Relaxed: a stale answer leads to an error from the kernel, and to another look.
        self.number < self.shared.in_use.load(Ordering::Relaxed)
    }
}

/// A TAP device.
#[derive(Debug)]
pub struct Tap {
    queues: Box<[Arc<Queue>]>,
    shared: Arc<Shared>,
    /// The kernel segments UDP (Linux 6.2).
    uso: bool,
    /// Features that the driver has accepted.
    features: AtomicU64,
    /// Asks for interfaces by name. Opened here, since a sandbox may deny it later.
    socket: Option<UnixDatagram>,
    changing: Mutex<()>,
}

impl Tap {
    /// Opens the interface `name` with `queues` queues; creates it if missing.
    ///
    /// # Errors
    /// See [`TapError`]. Creating an interface takes CAP_NET_ADMIN; opening one, CAP_NET_ADMIN or
    /// its ownership.
    pub fn open(name: &str, queues: u16) -> Result<Self, TapError> {
        let attach_all = |multi| (0..queues).map(|_| attach(name, multi)).collect::<Result<_, _>>();
        Self::from_fds(multi_queue_if(queues > 1, attach_all)?)
    }

    /// Uses inherited descriptors by their numbers; see [`Tap::from_fds`].
    ///
    /// They stay open.
    ///
    /// # Errors
    /// See [`TapError`].
    pub fn inherited(numbers: &[i32]) -> Result<Self, TapError> {
        let copy = |&number: &i32| {
            // SAFETY: the call accesses no memory, and only duplicates the descriptor, whatever
            // that is.
            let fd = unsafe { libc::fcntl(number, libc::F_DUPFD_CLOEXEC, 3) };
            check(fd as isize).map_err(|source| TapError::Descriptor { number, source })?;
            // SAFETY: the call returned a new descriptor, which nothing else owns.
            Ok(unsafe { OwnedFd::from_raw_fd(fd) })
        };
        Self::from_fds(numbers.iter().map(copy).collect::<Result<_, _>>()?)
    }

    /// Uses descriptors of /dev/net/tun, attached to queues of the same interface.
    ///
    /// For a manager with the privileges that this process lacks. The descriptors become
    /// non-blocking, for all processes that share them.
    ///
    /// # Errors
    /// See [`TapError`].
    pub fn from_fds(fds: Vec<OwnedFd>) -> Result<Self, TapError> {
        let first = fds.first().ok_or(TapError::NoQueues)?;
        let (name, _) = interface(first)?;
        let count = fds.len() as u16;
        let shared = Arc::new(Shared {
            name: name.clone(),
            in_use: AtomicU16::new(count),
            is_gone: AtomicBool::new(false),
            told: Callback::default(),
        });
        for fd in &fds {
            configure(fd, &name)?;
        }
        let with_uso = offloads(F_GUEST_CSUM | F_GUEST_USO4 | F_GUEST_USO6);
        let uso = set_value(first, libc::TUNSETOFFLOAD, with_uso).is_ok();
        set_value(first, libc::TUNSETOFFLOAD, 0).map_err(in_call(&name, "TUNSETOFFLOAD"))?;
        let queue = |(number, fd): (u16, OwnedFd)| {
            let wait = if count > 1 { Some(waiting_for(&fd)?.into()) } else { None };
            Ok(Arc::new(Queue { fd: fd.into(), wait, shared: Arc::clone(&shared), number }))
        };
        let queues = (0..).zip(fds).map(queue).collect::<io::Result<_>>().map_err(in_call(&name, "epoll"))?;
        let (features, changing) = (AtomicU64::new(0), Mutex::new(()));
        // Without one, the MTU is unknown, and an interface that is made anew is not noticed.
        let socket = UnixDatagram::unbound().ok();
        Ok(Self { queues, shared, uso, features, socket, changing })
    }

    /// Goes on with the descriptors of an earlier process, for the interface `name`.
    ///
    /// Frames in its queues stay. See [`Tap::from_fds`].
    ///
    /// # Errors
    /// See [`TapError`]; or they are of another interface.
    pub fn resume(name: &str, fds: Vec<OwnedFd>) -> Result<Self, TapError> {
        for fd in &fds {
            // Fails if the queue is attached, or the descriptor is something else, which shows below.
            let _ = set_queue(fd, libc::IFF_ATTACH_QUEUE);
        }
        let tap = Self::from_fds(fds)?;
        match tap.name() {
            found if found == name => Ok(tap),
            _ => Err(TapError::NotTap(io::Error::other("it is another interface"))),
        }
    }

    /// Name of the interface.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.shared.name
    }

    /// Asks for the state of the interface by its name, with SIOCGIFMTU or SIOCGIFFLAGS.
    fn ask(&self, call: libc::Ioctl) -> Option<libc::ifreq> {
        // Any socket answers for the interfaces of its network namespace.
        let socket = self.socket.as_ref()?;
        let mut request = request(Some(self.name()), 0);
        // SAFETY: both calls read and write a struct ifreq, which outlives the call.
        check(unsafe { libc::ioctl(socket.as_raw_fd(), call, &mut request) } as isize).ok()?;
        Some(request)
    }
}

impl BackEnd for Tap {
    type Sender = TapSender;
    type Receiver = TapReceiver;

    fn pairs(&self) -> u16 {
        self.queues.len() as u16
    }

    fn offloads(&self) -> u64 {
        let host = F_CSUM | F_HOST_TSO4 | F_HOST_TSO6 | F_HOST_ECN;
        let guest = F_GUEST_CSUM | F_GUEST_TSO4 | F_GUEST_TSO6 | F_GUEST_ECN;
        let uso = if self.uso { F_HOST_USO | F_GUEST_USO4 | F_GUEST_USO6 } else { 0 };
        host | guest | uso
    }

    fn mtu(&self) -> Option<u32> {
        let answer = self.ask(libc::SIOCGIFMTU as libc::Ioctl)?;
        // SAFETY: the call has written this field of the union.
        u32::try_from(unsafe { answer.ifr_ifru.ifru_mtu }).ok()
    }

    fn accept(&self, features: u64) -> io::Result<()> {
        let _alone = lock(&self.changing);
        // Relaxed: the lock orders.
        self.features.store(features, Ordering::Relaxed);
        self.forgiving(set_value(&self.queues[0].fd, libc::TUNSETOFFLOAD, offloads(features)))
    }

    fn look(&self) -> HostSide {
        self.attach_again()
    }

    fn tell_change(&self, told: Box<dyn Fn() + Send + Sync>) {
        // Fails if it was called before.
        self.shared.told.set(told);
    }

    fn is_up(&self) -> bool {
        !self.shared.is_gone()
    }

    fn has_carrier(&self) -> bool {
        let up = libc::IFF_UP | libc::IFF_RUNNING;
        // SAFETY: of the union's fields the call has written the flags; any bytes are flags.
        let flags = |answer: libc::ifreq| c_int::from(unsafe { answer.ifr_ifru.ifru_flags });
        // In another network namespace, perhaps.
        self.ask(libc::SIOCGIFFLAGS as libc::Ioctl).is_none_or(|answer| flags(answer) & up == up)
    }

    fn fds(&self) -> Vec<BorrowedFd<'_>> {
        self.queues.iter().map(|queue| queue.fd.as_fd()).collect()
    }

    fn use_pairs(&self, pairs: u16) -> io::Result<()> {
        let _alone = lock(&self.changing);
        // Relaxed: only we change it, and see `Queue::is_in_use`.
        let before = self.shared.in_use.load(Ordering::Relaxed);
        if pairs < before {
            // First, so that a receiver that finds its queue detached sees this, too.
            self.shared.in_use.store(pairs, Ordering::Release);
        }
        for number in pairs.min(before)..pairs.max(before) {
            let how = if pairs < before { libc::IFF_DETACH_QUEUE } else { libc::IFF_ATTACH_QUEUE };
            self.forgiving(set_queue(&self.queues[usize::from(number)].fd, how))?;
            if pairs > before {
                self.shared.in_use.store(number + 1, Ordering::Release);
            }
        }
        Ok(())
    }

    fn inject(&self, frame: &[u8]) -> io::Result<()> {
        rustix::io::write(&self.queues[0].fd, &[[0; HEADER].as_slice(), frame].concat())?;
        Ok(())
    }

    fn sender(&self, pair: u16) -> io::Result<TapSender> {
        let queue = Arc::clone(&self.queues[usize::from(pair)]);
        Ok(TapSender { queue, pieces: Vec::with_capacity(16), refused: 0 })
    }

    fn receiver(&self, pair: u16) -> io::Result<TapReceiver> {
        let queue = Arc::clone(&self.queues[usize::from(pair)]);
        let buffer = vec![0; HEADER + MAX_FRAME].into_boxed_slice();
        Ok(TapReceiver { queue, buffer, filled: 0, wakes: None })
    }
}

/// See [`Tap`].
#[derive(Debug)]
pub struct TapSender {
    queue: Arc<Queue>,
    pieces: Vec<HostSlice>,
    refused: u64,
}

impl Sender for TapSender {
    fn send(&mut self, frame: &Outgoing<'_>) -> Result<Sent, ServeError> {
        let mut header = frame.header.bytes();
        self.pieces.clear();
        self.pieces.push(HostSlice { ptr: header.as_mut_ptr(), len: HEADER });
        let mapping = frame.memory.map_segments(
            frame.segments,
            frame.header_len as u64,
            frame.len as u64,
            Access::READ,
            &mut self.pieces,
        )?;
        if self.pieces.len() > MAX_PIECES {
            return Ok(Sent::Refused);
        }
        let written = loop {
            // SAFETY: the pieces are our header, which lives until the end of this function, and
            // guest memory that `mapping` keeps mapped. The kernel only reads them. HostSlice has
            // the layout of struct iovec.
            let written = unsafe {
                let pieces = self.pieces.as_ptr().cast::<libc::iovec>();
                libc::writev(self.queue.fd.as_raw_fd(), pieces, self.pieces.len() as c_int)
            };
            match check(written) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                result => break result,
            }
        };
        drop(mapping);
        // Whatever the reason (the interface is down, its queue is full, the kernel rejects the
        // frame): a network may lose frames.
        Ok(match written {
            Ok(()) => Sent::Sent,
            Err(error) => {
                if is_loss(&error) {
                    self.queue.lose();
                }
                self.refused += 1;
                if self.refused == 1 {
                    tracing::warn!(interface = self.queue.shared.name, %error, "the TAP device refused a frame, which is dropped; further ones are only counted");
                }
                Sent::Refused
            }
        })
    }

    fn tap(&self) -> Option<BorrowedFd<'_>> {
        Some(self.queue.fd.as_fd())
    }
}

/// See [`Tap`].
#[derive(Debug)]
pub struct TapReceiver {
    queue: Arc<Queue>,
    /// Header and frame.
    buffer: Box<[u8]>,
    /// Bytes in the buffer; 0 if no frame is at hand.
    filled: usize,
    wakes: Option<WakeSource>,
}

impl TapReceiver {
    /// Reads the next frame, if there is one.
    fn read(&mut self) -> io::Result<()> {
        while self.filled < HEADER + ETH_HEADER && self.queue.is_in_use() {
            self.filled = 0;
            match rustix::io::read(&self.queue.fd, &mut self.buffer[..]) {
                Ok(filled) => self.filled = filled,
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => break,
                // Detached since the check.
                Err(rustix::io::Errno::BADFD) if !self.queue.is_in_use() => break,
                Err(error) if is_loss(&error.into()) => {
                    self.queue.lose();
                    break;
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

impl Receiver for TapReceiver {
    fn fetch(&mut self, _most: usize) -> io::Result<usize> {
        if self.filled == 0 {
            self.read()?;
        }
        Ok((self.filled > 0).into())
    }

    fn frame(&self, number: usize) -> Option<Incoming<'_>> {
        let (head, bytes) = self.buffer[..self.filled].split_first_chunk::<HEADER>()?;
        (number == 0).then(|| Incoming { header: (*head).into(), bytes })
    }

    fn done(&mut self, count: usize) {
        if count > 0 {
            self.filled = 0;
        }
    }

    fn register(&mut self, wakes: Option<&WakeSet>) -> io::Result<()> {
        let fd = self.queue.wait.as_ref().unwrap_or(&self.queue.fd);
        WakeSource::register(&mut self.wakes, fd, wakes)
    }

    fn tap(&self) -> Option<BorrowedFd<'_>> {
        Some(self.queue.fd.as_fd())
    }
}

/// Attaches with IFF_MULTI_QUEUE if `is_multi`; else without, and then with it if that is refused.
///
/// An existing multi-queue interface must be opened as one, even for one queue.
fn multi_queue_if<T>(is_multi: bool, attach: impl Fn(c_int) -> Result<T, TapError>) -> Result<T, TapError> {
    attach(if is_multi { libc::IFF_MULTI_QUEUE } else { 0 }).or_else(|error| match &error {
        TapError::Attach { source, .. } if source.raw_os_error() == Some(libc::EINVAL) && !is_multi => {
            attach(libc::IFF_MULTI_QUEUE).map_err(|_| error)
        }
        _ => Err(error),
    })
}

/// Names the call that has failed.
fn in_call(name: &str, call: &'static str) -> impl FnOnce(io::Error) -> TapError {
    let name = name.to_owned();
    move |source| TapError::Set { name, call, source }
}

fn attach(name: &str, multi: c_int) -> Result<OwnedFd, TapError> {
    let legal = |byte: u8| byte.is_ascii_graphic() && byte != b'/';
    // A percent sign makes the kernel choose a number.
    if name.is_empty() || name.len() >= libc::IFNAMSIZ || !name.bytes().all(legal) {
        return Err(TapError::Name(name.into()));
    }
    let open = rustix::fs::open(TUN, OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK, Mode::empty());
    let fd = open.map_err(|error| TapError::Open(error.into()))?;
    attach_to(&fd, name, multi)?;
    Ok(fd)
}

/// Attaches a descriptor that is not attached to an interface, or whose interface was deleted.
fn attach_to(fd: &OwnedFd, name: &str, multi: c_int) -> Result<(), TapError> {
    let mut request = request(Some(name), NEEDED | multi);
    // SAFETY: TUNSETIFF reads and writes a struct ifreq, which outlives the call.
    match check(unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNSETIFF, &mut request) } as isize) {
        Ok(()) => Ok(()),
        Err(source) => {
            let why = match source.raw_os_error() {
                Some(libc::EPERM | libc::EACCES) => {
                    "creating it takes CAP_NET_ADMIN, opening it CAP_NET_ADMIN or its ownership"
                }
                Some(libc::EBUSY) => "it is in use, and not multi-queue",
                Some(libc::EINVAL) => {
                    "it exists and is not a TAP device, or is single-queue where several are needed (multi_queue)"
                }
                Some(libc::E2BIG) => "all of its queues are in use",
                _ => "see tun(4)",
            };
            Err(TapError::Attach { name: name.into(), why, source })
        }
    }
}

/// Makes an attached descriptor ready for use.
fn configure(fd: &OwnedFd, name: &str) -> Result<(), TapError> {
    let (found, flags) = interface(fd)?;
    if flags & NEEDED != NEEDED {
        return Err(TapError::Flags { name: found, flags, needed: NEEDED });
    }
    rustix::io::ioctl_fionbio(fd, true).map_err(|error| in_call(name, "FIONBIO")(error.into()))?;
    set_int(fd, libc::TUNSETVNETHDRSZ, HEADER as c_int).map_err(in_call(name, "TUNSETVNETHDRSZ"))?;
    set_int(fd, libc::TUNSETVNETLE, 1).map_err(in_call(name, "TUNSETVNETLE"))
}

/// Whether the interface behind a descriptor was deleted: a TAP device, or a macvtap device.
fn is_loss(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EBADFD | libc::ENOLINK))
}

/// Name and flags of the interface of a descriptor.
fn interface(fd: &OwnedFd) -> Result<(String, c_int), TapError> {
    let mut request = request(None, 0);
    // SAFETY: TUNGETIFF writes a struct ifreq, which outlives the call.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNGETIFF, &mut request) } as isize)
        .map_err(TapError::NotTap)?;
    let name: Vec<u8> =
        request.ifr_name.iter().map(|&byte| byte as u8).take_while(|&byte| byte != 0).collect();
    // SAFETY: of the union's fields TUNGETIFF has written the flags; any bytes are flags.
    let flags = unsafe { request.ifr_ifru.ifru_flags };
    // Sixteen bits, unsigned.
    Ok((String::from_utf8_lossy(&name).into_owned(), c_int::from(flags as u16)))
}

/// A struct ifreq with flags, and a name where one is needed.
fn request(name: Option<&str>, flags: c_int) -> libc::ifreq {
    // SAFETY: a struct ifreq is integers and unions of such (and a pointer, for which 0 is null).
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.unwrap_or_default().bytes()) {
        *to = from as libc::c_char;
    }
    request.ifr_ifru.ifru_flags = flags as libc::c_short;
    request
}

/// An epoll set with one member.
fn waiting_for(fd: &OwnedFd) -> io::Result<OwnedFd> {
    let set = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    epoll::add(&set, fd, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
    Ok(set)
}

/// Offloads that the kernel may leave to a driver with `features`.
fn offloads(features: u64) -> libc::c_ulong {
    let has = |bit| features & bit != 0;
    // The kernel refuses segmentation without checksums, and so does section 5.1.3.1.
    if !has(F_GUEST_CSUM) {
        return 0;
    }
    let flag = |on, flag: libc::c_uint| if on { flag } else { 0 };
    let tso = has(F_GUEST_TSO4) || has(F_GUEST_TSO6);
    let flags = libc::TUN_F_CSUM
        | flag(has(F_GUEST_TSO4), libc::TUN_F_TSO4)
        | flag(has(F_GUEST_TSO6), libc::TUN_F_TSO6)
        | flag(tso && has(F_GUEST_ECN), libc::TUN_F_TSO_ECN)
        // The kernel accepts these two only together.
        | flag(has(F_GUEST_USO4) && has(F_GUEST_USO6), libc::TUN_F_USO4 | libc::TUN_F_USO6);
    flags.into()
}

/// Attaches a queue of a multi-queue interface, or detaches it.
fn set_queue(fd: &OwnedFd, how: c_int) -> io::Result<()> {
    let mut request = request(None, how);
    // SAFETY: TUNSETQUEUE reads a struct ifreq, which outlives the call.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNSETQUEUE, &mut request) } as isize)
}

/// An ioctl whose argument points to an int.
fn set_int(fd: &OwnedFd, call: libc::Ioctl, value: c_int) -> io::Result<()> {
    // SAFETY: callers pass ioctls that read an int, which outlives the call.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), call, &value) } as isize)
}

/// An ioctl whose argument is a number.
fn set_value(fd: &OwnedFd, call: libc::Ioctl, value: libc::c_ulong) -> io::Result<()> {
    // SAFETY: callers pass ioctls that access no memory.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), call, value) } as isize)
}

/// The error of a system call that returned less than 0.
fn check(result: isize) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
