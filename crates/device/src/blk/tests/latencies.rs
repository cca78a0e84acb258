//! Records of a disk's requests, with a clock that only the test moves.
use super::*;
use crate::blk::operation::{DISCARD, FLUSH, OTHER, READ, WRITE, WRITE_ZEROES};
use crate::latency::rig::Watch;
use crate::latency::{Request, RequestObserver, RequestRecord, Stage};
use crate::{Device, Limiter, Rate, RateLimit};
use paravane_spec::feature::RING_PACKED;
use std::num::NonZeroU64;
use std::sync::Mutex;

const DISK: usize = 256 * 1024;

/// Makes a read of 4 KiB available.
fn add_read(rig: &mut Rig<Blk>, number: u64) {
    rig.poke(HEADER + number * 16, &header(blk::T_IN, number * 8));
    let (room, status) = (segment(ROOM + number * 4096, 4096), segment(STATUS + number, 1));
    rig.add(&[segment(HEADER + number * 16, 16)], &[room, status]);
}

#[test]
fn a_slow_host_shows_as_host_io_and_nothing_else_does() {
    for features in [0, RING_PACKED] {
        let file = image(&pattern(DISK, 1));
        let disk = Blk::open(config(&file, EngineChoice::Threads)).unwrap();
        let orders = Arc::new(Mutex::new(Orders::default()));
        let features = features | disk.features();
        let handler = held_handler(&disk, orders.clone(), features);
        let mut rig = Rig::with_handler(disk, features, Box::new(handler));
        let watch = Watch::of(&mut rig.live);
        (0..3).for_each(|number| add_read(&mut rig, number));
        rig.live.latency().announce();
        watch.wait(70);
        assert_eq!(rig.serve().unwrap().taken, 3);
        watch.wait(5_000_000);
        add_read(&mut rig, 3);
        assert_eq!(rig.serve().unwrap().taken, 1);
        assert_eq!(watch.count(), 0, "nothing is done");
        watch.wait(1_000_000);
        // The host does them all now.
        orders.lock().unwrap().prompt = true;
        assert_eq!(rig.run().unwrap().len(), 4);
        let host = 3 * 6_000_000 + 1_000_000;
        // The last one may have been in the ring since the look before.
        let ring = 3 * 70 + 5_000_000;
        assert_eq!(
            watch.stages(),
            [(Stage::Ring, ring, 4), (Stage::Host, host, 4), (Stage::Interrupt, 0, 4)]
        );
        assert_eq!(watch.operations(), [(READ, ring + host, 4)]);
        let snapshot = watch.latency.snapshot();
        assert_eq!(snapshot.batch.unwrap().buckets, [(1, 1), (3, 1)]);
        assert_eq!(snapshot.depth.unwrap().buckets, [(3, 1), (4, 1)]);
    }
}

#[test]
fn each_operation_is_counted_once_however_it_ends() {
    for way in ways("each_operation_is_counted_once_however_it_ends") {
        let file = image(&pattern(DISK, 1));
        let mut rig = rig(&file, way);
        let watch = Watch::of(&mut rig.live);
        for round in 1..=2 {
            rig.read(0, 4096);
            rig.read(8, 512);
            rig.status(blk::T_OUT, 8, &pattern(512, 2));
            rig.status(blk::T_FLUSH, 0, &[]);
            rig.status(blk::T_DISCARD, 0, &range(0, 8, 0));
            rig.status(blk::T_WRITE_ZEROES, 0, &range(8, 8, 0));
            assert_eq!(rig.request(blk::T_GET_ID, 0, &[], 20).status, blk::S_OK);
            assert_eq!(rig.status(blk::T_OUT, 1 << 40, &[0; 512]), blk::S_IOERR);
            assert_eq!(rig.status(99, 0, &[]), blk::S_UNSUPP);
            let counts = [(READ, 2), (WRITE, 1), (FLUSH, 1), (DISCARD, 1), (WRITE_ZEROES, 1), (OTHER, 3)];
            assert_eq!(watch.operations(), counts.map(|(operation, count)| (operation, 0, round * count)));
            assert!(watch.stages().iter().all(|(_, _, count)| *count == round * 9));
        }
    }
}

#[test]
fn a_rate_limit_shows_as_throttled() {
    let file = image(&pattern(DISK, 1));
    let ops = Some(Rate { per_second: NonZeroU64::new(200).unwrap(), burst: 0 });
    let limiter = Some(Limiter::new(RateLimit { bytes: None, ops }));
    let disk = Blk::open(BlkConfig { limiter, ..config(&file, EngineChoice::Immediate) }).unwrap();
    let mut rig = Rig::new(disk);
    let watch = Watch::of(&mut rig.live);
    (0..2).for_each(|number| add_read(&mut rig, number));
    assert_eq!(rig.serve().unwrap().taken, 1);
    watch.wait(3000);
    assert_eq!(rig.run().unwrap().len(), 2);
    let stages = watch.stages();
    // If this thread slept for long, the limit held nothing.
    if stages.iter().any(|(stage, ..)| *stage == Stage::Throttled) {
        assert!(stages.contains(&(Stage::Throttled, 3000, 1)) && stages.contains(&(Stage::Ring, 0, 2)));
    } else {
        assert!(stages.contains(&(Stage::Ring, 3000, 2)), "{stages:?}");
    }
    assert_eq!(watch.operations(), [(READ, 3000, 2)]);
    assert_eq!(watch.latency.snapshot().batch.unwrap().buckets, [(1, 2)]);
}

#[derive(Default)]
struct Log(Mutex<Vec<RequestRecord>>);

impl RequestObserver for Log {
    fn ended(&self, record: &RequestRecord) {
        self.0.lock().unwrap().push(*record);
    }
}

#[test]
fn an_observer_is_told_what_each_request_was() {
    let file = image(&pattern(DISK, 1));
    let mut rig = rig(&file, EngineChoice::Immediate);
    let watch = Watch::of(&mut rig.live);
    rig.read(8, 512);
    let log = Arc::new(Log::default());
    watch.latency.observe(Some(log.clone()));
    rig.read(8, 4096);
    rig.status(blk::T_OUT, 1 << 40, &[0; 512]);
    rig.status(blk::T_DISCARD, 0, &range(16, 8, 0));
    rig.status(blk::T_FLUSH, 0, &[]);
    watch.latency.observe(None);
    rig.read(8, 512);
    let told: Vec<_> = std::mem::take(&mut *log.0.lock().unwrap());
    let told: Vec<_> = told
        .iter()
        .map(|record| {
            let RequestRecord { operation, request: Request { sector, bytes, status, .. }, .. } = *record;
            (operation, sector, bytes, status)
        })
        .collect();
    let expected = [
        (READ, Some(8), 4096, blk::S_OK),
        (OTHER, None, 0, blk::S_IOERR),
        (DISCARD, Some(16), 4096, blk::S_OK),
        (FLUSH, None, 0, blk::S_OK),
    ];
    assert_eq!(told, expected);
    assert_eq!(watch.count(), 6);
}

#[test]
fn a_stop_records_what_it_completes_and_a_reset_forgets_it() {
    for complete in [true, false] {
        let file = image(&pattern(DISK, 1));
        let disk = Blk::open(config(&file, EngineChoice::Threads)).unwrap();
        let features = disk.features();
        let handler = held_handler(&disk, Arc::default(), features);
        let mut rig = Rig::with_handler(disk, features, Box::new(handler));
        let watch = Watch::of(&mut rig.live);
        (0..3).for_each(|number| add_read(&mut rig, number));
        assert_eq!(rig.serve().unwrap().taken, 3);
        let drained = rig.handler.drain(&mut rig.live, complete);
        rig.live.latency().finish();
        assert_eq!(u64::from(drained.completed), watch.count());
        assert_eq!(watch.count(), if complete { 3 } else { 0 });
    }
}
