//! Devices of a machine, with their names.
use crate::job::Job;
use paravane_device::Device;
use std::fmt;
use std::sync::Arc;

/// A device that is open, and what the machine needs beside it.
pub struct NamedDevice {
    /// "disk 0", "rng", "net 1", for reports.
    pub(crate) name: Arc<str>,
    pub(crate) device: Box<dyn Device>,
    /// Whether the kernel's vhost-net serves its queues, where it can.
    pub(crate) vhost: bool,
    /// Job of the built-in guest.
    pub(crate) job: Option<Job>,
}

impl NamedDevice {
    /// A device without a job.
    #[must_use]
    pub fn new(name: &str, device: Box<dyn Device>) -> Self {
        Self { name: name.into(), device, vhost: false, job: None }
    }

    /// The same with a job for the built-in guest. A Linux guest ignores it.
    #[must_use]
    pub fn with_job(self, job: Job) -> Self {
        Self { job: Some(job), ..self }
    }

    /// The same; if `vhost`, the kernel's vhost-net serves its queues, where it can.
    #[must_use]
    pub fn with_vhost_net(self, vhost: bool) -> Self {
        Self { vhost, ..self }
    }
}

impl fmt::Debug for NamedDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NamedDevice").field("name", &self.name).finish_non_exhaustive()
    }
}
