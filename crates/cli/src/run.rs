//! `paravane run`.
pub(crate) mod args;
mod device_arg;
mod disk_arg;
mod linux;
mod net;
mod progress;
mod queues;
mod render;

use crate::failure::Failure;
use anyhow::Context;
use args::{Accel, Completion, DirtyLog, Inject, MsiDelivery, OnReboot, Ring, RunArgs, Transport};
use paravane_command_line::output;
use paravane_vmm::{
    AccelChoice, DirtyLogging, DiskConfig, Job, LinuxConfig, Outcome, Progress, RingLayout, RunConfig,
    TransportChoice,
};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Size of the temporary disk, used without --disk and --net, in bytes.
const TEMPORARY_SIZE: u64 = 64 << 20;

pub(crate) fn main(args: &RunArgs, started: Instant) -> Result<ExitCode, Failure> {
    let mut config = config(args).map_err(Failure::request)?;
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
        let (more, _observed) = device_arg::open(&args.device).map_err(Failure::request)?;
        return linux::main(&config, more, started);
    }
    let temporary = if config.disks.is_empty() && config.nets.is_empty() {
        let disk = TemporaryDisk::new().map_err(Failure::request)?;
        config.disks.push(DiskConfig { path: disk.path(), read_only: false, job: Job::WriteTest });
        Some(disk)
    } else {
        None
    };

    let progress = Arc::new(Progress::default());
    progress::cancel_on_signal(&progress)?;
    let bar = progress::Bar::start(&progress, args.quiet || args.json);
    let result = paravane_vmm::run(config, progress, started);
    drop(bar);

    let mut report = result.map_err(|error| Failure { status: error.exit_status(), error: error.into() })?;
    if let Some(disk) = &temporary {
        disk.rename_in(&mut report);
    }
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
    let disks = args.disk.iter().map(|disk| {
        let write = (args.write_test || args.kernel.is_some()) && !disk.read_only;
        // Disks that the run does not write are opened read-only.
        DiskConfig {
            path: disk.path.clone(),
            read_only: !write,
            job: if write { Job::WriteTest } else { Job::Hash },
        }
    });
    Ok(RunConfig {
        accel: match args.accel {
            Accel::Auto => AccelChoice::Auto,
            Accel::Kvm => AccelChoice::Kvm,
            Accel::Thread => AccelChoice::Thread,
        },
        memory: args.memory.0,
        hugepages: args.hugepages,
        disks: disks.collect(),
        nets: net::configs(&args.net),
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
        engine: args.engine.into(),
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

/// An unlinked disk image: it disappears with the process.
struct TemporaryDisk {
    file: File,
}

impl TemporaryDisk {
    fn new() -> Result<Self, anyhow::Error> {
        let make = || {
            let file = tempfile::tempfile()?;
            file.set_len(TEMPORARY_SIZE)?;
            Ok::<_, std::io::Error>(file)
        };
        let file = make().with_context(|| {
            format!("cannot create a temporary disk in {} (TMPDIR)", std::env::temp_dir().display())
        })?;
        Ok(Self { file })
    }

    fn path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", self.file.as_raw_fd()))
    }

    /// Replaces the disk's path in the report by a name.
    fn rename_in(&self, report: &mut paravane_vmm::Report) {
        for disk in report.disks.iter_mut().filter(|disk| disk.path == self.path()) {
            disk.path = PathBuf::from("temporary");
        }
    }
}
