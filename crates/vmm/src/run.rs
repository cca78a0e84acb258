//! A run of the built-in guest, from the configuration to the report.
//!
//! ```text
//! work: check -> jobs of the open devices -> plan
//! run:  memory, accelerator -> devices on the bus -> guest starts -> watch -> guest ends
//!         -> queues stopped and drained, devices given up
//! report: host verifies -> Report
//! ```
mod judge;
mod latency;
mod plan;
mod progress;
mod queue_reports;
mod report;
mod report_area;
mod verify;
mod watch;
mod work;

pub use progress::{Phase, Progress};

use crate::config::{DirtyLogging, RunConfig, check};
use crate::error::RunError;
use crate::machine::accel::on_cpus;
use crate::machine::choice::choose;
use crate::machine::counters::RunCounters;
use crate::machine::devices::NamedDevice;
use crate::machine::dirty::DirtyWatch;
use crate::machine::ram::ram;
use crate::machine::{Machine, footprint};
use crate::report::Report;
use paravane_dma::{Access, Memory};
use paravane_spec::builtin::{BOOT_INFO, BootInfo};
use report::Over;
use report_area::ReportArea;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Instant;
use watch::Watch;
use work::Work;

/// Runs the built-in guest to its end, verifies its work on the host, and reports.
///
/// Each of the `devices` has a job. `started` is the start of the process, for the report's `boot_ms`.
///
/// # Errors
/// The machine could not be made ([`RunError::exit_status`] 2: nothing was touched), or the host
/// failed under it. A guest that crashes or hangs is an [`Outcome`](crate::Outcome), not an error.
pub fn run(
    config: &RunConfig,
    mut devices: Vec<NamedDevice>,
    progress: &Progress,
    started: Instant,
) -> Result<Report, RunError> {
    check(config, devices.len())?;
    let work = Work::take(config, &mut devices)?;
    let (region, memory) = ram(config)?;
    let logging = config.dirty_log != DirtyLogging::Off;
    let (mut accelerator, accel_reason) =
        choose(config.accel, &region, logging, config.msi_delivery, config.cpus)?;
    let accel = accelerator.name();
    tracing::debug!(accel, "accelerator: {accel_reason}");

    let counters = Arc::new(RunCounters::new(config.cpus));
    let machine = Machine::new(config, &memory, &counters, &*accelerator, devices, None)?;
    put_boot_info(
        &memory,
        &plan::boot_info(config, &work.entries, accelerator.cpus(), accelerator.clock_khz()),
    )?;

    let reports = work.disks.iter().flat_map(|disk| disk.reports.clone());
    let area = ReportArea::new(&memory, reports, accelerator.cpus());
    let (sender, ended) = channel();
    accelerator.prepare()?;
    let dirty = if logging {
        let verify = config.dirty_log == DirtyLogging::Verify;
        Some(DirtyWatch::start(&memory, &region, accelerator.vcpu_log(), verify)?)
    } else {
        None
    };
    let running = on_cpus(&config.vcpu_cpus, || accelerator.start(Arc::clone(&machine.bus), sender))??;
    let watch = Watch { machine: &machine, area: &area, progress, hang_timeout: config.hang_timeout };
    let verdict = watch.watch(running, &ended);
    // The images stay locked while the host verifies.
    let devices = machine.stop();
    let mut problems = machine.let_go();
    let dirty = dirty.map(|dirty| {
        let (figures, problem) = dirty.finish();
        problems.extend(problem);
        figures
    });
    // The guest's cost ends here; what the host spends on verifying is no part of it.
    let host_cpu_s = footprint::cpu_seconds();
    let over = Over {
        config,
        progress,
        started,
        accel,
        accel_reason,
        region: &region,
        machine: &machine,
        work: &work,
        devices,
        area: &area,
        counters: &counters,
        dirty,
        problems,
        host_cpu_s,
    };
    Ok(over.report(verdict?))
}

fn put_boot_info(memory: &Memory, info: &BootInfo) -> Result<(), RunError> {
    memory
        .handle()
        .enter()
        .write_obj(BOOT_INFO, info, Access::WRITE)
        .map_err(|error| RunError::Config(format!("the guest's memory is too small: {error}")))
}
