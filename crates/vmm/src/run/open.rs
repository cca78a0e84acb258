//! Opens and locks what a run works on, and makes its devices.
use super::plan::{self, DiskPlan};
use crate::config::{RunConfig, ServingMode, check, check_jobs};
use crate::error::RunError;
use crate::helper::Helper;
use crate::machine::nets;
use paravane_device::Device;
use paravane_device::blk::{Blk, BlkConfig};
use paravane_device::net::Counters;
use paravane_device::rng::Rng;
use paravane_dma::Region;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

/// A disk, as far as the report needs it.
pub(super) struct Disk {
    pub(super) plan: DiskPlan,
    pub(super) image: File,
    pub(super) engine: String,
}

/// The devices of a run: disks, entropy device, network cards.
pub(super) struct Opened {
    pub(super) disks: Vec<Disk>,
    pub(super) plans: Vec<DiskPlan>,
    pub(super) devices: Vec<Box<dyn Device>>,
    /// Counters of the network cards, in order.
    pub(super) cards: Vec<Arc<Counters>>,
}

/// Checks `config`, opens and locks the images, and makes the devices.
///
/// # Errors
/// The configuration cannot be had, or the host refuses something.
pub(super) fn open(config: &RunConfig) -> Result<Opened, RunError> {
    check(config)?;
    check_jobs(&config.nets)?;
    let mut images = Vec::with_capacity(config.disks.len());
    for disk in &config.disks {
        images.push(Blk::open(BlkConfig {
            read_only: disk.read_only,
            engine: config.engine,
            ..BlkConfig::new(&disk.path)
        })?);
    }
    let plans = plan::plan(config, &images)?;
    let mut disks = Vec::with_capacity(images.len());
    for (image, plan) in images.iter().zip(&plans) {
        disks.push(Disk {
            plan: *plan,
            image: image.image().map_err(|source| RunError::Os { what: "open the image twice", source })?,
            engine: image.engine(),
        });
    }
    let mut devices: Vec<Box<dyn Device>> = Vec::with_capacity(images.len() + 1);
    for image in images {
        devices.push(Box::new(image));
    }
    if config.entropy > 0 {
        devices.push(Box::new(Rng::new()));
    }
    let mut cards = Vec::with_capacity(config.nets.len());
    for card in nets::cards(&config.nets)? {
        cards.push(card.counters);
        devices.push(card.device);
    }
    Ok(Opened { disks, plans, devices, cards })
}

/// Starts the helper process, if one is to serve the queues.
///
/// # Errors
/// The host refuses.
pub(super) fn helper(
    config: &RunConfig,
    region: &Arc<Region>,
    disks: &[Disk],
) -> Result<Option<Arc<Helper>>, RunError> {
    match config.serving_mode {
        ServingMode::Process => {
            let images: Vec<BorrowedFd<'_>> = disks.iter().map(|disk| disk.image.as_fd()).collect();
            Ok(Some(Arc::new(Helper::spawn(config, region, &images)?)))
        }
        ServingMode::IoThreads | ServingMode::Vcpu => Ok(None),
    }
}
