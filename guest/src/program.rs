//! The program: brings the devices up, and has each processor work on its own.
//!
//! ```text
//! boot information -> report, console -> drivers -> on each processor its loop -> exit
//! ```
use crate::boot::{self, Boot};
use crate::chance::Chance;
use crate::connection::Connection;
use crate::console::{self, Console, milestone};
use crate::disk::{Buffers, Disk, Hash, Job, Lane, WriteTest, WriteTestParams};
use crate::entropy::{self, Draw};
use crate::failure::{refusal, set_up};
use crate::mirror::Mirror;
use crate::ping::{self, Ping};
use crate::platform::Platform;
use crate::processor::{Processor, Shared, Work};
use crate::report::{DiskPage, Failure, Header, KickPage};
use crate::stream::{self, Direction, Stream};
use alloc::boxed::Box;
use alloc::vec::Vec;
use paravane_driver::Pool;
use paravane_driver::blk::Blk;
use paravane_driver::net::{Net, NetOptions};
use paravane_driver::rng::Rng;
use paravane_spec::blk::SECTOR;
use paravane_spec::builtin::{BootInfo, CONTROL_BASE, control, event, exit, job, order};

/// Fewest bytes of a hash job's request: large sequential reads are faster.
const HASH_CHUNK: usize = 64 << 10;
/// Most requests in flight on a disk, limited by the image's allocator.
const MAX_DEPTH: u32 = 256;
/// Alignment of data buffers and of the pass map.
const PAGE: usize = 4096;

/// Runs the guest to its end; returns a [`paravane_spec::builtin::exit`] code.
///
/// Its last act is to write the code to the control page's EXIT register.
pub fn run<P: Platform>(platform: &P) -> u32 {
    let code = work(platform);
    platform.mmio_write32(CONTROL_BASE + control::EXIT, code);
    code
}

/// Works on all devices; returns an `exit` code.
fn work<P: Platform>(platform: &P) -> u32 {
    let Some(Boot { info, report, heap }) = boot::read(platform) else {
        return exit::BAD_BOOT_INFO;
    };
    let header = Header::new(report.area, info.device_count as usize);
    let mut pool = Pool::new(heap);
    let Ok(line) = pool.take(console::MEMORY, 64) else {
        return exit::BAD_BOOT_INFO;
    };
    let console = Console::new(platform, line);
    milestone(platform, event::STARTED);

    // Processors would count kicks over each other.
    let kicks = header.kicks().filter(|_| info.time_kicks != 0 && info.cpus == 1);
    let pages = (0..info.cpus as usize).map(|cpu| header.cpu(cpu));
    let Some(mut cpus) = pages.map(|page| page.map(Processor::new)).collect::<Option<Vec<_>>>() else {
        return exit::BAD_BOOT_INFO;
    };
    for (number, entry) in info.devices.iter().take(info.device_count as usize).enumerate() {
        let Some(page) = header.disk(number) else {
            return exit::BAD_BOOT_INFO;
        };
        match bring_up(platform, &info, number, page, kicks, &mut pool) {
            Ok(None) => {}
            Ok(Some(worker)) => cpus[entry.cpu as usize].add(number, &info, worker, page),
            Err(failure) => {
                page.fail(&failure);
                console.tell(number, &failure);
            }
        }
    }
    let shared = Shared::new(platform, console, &info, cpus.iter().map(Processor::devices));
    cpus.iter_mut().enumerate().for_each(|(cpu, processor)| processor.prepare(cpu, &shared));
    milestone(platform, event::DRIVERS_UP);
    platform.on_each_cpu(&mut cpus, &|cpu, processor: &mut Processor<'_, P>| processor.work(cpu, &shared));
    exit::DONE
}

/// Sets up the work on one device; `None` if it has no job.
fn bring_up<'p, P: Platform>(
    platform: &'p P,
    info: &BootInfo,
    number: usize,
    page: DiskPage,
    kicks: Option<KickPage>,
    pool: &mut Pool,
) -> Result<Option<Work<'p, P>>, Failure> {
    let entry = &info.devices[number];
    let connection = || Connection::open(platform, info, entry, kicks).map_err(set_up);
    pool.translate(entry.iova_offset);
    let depth = info.depth.min(MAX_DEPTH);
    Ok(match entry.job {
        job::HASH => {
            let disk = Blk::new(connection()?, depth as u16, pool).map_err(set_up)?;
            Some(Box::new(hash_lane(disk, info, page, pool)?))
        }
        job::WRITE_TEST => {
            let disk = Blk::new(connection()?, depth as u16, pool).map_err(set_up)?;
            Some(Box::new(test_lane(disk, info, number, entry.span, page, pool)?))
        }
        job::RNG => {
            let rng = Rng::new(connection()?, entropy::BUFFER, pool).map_err(set_up)?;
            Some(Box::new(Draw::new(rng, entry.span, page)))
        }
        job::NET_ECHO | job::NET_MIRROR => {
            let terms = ping::PingParams {
                frames: entry.span,
                len: (entry.frame as usize).max(ping::SHORTEST),
                reply: (entry.reply as usize).max(ping::SHORTEST),
                depth: depth as usize,
            };
            let options = NetOptions {
                pairs: u16::try_from(entry.pairs).unwrap_or(u16::MAX),
                receive_slots: depth as u16,
                transmit_slots: depth as u16,
                frame: terms.len.max(terms.reply),
                // A frame lies in one slot, so that as many slots as frames in flight are enough.
                receive_slot: usize::MAX,
            };
            let net = Net::new(connection()?, options, pool).map_err(set_up)?;
            if entry.job == job::NET_ECHO {
                Some(Box::new(Ping::new(net, terms, page)?))
            } else {
                Some(Box::new(Mirror::new(net, options.frame, page)?))
            }
        }
        job::NET_SEND | job::NET_RECEIVE => {
            let direction = if entry.job == job::NET_SEND { Direction::Out } else { Direction::In };
            let terms = stream::StreamParams {
                direction,
                frames: entry.span,
                len: (entry.frame as usize).max(ping::SHORTEST),
            };
            let slots = |direction| if terms.direction == direction { depth as u16 } else { 1 };
            let options = NetOptions {
                receive_slots: slots(Direction::In),
                transmit_slots: slots(Direction::Out),
                frame: terms.len,
                receive_slot: usize::MAX,
                ..NetOptions::default()
            };
            let net = Net::new(connection()?, options, pool).map_err(set_up)?;
            Some(Box::new(Stream::new(net, terms, page)))
        }
        _ => None,
    })
}

/// The hash job on a disk.
pub(crate) fn hash_lane<D: Disk>(
    disk: D,
    info: &BootInfo,
    page: DiskPage,
    pool: &mut Pool,
) -> Result<Lane<D>, Failure> {
    page.capacity(disk.capacity());
    let chunk = (info.block as usize).max(HASH_CHUNK);
    let depth = disk.slots().min(info.depth as usize);
    let hash =
        Hash::new(disk.capacity(), chunk, depth).ok_or(refusal("the disk claims an impossible size"))?;
    let buffers = Buffers::new(pool.take(chunk * depth, PAGE).map_err(set_up)?, chunk);
    Ok(Lane::new(disk, Job::Hash(hash), depth, buffers, page))
}

/// The write test on a disk.
pub(crate) fn test_lane<D: Disk>(
    disk: D,
    info: &BootInfo,
    number: usize,
    span: u64,
    page: DiskPage,
    pool: &mut Pool,
) -> Result<Lane<D>, Failure> {
    page.capacity(disk.capacity());
    if disk.read_only() {
        return Err(refusal("the disk is read-only and cannot take a write test"));
    }
    if span / SECTOR > disk.capacity() {
        return Err(refusal("the span to test is larger than the disk"));
    }
    let block = info.block as usize;
    let blocks = span / u64::from(info.block);
    if blocks == 0 {
        return Err(refusal("the span to test is smaller than one block"));
    }
    let map_len = usize::try_from(blocks).ok().and_then(|blocks| blocks.checked_mul(4));
    let map_len = map_len.ok_or(refusal("the span to test has too many blocks"))?;
    // RAM is zero at boot and the pool hands nothing out twice, so the map says "never written".
    let map = pool.take_private(map_len, PAGE).map_err(set_up)?;
    page.pass_map(map.addr, blocks);
    let depth = disk.slots().min(info.depth as usize);
    let buffers = Buffers::new(pool.take(block * depth, PAGE).map_err(set_up)?, block);
    let terms = WriteTestParams {
        blocks,
        block,
        duration_ns: info.duration_ns,
        read_percent: info.read_percent,
        sequential: info.order == order::SEQUENTIAL,
        seed: info.seed,
        flush: disk.has_flush(),
    };
    let test = WriteTest::new(terms, Chance::new(info.seed, number), map);
    Ok(Lane::new(disk, Job::WriteTest(test), depth, buffers, page))
}
