//! One writer at a time, and what becomes of a dead one.
use crate::cluster::{Cluster, wait_until};
use crate::disk::{read, write};
use paravane_store::rbd::{RbdOptions, RbdReason};
use paravane_store::{Link, Store};

#[test]
fn a_second_writer_is_refused() {
    let Some(cluster) = Cluster::find("a_second_writer_is_refused") else { return };
    let _up = cluster.in_use();
    let image = cluster.image("lock", "1M", &[]);
    let first = image.open();
    let owner = first.lock_owner().expect("it has the lock");
    let error = image.open_with(&RbdOptions::default()).expect_err("a second writer");
    assert!(matches!(&error.reason, RbdReason::InUse { owner: named } if *named == owner), "{error}");
    assert!(error.to_string().starts_with(&format!("rbd:pool/{}: in use: the client at ", image.name)));
    // Readers do not mind, and the first one goes on.
    let reader = image.open_with(&RbdOptions { read_only: true, ..RbdOptions::default() }).expect("a reader");
    assert_eq!(write(&first, 0, &[4; 512]), 512);
    assert!(read(&reader, 0, 512).iter().all(|&byte| byte == 4));
    drop(first);
    // Its end frees the lock at once.
    image.open();
}

#[test]
fn without_the_lock_two_clients_take_turns() {
    let Some(cluster) = Cluster::find("without_the_lock_two_clients_take_turns") else { return };
    let _up = cluster.in_use();
    let image = cluster.image("turns", "1M", &[]);
    let options = RbdOptions { lock: false, ..RbdOptions::default() };
    let (source, target) = (image.open_with(&options).expect("one"), image.open_with(&options).expect("two"));
    for turn in 1..4 {
        assert_eq!(write(&source, 0, &[turn; 512]), 512);
        assert_eq!(read(&target, 0, 512), [turn; 512]);
        assert_eq!(write(&target, 0, &[turn + 10; 512]), 512);
        assert_eq!(read(&source, 0, 512), [turn + 10; 512]);
    }
}

#[test]
fn a_client_whose_lock_is_broken_is_fenced_off() {
    let Some(cluster) = Cluster::find("a_client_whose_lock_is_broken_is_fenced_off") else { return };
    let _up = cluster.in_use();
    let image = cluster.image("fence", "1M", &[]);
    let old = image.open();
    assert_eq!(write(&old, 0, &[1; 512]), 512);
    // As if the process of the old one had died.
    let options = RbdOptions { dead_owner: old.lock_owner(), ..RbdOptions::default() };
    let new = image.open_with(&options).expect("the lock is broken at once");
    assert_ne!(new.lock_owner(), options.dead_owner);
    assert_eq!(write(&new, 0, &[2; 512]), 512);
    assert_eq!(write(&old, 0, &[3; 512]), -libc::ESHUTDOWN);
    assert_eq!(old.status().link, Link::Unusable);
    assert!(old.status().error.is_some());
    assert_eq!(read(&new, 0, 512), [2; 512]);
    // An owner that is not the dead one is left alone.
    let error = image.open_with(&options).expect_err("in use");
    assert!(matches!(error.reason, RbdReason::InUse { .. }), "{error}");
    drop(old);
}

#[test]
fn an_image_with_a_cache_is_refused() {
    let Some(cluster) = Cluster::find("an_image_with_a_cache_is_refused") else { return };
    let _up = cluster.in_use();
    let image = cluster.image("cache", "1M", &[]);
    cluster.rbd(&["config", "image", "set", &image.spec(), "rbd_cache", "true"]);
    let error = image.open_with(&RbdOptions::default()).expect_err("its cache is on").to_string();
    assert!(error.contains("rbd_cache is true for this image: writes"), "{error}");
    assert!(error.contains("rbd config image rm IMAGE rbd_cache"), "{error}");
    image.open_with(&RbdOptions { read_only: true, ..RbdOptions::default() }).expect("nothing is written");
    cluster.rbd(&["config", "image", "rm", &image.spec(), "rbd_cache"]);
    wait_until("it can be opened", || image.open_with(&RbdOptions::default()).is_ok());
}
