//! Opens and locks what a run works on, and makes its devices.
use super::plan::{self, DiskPlan};
use crate::config::{NetConfig, RunConfig, check, check_jobs};
use crate::error::RunError;
use crate::machine::devices::{self, NamedDevice};
use paravane_device::net::Counters;
use paravane_spec::builtin::{DeviceEntry, job};
use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;

/// A disk, as far as the report needs it.
pub(super) struct Disk {
    /// Number of the device.
    pub(super) number: usize,
    pub(super) path: PathBuf,
    pub(super) plan: DiskPlan,
    pub(super) image: File,
    pub(super) engine: String,
}

/// A network card, as far as the report needs it.
pub(super) struct Card {
    /// Number of the device.
    pub(super) number: usize,
    pub(super) config: NetConfig,
    pub(super) counters: Arc<Counters>,
}

/// The devices of a run, and the guest's work on each.
pub(super) struct Opened {
    pub(super) devices: Vec<NamedDevice>,
    /// Of each device.
    pub(super) work: Vec<DeviceEntry>,
    pub(super) disks: Vec<Disk>,
    pub(super) rng: Option<usize>,
    pub(super) cards: Vec<Card>,
}

/// Checks `config`, opens and locks the images, and makes the devices.
///
/// # Errors
/// The configuration cannot be had, or the host refuses something.
pub(super) fn open(config: &RunConfig) -> Result<Opened, RunError> {
    check(config)?;
    check_jobs(&config.nets)?;
    let mut opened =
        Opened { devices: Vec::new(), work: Vec::new(), disks: Vec::new(), rng: None, cards: Vec::new() };
    for ((name, device), number) in devices::open(config)?.into_iter().zip(0..) {
        opened.work.push(match &device {
            devices::Opened::Disk(disk, blk) => {
                let plan = plan::disk(config, disk, blk.size())?;
                let image =
                    blk.image().map_err(|source| RunError::Os { what: "open the image twice", source })?;
                let (path, engine) = (disk.path.clone(), blk.engine());
                opened.disks.push(Disk { number, path, plan, image, engine });
                plan::disk_work(&plan)
            }
            devices::Opened::Rng(_) => {
                opened.rng = Some(number);
                DeviceEntry { job: job::RNG, span: config.entropy, ..DeviceEntry::default() }
            }
            devices::Opened::Net(net, card) => {
                let earlier = opened.cards.iter().any(|card| card.config.network == net.network);
                opened.cards.push(Card {
                    number,
                    config: (*net).clone(),
                    counters: Arc::clone(&card.counters),
                });
                plan::card_work(net, earlier)
            }
        });
        opened.devices.push(device.named(name));
    }
    plan::check_memory(config, &opened.disks.iter().map(|disk| disk.plan).collect::<Vec<_>>())?;
    Ok(opened)
}
