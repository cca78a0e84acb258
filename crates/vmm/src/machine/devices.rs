//! The devices of a machine, with their names, from its configuration.
use crate::config::{DiskConfig, NetConfig, RunConfig};
use crate::error::RunError;
use crate::machine::nets::{self, Card};
use paravane_device::Device;
use paravane_device::blk::{Blk, BlkConfig};
use paravane_device::rng::Rng;
use std::fmt;
use std::sync::Arc;

/// A device that is not attached yet.
pub struct NamedDevice {
    /// "disk 0", "rng", "net 1", for reports.
    pub(crate) name: Arc<str>,
    pub(crate) device: Box<dyn Device>,
    /// Whether the kernel's vhost-net serves its queues, where it can.
    pub(crate) vhost: bool,
}

impl NamedDevice {
    /// A device of any kind.
    #[must_use]
    pub fn new(name: &str, device: Box<dyn Device>) -> Self {
        Self { name: name.into(), device, vhost: false }
    }
}

impl fmt::Debug for NamedDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NamedDevice").field("name", &self.name).finish_non_exhaustive()
    }
}

/// An open device.
pub(crate) enum Opened<'a> {
    Disk(&'a DiskConfig, Blk),
    Rng(Rng),
    Net(&'a NetConfig, Card),
}

impl Opened<'_> {
    /// Gives up everything but the device.
    pub(crate) fn named(self, name: Arc<str>) -> NamedDevice {
        let (device, vhost): (Box<dyn Device>, bool) = match self {
            Self::Disk(_, disk) => (Box::new(disk), false),
            Self::Rng(rng) => (Box::new(rng), false),
            Self::Net(config, card) => (card.device, config.vhost),
        };
        NamedDevice { name, device, vhost }
    }
}

/// Opens all devices, in the order of their numbers. Images are locked.
///
/// # Errors
/// An image or a back end cannot be opened.
pub(crate) fn open(config: &RunConfig) -> Result<Vec<(Arc<str>, Opened<'_>)>, RunError> {
    let mut devices: Vec<(Arc<str>, Opened<'_>)> = Vec::new();
    for (disk, number) in config.disks.iter().zip(0..) {
        let (read_only, engine) = (disk.read_only, config.engine);
        let blk = Blk::open(BlkConfig { read_only, engine, ..BlkConfig::new(&disk.path) })?;
        devices.push((format!("disk {number}").into(), Opened::Disk(disk, blk)));
    }
    if config.entropy > 0 {
        devices.push(("rng".into(), Opened::Rng(Rng::new())));
    }
    for ((net, card), number) in config.nets.iter().zip(nets::cards(&config.nets)?).zip(0..) {
        devices.push((format!("net {number}").into(), Opened::Net(net, card)));
    }
    Ok(devices)
}
