//! Clusters of qcow2 images that are read and written at their places in the file.
use super::model::{DISK, op};
use super::qcow2::{agrees, check, compare, create, create_on, disk, done, layer, text};
use super::*;
use crate::blk::Format;
use paravane_dma::HostSlice;
use paravane_store::{Job, Pieces};
use proptest::prelude::*;
use std::process::Command;
use std::ptr::NonNull;
use tempfile::TempDir;

/// A folder in memory; `None`, said loudly, without one or without QEMU's tool.
fn folder(test: &str) -> Option<TempDir> {
    if let Err(error) = Command::new("qemu-img").arg("--version").output() {
        skipped(test, format!("qemu-img (package qemu-utils): {error}"));
        return None;
    }
    match tempfile::tempdir_in("/dev/shm") {
        Ok(folder) => Some(folder),
        Err(error) => {
            skipped(test, format!("/dev/shm: {error}"));
            None
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]

    #[test]
    fn a_qcow2_image_in_memory_is_an_array_of_bytes(
        ops in prop::collection::vec(op(), 1..60),
        kind in 0..5_usize,
    ) {
        const TEST: &str = "a_qcow2_image_in_memory_is_an_array_of_bytes";
        let Some(folder) = folder(TEST) else { return Ok(()) };
        let options = [
            "", "cluster_size=512", "preallocation=full,cluster_size=512", "preallocation=falloc",
            "compat=0.10,cluster_size=4k",
        ][kind];
        agrees(&folder, options, &ops, 0);
    }
}

/// What the file is asked for, if the range is accessed in place: offsets and lengths.
fn asked(disk: &Blk, offset: u64, len: usize) -> Option<Vec<(u64, usize)>> {
    let mut bytes = vec![0; len];
    let mut piece = HostSlice { ptr: bytes.as_mut_ptr(), len };
    let pieces = Pieces { first: NonNull::from(&mut piece), count: 1 };
    let log = std::cell::RefCell::default();
    let file = |job| match job {
        Job::Read { pieces, offset } => {
            // SAFETY: `in_place` passes a list that is valid.
            let len: usize = unsafe { pieces.slices() }.iter().map(|piece| piece.len).sum();
            Vec::push(&mut log.borrow_mut(), (offset, len));
            len as i32
        }
        other => panic!("{other:?}"),
    };
    let done = disk.current.image().qcow2.as_ref().unwrap().in_place(Job::Read { pieces, offset }, file)?;
    let log = log.into_inner();
    assert_eq!(log.iter().map(|(_, len)| *len).sum::<usize>(), done as usize);
    Some(log)
}

#[test]
fn only_allocated_clusters_are_accessed_in_place() {
    let Some(folder) = folder("only_allocated_clusters_are_accessed_in_place") else { return };
    let path = create(&folder, "disk.qcow2", 1 << 20, "cluster_size=4k");
    let mut rig = Rig::new(Blk::open(disk(&path)).unwrap());
    assert_eq!(rig.device.engine(), "threads, mapped");
    let mut model = vec![0; 1 << 20];
    let mut write = |rig: &mut Rig<Blk>, sector: u64, len: usize, seed| {
        let data = pattern(len, seed);
        assert_eq!(rig.status(blk::T_OUT, sector, &data), blk::S_OK);
        model[sector as usize * 512..][..len].copy_from_slice(&data);
    };
    assert_eq!(rig.read(0, 8192), vec![0; 8192]);
    assert_eq!(asked(&rig.device, 0, 4096), None, "not allocated");
    // Out of order, so that neighbours on the disk are not neighbours in the file.
    write(&mut rig, 8, 4096, 1);
    write(&mut rig, 0, 4096, 2);
    write(&mut rig, 16, 8192, 3);
    rig.read(0, 16384);
    let found = asked(&rig.device, 512, 16384 - 512).unwrap();
    assert_eq!(found.iter().map(|(_, len)| *len).collect::<Vec<_>>(), [3584, 4096, 8192]);
    assert_eq!(found[0].0 % 4096, 512);
    assert!(asked(&rig.device, 12288, 8192).is_some_and(|found| found[0].1 == 4096), "the rest is not there");
    // Overwritten, across places in the file and the end of what is allocated.
    write(&mut rig, 1, 10_240, 4);
    write(&mut rig, 28, 4096, 5);

    // Zeroed, discarded: off the map at once.
    rig.read(0, 16384);
    assert_eq!(rig.status(blk::T_WRITE_ZEROES, 0, &range(8, 8, 0)), blk::S_OK);
    assert_eq!(asked(&rig.device, 4096, 512), None);
    assert_eq!(rig.status(blk::T_WRITE_ZEROES, 0, &range(16, 8, blk::WRITE_ZEROES_F_UNMAP)), blk::S_OK);
    assert_eq!(asked(&rig.device, 8192, 512), None);
    assert_eq!(rig.status(blk::T_DISCARD, 0, &range(0, 8, 0)), blk::S_OK);
    assert_eq!(asked(&rig.device, 0, 512), None);
    model[..12288].fill(0);
    assert_eq!(rig.read(0, 1 << 20), model);
    drop(rig);
    check(&path);
    compare(&path, &model);
}

#[test]
fn clusters_of_snapshots_backing_files_and_compressed_ones_are_not_written_in_place() {
    let Some(folder) = folder("clusters_of_snapshots_backing_files_and_compressed_ones") else { return };
    let data = pattern(1 << 20, 9);
    let raw = folder.path().join("base.raw");
    std::fs::write(&raw, &data).unwrap();
    let plain = folder.path().join("plain.qcow2");
    done(&["convert", "-q", "-f", "raw", "-O", "qcow2", text(&raw), text(&plain)]);
    done(&["snapshot", "-q", "-c", "before", text(&plain)]);
    let compressed = folder.path().join("compressed.qcow2");
    std::fs::write(&raw, vec![7; 1 << 20]).unwrap();
    done(&["convert", "-q", "-c", "-f", "raw", "-O", "qcow2", text(&raw), text(&compressed)]);
    let top = create_on(&folder, "top.qcow2", &raw, "raw", 1 << 20);
    let based = BlkConfig { backing: vec![layer(&raw, Format::Raw)], ..disk(&top) };
    for (config, before) in
        [(disk(&plain), &data), (disk(&compressed), &vec![7; 1 << 20]), (based, &vec![7; 1 << 20])]
    {
        let path = config.path.clone();
        let mut rig = Rig::new(Blk::open(config).unwrap());
        assert_eq!(&rig.read(0, 1 << 20), before);
        assert_eq!(asked(&rig.device, 0, 4096), None, "{path:?}");
        let mut after = before.clone();
        after[512..1024].fill(1);
        assert_eq!(rig.status(blk::T_OUT, 1, &[1; 512]), blk::S_OK);
        assert_eq!(rig.read(0, 1 << 20), after);
        assert!(asked(&rig.device, 0, 4096).is_some(), "{path:?} has its own cluster now");
        drop(rig);
        if path != top {
            check(&path);
            compare(&path, &after);
        }
    }
    assert_eq!(std::fs::read(&raw).unwrap(), vec![7; 1 << 20]);
    done(&["snapshot", "-q", "-a", "before", text(&plain)]);
    compare(&plain, &data);
}

#[test]
fn requests_in_place_and_changes_of_tables_do_not_mix() {
    let Some(folder) = folder("requests_in_place_and_changes_of_tables_do_not_mix") else { return };
    for options in ["cluster_size=64k", "cluster_size=4k,preallocation=falloc"] {
        let path = create(&folder, "disk.qcow2", DISK as u64 * 64, options);
        let mut rig = Rig::new(Blk::open(disk(&path)).unwrap());
        for round in 0..8_u64 {
            // Each third block is discarded or zeroed, while its neighbours are written.
            for number in 0..48_u64 {
                let at = PAYLOAD + number * 8192;
                let (sector, head) = (number * 16, HEADER + number * 16);
                let status = segment(STATUS + number, 1);
                match (number % 3, round % 2) {
                    (1, 0) => {
                        rig.poke(at, &[header(blk::T_DISCARD, 0).to_vec(), range(sector, 16, 0)].concat());
                        rig.add(&[segment(at, 32)], &[status]);
                    }
                    (1, _) => {
                        rig.poke(
                            at,
                            &[header(blk::T_WRITE_ZEROES, 0).to_vec(), range(sector, 16, 0)].concat(),
                        );
                        rig.add(&[segment(at, 32)], &[status]);
                    }
                    _ => {
                        rig.poke(at, &pattern(8192, round * 64 + number));
                        rig.poke(head, &header(blk::T_OUT, sector));
                        rig.add(&[segment(head, 16), segment(at, 8192)], &[status]);
                    }
                }
            }
            assert_eq!(rig.run().unwrap().len(), 48);
            assert_eq!(rig.peek(STATUS, 48), [blk::S_OK; 48]);
            for number in (0..48).filter(|number| number % 3 != 1) {
                assert_eq!(
                    rig.read(number * 16, 8192),
                    pattern(8192, round * 64 + number),
                    "{round} {number}"
                );
            }
        }
        drop(rig);
        check(&path);
        std::fs::remove_file(&path).unwrap();
    }
}
