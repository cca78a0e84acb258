//! What a hostile driver can say, each thing by name.
//!
//! A broken frame latches the queue; a bad wish inside a good frame gets a status.
use super::*;
use crate::rig::{BASE, SIZE};
use paravane_spec::split;
use std::os::unix::fs::FileExt;

const DISK: usize = 64 * 1024;
const SECTORS: u64 = DISK as u64 / 512;

fn disk() -> NamedTempFile {
    image(&pattern(DISK, 20))
}

/// Runs `test` in each way, and then checks that the image has not changed.
fn unchanged(name: &str, read_only: bool, test: impl Fn(&mut Rig<Blk>)) {
    let file = disk();
    for way in ways(name) {
        let blk = Blk::open(BlkConfig { read_only, ..config(&file, way) }).unwrap();
        test(&mut Rig::new(blk));
    }
    assert!(content(&file) == pattern(DISK, 20));
}

fn is_request_error(error: QueueError) -> bool {
    matches!(error, QueueError::Request { .. })
}

#[test]
fn a_header_that_is_too_short_latches() {
    unchanged("a_header_that_is_too_short_latches", false, |rig| {
        rig.poke(HEADER, &header(blk::T_FLUSH, 0));
        assert!(is_request_error(rig.latches(&[segment(HEADER, 15)], &[segment(STATUS, 1)])));
    });
}

#[test]
fn a_chain_without_a_header_latches() {
    unchanged("a_chain_without_a_header_latches", false, |rig| {
        assert!(is_request_error(rig.latches(&[], &[segment(ROOM, 512), segment(STATUS, 1)])));
    });
}

#[test]
fn a_chain_without_a_status_latches() {
    unchanged("a_chain_without_a_status_latches", false, |rig| {
        rig.poke(HEADER, &header(blk::T_OUT, 0));
        assert!(is_request_error(rig.latches(&[segment(HEADER, 16), segment(PAYLOAD, 512)], &[])));
    });
}

#[test]
fn a_header_outside_memory_latches() {
    unchanged("a_header_outside_memory_latches", false, |rig| {
        let error = rig.latches(&[segment(0x1000, 16)], &[segment(STATUS, 1)]);
        assert_eq!(error, QueueError::Address { addr: 0x1000, len: 16 });
    });
}

#[test]
fn data_outside_memory_latches() {
    for (kind, addr) in
        [(blk::T_IN, 0), (blk::T_OUT, 0), (blk::T_IN, BASE + SIZE), (blk::T_OUT, BASE + SIZE - 256)]
    {
        unchanged("data_outside_memory_latches", false, |rig| {
            rig.poke(HEADER, &header(kind, 0));
            let (header, data, status) = (segment(HEADER, 16), segment(addr, 512), segment(STATUS, 1));
            let error = match kind {
                blk::T_IN => rig.latches(&[header], &[data, status]),
                _ => rig.latches(&[header, data], &[status]),
            };
            assert!(matches!(error, QueueError::Address { .. }), "{error}");
        });
    }
}

#[test]
fn data_half_in_a_hole_latches_before_any_of_it_moves() {
    unchanged("data_half_in_a_hole_latches_before_any_of_it_moves", false, |rig| {
        rig.poke(HEADER, &header(blk::T_IN, 0));
        rig.poke(BASE + SIZE - 512, &[UNTOUCHED; 512]);
        let error =
            rig.latches(&[segment(HEADER, 16)], &[segment(BASE + SIZE - 512, 1024), segment(STATUS, 1)]);
        assert_eq!(error, QueueError::Address { addr: BASE + SIZE, len: 1024 });
        assert_eq!(rig.peek(BASE + SIZE - 512, 512), [UNTOUCHED; 512]);
    });
}

#[test]
fn a_status_outside_memory_latches() {
    unchanged("a_status_outside_memory_latches", false, |rig| {
        for kind in [blk::T_FLUSH, 99] {
            rig.poke(HEADER, &header(kind, 0));
            rig.add(&[segment(HEADER, 16)], &[segment(BASE + SIZE, 1)]);
        }
        assert!(matches!(
            rig.run(),
            Err(ServeError::Queue(QueueError::Address { addr, len: 1 })) if addr == BASE + SIZE
        ));
        rig.handler.drain(&mut rig.live, false);
    });
}

#[test]
fn ranges_outside_memory_latch() {
    unchanged("ranges_outside_memory_latch", false, |rig| {
        rig.poke(HEADER, &header(blk::T_DISCARD, 0));
        let error = rig.latches(&[segment(HEADER, 16), segment(BASE + SIZE, 16)], &[segment(STATUS, 1)]);
        assert!(matches!(error, QueueError::Address { .. }), "{error}");
    });
}

#[test]
fn good_requests_before_a_bad_one_are_not_lost_in_the_host() {
    unchanged("good_requests_before_a_bad_one_are_not_lost_in_the_host", false, |rig| {
        rig.poke(HEADER, &header(blk::T_IN, 0));
        for number in 0..10 {
            rig.add(
                &[segment(HEADER, 16)],
                &[segment(ROOM + number * 4096, 4096), segment(STATUS + number, 1)],
            );
        }
        rig.add(&[segment(HEADER, 15)], &[segment(STATUS, 1)]);
        assert!(matches!(rig.serve(), Err(ServeError::Queue(QueueError::Request { .. }))));
        let drained = rig.handler.drain(&mut rig.live, true);
        assert!(!drained.interrupt, "a latched queue publishes nothing");
        assert!(rig.driver.pop_used().unwrap().is_none());
    });
}

#[test]
fn a_sector_beyond_the_end_is_an_error() {
    unchanged("a_sector_beyond_the_end_is_an_error", false, |rig| {
        for sector in [SECTORS, SECTORS + 1, u64::MAX, u64::MAX / 512, u64::MAX / 512 + 1, 1 << 55, 1 << 63] {
            let answer = rig.request(blk::T_IN, sector, &[], 512);
            assert_eq!((answer.status, answer.used), (blk::S_IOERR, 1));
            assert_eq!(answer.data, [UNTOUCHED; 512]);
            assert_eq!(rig.status(blk::T_OUT, sector, &[1; 512]), blk::S_IOERR);
        }
        // The last sector is there, the one after it is not, not even as a second one.
        assert_eq!(rig.request(blk::T_IN, SECTORS - 1, &[], 512).status, blk::S_OK);
        assert_eq!(rig.request(blk::T_IN, SECTORS - 1, &[], 1024).status, blk::S_IOERR);
        assert_eq!(rig.status(blk::T_OUT, SECTORS - 1, &[1; 1024]), blk::S_IOERR);
    });
}

#[test]
fn half_a_sector_of_data_is_an_error() {
    unchanged("half_a_sector_of_data_is_an_error", false, |rig| {
        for len in [1, 511, 513, 1023] {
            let answer = rig.request(blk::T_IN, 0, &[], len);
            assert_eq!((answer.status, answer.used), (blk::S_IOERR, 1));
            assert_eq!(answer.data, vec![UNTOUCHED; len]);
            assert_eq!(rig.status(blk::T_OUT, 0, &vec![1; len]), blk::S_IOERR);
        }
    });
}

#[test]
fn a_transfer_of_nothing_is_done_at_once() {
    unchanged("a_transfer_of_nothing_is_done_at_once", false, |rig| {
        assert_eq!(rig.status(blk::T_IN, 0, &[]), blk::S_OK);
        assert_eq!(rig.status(blk::T_OUT, SECTORS, &[]), blk::S_OK);
        assert_eq!(rig.status(blk::T_OUT, SECTORS + 1, &[]), blk::S_IOERR);
    });
}

#[test]
fn an_unknown_type_is_not_supported() {
    unchanged("an_unknown_type_is_not_supported", false, |rig| {
        for kind in [2, 3, 5, 7, 9, 10, 12, 14, 0x8000_0000, u32::MAX] {
            assert_eq!(rig.status(kind, 0, &[]), blk::S_UNSUPP, "type {kind}");
            let answer = rig.request(kind, 0, &[1; 512], 512);
            assert_eq!(
                (answer.status, answer.used, &answer.data[..]),
                (blk::S_UNSUPP, 1, &[UNTOUCHED; 512][..])
            );
        }
    });
}

#[test]
fn writing_to_a_read_only_disk_is_an_error() {
    unchanged("writing_to_a_read_only_disk_is_an_error", true, |rig| {
        assert_eq!(rig.status(blk::T_OUT, 0, &[1; 512]), blk::S_IOERR);
        assert_eq!(rig.status(blk::T_DISCARD, 0, &range(0, 8, 0)), blk::S_IOERR);
        assert_eq!(rig.status(blk::T_WRITE_ZEROES, 0, &range(0, 8, 0)), blk::S_IOERR);
        assert_eq!(rig.status(blk::T_FLUSH, 0, &[]), blk::S_OK);
        assert_eq!(rig.read(0, 512), pattern(DISK, 20)[..512]);
    });
}

#[test]
fn what_was_not_negotiated_is_not_supported() {
    let file = disk();
    for way in ways("what_was_not_negotiated_is_not_supported") {
        let blk = Blk::open(config(&file, way)).unwrap();
        let mut rig = Rig::with_features(blk, paravane_spec::feature::VERSION_1);
        assert_eq!(rig.status(blk::T_DISCARD, 0, &range(0, 8, 0)), blk::S_UNSUPP);
        assert_eq!(rig.status(blk::T_WRITE_ZEROES, 0, &range(0, 8, 0)), blk::S_UNSUPP);
    }
    assert!(content(&file) == pattern(DISK, 20));
}

#[test]
fn bad_ranges_are_errors_and_none_of_the_request_is_done() {
    unchanged("bad_ranges_are_errors_and_none_of_the_request_is_done", false, |rig| {
        for kind in [blk::T_DISCARD, blk::T_WRITE_ZEROES] {
            let good = range(0, 8, 0);
            for bad in [
                range(SECTORS, 1, 0),
                range(SECTORS - 1, 2, 0),
                range(0, u32::MAX, 0),
                range(u64::MAX, 1, 0),
                range(u64::MAX, u32::MAX, 0),
                range(u64::MAX - 7, 8, 0),
                range(SECTORS + 1, 0, 0),
            ] {
                assert_eq!(rig.status(kind, 0, &bad), blk::S_IOERR, "{bad:?}");
                assert_eq!(rig.status(kind, 0, &[good.clone(), bad].concat()), blk::S_IOERR);
            }
        }
    });
}

#[test]
fn bad_range_flags_are_not_supported() {
    unchanged("bad_range_flags_are_not_supported", false, |rig| {
        for flags in [blk::WRITE_ZEROES_F_UNMAP, 2, 0x8000_0000, u32::MAX] {
            assert_eq!(rig.status(blk::T_DISCARD, 0, &range(0, 8, flags)), blk::S_UNSUPP);
        }
        for flags in [2, 3, 0x8000_0000, u32::MAX] {
            assert_eq!(rig.status(blk::T_WRITE_ZEROES, 0, &range(0, 8, flags)), blk::S_UNSUPP);
        }
        let both = [range(0, 8, 0), range(8, 8, 4)].concat();
        assert_eq!(rig.status(blk::T_WRITE_ZEROES, 0, &both), blk::S_UNSUPP);
    });
}

#[test]
fn no_ranges_too_many_and_pieces_of_one_are_errors() {
    unchanged("no_ranges_too_many_and_pieces_of_one_are_errors", false, |rig| {
        for kind in [blk::T_DISCARD, blk::T_WRITE_ZEROES] {
            assert_eq!(rig.status(kind, 0, &[]), blk::S_IOERR);
            assert_eq!(rig.status(kind, 0, &range(0, 1, 0).repeat(17)), blk::S_IOERR);
            assert_eq!(rig.status(kind, 0, &range(0, 1, 0).repeat(4096)), blk::S_IOERR);
            for len in [1, 15, 17, 31] {
                assert_eq!(rig.status(kind, 0, &range(0, 1, 0).repeat(2)[..len]), blk::S_IOERR);
            }
        }
    });
}

#[test]
fn ranges_larger_than_announced_are_errors() {
    // A sparse disk with that many sectors.
    let file = NamedTempFile::new().unwrap();
    file.as_file().set_len(4 << 30).unwrap();
    for way in ways("ranges_larger_than_announced_are_errors") {
        let mut rig = rig(&file, way);
        for (kind, max) in [(blk::T_DISCARD, 1 << 22), (blk::T_WRITE_ZEROES, 1 << 16)] {
            assert_eq!(rig.status(kind, 0, &range(0, max + 1, 0)), blk::S_IOERR);
            assert_eq!(rig.status(kind, 0, &range(0, max, 0)), blk::S_OK);
        }
    }
}

#[test]
fn buffers_may_overlap_each_other() {
    for way in ways("buffers_may_overlap_each_other") {
        let file = disk();
        let mut rig = rig(&file, way);
        // Two halves of a read into the same bytes, the status on top of them, and all on top of
        // the header.
        rig.poke(ROOM, &header(blk::T_IN, 0));
        let used = rig
            .one(&[segment(ROOM, 16)], &[segment(ROOM, 512), segment(ROOM, 512), segment(ROOM + 7, 1)])
            .unwrap();
        assert_eq!(used.len, 1025);
        assert_eq!(rig.peek(ROOM + 7, 1), [blk::S_OK]);
        // A write whose status is one of the bytes that it writes: those go to the disk as they
        // were.
        rig.poke(PAYLOAD, &header(blk::T_OUT, 1));
        rig.poke(PAYLOAD + 16, &[0x77; 512]);
        rig.one(&[segment(PAYLOAD, 528)], &[segment(PAYLOAD + 100, 1)]).unwrap();
        assert_eq!(rig.peek(PAYLOAD + 100, 1), [blk::S_OK]);
        assert_eq!(content(&file)[512..1024], [0x77; 512]);
        // A header that is its own status.
        rig.poke(HEADER, &header(blk::T_FLUSH, 0));
        rig.one(&[segment(HEADER, 16)], &[segment(HEADER, 16)]).unwrap();
        assert_eq!(rig.peek(HEADER + 15, 1), [blk::S_OK]);
    }
}

#[test]
fn a_read_over_the_used_ring_spoils_only_the_drivers_view() {
    let file = image(&[0xff; DISK]);
    for way in ways("a_read_over_the_used_ring_spoils_only_the_drivers_view") {
        let mut rig = rig(&file, way);
        rig.poke(HEADER, &header(blk::T_IN, 0));
        let used_ring = rig.addresses.device;
        rig.add(&[segment(HEADER, 16)], &[segment(used_ring, 2048), segment(STATUS, 1)]);
        while rig.live.queue().in_flight() > 0 || rig.serve().unwrap().taken > 0 {
            rig.serve().unwrap();
        }
        // The index that was published is the device's own, not what it found in memory.
        assert_eq!(rig.peek(used_ring + split::USED_IDX as u64, 2), 1u16.to_le_bytes());
        assert_eq!(rig.live.queue().error(), None);
    }
}

#[test]
fn a_read_over_the_available_ring_latches() {
    let file = image(&[0xff; DISK]);
    for way in ways("a_read_over_the_available_ring_latches") {
        let mut rig = rig(&file, way);
        rig.poke(HEADER, &header(blk::T_IN, 0));
        rig.add(&[segment(HEADER, 16)], &[segment(rig.addresses.driver, 512), segment(STATUS, 1)]);
        let error = loop {
            match rig.serve() {
                Ok(_) => {}
                Err(ServeError::Queue(error)) => break error,
                Err(other) => panic!("{other}"),
            }
        };
        assert!(matches!(error, QueueError::AvailIndex { new: 0xffff, .. }), "{error}");
    }
}

#[test]
fn a_read_over_the_descriptors_of_others_is_theirs_to_bear() {
    let file = image(&[0xff; DISK]);
    for way in ways("a_read_over_the_descriptors_of_others_is_theirs_to_bear") {
        let mut rig = rig(&file, way);
        rig.poke(HEADER, &header(blk::T_IN, 0));
        rig.one(&[segment(HEADER, 16)], &[segment(rig.addresses.desc, 4096), segment(STATUS, 1)]).unwrap();
        // The driver's side writes a good descriptor over the rubbish: the queue goes on.
        assert_eq!(rig.status(blk::T_FLUSH, 0, &[]), blk::S_OK);
    }
}

#[test]
fn a_write_reads_the_ring_like_any_memory() {
    for way in ways("a_write_reads_the_ring_like_any_memory") {
        let file = disk();
        let mut rig = rig(&file, way);
        rig.poke(HEADER, &header(blk::T_OUT, 0));
        rig.one(&[segment(HEADER, 16), segment(rig.addresses.desc, 4096)], &[segment(STATUS, 1)]).unwrap();
        assert_eq!(rig.peek(STATUS, 1), [blk::S_OK]);
    }
}

#[test]
fn a_file_that_became_shorter_is_an_error_to_read() {
    for way in ways("a_file_that_became_shorter_is_an_error_to_read") {
        let file = disk();
        let mut rig = rig(&file, way);
        file.as_file().set_len(1000).unwrap();
        assert_eq!(rig.request(blk::T_IN, 8, &[], 512).status, blk::S_IOERR);
        // Data up to the end is read; the used length says how much.
        let answer = rig.request(blk::T_IN, 0, &[], 2048);
        assert_eq!((answer.status, answer.used), (blk::S_IOERR, 1001));
        assert_eq!(answer.data[..1000], pattern(DISK, 20)[..1000]);
        assert_eq!(rig.read(0, 512), pattern(DISK, 20)[..512]);
        // Writing makes it longer again.
        assert_eq!(rig.status(blk::T_OUT, 8, &[3; 512]), blk::S_OK);
        assert_eq!(rig.read(8, 512), [3; 512]);
    }
}

#[test]
fn a_file_may_shrink_and_grow_during_io() {
    for way in ways("a_file_may_shrink_and_grow_during_io") {
        let file = disk();
        let mut rig = rig(&file, way);
        let stop = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    file.as_file().set_len(700).unwrap();
                    file.as_file().set_len(DISK as u64).unwrap();
                    file.as_file().write_all_at(&[1; 512], 4096).unwrap();
                }
            });
            for number in 0..300 {
                let answer = rig.request(blk::T_IN, number % 64, &[], 32 * 1024);
                match answer.status {
                    blk::S_OK => assert_eq!(answer.used, 32 * 1024 + 1),
                    blk::S_IOERR => assert!(answer.used <= 32 * 1024),
                    other => panic!("status {other}"),
                }
                assert_eq!(rig.live.queue().error(), None);
            }
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
        });
    }
}
