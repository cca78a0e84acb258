//! A connection to a disk over vhost-user: the crate virtio-driver with one queue.
use hdrhistogram::Histogram;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use nix::unistd::ftruncate;
use std::ffi::c_void;
use std::io;
use std::num::NonZeroUsize;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};
use virtio_driver::{
    EventFd, QueueNotifier, VhostUser, VirtioBlkFeatureFlags, VirtioBlkQueue, VirtioBlkTransport,
    VirtioFeatureFlags,
};

/// Bytes of a block, which begins with its number.
pub(crate) const BLOCK: u64 = 4096;
/// Time limit for a server to listen.
const START: Duration = Duration::from_secs(10);
/// Time limit for a request.
pub(crate) const LONGEST: Duration = Duration::from_secs(10);
/// Descriptors of a request: header, data, status.
const DESCRIPTORS: usize = 3;

/// What a connection asks for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted {
    /// Packed rings.
    pub(crate) packed: bool,
    /// Bytes that the disk must have.
    pub(crate) capacity: u64,
    /// Most requests in flight.
    pub(crate) depth: usize,
    /// Bytes of a request.
    pub(crate) bytes: u64,
}

/// A disk with one queue and a buffer for each request.
pub(crate) struct DiskConnection {
    // Dropped before its memory.
    pub(crate) queue: VirtioBlkQueue<'static, usize>,
    pub(crate) buffers: Buffers,
    pub(crate) kick: Box<dyn QueueNotifier>,
    /// Used buffer notifications.
    pub(crate) call: Arc<EventFd>,
    _transport: Box<VirtioBlkTransport>,
}

impl DiskConnection {
    /// Connects to a server, and waits for it to listen.
    ///
    /// `alive` returns the exit status of the server if it has ended.
    ///
    /// # Errors
    /// Why there is no device, in one line.
    pub(crate) fn new(
        socket: &Path,
        wanted: Wanted,
        mut alive: impl FnMut() -> Option<String>,
    ) -> Result<Self, String> {
        let mut features = VirtioFeatureFlags::VERSION_1 | VirtioFeatureFlags::RING_EVENT_IDX;
        features.set(VirtioFeatureFlags::RING_PACKED, wanted.packed);
        let device = VirtioBlkFeatureFlags::BLK_SIZE | VirtioBlkFeatureFlags::FLUSH;
        let acceptable = features.bits() | device.bits();
        // SPDK has none.
        features.remove(VirtioFeatureFlags::RING_EVENT_IDX);
        let path = socket.to_str().ok_or("the path of the socket is not UTF-8")?;
        let start = Instant::now();
        let mut transport: Box<VirtioBlkTransport> = loop {
            match VhostUser::new(path, acceptable) {
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
        if capacity != wanted.capacity {
            return Err(format!("the disk has {capacity} bytes; the image has {}", wanted.capacity));
        }
        let size = (wanted.depth * DESCRIPTORS).next_power_of_two().max(128) as u16;
        let queues = VirtioBlkQueue::setup_queues(&mut *transport, 1, size);
        let queue = queues
            .map_err(|error| line("set up the queue", error))?
            .pop()
            .ok_or("the device has no queue")?;
        let buffers =
            Buffers::new(wanted.depth, wanted.bytes as usize).map_err(|error| line("make buffers", error))?;
        transport
            .map_mem_region(buffers.ptr.as_ptr().addr(), buffers.len, buffers.file.as_raw_fd(), 0)
            .map_err(|error| line("share the buffers", error))?;
        let (kick, call) = (transport.get_submission_notifier(0), transport.get_completion_fd(0));
        Ok(Self { queue, buffers, kick, call, _transport: transport })
    }
}

/// A histogram of latencies in nanoseconds.
///
/// # Errors
/// Its bounds are invalid.
pub(crate) fn latencies() -> Result<Histogram<u32>, String> {
    Histogram::new_with_bounds(1, LONGEST.as_nanos() as u64, 3).map_err(|error| error.to_string())
}

/// Memory shared with the device: a buffer per request.
pub(crate) struct Buffers {
    file: OwnedFd,
    ptr: NonNull<c_void>,
    len: usize,
}

impl Buffers {
    pub(crate) fn new(count: usize, bytes: usize) -> io::Result<Self> {
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
    pub(crate) fn of(&self, request: usize, len: usize) -> *mut u8 {
        assert!((request + 1) * len <= self.len);
        self.ptr.as_ptr().cast::<u8>().wrapping_add(request * len)
    }

    /// Stores the number of a block in a buffer.
    pub(crate) fn set(&self, data: *mut u8, block: u64, number: u64) {
        // SAFETY: `of` checked that the buffer is in the mapping; mapping and blocks are
        // page-aligned. The device, in another process, does not access it now.
        unsafe { data.wrapping_add((block * BLOCK) as usize).cast::<u64>().write_volatile(number.to_le()) };
    }

    /// The number of a block in a buffer.
    pub(crate) fn get(&self, data: *mut u8, block: u64) -> u64 {
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

#[cfg(test)]
mod tests {
    use super::*;
    #[test]
    fn blocks_have_numbers() {
        let buffers = Buffers::new(3, 8192).unwrap();
        let data = buffers.of(2, 8192);
        buffers.set(data, 1, 77);
        assert_eq!((buffers.get(data, 0), buffers.get(data, 1)), (0, 77));
        assert_eq!(buffers.get(buffers.of(1, 8192), 1), 0);
    }
}
