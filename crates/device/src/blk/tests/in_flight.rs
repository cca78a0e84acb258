//! Requests in flight: short transfers, errors, resets, memory that goes away.
use super::super::operation::{DISCARD, FLUSH, READ, WRITE, WRITE_ZEROES};
use super::*;
use crate::rig::{BASE, SIZE};
use crate::{Device, MappedQueue, Served, State};
use paravane_dma::{Access, Backing, Region, RegionConfig};
use paravane_store::Job;
use std::io;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard};

const DISK: usize = 256 * 1024;

/// A rig with a host that follows the test's orders.
struct HeldRig {
    rig: Rig<Blk>,
    orders: Arc<Mutex<Orders>>,
}

impl HeldRig {
    fn new(file: &NamedTempFile, orders: Orders, refused_features: u64) -> Self {
        let disk = Blk::open(config(file, EngineChoice::Threads)).unwrap();
        let features = disk.features() & !refused_features;
        let orders = Arc::new(Mutex::new(orders));
        let handler = held_handler(&disk, orders.clone(), features);
        Self { rig: Rig::with_handler(disk, features, Box::new(handler)), orders }
    }

    fn orders(&self) -> MutexGuard<'_, Orders> {
        self.orders.lock().unwrap()
    }

    /// The host takes `count` reads of 4 KiB and does none.
    fn begin_reads(&mut self, count: u64) {
        for number in 0..count {
            self.rig.poke(HEADER + number * 16, &header(blk::T_IN, number * 8));
            self.rig.poke(ROOM + number * 4096, &[UNTOUCHED; 4096]);
            self.rig.poke(STATUS + number, &[UNTOUCHED]);
            let room = segment(ROOM + number * 4096, 4096);
            self.rig.add(&[segment(HEADER + number * 16, 16)], &[room, segment(STATUS + number, 1)]);
        }
        let served = self.rig.serve().unwrap();
        assert_eq!(served, Served { taken: count as u32, completed: 0, interrupt: false });
        assert!(self.orders().log.is_empty());
    }
}

fn prompt() -> Orders {
    Orders { prompt: true, ..Orders::default() }
}

fn disk() -> NamedTempFile {
    image(&pattern(DISK, 30))
}

fn another_region(gpa: u64) -> Arc<Region> {
    Region::new(RegionConfig { gpa, size: 1 << 20, backing: Backing::Pages, writable: true }).unwrap()
}

#[test]
fn short_transfers_are_continued() {
    let file = disk();
    let mut held = HeldRig::new(&file, Orders { most: Some(700), ..prompt() }, 0);
    let data = pattern(16 * 512, 31);
    assert_eq!(held.rig.status(blk::T_OUT, 4, &data), blk::S_OK);
    assert_eq!(content(&file)[4 * 512..20 * 512], data);
    assert_eq!(held.rig.read(4, data.len()), data);
    assert!(held.orders().log.len() >= 2 * data.len() / 700);

    // In pieces smaller and larger than one step.
    held.rig.poke(HEADER, &header(blk::T_IN, 4));
    let pieces =
        [segment(ROOM, 100), segment(ROOM + 100, 2000), segment(ROOM + 2100, 1996), segment(STATUS, 1)];
    assert_eq!(held.rig.one(&[segment(HEADER, 16)], &pieces).unwrap().len, 4097);
    assert_eq!(held.rig.peek(ROOM, 4096), data[..4096]);
}

#[test]
fn interrupted_steps_are_repeated() {
    let file = disk();
    let results = [-libc::EINTR, -libc::EAGAIN, -libc::EINTR].into();
    let mut held = HeldRig::new(&file, Orders { results, ..prompt() }, 0);
    assert_eq!(held.rig.read(0, 4096), pattern(DISK, 30)[..4096]);
    assert_eq!(held.orders().log.len(), 4);
}

#[test]
fn a_host_that_is_always_busy_is_an_error_in_the_end() {
    let file = disk();
    let mut held = HeldRig::new(&file, Orders { results: [-libc::EAGAIN; 100].into(), ..prompt() }, 0);
    assert_eq!(held.rig.request(blk::T_IN, 0, &[], 512).status, blk::S_IOERR);
    assert!(held.orders().log.len() < 100);
}

#[test]
fn host_errors_become_statuses() {
    let file = disk();
    for error in [libc::EIO, libc::ENOSPC, libc::EFAULT, libc::ECANCELED, libc::EDQUOT] {
        let mut held = HeldRig::new(&file, Orders { results: [-error; 4].into(), ..prompt() }, 0);
        assert_eq!(held.rig.request(blk::T_IN, 0, &[], 512).status, blk::S_IOERR);
        assert_eq!(held.rig.status(blk::T_OUT, 0, &[1; 512]), blk::S_IOERR);
        assert_eq!(held.rig.status(blk::T_FLUSH, 0, &[]), blk::S_IOERR);
        assert_eq!(held.rig.status(blk::T_DISCARD, 0, &range(0, 1, 0)), blk::S_IOERR);
        // The queue has not latched, and the next request is served.
        assert_eq!(held.rig.read(0, 512), pattern(DISK, 30)[..512]);
    }
}

#[test]
fn storage_errors_are_counted_and_the_last_one_is_kept() {
    let file = disk();
    let results = [-libc::EIO, 1024, -libc::ENOSPC, -libc::EIO, -libc::EROFS, -libc::ENOSPC, 0].into();
    let mut held = HeldRig::new(&file, Orders { results, ..prompt() }, 0);
    let errors = held.rig.device.errors();
    let last = || {
        let last = errors.totals().last.unwrap();
        (last.operation, last.sector, last.bytes, last.error)
    };
    let os = |number| io::Error::from_raw_os_error(number).to_string();
    assert_eq!(held.rig.request(blk::T_IN, 3, &[], 512).status, blk::S_IOERR);
    assert_eq!(last(), (READ, Some(3), 512, os(libc::EIO)));
    // Two sectors are written, and the third one is not.
    assert_eq!(held.rig.status(blk::T_OUT, 8, &[1; 2048]), blk::S_IOERR);
    assert_eq!(last(), (WRITE, Some(10), 1024, os(libc::ENOSPC)));
    assert_eq!(held.rig.status(blk::T_FLUSH, 0, &[]), blk::S_IOERR);
    assert_eq!(last(), (FLUSH, None, 0, os(libc::EIO)));
    assert_eq!(held.rig.status(blk::T_DISCARD, 0, &range(16, 8, 0)), blk::S_IOERR);
    assert_eq!(last(), (DISCARD, Some(16), 4096, os(libc::EROFS)));
    assert_eq!(held.rig.status(blk::T_WRITE_ZEROES, 0, &range(24, 1, 0)), blk::S_IOERR);
    assert_eq!(last(), (WRITE_ZEROES, Some(24), 512, os(libc::ENOSPC)));
    assert_eq!(held.rig.request(blk::T_IN, 32, &[], 512).status, blk::S_IOERR);
    assert_eq!(last(), (READ, Some(32), 512, "the image ends before this sector".to_owned()));
    // A mistake of the driver is not a storage error.
    assert_eq!(held.rig.request(blk::T_IN, u64::MAX, &[], 512).status, blk::S_IOERR);
    assert_eq!(held.rig.status(99, 0, &[]), blk::S_UNSUPP);
    let totals = errors.totals();
    assert_eq!((totals.operations, totals.queues, totals.rejected), ([2, 1, 1, 1, 1], vec![6], 2));
}

#[test]
fn an_impossible_result_is_an_error() {
    let file = disk();
    for result in [0, 513, i32::MAX] {
        let mut held = HeldRig::new(&file, Orders { results: [result].into(), ..prompt() }, 0);
        let answer = held.rig.request(blk::T_IN, 0, &[], 512);
        assert_eq!((answer.status, answer.used), (blk::S_IOERR, 1));
    }
}

#[test]
fn zeroes_are_written_where_they_cannot_be_allocated() {
    for error in [libc::EOPNOTSUPP, libc::EINVAL] {
        for flags in [0, blk::WRITE_ZEROES_F_UNMAP] {
            let file = disk();
            let orders = Orders { most: Some(10_000), results: [-error].into(), ..prompt() };
            let mut held = HeldRig::new(&file, orders, 0);
            let ranges = [range(1, 300, flags), range(400, 2, flags)].concat();
            assert_eq!(held.rig.status(blk::T_WRITE_ZEROES, 0, &ranges), blk::S_OK);
            let mut expected = pattern(DISK, 30);
            expected[512..301 * 512].fill(0);
            expected[400 * 512..402 * 512].fill(0);
            assert!(content(&file) == expected);
        }
    }
}

#[test]
fn a_discard_that_the_host_cannot_do_is_done() {
    let file = disk();
    let mut held = HeldRig::new(&file, Orders { results: [-libc::EOPNOTSUPP; 2].into(), ..prompt() }, 0);
    let ranges = [range(0, 8, 0), range(16, 8, 0)].concat();
    assert_eq!(held.rig.status(blk::T_DISCARD, 0, &ranges), blk::S_OK);
    assert!(content(&file) == pattern(DISK, 30));
}

#[test]
fn without_flush_every_write_goes_through() {
    let file = disk();
    let mut held = HeldRig::new(&file, prompt(), blk::F_FLUSH);
    assert_eq!(held.rig.status(blk::T_OUT, 0, &[1; 512]), blk::S_OK);
    assert!(matches!(held.orders().log[..], [(Job::Write { durable: true, .. }, 512)]));
    held.orders().log.clear();
    assert_eq!(held.rig.status(blk::T_WRITE_ZEROES, 0, &range(8, 8, 1)), blk::S_OK);
    let log = std::mem::take(&mut held.orders().log);
    assert!(matches!(log.last(), Some((Job::Flush, 0))), "{log:?}");

    let mut held = HeldRig::new(&disk(), prompt(), 0);
    assert_eq!(held.rig.status(blk::T_OUT, 0, &[1; 512]), blk::S_OK);
    assert_eq!(held.rig.status(blk::T_WRITE_ZEROES, 0, &range(8, 8, 1)), blk::S_OK);
    let log = std::mem::take(&mut held.orders().log);
    assert!(matches!(log[..], [(Job::Write { durable: false, .. }, _), (Job::Zeroes { .. }, 0)]), "{log:?}");
}

#[test]
fn a_stop_completes_what_is_in_flight() {
    let file = disk();
    let mut held = HeldRig::new(&file, Orders { most: Some(1000), ..Orders::default() }, 0);
    held.begin_reads(8);
    held.rig.driver.enable_interrupts();
    let drained = held.rig.handler.drain(&mut held.rig.live, true);
    assert_eq!(drained, Served { taken: 0, completed: 8, interrupt: true });
    assert_eq!(held.rig.live.queue().in_flight(), 0);
    let used: Vec<_> = std::iter::from_fn(|| held.rig.driver.pop_used().unwrap()).collect();
    assert_eq!(used.len(), 8);
    assert!(used.iter().all(|used| used.len == 4097));
    assert_eq!(held.rig.peek(STATUS, 8), [blk::S_OK; 8]);
    assert!(held.rig.peek(ROOM, 8 * 4096) == pattern(DISK, 30)[..8 * 4096]);
    // The handler goes on afterwards.
    held.orders().prompt = true;
    assert_eq!(held.rig.read(0, 512), pattern(DISK, 30)[..512]);
}

/// Has the queue of a rig tracked, in the last 64 KiB of its memory.
pub(super) fn track(rig: &mut Rig<Blk>) {
    let Rig { live, memory, device, addresses, .. } = rig;
    let features = device.features();
    let mut handle = memory.handle();
    let bytes = paravane_ring::device::tracking_bytes(addresses.size, false);
    let tracking = handle.enter().map(BASE + SIZE - 65536, bytes, Access::WRITE).unwrap();
    let state = State::from_vring_base(0, features).unwrap();
    *live = MappedQueue::resume(*addresses, 256, features, handle, Some(state), Some(tracking)).unwrap();
}

/// Requests that the host has not begun are cancelled; others are answered.
#[test]
fn a_stop_that_is_cut_short_cancels_what_a_successor_is_told_of() {
    for begun in [0, 3, 8] {
        let mut held = HeldRig::new(&disk(), Orders { begun, ..Orders::default() }, 0);
        track(&mut held.rig);
        held.begin_reads(8);
        let cut = AtomicBool::new(true);
        held.rig.handler.drain_until(&mut held.rig.live, true, &cut);
        assert_eq!(held.orders().log.len(), begun, "nothing else reached the host");
        assert_eq!(usize::from(held.rig.live.queue().in_flight()), 8 - begun);
        let statuses: Vec<_> = (0..8).map(|at| if at < begun { blk::S_OK } else { UNTOUCHED }).collect();
        assert_eq!(held.rig.peek(STATUS, 8), statuses);
        // The successor finds them in the region, and does them.
        track(&mut held.rig);
        held.orders().prompt = true;
        assert_eq!(held.rig.serve().unwrap().completed, 8 - begun as u32);
        assert_eq!(held.orders().log.len(), 8);
        assert_eq!(held.rig.peek(STATUS, 8), [blk::S_OK; 8]);
        assert_eq!(held.rig.live.queue().in_flight(), 0);
    }
}

/// Without tracking nobody would do them: they are waited for.
#[test]
fn a_stop_that_is_cut_short_cancels_nothing_without_tracking() {
    let mut held = HeldRig::new(&disk(), Orders::default(), 0);
    held.begin_reads(8);
    let cut = AtomicBool::new(true);
    assert_eq!(held.rig.handler.drain_until(&mut held.rig.live, true, &cut).completed, 8);
    assert_eq!(held.rig.peek(STATUS, 8), [blk::S_OK; 8]);
}

/// The successor repeats an interrupted or short write.
///
/// It is not answered here.
#[test]
fn an_interrupted_step_stays_in_flight() {
    let results = [-libc::EINTR, -libc::ECANCELED, 512].into();
    let mut held = HeldRig::new(&disk(), Orders { begun: 8, results, ..Orders::default() }, 0);
    track(&mut held.rig);
    held.begin_reads(4);
    let cut = AtomicBool::new(true);
    assert_eq!(held.rig.handler.drain_until(&mut held.rig.live, true, &cut).completed, 1);
    assert_eq!(held.rig.live.queue().in_flight(), 3);
    assert_eq!(held.rig.peek(STATUS, 4), [UNTOUCHED, UNTOUCHED, UNTOUCHED, blk::S_OK]);
}

/// A request of many steps does not delay a queue that stops now.
///
/// With a successor, it is not answered.
#[test]
fn a_stop_that_is_cut_short_continues_nothing() {
    for tracked in [false, true] {
        let file = disk();
        let orders = Orders { most: Some(1000), begun: 8, ..Orders::default() };
        let mut held = HeldRig::new(&file, orders, 0);
        if tracked {
            track(&mut held.rig);
        }
        held.begin_reads(8);
        let cut = AtomicBool::new(true);
        let drained = held.rig.handler.drain_until(&mut held.rig.live, true, &cut);
        // Each step was waited for.
        assert_eq!(held.orders().log.iter().map(|(_, result)| *result).collect::<Vec<_>>(), [1000; 8]);
        let (completed, status) = if tracked { (0, UNTOUCHED) } else { (8, blk::S_IOERR) };
        assert_eq!(drained.completed, completed);
        assert_eq!(held.rig.live.queue().in_flight(), if tracked { 8 } else { 0 });
        assert_eq!(held.rig.peek(STATUS, 8), [status; 8]);
        let used = std::iter::from_fn(|| held.rig.driver.pop_used().unwrap()).count();
        assert_eq!(used, completed as usize);
        // A request of one step is done.
        let mut held = HeldRig::new(&disk(), Orders::default(), 0);
        held.begin_reads(8);
        assert_eq!(held.rig.handler.drain_until(&mut held.rig.live, true, &cut).completed, 8);
        assert_eq!(held.rig.peek(STATUS, 8), [blk::S_OK; 8]);
    }
}

#[test]
fn a_reset_mid_io_waits_for_the_host_and_tells_the_driver_nothing() {
    let file = disk();
    let mut held = HeldRig::new(&file, Orders { most: Some(1000), ..Orders::default() }, 0);
    held.begin_reads(8);
    let drained = held.rig.handler.drain(&mut held.rig.live, false);
    assert_eq!(drained, Served::default());
    // Each was waited for, and not continued although it was short.
    assert_eq!(held.orders().log.iter().map(|(_, result)| *result).collect::<Vec<_>>(), [1000; 8]);
    assert_eq!(held.rig.peek(STATUS, 8), [UNTOUCHED; 8]);
    assert!(held.rig.driver.pop_used().unwrap().is_none());
    // Nothing is left over for the time after.
    let before = held.rig.peek(ROOM, 8 * 4096);
    drop(held.rig.handler);
    assert_eq!(held.orders.lock().unwrap().log.len(), 8);
    let mut after = vec![0; 8 * 4096];
    held.rig.memory.handle().enter().read(ROOM, &mut after, paravane_dma::Access::FULL).unwrap();
    assert!(before == after);
}

#[test]
fn memory_outlives_the_requests_that_are_in_flight() {
    let file = disk();
    let mut held = HeldRig::new(&file, Orders::default(), 0);
    held.begin_reads(8);
    // The whole machine goes, except for the handler that the I/O thread still has.
    let HeldRig { rig: Rig { handler, live, driver, memory, region, device, .. }, orders } = held;
    drop(driver);
    drop(live);
    drop(memory);
    drop(region);
    drop(device);
    // It waits, and the host finds its memory (the kernel would answer EFAULT for unmapped memory).
    drop(handler);
    let results: Vec<_> = orders.lock().unwrap().log.iter().map(|(_, result)| *result).collect();
    assert_eq!(results, [4096; 8]);
}

#[test]
fn the_memory_map_may_grow_under_a_request() {
    let file = disk();
    let mut held = HeldRig::new(&file, Orders::default(), 0);
    held.begin_reads(2);
    held.rig.memory.replace(vec![held.rig.region.clone(), another_region(BASE + SIZE)]).unwrap();
    held.orders().prompt = true;
    // A request into the new memory; those into the old one complete with it.
    held.rig.poke(HEADER + 64, &header(blk::T_IN, 0));
    let across = segment(BASE + SIZE - 1024, 4096);
    held.rig.add(&[segment(HEADER + 64, 16)], &[across, segment(STATUS + 2, 1)]);
    assert_eq!(held.rig.run().unwrap().len(), 3);
    assert_eq!(held.rig.peek(STATUS, 3), [blk::S_OK; 3]);
    assert!(held.rig.peek(BASE + SIZE - 1024, 4096) == pattern(DISK, 30)[..4096]);
}

#[test]
fn memory_that_was_taken_away_under_a_request_latches() {
    let file = disk();
    let mut held = HeldRig::new(&file, Orders::default(), 0);
    held.begin_reads(3);
    held.rig.memory.replace(vec![another_region(BASE + SIZE)]).unwrap();
    held.orders().prompt = true;
    // The data went where it was mapped; the status has no place to go.
    let error = loop {
        match held.rig.serve() {
            Ok(served) => assert_eq!(served.completed, 0),
            Err(ServeError::Queue(error)) => break error,
            Err(other) => panic!("{other}"),
        }
    };
    assert!(matches!(error, QueueError::Address { .. }), "{error}");
    held.rig.handler.drain(&mut held.rig.live, false);
    assert_eq!(held.orders().log.len(), 3);
}

#[test]
fn a_queue_that_is_not_the_handlers_is_refused() {
    let file = disk();
    let mut held = HeldRig::new(&file, Orders::default(), 0);
    held.begin_reads(1);
    // The same memory as a new queue, while the old one's request is still in flight under the same
    // head.
    let addresses = held.rig.addresses;
    held.rig.live =
        MappedQueue::start(addresses, 256, held.rig.device.features(), held.rig.memory.handle()).unwrap();
    assert!(matches!(held.rig.serve(), Err(ServeError::Host(_))));
    held.rig.handler.drain(&mut held.rig.live, false);
}

#[test]
fn a_reset_mid_io_leaves_memory_alone() {
    for way in ways("a_reset_mid_io_leaves_memory_alone") {
        let file = image(&pattern(2 << 20, 40));
        for round in 0..40 {
            let mut rig = rig(&file, way);
            if round % 2 == 0 {
                // From the disk, if it lets go of its cache: the requests then really are in
                // flight.
                let advice = rustix::fs::Advice::DontNeed;
                file.as_file().sync_all().unwrap();
                rustix::fs::fadvise(file.as_file(), 0, None, advice).unwrap();
            }
            rig.poke(HEADER, &header(blk::T_IN, 0));
            rig.poke(HEADER + 16, &header(blk::T_OUT, 0));
            rig.poke(HEADER + 32, &header(blk::T_FLUSH, 0));
            for number in 0..16 {
                let room = segment(ROOM + number * 0x2_0000, 0x2_0000);
                rig.add(&[segment(HEADER, 16)], &[room, segment(STATUS + number, 1)]);
            }
            rig.add(&[segment(HEADER + 16, 16), segment(PAYLOAD, 65536)], &[segment(STATUS + 16, 1)]);
            rig.add(&[segment(HEADER + 32, 16)], &[segment(STATUS + 17, 1)]);
            rig.serve().unwrap();
            if round % 4 < 2 {
                rig.handler.drain(&mut rig.live, false);
            } else {
                // The owner just lets go.
                rig.handler = rig.device.start_queue(0, rig.device.features()).unwrap();
            }
            // The guest reuses the memory at once, and has it for itself.
            let canary = vec![0xc5; 16 * 0x2_0000];
            rig.poke(ROOM, &canary);
            rig.poke(STATUS, &[0xc5; 32]);
            std::thread::sleep(std::time::Duration::from_millis(2));
            assert!(rig.peek(ROOM, canary.len()) == canary);
            assert_eq!(rig.peek(STATUS, 32), [0xc5; 32]);
        }
    }
}

#[test]
fn requests_go_on_after_a_stop() {
    for way in ways("requests_go_on_after_a_stop") {
        let file = image(&pattern(2 << 20, 41));
        let mut rig = rig(&file, way);
        for round in 0..20u64 {
            rig.poke(HEADER, &header(blk::T_IN, round));
            rig.poke(HEADER + 16, &header(blk::T_FLUSH, 0));
            for number in 0..16 {
                let room = segment(ROOM + number * 4096, 4096);
                rig.add(&[segment(HEADER, 16)], &[room, segment(STATUS + number, 1)]);
                rig.add(&[segment(HEADER + 16, 16)], &[segment(STATUS + 16 + number, 1)]);
            }
            rig.poke(STATUS, &[UNTOUCHED; 32]);
            let served = rig.serve().unwrap();
            let drained = rig.handler.drain(&mut rig.live, true);
            assert_eq!((served.taken, served.completed + drained.completed), (32, 32));
            assert_eq!(std::iter::from_fn(|| rig.driver.pop_used().unwrap()).count(), 32);
            assert_eq!(rig.peek(STATUS, 32), [blk::S_OK; 32]);
        }
    }
}
