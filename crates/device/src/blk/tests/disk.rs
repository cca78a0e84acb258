//! What the disk says of itself.
use super::*;
use crate::Device;
use paravane_ring::device::QueueConfig;
use paravane_spec::blk::Config;
use paravane_spec::feature;
use zerocopy::FromBytes;

fn read_config(disk: &Blk) -> Config {
    let mut bytes = [0; size_of::<Config>()];
    disk.read_config(0, &mut bytes);
    Config::read_from_bytes(&bytes).unwrap()
}

#[test]
fn a_writable_disk_describes_itself() {
    let file = image(&[0; 64 * 512]);
    let disk = Blk::open(BlkConfig { queues: 3, ..config(&file, EngineChoice::Auto) }).unwrap();
    assert_eq!(disk.device_id(), 2);
    assert_eq!(disk.size(), 64 * 512);
    assert!(!disk.read_only());
    assert_eq!(disk.queue_sizes(), [256; 3]);
    let offered = disk.features();
    for bit in [
        feature::VERSION_1,
        QueueConfig::SPLIT_FEATURES,
        blk::F_SEG_MAX,
        blk::F_BLK_SIZE,
        blk::F_FLUSH,
        blk::F_TOPOLOGY,
        blk::F_MQ,
        blk::F_DISCARD,
        blk::F_WRITE_ZEROES,
    ] {
        assert_eq!(offered & bit, bit, "{bit:#x}");
    }
    assert_eq!(offered & (blk::F_RO | blk::F_CONFIG_WCE | blk::F_SIZE_MAX), 0);
    let config = read_config(&disk);
    assert_eq!({ config.capacity }, 64);
    assert_eq!({ config.seg_max }, 126);
    assert_eq!({ config.blk_size }, 512);
    assert!(config.physical_block_exp <= 3);
    assert_eq!({ config.num_queues }, 3);
    assert!(config.max_discard_sectors > 0 && config.max_discard_seg > 0);
    assert!(config.max_write_zeroes_sectors > 0 && config.max_write_zeroes_seg > 0);
    assert_eq!(config.write_zeroes_may_unmap, 1);
}

#[test]
fn a_read_only_disk_offers_nothing_that_writes() {
    let file = image(&[0; 512]);
    let disk = Blk::open(BlkConfig { read_only: true, ..config(&file, EngineChoice::Auto) }).unwrap();
    assert!(disk.read_only());
    assert_eq!(disk.features() & blk::F_RO, blk::F_RO);
    assert_eq!(disk.features() & (blk::F_DISCARD | blk::F_WRITE_ZEROES | blk::F_MQ), 0);
    assert_eq!({ read_config(&disk).max_discard_sectors }, 0);
}

#[test]
fn the_configuration_space_ends_in_zeroes() {
    let file = image(&[0; 512 * 0x0102]);
    let disk = Blk::open(config(&file, EngineChoice::Threads)).unwrap();
    let mut two = [9; 2];
    disk.read_config(0, &mut two);
    assert_eq!(two, [2, 1]);
    for offset in [size_of::<Config>() as u32, 4096, u32::MAX] {
        let mut out = [9; 8];
        disk.read_config(offset, &mut out);
        assert_eq!(out, [0; 8]);
    }
    let mut across = [9; 4];
    disk.read_config(size_of::<Config>() as u32 - 4, &mut across);
    assert_eq!(across, [1, 0, 0, 0], "write_zeroes_may_unmap and its padding");
}

#[test]
fn queue_sizes_become_powers_of_two() {
    let file = image(&[0; 512]);
    for (asked, got) in [(0, 4), (3, 4), (4, 4), (100, 64), (1024, 1024), (u16::MAX, 32768)] {
        let disk =
            Blk::open(BlkConfig { queue_size: asked, queues: 0, ..config(&file, EngineChoice::Threads) })
                .unwrap();
        assert_eq!(disk.queue_sizes(), [got]);
    }
}

#[test]
fn the_longest_request_fits_the_queues_that_drivers_make() {
    let file = image(&[0; 512]);
    // Where nothing is known of the queue but its largest size, it is as small as clients make it:
    // 128.
    for (queue_size, segments) in [(4, 2), (64, 62), (128, 126), (256, 126), (1024, 126), (32768, 126)] {
        let disk = Blk::open(BlkConfig { queue_size, ..config(&file, EngineChoice::Threads) }).unwrap();
        assert_eq!({ read_config(&disk).seg_max }, segments, "queues of {queue_size}");
        assert_eq!(u32::from(disk.longest_chain()), segments + 2);
    }
}

#[test]
fn a_disk_has_only_its_queues() {
    let file = image(&[0; 512]);
    for way in ways("a_disk_has_only_its_queues") {
        let mut disk = Blk::open(BlkConfig { queues: 2, ..config(&file, way) }).unwrap();
        assert!(disk.start_queue(1, 0).is_ok());
        assert!(disk.start_queue(2, 0).is_err());
        assert!(disk.start_queue(u16::MAX, 0).is_err());
    }
}

#[test]
fn the_engine_says_what_it_is() {
    let file = image(&[0; 512]);
    assert_eq!(Blk::open(config(&file, EngineChoice::Threads)).unwrap().engine(), "threads");
    let immediate = Blk::open(config(&file, EngineChoice::Immediate)).unwrap();
    assert_eq!(
        immediate.engine(),
        if immediate.current.image().file.in_memory { "immediate, mapped" } else { "immediate" }
    );
    assert_eq!(immediate.may_block(), !immediate.current.image().file.in_memory);
    drop(immediate);
    let auto = Blk::open(config(&file, EngineChoice::Auto)).unwrap();
    match (auto.current.image().file.in_memory, io_uring_available()) {
        (true, _) => assert_eq!(auto.engine(), "immediate, mapped"),
        (false, Ok(())) => assert_eq!(auto.engine(), "io_uring"),
        (false, Err(_)) => assert!(auto.engine().starts_with("threads (io_uring: ")),
    }
}

#[test]
fn an_image_in_memory_has_the_immediate_engine() {
    let memory = rustix::fs::memfd_create("image", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&memory, 1 << 20).unwrap();
    let disk = Blk::of(memory.into(), BlkConfig::new("image")).unwrap();
    assert_eq!((disk.engine().as_str(), disk.may_block()), ("immediate, mapped", false));
}

#[test]
fn the_serial_is_the_identifier() {
    let file = image(&[0; 512]);
    for (serial, id) in [
        ("disk-1", &b"disk-1\0\0\0\0\0\0\0\0\0\0\0\0\0\0"[..]),
        ("exactly twenty bytes", b"exactly twenty bytes"),
        ("rather more than twenty bytes", b"rather more than twe"),
        ("a\u{e9}\n", b"a___\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0"),
    ] {
        let config = BlkConfig { serial: Some(serial.into()), ..config(&file, EngineChoice::Auto) };
        let mut rig = Rig::new(Blk::open(config).unwrap());
        let answer = rig.request(blk::T_GET_ID, 0, &[], 20);
        assert_eq!((answer.status, answer.used), (blk::S_OK, 21));
        assert_eq!(answer.data, id);
    }
    let mut rig = rig(&file, EngineChoice::Auto);
    let name = file.path().file_name().unwrap().to_str().unwrap().to_owned();
    let answer = rig.request(blk::T_GET_ID, 0, &[], 32);
    assert_eq!(answer.data[..name.len()], *name.as_bytes());
    assert_eq!(answer.data[20..], [UNTOUCHED; 12], "an identifier has 20 bytes");
    assert_eq!(answer.used, 21);
    let answer = rig.request(blk::T_GET_ID, 0, &[], 19);
    assert_eq!((answer.status, answer.used), (blk::S_IOERR, 1));
}

#[test]
fn a_guest_that_runs_keeps_the_serial_that_it_was_told() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rather more than twenty bytes");
    std::fs::write(&path, [0; 512]).unwrap();
    let open = |serial: Option<&str>| {
        Blk::open(BlkConfig { serial: serial.map(Into::into), ..BlkConfig::new(&path) }).unwrap()
    };
    let disk = open(None);
    let id = disk.identity();
    assert!(id.starts_with(b"rather more-") && !id.contains(&0));
    assert_eq!(disk.snapshots().serial().as_bytes(), id);
    drop(disk);
    let told = *b"vm0.img\0\0\0\0\0\0\0\0\0\0\0\0\0";
    for (serial, noted, wanted) in [
        // A version that did not note it, and cut names.
        (None, None, b"rather more than twe"),
        (None, Some(&told[..]), &told),
        (Some("given"), Some(&told[..]), &told),
        (Some("twenty-characters-xx"), None, b"twenty-characters-xx"),
        // Of another kind of device.
        (Some("twenty-characters-xx"), Some(&[1; 6][..]), b"twenty-characters-xx"),
    ] {
        let mut disk = open(serial);
        disk.keep_identity(noted);
        assert_eq!(disk.identity(), wanted);
        let snapshots = disk.snapshots();
        let mut rig = Rig::new(disk);
        assert_eq!(rig.request(blk::T_GET_ID, 0, &[], 20).data, wanted);
        assert_eq!(snapshots.serial().as_bytes(), wanted.split(|byte| *byte == 0).next().unwrap());
    }
}
