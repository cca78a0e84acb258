//! One run of a Linux guest, from the configuration to the report.
//!
//! ```text
//! check -> kernel in RAM -> KVM -> devices on the bus -> tables, RAM disk, parameters
//!   -> vCPU runs -> powered off, reset, crashed or cancelled -> queues stopped and drained -> LinuxReport
//! ```
//! A guest that resets its machine may begin again at "kernel in RAM": nothing but the devices
//! outlives a reset.
use super::{LinuxConfig, LinuxEnd, LinuxReport, OnReboot};
use crate::arch::linux::{self, Boot};
use crate::arch::{CONSOLE_GSI, Output, SystemDevices};
use crate::config::{AccelChoice, RunConfig};
use crate::error::RunError;
use crate::machine::accel::{Accelerator, Ended, Running, lost, stop};
use crate::machine::attach::attached;
use crate::machine::console::Power;
use crate::machine::counters::RunCounters;
use crate::machine::devices::NamedDevice;
use crate::machine::kvm::KvmMachine;
use crate::machine::ram::{self, ram};
use crate::machine::{Machine, PERIOD};
use crate::report::{GuestFailure, MemoryFigures};
use crate::run::Progress;
use paravane_attach::AttachedDevice;
use paravane_device::lock;
use paravane_dma::Region;
use std::io::Write;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// Runs a Linux guest under KVM to its end. Console output goes to `console`.
///
/// # Errors
/// As [`crate::run()`]. A kernel that cannot be loaded touches nothing.
pub fn run(
    config: &LinuxConfig,
    mut devices: Vec<NamedDevice>,
    console: Output,
    progress: &Progress,
    started: Instant,
) -> Result<LinuxReport, RunError> {
    check(&config.machine, devices.len())?;
    let counters = Arc::new(RunCounters::new(config.machine.cpus));
    let screen = Screen(Arc::new(Mutex::new(console)));
    let (mut restarts, mut interrupts, mut messages) = (0, 0, 0);
    let mut memory;
    let end = loop {
        let life = Life::new(config, screen.clone(), &counters, devices)?;
        let (end, machine, used) = life.live(progress)?;
        memory = used;
        devices = machine.stop();
        interrupts += machine.bus.devices().iter().map(AttachedDevice::interrupts).sum::<u64>();
        messages += machine.bus.devices().iter().map(AttachedDevice::messages).sum::<u64>();
        // Relaxed: as in `wait`, which a guest that resets at once may never come to ask.
        let cancelled = progress.cancel.load(Ordering::Relaxed);
        if config.on_reboot == OnReboot::Exit || cancelled || !resets(&end) {
            break end;
        }
        restarts += 1;
        match &end {
            Ended::TripleFault(_) => tracing::warn!(restarts, "the guest starts anew after a triple fault"),
            _ => tracing::info!(restarts, "the guest starts anew after a reset"),
        }
        for device in &mut devices {
            device.device.reset();
        }
    };
    let faults = (0..devices.len())
        .filter_map(|number| Some(format!("device {number}: {}", counters.fault_of(number)?)));
    Ok(LinuxReport {
        end: how(end)?,
        restarts,
        faults: faults.collect(),
        exits: counters.exits(),
        kvm_exits: counters.kvm_exits(),
        boot_s: counters.first_request().map(|at| at.saturating_duration_since(started).as_secs_f64()),
        cpus: counters.cpus(),
        kicks: counters.kicks(),
        interrupts,
        messages,
        memory,
        wall_s: started.elapsed().as_secs_f64(),
    })
}

/// Where the guest's console output goes, in all its lives.
#[derive(Clone)]
struct Screen(Arc<Mutex<Output>>);

impl Write for Screen {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        lock(&self.0).write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        lock(&self.0).flush()
    }
}

/// A guest from its start to its power-off or reset.
struct Life {
    machine: Machine,
    kvm: KvmMachine,
    region: Arc<Region>,
}

impl Life {
    /// A new machine with the old devices.
    ///
    /// They keep the images' locks and the host's interfaces.
    fn new(
        config: &LinuxConfig,
        screen: Screen,
        counters: &Arc<RunCounters>,
        devices: Vec<NamedDevice>,
    ) -> Result<Self, RunError> {
        let machine_config = &config.machine;
        let (region, memory) = ram(machine_config)?;
        let kernel = linux::load(&memory, region.size(), &config.kernel)?;
        let &RunConfig { msi_delivery, cpus, .. } = machine_config;
        let kvm = KvmMachine::new(Arc::clone(&region), false, msi_delivery, cpus)
            .map_err(|why| RunError::Config(format!("a Linux guest needs KVM: {why}")))?;
        let attached = attached(machine_config.transport, devices.len());
        let system = SystemDevices::new(kvm.sink(CONSOLE_GSI)?, Box::new(screen));
        let machine = Machine::new(machine_config, &memory, counters, &kvm, devices, Some(system))?;
        let boot = Boot {
            initrd: config.initrd.as_deref(),
            cmdline: &config.cmdline,
            devices: &attached,
            cpus: kvm.vcpus().len() as u16,
        };
        linux::start(kernel, &boot, &memory, &kvm.vcpus()[0])?;
        Ok(Self { machine, kvm, region })
    }

    /// Runs the vCPU to its end.
    fn live(self, progress: &Progress) -> Result<(Ended, Machine, MemoryFigures), RunError> {
        let (sender, ended) = channel();
        let running = Box::new(self.kvm).start(Arc::clone(&self.machine.bus), sender)?;
        let end = wait(running, &ended, progress, &self.machine)?;
        Ok((end, self.machine, ram::figures(&self.region)))
    }
}

/// Checks what a Linux guest cannot have.
fn check(config: &RunConfig, devices: usize) -> Result<(), RunError> {
    let refused = [
        (config.accel == AccelChoice::Thread, "a Linux guest needs KVM: drop --accel thread"),
        (config.iommu, "--iommu cannot be combined with --kernel: no IOMMU is described to a Linux guest"),
    ];
    if let Some((_, why)) = refused.into_iter().find(|(refused, _)| *refused) {
        return Err(RunError::Config(why.into()));
    }
    crate::config::check(config, devices)
}

/// Waits for the guest's end, or ends it.
fn wait(
    running: Box<dyn Running>,
    ended: &Receiver<Ended>,
    progress: &Progress,
    machine: &Machine,
) -> Result<Ended, RunError> {
    loop {
        match ended.recv_timeout(PERIOD) {
            Ok(end) => {
                running.join();
                return Ok(end);
            }
            Err(RecvTimeoutError::Disconnected) => return Err(lost()),
            Err(RecvTimeoutError::Timeout) => {}
        }
        machine.rebalance();
        // Relaxed: a request that is seen one period later is as good.
        if progress.cancel.load(Ordering::Relaxed) {
            return Ok(stop(running, ended)?.unwrap_or(Ended::Stopped(Vec::new())));
        }
    }
}

/// Whether a real machine would start anew.
fn resets(end: &Ended) -> bool {
    matches!(end, Ended::Power(Power::Reset) | Ended::TripleFault(_))
}

fn how(end: Ended) -> Result<LinuxEnd, RunError> {
    match end {
        Ended::Power(power) => Ok(LinuxEnd::Power(power)),
        Ended::Failed(failure) => Ok(LinuxEnd::Failed(failure)),
        Ended::TripleFault(registers) => Ok(LinuxEnd::Failed(GuestFailure::triple_fault(registers))),
        Ended::Stopped(_) => Ok(LinuxEnd::Cancelled),
        // There is no control page on its bus; nothing else ends so.
        Ended::Exit(code, registers) => {
            let reason = format!("it ended with exit code {code}");
            Ok(LinuxEnd::Failed(GuestFailure { reason, registers }))
        }
        Ended::Host(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_linux_guest_cannot_have_is_refused() {
        assert!(check(&RunConfig::default(), 1).is_ok());
        let thread = RunConfig { accel: AccelChoice::Thread, ..RunConfig::default() };
        let iommu = RunConfig { iommu: true, ..RunConfig::default() };
        let small = RunConfig { memory: 4096, ..RunConfig::default() };
        for config in [thread, iommu, small] {
            assert!(matches!(check(&config, 1), Err(RunError::Config(_))), "{config:?}");
        }
    }
}
