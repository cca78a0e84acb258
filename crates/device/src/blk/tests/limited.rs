//! A disk that may use no more than its limit.
use super::*;
use crate::rig::{becomes_readable, registered};
use crate::{Limiter, Rate, RateLimit, Rest};
use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::{Duration, Instant};

fn rate(per_second: u64, burst: u64) -> Option<Rate> {
    Some(Rate { per_second: NonZeroU64::new(per_second).unwrap(), burst })
}

fn limited(file: &NamedTempFile, way: impl Into<Way>, bytes: Option<Rate>, ops: Option<Rate>) -> Rig<Blk> {
    let limiter = Some(Limiter::new(RateLimit { bytes, ops }));
    Rig::new(Blk::open(BlkConfig { limiter, ..config(file, way) }).unwrap())
}

/// Reads `count` blocks of 4 KiB at once, served as by an I/O thread.
///
/// Returns the time taken, and how often the thread found nothing to do, with or without a sleep.
fn read_all(rig: &mut Rig<Blk>, count: u64) -> (Duration, u32) {
    for number in 0..count {
        rig.poke(HEADER + number * 16, &header(blk::T_IN, number % 8));
        let (room, status) = (segment(ROOM + number * 4096, 4096), segment(STATUS + number, 1));
        rig.add(&[segment(HEADER + number * 16, 16)], &[room, status]);
    }
    let (start, mut done, mut idle) = (Instant::now(), 0, 0);
    while done < count {
        let served = rig.serve().unwrap();
        while rig.driver.pop_used().unwrap().is_some() {
            done += 1;
        }
        if served.taken + served.completed > 0 {
            continue;
        }
        idle += 1;
        if done < count && rig.handler.rest(true) != Rest::Serve {
            assert!(becomes_readable(registered(&mut *rig.handler)), "nothing wakes the queue");
        }
    }
    (start.elapsed(), idle)
}

#[test]
fn a_limited_disk_takes_its_time_and_sleeps_meanwhile() {
    for way in ways("a_limited_disk_takes_its_time_and_sleeps_meanwhile") {
        for (bytes, ops) in [(None, rate(500, 10)), (rate(500 * 4096, 10 * 4096), None)] {
            let file = image(&pattern(64 * 512, 1));
            let mut rig = limited(&file, way, bytes, ops);
            let (time, idle) = read_all(&mut rig, 40);
            // The burst, and the one that comes after it, begin at once.
            assert!(time >= Duration::from_millis((40 - 11) * 1000 / 500 - 1), "{time:?}");
            // Two requests a doze, and some completions. A thread that does not sleep is idle far more often.
            assert!(idle <= 160, "{idle}");
            assert_eq!(rig.peek(ROOM + 39 * 4096, 4096), pattern(64 * 512, 1)[7 * 512..15 * 512]);
        }
    }
}

#[test]
fn a_queue_that_is_held_wants_no_kicks_and_goes_on_by_itself() {
    let file = image(&pattern(64 * 512, 1));
    let limiter = Limiter::new(RateLimit { bytes: None, ops: rate(1, 0) });
    let mut rig = Rig::new(
        Blk::open(BlkConfig { limiter: Some(limiter), ..config(&file, EngineChoice::Auto) }).unwrap(),
    );
    assert_eq!(rig.serve().unwrap().taken, 0);
    assert!(rig.handler.rest(false).kicks(), "there was nothing to take");
    let start = Instant::now();
    read_all(&mut rig, 1);
    // The next one comes too early, unless a busy host has taken the second.
    rig.poke(HEADER, &header(blk::T_IN, 1));
    rig.add(&[segment(HEADER, 16)], &[segment(ROOM, 512), segment(STATUS, 1)]);
    let taken = rig.serve().unwrap().taken;
    assert!(
        taken == 0 && !rig.handler.rest(false).kicks() || start.elapsed() >= Duration::from_secs(1),
        "{taken}"
    );
    assert_eq!(rig.run().unwrap().len(), 1);
    assert_eq!(rig.peek(ROOM, 512), pattern(64 * 512, 1)[512..1024]);
}

#[test]
fn a_limit_that_nobody_reaches_changes_nothing() {
    let file = image(&pattern(64 * 512, 1));
    let mut rig = limited(&file, EngineChoice::Auto, rate(1 << 40, 1 << 30), rate(1 << 30, 1 << 20));
    for sector in 0..64 {
        assert_eq!(rig.status(blk::T_OUT, sector, &pattern(512, sector)), blk::S_OK);
        assert_eq!(rig.read(sector, 512), pattern(512, sector));
    }
    assert_eq!(rig.status(blk::T_DISCARD, 0, &range(3, 4, 0)), blk::S_OK);
    assert_eq!(rig.status(blk::T_FLUSH, 0, &[]), blk::S_OK);
}

#[test]
fn disks_may_share_a_limit() {
    let (one, other) = (image(&[0; 64 * 512]), image(&[0; 64 * 512]));
    let limiter = Limiter::new(RateLimit { bytes: None, ops: rate(100, 0) });
    let open = |file: &NamedTempFile, limiter: &Arc<Limiter>| {
        let limiter = Some(limiter.clone());
        Rig::new(Blk::open(BlkConfig { limiter, ..config(file, EngineChoice::Auto) }).unwrap())
    };
    let (mut one, mut other) = (open(&one, &limiter), open(&other, &limiter));
    let start = Instant::now();
    for _ in 0..3 {
        read_all(&mut one, 1);
        read_all(&mut other, 1);
    }
    assert!(start.elapsed() >= Duration::from_millis(49));
}

#[test]
fn a_limit_is_put_on_changed_and_taken_off_a_live_queue() {
    for way in ways("a_limit_is_put_on_changed_and_taken_off_a_live_queue") {
        let file = image(&pattern(64 * 512, 1));
        let limiter = Limiter::new(RateLimit::default());
        let with = Some(limiter.clone());
        let mut rig = Rig::new(Blk::open(BlkConfig { limiter: with, ..config(&file, way) }).unwrap());
        read_all(&mut rig, 8);
        // Only a queue that is told asks the limiter.
        limiter.set(RateLimit { bytes: rate(1, 0), ops: None });
        read_all(&mut rig, 8);
        assert_eq!(limiter.times_held(), 0);
        rig.handler.renew().unwrap();
        read_all(&mut rig, 1);
        rig.poke(HEADER, &header(blk::T_IN, 1));
        rig.add(&[segment(HEADER, 16)], &[segment(ROOM, 512), segment(STATUS, 1)]);
        assert_eq!(rig.serve().unwrap().taken, 0);
        assert!(!rig.handler.rest(false).kicks() && limiter.times_held() == 1);
        // It owes an hour; another limit forgives that, and lets one request go.
        limiter.set(RateLimit { bytes: rate(2, 0), ops: None });
        rig.handler.renew().unwrap();
        assert_eq!(rig.run().unwrap().len(), 1);
        rig.add(&[segment(HEADER, 16)], &[segment(ROOM, 512), segment(STATUS, 1)]);
        assert_eq!(rig.serve().unwrap().taken, 0);
        limiter.set(RateLimit::default());
        rig.handler.renew().unwrap();
        assert_eq!(rig.run().unwrap().len(), 1);
        assert!(rig.handler.rest(false).kicks());
        read_all(&mut rig, 8);
        assert_eq!(limiter.times_held(), 2);
    }
}
