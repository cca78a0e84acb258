//! The queues of a device, from start to stop.
use super::*;
use crate::{IoPool, MoveError, QueueSet, Spread};

/// A set of two queues on two threads, and what feeds them.
fn set() -> (Arc<IoPool>, QueueSet, [Fed; 2], [Arc<HostNotifier>; 2]) {
    let pool = Arc::new(IoPool::fixed(2, Duration::ZERO, Spread::Queues).unwrap());
    let mut set = QueueSet::new(Arc::new(pool.device(|| ())), 2);
    let fed = [0; 2].map(|_| Fed::default());
    let notifiers = [0, 1].map(|queue: u16| {
        let key = set.threads().key(queue);
        let (host_queue, notifier) = queue_with(key, fed[usize::from(queue)].clone());
        assert!(set.start(host_queue).is_ok());
        notifier
    });
    (pool, set, fed, notifiers)
}

#[test]
fn a_queue_moves_only_while_it_runs_and_only_to_a_thread_that_runs() {
    let (pool, mut set, fed, notifiers) = set();
    assert!(matches!(set.move_to(0, 2), Err(MoveError::NoThread { thread: 2 })));
    assert!(matches!(set.move_to(7, 0), Err(MoveError::NotLive { queue: 7 })));
    // To where it is, away, and back.
    for thread in [1, 0, 1] {
        set.move_to(1, thread).unwrap();
        fed[1].serve(&notifiers[1]);
    }
    assert_eq!((set.place(1).thread, set.place(1).moves), (1, 3));
    // To a thread that has ended: the one before takes it back.
    pool.shared.threads[0].quit();
    assert!(matches!(set.move_to(1, 0), Err(MoveError::Refused { queue: 1, thread: 0, .. })));
    fed[1].serve(&notifiers[1]);
    // Queue 0 ended with its thread.
    assert!(matches!(set.move_to(0, 1), Err(MoveError::NotLive { queue: 0 })));
    set.stop(0..2, true);
    assert!(matches!(set.move_to(1, 0), Err(MoveError::NotLive { queue: 1 })));
    assert_eq!((set.place(1).thread, set.place(1).moves), (1, 3));
}

#[test]
fn a_queue_that_rests_is_served_again_when_it_is_resumed() {
    let (_pool, mut set, fed, notifiers) = set();
    for _ in 0..3 {
        fed[0].serve(&notifiers[0]);
        set.suspend(0).unwrap();
        assert!(set.is_live(0) && set.is_resting(0));
        assert!(matches!(set.move_to(0, 0), Err(MoveError::NotLive { .. })));
        // The kick waits; the other queue is served.
        let count = fed[0].served.load(Ordering::Relaxed) + fed[0].fed.fetch_add(1, Ordering::Relaxed) + 1;
        notifiers[0].kick();
        fed[1].serve(&notifiers[1]);
        assert!(set.resume(0).is_ok() && !set.is_resting(0));
        fed[0].wait(count);
    }
    set.suspend(0).unwrap();
    let retired = set.retire(0..2, false, |_| Arc::new(Counting::default()));
    assert!(
        retired.iter().all(|retired| retired.position.is_some() && retired.in_flight == 0),
        "{retired:?}"
    );
    assert_eq!(set.first_live(), None);
    assert!(set.suspend(0).is_ok() && set.resume(0).is_ok() && !set.is_live(0), "nothing to do");
}
