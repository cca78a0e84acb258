//! The program: brings the devices up and works on all of them from one loop.
//!
//! ```text
//! boot information -> report, console -> drivers -> loop { step every device; sleep if all wait } -> exit
//! ```
//! Sleeping loses no wake-up: the count of interrupts is sampled first, then every device is armed
//! and looked at once more, and the platform does not sleep if the count is no longer the sampled
//! one.
use crate::boot::{self, Boot};
use crate::chance::Chance;
use crate::connection::Connection;
use crate::console::{self, Console};
use crate::disk::{Buffers, Disk, Hash, Job, Lane, WriteTest, WriteTestParams};
use crate::entropy::{self, Draw};
use crate::failure::{refusal, set_up};
use crate::mirror::Mirror;
use crate::ping::{self, Ping};
use crate::platform::Platform;
use crate::report::{DiskPage, Failure, Header, KickPage, Totals};
use crate::stream::{self, Direction, Stream};
use crate::worker::{Step, Worker};
use alloc::boxed::Box;
use alloc::vec::Vec;
use paravane_driver::Pool;
use paravane_driver::blk::Blk;
use paravane_driver::net::{Net, NetOptions};
use paravane_driver::rng::Rng;
use paravane_spec::blk::SECTOR;
use paravane_spec::builtin::{BootInfo, CONTROL_BASE, completion, control, event, exit, inject, job, order};

/// Fewest bytes of a hash job's request: large sequential reads are faster.
const HASH_CHUNK: usize = 64 << 10;
/// Most requests in flight on a disk, limited by the image's allocator.
const MAX_DEPTH: u32 = 256;
/// Polling rounds without work between two readings of the interrupt causes.
///
/// Each reading is an exit, and the only way to learn that a device needs a reset.
const IDLE_ROUNDS: u64 = 1 << 16;
/// Alignment of data buffers and of the pass map.
const PAGE: usize = 4096;

/// An interrupt whose causes must be read from the device.
struct InterruptSource {
    number: u32,
    /// Interrupts handled so far.
    handled: u64,
}

impl InterruptSource {
    fn new(number: u32) -> Self {
        Self { number, handled: 0 }
    }
}

/// One device at work.
struct Device<'p, P: Platform> {
    gsi: u32,
    /// Its wire, and the message of its configuration change.
    ///
    /// The message of a queue needs no handling: the loop looks at every queue.
    sources: [InterruptSource; 2],
    worker: Box<dyn Worker<P> + 'p>,
    page: DiskPage,
    number: usize,
    running: bool,
}

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
    let mut header = Header::new(report.area, info.device_count as usize);
    let mut pool = Pool::new(heap);
    let Ok(line) = pool.take(console::MEMORY, 64) else {
        return exit::BAD_BOOT_INFO;
    };
    let console = Console::new(platform, line);
    milestone(platform, event::STARTED);

    let kicks = header.kicks().filter(|_| info.time_kicks != 0);
    let mut devices = Vec::new();
    for (number, entry) in info.devices.iter().take(info.device_count as usize).enumerate() {
        let Some(page) = header.disk(number) else {
            return exit::BAD_BOOT_INFO;
        };
        match bring_up(platform, &info, number, page, kicks, &mut pool) {
            Ok(None) => {}
            Ok(Some(worker)) => {
                let sources = [InterruptSource::new(entry.gsi), InterruptSource::new(entry.messages)];
                devices.push(Device { gsi: entry.gsi, sources, worker, page, number, running: true });
            }
            Err(failure) => {
                page.fail(&failure);
                tell(&console, number, &failure);
            }
        }
    }
    let mut machine = Machine {
        platform,
        console,
        polling: info.completion == completion::POLL,
        inject: info.inject,
        totals: Totals::default(),
        started: false,
        measuring: false,
        taken_before: None,
        ready: false,
        idle: 0,
    };
    machine.start(&mut devices);
    milestone(platform, event::DRIVERS_UP);
    machine.work(&mut devices, &mut header);
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
) -> Result<Option<Box<dyn Worker<P> + 'p>>, Failure> {
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

/// What the loop needs.
struct Machine<'p, P> {
    platform: &'p P,
    console: Console<'p, P>,
    polling: bool,
    inject: u32,
    totals: Totals,
    /// Whether the first request is out.
    started: bool,
    /// Whether a device is in its measured phase.
    measuring: bool,
    /// Interrupts taken before the first measured phase, once it has begun.
    taken_before: Option<u64>,
    /// Whether all that serve the others can do so.
    ready: bool,
    /// Rounds without work since the last one with some.
    idle: u64,
}

impl<'p, P: Platform> Machine<'p, P> {
    /// Enables the interrupt lines, unless the program polls.
    fn start(&self, devices: &mut [Device<'p, P>]) {
        for device in devices {
            device.worker.driver().disable_interrupts();
            if !self.polling {
                self.platform.enable_line(device.gsi);
            }
        }
    }

    /// Works until every device is done or has failed.
    fn work(&mut self, devices: &mut [Device<'p, P>], header: &mut Header) {
        loop {
            let mut busy = false;
            for device in devices.iter_mut().filter(|device| device.running) {
                match self.step(device) {
                    Ok(progress) => busy |= progress,
                    Err(failure) => {
                        device.running = false;
                        device.page.fail(&failure);
                        tell(&self.console, device.number, &failure);
                    }
                }
            }
            self.mark(devices);
            self.totals.interrupts = self.platform.interrupts();
            header.show(self.totals);
            if devices.iter().all(|device| !device.running || device.worker.serves()) {
                devices.iter().filter(|device| device.running).for_each(|device| device.worker.finish());
                return;
            }
            if !self.ready && devices.iter().all(|device| !device.running || device.worker.is_ready()) {
                self.ready = true;
                continue;
            }
            self.idle = if busy { 0 } else { self.idle + 1 };
            if busy {
                continue;
            }
            if self.polling {
                core::hint::spin_loop();
            } else {
                self.sleep(devices);
            }
        }
    }

    /// Reports the begin and the end of the measured phase.
    fn mark(&mut self, devices: &[Device<'p, P>]) {
        let measuring = devices.iter().any(|device| device.running && device.worker.is_measuring());
        if measuring != self.measuring {
            self.measuring = measuring;
            let taken = self.platform.interrupts();
            let before = *self.taken_before.get_or_insert(taken);
            self.totals.measured_interrupts = taken - before;
            milestone(self.platform, if measuring { event::MEASURE } else { event::MEASURED });
        }
    }

    /// One device's step; says whether anything happened.
    fn step(&mut self, device: &mut Device<'p, P>) -> Result<bool, Failure> {
        if self.polling {
            if self.idle % IDLE_ROUNDS == IDLE_ROUNDS - 1 {
                device.worker.driver().interrupt()?;
            }
        } else {
            // Acknowledged before the used ring is looked at, so that what comes later raises a new
            // interrupt.
            for source in &mut device.sources {
                let taken = self.platform.interrupts_on(source.number);
                if taken != source.handled {
                    source.handled = taken;
                    device.worker.driver().interrupt()?;
                }
            }
        }
        let Step { completed, sent, kicks, entropy_bytes } = device.worker.step(self.platform, self.ready)?;
        device.running = !device.worker.finished();
        self.totals.entropy_bytes += entropy_bytes;
        self.totals.heartbeat += completed;
        self.totals.kicks += kicks;
        if sent > 0 && !self.started {
            self.started = true;
            milestone(self.platform, event::FIRST_IO);
            self.inject();
        }
        Ok(completed + sent > 0)
    }

    /// Sleeps until something may have happened.
    fn sleep(&self, devices: &mut [Device<'p, P>]) {
        let seen = self.platform.interrupts();
        let mut more = false;
        for device in devices.iter_mut().filter(|device| device.running) {
            more |= device.worker.driver().enable_interrupts();
            // An interrupt between the last step and the sampling is in the sample, and not looked
            // after yet.
            more |= device
                .sources
                .iter()
                .any(|source| self.platform.interrupts_on(source.number) != source.handled);
        }
        if !more {
            self.platform.wait(seen);
        }
        for device in devices.iter_mut().filter(|device| device.running) {
            device.worker.driver().disable_interrupts();
        }
    }

    /// Injects the failure that a test configured.
    fn inject(&self) {
        match self.inject {
            inject::CRASH => self.platform.crash(),
            inject::HANG => loop {
                self.platform.wait(self.platform.interrupts());
            },
            inject::PANIC => panic!("a panic, as asked for"),
            _ => {}
        }
    }
}

fn milestone<P: Platform>(platform: &P, code: u32) {
    platform.mmio_write32(CONTROL_BASE + control::EVENT, code);
}

fn tell<P: Platform>(console: &Console<'_, P>, number: usize, failure: &Failure) {
    let Failure { reason, detail, sector, .. } = failure;
    console.say(format_args!("device {number}: {reason} (sector {sector}, detail {detail:#x})"));
}
