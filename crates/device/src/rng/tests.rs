use super::*;
use crate::rig::{BASE, DATA, Rig, SIZE, readable, registered, segment};

fn refused(rig: &mut Rig<Rng>) -> QueueError {
    match rig.run() {
        Err(ServeError::Queue(error)) => {
            assert_eq!(rig.live.queue().error(), Some(error));
            error
        }
        other => panic!("the queue did not latch: {other:?}"),
    }
}

#[test]
fn the_device_describes_itself() {
    let mut rng = Rng::new();
    assert_eq!(rng.device_id(), 4);
    assert_eq!(rng.queue_sizes(), [1024]);
    assert_eq!(rng.features() & feature::VERSION_1, feature::VERSION_1);
    let mut config = [7; 8];
    rng.read_config(0, &mut config);
    assert_eq!(config, [0; 8]);
    assert!(rng.start_queue(1, 0).is_err());
    assert!(!readable(registered(&mut *rng.start_queue(0, 0).unwrap())));
}

#[test]
fn buffers_are_filled_to_their_ends_and_not_beyond() {
    let mut rig = Rig::new(Rng::new());
    for len in [1, 7, 64, 4096, 4097, 65536] {
        rig.poke(DATA, &vec![0; len + 8]);
        rig.add(&[], &[segment(DATA, len)]);
        let used = rig.run().unwrap();
        assert_eq!((used.len(), used[0].len as usize), (1, len));
        assert_eq!(rig.peek(DATA + len as u64, 8), [0; 8]);
        if len >= 64 {
            // Each sixty-fourth has something in it; all zeroes would be a chance of 2^-8 at worst,
            // so only longer ones are looked at.
            let bytes = rig.peek(DATA, len);
            assert!(bytes.chunks_exact(32).all(|chunk| chunk.iter().any(|byte| *byte != 0)));
        }
    }
}

#[test]
fn two_requests_get_different_bytes() {
    let mut rig = Rig::new(Rng::new());
    rig.add(&[], &[segment(DATA, 10), segment(DATA + 100, 22)]);
    rig.add(&[], &[segment(DATA + 200, 32)]);
    let used = rig.run().unwrap();
    assert_eq!(used.iter().map(|used| used.len).collect::<Vec<_>>(), [32, 32]);
    let first = [rig.peek(DATA, 10), rig.peek(DATA + 100, 22)].concat();
    assert_ne!(first, rig.peek(DATA + 200, 32));
    assert_ne!(first, [0; 32]);
    assert_eq!(rig.peek(DATA + 10, 90), [0; 90]);
}

#[test]
fn a_request_without_bound_gets_a_bounded_answer() {
    let mut rig = Rig::new(Rng::new());
    let len = (BASE + SIZE - DATA) as usize;
    rig.add(&[], &[segment(DATA, len)]);
    assert_eq!(rig.run().unwrap()[0].len, MAX_REQUEST);
    assert!(
        rig.peek(DATA + u64::from(MAX_REQUEST), len - MAX_REQUEST as usize).iter().all(|byte| *byte == 0)
    );
}

#[test]
fn a_readable_buffer_latches_and_is_not_read() {
    let mut rig = Rig::new(Rng::new());
    rig.poke(DATA, &[1; 64]);
    rig.add(&[segment(DATA, 32)], &[segment(DATA + 32, 32)]);
    assert!(matches!(refused(&mut rig), QueueError::Request { .. }));
    assert_eq!(rig.peek(DATA, 64), [1; 64]);
}

#[test]
fn only_readable_latches() {
    let mut rig = Rig::new(Rng::new());
    rig.add(&[segment(DATA, 32)], &[]);
    assert!(matches!(refused(&mut rig), QueueError::Request { .. }));
}

#[test]
fn a_buffer_outside_memory_latches() {
    for addr in [0, BASE + SIZE, u64::MAX - 32] {
        let mut rig = Rig::new(Rng::new());
        rig.add(&[], &[segment(addr, 32)]);
        assert!(matches!(refused(&mut rig), QueueError::Address { .. }));
    }
    // What lies beyond the bound is not looked at.
    let mut rig = Rig::new(Rng::new());
    rig.add(&[], &[segment(DATA, MAX_REQUEST as usize), segment(0, 32)]);
    assert_eq!(rig.run().unwrap()[0].len, MAX_REQUEST);
}

#[test]
fn requests_are_counted_once() {
    let mut rig = Rig::new(Rng::new());
    let watch = crate::latency::rig::Watch::of(&mut rig.live);
    for number in 0..3 {
        rig.add(&[], &[segment(DATA + number * 64, 64)]);
    }
    rig.live.latency().announce();
    watch.wait(10);
    assert_eq!(rig.run().unwrap().len(), 3);
    assert_eq!(watch.operations(), [(&ENTROPY, 30, 3)]);
}
