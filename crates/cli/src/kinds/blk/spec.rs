//! A validated disk.
use super::args::Blk;
use crate::engine::may_be_io_uring;
use crate::kinds::checked::{self, MAX_QUEUES, OptionError, real_location};
use crate::kinds::endpoint::EndpointArgs;
use paravane_device::blk::{EngineChoice, Format};
use paravane_store::Location;

/// Length of a disk's serial number (virtio specification, section 5.2.6).
const SERIAL_LEN: usize = paravane_spec::blk::ID_LEN;
/// Descriptors of a queue whose image is not a file: a connection of an NBD server takes most.
pub(crate) const STORE_FDS: u64 = 6;

impl Blk {
    /// The disk, if its options are valid.
    pub(super) fn checked(&self, endpoint: &EndpointArgs) -> Result<Self, OptionError> {
        if let Some(serial) = &self.serial
            && (serial.len() > SERIAL_LEN
                || !serial.bytes().all(|byte| byte.is_ascii_graphic() || byte == b' '))
        {
            return Err((
                "serial",
                format!("{serial:?} is invalid: use at most {SERIAL_LEN} printable ASCII characters"),
            ));
        }
        if self.format == Format::Raw && !self.backing.is_empty() {
            return Err(("backing", "raw images have no backing file: use it with format qcow2".to_owned()));
        }
        if self.format == Format::Qcow2 && self.no_lock {
            return Err((
                "no-lock",
                "qcow2 images are always locked: two daemons would corrupt each other's tables".to_owned(),
            ));
        }
        if self.format == Format::Qcow2 && self.direct {
            return Err(("direct", "needs a raw image: qcow2 images use the page cache".to_owned()));
        }
        if self.image.path().is_none() {
            self.check_store()?;
        }
        if self.registered_buffers && !may_be_io_uring(self.engine) {
            return Err(("registered-buffers", "needs the io_uring engine".to_owned()));
        }
        if self.slow.is_some_and(|slow| slow.is_zero()) {
            return Err(("slow", "0 would log every request: use 1us or more".to_owned()));
        }
        if self.slow.is_some() && endpoint.latencies == Some(false) {
            return Err(("slow", "needs latencies: remove --latencies off".to_owned()));
        }
        if let Some(size) = self.block_size
            && !matches!(size, 512 | 1024 | 2048 | 4096)
        {
            return Err(("block-size", format!("{size} is invalid: use 512, 1024, 2048 or 4096")));
        }
        checked::within("queues", self.queues, MAX_QUEUES)?;
        // A read or write takes three descriptors or more.
        checked::queue_size(self.queue_size, 4)?;
        self.limit.check()?;
        Ok(Self { polls: endpoint.poll_us != Some(0), ..self.clone() })
    }

    /// Checks what only files have.
    fn check_store(&self) -> Result<(), OptionError> {
        let only = |option, is_on: bool| match is_on {
            true => Err((option, format!("is for files: {} is none", self.image))),
            false => Ok(()),
        };
        only("direct", self.direct)?;
        only("registered-buffers", self.registered_buffers)?;
        only("engine", self.engine != EngineChoice::Auto)?;
        let fixed = match &self.image {
            Location::Http(_) | Location::S3(_) => true,
            Location::Rbd(rbd) => rbd.snapshot.is_some(),
            Location::File(_) | Location::Nbd(_) => false,
        };
        if fixed && !self.read_only {
            return Err((
                "image",
                format!("{}: is read-only: add --read-only, or make it a backing file", self.image),
            ));
        }
        Ok(())
    }

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
