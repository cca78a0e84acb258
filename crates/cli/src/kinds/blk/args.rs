//! Options of disks.
use crate::choices::{Choice, one_of};
use crate::engine::ENGINES;
use crate::images::{Backing, FORMATS, location};
use crate::kinds::checked::QUEUE_SIZE;
use crate::kinds::limits::LimitArgs;
use clap::Args;
use paravane_device::blk::{EngineChoice, Format, OnFull};
use paravane_store::Location;

/// Serve a disk
///
/// The image is locked while it is served (see --no-lock), also against programs of QEMU. Its format is the one given by --format,
/// never guessed.
#[derive(Clone, Debug, PartialEq, Eq, Args)]
pub(crate) struct Blk {
    /// Disk image: a file, a block device, or a URL
    ///
    /// URLs: nbd://HOST[:PORT]/EXPORT and nbd+unix:///EXPORT?socket=PATH (with TLS as nbds),
    /// rbd:POOL/IMAGE[@SNAPSHOT] (Ceph), and read-only http://, https:// and s3://BUCKET/KEY. A path that
    /// begins like a URL needs ./ before it.
    #[allow(rustdoc::broken_intra_doc_links, reason = "brackets of a synopsis, shown by --help")]
    #[arg(long, visible_alias = "blk-file", value_name = "LOCATION", value_parser = location())]
    pub(crate) image: Location,
    /// Format of the image [default: raw]
    #[arg(long, value_parser = one_of(FORMATS), value_name = "FORMAT", default_value = "raw", hide_default_value = true)]
    pub(crate) format: Format,
    /// Backing file as FORMAT:LOCATION; repeat per layer, top first
    ///
    /// FORMAT is raw or qcow2; LOCATION is as in --image. File names stored in images open nothing. A
    /// layer is refused if the image above it names another file or format (see --force-layers).
    #[arg(long, value_name = "FORMAT:LOCATION")]
    pub(crate) backing: Vec<Backing>,
    /// Serve backing files other than those that the images name, for images that were moved
    ///
    /// With a wrong backing file the guest reads a mixture of two disks, and its writes make that
    /// permanent.
    #[arg(long)]
    pub(crate) force_layers: bool,
    /// Open the image read-only and offer a read-only disk
    #[arg(long)]
    pub(crate) read_only: bool,
    /// Do not lock a raw image (for migration between two daemons)
    ///
    /// Two guests that write to the same image destroy its file system.
    #[arg(long)]
    pub(crate) no_lock: bool,
    /// Bypass the page cache of the host (O_DIRECT); raw images only
    ///
    /// As with QEMU's cache=none, guest data is cached in the guest only. See --block-size.
    #[arg(long)]
    pub(crate) direct: bool,
    /// Block size that the guest sees: 512, 1024, 2048 or 4096 [default: 512; with --direct and at a
    /// URL what the image requires]
    ///
    /// A guest does not find its partitions if this changes: name it when an image moves to other
    /// storage. Where the image requires larger blocks, the daemon reads and writes whole ones. A
    /// session that is taken over or resumed keeps its block size.
    #[arg(long, value_name = "BYTES")]
    pub(crate) block_size: Option<u32>,
    /// Register guest memory with io_uring; saves CPU time with --direct
    ///
    /// Pins all memory of the VMM: RLIMIT_MEMLOCK must allow it once for each queue. Do not combine
    /// it with a balloon, virtio-mem or postcopy migration: reads would land in pages that no
    /// longer belong to the guest.
    #[arg(long)]
    pub(crate) registered_buffers: bool,
    /// Time that requests wait for a lost server before they fail [default: 60]
    ///
    /// For images at a URL, except in Ceph. The daemon connects again meanwhile. Also the longest
    /// time for a server to answer when its image is opened, if that is less than 10 s (NBD) or 30 s.
    #[arg(long, value_name = "SECONDS", default_value_t = STORE_TIMEOUT, hide_default_value = true)]
    pub(crate) store_timeout: u32,
    /// Serial number, at most 20 ASCII characters [default: from the name of the image]
    ///
    /// The default is the file name, export or object name if it fits, else 11 characters of it and a
    /// hash. A guest that runs keeps what it was told.
    #[arg(long, value_name = "TEXT")]
    pub(crate) serial: Option<String>,
    /// Number of queues [default: 1]
    #[arg(long, value_name = "N", default_value_t = 1, hide_default_value = true)]
    pub(crate) queues: u16,
    /// Maximum queue size, a power of two from 4 to 32768 [default: 1024]
    ///
    /// The VMM chooses the size up to this. Below 128, requests have fewer segments.
    #[arg(long, value_name = "N", default_value_t = QUEUE_SIZE, hide_default_value = true)]
    pub(crate) queue_size: u16,
    /// What to do with a write for which the host has no room [default: wait]
    ///
    /// A full file system, quota, volume or store. A write that waits is tried again every second,
    /// and after SIGHUP; reads go on.
    #[arg(long, value_parser = one_of(ON_FULL), value_name = "ACTION", default_value = "wait", hide_default_value = true)]
    pub(crate) on_full: OnFull,
    /// I/O engine [default: auto]
    #[arg(long, value_parser = one_of(ENGINES), value_name = "ENGINE", default_value = "auto", hide_default_value = true)]
    pub(crate) engine: EngineChoice,
    /// Log each request that takes TIME or longer, for example 100ms [default: none]
    ///
    /// A line has queue, operation, sector, bytes, and the time in each stage. It is written when
    /// the request ends. --log-rate limits these lines apart from others of the device.
    #[arg(long, value_name = "TIME")]
    pub(crate) slow: Option<humantime::Duration>,
    #[command(flatten)]
    pub(crate) limit: LimitArgs,
    // Threads may look for more before they sleep.
    #[arg(skip)]
    pub(crate) polls: bool,
    // Without `serial`: what guests are told, of an image that is a backing file since a snapshot.
    #[arg(skip)]
    pub(crate) told_serial: Option<String>,
}

/// Default of --store-timeout, in seconds.
pub(super) const STORE_TIMEOUT: u32 = 60;

/// What becomes of a write without room.
pub(crate) const ON_FULL: &[Choice<OnFull>] = &[
    ("wait", "Hold it, and later writes of its queue, until there is room", OnFull::Wait),
    ("error", "Fail it", OnFull::Error),
];
