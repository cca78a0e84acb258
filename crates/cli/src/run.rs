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
use crate::output;
use anyhow::Context;
use args::{Accel, Completion, DirtyLog, Inject, MsiDelivery, OnReboot, Ring, RunArgs, Transport};
use devices::Devices;
use paravane_vmm::{
    AccelChoice, DirtyLogging, LinuxConfig, Outcome, Progress, RingLayout, RunConfig, TransportChoice,
};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub(crate) fn main(args: &RunArgs, started: Instant) -> Result<ExitCode, Failure> {
    let config = config(args).map_err(Failure::request)?;
    let mut devices = Devices::open(args).map_err(Failure::request)?;
    if let Some(kernel) = &args.kernel {
        let config = LinuxConfig {
            kernel: kernel.clone(),
            initrd: args.initrd.clone(),
            cmdline: args.cmdline.clone(),
            on_reboot: match args.on_reboot {
                OnReboot::Exit => paravane_vmm::OnReboot::Exit,
                OnReboot::Restart => paravane_vmm::OnReboot::Restart,
            },
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
        accel: match args.accel {
            Accel::Auto => AccelChoice::Auto,
            Accel::Kvm => AccelChoice::Kvm,
            Accel::Thread => AccelChoice::Thread,
        },
        memory: args.memory.0,
        hugepages: args.hugepages,
        depth: args.depth,
        block,
        duration,
        span: args.span.0,
        read_percent: args.read_percent,
        seed: args.seed,
        completion: match args.completion {
            Completion::Interrupt => paravane_vmm::Completion::Interrupt,
            Completion::Poll => paravane_vmm::Completion::Poll,
        },
        transport: match args.transport {
            Transport::Mmio => TransportChoice::Mmio,
            Transport::MmioMsi => TransportChoice::MmioMsi,
            Transport::Pci => TransportChoice::Pci,
        },
        msi_delivery: match args.msi_delivery {
            MsiDelivery::Signal => paravane_vmm::MsiDelivery::Signal,
            MsiDelivery::Irqfd => paravane_vmm::MsiDelivery::Irqfd,
        },
        ring: match args.ring {
            Ring::Split => RingLayout::Split,
            Ring::Packed => RingLayout::Packed,
        },
        in_order: args.in_order,
        iommu: args.iommu,
        dirty_log: match args.dirty_log {
            None => DirtyLogging::Off,
            Some(DirtyLog::Rate) => DirtyLogging::Rate,
            Some(DirtyLog::Verify) => DirtyLogging::Verify,
        },
        ioeventfd: !args.no_ioeventfd,
        max_ioeventfds: args.max_ioeventfds,
        io_threads: args.io_threads,
        rebalance: args.rebalance,
        longest_poll: Duration::from_micros(args.poll_us.into()),
        hang_timeout,
        inject: match args.inject {
            Inject::None => paravane_vmm::Inject::None,
            Inject::Crash => paravane_vmm::Inject::Crash,
            Inject::Hang => paravane_vmm::Inject::Hang,
            Inject::Panic => paravane_vmm::Inject::Panic,
        },
        ..RunConfig::default()
    })
}
