//! Four threads: one maps and unmaps, one harvests the log, two do I/O.
//!
//! Each page of device addresses maps to another page of RAM each time. An unmapped page of RAM
//! belongs to the mapper, which fills it with a mark and checks, before it is mapped again, that
//! the mark is still there: no access may land in an unmapped page. The harvester keeps a copy of
//! RAM by the log alone: at the end it must equal RAM, except for the mapper's own marks.
#![cfg(not(loom))]
use paravane_dma::{
    Access, Backing, DirtyLog, DirtyPages, DmaError, DmaFault, Domain, Memory, Region, RegionConfig, Segment,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const PAGE: u64 = 4096;
/// Number of pages of RAM, twice the number of device pages.
const RAM: u64 = 64;
const WINDOW: u64 = RAM / 2;
/// Device address of the pages: around a border of two megabytes.
const IOVA: u64 = (2 << 20) - 16 * PAGE;
const TURNS: u32 = 5_000;
/// Shortest run, enough for each thread; longest run, on a busy machine.
const TIME: std::ops::Range<Duration> = Duration::from_millis(200)..Duration::from_secs(5);
const LONG: Duration = Duration::from_secs(120);
const BOTH: Access = Access::READ.union(Access::WRITE);
const MARK: u64 = 0xfeed_face_cafe_f00d;

/// Small random number generator.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % n
    }
}

fn io(mut random: Random, domain: &Domain, stop: &AtomicBool) -> (u64, u64) {
    let mut handle = domain.handle().named("I/O");
    let (mut hits, mut misses) = (0, 0);
    let mut pieces = Vec::new();
    // Relaxed: a turn more or less does not matter.
    while !stop.load(Ordering::Relaxed) {
        let guard = handle.enter();
        let mut mapping_guard = None;
        for _ in 0..=random.below(20) {
            let addr = IOVA + random.below(WINDOW) * PAGE + random.below(PAGE / 8) * 8;
            let value = random.below(1 << 30) + 1;
            let result = match random.below(8) {
                0 => guard.read_obj::<u64>(addr, Access::READ).map(|_| ()),
                1 => {
                    // Across pages, and perhaps only in part.
                    let len = 1 + random.below(3 * PAGE) as usize;
                    guard.fill(addr, value as u8, len, Access::WRITE)
                }
                2 if mapping_guard.is_none() => {
                    pieces.clear();
                    let segment = Segment { addr: addr & !7, len: 8 };
                    guard
                        .map_segments(&[segment], 0, 8, Access::WRITE, &mut pieces)
                        .map(|made| mapping_guard = Some(made))
                }
                _ => guard.write_obj(addr, &value, Access::WRITE),
            };
            match result {
                Ok(()) => hits += 1,
                Err(DmaError { fault: DmaFault::Untranslated, .. }) => misses += 1,
                Err(other) => panic!("{other}"),
            }
        }
        drop(guard);
        if mapping_guard.is_some() {
            // After the batch, as the kernel would.
            for piece in &pieces {
                let word = piece.ptr.cast::<std::sync::atomic::AtomicU64>();
                // SAFETY: eight aligned bytes that the mapping guard keeps mapped; all accesses are
                // atomic.
                unsafe { &*word }.store(random.below(1 << 30), Ordering::Relaxed);
            }
        }
    }
    (hits, misses)
}

fn harvest(memory: &Memory, log: &DirtyLog, stop: &AtomicBool) -> Vec<u8> {
    let mut handle = memory.handle().named("the copy");
    let mut copy = vec![0; (RAM * PAGE) as usize];
    let mut pages = DirtyPages::new(0, RAM * PAGE, PAGE).expect("pages");
    loop {
        // Acquire: pairs with the Release store after the last I/O, so that the last turn has all
        // of it.
        let last = stop.load(Ordering::Acquire);
        pages.clear();
        log.harvest(&mut pages);
        let guard = handle.enter();
        for addr in pages.iter() {
            let at = addr as usize;
            guard.read(addr, &mut copy[at..at + PAGE as usize], Access::RELAXED).expect("RAM");
        }
        if last {
            return copy;
        }
    }
}

#[test]
#[cfg_attr(miri, ignore = "threads that wait for each other: minutes in the interpreter")]
fn nothing_is_missed_and_nothing_lands_elsewhere() {
    let config = RegionConfig { gpa: 0, size: RAM * PAGE, backing: Backing::Pages, writable: true };
    let region = Region::new(config).expect("RAM");
    let memory = Memory::new(vec![Arc::clone(&region)]).expect("a map");
    // The mapper's own access to the memory has no log.
    let beside = Memory::new(vec![region]).expect("a map");
    let mut beside = beside.handle();
    let beside = beside.enter();
    let domain = Domain::new(&memory);
    let log = DirtyLog::new(memory.end(), PAGE).expect("a log");
    memory.start_log(Arc::clone(&log), LONG).expect("nobody is inside");
    let (stop_io, stop_harvest) = (AtomicBool::new(false), AtomicBool::new(false));
    let marked = |page: u64| {
        let words = [0, 8, 2048, PAGE - 8];
        words.iter().all(|at| beside.read_obj::<u64>(page * PAGE + at, Access::READ) == Ok(MARK))
    };
    let mark = |page: u64| {
        let words = [MARK; PAGE as usize / 8];
        beside.write_obj(page * PAGE, &words, Access::WRITE).expect("RAM");
    };

    let (copy, free) = std::thread::scope(|scope| {
        let (domain, stop_io) = (&domain, &stop_io);
        let users = [1, 2].map(|seed| scope.spawn(move || io(Random(seed), domain, stop_io)));
        let harvester = scope.spawn(|| harvest(&memory, &log, &stop_harvest));
        let mut random = Random(3);
        let mut free: Vec<u64> = (0..RAM).collect();
        free.iter().for_each(|&page| mark(page));
        let mut mapped: Vec<Option<u64>> = vec![None; WINDOW as usize];
        let start = Instant::now();
        for turn in 0.. {
            let spent = start.elapsed();
            if spent >= TIME.end || (turn >= TURNS && spent >= TIME.start) {
                break;
            }
            let at = random.below(WINDOW) as usize;
            let addr = IOVA + at as u64 * PAGE;
            match mapped[at].take() {
                Some(page) => {
                    assert_eq!(domain.unmap(addr, PAGE, LONG), Ok(PAGE));
                    mark(page);
                    free.push(page);
                }
                None => {
                    let page = free.swap_remove(random.below(free.len() as u64) as usize);
                    assert!(marked(page), "turn {turn}: an access landed in page {page}, which was unmapped");
                    domain.map(addr, page * PAGE, PAGE, BOTH).expect("free");
                    mapped[at] = Some(page);
                }
            }
        }
        stop_io.store(true, Ordering::Relaxed);
        let (hits, misses) = users
            .into_iter()
            .map(|user| user.join().expect("I/O"))
            .fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
        assert!(hits > 0 && misses > 0, "{hits} accesses hit, {misses} missed");
        // Release: pairs with the Acquire load in `harvest`.
        stop_harvest.store(true, Ordering::Release);
        (harvester.join().expect("the harvester"), free)
    });
    for page in 0..RAM {
        if free.contains(&page) {
            assert!(marked(page), "an access landed in page {page}, which was unmapped");
            continue;
        }
        let mut now = vec![0; PAGE as usize];
        beside.read(page * PAGE, &mut now, Access::READ).expect("RAM");
        let at = (page * PAGE) as usize;
        assert_log_had_it(page, &copy[at..at + PAGE as usize], &now);
    }
}

/// Where the copy differs from RAM, RAM must have the mapper's mark.
///
/// That mark is in no log.
fn assert_log_had_it(page: u64, copy: &[u8], now: &[u8]) {
    for (word, (copy, now)) in copy.chunks(8).zip(now.chunks(8)).enumerate() {
        let mark = MARK.to_ne_bytes();
        let marks_left = now.iter().zip(mark).all(|(byte, mark)| *byte == mark);
        assert!(copy == now || marks_left, "word {word} of page {page} was written and is in no harvest");
    }
}
