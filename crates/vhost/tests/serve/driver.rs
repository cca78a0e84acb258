//! Block driver of the crate virtio-driver without a VM, and a model of its disk.
use paravane_dma::{Backing, Region, RegionConfig};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::Path;
use std::sync::Arc;
use virtio_driver::{
    VhostUser, VirtioBlkFeatureFlags, VirtioBlkQueue, VirtioBlkTransport, VirtioFeatureFlags,
};

/// Size in bytes of one slot's buffer, and of the largest request.
const BUFFER: usize = 16 << 10;
const SECTOR: usize = 512;

/// Features that a driver accepts.
#[derive(Clone, Copy)]
pub(crate) struct Wish {
    pub(crate) packed: bool,
    pub(crate) event_idx: bool,
    pub(crate) queues: usize,
    pub(crate) depth: usize,
}

pub(crate) use paravane_test_support::Random;
use paravane_test_support::patience;

/// One request in flight.
#[derive(Clone, Copy)]
struct Request {
    at: usize,
    len: usize,
    kind: Kind,
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Read,
    Write(u8),
    /// Whether the space may be deallocated.
    Zero(bool),
    /// Two requests: a discard, and then zeroes written to the same place.
    Discard,
    Flush,
}

/// Driver with its device.
///
/// The queues are dropped before the transport that they belong to.
pub(crate) struct Driver {
    queues: Vec<VirtioBlkQueue<'static, usize>>,
    pub(crate) transport: Box<VirtioBlkTransport>,
    buffers: Arc<Region>,
    wish: Wish,
    /// A request may wait for a store that fails and recovers.
    waits_for_store: bool,
}

impl Driver {
    pub(crate) fn connect(socket: &Path, wish: Wish) -> std::io::Result<Self> {
        let mut features = VirtioFeatureFlags::VERSION_1.bits()
            | VirtioBlkFeatureFlags::MQ.bits()
            | VirtioBlkFeatureFlags::FLUSH.bits()
            | VirtioBlkFeatureFlags::DISCARD.bits()
            | VirtioBlkFeatureFlags::WRITE_ZEROES.bits();
        if wish.packed {
            features |= VirtioFeatureFlags::RING_PACKED.bits();
        }
        if wish.event_idx {
            features |= VirtioFeatureFlags::RING_EVENT_IDX.bits();
        }
        let socket = socket.to_str().unwrap();
        let mut transport: Box<VirtioBlkTransport> = Box::new(VhostUser::new(socket, features)?);
        let accepted = transport.get_features();
        assert_ne!(accepted & VirtioBlkFeatureFlags::DISCARD.bits(), 0, "{accepted:#x}");
        assert_eq!(accepted & VirtioFeatureFlags::RING_PACKED.bits() != 0, wish.packed, "{accepted:#x}");
        let mut queues = VirtioBlkQueue::setup_queues(&mut *transport, wish.queues, 128)?;
        queues.iter_mut().for_each(|queue| queue.set_used_notif_enabled(true));
        let size = (wish.queues * wish.depth * BUFFER) as u64;
        let config = RegionConfig { gpa: 0, size, backing: Backing::Pages, writable: true };
        let buffers = Region::new(config).unwrap();
        let at = buffers.host().as_ptr().addr();
        transport.map_mem_region(at, size as usize, buffers.fd().unwrap().as_raw_fd(), 0)?;
        Ok(Self { queues, transport, buffers, wish, waits_for_store: false })
    }

    /// Waits longer for each request, which may wait for a store.
    #[allow(dead_code, reason = "for tests of the program only")]
    pub(crate) fn be_patient(&mut self) {
        self.waits_for_store = true;
    }

    fn buffer(&self, queue: usize, slot: usize) -> *mut u8 {
        let at = (queue * self.wish.depth + slot) * BUFFER;
        self.buffers.host().as_ptr().wrapping_add(at)
    }

    /// Sends `requests` requests on each queue, and checks all data.
    ///
    /// Compares reads with `model`, and applies writes to it.
    pub(crate) fn exercise(&mut self, model: &mut [u8], requests: usize, random: &mut Random) {
        let sectors = model.len() / SECTOR;
        let depth = self.wish.depth;
        let mut flying: Vec<Vec<Option<Request>>> = vec![vec![None; depth]; self.wish.queues];
        let mut left = vec![requests; self.wish.queues];
        while left.iter().any(|left| *left > 0) || flying.iter().flatten().any(Option::is_some) {
            for queue in 0..self.wish.queues {
                for slot in 0..depth {
                    if flying[queue][slot].is_some() || left[queue] == 0 {
                        continue;
                    }
                    let len = (1 + random.below(BUFFER / SECTOR)) * SECTOR;
                    let at = random.below(sectors - BUFFER / SECTOR) * SECTOR;
                    let clash = |r: &Request| r.kind != Kind::Flush && r.at < at + len && at < r.at + r.len;
                    if flying.iter().flatten().flatten().any(clash) {
                        continue;
                    }
                    let kind = match random.below(16) {
                        0 => Kind::Flush,
                        1 => Kind::Zero(random.below(2) == 0),
                        2 if left[queue] > 1 => Kind::Discard,
                        2..8 => Kind::Write(random.below(256) as u8),
                        _ => Kind::Read,
                    };
                    self.send(queue, slot, Request { at, len, kind });
                    flying[queue][slot] = Some(Request { at, len, kind });
                    left[queue] -= if kind == Kind::Discard { 2 } else { 1 };
                }
                if self.queues[queue].avail_notif_needed() {
                    self.transport.get_submission_notifier(queue).notify().unwrap();
                }
            }
            self.wait(&flying);
            for (queue, flying) in flying.iter_mut().enumerate() {
                let done: Vec<_> = self.queues[queue].completions().map(|c| (c.context, c.ret)).collect();
                for (slot, ret) in done {
                    assert_eq!(ret, 0);
                    let request = flying[slot].take().expect("completed twice");
                    if request.kind == Kind::Discard {
                        // The range may read as anything now, and as zeroes after these.
                        let zeroes = Request { kind: Kind::Zero(true), ..request };
                        self.send(queue, slot, zeroes);
                        flying[slot] = Some(zeroes);
                    } else {
                        self.check(queue, slot, request, model);
                    }
                }
            }
        }
    }

    /// Writes the pattern of `seed` once. Returns the request's error number, or 0.
    #[allow(dead_code, reason = "for tests of the program only")]
    pub(crate) fn write_once(&mut self, at: usize, len: usize, seed: u8) -> i32 {
        self.once(Request { at, len, kind: Kind::Write(seed) })
    }

    /// Reads once. Returns the data, or the request's error number.
    #[allow(dead_code, reason = "for tests of the program only")]
    pub(crate) fn read_once(&mut self, at: usize, len: usize) -> Result<Vec<u8>, i32> {
        match self.once(Request { at, len, kind: Kind::Read }) {
            // SAFETY: the request is completed: nothing writes to the slot's buffer.
            0 => Ok(unsafe { std::slice::from_raw_parts(self.buffer(0, 0), len) }.to_vec()),
            error => Err(error),
        }
    }

    #[allow(dead_code, reason = "for tests of the program only")]
    fn once(&mut self, request: Request) -> i32 {
        self.send(0, 0, request);
        if self.queues[0].avail_notif_needed() {
            self.transport.get_submission_notifier(0).notify().unwrap();
        }
        let flying = vec![vec![Some(request)]];
        loop {
            self.wait(&flying);
            if let Some(done) = self.queues[0].completions().next() {
                return done.ret;
            }
        }
    }

    fn send(&mut self, queue: usize, slot: usize, request: Request) {
        let buffer = self.buffer(queue, slot);
        let Request { at, len, kind } = request;
        let at = at as u64;
        let queue = &mut self.queues[queue];
        match kind {
            // SAFETY: the buffer is this slot's, of `BUFFER` bytes, mapped as long as `self`, and
            // nothing else uses it.
            Kind::Read => unsafe {
                buffer.write_bytes(0xa5, len);
                queue.read_raw(at, buffer, len, slot)
            },
            // SAFETY: as above.
            Kind::Write(seed) => unsafe {
                for index in 0..len {
                    buffer.add(index).write(seed.wrapping_add(index as u8));
                }
                queue.write_raw(at, buffer, len, slot)
            },
            Kind::Zero(unmap) => queue.write_zeroes(at, len as u64, unmap, slot),
            Kind::Discard => queue.discard(at, len as u64, slot),
            Kind::Flush => queue.flush(slot),
        }
        .unwrap();
    }

    fn check(&self, queue: usize, slot: usize, request: Request, model: &mut [u8]) {
        let Request { at, len, kind } = request;
        let range = &mut model[at..at + len];
        match kind {
            Kind::Read => {
                // SAFETY: the request is completed: nothing writes to the slot's buffer.
                let read = unsafe { std::slice::from_raw_parts(self.buffer(queue, slot), len) };
                assert!(read == range, "{len} bytes at {at} are not what was written");
            }
            Kind::Write(seed) => {
                for (index, byte) in range.iter_mut().enumerate() {
                    *byte = seed.wrapping_add(index as u8);
                }
            }
            Kind::Zero(_) => range.fill(0),
            Kind::Discard | Kind::Flush => {}
        }
    }

    /// Waits for an interrupt.
    fn wait(&mut self, flying: &[Vec<Option<Request>>]) {
        if self.queues.iter_mut().any(|queue| queue.completions().has_next())
            || !flying.iter().flatten().any(Option::is_some)
        {
            return;
        }
        let calls: Vec<_> = (0..self.wish.queues).map(|q| self.transport.get_completion_fd(q)).collect();
        // SAFETY: the eventfds are in `calls`, which outlives `fds`.
        let borrow = |fd| unsafe { BorrowedFd::borrow_raw(fd) };
        let mut fds: Vec<_> = calls
            .iter()
            .map(|call| PollFd::from_borrowed_fd(borrow(call.as_raw_fd()), PollFlags::IN))
            .collect();
        let patience = patience() * (1 + u32::from(self.waits_for_store));
        let patience = Timespec { tv_sec: patience.as_secs() as i64, tv_nsec: 0 };
        let Wish { packed, event_idx, queues, depth } = self.wish;
        let ready = poll(&mut fds, Some(&patience)).unwrap();
        assert_ne!(
            ready, 0,
            "no interrupt: packed {packed}, event_idx {event_idx}, {queues} queues of {depth}"
        );
        for (fd, call) in fds.iter().zip(&calls) {
            if !fd.revents().is_empty() {
                call.read().unwrap();
            }
        }
    }
}
