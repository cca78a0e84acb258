//! `paravane run`.
pub(crate) mod args;
mod device_arg;
mod devices;
mod disk_arg;
mod linux;
mod net;
mod progress;
mod queues;
mod render;

use crate::failure::Failure;
use anyhow::Context;
use args::RunArgs;
use devices::Devices;
use paravane_command_line::output;
use paravane_spec::builtin::MAX_CPUS;
use paravane_vmm::{LinuxConfig, Outcome, Progress, RunConfig};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub(crate) fn main(args: &RunArgs, started: Instant) -> Result<ExitCode, Failure> {
    let config = config(args).map_err(Failure::request)?;
    let host = std::thread::available_parallelism().map_or(1, usize::from);
    // More than a machine can have are refused later.
    if (host + 1..=MAX_CPUS).contains(&config.cpus.into()) {
        tracing::warn!("the guest has {} CPUs, which share {host} of the host; lower --cpus", config.cpus);
    }
    let mut devices = Devices::open(args).map_err(Failure::request)?;
    if let Some(kernel) = &args.kernel {
        let config = LinuxConfig {
            kernel: kernel.clone(),
            initrd: args.initrd.clone(),
            cmdline: args.cmdline.clone(),
            on_reboot: args.on_reboot,
            machine: config,
        };
        return linux::main(&config, devices.take(), started);
    }

    let progress = Arc::new(Progress::default());
    progress::cancel_on_signal(&progress)?;
    let bar = progress::Bar::start(&progress, args.quiet || args.json);
    let result = paravane_vmm::run(&config, devices.take(), &progress, started);
    drop(bar);

    let report = result.map_err(|error| Failure { status: error.exit_status(), error: error.into() })?;
    if args.json {
        output::print_json(&render::json(&report))?;
    } else {
        output::print(&render::text(&report))?;
    }
    Ok(ExitCode::from(match report.outcome {
        Outcome::Verified => 0,
        Outcome::NotVerified(_) | Outcome::GuestFailed(_) => 1,
        Outcome::Cancelled => 130,
    }))
}

fn config(args: &RunArgs) -> Result<RunConfig, anyhow::Error> {
    let duration = Duration::try_from_secs_f64(args.seconds).context("--seconds")?;
    let hang_timeout = Duration::try_from_secs_f64(args.hang_timeout).context("--hang-timeout")?;
    let block = u32::try_from(args.block.0).context("--block: size exceeds 4 GiB")?;
    Ok(RunConfig {
        accel: args.accel,
        cpus: args.cpus,
        memory: args.memory.0,
        hugepages: args.hugepages,
        prefault: args.prefault,
        depth: args.depth,
        block,
        duration,
        span: args.span.0,
        read_percent: args.read_percent,
        seed: args.seed,
        completion: args.completion,
        transport: args.transport,
        mmio_version: args.mmio_version,
        msi_delivery: args.msi_delivery,
        ring: args.ring,
        in_order: args.in_order,
        iommu: args.iommu,
        dirty_log: args.dirty_log.unwrap_or_default(),
        ioeventfd: !args.no_ioeventfd,
        max_ioeventfds: args.max_ioeventfds,
        io_threads: args.io_threads,
        rebalance: args.rebalance,
        longest_poll: Duration::from_micros(args.poll_us.into()),
        hang_timeout,
        moves: args.move_interrupts,
        inject: args.inject,
        ..RunConfig::default()
    })
}
