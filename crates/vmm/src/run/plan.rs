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
    ABI, BOOT_MAGIC, BootInfo, CPU_STACK, DeviceEntry, FIRST_GSI, HEAP_BASE, IRQ_COUNT, MAX_DEVICES,
    REPORT_BASE, REPORT_SIZE, WAKE, completion, inject, job, order, transport,
};

/// Smallest piece that the guest hashes, in bytes.
const HASH_CHUNK: u64 = 64 << 10;
/// Guest heap for each device, besides buffers and pass map.
///
/// For rings, request slots and alignment.
const HEAP_A_DEVICE: u64 = 512 << 10;
/// Interrupts for the messages of each device.
///
/// One is for configuration changes, three for queues. Further queues share the last one.
const MESSAGES: u32 = 4;
/// Heap of the guest for each pair of queues of a card, besides its frames.
const HEAP_A_PAIR: u64 = 64 << 10;

/// Job of one disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DiskPlan {
    /// Hash or write test.
    pub(crate) work: DiskWork,
    /// Size in bytes.
    pub(crate) bytes: u64,
    /// Write test: bytes from the start to work on, whole blocks.
    pub(crate) span: u64,
}

/// Decides the span of a job on a disk.
///
/// # Errors
/// It is shorter than a block, or a write test on a read-only disk.
pub(super) fn disk(config: &RunConfig, job: &DiskJob, disk: &dyn Device) -> Result<DiskPlan, RunError> {
    if disk.features() & F_RO != 0 && job.work == DiskWork::WriteTest {
        return refuse(format!("{}: a write test needs a disk that is not read-only", job.path.display()));
    }
    plan(config, job, u64::from_le_bytes(config_field(disk, 0)).saturating_mul(SECTOR))
}

fn plan(config: &RunConfig, job: &DiskJob, bytes: u64) -> Result<DiskPlan, RunError> {
    let block = u64::from(config.block);
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
    Ok(DiskPlan { work: job.work, bytes, span })
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
    let mut heap = HEAP_A_DEVICE;
    for plan in disks {
        let (buffer, map) = match plan.work {
            DiskWork::Hash => (block.max(HASH_CHUNK), 0),
            DiskWork::WriteTest => (block, plan.span / block * 4),
        };
        heap = heap
            .saturating_add(HEAP_A_DEVICE)
            .saturating_add(buffer.saturating_mul(u64::from(config.depth)))
            .saturating_add(map);
    }
    for (job, pairs) in cards {
        // A header before each frame, and the rest of a cache line behind it.
        let slots = 2 * u64::from(config.depth) * (u64::from(job.size.max(job.reply)) + 12 + 63);
        heap = heap.saturating_add(u64::from(pairs) * (HEAP_A_PAIR + slots)).saturating_add(HEAP_A_DEVICE);
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
    DeviceEntry { job, span: plan.span, ..DeviceEntry::default() }
}

/// The guest's work on a network card with this number of queue pairs.
pub(crate) fn card_work(net: &NetJob, pairs: u16) -> DeviceEntry {
    let job = match net.traffic {
        Traffic::Exchange => job::NET_ECHO,
        Traffic::Mirror => job::NET_MIRROR,
        Traffic::Send => job::NET_SEND,
        Traffic::Receive => job::NET_RECEIVE,
    };
    let NetJob { frames, size, reply, .. } = *net;
    DeviceEntry { job, span: frames, frame: size, reply, pairs: pairs.into(), ..DeviceEntry::default() }
}

/// Boot information for the guest.
///
/// Device n is the work of processor n, modulo their number.
pub(crate) fn boot_info(config: &RunConfig, work: &[DeviceEntry], cpus: u16, clock_khz: u64) -> BootInfo {
    let cpus = u32::from(cpus.max(1));
    let mut devices = [DeviceEntry::default(); MAX_DEVICES];
    for ((entry, work), number) in devices.iter_mut().zip(work).zip(0_u32..) {
        *entry = DeviceEntry {
            base: base(config.transport, number),
            gsi: FIRST_GSI + number,
            iova_offset: iova_offset(config, number),
            messages: IRQ_COUNT as u32 + number * MESSAGES,
            message_count: work.message_count.min(MESSAGES),
            cpu: number % cpus,
            ..*work
        };
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
        devices,
    }
}

/// Start of the heap, behind the stacks of all processors but the first.
fn heap_base(cpus: u32) -> u64 {
    HEAP_BASE + u64::from(cpus - 1) * CPU_STACK
}

// Each device's messages have handlers in the guest.
const _: () = assert!(IRQ_COUNT + MAX_DEVICES * MESSAGES as usize <= WAKE as usize);

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
            plan(config, &job, bytes)
        };
        let plans = [plan(DiskWork::WriteTest, sizes[0])?, plan(DiskWork::Hash, sizes[1])?];
        check_memory(config, plans, [])?;
        Ok(plans)
    }

    #[test]
    fn spans_are_whole_blocks_and_must_fit_the_memory() {
        let mut config = RunConfig { block: 8192, ..RunConfig::default() };
        let planned = plans(&config, [20_000 / 512 * 512, 1 << 20]).unwrap();
        assert_eq!(planned[0].span, 16384);
        assert_eq!(planned[1].span, 0);
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
        work.push(DeviceEntry { job: job::RNG, span: 4096, ..DeviceEntry::default() });
        work.push(card_work(&net, 2));
        let info = boot_info(&config, &work, 2, 7);
        assert_eq!(info.device_count, 4);
        assert_eq!(info.devices.map(|device| device.job)[..5], [2, 1, 3, 4, 0]);
        let card = &info.devices[3];
        assert_eq!((card.span, card.frame, card.reply, card.pairs), (5, 64, 64, 2));
        assert_eq!(info.devices.map(|device| device.cpu)[..5], [0, 1, 0, 1, 0]);
        assert_eq!((info.cpus, info.heap_base), (2, HEAP_BASE + CPU_STACK));
        assert_eq!(info.devices[2].base, MMIO_BASE + 2 * WINDOW);
        assert_eq!(info.devices[2].messages, 24 + 2 * MESSAGES);
        assert_eq!(info.devices[2].gsi, FIRST_GSI + 2);
        assert_eq!((info.devices[0].span, info.devices[2].span), (1 << 20, 4096));
        assert_eq!(card_work(&NetJob { traffic: Traffic::Mirror, ..net }, 2).job, job::NET_MIRROR);
    }
}
