//! What a run will do, decided and checked before anything is touched, and how the guest is told.
//!
//! ```text
//! RunConfig --check--> images opened and locked --plan--> Plan (jobs, spans) --boot_info--> BootInfo
//! ```
use crate::config::{
    BlockOrder, Completion, DirtyLogging, DiskConfig, Inject, Job, MsiDelivery, NetConfig, Network,
    RunConfig, ServingMode, TransportChoice,
};
use crate::error::RunError;
use crate::nets;
use paravane_device::blk::Blk;
use paravane_spec::blk::SECTOR;
use paravane_spec::builtin::{
    ABI, BOOT_MAGIC, BootInfo, DeviceEntry, FIRST_GSI, HEAP_BASE, INTERRUPTS, IRQ_COUNT, MAX_DEVICES,
    MMIO_BASE, PCI_ECAM, REPORT_BASE, REPORT_SIZE, completion, inject, job, order, transport,
};
use paravane_spec::mmio_msi::WINDOW;
use paravane_spec::pci::ecam;
use std::time::Duration;

/// Least guest RAM: the heap starts at 8 MiB.
const MIN_MEMORY: u64 = 16 << 20;
/// Most guest RAM: the devices lie in the fourth GiB.
const MAX_MEMORY: u64 = 3 << 30;
/// Most requests in flight: the largest queue that our disks offer.
const MAX_DEPTH: u32 = 256;
/// Most bytes a request.
const MAX_BLOCK: u32 = 16 << 20;
/// The guest hashes in pieces of at least this.
const HASH_CHUNK: u64 = 64 << 10;
/// Heap that the guest needs a device besides buffers and pass map: rings, request slots, alignment.
const HEAP_A_DEVICE: u64 = 512 << 10;
/// Interrupts that are free for each device's messages: the configuration change's and three queues'. The guest lets
/// further queues share the last.
const MESSAGES: u32 = 4;
/// Most network cards: the guest has private memory for the frames of so many.
const MAX_NETS: usize = 4;
/// Most pairs of queues of a card.
const MAX_PAIRS: u16 = 8;
/// Shortest frame of the echo job: addresses, type and a number. Longest: the largest MTU and an Ethernet header.
const FRAMES: std::ops::RangeInclusive<u32> = 22..=65_549;
/// Heap that each pair of queues of a card takes besides its frames.
const HEAP_A_PAIR: u64 = 64 << 10;
/// Most I/O threads that can be asked for.
pub(crate) const MAX_IO_THREADS: u16 = 64;
/// Longest poll that can be asked for: who polls for longer has a core to give away.
pub(crate) const LONGEST_POLL: Duration = Duration::from_millis(10);
/// Most devices: each has a line of its own.
const MAX_LINES: usize = IRQ_COUNT - FIRST_GSI as usize;

/// What one disk will see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DiskPlan {
    /// Hash or write test.
    pub(crate) job: Job,
    /// Size in bytes.
    pub(crate) bytes: u64,
    /// Write test: bytes from the start to work on, whole blocks.
    pub(crate) span: u64,
}

fn refuse<T>(what: impl Into<String>) -> Result<T, RunError> {
    Err(RunError::Config(what.into()))
}

/// Checks what can be checked without looking at a disk.
///
/// # Errors
/// One line on the first thing that cannot be.
pub(crate) fn check(config: &RunConfig) -> Result<(), RunError> {
    let devices = config.disks.len() + usize::from(config.entropy > 0) + config.nets.len();
    let most = MAX_LINES.min(MAX_DEVICES);
    if devices == 0 {
        return refuse("there is nothing to do: no disk, no entropy device, no network card");
    }
    if devices > most {
        return refuse(format!("{devices} devices, and a machine has room for {most}"));
    }
    if config.depth == 0 || config.depth > MAX_DEPTH {
        return refuse(format!("a depth of {} is not from 1 to {MAX_DEPTH}", config.depth));
    }
    if config.block == 0 || !u64::from(config.block).is_multiple_of(SECTOR) || config.block > MAX_BLOCK {
        return refuse(format!(
            "a block of {} bytes is not a multiple of {SECTOR} up to {MAX_BLOCK}",
            config.block
        ));
    }
    if config.read_percent > 100 {
        return refuse(format!("{} percent of reads is more than all", config.read_percent));
    }
    if config.memory < MIN_MEMORY || config.memory > MAX_MEMORY {
        return refuse(format!(
            "guest memory of {} bytes is not from {} MiB to {} MiB",
            config.memory,
            MIN_MEMORY >> 20,
            MAX_MEMORY >> 20
        ));
    }
    let page: u64 = if config.hugepages { 2 << 20 } else { 4096 };
    if !config.memory.is_multiple_of(page) {
        return refuse(format!("guest memory of {} bytes is not a multiple of {page}", config.memory));
    }
    if let Some(threads) = config.io_threads
        && !(1..=MAX_IO_THREADS).contains(&threads)
    {
        return refuse(format!("{threads} I/O threads are not from 1 to {MAX_IO_THREADS}"));
    }
    if config.longest_poll > LONGEST_POLL {
        let (asked, most) = (config.longest_poll.as_micros(), LONGEST_POLL.as_micros());
        return refuse(format!("polls of {asked} µs are longer than {most} µs"));
    }
    if config.owner == ServingMode::Process {
        check_process(config)?;
    }
    if config.hang_timeout.is_zero() {
        return refuse("a hang timeout of 0 would end every run");
    }
    for disk in &config.disks {
        check_disk(disk)?;
    }
    if config.nets.len() > MAX_NETS {
        return refuse(format!("{} network cards, and the guest looks after {MAX_NETS}", config.nets.len()));
    }
    config.nets.iter().try_for_each(check_net)
}

/// Another process sees memory as it is, and interrupts by descriptors.
fn check_process(config: &RunConfig) -> Result<(), RunError> {
    if config.transport == TransportChoice::Mmio || config.msi_delivery != MsiDelivery::Irqfd {
        return refuse("queues of another process interrupt by messages and irqfds");
    }
    if config.iommu || config.dirty_log != DirtyLogging::Off || config.hugepages || config.entropy > 0 {
        return refuse(
            "queues of another process go without IOMMU, dirty log, huge pages and entropy device",
        );
    }
    if config.nets.iter().any(|net| !net.network.for_the_builtin_guest()) {
        return refuse("a card of another process has none of the host's networks");
    }
    Ok(())
}

/// Checks that the built-in guest has something to do on each card.
///
/// # Errors
/// One line on the first card on which it has not.
pub(crate) fn check_jobs(nets: &[NetConfig]) -> Result<(), RunError> {
    for (number, net) in nets.iter().enumerate() {
        match &net.network {
            Network::Echo | Network::Station | Network::Sink | Network::Source => {}
            Network::Tap(_) | Network::TapFds(_) => {
                return refuse(
                    "the built-in guest has nothing to say to a host: a TAP device is for a kernel",
                );
            }
            Network::Link(_) if net.reply.is_some() => {
                return refuse("a link's far card answers by as many bytes as it gets");
            }
            Network::Link(name) => {
                let differs = |before: &NetConfig| (before.frames, before.size) != (net.frames, net.size);
                if nets[..number].iter().any(|before| before.network == net.network && differs(before)) {
                    return refuse(format!("the cards of link {name:?} are to exchange different frames"));
                }
            }
        }
    }
    Ok(())
}

fn check_net(net: &NetConfig) -> Result<(), RunError> {
    for size in [net.size, net.reply()] {
        if !FRAMES.contains(&size) {
            let (least, most) = (FRAMES.start(), FRAMES.end());
            return refuse(format!("frames of {size} bytes are not from {least} to {most}"));
        }
    }
    if net.queues == 0 || net.queues > MAX_PAIRS {
        return refuse(format!("{} pairs of queues are not from 1 to {MAX_PAIRS}", net.queues));
    }
    if net.frames == 0 {
        return refuse("a network card with no frames to send has nothing to do");
    }
    Ok(())
}

fn check_disk(disk: &DiskConfig) -> Result<(), RunError> {
    if disk.read_only && disk.job == Job::WriteTest {
        return refuse(format!(
            "{}: a write test was asked for, and the disk is read-only",
            disk.path.display()
        ));
    }
    Ok(())
}

/// Decides the spans, now that the sizes are known, and checks that the guest's memory is enough.
///
/// # Errors
/// One line on the first thing that cannot be.
pub(crate) fn plan(config: &RunConfig, disks: &[Blk]) -> Result<Vec<DiskPlan>, RunError> {
    let sizes: Vec<u64> = disks.iter().map(Blk::size).collect();
    plan_sizes(config, &sizes)
}

fn plan_sizes(config: &RunConfig, sizes: &[u64]) -> Result<Vec<DiskPlan>, RunError> {
    let block = u64::from(config.block);
    let mut plans = Vec::with_capacity(sizes.len());
    let mut heap = HEAP_A_DEVICE;
    for (disk, &bytes) in config.disks.iter().zip(sizes) {
        let span = match disk.job {
            Job::Hash => 0,
            Job::WriteTest => bytes.min(config.span) / block * block,
        };
        if disk.job == Job::WriteTest && span == 0 {
            return refuse(format!(
                "{}: the span to test is smaller than one block of {block} bytes",
                disk.path.display()
            ));
        }
        let (buffer, map) = match disk.job {
            Job::Hash => (block.max(HASH_CHUNK), 0),
            Job::WriteTest => (block, span / block * 4),
        };
        heap = heap
            .saturating_add(HEAP_A_DEVICE)
            .saturating_add(buffer.saturating_mul(u64::from(config.depth)))
            .saturating_add(map);
        plans.push(DiskPlan { job: disk.job, bytes, span });
    }
    for net in &config.nets {
        // A header before each frame, and the rest of a cache line behind it.
        let slots = 2 * u64::from(config.depth) * (u64::from(net.size.max(net.reply())) + 12 + 63);
        heap =
            heap.saturating_add(u64::from(net.queues) * (HEAP_A_PAIR + slots)).saturating_add(HEAP_A_DEVICE);
    }
    let given = config.memory - HEAP_BASE;
    if heap > given {
        let needed = (heap + HEAP_BASE).div_ceil(1 << 20);
        return refuse(format!(
            "guest memory of {} MiB is too little for these devices at depth {} and blocks of {block} bytes: \
             {needed} MiB are needed",
            config.memory >> 20,
            config.depth
        ));
    }
    Ok(plans)
}

/// What the guest is told.
pub(crate) fn boot_info(config: &RunConfig, plans: &[DiskPlan], tsc_khz: u64) -> BootInfo {
    let mut devices = [DeviceEntry::default(); MAX_DEVICES];
    let disks = plans.iter().map(|plan| match plan.job {
        Job::Hash => (job::HASH, 0),
        Job::WriteTest => (job::WRITE_TEST, plan.span),
    });
    let rng = (config.entropy > 0).then_some((job::RNG, config.entropy));
    let nets = config.nets.iter().enumerate().map(|(number, net)| match net.network {
        Network::Sink => (job::NET_SEND, net.frames),
        Network::Source => (job::NET_RECEIVE, net.frames),
        _ if nets::is_mirror(&config.nets, number) => (job::NET_MIRROR, net.frames),
        _ => (job::NET_ECHO, net.frames),
    });
    let first_net = plans.len() + rng.iter().len();
    let mut count = 0;
    for ((entry, (job, span)), number) in devices.iter_mut().zip(disks.chain(rng).chain(nets)).zip(0_u32..) {
        *entry = DeviceEntry {
            base: base(config.transport, number),
            gsi: FIRST_GSI + number,
            job,
            span,
            iova_offset: iova_offset(config, number),
            messages: IRQ_COUNT as u32 + number * MESSAGES,
            message_count: MESSAGES,
            ..DeviceEntry::default()
        };
        count = number + 1;
    }
    for (entry, net) in devices.iter_mut().skip(first_net).zip(&config.nets) {
        (entry.frame, entry.reply, entry.pairs) = (net.size, net.reply(), net.queues.into());
    }
    BootInfo {
        magic: BOOT_MAGIC,
        abi: ABI,
        inject: match config.inject {
            Inject::None => inject::NONE,
            Inject::Crash => inject::CRASH,
            Inject::Hang => inject::HANG,
            Inject::Panic => inject::PANIC,
        },
        tsc_khz,
        ram_size: config.memory,
        heap_base: HEAP_BASE,
        heap_size: config.memory - HEAP_BASE,
        report_addr: REPORT_BASE,
        report_size: REPORT_SIZE,
        duration_ns: u64::try_from(config.duration.as_nanos()).unwrap_or(u64::MAX),
        seed: config.seed,
        depth: config.depth,
        block: config.block,
        completion: match config.completion {
            Completion::Interrupt => completion::INTERRUPT,
            Completion::Poll => completion::POLL,
        },
        read_percent: config.read_percent,
        order: match config.order {
            BlockOrder::Random => order::RANDOM,
            BlockOrder::Sequential => order::SEQUENTIAL,
        },
        time_kicks: config.time_kicks.into(),
        device_count: count,
        transport: match config.transport {
            TransportChoice::Mmio => transport::MMIO,
            TransportChoice::MmioMsi => transport::MMIO_MSI,
            TransportChoice::Pci => transport::PCI,
        },
        devices,
    }
}

/// How much further up device `number` sees the heap. Each another, and no multiple of a large page, so that an address
/// that was not translated, or by another's domain, hits nothing.
pub(crate) fn iova_offset(config: &RunConfig, number: u32) -> u64 {
    if config.iommu { (u64::from(number) + 1) * ((1 << 36) + 3 * 4096) } else { 0 }
}

/// Where device `number` lies: its registers, on PCI its configuration space (device 0 on the bus is the bridge).
pub(crate) fn base(transport: TransportChoice, number: u32) -> u64 {
    match transport {
        TransportChoice::Mmio | TransportChoice::MmioMsi => MMIO_BASE + u64::from(number) * WINDOW,
        TransportChoice::Pci => PCI_ECAM + u64::from(number + 1) * ecam::FUNCTIONS * ecam::FUNCTION,
    }
}

// Each device's messages have handlers in the guest.
const _: () = assert!(IRQ_COUNT + MAX_DEVICES * MESSAGES as usize <= INTERRUPTS);

#[cfg(test)]
mod tests {
    use super::*;

    type Spoil = fn(&mut RunConfig);

    fn config(jobs: &[Job]) -> RunConfig {
        let disk = |&job| DiskConfig { path: "a.img".into(), read_only: false, job };
        RunConfig { disks: jobs.iter().map(disk).collect(), ..RunConfig::default() }
    }

    #[test]
    fn the_default_with_one_disk_is_fine() {
        check(&config(&[Job::Hash])).unwrap();
    }

    #[test]
    fn each_impossible_wish_is_refused_by_name() {
        let wishes: [(&str, Spoil); 20] = [
            ("nothing to do", |c| {
                c.disks.clear();
                c.entropy = 0;
            }),
            ("room for 19", |c| c.disks = vec![c.disks[0].clone(); 19]),
            ("depth of 0", |c| c.depth = 0),
            ("depth of 257", |c| c.depth = 257),
            ("block of 0", |c| c.block = 0),
            ("block of 1000", |c| c.block = 1000),
            ("101 percent", |c| c.read_percent = 101),
            ("from 16 MiB", |c| c.memory = 1 << 20),
            ("multiple of 4096", |c| c.memory += 512),
            ("0 I/O threads", |c| c.io_threads = Some(0)),
            ("65 I/O threads", |c| c.io_threads = Some(65)),
            ("polls of 10001 µs", |c| c.longest_poll = Duration::from_micros(10_001)),
            ("hang timeout", |c| c.hang_timeout = Duration::ZERO),
            ("frames of 21 bytes", |c| c.nets = vec![NetConfig { size: 21, ..NetConfig::default() }]),
            ("frames of 65550 bytes", |c| c.nets = vec![NetConfig { size: 65_550, ..NetConfig::default() }]),
            ("frames of 14 bytes", |c| c.nets = vec![NetConfig { reply: Some(14), ..NetConfig::default() }]),
            ("9 pairs", |c| c.nets = vec![NetConfig { queues: 9, ..NetConfig::default() }]),
            ("no frames to send", |c| c.nets = vec![NetConfig { frames: 0, ..NetConfig::default() }]),
            ("5 network cards", |c| c.nets = vec![NetConfig::default(); 5]),
            ("read-only", |c| {
                c.disks[0].read_only = true;
                c.disks[0].job = Job::WriteTest;
            }),
        ];
        for (what, spoil) in wishes {
            let mut config = config(&[Job::Hash]);
            spoil(&mut config);
            let error = check(&config).unwrap_err();
            assert!(error.to_string().contains(what), "{what}: {error}");
            assert_eq!(error.exit_status(), 2);
        }
    }

    #[test]
    fn spans_are_whole_blocks_and_must_fit_the_memory() {
        let mut config = config(&[Job::WriteTest, Job::Hash]);
        config.block = 8192;
        let plans = plan_sizes(&config, &[20_000 / 512 * 512, 1 << 20]).unwrap();
        assert_eq!(plans[0].span, 16384);
        assert_eq!(plans[1].span, 0);
        assert!(plan_sizes(&config, &[4096, 1 << 20]).unwrap_err().to_string().contains("one block"));
        config.block = 1 << 20;
        config.depth = 256;
        let error = plan_sizes(&config, &[1 << 30, 1 << 20]).unwrap_err().to_string();
        assert!(error.contains("too little"), "{error}");
    }

    #[test]
    fn the_guest_is_told_of_every_device() {
        let mut config = config(&[Job::WriteTest, Job::Hash]);
        config.nets = vec![NetConfig { queues: 2, frames: 5, ..NetConfig::default() }];
        let plans = plan_sizes(&config, &[1 << 20, 1 << 20]).unwrap();
        let info = boot_info(&config, &plans, 7);
        assert_eq!(info.device_count, 4);
        assert_eq!(info.devices.map(|device| device.job)[..5], [2, 1, 3, 4, 0]);
        let card = &info.devices[3];
        assert_eq!((card.span, card.frame, card.reply, card.pairs), (5, 64, 64, 2));
        assert_eq!(info.devices[2].base, MMIO_BASE + 2 * WINDOW);
        assert_eq!(info.devices[2].messages, 24 + 2 * MESSAGES);
        assert_eq!(info.devices[2].gsi, FIRST_GSI + 2);
        assert_eq!((info.devices[0].span, info.devices[2].span), (1 << 20, 4096));
    }
}
