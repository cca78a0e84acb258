//! Requests and their outcomes.
use crate::cluster::Cluster;
use crate::disk::{Load, Memory, perform, read, write};
use paravane_store::rbd::RbdOptions;
use paravane_store::{Job, Link, Rest, Store};
use std::collections::VecDeque;

/// Random requests on an image that is made with options, compared with a model.
fn random_load(name: &str, more: &[&str]) {
    let Some(cluster) = Cluster::find(name) else { return };
    let _up = cluster.in_use();
    let image = cluster.image(name, "24M", more);
    let store = image.open();
    let mut load = Load::new(&store, 32, 60_000, 7);
    while load.done < 1200 {
        load.step();
    }
    load.end();
    load.compare_all(&store);
    assert_eq!((store.status().link, store.status().error), (Link::Up, None));
    drop(store);
    let read_only = RbdOptions { read_only: true, ..RbdOptions::default() };
    load.compare_all(&image.open_with(&read_only).expect("the image"));
}

#[test]
fn random_requests_against_a_model() {
    random_load("random_requests_against_a_model", &[]);
}

#[test]
fn random_requests_on_a_striped_image() {
    let striped = ["--object-size", "1M", "--stripe-unit", "64K", "--stripe-count", "4"];
    random_load("random_requests_on_a_striped_image", &striped);
}

#[test]
fn random_requests_on_an_image_with_a_journal() {
    let journal = ["--image-feature", "layering,exclusive-lock,journaling"];
    random_load("random_requests_on_an_image_with_a_journal", &journal);
}

#[test]
fn random_requests_on_an_image_without_features() {
    random_load("random_requests_on_an_image_without_features", &["--image-feature", "layering"]);
}

#[test]
fn long_jobs_are_done_in_parts() {
    let Some(cluster) = Cluster::find("long_jobs_are_done_in_parts") else { return };
    let _up = cluster.in_use();
    let image = cluster.image("long", "5G", &[]);
    let store = image.open();
    // More bytes than a queue keeps in buffers, in one job and in many.
    let long: Vec<u8> = (0..40_000_003_u64).map(|at| ((at * 7) >> 3) as u8).collect();
    assert_eq!(write(&store, 511, &long), long.len() as i32);
    assert!(read(&store, 511, long.len()) == long);
    let mut queue = store.queue(64).expect("a queue");
    let mut memories: Vec<_> = (0..64).map(|_| Memory::whole(vec![0; 3 << 20])).collect();
    for (head, memory) in memories.iter_mut().enumerate() {
        let job = Job::Read { pieces: memory.pieces(), offset: 511 + head as u64 };
        // SAFETY: `memories` outlive the jobs.
        unsafe { queue.push(head as u16, job) }.expect("push");
    }
    let mut outcomes = VecDeque::new();
    while outcomes.len() < 64 {
        queue.wait().expect("wait");
        queue.reap(&mut outcomes);
    }
    assert!(outcomes.iter().all(|outcome| outcome.result() == 3 << 20));
    assert!(memories.iter().enumerate().all(|(at, memory)| memory.bytes() == &long[at..at + (3 << 20)]));
    // Ranges of more objects than one request has.
    let end = store.size();
    assert_eq!(write(&store, end - 4, b"last"), 4);
    assert_eq!(perform(&store, Job::Zeroes { offset: 1, len: end - 3, unmap: true }), 0);
    assert!(read(&store, 0, 8 << 20).iter().all(|&byte| byte == 0));
    assert_eq!(read(&store, end - 4, 4), b"\0\0st");
    assert_eq!(perform(&store, Job::Discard { offset: 0, len: end }), 0);
}

#[test]
fn the_end_of_an_image() {
    let Some(cluster) = Cluster::find("the_end_of_an_image") else { return };
    let _up = cluster.in_use();
    let image = cluster.image("end", "1M", &[]);
    let store = image.open();
    let end = store.size();
    assert_eq!(end, 1 << 20);
    let limits = store.limits();
    assert!(!limits.read_only && limits.discard && limits.zeroes);
    assert_eq!((limits.block, limits.physical_block, limits.discard_block), (1, 4096, 64 << 10));
    let mut memory = Memory::whole(vec![1; 1024]);
    let mut read_at = |offset| {
        // SAFETY: `memory` lives during the call.
        unsafe { store.perform(Job::Read { pieces: memory.pieces(), offset }) }
    };
    assert_eq!(
        [end - 1024, end - 10, end, end + 1, u64::MAX].map(&mut read_at),
        [1024, 10, 0, 0, -libc::EINVAL]
    );
    assert_eq!(write(&store, end - 1024, &[1; 1024]), 1024);
    assert_eq!(write(&store, end - 1023, &[1; 1024]), -libc::ENOSPC);
    assert_eq!(write(&store, u64::MAX, &[1; 1024]), -libc::EINVAL);
    assert_eq!(perform(&store, Job::Zeroes { offset: end - 1, len: 2, unmap: false }), -libc::ENOSPC);
    assert_eq!(perform(&store, Job::Discard { offset: 1, len: u64::MAX }), -libc::EINVAL);
    assert_eq!(write(&store, end, &[]), 0);
}

#[test]
fn a_queue_that_is_full_or_cancelled() {
    let Some(cluster) = Cluster::find("a_queue_that_is_full_or_cancelled") else { return };
    let _up = cluster.in_use();
    let image = cluster.image("full", "1M", &[]);
    let store = image.open();
    let mut queue = store.queue(2).expect("a queue");
    let kicks = true;
    assert_eq!([queue.rest(true), queue.rest(false)], [Rest::Poll { kicks }; 2]);
    // SAFETY: no memory.
    unsafe {
        queue.push(7, Job::Flush).expect("push");
        queue.push(9, Job::Flush).expect("push");
        queue.push(11, Job::Flush).expect_err("it is full");
    }
    assert_eq!(queue.rest(false), Rest::Serve);
    queue.cancel();
    let mut outcomes = VecDeque::new();
    queue.reap(&mut outcomes);
    let found: Vec<_> = outcomes.drain(..).map(|outcome| (outcome.head(), outcome.result())).collect();
    assert_eq!(found, [(7, -libc::ECANCELED), (9, -libc::ECANCELED)]);
    // A queue that ends with jobs in flight.
    // SAFETY: no memory.
    unsafe { queue.push(1, Job::Flush) }.expect("push");
    queue.submit().expect("submit");
    drop(queue);
    drop(store);
}

#[test]
fn a_discard_of_a_discard_block_frees_and_a_smaller_one_does_not() {
    let Some(cluster) = Cluster::find("a_discard_of_a_discard_block_frees_and_a_smaller_one_does_not") else {
        return;
    };
    let _up = cluster.in_use();
    let cases: [(&str, &[&str], u32); 4] = [
        ("plain", &[], 64 << 10),
        ("small-objects", &["--object-size", "16K"], 16 << 10),
        ("small-stripes", &["--object-size", "1M", "--stripe-unit", "4K", "--stripe-count", "4"], 256 << 10),
        ("large-stripes", &["--object-size", "1M", "--stripe-unit", "128K", "--stripe-count", "4"], 64 << 10),
    ];
    for (name, options, wanted) in cases {
        let image = cluster.image(&format!("discard-{name}"), "8M", options);
        let store = image.open();
        let block = store.limits().discard_block;
        assert_eq!(block, wanted, "{name}");
        let len = u64::from(block);
        assert_eq!(write(&store, 0, &vec![1; 2 << 20]), 2 << 20);
        // Half of it: librbd drops it. It would not drop the end of an object that is no larger.
        assert_eq!(perform(&store, Job::Discard { offset: 0, len: len / 2 }), 0);
        assert!(read(&store, 0, 2 * block as usize).iter().all(|&byte| byte == 1), "{name}: a half");
        assert_eq!(perform(&store, Job::Discard { offset: len, len }), 0);
        let found = read(&store, 0, 3 * block as usize);
        let (before, rest) = found.split_at(block as usize);
        let (freed, after) = rest.split_at(block as usize);
        assert!(freed.iter().all(|&byte| byte == 0), "{name}: a whole one");
        assert!(before.iter().chain(after).all(|&byte| byte == 1), "{name}: neighbours");
    }
}
