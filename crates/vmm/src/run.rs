//! One run, from the configuration to the report.
//!
//! ```text
//! check -> open and lock images -> plan -> memory, accelerator -> devices on the bus -> guest starts
//!   -> watch -> guest ends -> queues stopped and drained, devices given up -> host verifies -> Report
//! ```
use crate::accel::{self, Accelerator};
use crate::attach::attach;
use crate::bus::Bus;
use crate::config::{
    DirtyLogging, Job, NetConfig, Network, RingLayout, RunConfig, ServingMode, TransportChoice,
};
use crate::console::Console;
use crate::counters::RunCounters;
use crate::dirty::DirtyWatch;
use crate::error::RunError;
use crate::helper::Helper;
use crate::linux::Ports;
use crate::plan::{self, DiskPlan};
use crate::rebalance::Rebalancer;
use crate::report::{DiskResult, GuestFailure, NetResult, Outcome, PhaseFigures, QueueResult, Report};
use crate::report_area::ReportArea;
use crate::verify::{self, Expected, Unfinished};
use crate::vhost_net::VhostNet;
use crate::watch::{Verdict, watch};
use crate::{Progress, footprint, latency, nets};
use paravane_attach::{AttachedDevice, Placement, QueueBackend, QueueStatus, Spread};
use paravane_device::Device;
use paravane_device::blk::{Blk, BlkConfig};
use paravane_device::net::{Counters, Totals};
use paravane_device::rng::Rng;
use paravane_dma::{Access, Backing, Domain, Memory, Region, RegionConfig};
use paravane_io::IoThreadFigures;
use paravane_notify::LimitedIoEventFds;
use paravane_spec::builtin::{BOOT_INFO, BootInfo, DiskReport, HEAP_BASE, error, exit, state};
use paravane_transport::pci::root::Root;
use std::fs::File;
use std::io;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

/// Most I/O threads unless more are asked for: more do not help one vCPU.
const DEVICES_THREADS: usize = 4;

/// A disk, as far as the report needs it.
struct Disk {
    plan: DiskPlan,
    image: File,
    engine: String,
}

/// See [`crate::run()`].
pub(crate) fn run(config: &RunConfig, progress: &Progress, started: Instant) -> Result<Report, RunError> {
    plan::check(config)?;
    plan::check_jobs(&config.nets)?;
    let mut images = Vec::with_capacity(config.disks.len());
    for disk in &config.disks {
        images.push(Blk::open(BlkConfig {
            read_only: disk.read_only,
            engine: config.engine,
            ..BlkConfig::new(&disk.path)
        })?);
    }
    let plans = plan::plan(config, &images)?;
    let mut disks = Vec::with_capacity(images.len());
    for (image, plan) in images.iter().zip(&plans) {
        disks.push(Disk {
            plan: *plan,
            image: image.image().map_err(|source| RunError::Os { what: "open the image twice", source })?,
            engine: image.engine(),
        });
    }
    let (region, memory) = ram(config)?;
    let logging = config.dirty_log != DirtyLogging::Off;
    let (mut accelerator, accel_reason) = accel::choose(config.accel, &region, logging, config.msi_delivery)?;
    let accel = accelerator.name();
    tracing::debug!(accel, "accelerator: {accel_reason}");

    let counters = Arc::new(RunCounters::default());
    let mut devices: Vec<Box<dyn Device>> = Vec::with_capacity(images.len() + 1);
    for image in images {
        devices.push(Box::new(image));
    }
    if config.entropy > 0 {
        devices.push(Box::new(Rng::new()));
    }
    let mut net_counters = Vec::with_capacity(config.nets.len());
    for card in nets::cards(&config.nets)? {
        net_counters.push(card.counters);
        devices.push(card.device);
    }
    let helper = match config.owner {
        ServingMode::Process => {
            let images: Vec<BorrowedFd<'_>> = disks.iter().map(|disk| disk.image.as_fd()).collect();
            Some(Arc::new(Helper::spawn(config, &region, &images)?))
        }
        ServingMode::IoThreads | ServingMode::Vcpu => None,
    };
    let machine = Machine::new(config, &memory, &counters, &*accelerator, devices, helper.clone(), None)?;
    put_boot_info(&memory, &plan::boot_info(config, &plans, accelerator.tsc_khz()))?;

    let area = ReportArea::new(&memory, disks.len());
    let (sender, ended) = channel();
    accelerator.prepare()?;
    let dirty = if logging {
        let verify = config.dirty_log == DirtyLogging::Verify;
        Some(DirtyWatch::start(&memory, &region, accelerator.vcpu_log(), verify)?)
    } else {
        None
    };
    let running = accel::on_cpu(config.vcpu_cpu, || accelerator.start(Arc::clone(&machine.bus), sender))??;
    let verdict = watch(running, &ended, &area, progress, config.hang_timeout);
    // Dropped at the end: the images stay locked while the host verifies.
    let _locks = machine.stop();
    let mut problems = machine.let_go();
    let dirty = dirty.map(|dirty| {
        let (figures, problem) = dirty.finish();
        problems.extend(problem);
        figures
    });
    // The guest's cost ends here; what the host spends on verifying is no part of it.
    let host_cpu_s = footprint::cpu_seconds();

    let judge = Judge { config, progress, area: &area, counters: &counters };
    let (mut outcome, results, mut moved) = judge.judge(verdict?, &machine, &disks);
    let finished = !matches!(outcome, Outcome::GuestFailed(_) | Outcome::Cancelled);
    let totals = |(card, number): (&Arc<Counters>, usize)| match &helper {
        Some(helper) => helper.totals(number),
        None => card.totals(),
    };
    let totals: Vec<Totals> = net_counters.iter().zip(disks.len()..).map(totals).collect();
    let nets = judge.nets(&totals, finished);
    moved += nets.iter().map(|net| net.frames * u64::from(net.size)).sum::<u64>();
    problems.extend(nets.iter().filter_map(|net| net.problem.clone()));
    if !problems.is_empty() {
        outcome = match outcome {
            Outcome::Verified => Outcome::NotVerified(problems),
            Outcome::NotVerified(first) => Outcome::NotVerified([first, problems].concat()),
            other => other,
        };
    }
    let entropy_bytes = area.header().map_or(0, |header| header.entropy_bytes.min(config.entropy));
    let boot = counters.first_request().map(|at| at.saturating_duration_since(started));
    let attached = machine.bus.devices();
    Ok(Report {
        outcome,
        accel,
        accel_reason,
        transport: config.transport.name(),
        ring: match (config.ring, config.in_order) {
            (RingLayout::Split, false) => "split",
            (RingLayout::Split, true) => "split, in order",
            (RingLayout::Packed, false) => "packed",
            (RingLayout::Packed, true) => "packed, in order",
        },
        iommu: config.iommu,
        dirty,
        disks: results,
        nets,
        exits: counters.exits(),
        exits_by_kind: counters.exits_by_kind(),
        measured: machine.bus.measured().map(|phase| {
            let taken = area.header().map_or(0, |header| header.measured_interrupts);
            PhaseFigures { taken, ..phase }
        }),
        kick_stops: area.kick_stops(),
        kicks: counters.kicks(),
        exit_kicks: attached.iter().map(AttachedDevice::exit_kicks).sum(),
        queues: attached.iter().flat_map(queue_results).collect(),
        io_threads: machine.figures(),
        interrupts: attached.iter().map(AttachedDevice::interrupts).sum(),
        messages: attached.iter().map(AttachedDevice::messages).sum(),
        violations: attached.iter().map(AttachedDevice::violations).sum(),
        entropy_bytes,
        host_cpu_s,
        mb_per_cpu_s: moved as f64 / 1e6 / host_cpu_s.max(1e-6),
        boot_ms: boot.map_or(0.0, |boot| boot.as_secs_f64() * 1e3),
        wall_s: started.elapsed().as_secs_f64(),
        resident_overhead: footprint::resident_beyond(&region),
    })
}

/// The machine's RAM.
///
/// # Errors
/// The host has not so much of the kind.
pub(crate) fn ram(config: &RunConfig) -> Result<(Arc<Region>, Memory), RunError> {
    let region = Region::new(RegionConfig {
        gpa: 0,
        size: config.memory,
        backing: if config.hugepages { Backing::HugePages } else { Backing::Pages },
        writable: true,
    })?;
    let memory = Memory::new(vec![Arc::clone(&region)])?;
    Ok((region, memory))
}

fn put_boot_info(memory: &Memory, info: &BootInfo) -> Result<(), RunError> {
    memory
        .handle()
        .enter()
        .write_obj(BOOT_INFO, info, Access::WRITE)
        .map_err(|error| RunError::Config(format!("the guest's memory is too small: {error}")))
}

/// The devices and what serves them. However a run ends, its drop stops them.
pub(crate) struct Machine {
    /// What the guest reaches.
    pub(crate) bus: Arc<Bus>,
    placement: Placement,
    rebalancer: Option<Rebalancer>,
    domains: Vec<Domain>,
}

/// How long the end of a domain's translations may take when all its queues have stopped.
const LET_GO: Duration = Duration::from_secs(5);

impl Machine {
    /// With these devices, in order; with `ports` for a Linux guest.
    ///
    /// # Errors
    /// The host refuses threads, interrupts or translations.
    pub(crate) fn new(
        config: &RunConfig,
        memory: &Memory,
        counters: &Arc<RunCounters>,
        accelerator: &dyn Accelerator,
        devices: Vec<Box<dyn Device>>,
        helper: Option<Arc<Helper>>,
        ports: Option<Ports>,
    ) -> Result<Self, RunError> {
        let placement = placement(config, devices.len(), helper.as_ref())
            .map_err(|source| RunError::Os { what: "start an I/O thread", source })?;
        let fds = match config.max_ioeventfds {
            None => accelerator.ioeventfds(),
            Some(limit) => Arc::new(LimitedIoEventFds::new(accelerator.ioeventfds(), limit)),
        };
        let mut attached = Vec::with_capacity(devices.len());
        let mut domains = Vec::new();
        // Network cards come last.
        let others = devices.len().saturating_sub(config.nets.len());
        let nets = std::iter::repeat_n(None, others).chain(config.nets.iter().map(Some));
        for ((device, number), net) in devices.into_iter().zip(0_u32..).zip(nets) {
            let domain = domain(config, memory, number)?;
            domains.extend(domain.clone());
            let mut builder = AttachedDevice::builder(device, memory)
                .placement(&placement)
                .rings(config.ring_features())
                .counters(Arc::clone(&counters.devices));
            if let Some(domain) = domain {
                builder = builder.behind(domain);
            }
            if config.ioeventfd {
                builder = builder.ioeventfds(Arc::clone(&fds));
            }
            if net.is_some_and(|net| net.vhost) {
                builder = builder.lend_to(|_| Box::new(VhostNet::default()) as Box<dyn QueueBackend>);
            }
            attached.push(attach(builder, config.transport, accelerator, number)?);
        }
        let console = Console::new(memory, Arc::clone(counters));
        let root = (config.transport == TransportChoice::Pci).then(Root::new);
        let bus = Bus::new(attached, root, console).with_helper(helper);
        let bus = match ports {
            Some(ports) => bus.with_ports(ports),
            None => bus,
        };
        let bus = Arc::new(bus);
        let rebalancer =
            config.rebalance.then(|| Rebalancer::spawn(Arc::clone(&bus), placement.thread_count()));
        let rebalancer = rebalancer
            .transpose()
            .map_err(|source| RunError::Os { what: "start the thread that moves queues", source })?;
        Ok(Self { bus, placement, rebalancer, domains })
    }

    /// What each I/O thread has counted.
    pub(crate) fn figures(&self) -> Vec<IoThreadFigures> {
        self.placement.figures()
    }

    /// Stops queues and threads, and returns the devices, which hold the images' locks.
    pub(crate) fn stop(&self) -> Vec<Box<dyn Device>> {
        self.rebalancer.iter().for_each(Rebalancer::stop);
        let devices = self.bus.devices().iter().filter_map(AttachedDevice::stop).collect();
        self.placement.quit();
        devices
    }

    /// Ends all translations, now that the queues have stopped: whoever still holds memory is a problem.
    fn let_go(&self) -> Vec<String> {
        let ends = self.domains.iter().map(|domain| domain.clear(LET_GO));
        ends.filter_map(Result::err).map(|error| format!("a domain's memory: {error}")).collect()
    }
}

/// Where the queues of `devices` devices are served.
fn placement(config: &RunConfig, devices: usize, helper: Option<&Arc<Helper>>) -> io::Result<Placement> {
    if let Some(helper) = helper {
        return Ok(Placement::process(Arc::<Helper>::clone(helper)));
    }
    if config.owner == ServingMode::Vcpu {
        return Placement::inline();
    }
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let few = devices.min(cpus).min(DEVICES_THREADS);
    let count = NonZeroUsize::new(config.io_threads.map_or(few, usize::from)).unwrap_or(NonZeroUsize::MIN);
    let spread = if config.io_threads.is_some() { Spread::Queues } else { Spread::Devices };
    Placement::spawn(count, spread, config.longest_poll)
}

/// The queues of `device` that ran.
fn queue_results(device: &AttachedDevice) -> Vec<QueueResult> {
    let result = |queue: &QueueStatus| QueueResult {
        device: device.number(),
        queue: queue.queue,
        io_thread: queue.thread,
        moves: queue.moves,
        kicks_by: queue.kicks_by,
        exit_kicks: queue.exit_kicks,
    };
    device.queues().iter().map(result).collect()
}

/// The domain of device `number`, if devices are to be behind one: the guest's heap and nothing else, moved up.
fn domain(config: &RunConfig, memory: &Memory, number: u32) -> Result<Option<Domain>, RunError> {
    if !config.iommu {
        return Ok(None);
    }
    let domain = Domain::new(memory);
    let iova = HEAP_BASE + plan::iova_offset(config, number);
    domain.map(iova, HEAP_BASE, config.memory - HEAP_BASE, Access::READ | Access::WRITE)?;
    Ok(Some(domain))
}

impl Drop for Machine {
    fn drop(&mut self) {
        drop(self.stop());
    }
}

/// What it takes to judge a run that is over.
struct Judge<'a> {
    config: &'a RunConfig,
    progress: &'a Progress,
    area: &'a ReportArea,
    counters: &'a RunCounters,
}

impl Judge<'_> {
    /// The outcome, the disks' figures, and the bytes moved.
    fn judge(&self, verdict: Verdict, machine: &Machine, disks: &[Disk]) -> (Outcome, Vec<DiskResult>, u64) {
        let mut outcome = match verdict {
            Verdict::Exit(exit::DONE, _) => Outcome::Verified,
            Verdict::Exit(code, registers) => Outcome::GuestFailed(GuestFailure {
                reason: exit_reason(code, &machine.bus.console().last_message()),
                registers,
            }),
            Verdict::Failed(failure) => Outcome::GuestFailed(failure),
            Verdict::Cancelled => Outcome::Cancelled,
        };
        let done = outcome == Outcome::Verified;
        let mut problems = Vec::new();
        let mut moved = 0_u64;
        let mut results = Vec::with_capacity(disks.len());
        for (number, disk) in disks.iter().enumerate() {
            let report = self.area.disk(number);
            let mut result = self.figures(number, disk, report.as_ref());
            if let Some(report) = &report {
                moved = moved.saturating_add(report.bytes_done);
            }
            if done && outcome == Outcome::Verified {
                match self.look(number, disk, report.as_ref(), &mut result) {
                    Ok(()) => {}
                    Err(Unfinished::Cancelled) => outcome = Outcome::Cancelled,
                    Err(Unfinished::Failed(what)) => result.problem = Some(what),
                }
            }
            if let Some(problem) = &result.problem {
                problems.push(format!("{}: {problem}", result.path.display()));
            }
            results.push(result);
        }
        if done {
            problems.extend(self.entropy_problem(disks.len()));
        }
        if outcome == Outcome::Verified && !problems.is_empty() {
            outcome = Outcome::NotVerified(problems);
        }
        (outcome, results, moved)
    }

    /// The cards' figures, and whether guest and device agree that every frame came back.
    fn nets(&self, counters: &[Totals], finished: bool) -> Vec<NetResult> {
        let first = self.config.disks.len() + usize::from(self.config.entropy > 0);
        let one = |((net, counted), number): ((&NetConfig, &Totals), usize)| {
            let report = self.area.disk(number);
            let mut result = NetResult {
                network: net.network.name(),
                mac: net.mac,
                queues: net.queues,
                size: net.size,
                reply: net.reply(),
                frames: 0,
                per_s: 0.0,
                p50_us: 0.0,
                p99_us: 0.0,
                p999_us: 0.0,
                problem: None,
            };
            let fault =
                || self.counters.fault_of(number).map(|fault| format!(" ({fault})")).unwrap_or_default();
            if let Some(report) = &report {
                let (sent, received) = match net.network {
                    Network::Sink => (net.frames, 0),
                    Network::Source => (0, net.frames),
                    _ => (net.frames, net.frames),
                };
                result.frames = report.ops.min(counted.transmitted.max(counted.received));
                if report.elapsed_ns > 0 {
                    result.per_s = report.ops as f64 / (report.elapsed_ns as f64 * 1e-9);
                }
                [result.p50_us, result.p99_us, result.p999_us] =
                    latency::percentiles(&report.histogram, [50.0, 99.0, 99.9]);
                let lost = (counted.transmitted, counted.received) != (sent, received);
                result.problem = net_problem(report).or_else(|| {
                    lost.then(|| {
                        format!(
                            "{sent} frames were to go there and {received} back, and the card has {counted:?}"
                        )
                    })
                });
            } else {
                result.problem = Some("the guest's memory holds no report".into());
            }
            result.problem = result
                .problem
                .filter(|_| finished)
                .map(|problem| format!("network card {number}: {problem}{}", fault()));
            result
        };
        self.config.nets.iter().zip(counters).zip(first..).map(one).collect()
    }

    fn entropy_problem(&self, device: usize) -> Option<String> {
        let drawn = self.area.header().map_or(0, |header| header.entropy_bytes);
        if drawn >= self.config.entropy {
            return None;
        }
        let fault = self.counters.fault_of(device).map(|fault| format!(" ({fault})")).unwrap_or_default();
        Some(format!("entropy device: the guest drew {drawn} of {} bytes{fault}", self.config.entropy))
    }

    /// Rates and latencies, by the guest's word.
    fn figures(&self, number: usize, disk: &Disk, report: Option<&DiskReport>) -> DiskResult {
        let mut result = DiskResult {
            path: self.config.disks.get(number).map(|disk| disk.path.clone()).unwrap_or_default(),
            job: match disk.plan.job {
                Job::Hash => "hash",
                Job::WriteTest => "write-test",
            },
            bytes: disk.plan.bytes,
            sha256: String::new(),
            bytes_verified: 0,
            requests: 0,
            iops: 0.0,
            mb_s: 0.0,
            p50_us: 0.0,
            p99_us: 0.0,
            p999_us: 0.0,
            engine: disk.engine.clone(),
            problem: None,
        };
        let Some(report) = report else { return result };
        if report.elapsed_ns > 0 {
            let seconds = report.elapsed_ns as f64 * 1e-9;
            result.requests = report.ops;
            result.iops = report.ops as f64 / seconds;
            result.mb_s = report.bytes as f64 / 1e6 / seconds;
        }
        [result.p50_us, result.p99_us, result.p999_us] =
            latency::percentiles(&report.histogram, [50.0, 99.0, 99.9]);
        result
    }

    /// Compares the image with what it must be.
    fn look(
        &self,
        number: usize,
        disk: &Disk,
        report: Option<&DiskReport>,
        result: &mut DiskResult,
    ) -> Result<(), Unfinished> {
        let unfinished = |what: String| Err(Unfinished::Failed(what));
        let Some(report) = report else {
            return unfinished("the guest's memory holds no report".into());
        };
        if let Some(problem) = guest_problem(report) {
            let fault = self.counters.fault_of(number).map(|fault| format!(" ({fault})")).unwrap_or_default();
            return unfinished(problem + &fault);
        }
        let cancel = &self.progress.cancel;
        match disk.plan.job {
            Job::Hash => {
                result.sha256 = verify::hex(&report.sha256);
                let ours = verify::hash(&disk.image, disk.plan.bytes, cancel)?;
                if ours == report.sha256 {
                    result.bytes_verified = disk.plan.bytes;
                } else {
                    result.problem =
                        Some(format!("the guest's SHA-256 differs from the host's, {}", verify::hex(&ours)));
                }
            }
            Job::WriteTest => {
                let block = u64::from(self.config.block);
                let blocks = disk.plan.span / block;
                if report.pass_map_blocks != blocks {
                    let given = report.pass_map_blocks;
                    return unfinished(format!(
                        "the guest's pass map has {given} entries instead of {blocks}"
                    ));
                }
                let expected =
                    Expected { seed: self.config.seed, block, span: disk.plan.span, map: report.pass_map };
                let found = verify::pattern(&disk.image, self.area, &expected, cancel)?;
                result.bytes_verified = found.verified;
                result.problem = found.mismatch;
                result.sha256 = verify::hex(&verify::hash(&disk.image, disk.plan.bytes, cancel)?);
            }
        }
        Ok(())
    }
}

fn exit_reason(code: u32, last_message: &str) -> String {
    let what = match code {
        exit::PANIC => "the guest panicked".to_owned(),
        exit::BAD_BOOT_INFO => "the guest did not understand its boot information".to_owned(),
        code => format!("the guest ended with code {code}"),
    };
    if last_message.is_empty() { what } else { format!("{what}: {last_message}") }
}

/// What the guest itself says is wrong with a network card's job.
fn net_problem(report: &DiskReport) -> Option<String> {
    match report.error {
        error::MISMATCH => {
            Some(format!("frame {} did not come back as it was sent, or was not due", report.error_detail))
        }
        _ => guest_problem(report),
    }
}

/// What the guest itself says is wrong with a disk's job.
fn guest_problem(report: &DiskReport) -> Option<String> {
    let (sector, detail) = (report.error_sector, report.error_detail);
    let what = match report.error {
        error::NONE if report.state == state::DONE => return None,
        error::NONE => "the guest did not finish the job".to_owned(),
        error::SETUP => format!("the guest's driver could not be set up (code {detail})"),
        error::IO => format!("the request at sector {sector} ended with status {detail}"),
        error::MISMATCH => format!("the guest read sector {sector}, and it was not what had been written"),
        error::RING => format!("the guest found the queue broken (code {detail})"),
        error::MEMORY => "the guest has too little memory for the job".to_owned(),
        other => format!("the guest reports error {other} (detail {detail}, sector {sector})"),
    };
    Some(what)
}
