//! Boot information: read and checked.
use crate::ping::SHORTEST;
use crate::platform::Platform;
use paravane_driver::DmaArea;
use paravane_spec::blk::SECTOR;
use paravane_spec::builtin::{
    ABI, BOOT_INFO, BOOT_MAGIC, BootInfo, DISK_REPORTS, DeviceEntry, DiskReport, MAX_CPUS, MAX_DEVICES,
    completion, inject, job, order, transport,
};
use paravane_spec::net::MAX_FRAME;
use zerocopy::FromBytes;

/// Most bytes of a request; far from the limits of the arithmetic.
const MAX_BLOCK: u32 = 64 << 20;

/// The boot information, checked, and the memory that it names.
pub(crate) struct Boot {
    pub(crate) info: BootInfo,
    pub(crate) report: DmaArea,
    pub(crate) heap: DmaArea,
}

/// Reads the boot information; `None` if it is invalid.
pub(crate) fn read<P: Platform>(platform: &P) -> Option<Boot> {
    let page = platform.ram(BOOT_INFO, size_of::<BootInfo>())?;
    let mut bytes = [0; size_of::<BootInfo>()];
    if !page.area.read(0, &mut bytes) {
        return None;
    }
    let info = BootInfo::read_from_bytes(&bytes).ok()?;
    if !is_valid(&info) {
        return None;
    }
    let report = platform.ram(info.report_addr, usize::try_from(info.report_size).ok()?)?;
    let heap = platform.ram(info.heap_base, usize::try_from(info.heap_size).ok()?)?;
    Some(Boot { info, report, heap })
}

fn is_valid(info: &BootInfo) -> bool {
    let count = info.device_count as usize;
    let reports = DISK_REPORTS + u64::from(info.report_count) * size_of::<DiskReport>() as u64;
    info.magic == BOOT_MAGIC
        && info.abi == ABI
        && count <= MAX_DEVICES
        && (1..=MAX_CPUS).contains(&(info.cpus as usize))
        && info.report_size >= reports
        && info.report_addr.is_multiple_of(8)
        && info.depth > 0
        && info.block > 0
        && info.block <= MAX_BLOCK
        && u64::from(info.block).is_multiple_of(SECTOR)
        && matches!(info.completion, completion::INTERRUPT | completion::POLL)
        && matches!(info.order, order::RANDOM | order::SEQUENTIAL)
        && info.time_kicks <= 1
        && matches!(info.transport, transport::MMIO | transport::MMIO_MSI | transport::PCI)
        && matches!(info.inject, inject::NONE | inject::CRASH | inject::HANG | inject::PANIC)
        && info.devices[..count].iter().all(|device| {
            let reports = u64::from(device.report) + u64::from(device.queues);
            device.cpu < info.cpus && reports <= info.report_count.into() && is_job(device)
        })
}

fn is_job(device: &DeviceEntry) -> bool {
    match device.job {
        job::NONE => true,
        job::HASH | job::WRITE_TEST | job::RNG => device.queues > 0,
        job::NET_ECHO | job::NET_MIRROR | job::NET_SEND | job::NET_RECEIVE => {
            let frames = SHORTEST..=MAX_FRAME;
            [device.frame, device.reply].iter().all(|&len| frames.contains(&(len as usize)))
                && device.queues > 0
                && device.span > 0
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec::Vec;
    use paravane_spec::builtin::part;

    const CARD: DeviceEntry = DeviceEntry {
        base: 0,
        gsi: 0,
        job: job::NET_ECHO,
        span: 1,
        iova_offset: 0,
        messages: 0,
        message_count: 0,
        frame: 22,
        queues: 1,
        reply: 1024,
        cpu: 0,
        report: 0,
        reserved: 0,
    };

    fn good() -> BootInfo {
        BootInfo {
            magic: BOOT_MAGIC,
            abi: ABI,
            inject: 0,
            clock_khz: 0,
            ram_size: 0,
            heap_base: 0,
            heap_size: 0,
            report_addr: 0x40_0000,
            report_size: 0x40_0000,
            duration_ns: 0,
            seed: 0,
            depth: 1,
            block: 512,
            completion: 0,
            read_percent: 0,
            order: 0,
            time_kicks: 0,
            device_count: 1,
            transport: 0,
            cpus: 1,
            moves: 0,
            report_count: 3,
            reserved: 0,
            devices: [DeviceEntry::default(); MAX_DEVICES],
        }
    }

    #[test]
    fn a_good_one_is_valid() {
        assert!(is_valid(&good()));
        assert!(is_valid(&BootInfo { devices: [CARD; MAX_DEVICES], ..good() }));
    }

    #[test]
    fn each_invalid_value_is_refused() {
        type Spoil = fn(&mut BootInfo);
        let wrong: [(&str, Spoil); 23] = [
            ("magic", |info| info.magic ^= 1),
            ("abi", |info| info.abi += 1),
            ("device count", |info| info.device_count = MAX_DEVICES as u32 + 1),
            ("small report area", |info| info.report_size = DISK_REPORTS),
            ("crooked report area", |info| info.report_addr += 4),
            ("no processor", |info| info.cpus = 0),
            ("many processors", |info| info.cpus = 65),
            ("work for a processor that is not there", |info| info.devices[0].cpu = 1),
            ("depth", |info| info.depth = 0),
            ("block 0", |info| info.block = 0),
            ("block 513", |info| info.block = 513),
            ("huge block", |info| info.block = 1 << 31),
            ("transport", |info| info.transport = 99),
            ("completion", |info| info.completion = 2),
            ("order", |info| info.order = 2),
            ("time_kicks", |info| info.time_kicks = 2),
            ("job", |info| info.devices[0].job = 99),
            ("frame", |info| info.devices[0] = DeviceEntry { frame: 21, ..CARD }),
            ("reply", |info| info.devices[0] = DeviceEntry { reply: 21, ..CARD }),
            ("no pairs", |info| info.devices[0] = DeviceEntry { queues: 0, ..CARD }),
            ("reports that are not there", |info| {
                info.devices[0] = DeviceEntry { report: 2, queues: 2, ..CARD };
            }),
            ("no queues", |info| info.devices[0].job = job::HASH),
            ("no frames", |info| info.devices[0] = DeviceEntry { span: 0, ..CARD }),
        ];
        for (what, spoil) in wrong {
            let mut info = good();
            spoil(&mut info);
            assert!(!is_valid(&info), "{what}");
        }
    }

    #[test]
    fn parts_are_everything_once_and_of_nearly_one_size() {
        for (units, parts) in [(0, 1), (0, 3), (1, 4), (10, 3), (64, 64), (u64::MAX, 64), (7, 0)] {
            let all: Vec<_> = (0..parts.max(1)).map(|number| part(units, parts, number)).collect();
            assert_eq!((all[0].start, all[all.len() - 1].end), (0, units));
            assert!(all.windows(2).all(|two| two[0].end == two[1].start));
            let sizes = || all.iter().map(|part| part.end - part.start);
            assert!(sizes().max().unwrap() - sizes().min().unwrap() <= 1, "{units} {parts}");
        }
    }
}
