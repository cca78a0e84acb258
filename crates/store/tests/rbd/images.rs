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

/// Checks that what is called zeroes reads as zeroes, and returns how many bytes that are.
fn zeroes(store: &Rbd, from: u64) -> u64 {
    let (mut at, mut zeroes) = (from, 0);
    while at < store.size() {
        for extent in store.extents(at, store.size() - at).expect("extents") {
            assert!(extent.offset == at && extent.len > 0, "{extent:?} at {at}");
            at += extent.len;
            if extent.zeroes {
                zeroes += extent.len;
                for part in (extent.offset..at).step_by(1 << 20) {
                    let len = (at - part).min(1 << 20) as usize;
                    assert!(read(store, part, len).iter().all(|&byte| byte == 0), "{extent:?}");
                }
            }
        }
    }
    assert_eq!(at, store.size());
    zeroes
}

#[test]
fn parts_that_were_never_written_are_zeroes() {
    const MIB: u64 = 1 << 20;
    let Some(cluster) = Cluster::find("parts_that_were_never_written_are_zeroes") else { return };
    let _up = cluster.in_use();
    let striped = "--stripe-unit 64K --stripe-count 5 --object-size 1M";
    for (number, (options, least)) in [
        // Whole objects.
        ("--object-size 1M", 40 * MIB),
        // Parts of objects.
        ("--object-size 1M --image-feature layering,exclusive-lock", 59 * MIB),
        (striped, 20 * MIB),
        (&format!("{striped} --image-feature layering,exclusive-lock,striping"), 59 * MIB),
    ]
    .into_iter()
    .enumerate()
    {
        let options: Vec<_> = options.split(' ').collect();
        let image = cluster.image(&format!("holes-{number}"), "63M", &options);
        let store = image.open();
        assert_eq!(zeroes(&store, 0), 63 * MIB);
        for at in [0, 5 * MIB - 700, 31 * MIB + 4096, 63 * MIB - 512] {
            assert_eq!(write(&store, at, &[7; 512]), 512);
            assert_eq!(write(&store, at.saturating_sub(90_000), &[8; 1024]), 1024);
        }
        let found = zeroes(&store, 0);
        assert!((least..63 * MIB).contains(&found), "{options:?}: {found}");
        // Discarded objects are gone.
        assert_eq!(perform(&store, Job::Discard { offset: 0, len: 20 * MIB }), 0);
        assert!(zeroes(&store, 0) >= found, "{options:?}");
        // From the middle of an object.
        let from = 4 * MIB + 12_345;
        assert!(zeroes(&store, from) < zeroes(&store, 0));
        // Of a snapshot, whatever comes later.
        let snapshot = format!("{}@base", image.spec());
        cluster.rbd(&["snap", "create", "--no-progress", &snapshot]);
        assert_eq!(write(&store, 8 * MIB, &[9; 3 << 20]), 3 << 20);
        let mut location = image.location();
        location.snapshot = Some("base".into());
        let before = Rbd::open(&location, &RbdOptions::default()).expect("the snapshot");
        assert!(zeroes(&before, 0) >= found, "{options:?}");
        zeroes(&store, 0);
        drop((before, store));
        // A clone has what its parent has: all may be data.
        cluster.rbd(&["snap", "protect", &snapshot]);
        let name = format!("{}-clone", image.name);
        cluster.rbd(&["clone", &snapshot, &format!("pool/{name}")]);
        {
            let clone = TestImage { cluster: &cluster, name };
            let store = clone.open();
            assert_eq!(zeroes(&store, 0), 0);
        }
        cluster.rbd(&["snap", "unprotect", &snapshot]);
        cluster.rbd(&["snap", "purge", "--no-progress", &image.spec()]);
    }
}
