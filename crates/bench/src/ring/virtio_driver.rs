//! The driver side of the crate virtio-driver, split and packed.
//!
//! Only the queue is measured. It takes an address translator of a type without a public name,
//! which only a transport of the crate can make. [`translator`] connects over vhost-user to a
//! minimal server ([`serve`]), takes the translator (addresses are those of this process) and drops
//! the connection.
//!
//! The crate publishes each buffer when it is added, and does not report written lengths. Version
//! 0.6.1 leaves NEXT set in a packed chain of one descriptor, so packed queues are measured with
//! four.
use super::case::{Case, QUEUE_SIZE, SegmentShape, Side};
use super::scripted::ScriptedDevice;
use crate::BenchError;
use crate::error::{broken, miscounted};
use crate::memory::Pages;
use crate::subject::Subject;
use ::virtio_driver::virtqueue::{Virtqueue, VirtqueueLayout};
use ::virtio_driver::{IovaTranslator, Le64, VhostUser, VirtioFeatureFlags, VirtioTransport, iovec};
use paravane_ring::QueueAddresses;
use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicU32, Ordering};

/// Name in results.
pub(crate) const NAME: &str = "virtio-driver";

/// The queue of the crate.
pub(crate) struct Adapter {
    queue: Virtqueue<'static, ()>,
}

impl Adapter {
    /// Makes a queue. Drop it before its pages.
    pub(crate) fn new(features: u64) -> Result<(Self, QueueAddresses, Pages), BenchError> {
        let features = VirtioFeatureFlags::from_bits(features)
            .ok_or_else(|| broken(NAME, format_args!("unknown features {features:#x}")))?;
        let layout = VirtqueueLayout::new::<()>(1, QUEUE_SIZE.into(), features)
            .map_err(|error| broken(NAME, error))?;
        let pages = Pages::new(layout.end_offset);
        // SAFETY: the pages have this length and outlive the queue, by the rule above. The device
        // writes to bytes that the queue holds as a slice; the transports of the crate do the same.
        let bytes = unsafe { pages.bytes() };
        let translator = translator().map_err(|error| broken(NAME, error))?;
        let mut queue =
            Virtqueue::new(translator, bytes, QUEUE_SIZE, features).map_err(|error| broken(NAME, error))?;
        queue.set_used_notif_enabled(false);
        let addresses = QueueAddresses {
            size: QUEUE_SIZE,
            desc: queue.desc_table_ptr().addr() as u64,
            driver: queue.driver_area_ptr().addr() as u64,
            device: queue.device_area_ptr().addr() as u64,
        };
        Ok((Self { queue }, addresses, pages))
    }

    /// Adds and publishes a buffer of these segments.
    #[inline]
    pub(crate) fn add(&mut self, segments: &[SegmentShape]) -> io::Result<u16> {
        self.queue.add_request(|(), add| {
            let mut addr = 0x10_0000;
            for segment in segments {
                let len = segment.len as usize;
                // The bytes of the buffer are not accessed.
                add(
                    iovec { iov_base: std::ptr::without_provenance_mut(addr), iov_len: len },
                    segment.writable,
                )?;
                addr += len;
            }
            Ok(())
        })
    }

    /// Whether the device wants a kick.
    #[inline]
    pub(crate) fn kick(&mut self) -> bool {
        self.queue.avail_notif_needed()
    }

    /// The next used buffer.
    #[inline]
    pub(crate) fn take(&mut self) -> Option<u16> {
        self.queue.completions().next().map(|completion| completion.id)
    }
}

/// The translator of a vhost-user connection.
fn translator() -> io::Result<Box<dyn IovaTranslator>> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    // Relaxed: only uniqueness matters.
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let path = std::env::temp_dir().join(format!("paravane-bench-{}-{number}", std::process::id()));
    let listener = UnixListener::bind(&path)?;
    let server = std::thread::spawn(move || listener.accept().and_then(|(stream, _)| serve(stream)));
    let connection =
        VhostUser::<Le64, ()>::new(&path.to_string_lossy(), VirtioFeatureFlags::VERSION_1.bits());
    std::fs::remove_file(&path)?;
    let translator = connection?.iova_translator();
    match server.join() {
        Ok(served) => served.map(|()| translator),
        Err(_) => Err(io::Error::other("the server panicked")),
    }
}

/// Answers each request with the bits that the connection needs, until it closes.
fn serve(mut stream: UnixStream) -> io::Result<()> {
    /// VERSION_1, and bit 30: protocol features.
    const FEATURES: u64 = 1 << 32 | 1 << 30;
    /// REPLY_ACK, CONFIG and CONFIGURE_MEM_SLOTS.
    const PROTOCOL: u64 = 1 << 3 | 1 << 9 | 1 << 15;
    let mut header = [0u32; 3];
    loop {
        for word in &mut header {
            let mut bytes = [0; 4];
            match stream.read_exact(&mut bytes) {
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
                result => result?,
            }
            *word = u32::from_ne_bytes(bytes);
        }
        let [request, flags, size] = header;
        io::copy(&mut (&mut stream).take(size.into()), &mut io::sink())?;
        let answer = match request {
            1 => FEATURES,
            15 => PROTOCOL,
            36 => 8,
            // An acknowledgement, if requested.
            _ if flags & 8 != 0 => 0,
            _ => continue,
        };
        let mut reply = Vec::new();
        for word in [request, 1 | 4, 8] {
            reply.extend_from_slice(&word.to_ne_bytes());
        }
        reply.extend_from_slice(&answer.to_ne_bytes());
        stream.write_all(&reply)?;
    }
}

/// Whether the crate supports this case: no indirect tables, no IN_ORDER.
pub(crate) fn has(case: Case) -> bool {
    !case.in_order && !case.indirect && (case.descriptors() > 1 || !case.packed)
}

/// The subject of a case with one thread.
pub(crate) struct Peer {
    adapter: Adapter,
    script: ScriptedDevice,
    segments: &'static [SegmentShape],
    batch: u16,
    written: u32,
    _pages: Pages,
}

impl Peer {
    pub(crate) fn new(case: Case) -> Result<Self, BenchError> {
        assert!(case.side == Side::Driver && has(case));
        let (adapter, addresses, pages) = Adapter::new(case.features())?;
        let script = ScriptedDevice::at(case, pages.shared(), pages.address(), addresses);
        let (segments, batch, written) = (case.segments(), case.batch, case.written());
        Ok(Self { adapter, script, segments, batch, written, _pages: pages })
    }
}

impl Subject for Peer {
    fn run(&mut self, batches: u32) -> Result<u64, BenchError> {
        let Self { adapter, script, segments, batch, written, .. } = self;
        let mut sum = 0u64;
        for _ in 0..batches {
            for _ in 0..*batch {
                adapter.add(segments).map_err(|error| broken(NAME, error))?;
            }
            sum = sum.wrapping_add(adapter.kick().into());
            script.serve();
            let mut count = 0;
            while adapter.take().is_some() {
                // The crate does not report written lengths; add the expected one.
                sum = sum.wrapping_add((*written).into());
                count += 1;
            }
            if count != usize::from(*batch) {
                return Err(miscounted(NAME, count, *batch));
            }
        }
        Ok(sum)
    }

    fn position(&self) -> u16 {
        self.script.available()
    }
}
