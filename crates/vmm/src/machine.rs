//! The machine: memory, bus, devices with threads, and a vCPU or a host thread.
//!
//! ```text
//! RunConfig, devices --> Machine: Bus -> AttachedDevice (paravane-attach) -> IoPool (I/O threads)
//!                           |      '---> console, PCI root, a Linux guest's system devices
//!                           '----------> Accelerator (KVM, or a host thread): interrupts, ioeventfds, runs the guest
//! ```
pub(crate) mod accel;
#[cfg(test)]
mod addresses;
pub(crate) mod attach;
pub(crate) mod bus;
pub(crate) mod choice;
pub(crate) mod console;
pub(crate) mod counters;
pub(crate) mod devices;
pub(crate) mod dirty;
pub(crate) mod domain;
pub(crate) mod footprint;
#[cfg(test)]
mod hostile_tests;
pub(crate) mod kvm;
mod measured;
#[cfg(test)]
mod net_tests;
#[cfg(test)]
mod pci_tests;
pub(crate) mod ram;
mod rebalance;
pub(crate) mod server;
pub(crate) mod thread;
mod vhost_net;

use crate::arch::SystemDevices;
use crate::config::{MmioVersion, RunConfig, TransportChoice};
use crate::error::RunError;
use accel::Accelerator;
use attach::attach;
use bus::Bus;
use console::Console;
use counters::RunCounters;
use devices::NamedDevice;
use domain::domain;
use paravane_attach::AttachedDevice;
use paravane_device::lock;
use paravane_dma::{Domain, Memory};
use paravane_io::{IoPool, IoThreadFigures, QueueBackend, Spread};
use paravane_notify::LimitedIoEventFds;
use paravane_transport::pci::root::Root;
use rebalance::Rebalancer;
use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use vhost_net::VhostNet;

/// Most I/O threads unless more are asked for: more do not help one vCPU.
const DEVICES_THREADS: usize = 4;

/// The devices and what serves them. However a run ends, its drop stops them.
pub(crate) struct Machine {
    /// What the guest reaches.
    pub(crate) bus: Arc<Bus>,
    pool: Arc<IoPool>,
    rebalancer: Option<Mutex<Rebalancer>>,
    domains: Vec<Domain>,
    /// Of each device: its name, and whether vhost-net serves it.
    names: Vec<(Arc<str>, bool)>,
}

/// Interval at which the thread that waits for the guest's end looks after the machine.
pub(crate) const PERIOD: Duration = Duration::from_millis(50);
/// Longest wait for the end of a domain's translations after its queues stopped.
const LET_GO: Duration = Duration::from_secs(5);

impl Machine {
    /// With these devices, numbered from 0; with `system` for a Linux guest.
    ///
    /// # Errors
    /// The host refuses threads, interrupts or translations.
    pub(crate) fn new(
        config: &RunConfig,
        memory: &Memory,
        counters: &Arc<RunCounters>,
        accelerator: &dyn Accelerator,
        devices: Vec<NamedDevice>,
        system: Option<SystemDevices>,
    ) -> Result<Self, RunError> {
        let pool = io_pool(config, devices.len())
            .map_err(|source| RunError::Os { what: "start an I/O thread", source })?;
        let pool = Arc::new(pool);
        let fds = match config.max_ioeventfds {
            None => accelerator.ioeventfds(),
            Some(limit) => Arc::new(LimitedIoEventFds::new(accelerator.ioeventfds(), limit)),
        };
        let mut attached = Vec::with_capacity(devices.len());
        let mut domains = Vec::new();
        let mut names = Vec::with_capacity(devices.len());
        for (NamedDevice { name, device, vhost, .. }, number) in devices.into_iter().zip(0_u32..) {
            names.push((name, vhost));
            let domain = domain(config, memory, number)?;
            domains.extend(domain.clone());
            let mut builder = AttachedDevice::builder(device, memory)
                .io_pool(&pool)
                .rings(config.ring_features())
                .counters(Arc::clone(&counters.devices));
            if let Some(domain) = domain {
                builder = builder.behind(domain);
            }
            if config.ioeventfd {
                builder = builder.ioeventfds(Arc::clone(&fds));
            }
            if config.mmio_version == MmioVersion::V3 {
                builder = builder.mmio_version_3();
            }
            if vhost {
                builder = builder.lend_to(|_| Box::new(VhostNet::default()) as Box<dyn QueueBackend>);
            }
            if let Some(server) = config.server.clone() {
                builder = builder.lend_to(move |queue| server.backend(number as usize, queue));
            }
            attached.push(attach(builder, config.transport, accelerator, number)?);
        }
        let console = Console::new(memory, Arc::clone(counters));
        let root = (config.transport == TransportChoice::Pci).then(Root::new);
        let bus = Bus::new(attached, root, console).with_server(config.server.clone());
        let bus = match system {
            Some(system) => bus.with_system(system),
            None => bus,
        };
        let bus = Arc::new(bus);
        let rebalancer = config.rebalance.then(Mutex::default);
        Ok(Self { bus, pool, rebalancer, domains, names })
    }

    /// Moves a queue to an idle thread, if that is wanted and worth it. To be called every [`PERIOD`].
    pub(crate) fn rebalance(&self) {
        if let Some(rebalancer) = &self.rebalancer {
            lock(rebalancer).step(self.bus.devices(), self.pool.figures().len());
        }
    }

    /// What each I/O thread has counted.
    pub(crate) fn figures(&self) -> Vec<IoThreadFigures> {
        self.pool.figures()
    }

    /// Stops queues, and returns the devices, which hold the images' locks.
    pub(crate) fn stop(&self) -> Vec<NamedDevice> {
        let stop = |(device, (name, vhost)): (&AttachedDevice, &(Arc<str>, bool))| {
            Some(NamedDevice { name: Arc::clone(name), device: device.stop()?, vhost: *vhost, job: None })
        };
        self.bus.devices().iter().zip(&self.names).filter_map(stop).collect()
    }

    /// The devices, with their names.
    pub(crate) fn named(&self) -> impl Iterator<Item = (&AttachedDevice, &Arc<str>)> {
        self.bus.devices().iter().zip(self.names.iter().map(|(name, _)| name))
    }

    /// Ends all translations after the queues stopped.
    ///
    /// Memory that is still held is a problem.
    pub(crate) fn let_go(&self) -> Vec<String> {
        let ends = self.domains.iter().map(|domain| domain.clear(LET_GO));
        ends.filter_map(Result::err).map(|error| format!("a domain's memory: {error}")).collect()
    }
}

/// Threads for the queues of `devices` devices.
fn io_pool(config: &RunConfig, devices: usize) -> io::Result<IoPool> {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let few = devices.min(cpus).min(DEVICES_THREADS);
    let count = config.io_threads.map_or(few, usize::from);
    let spread = if config.io_threads.is_some() { Spread::Queues } else { Spread::Devices };
    IoPool::fixed(count, config.longest_poll, spread)
}

impl Drop for Machine {
    fn drop(&mut self) {
        drop(self.stop());
    }
}
