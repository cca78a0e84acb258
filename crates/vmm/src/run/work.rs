//! The guest's work on each device, and what the host needs to judge it.
use super::plan::{self, DiskPlan};
use crate::config::{RunConfig, refuse};
use crate::error::RunError;
use crate::job::{DiskJob, Job, NetJob};
use crate::machine::devices::NamedDevice;
use paravane_device::net::Totals;
use paravane_spec::builtin::{DeviceEntry, job};

/// Most network cards: the guest has private memory for the frames of 4.
const MAX_NETS: usize = 4;

/// A disk, as far as the report needs it.
pub(super) struct Disk {
    /// Number of the device.
    pub(super) number: usize,
    pub(super) job: DiskJob,
    pub(super) plan: DiskPlan,
}

/// A network card, as far as the report needs it.
pub(super) struct Card {
    /// Number of the device.
    pub(super) number: usize,
    pub(super) mac: [u8; 6],
    /// Number of queue pairs.
    pub(super) pairs: u16,
    pub(super) job: NetJob,
}

impl Card {
    /// Frames so far, by the stopped `devices`.
    pub(super) fn totals(&self, devices: &[NamedDevice]) -> Totals {
        devices.get(self.number).and_then(|device| device.device.frames()).unwrap_or_default()
    }
}

/// Number of the entropy source, and the bytes that the guest draws.
#[derive(Clone, Copy)]
pub(super) struct Entropy {
    pub(super) number: usize,
    pub(super) bytes: u64,
}

/// The guest's work.
#[derive(Default)]
pub(super) struct Work {
    /// On each device.
    pub(super) entries: Vec<DeviceEntry>,
    pub(super) disks: Vec<Disk>,
    pub(super) rng: Option<Entropy>,
    pub(super) cards: Vec<Card>,
}

impl Work {
    /// Takes the jobs of `devices`.
    ///
    /// # Errors
    /// The guest cannot do one of them.
    pub(super) fn take(config: &RunConfig, devices: &mut [NamedDevice]) -> Result<Self, RunError> {
        let mut work = Self::default();
        for (number, NamedDevice { name, device, job, .. }) in devices.iter_mut().enumerate() {
            let Some(job) = job.take() else {
                return refuse(format!("{name}: the built-in guest has no job for it"));
            };
            let entry = match job {
                Job::Disk(job) => {
                    let plan = plan::disk(config, &job, &**device)?;
                    work.disks.push(Disk { number, job, plan });
                    plan::disk_work(&plan)
                }
                Job::Entropy(bytes) => {
                    work.rng = Some(Entropy { number, bytes });
                    DeviceEntry { job: job::RNG, span: bytes, ..DeviceEntry::default() }
                }
                Job::Net(job) => {
                    // Two queues for each pair, and perhaps a control queue.
                    let pairs = (device.queue_sizes().len() / 2) as u16;
                    job.check(pairs)?;
                    let entry = plan::card_work(&job, pairs);
                    work.cards.push(Card { number, mac: plan::config_field(&**device, 0), pairs, job });
                    entry
                }
            };
            let message_count = device.queue_sizes().len() as u32 + 1;
            work.entries.push(DeviceEntry { message_count, ..entry });
        }
        if work.cards.len() > MAX_NETS {
            let cards = work.cards.len();
            return refuse(format!("{cards} network cards: the built-in guest drives at most {MAX_NETS}"));
        }
        let cards = work.cards.iter().map(|card| (&card.job, card.pairs));
        plan::check_memory(config, work.disks.iter().map(|disk| disk.plan), cards)?;
        Ok(work)
    }
}
