//! qcow2 images of every kind, compared with what QEMU makes and reads.
use super::model::{DISK, Model, Op, op};
use super::qcow2::{check, compare, create, create_on, disk, done, folder, layer, open, text};
use super::*;
use crate::Device;
use crate::blk::{Format, OpenError, OpenReason, RefcountError};
use proptest::prelude::*;
use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;
use std::process::Command;
use tempfile::TempDir;

/// Runs random requests on a disk that reads as `before`, and returns what it reads as then.
fn run(config: BlkConfig, before: &[u8], ops: &[Op]) -> Vec<u8> {
    let mut rig = Rig::new(open(config).unwrap());
    let mut model = Model { bytes: before.to_vec(), unknown: vec![false; DISK] };
    assert!(rig.read(0, DISK) == before);
    for op in ops {
        model.apply(op, &mut rig);
    }
    let end = rig.read(0, DISK);
    for (at, byte) in end.iter().enumerate() {
        assert!(model.unknown[at] || model.bytes[at] == *byte, "byte {at}");
    }
    end
}

/// An image that QEMU has made of `content`, and its backing file.
fn made(folder: &TempDir, kind: usize, content: &[u8]) -> (PathBuf, Option<PathBuf>) {
    let raw = folder.path().join("content.raw");
    std::fs::write(&raw, content).unwrap();
    let path = folder.path().join("made.qcow2");
    let convert = |options: &[&str]| {
        done(&[&["convert", "-q", "-f", "raw", "-O", "qcow2"], options, &[text(&raw), text(&path)]].concat());
    };
    match kind {
        0 => convert(&["-c", "-o", "cluster_size=4k"]),
        1 => convert(&["-c"]),
        2 => convert(&["-o", "cluster_size=512,compat=0.10"]),
        3 => convert(&["-o", "cluster_size=4k,refcount_bits=8"]),
        4 => convert(&["-c", "-o", "cluster_size=512,refcount_bits=32"]),
        5 => convert(&["-o", "cluster_size=1k,compat=0.10"]),
        _ => {
            let options = ["cluster_size=4k", "cluster_size=64k", "cluster_size=512"];
            let option = options[kind % options.len()];
            let size = DISK.to_string();
            done(&[
                "create",
                "-q",
                "-f",
                "qcow2",
                "-o",
                option,
                "-b",
                text(&raw),
                "-F",
                "raw",
                text(&path),
                &size,
            ]);
            return (path, Some(raw));
        }
    }
    (path, None)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]

    #[test]
    fn images_of_every_shape_are_arrays_of_bytes(
        ops in prop::collection::vec(op(), 1..30),
        cluster_bits in 9..=21_u32,
        refcount_order in 0..=6_u32,
        old in any::<bool>(),
    ) {
        let Some(folder) = folder("images_of_every_shape_are_arrays_of_bytes") else { return Ok(()) };
        let shape = if old { "compat=0.10".into() } else { format!("refcount_bits={}", 1 << refcount_order) };
        let options = format!("cluster_size={},{shape}", 1 << cluster_bits);
        let path = create(&folder, "shape.qcow2", DISK as u64, &options);
        let end = run(disk(&path), &[0; DISK], &ops);
        check(&path);
        compare(&path, &end);
    }

    #[test]
    fn images_that_qemu_has_filled_are_arrays_of_bytes(
        ops in prop::collection::vec(op(), 1..30),
        kind in 0..9_usize,
        snapshot in any::<bool>(),
        lives in 1..3_usize,
    ) {
        let Some(folder) = folder("images_that_qemu_has_filled_are_arrays_of_bytes") else { return Ok(()) };
        // Half of it is easy to compress.
        let mut content = pattern(DISK, 4);
        content[..DISK / 2].fill(7);
        let (path, base) = made(&folder, kind, &content);
        if snapshot {
            done(&["snapshot", "-q", "-c", "before", text(&path)]);
        }
        let backing: Vec<_> = base.iter().map(|base| layer(base, Format::Raw)).collect();
        let mut now = content.clone();
        for _ in 0..lives {
            now = run(BlkConfig { backing: backing.clone(), ..disk(&path) }, &now, &ops);
            check(&path);
            compare(&path, &now);
        }
        if snapshot {
            done(&["snapshot", "-q", "-a", "before", text(&path)]);
            check(&path);
            compare(&path, &content);
        }
    }
}

/// A number of a field in the header, or anywhere.
fn long(path: &Path, at: u64) -> u64 {
    let mut bytes = [0; 8];
    File::open(path).unwrap().read_exact_at(&mut bytes, at).unwrap();
    u64::from_be_bytes(bytes)
}

fn put(path: &Path, at: u64, bytes: &[u8]) {
    File::options().write(true).open(path).unwrap().write_all_at(bytes, at).unwrap();
}

#[test]
fn tables_grow_with_the_disk() {
    let Some(folder) = folder("tables_grow_with_the_disk") else { return };
    // A refcount block counts 64 clusters of 512 bytes, and the table has 64 blocks: 2 MiB.
    let path = create(&folder, "disk.qcow2", 1 << 20, "cluster_size=512,refcount_bits=64");
    let (l1_table, refcount_table) = (long(&path, 40), long(&path, 48));
    let mut rig = Rig::new(open(disk(&path)).unwrap());
    let mut resizer = rig.device.resizer();
    assert!(resizer.resize(1 << 30).unwrap());
    let data = pattern(1 << 20, 3);
    for number in 0..6 {
        assert_eq!(rig.status(blk::T_OUT, number * 200_000, &data), blk::S_OK);
    }
    for number in 0..6 {
        assert!(rig.read(number * 200_000, data.len()) == data, "{number}");
    }
    drop((rig, resizer));
    check(&path);
    assert!(long(&path, 40) != l1_table && long(&path, 48) != refcount_table);
    let mut rig = Rig::new(open(disk(&path)).unwrap());
    assert!(rig.read(1_000_000, data.len()) == data);
}

#[test]
fn what_a_smaller_disk_lost_does_not_come_back() {
    let Some(folder) = folder("what_a_smaller_disk_lost_does_not_come_back") else { return };
    let base = folder.path().join("base.raw");
    std::fs::write(&base, pattern(1 << 20, 8)).unwrap();
    for based in [false, true] {
        let path = match based {
            true => create_on(&folder, "disk.qcow2", &base, "raw", 1 << 20),
            false => create(&folder, "disk.qcow2", 1 << 20, ""),
        };
        let backing: Vec<_> = based.then(|| layer(&base, Format::Raw)).into_iter().collect();
        let mut rig = Rig::new(open(BlkConfig { backing, ..disk(&path) }).unwrap());
        assert_eq!(rig.status(blk::T_OUT, 0, &pattern(1 << 20, 1)), blk::S_OK);
        let mut resizer = rig.device.resizer();
        assert!(resizer.resize(100 * 512).unwrap());
        assert!(resizer.resize(1 << 20).unwrap());
        let expected = [&pattern(1 << 20, 1)[..100 * 512], &vec![0; (1 << 20) - 100 * 512]].concat();
        assert!(rig.read(0, 1 << 20) == expected, "{based}");
        drop((rig, resizer));
        check(&path);
        compare(&path, &expected);
    }
}

/// Marks an image as QEMU does with `lazy_refcounts`, and takes the count of a cluster.
#[test]
fn an_image_that_was_not_closed_is_repaired() {
    let Some(folder) = folder("an_image_that_was_not_closed_is_repaired") else { return };
    for options in ["lazy_refcounts=on", "refcount_bits=1", "refcount_bits=64,cluster_size=4k"] {
        let path = create(&folder, "disk.qcow2", 1 << 20, options);
        let mut rig = Rig::new(open(disk(&path)).unwrap());
        assert_eq!(rig.status(blk::T_OUT, 0, &pattern(4096, 1)), blk::S_OK);
        drop(rig);
        check(&path);
        assert_eq!(long(&path, 72), 0, "closed");
        let l1_entry = long(&path, long(&path, 40)) & 0x00ff_ffff_ffff_fe00;
        let data = long(&path, l1_entry) & 0x00ff_ffff_ffff_fe00;
        let cluster_bits = (long(&path, 16) & 0xff) as u32;
        let order = (long(&path, 96) >> 32) as u32;
        let (bit, block) = ((data >> cluster_bits) << order, long(&path, long(&path, 48)));
        let old = long(&path, block + bit / 64 * 8).to_be_bytes();
        let mut new = old;
        let count = (bit % 64 / 8) as usize..((bit % 64 + (1 << order)).div_ceil(8)) as usize;
        match order {
            0 => new[count.start] &= !(1 << (bit % 8)),
            _ => new[count].fill(0),
        }
        assert_ne!(old, new);
        put(&path, block + bit / 64 * 8, &new);
        put(&path, 72, &1_u64.to_be_bytes());
        let before = std::fs::read(&path).unwrap();
        let mut rig = Rig::new(open(BlkConfig { read_only: true, ..disk(&path) }).unwrap());
        assert!(rig.read(0, 4096) == pattern(4096, 1));
        drop(rig);
        assert!(std::fs::read(&path).unwrap() == before, "a reader repairs nothing");
        let mut rig = Rig::new(open(disk(&path)).unwrap());
        assert_eq!(rig.status(blk::T_OUT, 1024, &pattern(512 * 1024, 2)), blk::S_OK);
        assert!(rig.read(0, 4096) == pattern(4096, 1), "{options}");
        drop(rig);
        check(&path);
        assert_eq!(long(&path, 72), 0);
    }
}

/// A power loss may lose a change of the file's size, and keep the counts of what it was for.
#[test]
fn a_repair_frees_what_is_beyond_the_end_of_the_file() {
    let Some(folder) = folder("a_repair_frees_what_is_beyond_the_end_of_the_file") else { return };
    let path = create(&folder, "disk.qcow2", 1 << 20, "");
    let clusters = std::fs::metadata(&path).unwrap().len().div_ceil(65536);
    let count = long(&path, long(&path, 48)) + (clusters + 5) * 2;
    put(&path, count, &[0, 1, 0, 1, 0, 0, 0, 1]);
    put(&path, 72, &1_u64.to_be_bytes());
    drop(open(disk(&path)).unwrap());
    assert_eq!((long(&path, count), long(&path, 72)), (0, 0));
    check(&path);
}

#[test]
fn an_image_that_was_not_closed_and_is_damaged_is_refused() {
    let Some(folder) = folder("an_image_that_was_not_closed_and_is_damaged_is_refused") else { return };
    let path = create(&folder, "disk.qcow2", 1 << 20, "");
    let mut rig = Rig::new(open(disk(&path)).unwrap());
    assert_eq!(rig.status(blk::T_OUT, 0, &pattern(4096, 1)), blk::S_OK);
    drop(rig);
    let l2_table = long(&path, long(&path, 40)) & 0x00ff_ffff_ffff_fe00;
    let data = long(&path, l2_table);
    let refused = |entry: u64| {
        put(&path, l2_table + 8, &entry.to_be_bytes());
        put(&path, 72, &1_u64.to_be_bytes());
        match open(disk(&path)).unwrap_err() {
            OpenError { reason: OpenReason::Refcounts { source, .. }, .. } => source,
            other => panic!("{other}"),
        }
    };
    assert!(matches!(refused(data), RefcountError::Uses { uses: 2, count: 1, .. }));
    assert!(matches!(refused(1 << 40), RefcountError::Outside { .. }));
    assert!(matches!(refused(0x200), RefcountError::Io(_)));
    let text = refused(data).to_string();
    assert!(text.contains("`qemu-img check -r all`"), "{text}");
}

#[test]
fn discards_give_space_back() {
    let Some(folder) = folder("discards_give_space_back") else { return };
    for (kind, flags) in [(blk::T_DISCARD, 0), (blk::T_WRITE_ZEROES, 1)] {
        for options in ["", "compat=0.10", "cluster_size=4k"] {
            let path = create(&folder, "disk.qcow2", 16 << 20, options);
            let mut rig = Rig::new(open(disk(&path)).unwrap());
            let mut config = paravane_spec::blk::Config::default();
            rig.device.read_config(0, zerocopy::IntoBytes::as_mut_bytes(&mut config));
            let cluster = if options.contains("4k") { 4096 } else { 65536 };
            assert_eq!(u32::from_le(config.discard_sector_alignment), cluster / 512);
            let used = || std::fs::metadata(&path).unwrap().blocks() * 512;
            for number in 0..4 {
                assert_eq!(rig.status(blk::T_OUT, number << 11, &pattern(1 << 20, number)), blk::S_OK);
            }
            assert_eq!(rig.status(blk::T_FLUSH, 0, &[]), blk::S_OK);
            let before = used();
            assert!(before >= 4 << 20);
            assert_eq!(rig.status(kind, 0, &range(0, 4 << 11, flags)), blk::S_OK);
            assert!(used() + 4096 >= before, "not before its mapping is gone for good");
            assert_eq!(rig.status(blk::T_FLUSH, 0, &[]), blk::S_OK);
            assert!(used() < before - (3 << 20), "{options}: {before} -> {}", used());
            assert!(rig.read(0, 1 << 20) == vec![0; 1 << 20]);
            drop(rig);
            check(&path);
        }
    }
}

/// A copy of what `qemu-io` wrote last.
#[test]
fn both_write_in_turns() {
    let Some(folder) = folder("both_write_in_turns") else { return };
    let path = create(&folder, "disk.qcow2", 4 << 20, "cluster_size=4k");
    let mut expected = vec![0; 4 << 20];
    for round in 0..6_u8 {
        let at = usize::from(round) * 300_032;
        let mut rig = Rig::new(open(disk(&path)).unwrap());
        assert_eq!(rig.status(blk::T_OUT, at as u64 / 512, &pattern(200_192, round.into())), blk::S_OK);
        drop(rig);
        expected[at..at + 200_192].copy_from_slice(&pattern(200_192, round.into()));
        let command = format!("write -q -P {} {} 100k", round + 1, at + 100_352);
        let written =
            Command::new("qemu-io").args(["-f", "qcow2", "-c", &command, text(&path)]).output().unwrap();
        assert!(written.status.success(), "{written:?}");
        expected[at + 100_352..][..100 << 10].fill(round + 1);
        check(&path);
    }
    compare(&path, &expected);
}
