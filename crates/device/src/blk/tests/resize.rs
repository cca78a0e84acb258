//! The image grows and shrinks while its disk is served.
use super::*;
use crate::Device;
use paravane_spec::blk::Config;
use zerocopy::FromBytes;

fn capacity(disk: &Blk) -> u64 {
    let mut bytes = [0; size_of::<Config>()];
    disk.read_config(0, &mut bytes);
    Config::read_from_bytes(&bytes).unwrap().capacity
}

#[test]
fn a_disk_grows_at_a_refresh_after_its_image_has() {
    for way in ways("a_disk_grows_at_a_refresh_after_its_image_has") {
        let file = image(&pattern(8 * 512, 1));
        let mut rig = rig(&file, way);
        let mut resizer = rig.device.resizer();
        assert!(!resizer.look().unwrap());
        file.as_file().set_len(16 * 512).unwrap();
        assert_eq!(rig.status(blk::T_OUT, 8, &[7; 512]), blk::S_IOERR, "not refreshed yet");
        assert_eq!((capacity(&rig.device), rig.device.size(), resizer.size()), (8, 8 * 512, 8 * 512));
        assert!(resizer.look().unwrap());
        assert!(!resizer.look().unwrap());
        assert_eq!((capacity(&rig.device), rig.device.size(), resizer.size()), (16, 16 * 512, 16 * 512));
        assert_eq!(rig.status(blk::T_OUT, 15, &[7; 512]), blk::S_OK);
        assert_eq!(rig.read(14, 1024), [[0; 512], [7; 512]].concat());
        assert_eq!(rig.status(blk::T_OUT, 16, &[7; 512]), blk::S_IOERR);
        assert_eq!(content(&file).len(), 16 * 512);
    }
}

#[test]
fn what_is_beyond_a_new_end_is_an_error() {
    for way in ways("what_is_beyond_a_new_end_is_an_error") {
        let before = pattern(16 * 512, 1);
        let file = image(&before);
        let mut rig = rig(&file, way);
        let mut resizer = rig.device.resizer();
        file.as_file().set_len(8 * 512 + 100).unwrap();
        let unseen = rig.request(blk::T_IN, 9, &[], 512);
        // The mapping includes all of its last page.
        let unseen_yet = if is_mapped(&rig.device) { (blk::S_OK, 513) } else { (blk::S_IOERR, 1) };
        assert_eq!((unseen.status, unseen.used), unseen_yet, "not refreshed yet");
        assert!(resizer.look().unwrap());
        assert_eq!(capacity(&rig.device), 8, "half a sector is none");
        for kind in [blk::T_OUT, blk::T_IN] {
            for (sector, sectors) in [(8, 1), (7, 2), (15, 1)] {
                let room = if kind == blk::T_IN { sectors * 512 } else { 0 };
                let payload = vec![7; if kind == blk::T_OUT { sectors * 512 } else { 0 }];
                let answer = rig.request(kind, sector, &payload, room);
                assert_eq!((answer.status, answer.used), (blk::S_IOERR, 1));
            }
        }
        for kind in [blk::T_DISCARD, blk::T_WRITE_ZEROES] {
            assert_eq!(rig.status(kind, 0, &range(7, 2, 0)), blk::S_IOERR);
        }
        // Only requests that failed before the refresh are errors of the storage.
        let totals = rig.device.errors().totals();
        assert_eq!((totals.operations[0], totals.rejected), (u64::from(unseen_yet.0), 8));
        assert_eq!(rig.read(0, 8 * 512), before[..8 * 512]);
        assert_eq!(content(&file), before[..8 * 512 + 100]);
    }
}

#[test]
fn a_size_that_is_asked_for_is_the_images() {
    let file = image(&pattern(8 * 512, 1));
    let mut rig = rig(&file, EngineChoice::Auto);
    let (mut one, mut other) = (rig.device.resizer(), rig.device.resizer());
    assert!(one.resize(32 * 512).unwrap());
    assert_eq!(content(&file).len(), 32 * 512);
    assert!(!one.resize(32 * 512).unwrap());
    assert!(other.look().unwrap(), "each says what is new to it");
    assert_eq!(rig.status(blk::T_OUT, 31, &[7; 512]), blk::S_OK);
    assert!(one.resize(512).unwrap());
    assert_eq!(rig.status(blk::T_OUT, 1, &[7; 512]), blk::S_IOERR);
    for size in [0, 1, 511, 513] {
        assert!(one.resize(size).is_err());
    }
    assert_eq!(content(&file).len(), 512);
}

#[test]
fn a_read_only_disk_is_not_resized() {
    let file = image(&[0; 1024]);
    let disk = Blk::open(BlkConfig { read_only: true, ..config(&file, EngineChoice::Auto) }).unwrap();
    let mut resizer = disk.resizer();
    assert!(resizer.resize(512).is_err());
    file.as_file().set_len(512).unwrap();
    assert!(resizer.look().unwrap());
    assert_eq!(disk.size(), 512);
}
