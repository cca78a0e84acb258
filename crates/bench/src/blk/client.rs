//! The client: the crate virtio-driver over vhost-user, one queue, one thread.
//!
//! ```text
//!   connect -> run, any number of times (requests stay in flight between windows) -> drop
//!
//!   run: submit idle requests -> kick -> wait: event or poll -> take, check -> ...
//! ```
//! It works around two defects of version 0.6.1 in packed rings:
//!
//! * Between the store of the event index and the load of the next descriptor's flags, the crate
//!   has no barrier and can miss an interrupt. The client enables interrupts again, with a barrier,
//!   and checks the ring before it sleeps.
//! * The crate counts descriptors since its last look at the event index in 16 bits, and does not
//!   look while kicks are off. It can miss a kick, once in thousands of times that the device
//!   sleeps. The client kicks again after [`PATIENCE`]; `repeated-kicks` counts that.
use super::case::{BLOCK, Case, SPAN, Work};
use crate::Client as Mode;
use hdrhistogram::Histogram;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use nix::unistd::ftruncate;
use std::ffi::c_void;
use std::io;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};
use virtio_driver::{
    EventFd, QueueNotifier, VhostUser, VirtioBlkFeatureFlags, VirtioBlkQueue, VirtioBlkTransport,
    VirtioFeatureFlags,
};

/// Time limit for a server to listen.
const START: Duration = Duration::from_secs(10);
/// Time that the client sleeps before it kicks again.
const PATIENCE: Duration = Duration::from_millis(50);
/// Time limit for a request.
const LONGEST: Duration = Duration::from_secs(10);
/// Descriptors of a request: header, data, status.
const DESCRIPTORS: usize = 3;
/// Polls of the ring between two readings of the clock.
const LOOKS: u32 = 4096;

/// The figures of a window.
pub(super) struct Window {
    /// Completed requests.
    pub(super) requests: u64,
    /// Length of the window.
    pub(super) elapsed: Duration,
    /// Nanoseconds from before a request is submitted until it is taken back.
    pub(super) latencies: Histogram<u32>,
    /// Longest time without a completion.
    pub(super) longest_gap: Duration,
    /// Number of kicks.
    pub(super) kicks: u64,
    /// Number of times that the client slept.
    pub(super) sleeps: u64,
    /// Number of kicks repeated after [`PATIENCE`].
    pub(super) repeated_kicks: u64,
}

/// A connected driver.
pub(super) struct Client {
    // Dropped before its memory.
    queue: VirtioBlkQueue<'static, usize>,
    buffers: Buffers,
    kick: Box<dyn QueueNotifier>,
    call: Arc<EventFd>,
    _transport: Box<VirtioBlkTransport>,
    mode: Mode,
    packed: bool,
    work: Work,
    offsets: Offsets,
    /// Per request: time of submission and offset, if in flight.
    requests: Vec<Option<(Instant, u64)>>,
    /// Requests that have just completed.
    completed: Vec<usize>,
}

impl Client {
    /// Connects to a server. `alive` returns its exit status if it has ended.
    ///
    /// # Errors
    /// Why there is no device, in one line.
    pub(super) fn connect(
        socket: &Path,
        case: Case,
        mode: Mode,
        mut alive: impl FnMut() -> Option<String>,
    ) -> Result<Self, String> {
        let mut features = VirtioFeatureFlags::VERSION_1 | VirtioFeatureFlags::RING_EVENT_IDX;
        features.set(VirtioFeatureFlags::RING_PACKED, case.packed);
        let device = VirtioBlkFeatureFlags::BLK_SIZE | VirtioBlkFeatureFlags::FLUSH;
        let wanted = features.bits() | device.bits();
        let path = socket.to_str().ok_or("the path of the socket is not UTF-8")?;
        let start = Instant::now();
        let mut transport: Box<VirtioBlkTransport> = loop {
            match VhostUser::new(path, wanted) {
                Ok(transport) => break Box::new(transport),
                Err(error) => {
                    if let Some(ended) = alive() {
                        return Err(ended);
                    }
                    let later =
                        matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused);
                    if !later || start.elapsed() > START {
                        return Err(format!("cannot connect: {error}"));
                    }
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
        };
        if transport.get_features() & features.bits() != features.bits() {
            return Err(format!(
                "the device offers features {:#x}; need {features:?}",
                transport.get_features()
            ));
        }
        let line = |what: &str, error: io::Error| format!("cannot {what}: {error}");
        let config = transport.get_config().map_err(|error| line("read the configuration", error))?;
        let capacity = u64::from(config.capacity) * 512;
        if capacity != SPAN {
            return Err(format!("the disk has {capacity} bytes; the image has {SPAN}"));
        }
        let size = (case.depth * DESCRIPTORS).next_power_of_two().max(128) as u16;
        let queues = VirtioBlkQueue::setup_queues(&mut *transport, 1, size);
        let queue = queues
            .map_err(|error| line("set up the queue", error))?
            .pop()
            .ok_or("the device has no queue")?;
        let buffers = Buffers::new(case.depth, case.work.bytes as usize)
            .map_err(|error| line("make buffers", error))?;
        transport
            .map_mem_region(buffers.ptr.as_ptr().addr(), buffers.len, buffers.file.as_raw_fd(), 0)
            .map_err(|error| line("share the buffers", error))?;
        let (kick, call) = (transport.get_submission_notifier(0), transport.get_completion_fd(0));
        let mut client = Self {
            queue,
            buffers,
            kick,
            call,
            _transport: transport,
            mode,
            packed: case.packed,
            work: case.work,
            offsets: Offsets::new(case.work),
            requests: vec![None; case.depth],
            completed: Vec::with_capacity(case.depth),
        };
        client.queue.set_used_notif_enabled(mode == Mode::Event);
        Ok(client)
    }

    /// Keeps all requests in flight for `length`.
    ///
    /// # Errors
    /// What the device did wrong, in one line.
    pub(super) fn run(&mut self, length: Duration) -> Result<Window, String> {
        let bounds = Histogram::new_with_bounds(1, LONGEST.as_nanos() as u64, 3);
        let mut window = Window {
            requests: 0,
            elapsed: Duration::ZERO,
            latencies: bounds.map_err(|error| error.to_string())?,
            longest_gap: Duration::ZERO,
            kicks: 0,
            sleeps: 0,
            repeated_kicks: 0,
        };
        let start = Instant::now();
        let mut now = start;
        for request in 0..self.requests.len() {
            if self.requests[request].is_none() {
                self.submit(request, now)?;
            }
        }
        self.kick(&mut window)?;
        while now < start + length {
            self.wait(&mut window)?;
            for completion in self.queue.completions() {
                if completion.ret != 0 {
                    return Err(format!("a request failed with status {}", completion.ret));
                }
                self.completed.push(completion.context);
            }
            let last = std::mem::replace(&mut now, Instant::now());
            window.longest_gap = window.longest_gap.max(now - last);
            while let Some(request) = self.completed.pop() {
                let (submitted, offset) = self.requests[request].take().ok_or("a request completed twice")?;
                self.check(request, offset)?;
                window.requests += 1;
                window.latencies.saturating_record((now - submitted).as_nanos() as u64);
                self.submit(request, now)?;
            }
            self.kick(&mut window)?;
        }
        window.elapsed = now - start;
        Ok(window)
    }

    /// Makes a request available, without a kick.
    fn submit(&mut self, request: usize, now: Instant) -> Result<(), String> {
        let offset = self.offsets.next();
        let len = self.work.bytes as usize;
        let data = self.buffers.of(request, len);
        for block in 0..self.work.bytes / BLOCK {
            // A write stores the number of the block; a read must replace the stamp by it.
            let stamp = if self.work.write { offset / BLOCK + block } else { u64::MAX };
            self.buffers.set(data, block, stamp);
        }
        // SAFETY: the buffer lives as long as the queue, and only this request uses it until it
        // completes.
        let submitted = unsafe {
            match self.work.write {
                true => self.queue.write_raw(offset, data, len, request),
                false => self.queue.read_raw(offset, data, len, request),
            }
        };
        submitted.map_err(|error| format!("cannot submit a request: {error}"))?;
        self.requests[request] = Some((now, offset));
        Ok(())
    }

    fn check(&self, request: usize, offset: u64) -> Result<(), String> {
        let data = self.buffers.of(request, self.work.bytes as usize);
        for block in 0..self.work.bytes / BLOCK {
            let (wanted, found) = (offset / BLOCK + block, self.buffers.get(data, block));
            if found != wanted {
                return Err(format!("block {wanted} has the number {found:#x}"));
            }
        }
        Ok(())
    }

    fn kick(&mut self, window: &mut Window) -> Result<(), String> {
        if self.queue.avail_notif_needed() {
            window.kicks += 1;
            self.kick.notify().map_err(|error| format!("cannot kick: {error}"))?;
        }
        Ok(())
    }

    /// Waits for a completion.
    fn wait(&mut self, window: &mut Window) -> Result<(), String> {
        let silent = || Err(format!("no answer for {LONGEST:?}"));
        let mut start = None;
        loop {
            for _ in 0..LOOKS {
                if self.queue.completions().has_next() {
                    return Ok(());
                }
                if self.mode == Mode::Event {
                    break;
                }
                std::hint::spin_loop();
            }
            if *start.get_or_insert_with(Instant::now) + LONGEST < Instant::now() {
                return silent();
            }
            if self.mode == Mode::Event {
                self.sleep(window)?;
            }
        }
    }

    /// Sleeps until the device interrupts, or for [`PATIENCE`].
    fn sleep(&mut self, window: &mut Window) -> Result<(), String> {
        if self.packed {
            self.queue.set_used_notif_enabled(true);
            if self.queue.completions().has_next() {
                return Ok(());
            }
        }
        window.sleeps += 1;
        let failed = |error: io::Error| format!("cannot wait: {error}");
        let patience = PollTimeout::try_from(PATIENCE).unwrap_or(PollTimeout::NONE);
        match poll(&mut [PollFd::new(self.call.as_fd(), PollFlags::POLLIN)], patience) {
            Ok(0) => {
                window.repeated_kicks += 1;
                self.kick.notify().map_err(failed)
            }
            Ok(_) => self.call.read().map(drop).or_else(|error| match error.kind() {
                io::ErrorKind::WouldBlock => Ok(()),
                _ => Err(failed(error)),
            }),
            Err(Errno::EINTR) => Ok(()),
            Err(error) => Err(failed(error.into())),
        }
    }
}

/// Memory shared with the device: a buffer per request.
struct Buffers {
    file: OwnedFd,
    ptr: NonNull<c_void>,
    len: usize,
}

impl Buffers {
    fn new(count: usize, bytes: usize) -> io::Result<Self> {
        let len = count * bytes;
        let file = memfd_create("bench-buffers", MFdFlags::MFD_CLOEXEC)?;
        ftruncate(&file, len as i64)?;
        let size = NonZeroUsize::new(len).ok_or(io::ErrorKind::InvalidInput)?;
        let how = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses; only `drop` unmaps it.
        let ptr = unsafe { mmap(None, size, how, MapFlags::MAP_SHARED | MapFlags::MAP_POPULATE, &file, 0) }?;
        Ok(Self { file, ptr, len })
    }

    /// The buffer of a request, of `len` bytes.
    fn of(&self, request: usize, len: usize) -> *mut u8 {
        assert!((request + 1) * len <= self.len);
        self.ptr.as_ptr().cast::<u8>().wrapping_add(request * len)
    }

    /// Stores the number of a block in a buffer.
    fn set(&self, data: *mut u8, block: u64, number: u64) {
        // SAFETY: `of` checked that the buffer is in the mapping; mapping and blocks are
        // page-aligned. The device, in another process, does not access it now.
        unsafe { data.wrapping_add((block * BLOCK) as usize).cast::<u64>().write_volatile(number.to_le()) };
    }

    fn get(&self, data: *mut u8, block: u64) -> u64 {
        // SAFETY: as in `set`.
        u64::from_le(unsafe { data.wrapping_add((block * BLOCK) as usize).cast::<u64>().read_volatile() })
    }
}

impl Drop for Buffers {
    fn drop(&mut self) {
        // SAFETY: this owns the mapping, and the queue that used it is dropped.
        if let Err(error) = unsafe { munmap(self.ptr, self.len) } {
            debug_assert!(false, "{error}");
        }
    }
}

/// The sequence of offsets in the image.
struct Offsets {
    work: Work,
    state: u64,
}

impl Offsets {
    fn new(work: Work) -> Self {
        Self { work, state: if work.sequential { 0 } else { 0x9e37_79b9_7f4a_7c15 } }
    }

    fn next(&mut self) -> u64 {
        let Work { sequential, bytes, .. } = self.work;
        let places = SPAN / bytes;
        if sequential {
            let place = self.state % places;
            self.state += 1;
            return place * bytes;
        }
        // xorshift64.
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        self.state % places * bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_are_in_the_image() {
        for sequential in [false, true] {
            let bytes = 128 << 10;
            let mut offsets = Offsets::new(Work { write: false, sequential, bytes });
            let drawn: Vec<u64> = (0..5000).map(|_| offsets.next()).collect();
            assert!(drawn.iter().all(|offset| offset % bytes == 0 && offset + bytes <= SPAN));
            let in_order = drawn.windows(2).filter(|pair| pair[1] == (pair[0] + bytes) % SPAN).count();
            assert_eq!(in_order == drawn.len() - 1, sequential, "{in_order}");
        }
    }

    #[test]
    fn blocks_have_numbers() {
        let buffers = Buffers::new(3, 8192).unwrap();
        let data = buffers.of(2, 8192);
        buffers.set(data, 1, 77);
        assert_eq!((buffers.get(data, 0), buffers.get(data, 1)), (0, 77));
        assert_eq!(buffers.get(buffers.of(1, 8192), 1), 0);
    }
}
