//! Snapshots, clones, and images that change their size.
use crate::cluster::{Cluster, TestImage, wait_until};
use crate::disk::{Load, perform, read, write};
use paravane_store::rbd::{Rbd, RbdOptions};
use paravane_store::{Job, Store};

#[test]
fn a_snapshot_stays_as_it_was() {
    let Some(cluster) = Cluster::find("a_snapshot_stays_as_it_was") else { return };
    let _up = cluster.in_use();
    let image = cluster.image("snapshot", "8M", &[]);
    let store = image.open();
    assert_eq!(write(&store, 4096, &[1; 9000]), 9000);
    cluster.rbd(&["snap", "create", "--no-progress", &format!("{}@before", image.spec())]);
    assert_eq!(write(&store, 5000, &[2; 9000]), 9000);
    cluster.rbd(&["resize", "--no-progress", &image.spec(), "--size", "16M"]);

    let mut location = image.location();
    location.snapshot = Some("before".into());
    let before = Rbd::open(&location, &RbdOptions::default()).expect("the snapshot");
    assert_eq!(before.size(), 8 << 20);
    let limits = before.limits();
    assert!(limits.read_only && !limits.discard && !limits.zeroes);
    assert!(read(&before, 4096, 9000).iter().all(|&byte| byte == 1));
    assert!(read(&store, 5000, 9000).iter().all(|&byte| byte == 2));
    assert_eq!(write(&before, 0, &[3; 512]), -libc::EROFS);
    assert_eq!(perform(&before, Job::Discard { offset: 0, len: 4096 }), -libc::EROFS);
    assert_eq!(perform(&before, Job::Flush), 0);
    assert_eq!(before.set_size(1 << 20).unwrap_err().raw_os_error(), Some(libc::EROFS));
}

#[test]
fn a_clone_reads_through_to_its_parent() {
    let Some(cluster) = Cluster::find("a_clone_reads_through_to_its_parent") else { return };
    let _up = cluster.in_use();
    let parent = cluster.image("parent", "8M", &[]);
    let store = parent.open();
    let mut load = Load::new(&store, 8, 100_000, 3);
    while load.done < 300 {
        load.step();
    }
    load.end();
    let snapshot = format!("{}@base", parent.spec());
    drop(store);
    cluster.rbd(&["snap", "create", "--no-progress", &snapshot]);
    cluster.rbd(&["snap", "protect", &snapshot]);
    let name = format!("{}-clone", parent.name);
    cluster.rbd(&["clone", &snapshot, &format!("pool/{name}")]);
    {
        let clone = TestImage { cluster: &cluster, name };
        let read_only = RbdOptions { read_only: true, ..RbdOptions::default() };
        load.compare_all(&clone.open_with(&read_only).expect("the clone"));
        let store = clone.open();
        load.compare_all(&store);
        let mut load = Load::new(&store, 8, 100_000, 4);
        while load.done < 300 {
            load.step();
        }
        load.end();
        load.compare_all(&store);
    }
    load.compare_all(&parent.open());
    assert!(load.into_model().iter().any(|&byte| byte != 0));
    cluster.rbd(&["snap", "unprotect", &snapshot]);
}

#[test]
fn an_image_that_grows_while_it_is_open() {
    let Some(cluster) = Cluster::find("an_image_that_grows_while_it_is_open") else { return };
    let _up = cluster.in_use();
    let image = cluster.image("grows", "8M", &[]);
    let store = image.open();
    let reader = image.open_with(&RbdOptions { read_only: true, ..RbdOptions::default() }).expect("a reader");
    assert_eq!((store.size(), reader.size()), (8 << 20, 8 << 20));
    cluster.rbd(&["resize", "--no-progress", &image.spec(), "--size", "12M"]);
    wait_until("the writer is told of the new size", || store.size() == 12 << 20);
    wait_until("the reader is told of the new size", || reader.size() == 12 << 20);
    assert_eq!(write(&store, 11 << 20, &[5; 4096]), 4096);
    assert!(read(&reader, 11 << 20, 4096).iter().all(|&byte| byte == 5));
    assert_eq!(store.refresh().expect("the size"), 12 << 20);

    store.set_size(16 << 20).expect("it grows");
    assert_eq!(store.size(), 16 << 20);
    assert!(read(&store, 12 << 20, 4 << 20).iter().all(|&byte| byte == 0));
    wait_until("the reader is told", || reader.size() == 16 << 20);
    store.set_size(4 << 20).expect("it shrinks");
    assert_eq!((store.size(), store.refresh().expect("the size")), (4 << 20, 4 << 20));
    assert_eq!(write(&store, 4 << 20, &[1; 512]), -libc::ENOSPC);
}

#[test]
fn an_image_in_a_namespace() {
    let Some(cluster) = Cluster::find("an_image_in_a_namespace") else { return };
    let _up = cluster.in_use();
    let namespace = format!("space-{}", std::process::id());
    let spec = format!("pool/{namespace}/disk");
    cluster.rbd(&["namespace", "create", &format!("pool/{namespace}")]);
    cluster.rbd(&["create", &spec, "--size", "1M"]);
    let text = format!("rbd:{spec}:conf={}", cluster.conf().display());
    let Ok(paravane_store::Location::Rbd(location)) = text.parse() else { panic!("{text}") };
    let store = Rbd::open(&location, &RbdOptions::default()).expect("the image");
    assert_eq!(store.status().location, format!("rbd:{spec}"));
    assert_eq!(write(&store, 0, b"here"), 4);
    drop(store);
    cluster.rbd(&["rm", "--no-progress", &spec]);
    cluster.rbd(&["namespace", "remove", &format!("pool/{namespace}")]);
}
