//! The plan of a run, and the boot information for the guest.
//!
//! ```text
//! jobs of open devices --plan--> DiskPlan, work of each device --boot_info--> BootInfo
//! ```
use crate::config::{BlockOrder, Completion, Inject, RunConfig, TransportChoice, refuse};
use crate::error::RunError;
use crate::job::{DiskJob, DiskWork, NetJob, Traffic};
use crate::machine::attach::base;
use crate::machine::domain::iova_offset;
use paravane_device::Device;
use paravane_spec::blk::{F_RO, SECTOR};
use paravane_spec::builtin::{
    ABI, BOOT_MAGIC, BootInfo, CPU_STACK, DISK_REPORTS, DeviceEntry, DiskReport, FIRST_GSI, HEAP_BASE,
    IRQ_COUNT, MAX_DEVICES, REPORT_BASE, REPORT_SIZE, WAKE, completion, inject, job, order, part, transport,
};
use paravane_spec::net::PAIR;
use std::ops::Range;

/// Smallest piece that the guest hashes, in bytes.
const HASH_CHUNK: u64 = 64 << 10;
/// Guest heap for each device, besides buffers and pass map.
///
/// For rings, request slots and alignment.
const HEAP_A_DEVICE: u64 = 512 << 10;
/// Heap of the guest for each queue of a disk or pair of a card, besides buffers and frames.
const HEAP_A_QUEUE: u64 = 64 << 10;
/// Interrupts for the messages of all devices.
const MESSAGES: u32 = WAKE - IRQ_COUNT as u32;
/// Private memory of the guest for its work on queues, in bytes.
const PRIVATE: u64 = (2 << 20) - (64 << 10);
/// Private memory for each queue or pair, and for each request or frame in flight, in bytes.
const PRIVATE_A_QUEUE: u64 = 2 << 10;
const PRIVATE_A_REQUEST: u64 = 192;

/// Job of one disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DiskPlan {
    /// Hash or write test.
    pub(crate) work: DiskWork,
    /// Size in bytes.
    pub(crate) bytes: u64,
    /// Write test: bytes from the start to work on, whole blocks.
    pub(crate) span: u64,
    /// Blocks or pieces that the job consists of.
    pub(crate) units: u64,
    /// Bytes of each.
    pub(crate) unit: u64,
    /// Queues to use, at least 1.
    pub(crate) queues: u32,
}

impl DiskPlan {
    /// Bytes of the part of each queue.
    pub(super) fn parts(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        let end = if self.work == DiskWork::Hash { self.bytes } else { self.span };
        let bytes = move |units: u64| units.saturating_mul(self.unit).min(end);
        let parts = (0..self.queues).map(|number| part(self.units, self.queues, number));
        parts.map(move |Range { start, end }| bytes(start)..bytes(end))
    }
}

/// Most queues or pairs of each of `devices` devices that the guest works on, if one has `queues` queues.
///
/// Each queue has a message, as has the configuration change.
pub(super) fn most_lanes(devices: usize, queues: u32) -> u32 {
    ((MESSAGES / devices.max(1) as u32).saturating_sub(1) / queues).max(1)
}

/// Decides the span of a job on a disk, and the queues to use, at most `most`.
///
/// # Errors
/// It is shorter than a block, or a write test on a read-only disk.
pub(super) fn disk(
    config: &RunConfig,
    job: &DiskJob,
    disk: &dyn Device,
    most: u32,
) -> Result<DiskPlan, RunError> {
    if disk.features() & F_RO != 0 && job.work == DiskWork::WriteTest {
        return refuse(format!("{}: a write test needs a disk that is not read-only", job.path.display()));
    }
    let queues = (disk.queue_sizes().len() as u32).min(most);
    plan(config, job, u64::from_le_bytes(config_field(disk, 0)).saturating_mul(SECTOR), queues)
}

fn plan(config: &RunConfig, job: &DiskJob, bytes: u64, queues: u32) -> Result<DiskPlan, RunError> {
    let block = u64::from(config.block);
    let unit = match job.work {
        DiskWork::Hash => block.max(HASH_CHUNK),
        DiskWork::WriteTest => block,
    };
    let span = match job.work {
        DiskWork::Hash => 0,
        DiskWork::WriteTest => bytes.min(config.span) / block * block,
    };
    if job.work == DiskWork::WriteTest && span == 0 {
        return refuse(format!(
            "{}: the span to test is shorter than one block of {block} bytes",
            job.path.display()
        ));
    }
    let units = if job.work == DiskWork::Hash { bytes } else { span }.div_ceil(unit);
    // Each queue has something to do.
    let queues = queues.min(u32::try_from(units).unwrap_or(u32::MAX)).max(1);
    Ok(DiskPlan { work: job.work, bytes, span, units, unit, queues })
}

/// Checks that the guest has memory for the work on all devices.
///
/// # Errors
/// It has too little; one line with the least that it needs.
pub(super) fn check_memory<'a>(
    config: &RunConfig,
    disks: impl IntoIterator<Item = DiskPlan>,
    cards: impl IntoIterator<Item = (&'a NetJob, u16)>,
) -> Result<(), RunError> {
    let block = u64::from(config.block);
    let depth = u64::from(config.depth);
    let (mut heap, mut private) = (HEAP_A_DEVICE, 0_u64);
    for plan in disks {
        let queues = u64::from(plan.queues);
        let map = if plan.work == DiskWork::WriteTest { plan.units * 4 } else { 0 };
        let buffers = queues.saturating_mul(depth).saturating_mul(plan.unit);
        heap = heap.saturating_add(HEAP_A_DEVICE + (queues - 1) * HEAP_A_QUEUE).saturating_add(buffers);
        heap = heap.saturating_add(map);
        private += queues * (PRIVATE_A_QUEUE + depth * PRIVATE_A_REQUEST);
    }
    for (job, pairs) in cards {
        // A header before each frame, and the rest of a cache line behind it.
        let (pairs, longest) = (u64::from(pairs), u64::from(job.size.max(job.reply)));
        let slots = 2 * depth * (longest + 12 + 63);
        heap = heap.saturating_add(pairs * (HEAP_A_QUEUE + slots)).saturating_add(HEAP_A_DEVICE);
        private += pairs * (PRIVATE_A_QUEUE + depth * PRIVATE_A_REQUEST + u64::from(job.size + job.reply));
    }
    if private > PRIVATE {
        return refuse(format!(
            "the built-in guest has {} KiB for its work on queues, and these need {} KiB: use fewer queues, \
             a smaller --depth or smaller frames",
            PRIVATE >> 10,
            private.div_ceil(1 << 10)
        ));
    }
    let base = heap_base(config.cpus.max(1).into());
    let given = config.memory.saturating_sub(base);
    if heap > given {
        let needed = (heap + base).div_ceil(1 << 20);
        return refuse(format!(
            "guest memory of {} MiB is too little for these devices at depth {} and blocks of {block} bytes: \
             give at least {needed} MiB",
            config.memory >> 20,
            config.depth
        ));
    }
    Ok(())
}

/// Bytes of the configuration space.
pub(super) fn config_field<const N: usize>(device: &dyn Device, offset: u32) -> [u8; N] {
    let mut bytes = [0; N];
    device.read_config(offset, &mut bytes);
    bytes
}

/// The guest's work on a disk.
pub(crate) fn disk_work(plan: &DiskPlan) -> DeviceEntry {
    let job = match plan.work {
        DiskWork::Hash => job::HASH,
        DiskWork::WriteTest => job::WRITE_TEST,
    };
    let queues = plan.queues;
    DeviceEntry { job, span: plan.span, queues, message_count: queues + 1, ..DeviceEntry::default() }
}

/// The guest's work on an entropy source: to draw this number of bytes.
pub(crate) fn entropy_work(bytes: u64) -> DeviceEntry {
    DeviceEntry { job: job::RNG, span: bytes, queues: 1, message_count: 2, ..DeviceEntry::default() }
}

/// The guest's work on this number of a network card's queue pairs.
pub(crate) fn card_work(net: &NetJob, pairs: u32) -> DeviceEntry {
    let job = match net.traffic {
        Traffic::Exchange => job::NET_ECHO,
        Traffic::Mirror => job::NET_MIRROR,
        Traffic::Send => job::NET_SEND,
        Traffic::Receive => job::NET_RECEIVE,
    };
    let NetJob { frames, size, reply, .. } = *net;
    DeviceEntry {
        job,
        span: frames,
        frame: size,
        reply,
        queues: pairs,
        message_count: pairs * u32::from(PAIR) + 1,
        ..DeviceEntry::default()
    }
}

/// Boot information for the guest.
///
/// Queue or pair q of device n is the work of processor n + q, modulo their number.
pub(crate) fn boot_info(config: &RunConfig, work: &[DeviceEntry], cpus: u16, clock_khz: u64) -> BootInfo {
    let cpus = u32::from(cpus.max(1));
    let mut devices = [DeviceEntry::default(); MAX_DEVICES];
    let (mut messages, mut report) = (IRQ_COUNT as u32, 0);
    for ((entry, work), number) in devices.iter_mut().zip(work).zip(0_u32..) {
        *entry = DeviceEntry {
            base: base(config.transport, number),
            gsi: FIRST_GSI + number,
            iova_offset: iova_offset(config, number),
            messages,
            cpu: number % cpus,
            report,
            ..*work
        };
        messages += work.message_count;
        report += work.queues;
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
        clock_khz,
        ram_size: config.memory,
        heap_base: heap_base(cpus),
        heap_size: config.memory - heap_base(cpus),
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
        device_count: work.len() as u32,
        transport: match config.transport {
            TransportChoice::Mmio => transport::MMIO,
            TransportChoice::MmioMsi => transport::MMIO_MSI,
            TransportChoice::Pci => transport::PCI,
        },
        cpus,
        moves: config.moves,
        report_count: report,
        reserved: 0,
        devices,
    }
}

/// The processor that works on a queue of device `number`; `None`: on none of its own.
pub(super) fn cpu_of(work: &[DeviceEntry], number: usize, queue: u16, cpus: u16) -> Option<u32> {
    let entry = work.get(number)?;
    let of_lane = match entry.job {
        job::NET_ECHO | job::NET_SEND | job::NET_RECEIVE | job::NET_MIRROR => PAIR,
        _ => 1,
    };
    let lane = u32::from(queue / of_lane);
    (lane < entry.queues).then_some((number as u32 + lane) % u32::from(cpus.max(1)))
}

/// Start of the heap, behind the stacks of all processors but the first.
fn heap_base(cpus: u32) -> u64 {
    HEAP_BASE + u64::from(cpus - 1) * CPU_STACK
}

// There are a report for each queue, and messages for one queue or pair of each device.
const _: () = assert!(
    DISK_REPORTS + (MESSAGES as u64 + MAX_DEVICES as u64) * size_of::<DiskReport>() as u64 <= REPORT_SIZE
        && MAX_DEVICES as u32 * (PAIR as u32 + 1) <= MESSAGES
);

#[cfg(test)]
mod tests {
    use super::*;
    use paravane_spec::builtin::MMIO_BASE;
    use paravane_spec::mmio_msi::WINDOW;

    /// The plans for disks of these sizes: a write test, and a hash.
    fn plans(config: &RunConfig, sizes: [u64; 2]) -> Result<[DiskPlan; 2], RunError> {
        let plan = |work, bytes| {
            let image = tempfile::tempfile().unwrap();
            let job = DiskJob { work, path: "a.img".into(), image, engine: String::new() };
            plan(config, &job, bytes, 4)
        };
        let plans = [plan(DiskWork::WriteTest, sizes[0])?, plan(DiskWork::Hash, sizes[1])?];
        check_memory(config, plans, [])?;
        Ok(plans)
    }

    #[test]
    fn spans_are_whole_blocks_and_must_fit_the_memory() {
        let mut config = RunConfig { block: 8192, ..RunConfig::default() };
        let planned = plans(&config, [20_000 / 512 * 512, 1 << 20]).unwrap();
        assert_eq!((planned[0].span, planned[0].units, planned[0].queues), (16384, 2, 2));
        assert_eq!((planned[1].span, planned[1].units, planned[1].queues), (0, 16, 4));
        assert_eq!(planned[0].parts().collect::<Vec<_>>(), [0..8192, 8192..16384]);
        let odd = plans(&config, [1 << 20, (1 << 20) - 512]).unwrap()[1];
        assert_eq!(odd.parts().last(), Some((768 << 10)..(1 << 20) - 512));
        assert!(plans(&config, [4096, 1 << 20]).unwrap_err().to_string().contains("one block"));
        config.block = 1 << 20;
        config.depth = 256;
        let error = plans(&config, [1 << 30, 1 << 20]).unwrap_err().to_string();
        assert!(error.contains("too little"), "{error}");
    }

    #[test]
    fn the_guest_is_told_of_every_device() {
        let config = RunConfig::default();
        let net = NetJob { network: "echo", traffic: Traffic::Exchange, frames: 5, size: 64, reply: 64 };
        let plans = plans(&config, [1 << 20, 1 << 20]).unwrap();
        let mut work: Vec<_> = plans.iter().map(disk_work).collect();
        work.push(entropy_work(4096));
        work.push(card_work(&net, 2));
        let info = boot_info(&config, &work, 2, 7);
        assert_eq!(info.device_count, 4);
        assert_eq!(info.devices.map(|device| device.job)[..5], [2, 1, 3, 4, 0]);
        let card = &info.devices[3];
        assert_eq!((card.span, card.frame, card.reply, card.queues), (5, 64, 64, 2));
        // Two disks of four queues, the entropy source.
        assert_eq!((card.report, info.report_count), (9, 11));
        assert_eq!((card.messages, card.message_count), (24 + 5 + 5 + 2, 5));
        assert_eq!(info.devices.map(|device| device.cpu)[..5], [0, 1, 0, 1, 0]);
        assert_eq!((info.cpus, info.heap_base), (2, HEAP_BASE + CPU_STACK));
        let cpus = |number, queues: u16| -> Vec<_> {
            (0..queues).map(|queue| cpu_of(&work, number, queue, 2)).collect()
        };
        assert_eq!(cpus(1, 5), [Some(1), Some(0), Some(1), Some(0), None]);
        assert_eq!(cpus(3, 5), [Some(1), Some(1), Some(0), Some(0), None], "the last is the control queue");
        assert_eq!(info.devices[2].base, MMIO_BASE + 2 * WINDOW);
        assert_eq!((info.devices[2].messages, info.devices[2].message_count), (24 + 5 + 5, 2));
        assert_eq!(info.devices[2].gsi, FIRST_GSI + 2);
        assert_eq!((info.devices[0].span, info.devices[2].span), (1 << 20, 4096));
        assert_eq!(card_work(&NetJob { traffic: Traffic::Mirror, ..net }, 2).job, job::NET_MIRROR);
    }

    #[test]
    fn queues_share_the_messages_and_the_private_memory() {
        assert_eq!([most_lanes(1, 1), most_lanes(2, 1), most_lanes(19, 1)], [127, 63, 5]);
        assert_eq!([most_lanes(1, 2), most_lanes(19, 2)], [63, 2]);
        let config = RunConfig { depth: 256, memory: 1 << 30, ..RunConfig::default() };
        let job = DiskJob {
            work: DiskWork::Hash,
            path: "a.img".into(),
            image: tempfile::tempfile().unwrap(),
            engine: String::new(),
        };
        let check = |queues| check_memory(&config, [plan(&config, &job, 1 << 30, queues).unwrap()], []);
        check(32).unwrap();
        let error = check(64).unwrap_err().to_string();
        assert!(error.contains("use fewer queues"), "{error}");
    }
}
