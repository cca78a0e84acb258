//! A client takes memory away that requests use.
use super::*;
use crate::rig::{BASE, SIZE};
use paravane_dma::{Access, Alarm, FileRange, MappingQuota, Region};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::os::fd::OwnedFd;
use std::sync::Arc;

const THEIRS: u64 = BASE + SIZE;
const LEN: u64 = 1 << 20;

/// A rig with more memory behind its own, in a file that can shrink.
fn rig_with_theirs(
    file: &NamedTempFile,
    way: impl Into<Way>,
) -> (Rig<Blk>, OwnedFd, Arc<Region>, Arc<Alarm>) {
    let rig = rig(file, way);
    let theirs = memfd_create(c"a-client", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&theirs, LEN).unwrap();
    let alarm = Alarm::new().unwrap();
    let range = FileRange { gpa: THEIRS, size: LEN, offset: 0, writable: true };
    let region =
        Region::guarded(range, theirs.try_clone().unwrap(), &alarm, &MappingQuota::default()).unwrap();
    rig.memory.replace(vec![rig.region.clone(), region.clone()]).unwrap();
    (rig, theirs, region, alarm)
}

/// A request with its middle in memory that may go away.
fn transfer(rig: &mut Rig<Blk>, kind: u32) -> (u8, u32) {
    let data = segment(THEIRS + LEN / 2, 4096);
    rig.poke(HEADER, &header(kind, 0));
    rig.poke(STATUS, &[UNTOUCHED]);
    let (header, status) = (segment(HEADER, 16), segment(STATUS, 1));
    let used = match kind {
        blk::T_IN => rig.one(&[header], &[data, status]),
        _ => rig.one(&[header, data], &[status]),
    };
    (rig.peek(STATUS, 1)[0], used.unwrap().len)
}

#[test]
fn requests_that_use_what_is_gone_fail_and_the_queue_goes_on() {
    let before = pattern(64 * 512, 1);
    for way in ways("requests_that_use_what_is_gone_fail_and_the_queue_goes_on") {
        let file = image(&before);
        let (mut rig, theirs, region, alarm) = rig_with_theirs(&file, way);
        assert_eq!(transfer(&mut rig, blk::T_IN), (blk::S_OK, 4097));
        assert_eq!(rig.peek(THEIRS + LEN / 2, 4096), before[..4096]);
        ftruncate(&theirs, 0).unwrap();
        // The kernel keeps pages of registered memory: only the client that truncates the file
        // misses them. A copy into a lost mapping succeeds, and is not seen.
        let mapped = is_mapped(&rig.device);
        let read = if way.registered_buffers || mapped { (blk::S_OK, 4097) } else { (blk::S_IOERR, 1) };
        let written = if way.registered_buffers { (blk::S_OK, 1) } else { (blk::S_IOERR, 1) };
        assert_eq!(transfer(&mut rig, blk::T_IN), read);
        assert_eq!(transfer(&mut rig, blk::T_OUT), written);
        assert_eq!((region.lost(), alarm.take()), (mapped, mapped), "else only the kernel has been there");
        assert_eq!(rig.read(1, 512), before[512..1024]);
        assert_eq!(content(&file), before);
    }
}

#[test]
fn a_header_that_is_gone_reads_as_zeroes_and_rings_the_alarm() {
    let before = pattern(64 * 512, 1);
    let file = image(&before);
    let (mut rig, theirs, region, alarm) = rig_with_theirs(&file, EngineChoice::Auto);
    rig.memory.handle().enter().write(THEIRS, &header(blk::T_FLUSH, 5), Access::WRITE).unwrap();
    ftruncate(&theirs, 0).unwrap();
    // Zeroes are a read of the first sector.
    let used = rig.one(&[segment(THEIRS, 16)], &[segment(ROOM, 512), segment(STATUS, 1)]).unwrap();
    assert_eq!((rig.peek(STATUS, 1)[0], used.len), (blk::S_OK, 513));
    assert_eq!(rig.peek(ROOM, 512), before[..512]);
    assert!(region.lost() && alarm.take());
}
