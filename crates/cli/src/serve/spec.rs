//! Specifications of devices, validated without touching the host.
//!
//! What a reload does with a device that is served is decided by its old and new specifications: see
//! `exports::change`.
use super::args::{
    Backing, BlkArgs, DeviceCommand, EndpointArgs, Format, LimitArgs, Mac, NetArgs, OnFull, Switch,
};
use crate::engine::Engine;
use crate::size::Size;
use paravane_device::{Rate, RateLimit};
use paravane_store::Location;
use std::collections::HashMap;
use std::fmt;
use std::num::NonZeroU64;
use std::os::fd::RawFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Maximum number of threads of a device.
const MAX_WORKERS: u16 = 64;
/// Default of --poll-us, in microseconds.
const POLL_US: u32 = 50;
/// For an image in Ceph: threads of librbd need the processor that polling would take.
const POLL_US_CEPH: u32 = 0;

/// Default of --poll-us for a disk with this image, in microseconds.
pub(crate) fn default_poll(image: &Location) -> u32 {
    if matches!(image, Location::Rbd(_)) { POLL_US_CEPH } else { POLL_US }
}

/// Maximum number of queues.
///
/// A vhost-user message names a queue by one byte (section "Vring state").
const MAX_QUEUES: u16 = 256;
/// Default queue size: QEMU's maximum.
///
/// A request without an indirect table takes three descriptors or more.
pub(crate) const QUEUE_SIZE: u16 = 1024;
/// Default of --store-timeout.
pub(crate) const STORE_TIMEOUT: Duration = Duration::from_secs(60);
/// Length of a disk's serial number (virtio specification, section 5.2.6).
const SERIAL_LEN: usize = paravane_spec::blk::ID_LEN;

/// The specification of one device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DeviceSpec {
    pub(crate) name: String,
    pub(crate) endpoint: Endpoint,
    /// Threads of its own; `None`: it shares those of the daemon.
    pub(crate) workers: Option<u16>,
    pub(crate) longest_poll: Duration,
    pub(crate) latencies: bool,
    pub(crate) packed: bool,
    pub(crate) kind: Kind,
}

/// How a VMM connects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Endpoint {
    /// The daemon listens.
    Listen(PathBuf),
    /// The VMM listens.
    Connect(PathBuf),
    /// systemd passed a listening socket with the device's name.
    Activated,
    /// The parent process passed this descriptor, a listening or connected socket.
    Inherited(RawFd),
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Listen(path) => write!(f, "listen {}", path.display()),
            Self::Connect(path) => write!(f, "connect {}", path.display()),
            Self::Activated => f.write_str("activated"),
            Self::Inherited(number) => write!(f, "descriptor {number}"),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Blk(Box<Blk>),
    Net(Net),
    Rng,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Blk {
    pub(crate) image: Location,
    pub(crate) format: Format,
    /// Backing files, top first.
    pub(crate) backing: Vec<Backing>,
    /// Accept layers that the headers of the images contradict.
    pub(crate) force_layers: bool,
    pub(crate) read_only: bool,
    pub(crate) lock: bool,
    pub(crate) direct: bool,
    /// Block in bytes that the guest sees, if it is named.
    pub(crate) block_size: Option<u32>,
    pub(crate) registered_buffers: bool,
    /// How long requests wait for a lost server.
    pub(crate) store_timeout: Duration,
    /// Threads may look for more before they sleep.
    pub(crate) polls: bool,
    pub(crate) serial: Option<String>,
    /// Without `serial`: what guests are told, of an image that is a backing file since a snapshot.
    pub(crate) told_serial: Option<String>,
    pub(crate) queues: u16,
    pub(crate) queue_size: u16,
    pub(crate) engine: Engine,
    pub(crate) on_full: OnFull,
    /// Threshold of the slow-request log.
    pub(crate) slow: Option<Duration>,
    pub(crate) limit: RateLimit,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Net {
    pub(crate) network: Network,
    pub(crate) mac: [u8; 6],
    /// Number of queue pairs.
    pub(crate) queues: u16,
    pub(crate) queue_size: u16,
    pub(crate) mtu: Option<u16>,
    pub(crate) offloads: bool,
    /// Limit of each direction.
    pub(crate) limit: RateLimit,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Network {
    Tap(String),
    Link(String),
    Echo,
    Sink,
    /// Frame length in bytes.
    Source(u32),
}

/// An invalid option of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    /// Index of the device.
    pub(crate) device: usize,
    /// Name of the option, without dashes.
    pub(crate) option: &'static str,
    pub(crate) what: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "--{}: {}", self.option, self.what)
    }
}

impl std::error::Error for Fault {}

/// An option without dashes, and why it is invalid.
type OptionError = (&'static str, String);

impl Kind {
    /// Name in the file and on the command line.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Blk(_) => "blk",
            Self::Net(_) => "net",
            Self::Rng => "rng",
        }
    }
}

impl DeviceSpec {
    /// Validates one device.
    ///
    /// # Errors
    /// An option is invalid.
    pub(crate) fn new(command: &DeviceCommand) -> Result<Self, OptionError> {
        let common = command.endpoint();
        let name = common.name.clone().unwrap_or_else(|| command.kind().to_owned());
        // Names appear in tables, logs, metrics and systemd's list, which is separated by colons.
        let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        if name.is_empty() || name.len() > 64 || !name.chars().all(fits) {
            return Err(("name", format!("{name:?}: use 1 to 64 letters, digits, '-', '_' and '.'")));
        }
        let endpoint = endpoint(common);
        let kind = match command {
            DeviceCommand::Blk(blk) => Kind::Blk(Box::new(Blk::new(blk)?)),
            DeviceCommand::Net(net) => Kind::Net(Net::new(net, &name, &endpoint)?),
            DeviceCommand::Rng(_) => Kind::Rng,
        };
        let workers = common.workers.map(|count| within("workers", count, MAX_WORKERS)).transpose()?;
        let default_poll = match &kind {
            Kind::Blk(blk) => default_poll(&blk.image),
            _ => POLL_US,
        };
        let poll_us = common.poll_us.unwrap_or(default_poll);
        let longest_poll = Duration::from_micros(poll_us.into());
        let latencies = common.latencies != Some(Switch::Off);
        Ok(Self { name, endpoint, workers, longest_poll, latencies, packed: !common.no_packed, kind })
    }

    /// The socket in the file system, of either side.
    pub(crate) fn socket(&self) -> Option<&Path> {
        match &self.endpoint {
            Endpoint::Listen(path) | Endpoint::Connect(path) => Some(path),
            Endpoint::Activated | Endpoint::Inherited(_) => None,
        }
    }

    /// The disk's image and its backing files.
    pub(crate) fn locations(&self) -> Vec<&Location> {
        match &self.kind {
            Kind::Blk(blk) => {
                std::iter::once(&blk.image).chain(blk.backing.iter().map(|layer| &layer.location)).collect()
            }
            _ => Vec::new(),
        }
    }

    /// Those that are files.
    pub(crate) fn images(&self) -> Vec<&Path> {
        self.locations().into_iter().filter_map(Location::path).collect()
    }

    /// The specification after a snapshot: the disk's image is `overlay`, on the old one.
    ///
    /// `serial` and `block`, in bytes: what guests are told, which stay.
    pub(crate) fn on_overlay(&self, overlay: &Path, serial: &str, block: Option<u32>) -> Self {
        let mut spec = self.clone();
        if let Kind::Blk(blk) = &mut spec.kind {
            blk.told_serial = blk.serial.is_none().then(|| serial.to_owned());
            let old = std::mem::replace(&mut blk.image, overlay.to_owned().into());
            blk.backing.insert(0, Backing { format: blk.format, location: old });
            blk.format = Format::Qcow2;
            (blk.direct, blk.registered_buffers) = (false, false);
        }
        spec.keeping_block(block)
    }

    /// The specification that names the block of the disk, in bytes, if the default would differ.
    pub(crate) fn keeping_block(&self, block: Option<u32>) -> Self {
        let mut spec = self.clone();
        if let Kind::Blk(blk) = &mut spec.kind {
            // An overlay has this one by default.
            blk.block_size = blk.block_size.or(block.filter(|block| *block != 512));
        }
        spec
    }

    /// The same with canonical paths of images.
    pub(crate) fn canonical(&self) -> Self {
        let mut spec = self.clone();
        if let Kind::Blk(blk) = &mut spec.kind {
            blk.image = real_location(&blk.image);
            blk.backing.iter_mut().for_each(|layer| layer.location = real_location(&layer.location));
        }
        spec
    }

    /// This one, of a device that is served, and `wanted`, without differences that are none.
    ///
    /// After a snapshot, the file may name the images in another way, and the serial number or not.
    pub(crate) fn comparable(&self, wanted: &Self) -> (Self, Self) {
        let (served, mut wanted) = (self.canonical(), wanted.canonical());
        if let (Kind::Blk(served), Kind::Blk(wanted)) = (&served.kind, &mut wanted.kind)
            && served.serial.is_none()
            && (wanted.serial.is_none() || wanted.serial == served.told_serial)
        {
            wanted.serial = None;
            wanted.told_serial.clone_from(&served.told_serial);
        }
        (served, wanted)
    }

    /// The image that the disk writes to, with a canonical path.
    pub(crate) fn writable_image(&self) -> Option<Location> {
        match &self.kind {
            Kind::Blk(blk) if !blk.read_only => Some(real_location(&blk.image)),
            _ => None,
        }
    }

    /// The name of the card's TAP device.
    pub(crate) fn tap(&self) -> Option<&str> {
        match &self.kind {
            Kind::Net(Net { network: Network::Tap(name), .. }) => Some(name),
            _ => None,
        }
    }

    /// The name of the card's link.
    pub(crate) fn link(&self) -> Option<&str> {
        match &self.kind {
            Kind::Net(Net { network: Network::Link(name), .. }) => Some(name),
            _ => None,
        }
    }
}

fn endpoint(args: &EndpointArgs) -> Endpoint {
    // The argument group guarantees exactly one.
    match (&args.socket, &args.connect, args.fd) {
        (Some(path), _, _) => Endpoint::Listen(path.clone()),
        (None, Some(path), _) => Endpoint::Connect(path.clone()),
        (None, None, Some(number)) => Endpoint::Inherited(number),
        (None, None, None) => Endpoint::Activated,
    }
}

fn within(option: &'static str, number: u16, most: u16) -> Result<u16, OptionError> {
    match number {
        n if (1..=most).contains(&n) => Ok(n),
        n => Err((option, format!("{n} is out of range: use 1 to {most}"))),
    }
}

fn queue_size(size: Option<u16>, least: u16) -> Result<u16, OptionError> {
    match size.unwrap_or(QUEUE_SIZE) {
        size if size.is_power_of_two() && (least..=32768).contains(&size) => Ok(size),
        size => Err(("queue-size", format!("{size} is invalid: use a power of two from {least} to 32768"))),
    }
}

fn block_size(size: u32) -> Result<u32, OptionError> {
    match size {
        512 | 1024 | 2048 | 4096 => Ok(size),
        size => Err(("block-size", format!("{size} is invalid: use 512, 1024, 2048 or 4096"))),
    }
}

fn limit(args: &LimitArgs) -> Result<RateLimit, OptionError> {
    let rate = |option, per_second: Option<u64>, burst: Option<u64>| {
        let Some(per_second) = per_second else { return Ok(None) };
        let none = || (option, "0 would block all traffic: omit the option for no limit".to_owned());
        let per_second = NonZeroU64::new(per_second).ok_or_else(none)?;
        Ok(Some(Rate { per_second, burst: burst.unwrap_or(per_second.get() / 10) }))
    };
    let bytes = |size: Option<Size>| size.map(|Size(bytes)| bytes);
    Ok(RateLimit {
        bytes: rate("bytes-per-second", bytes(args.bytes_per_second), bytes(args.burst_bytes))?,
        ops: rate("ops-per-second", args.ops_per_second, args.burst_ops)?,
    })
}

impl Blk {
    fn new(args: &BlkArgs) -> Result<Self, OptionError> {
        if let Some(serial) = &args.serial
            && (serial.len() > SERIAL_LEN
                || !serial.bytes().all(|byte| byte.is_ascii_graphic() || byte == b' '))
        {
            return Err((
                "serial",
                format!("{serial:?} is invalid: use at most {SERIAL_LEN} printable ASCII characters"),
            ));
        }
        let format = args.format.unwrap_or(Format::Raw);
        if format == Format::Raw && !args.backing.is_empty() {
            return Err(("backing", "raw images have no backing file: use it with format qcow2".to_owned()));
        }
        if format == Format::Qcow2 && args.no_lock {
            return Err((
                "no-lock",
                "qcow2 images are always locked: two daemons would corrupt each other's tables".to_owned(),
            ));
        }
        if format == Format::Qcow2 && args.direct {
            return Err(("direct", "needs a raw image: qcow2 images use the page cache".to_owned()));
        }
        let engine = args.engine.unwrap_or(Engine::Auto);
        if args.image.path().is_none() {
            Self::check_store(args, engine)?;
        }
        if args.registered_buffers && !engine.may_be_io_uring() {
            return Err(("registered-buffers", "needs the io_uring engine".to_owned()));
        }
        let slow = args.slow.map(Into::<Duration>::into);
        if slow.is_some_and(|slow| slow.is_zero()) {
            return Err(("slow", "0 would log every request: use 1us or more".to_owned()));
        }
        if slow.is_some() && args.endpoint.latencies == Some(Switch::Off) {
            return Err(("slow", "needs latencies: remove --latencies off".to_owned()));
        }
        Ok(Self {
            image: args.image.clone(),
            polls: args.endpoint.poll_us != Some(0),
            store_timeout: args.store_timeout.map_or(STORE_TIMEOUT, |time| Duration::from_secs(time.into())),
            format,
            backing: args.backing.clone(),
            force_layers: args.force_layers,
            read_only: args.read_only,
            lock: !args.no_lock,
            direct: args.direct,
            block_size: args.block_size.map(block_size).transpose()?,
            registered_buffers: args.registered_buffers,
            serial: args.serial.clone(),
            told_serial: None,
            queues: within("queues", args.queues.unwrap_or(1), MAX_QUEUES)?,
            // A read or write takes three descriptors or more.
            queue_size: queue_size(args.queue_size, 4)?,
            engine,
            on_full: args.on_full.unwrap_or_default(),
            slow,
            limit: limit(&args.limit)?,
        })
    }
}

impl Blk {
    /// Checks what only files have.
    fn check_store(args: &BlkArgs, engine: Engine) -> Result<(), OptionError> {
        let only = |option, is_on: bool| match is_on {
            true => Err((option, format!("is for files: {} is none", args.image))),
            false => Ok(()),
        };
        only("direct", args.direct)?;
        only("registered-buffers", args.registered_buffers)?;
        only("engine", engine != Engine::Auto)?;
        let fixed = match &args.image {
            Location::Http(_) | Location::S3(_) => true,
            Location::Rbd(rbd) => rbd.snapshot.is_some(),
            Location::File(_) | Location::Nbd(_) => false,
        };
        if fixed && !args.read_only {
            return Err((
                "image",
                format!("{}: is read-only: add --read-only, or make it a backing file", args.image),
            ));
        }
        Ok(())
    }
}

impl Net {
    fn new(args: &NetArgs, name: &str, endpoint: &Endpoint) -> Result<Self, OptionError> {
        let network = match args {
            NetArgs { tap: Some(name), .. } => Network::Tap(name.clone()),
            NetArgs { link: Some(name), .. } => Network::Link(name.clone()),
            NetArgs { source: Some(size), .. } => {
                let most = paravane_spec::net::MAX_FRAME;
                let len = u32::try_from(size.0).ok().filter(|len| (22..=most as u32).contains(len));
                Network::Source(
                    len.ok_or(("source", format!("{} bytes is out of range: use 22 to {most}", size.0)))?,
                )
            }
            NetArgs { sink: true, .. } => Network::Sink,
            _ => Network::Echo,
        };
        let Mac(mac) = args.mac.unwrap_or_else(|| address(name, endpoint));
        if mac == [0; 6] || mac[0] & 1 != 0 {
            let mac = mac.map(|byte| format!("{byte:02x}")).join(":");
            return Err(("mac", format!("invalid MAC address {mac}: all zeroes or multicast")));
        }
        if let Some(mtu) = args.mtu
            && mtu < 68
        {
            return Err(("mtu", format!("{mtu} bytes is out of range: use 68 to 65535")));
        }
        Ok(Self {
            network,
            mac,
            // Two queues for each pair, and a control queue.
            queues: within("queues", args.queues.unwrap_or(1), (MAX_QUEUES - 1) / 2)?,
            queue_size: queue_size(args.queue_size, 2)?,
            mtu: args.mtu,
            offloads: !args.no_offloads,
            limit: limit(&args.limit)?,
        })
    }
}

/// A MAC address derived from name and socket, so that it stays the same (FNV-1a).
fn address(name: &str, endpoint: &Endpoint) -> Mac {
    let path = match endpoint {
        Endpoint::Listen(path) | Endpoint::Connect(path) => path.as_os_str().as_encoded_bytes(),
        Endpoint::Activated | Endpoint::Inherited(_) => &[],
    };
    let hash =
        name.bytes().chain([0]).chain(path.iter().copied()).fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
    let [a, b, c, ..] = hash.to_be_bytes();
    Mac([0x52, 0x54, 0, a, b, c])
}

/// Validates devices against each other.
///
/// # Errors
/// A device conflicts with one before it.
pub(crate) fn check_together(devices: &[DeviceSpec]) -> Result<(), Fault> {
    let mut names = HashMap::new();
    let mut sockets = HashMap::new();
    // Whether all users of an image can share it.
    let mut images: HashMap<Location, bool> = HashMap::new();
    let mut taps = HashMap::new();
    let mut links: HashMap<&str, Vec<(usize, &Net)>> = HashMap::new();
    for (device, spec) in devices.iter().enumerate() {
        let fault = |option, what| Err(Fault { device, option, what });
        let of = |other: usize| format!("already used by device {:?}", devices[other].name);
        if names.insert(&spec.name, device).is_some() {
            return fault("name", format!("two devices are named {:?}", spec.name));
        }
        if let Some(socket) = spec.socket()
            && let Some(other) = sockets.insert(real_path(socket), device)
        {
            let option = if matches!(spec.endpoint, Endpoint::Listen(_)) { "socket" } else { "connect" };
            return fault(option, format!("{}: {}", socket.display(), of(other)));
        }
        match &spec.kind {
            Kind::Blk(blk) => {
                let layers = blk.backing.iter().map(|layer| ("backing", &layer.location, true));
                for (option, location, shares) in
                    [("image", &blk.image, blk.read_only || !blk.lock)].into_iter().chain(layers)
                {
                    // Read-only and unlocked users share an image.
                    if let Some(others_share) = images.insert(real_location(location), shares)
                        && !(others_share && shares)
                    {
                        return fault(
                            option,
                            format!("{location} is used twice: images are shared read-only"),
                        );
                    }
                }
            }
            Kind::Net(Net { network: Network::Tap(name), .. }) => {
                if let Some(other) = taps.insert(name, device) {
                    return fault("tap", format!("{name}: {}", of(other)));
                }
            }
            Kind::Net(net @ Net { network: Network::Link(name), .. }) => {
                links.entry(name).or_default().push((device, net));
            }
            _ => {}
        }
    }
    for (name, ends) in links {
        let last = ends[ends.len() - 1].0;
        let fault = |what| Err(Fault { device: last, option: "link", what });
        let [(_, one), (_, other)] = ends.as_slice() else {
            return fault(format!("{name:?} connects two cards, but {} have it", ends.len()));
        };
        if one.queues != other.queues {
            let (one, other) = (one.queues, other.queues);
            return fault(format!(
                "{name:?} connects cards with {one} and {other} queue pairs: use the same number"
            ));
        }
        // Ethernet's default without `mtu`.
        let [one, other] = [one, other].map(|net| net.mtu.unwrap_or(1500));
        if one != other {
            return fault(format!(
                "{name:?} connects cards with MTUs of {one} and {other} bytes: use the same MTU"
            ));
        }
    }
    Ok(())
}

/// The location; of a file by its canonical path.
fn real_location(location: &Location) -> Location {
    location.path().map_or_else(|| location.clone(), |path| real_path(path).into())
}

/// The canonical path; of a missing file, that of its directory and its name.
fn real_path(path: &Path) -> PathBuf {
    let by_directory = || {
        let directory = path.parent().filter(|directory| !directory.as_os_str().is_empty());
        let directory = directory.unwrap_or(Path::new(".")).canonicalize().ok()?;
        Some(directory.join(path.file_name()?))
    };
    path.canonicalize().ok().or_else(by_directory).unwrap_or_else(|| path.to_owned())
}
