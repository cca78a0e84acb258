//! Cases, subjects and placements.
use crate::guest::{Card, HEADERS, Image, OneDevice, Peer};
use paravane_vmm::{BlockOrder, RunConfig};
use std::fmt;
use std::time::Duration;

/// Bytes of the image.
pub(super) const SPAN: u64 = 4 << 20;
/// Bytes of the longest frame.
const LONGEST: u32 = 65_536;
/// Frames in flight in a stream.
const SLOTS: u32 = 64;
/// Requests in flight, for the threads of the 2010 series.
const IN_FLIGHT: [u32; 3] = [1, 8, 16];
/// Bytes of a frame in a stream, as in the 2010 series.
const MESSAGES: [u32; 4] = [65_536, 16_384, 4096, 1024];
/// Bytes of payload each way of a transaction, as in the 2010 series.
const TRANSACTIONS: [u32; 4] = [1, 4096, 16_384, 65_536];

/// Who serves a queue, and how a kick arrives there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Subject {
    /// No ioeventfd: the vCPU's thread serves the queue before the guest goes on.
    Inline,
    /// No ioeventfd: the exit signals the I/O thread.
    Exit,
    /// KVM signals the I/O thread.
    IoEventFd,
    /// KVM signals the I/O thread of another process.
    Process,
}

impl Subject {
    /// The base of the 2010 series first. The last one needs KVM.
    pub(super) const ALL: [Self; 4] = [Self::Inline, Self::Exit, Self::IoEventFd, Self::Process];

    /// Name in results.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Inline => "exit-inline",
            Self::Exit => "exit",
            Self::IoEventFd => "ioeventfd",
            Self::Process => "process",
        }
    }
}

/// Where the host's threads run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Placement {
    /// On another CPU than the guest.
    Separate,
    /// On the same CPU as the guest.
    Colocated,
}

impl Placement {
    pub(super) const ALL: [Self; 2] = [Self::Separate, Self::Colocated];
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Separate => "separate",
            Self::Colocated => "colocated",
        })
    }
}

/// The disk workloads of the 2010 series.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Workload {
    Create,
    SequentialReads,
    RandomReads,
    RandomWrites,
}

impl Workload {
    const ALL: [Self; 4] = [Self::Create, Self::SequentialReads, Self::RandomReads, Self::RandomWrites];

    fn name(self) -> &'static str {
        match self {
            Self::Create => "create",
            Self::SequentialReads => "seq-read",
            Self::RandomReads => "random-read",
            Self::RandomWrites => "random-write",
        }
    }

    fn sequential(self) -> bool {
        matches!(self, Self::Create | Self::SequentialReads)
    }

    fn reads(self) -> bool {
        matches!(self, Self::SequentialReads | Self::RandomReads)
    }
}

/// A case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Case {
    /// Blocks of a disk.
    Blocks { workload: Workload, in_flight: u32 },
    /// Frames of `bytes` bytes to the host, or from it.
    Stream { out: bool, bytes: u32 },
    /// Request and response of `bytes` bytes of payload.
    Exchange { bytes: u32 },
}

/// Size of a sample.
#[derive(Clone, Copy, Debug)]
pub(super) struct SampleSize {
    /// Time of disk requests.
    pub(super) blocks: Duration,
    /// Bytes of a stream, within the bounds of `frames`.
    pub(super) stream: u64,
    /// Least and most frames of a stream.
    pub(super) frames: (u64, u64),
    /// Number of transactions.
    pub(super) exchanges: u64,
    /// Number of interrupts per delivery.
    pub(super) injections: usize,
}

impl SampleSize {
    /// Full size.
    pub(super) const FULL: Self = Self {
        blocks: Duration::from_millis(100),
        stream: 64 << 20,
        frames: (1000, 3000),
        exchanges: 800,
        injections: 200,
    };
    /// Size with `--quick`.
    pub(super) const QUICK: Self = Self {
        blocks: Duration::from_millis(30),
        stream: 16 << 20,
        frames: (250, 800),
        exchanges: 200,
        injections: 50,
    };
}

impl Case {
    /// All cases, in the order of the 2010 series.
    pub(super) fn all() -> Vec<Self> {
        let mut all = Vec::new();
        for workload in Workload::ALL {
            all.extend(IN_FLIGHT.map(|in_flight| Self::Blocks { workload, in_flight }));
        }
        for out in [true, false] {
            all.extend(MESSAGES.map(|bytes| Self::Stream { out, bytes }));
        }
        all.extend(TRANSACTIONS.map(|bytes| Self::Exchange { bytes }));
        all
    }

    /// Whether the rate counts transactions, not bytes.
    pub(super) fn is_exchange(self) -> bool {
        matches!(self, Self::Exchange { .. })
    }

    /// The device of the machine.
    pub(super) fn device(self, size: SampleSize, image: &Image) -> OneDevice<'_> {
        match self {
            Self::Blocks { .. } => OneDevice::Disk(image),
            Self::Stream { out, bytes } => OneDevice::Card(Card {
                peer: if out { Peer::Sink } else { Peer::Source },
                frames: (size.stream / u64::from(bytes)).clamp(size.frames.0, size.frames.1),
                size: bytes,
                reply: bytes,
            }),
            Self::Exchange { bytes } => {
                let frame = (HEADERS + bytes).min(LONGEST);
                OneDevice::Card(Card { peer: Peer::Echo, frames: size.exchanges, size: frame, reply: frame })
            }
        }
    }

    /// The configuration of the machine with this device.
    pub(super) fn machine(self, size: SampleSize, device: OneDevice<'_>) -> RunConfig {
        let config = device.machine();
        match self {
            Self::Blocks { workload, in_flight } => RunConfig {
                depth: in_flight,
                block: if workload.sequential() { 64 << 10 } else { 4 << 10 },
                order: if workload.sequential() { BlockOrder::Sequential } else { BlockOrder::Random },
                read_percent: if workload.reads() { 100 } else { 0 },
                duration: size.blocks,
                ..config
            },
            Self::Stream { .. } => RunConfig { depth: SLOTS, ..config },
            Self::Exchange { .. } => RunConfig { depth: 1, ..config },
        }
    }

    /// Bytes that a request moves, both ways.
    pub(super) fn bytes(self) -> f64 {
        match self {
            Self::Blocks { workload, .. } if workload.sequential() => 65_536.0,
            Self::Blocks { .. } => 4096.0,
            Self::Stream { bytes, .. } => f64::from(bytes),
            Self::Exchange { bytes } => 2.0 * f64::from(bytes),
        }
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Blocks { workload, in_flight } => write!(f, "blk/{}/inflight{in_flight}", workload.name()),
            Self::Stream { out: true, bytes } => write!(f, "stream/guest-to-host/{bytes}"),
            Self::Stream { out: false, bytes } => write!(f, "stream/host-to-guest/{bytes}"),
            Self::Exchange { bytes } => write!(f, "rr/{bytes}"),
        }
    }
}
