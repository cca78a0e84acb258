//! The program: brings the devices up, and has each processor work on its own.
//!
//! ```text
//! boot information -> report, console -> drivers -> on each processor its loop -> exit
//! ```
use crate::boot::{self, Boot};
use crate::chance::Chance;
use crate::connection::{Connection, lane_cpu};
use crate::console::{self, Console, milestone};
use crate::disk::{self, Buffers, Disk, DiskQueue, Hash, Job, WriteTest, WriteTestParams};
use crate::entropy::{self, Draw};
use crate::failure::{refusal, set_up};
use crate::mirror::Mirror;
use crate::pair::CardPair;
use crate::ping::{self, Ping};
use crate::platform::Platform;
use crate::processor::{Lane, Processor, Shared, Work};
use crate::report::{DiskPage, Failure, Header, KickPage};
use crate::stream::{self, Direction, Stream};
use alloc::boxed::Box;
use alloc::vec::Vec;
use core::ops::Range;
use paravane_driver::Pool;
use paravane_driver::net::{Net, NetOptions};
use paravane_driver::rng::Rng;
use paravane_spec::blk::SECTOR;
use paravane_spec::builtin::{BootInfo, CONTROL_BASE, DeviceEntry, control, event, exit, job, order, part};

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
        let pages = (0..entry.queues).map(|lane| header.disk(entry.report as usize + lane as usize));
        let Some(pages) = pages.collect::<Option<Vec<_>>>() else {
            return exit::BAD_BOOT_INFO;
        };
        match bring_up(platform, &info, number, &pages, kicks, &mut pool) {
            Ok(works) => {
                for ((work, page), lane) in works.into_iter().zip(pages).zip(0..) {
                    let cpu = lane_cpu(&info, entry, lane) as usize;
                    cpus[cpu].add(Lane::new(number, lane, &info, work, page));
                }
            }
            Err(failure) => {
                if let Some(page) = pages.first() {
                    page.fail(&failure);
                }
                console.tell(number, 0, &failure);
            }
        }
    }
    let shared = Shared::new(platform, console, &info, cpus.iter().map(Processor::lanes));
    cpus.iter_mut().enumerate().for_each(|(cpu, processor)| processor.prepare(cpu, &shared));
    milestone(platform, event::DRIVERS_UP);
    platform.on_each_cpu(&mut cpus, &|cpu, processor: &mut Processor<'_, P>| processor.work(cpu, &shared));
    exit::DONE
}

/// Sets up the work on one device, on each of its queues or pairs; none if it has no job.
fn bring_up<'p, P: Platform>(
    platform: &'p P,
    info: &BootInfo,
    number: usize,
    pages: &[DiskPage],
    kicks: Option<KickPage>,
    pool: &mut Pool,
) -> Result<Vec<Work<'p, P>>, Failure> {
    let entry = &info.devices[number];
    let connection = || Connection::open(platform, info, entry, kicks).map_err(set_up);
    pool.translate(entry.iova_offset);
    let depth = info.depth.min(MAX_DEPTH);
    let queues = u16::try_from(entry.queues).unwrap_or(u16::MAX);
    let lanes = (0..).zip(pages.iter().copied());
    let mut works: Vec<Work<'p, P>> = Vec::with_capacity(pages.len());
    match entry.job {
        job::HASH | job::WRITE_TEST => {
            let disks = DiskQueue::open(connection()?, queues, depth as u16, pool).map_err(set_up)?;
            for (disk, (lane, page)) in all(disks, pages)?.into_iter().zip(lanes) {
                works.push(match entry.job {
                    job::HASH => Box::new(hash_lane(disk, info, [lane, entry.queues], page, pool)?),
                    _ => Box::new(test_lane(disk, info, number, lane, page, pool)?),
                });
            }
        }
        job::RNG => {
            let rng = Rng::new(connection()?, entropy::BUFFER, pool).map_err(set_up)?;
            works
                .extend(pages.first().map(|&page| Box::new(Draw::new(rng, entry.span, page)) as Work<'p, P>));
        }
        job::NET_ECHO | job::NET_MIRROR => {
            works = frames(connection()?, entry, depth as u16, pages, pool)?;
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
            works.extend(pages.first().map(|&page| Box::new(Stream::new(net, terms, page)) as Work<'p, P>));
        }
        _ => {}
    }
    Ok(works)
}

/// The echo or its mirror on each pair of a card.
fn frames<'p, P: Platform>(
    connection: Connection<'p, P>,
    entry: &DeviceEntry,
    depth: u16,
    pages: &[DiskPage],
    pool: &mut Pool,
) -> Result<Vec<Work<'p, P>>, Failure> {
    let [len, reply] = [entry.frame, entry.reply].map(|len| (len as usize).max(ping::SHORTEST));
    let options = NetOptions {
        pairs: u16::try_from(entry.queues).unwrap_or(u16::MAX),
        receive_slots: depth,
        transmit_slots: depth,
        frame: len.max(reply),
        // A frame lies in one slot, so that as many slots as frames in flight are enough.
        receive_slot: usize::MAX,
    };
    let pairs = all(CardPair::open(connection, options, pool)?, pages)?;
    let works = pairs.into_iter().zip(0..).zip(pages).map(|((pair, lane), &page)| -> Work<'p, P> {
        if entry.job == job::NET_MIRROR {
            return Box::new(Mirror::new(pair, options.frame, page));
        }
        let frames = part(entry.span, entry.queues, lane);
        Box::new(Ping::new(pair, ping::PingParams { frames, len, reply, depth: depth.into() }, page))
    });
    Ok(works.collect())
}

/// The queues that the driver got, if there is one for each report.
fn all<Q>(queues: Vec<Q>, pages: &[DiskPage]) -> Result<Vec<Q>, Failure> {
    if queues.len() == pages.len() { Ok(queues) } else { Err(refusal("the device has too few queues")) }
}

/// The hash job on one queue of a disk: part `number` of `parts`.
pub(crate) fn hash_lane<D: Disk>(
    disk: D,
    info: &BootInfo,
    [number, parts]: [u32; 2],
    page: DiskPage,
    pool: &mut Pool,
) -> Result<disk::Lane<D>, Failure> {
    page.capacity(disk.capacity());
    let chunk = (info.block as usize).max(HASH_CHUNK);
    let depth = disk.slots().min(info.depth as usize);
    let hash = Hash::new(disk.capacity(), [number, parts], chunk, depth)
        .ok_or(refusal("the disk claims an impossible size"))?;
    let buffers = Buffers::new(pool.take(chunk * depth, PAGE).map_err(set_up)?, chunk);
    Ok(disk::Lane::new(disk, Job::Hash(hash), depth, buffers, page))
}

/// The write test on queue `lane` of disk `number`.
pub(crate) fn test_lane<D: Disk>(
    disk: D,
    info: &BootInfo,
    number: usize,
    lane: u32,
    page: DiskPage,
    pool: &mut Pool,
) -> Result<disk::Lane<D>, Failure> {
    page.capacity(disk.capacity());
    if disk.read_only() {
        return Err(refusal("the disk is read-only and cannot take a write test"));
    }
    let DeviceEntry { span, queues, .. } = info.devices[number];
    if span / SECTOR > disk.capacity() {
        return Err(refusal("the span to test is larger than the disk"));
    }
    let block = info.block as usize;
    let Range { start: first, end } = part(span / u64::from(info.block), queues, lane);
    let blocks = end - first;
    if blocks == 0 {
        return Err(refusal("the span to test is smaller than one block for each queue"));
    }
    let map_len = usize::try_from(blocks).ok().and_then(|blocks| blocks.checked_mul(4));
    let map_len = map_len.ok_or(refusal("the span to test has too many blocks"))?;
    // RAM is zero at boot and the pool hands nothing out twice, so the map says "never written".
    let map = pool.take_private(map_len, PAGE).map_err(set_up)?;
    page.pass_map(map.addr, blocks);
    let depth = disk.slots().min(info.depth as usize);
    let buffers = Buffers::new(pool.take(block * depth, PAGE).map_err(set_up)?, block);
    let terms = WriteTestParams {
        first,
        blocks,
        block,
        duration_ns: info.duration_ns,
        read_percent: info.read_percent,
        sequential: info.order == order::SEQUENTIAL,
        seed: info.seed,
        flush: disk.has_flush(),
    };
    let test = WriteTest::new(
        terms,
        Chance::new(info.seed, info.devices[number].report as usize + lane as usize),
        map,
    );
    Ok(disk::Lane::new(disk, Job::WriteTest(test), depth, buffers, page))
}
