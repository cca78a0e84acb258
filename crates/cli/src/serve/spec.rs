//! What is to be served, checked as far as that goes without touching anything.
//!
//! Two specifications that are equal need no change: that is how a reload finds out what to leave alone.
use super::args::{Backing, BlkArgs, DeviceCommand, EndpointArgs, Format, LimitArgs, Mac, NetArgs, RngArgs};
use crate::args::Engine;
use crate::size::Size;
use paravane_device::{Rate, RateLimit};
use std::collections::HashMap;
use std::fmt;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Most threads that may serve one device.
const MAX_WORKERS: u16 = 64;
/// Longest poll before a worker sleeps, in microseconds, if nobody says otherwise.
const POLL_US: u32 = 50;
/// Most queues that a device may have: as many as a vhost-user message can name (one byte, section "Vring state").
const MAX_QUEUES: u16 = 256;
/// Descriptors of a queue, if nobody says otherwise: as many as QEMU's queues may have. A request takes three or more, where
/// they are not in a table of their own.
const QUEUE_SIZE: u16 = 1024;
/// Length of a disk's serial number (virtio specification, section 5.2.6).
const SERIAL_LEN: usize = paravane_spec::blk::ID_LEN;

/// One device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DeviceSpec {
    pub(crate) name: String,
    pub(crate) endpoint: Endpoint,
    pub(crate) workers: u16,
    pub(crate) longest_poll: Duration,
    pub(crate) packed: bool,
    pub(crate) kind: Kind,
}

/// Where the VMM is met.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Endpoint {
    /// We listen.
    Listen(PathBuf),
    /// It listens.
    Connect(PathBuf),
    /// systemd listened before us, on a socket that has the device's name.
    Activated,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Blk(Blk),
    Net(Net),
    Rng,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Blk {
    pub(crate) image: PathBuf,
    pub(crate) format: Format,
    /// What the image is based on, the next one first.
    pub(crate) backing: Vec<Backing>,
    pub(crate) read_only: bool,
    pub(crate) lock: bool,
    pub(crate) direct: bool,
    pub(crate) registered_buffers: bool,
    pub(crate) serial: Option<String>,
    pub(crate) queues: u16,
    pub(crate) queue_size: u16,
    pub(crate) engine: Engine,
    pub(crate) limit: RateLimit,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Net {
    pub(crate) network: Network,
    pub(crate) mac: [u8; 6],
    /// Pairs.
    pub(crate) queues: u16,
    pub(crate) queue_size: u16,
    pub(crate) mtu: Option<u16>,
    pub(crate) offloads: bool,
    /// Of each direction.
    pub(crate) limit: RateLimit,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Network {
    Tap(String),
    Link(String),
    Echo,
    Sink,
    /// Length of its frames in bytes.
    Source(u32),
}

/// What is wrong with a device, and which option says it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    /// Number of the device.
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

/// What is wrong with one option.
type Wrong = (&'static str, String);

impl Kind {
    /// As in the file and on the command line.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Blk(_) => "blk",
            Self::Net(_) => "net",
            Self::Rng => "rng",
        }
    }
}

impl DeviceSpec {
    /// Checks one device for itself.
    ///
    /// # Errors
    /// The option that is wrong, and why.
    pub(crate) fn new(command: &DeviceCommand) -> Result<Self, Wrong> {
        let (common, default) = match command {
            DeviceCommand::Blk(BlkArgs { endpoint, .. }) => (endpoint, "blk"),
            DeviceCommand::Net(NetArgs { endpoint, .. }) => (endpoint, "net"),
            DeviceCommand::Rng(RngArgs { endpoint }) => (endpoint, "rng"),
        };
        let name = common.name.clone().unwrap_or_else(|| default.to_owned());
        // It stands in tables, logs, metrics and systemd's list, which has colons in between.
        let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        if name.is_empty() || name.len() > 64 || !name.chars().all(fits) {
            return Err(("name", format!("{name:?} is not 1 to 64 letters, digits, '-', '_' and '.'")));
        }
        let endpoint = endpoint(common);
        let kind = match command {
            DeviceCommand::Blk(blk) => Kind::Blk(Blk::new(blk)?),
            DeviceCommand::Net(net) => Kind::Net(Net::new(net, &name, &endpoint)?),
            DeviceCommand::Rng(_) => Kind::Rng,
        };
        let workers = within("workers", common.workers.unwrap_or(1), MAX_WORKERS)?;
        let longest_poll = Duration::from_micros(common.poll_us.unwrap_or(POLL_US).into());
        Ok(Self { name, endpoint, workers, longest_poll, packed: !common.no_packed, kind })
    }

    /// The socket in the file system, ours or theirs.
    pub(crate) fn socket(&self) -> Option<&Path> {
        match &self.endpoint {
            Endpoint::Listen(path) | Endpoint::Connect(path) => Some(path),
            Endpoint::Activated => None,
        }
    }

    /// The disk's image, and those that it is based on.
    pub(crate) fn images(&self) -> Vec<&Path> {
        match &self.kind {
            Kind::Blk(blk) => {
                let layers = blk.backing.iter().map(|layer| layer.path.as_path());
                std::iter::once(blk.image.as_path()).chain(layers).collect()
            }
            _ => Vec::new(),
        }
    }

    /// The name of the card's TAP device.
    pub(crate) fn tap(&self) -> Option<&str> {
        match &self.kind {
            Kind::Net(Net { network: Network::Tap(name), .. }) => Some(name),
            _ => None,
        }
    }

    /// The name of the link that the card is on.
    pub(crate) fn link(&self) -> Option<&str> {
        match &self.kind {
            Kind::Net(Net { network: Network::Link(name), .. }) => Some(name),
            _ => None,
        }
    }
}

fn endpoint(args: &EndpointArgs) -> Endpoint {
    // The argument group lets exactly one of them through.
    match (&args.socket, &args.connect) {
        (Some(path), _) => Endpoint::Listen(path.clone()),
        (None, Some(path)) => Endpoint::Connect(path.clone()),
        (None, None) => Endpoint::Activated,
    }
}

fn within(option: &'static str, number: u16, most: u16) -> Result<u16, Wrong> {
    match number {
        n if (1..=most).contains(&n) => Ok(n),
        n => Err((option, format!("{n} is not from 1 to {most}"))),
    }
}

fn queue_size(size: Option<u16>, least: u16) -> Result<u16, Wrong> {
    match size.unwrap_or(QUEUE_SIZE) {
        size if size.is_power_of_two() && (least..=32768).contains(&size) => Ok(size),
        size => Err(("queue-size", format!("{size} is not a power of two from {least} to 32768"))),
    }
}

fn limit(args: &LimitArgs) -> Result<RateLimit, Wrong> {
    let rate = |option, per_second: Option<u64>, burst: Option<u64>| {
        let Some(per_second) = per_second else { return Ok(None) };
        let none = || (option, "0 would let nothing through".to_owned());
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
    fn new(args: &BlkArgs) -> Result<Self, Wrong> {
        if let Some(serial) = &args.serial
            && (serial.len() > SERIAL_LEN
                || !serial.bytes().all(|byte| byte.is_ascii_graphic() || byte == b' '))
        {
            return Err((
                "serial",
                format!("{serial:?} is not at most {SERIAL_LEN} bytes of printable ASCII"),
            ));
        }
        let format = args.format.unwrap_or(Format::Raw);
        if format == Format::Raw && !args.backing.is_empty() {
            return Err(("backing", "a raw image is based on nothing; format qcow2 is".to_owned()));
        }
        if format == Format::Qcow2 && args.no_lock {
            return Err((
                "no-lock",
                "a qcow2 image is always locked: two daemons that have it open would not see each other's tables"
                    .to_owned(),
            ));
        }
        if format == Format::Qcow2 && args.direct {
            return Err(("direct", "only a raw image can be used past the page cache".to_owned()));
        }
        let engine = args.engine.unwrap_or(Engine::Auto);
        let has_rings = format == Format::Raw && matches!(engine, Engine::Auto | Engine::IoUring);
        if args.registered_buffers && !has_rings {
            return Err(("registered-buffers", "only what io_uring serves has them: raw images".to_owned()));
        }
        Ok(Self {
            image: args.image.clone(),
            format,
            backing: args.backing.clone(),
            read_only: args.read_only,
            lock: !args.no_lock,
            direct: args.direct,
            registered_buffers: args.registered_buffers,
            serial: args.serial.clone(),
            queues: within("queues", args.queues.unwrap_or(1), MAX_QUEUES)?,
            // A read or write takes three descriptors.
            queue_size: queue_size(args.queue_size, 4)?,
            engine,
            limit: limit(&args.limit)?,
        })
    }
}

impl Net {
    fn new(args: &NetArgs, name: &str, endpoint: &Endpoint) -> Result<Self, Wrong> {
        let network = match args {
            NetArgs { tap: Some(name), .. } => Network::Tap(name.clone()),
            NetArgs { link: Some(name), .. } => Network::Link(name.clone()),
            NetArgs { source: Some(size), .. } => {
                let most = paravane_spec::net::MAX_FRAME;
                let len = u32::try_from(size.0).ok().filter(|len| (22..=most as u32).contains(len));
                Network::Source(len.ok_or(("source", format!("{} is not from 22 to {most}", size.0)))?)
            }
            NetArgs { sink: true, .. } => Network::Sink,
            _ => Network::Echo,
        };
        let Mac(mac) = args.mac.unwrap_or_else(|| address(name, endpoint));
        if mac == [0; 6] || mac[0] & 1 != 0 {
            return Err(("mac", format!("{mac:02x?} is no card's: it is all zeroes, or a group's")));
        }
        if let Some(mtu) = args.mtu
            && mtu < 68
        {
            return Err(("mtu", format!("{mtu} bytes are less than 68")));
        }
        Ok(Self {
            network,
            mac,
            // Two queues a pair, and one for control.
            queues: within("queues", args.queues.unwrap_or(1), (MAX_QUEUES - 1) / 2)?,
            queue_size: queue_size(args.queue_size, 2)?,
            mtu: args.mtu,
            offloads: !args.no_offloads,
            limit: limit(&args.limit)?,
        })
    }
}

/// An address that is the same whenever the card is, and hardly another one's (FNV-1a; nothing depends on its quality).
fn address(name: &str, endpoint: &Endpoint) -> Mac {
    let place = match endpoint {
        Endpoint::Listen(path) | Endpoint::Connect(path) => path.as_os_str().as_encoded_bytes(),
        Endpoint::Activated => &[],
    };
    let hash =
        name.bytes().chain([0]).chain(place.iter().copied()).fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
    let [a, b, c, ..] = hash.to_be_bytes();
    Mac([0x52, 0x54, 0, a, b, c])
}

/// Checks devices against each other.
///
/// # Errors
/// The first device that cannot be there beside those before it.
pub(crate) fn check_together(devices: &[DeviceSpec]) -> Result<(), Fault> {
    let mut names = HashMap::new();
    let mut sockets = HashMap::new();
    // Whether all that use it only read, or have it without a lock.
    let mut images: HashMap<PathBuf, bool> = HashMap::new();
    let mut taps = HashMap::new();
    let mut links: HashMap<&str, Vec<(usize, &Net)>> = HashMap::new();
    for (device, spec) in devices.iter().enumerate() {
        let fault = |option, what| Err(Fault { device, option, what });
        let of = |other: usize| format!("{:?} has it, too", devices[other].name);
        if names.insert(&spec.name, device).is_some() {
            return fault("name", format!("{:?} is the name of two devices", spec.name));
        }
        if let Some(socket) = spec.socket()
            && let Some(other) = sockets.insert(place(socket), device)
        {
            let option = if matches!(spec.endpoint, Endpoint::Listen(_)) { "socket" } else { "connect" };
            return fault(option, format!("{}: {}", socket.display(), of(other)));
        }
        match &spec.kind {
            Kind::Blk(blk) => {
                let layers = blk.backing.iter().map(|layer| ("backing", &layer.path, true));
                for (option, path, shares) in
                    [("image", &blk.image, blk.read_only || !blk.lock)].into_iter().chain(layers)
                {
                    // Readers may share an image, and those that do not lock it.
                    if let Some(others_share) = images.insert(place(path), shares)
                        && !(others_share && shares)
                    {
                        return fault(option, format!("{} is used twice, and not only read", path.display()));
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
            return fault(format!("{name:?} joins two cards, and there are {}", ends.len()));
        };
        if one.queues != other.queues {
            let (one, other) = (one.queues, other.queues);
            return fault(format!("{name:?} joins cards with {one} and {other} pairs of queues"));
        }
        // A card without `mtu` has Ethernet's.
        let [one, other] = [one, other].map(|net| net.mtu.unwrap_or(1500));
        if one != other {
            return fault(format!("{name:?} joins cards with MTUs of {one} and {other} bytes"));
        }
    }
    Ok(())
}

/// What there is at `path`, by one name; a file that is not there yet by its directory's.
fn place(path: &Path) -> PathBuf {
    let by_directory = || {
        let directory = path.parent().filter(|directory| !directory.as_os_str().is_empty());
        let directory = directory.unwrap_or(Path::new(".")).canonicalize().ok()?;
        Some(directory.join(path.file_name()?))
    };
    path.canonicalize().ok().or_else(by_directory).unwrap_or_else(|| path.to_owned())
}
