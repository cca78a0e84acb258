//! A validated disk.
use super::args::BlkArgs;
use crate::engine::may_be_io_uring;
use crate::images::Backing;
use crate::kinds::checked::{self, MAX_QUEUES, OptionError, real_location};
use paravane_device::RateLimit;
use paravane_device::blk::{EngineChoice, Format, OnFull};
use paravane_store::Location;
use std::time::Duration;

/// Default of --store-timeout.
pub(super) const STORE_TIMEOUT: Duration = Duration::from_secs(60);
/// Length of a disk's serial number (virtio specification, section 5.2.6).
const SERIAL_LEN: usize = paravane_spec::blk::ID_LEN;
/// Descriptors of a queue whose image is not a file: a connection of an NBD server takes most.
pub(crate) const STORE_FDS: u64 = 6;

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
    pub(crate) engine: EngineChoice,
    pub(crate) on_full: OnFull,
    /// Threshold of the slow-request log.
    pub(crate) slow: Option<Duration>,
    pub(crate) limit: RateLimit,
}

fn block_size(size: u32) -> Result<u32, OptionError> {
    match size {
        512 | 1024 | 2048 | 4096 => Ok(size),
        size => Err(("block-size", format!("{size} is invalid: use 512, 1024, 2048 or 4096"))),
    }
}

impl Blk {
    pub(super) fn new(args: &BlkArgs) -> Result<Self, OptionError> {
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
        let engine = args.engine.unwrap_or_default();
        if args.image.path().is_none() {
            Self::check_store(args, engine)?;
        }
        if args.registered_buffers && !may_be_io_uring(engine) {
            return Err(("registered-buffers", "needs the io_uring engine".to_owned()));
        }
        let slow = args.slow.map(Into::<Duration>::into);
        if slow.is_some_and(|slow| slow.is_zero()) {
            return Err(("slow", "0 would log every request: use 1us or more".to_owned()));
        }
        if slow.is_some() && args.endpoint.latencies == Some(false) {
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
            queues: checked::within("queues", args.queues.unwrap_or(1), MAX_QUEUES)?,
            // A read or write takes three descriptors or more.
            queue_size: checked::queue_size(args.queue_size, 4)?,
            engine,
            on_full: args.on_full.unwrap_or(OnFull::Wait),
            slow,
            limit: args.limit.check()?,
        })
    }
}

impl Blk {
    /// Checks what only files have.
    fn check_store(args: &BlkArgs, engine: EngineChoice) -> Result<(), OptionError> {
        let only = |option, is_on: bool| match is_on {
            true => Err((option, format!("is for files: {} is none", args.image))),
            false => Ok(()),
        };
        only("direct", args.direct)?;
        only("registered-buffers", args.registered_buffers)?;
        only("engine", engine != EngineChoice::Auto)?;
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

impl Blk {
    /// The disk that names its block, in bytes, if the default would differ.
    pub(super) fn keeping_block(&self, block: Option<u32>) -> Self {
        // An overlay has this one by default.
        let block_size = self.block_size.or(block.filter(|block| *block != 512));
        Self { block_size, ..self.clone() }
    }

    /// Its image, and its layers, top first.
    pub(super) fn layers(&self) -> Vec<&Location> {
        std::iter::once(&self.image).chain(self.backing.iter().map(|layer| &layer.location)).collect()
    }

    /// The same with canonical paths of images.
    fn canonical(&self) -> Self {
        let mut disk = self.clone();
        disk.image = real_location(&disk.image);
        disk.backing.iter_mut().for_each(|layer| layer.location = real_location(&layer.location));
        disk
    }

    /// This one, which is served, and `wanted`, without differences that are none.
    ///
    /// After a snapshot, the file may name the images in another way, and the serial number or not.
    pub(super) fn comparable(&self, wanted: &Self) -> (Self, Self) {
        let (served, mut wanted) = (self.canonical(), wanted.canonical());
        if served.serial.is_none() && (wanted.serial.is_none() || wanted.serial == served.told_serial) {
            wanted.serial = None;
            wanted.told_serial.clone_from(&served.told_serial);
        }
        (served, wanted)
    }
}
