//! The guest's work on each device, and what the host needs to judge it.
use super::plan::{self, DiskPlan};
use crate::config::{RunConfig, refuse};
use crate::error::RunError;
use crate::job::{DiskJob, Job, NetJob, Traffic};
use crate::machine::devices::NamedDevice;
use paravane_device::net::Totals;
use paravane_spec::builtin::DeviceEntry;
use paravane_spec::net::PAIR;
use std::ops::Range;

/// Most network cards: the guest has private memory for the frames of 4.
const MAX_NETS: usize = 4;

/// A disk, as far as the report needs it.
pub(super) struct Disk {
    /// Number of the device.
    pub(super) number: usize,
    pub(super) job: DiskJob,
    pub(super) plan: DiskPlan,
    /// Numbers of the reports on its queues.
    pub(super) reports: Range<usize>,
}

/// A network card, as far as the report needs it.
pub(super) struct Card {
    /// Number of the device.
    pub(super) number: usize,
    pub(super) mac: [u8; 6],
    /// Number of queue pairs in use.
    pub(super) pairs: u16,
    pub(super) job: NetJob,
    /// Numbers of the reports on them.
    pub(super) reports: Range<usize>,
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
        let (count, mut report) = (devices.len(), 0);
        for (number, NamedDevice { name, device, job, .. }) in devices.iter_mut().enumerate() {
            let Some(job) = job.take() else {
                return refuse(format!("{name}: the built-in guest has no job for it"));
            };
            let reports = |queues: u32| report..report + queues as usize;
            let entry = match job {
                Job::Disk(job) => {
                    let plan = plan::disk(config, &job, &**device, plan::most_lanes(count, 1))?;
                    work.disks.push(Disk { number, job, plan, reports: reports(plan.queues) });
                    plan::disk_work(&plan)
                }
                Job::Entropy(bytes) => {
                    work.rng = Some(Entropy { number, bytes });
                    plan::entropy_work(bytes)
                }
                Job::Net(job) => {
                    // Two queues for each pair, and perhaps a control queue.
                    let pairs = (device.queue_sizes().len() / 2) as u16;
                    job.check(pairs)?;
                    let pairs = match job.traffic {
                        // A stream is on the first pair.
                        Traffic::Send | Traffic::Receive => 1,
                        _ => pairs.min(plan::most_lanes(count, PAIR.into()) as u16),
                    };
                    let (entry, mac) =
                        (plan::card_work(&job, pairs.into()), plan::config_field(&**device, 0));
                    work.cards.push(Card { number, mac, pairs, job, reports: reports(pairs.into()) });
                    entry
                }
            };
            report += entry.queues as usize;
            work.entries.push(entry);
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
