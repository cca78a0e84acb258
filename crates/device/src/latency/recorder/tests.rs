//! The recorder with a clock that stands still until it is moved.
use super::*;
use crate::blk::operation::{OTHER, READ, WRITE};
use crate::latency::rig::Watch;
use crate::latency::{LatencySnapshot, RequestObserver};
use crate::net::operation::FRAME_OUT;

struct Fixture {
    recorder: LatencyRecorder,
    watch: Watch,
}

impl Fixture {
    fn new() -> Self {
        let (watch, recorder) = Watch::new();
        Self { recorder, watch }
    }
}

impl LatencyRecorder {
    /// Completes requests that were done at the last [`LatencyRecorder::reap`].
    fn complete(&mut self, operation: &'static Operation, taken: Taken, count: u64) {
        if let Some(on) = &mut self.on {
            on.complete(operation, Times { taken, done: on.reaped }, count);
        }
    }
}

impl std::ops::Deref for Fixture {
    type Target = Watch;

    fn deref(&self) -> &Watch {
        &self.watch
    }
}

#[test]
fn each_stage_has_its_time_and_the_whole_is_their_sum() {
    let mut f = Fixture::new();
    f.recorder.announce();
    f.wait(100);
    f.recorder.announce();
    let taken = f.recorder.take();
    f.recorder.batch(3, 5);
    f.wait(1000);
    f.recorder.reap();
    f.recorder.complete(READ, taken, 1);
    f.recorder.complete(READ, taken, 1);
    f.recorder.complete(WRITE, taken, 1);
    f.wait(10_000);
    assert!(f.operations().is_empty(), "not signalled yet");
    f.recorder.finish();
    f.recorder.finish();
    f.recorder.idle();
    assert_eq!(f.operations(), [(READ, 2 * 11_100, 2), (WRITE, 11_100, 1)]);
    let stages = [(Stage::Ring, 300, 3), (Stage::Host, 3000, 3), (Stage::Interrupt, 30_000, 3)];
    assert_eq!(f.stages(), stages);
    let LatencySnapshot { depth, batch, .. } = f.latency.snapshot();
    assert_eq!(depth.unwrap().buckets, [(5, 1)]);
    assert_eq!(batch.unwrap().buckets, [(3, 1)]);
}

#[test]
fn a_chain_that_a_busy_thread_finds_has_waited_since_its_last_look() {
    let mut f = Fixture::new();
    f.recorder.announce();
    let first = f.recorder.take();
    f.wait(50);
    let second = f.recorder.take();
    assert_eq!((first.at - first.announced, second.at - second.announced), (0, 50));
    // Nothing there: what comes next has not been seen before.
    f.recorder.empty();
    f.wait(50);
    let third = f.recorder.take();
    assert_eq!(third.at, third.announced);
    f.recorder.idle();
    f.wait(50);
    f.recorder.announce_since(Duration::from_nanos(20));
    f.wait(5);
    let fourth = f.recorder.take();
    assert_eq!(fourth.at - fourth.announced, 25);
}

#[test]
fn the_time_that_a_limit_holds_is_throttled_and_nothing_else() {
    let mut f = Fixture::new();
    f.recorder.announce();
    f.wait(10);
    f.recorder.hold();
    f.wait(500);
    f.recorder.hold();
    f.recorder.idle();
    f.wait(500);
    f.recorder.announce();
    let taken = f.recorder.take();
    f.wait(7);
    f.recorder.reap();
    f.recorder.complete(WRITE, taken, 1);
    f.recorder.finish();
    let stages =
        [(Stage::Ring, 10, 1), (Stage::Throttled, 1000, 1), (Stage::Host, 7, 1), (Stage::Interrupt, 0, 1)];
    assert_eq!(f.stages(), stages);
    assert_eq!(f.operations(), [(WRITE, 1017, 1)]);
    // A hold that ends without anything in the ring has held nothing.
    f.recorder.hold();
    f.wait(500);
    f.recorder.empty();
    f.wait(500);
    assert_eq!(f.recorder.take().throttled, 0);
}

#[test]
fn a_taken_frame_that_a_limit_holds_goes_on_later() {
    let mut f = Fixture::new();
    f.recorder.announce();
    let mut taken = f.recorder.take();
    f.wait(3);
    for _ in 0..2 {
        f.recorder.hold();
        f.recorder.idle();
        f.wait(100);
        f.recorder.resume(&mut taken);
    }
    f.recorder.resume(&mut taken);
    f.wait(4);
    f.recorder.reap();
    f.recorder.complete(&FRAME_OUT, taken, 8);
    f.recorder.finish();
    let stages = [
        (Stage::Ring, 8 * 3, 8),
        (Stage::Throttled, 8 * 200, 8),
        (Stage::Host, 8 * 4, 8),
        (Stage::Interrupt, 0, 8),
    ];
    assert_eq!(f.stages(), stages);
}

#[test]
fn a_frame_that_waits_for_a_buffer_waits_from_its_arrival() {
    let mut f = Fixture::new();
    f.recorder.announce();
    f.wait(1);
    f.recorder.starve();
    f.recorder.idle();
    f.wait(100);
    f.recorder.announce();
    f.wait(1);
    let taken = f.recorder.take();
    assert_eq!((taken.at - taken.announced, taken.throttled), (102, 0));
}

#[test]
fn steps_that_follow_each_other_share_a_reading_of_the_clock() {
    let mut f = Fixture::new();
    for (signalled, interrupt) in [(false, 0), (true, 5)] {
        f.recorder.announce();
        f.recorder.begin_turn();
        f.wait(1);
        let taken = f.recorder.take();
        f.wait(20);
        f.recorder.complete_now(&FRAME_OUT, taken, 2);
        f.wait(5);
        if signalled {
            f.recorder.signalled();
        }
        let before = f.stages();
        f.recorder.finish();
        let sum = |stages: &[(Stage, u64, u64)], wanted| {
            stages.iter().find(|(stage, ..)| *stage == wanted).map_or(0, |(_, sum, _)| *sum)
        };
        let added = |stage| sum(&f.stages(), stage) - sum(&before, stage);
        assert_eq!([Stage::Ring, Stage::Host, Stage::Interrupt].map(added), [2, 40, 2 * interrupt]);
        // The next look in the same turn is at the time of `finish`, one in another turn is not.
        let end = taken.at + 20 + interrupt;
        f.wait(7);
        assert_eq!(f.recorder.take().at, end);
        assert_ne!(f.recorder.take().at, end, "it serves once");
        f.recorder.complete_now(&FRAME_OUT, taken, 1);
        f.recorder.finish();
        f.wait(7);
        f.recorder.begin_turn();
        assert_eq!(f.recorder.take().at, end + if signalled { 14 } else { 19 });
        f.recorder.empty();
    }
}

#[test]
fn ticks_become_nanoseconds_and_back() {
    for nanos in [1_u64 << 29, 1 << 30, 1_431_655_765, 1 << 32, 3 << 32] {
        let scale =
            Scale { nanos, ticks: u64::try_from((1_u128 << 64) / u128::from(nanos)).unwrap_or(u64::MAX) };
        assert_eq!(scale.nanos(7, (1 << 32) + 7), nanos);
        assert_eq!(scale.nanos(8, 7), 0);
        for time in [0, 999, 1_000_000_000, 3_600_000_000_000] {
            let back = scale.nanos(0, scale.ticks(Duration::from_nanos(time)));
            assert!(back <= time && time - back <= 2 + (time >> 28) + (nanos >> 32), "{time}: {back}");
        }
    }
}

#[test]
fn a_request_that_is_answered_at_once_has_no_host_time() {
    let mut f = Fixture::new();
    let taken = f.recorder.take();
    f.wait(9);
    f.recorder.answer_request(OTHER, taken, || REQUEST);
    f.recorder.finish();
    assert_eq!(f.stages(), [(Stage::Ring, 0, 1), (Stage::Host, 0, 1), (Stage::Interrupt, 9, 1)]);
}

const REQUEST: Request = Request { head: 3, sector: Some(8), bytes: 4096, status: 0 };

#[derive(Default)]
struct Log(std::sync::Mutex<Vec<RequestRecord>>);

impl RequestObserver for Log {
    fn ended(&self, record: &RequestRecord) {
        self.0.lock().unwrap().push(*record);
    }
}

#[test]
fn an_observer_sees_each_request_while_it_looks() {
    let mut f = Fixture::new();
    let log = Arc::new(Log::default());
    for look in [false, true, false] {
        f.latency.observe(look.then(|| log.clone() as _));
        f.recorder.announce();
        f.wait(1);
        let taken = f.recorder.take();
        f.wait(20);
        f.recorder.reap();
        for _ in 0..2 {
            let request = || {
                assert!(look, "it is not asked for");
                REQUEST
            };
            f.recorder.complete_request(WRITE, taken, request);
        }
        f.wait(300);
        f.recorder.finish();
        f.recorder.idle();
    }
    let record = RequestRecord { operation: WRITE, request: REQUEST, stages: [1, 0, 20, 300] };
    assert_eq!(*log.0.lock().unwrap(), [record; 2]);
    assert_eq!(f.operations(), [(WRITE, 6 * 321, 6)]);
}

#[test]
fn a_clock_that_goes_back_gives_no_time_and_no_panic() {
    let mut f = Fixture::new();
    f.recorder.announce();
    f.recorder.hold();
    f.clock.decrement(500_u64);
    let mut taken = f.recorder.take();
    f.recorder.hold();
    f.clock.decrement(500_u64);
    f.recorder.resume(&mut taken);
    f.recorder.reap();
    f.recorder.complete(READ, taken, 1);
    f.clock.decrement(500_u64);
    f.recorder.finish();
    assert_eq!(f.operations(), [(READ, 0, 1)]);
}

#[test]
fn a_recorder_that_is_off_records_nothing() {
    let mut recorder = LatencyRecorder::default();
    recorder.announce();
    let taken = recorder.take();
    recorder.reap();
    recorder.complete(READ, taken, 1);
    recorder.finish();
    assert!(!recorder.is_on());
    assert_eq!(taken, Taken::default());
}

#[test]
fn a_request_that_was_taken_before_is_not_recorded() {
    let mut f = Fixture::new();
    f.recorder.reap();
    f.recorder.complete(READ, Taken::default(), 2);
    f.recorder.finish();
    assert_eq!(f.count(), 0);
    f.recorder.announce();
    let taken = f.recorder.take();
    f.recorder.reap();
    f.recorder.complete(READ, Taken::default(), 1);
    f.recorder.complete(READ, taken, 1);
    f.recorder.finish();
    assert_eq!(f.count(), 1);
}
