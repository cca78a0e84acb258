//! An OSD that is killed, or hangs.
use crate::cluster::{Cluster, wait_until};
use crate::disk::{Load, Memory, read, write};
use paravane_store::rbd::RbdOptions;
use paravane_store::{Job, Link, Store};
use std::collections::VecDeque;
use std::time::Duration;

#[test]
fn an_osd_is_killed_and_restarted_under_load() {
    let Some(cluster) = Cluster::find("an_osd_is_killed_and_restarted_under_load") else { return };
    let _alone = cluster.alone();
    let image = cluster.image("killed", "24M", &[]);
    let store = image.open();
    let mut load = Load::new(&store, 32, 100_000, 11);
    let kills = std::env::var("PARAVANE_KILLS").map_or(1, |kills| kills.parse().expect("a number"));
    for _ in 0..kills {
        let goal = load.done + 500;
        while load.done < goal {
            load.step();
        }
        // With requests in flight.
        let killed = cluster.kill_osd();
        std::thread::scope(|scope| {
            scope.spawn(|| drop(killed));
            let goal = load.done + 500;
            while load.done < goal {
                load.step();
            }
        });
    }
    load.end();
    load.compare_all(&store);
    assert_eq!((store.status().link, store.status().error), (Link::Up, None));
}

#[test]
fn requests_wait_for_an_osd_and_say_so() {
    let Some(cluster) = Cluster::find("requests_wait_for_an_osd_and_say_so") else { return };
    let _alone = cluster.alone();
    let image = cluster.image("waits", "64M", &[]);
    let store = image.open();
    assert_eq!(write(&store, 0, &[1; 4096]), 4096);
    let stopped = cluster.stop_osd();
    // More than librados has in flight (objecter_inflight_ops is 1024).
    let (queues, jobs) = (3, 700);
    let mut queues: Vec<_> = (0..queues).map(|_| store.queue(jobs).expect("a queue")).collect();
    let mut memories = Vec::new();
    for (number, queue) in queues.iter_mut().enumerate() {
        for head in 0..jobs {
            let byte = (usize::from(head) * 3 + number) as u8;
            let mut memory = Memory::whole(vec![byte; 512]);
            let offset = (u64::from(head) * 3 + number as u64) * 512;
            let job = Job::Write { pieces: memory.pieces(), offset, durable: false };
            // SAFETY: `memories` outlive the queues.
            unsafe { queue.push(head, job) }.expect("push");
            memories.push(memory);
        }
        queue.submit().expect("it does not wait");
    }
    wait_until("the link is reported", || store.status().link == Link::Stalled);
    let status = store.status();
    assert!(status.waiting > 1024 && status.connections == 0, "{status:?}");
    let error = format!("{} requests have had no reply for up to ", status.waiting);
    assert!(status.error.as_ref().is_some_and(|text| text.starts_with(&error)), "{status:?}");
    // What the guest writes into its buffers now is not what it has asked for.
    memories.iter().for_each(|memory| {
        let (first, len) = (memory.bytes().as_ptr().cast_mut(), memory.bytes().len());
        // SAFETY: nobody else uses the memory.
        unsafe { first.write_bytes(0xff, len) };
    });
    drop(stopped);
    for queue in &mut queues {
        let mut outcomes = VecDeque::new();
        while outcomes.len() < usize::from(jobs) {
            queue.wait().expect("wait");
            queue.reap(&mut outcomes);
        }
        assert!(outcomes.iter().all(|outcome| outcome.result() == 512));
    }
    assert_eq!((store.status().link, store.status().waiting), (Link::Up, 0));
    let all = read(&store, 0, memories.len() * 512);
    assert!(all.chunks(512).enumerate().all(|(at, sector)| sector.iter().all(|&byte| byte == at as u8)));
}

#[test]
fn a_store_is_closed_while_its_osd_hangs() {
    let Some(cluster) = Cluster::find("a_store_is_closed_while_its_osd_hangs") else { return };
    let _alone = cluster.alone();
    let image = cluster.image("closed", "1M", &[]);
    let store = image.open_with(&RbdOptions { timeout: Duration::from_secs(3), ..RbdOptions::default() });
    let store = store.expect("the image");
    assert_eq!(write(&store, 0, &[1; 4096]), 4096);
    let stopped = cluster.stop_osd();
    let mut queue = store.queue(4).expect("a queue");
    let mut memory = Memory::whole(vec![7; 4096]);
    let job = Job::Read { pieces: memory.pieces(), offset: 0 };
    // SAFETY: `memory` outlives the job.
    unsafe { queue.push(3, job) }.expect("push");
    queue.submit().expect("submit");
    let mut outcomes = VecDeque::new();
    queue.reap(&mut outcomes);
    assert!(outcomes.is_empty());
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| write(&store, 0, &[2; 512]));
        wait_until("a job waits", || store.status().waiting == 2);
        store.close();
        assert_eq!(waiter.join().expect("no panic"), -libc::EIO);
    });
    assert_eq!(store.status().link, Link::Down);
    queue.wait().expect("wait");
    queue.reap(&mut outcomes);
    let outcome = outcomes.pop_front().expect("the read");
    assert_eq!((outcome.head(), outcome.result()), (3, -libc::EIO));
    // SAFETY: no memory.
    unsafe { queue.push(4, Job::Flush) }.expect("push");
    queue.wait().expect("wait");
    queue.reap(&mut outcomes);
    assert_eq!(outcomes.pop_front().expect("the flush").result(), -libc::EIO);
    drop(queue);
    // It does not wait for the OSD.
    drop(store);
    drop(stopped);
    // librbd has given nothing to memory that is the guest's again.
    wait_until("the image is closed", || image.open_with(&RbdOptions::default()).is_ok());
    assert_eq!(memory.bytes(), [7; 4096]);
}
