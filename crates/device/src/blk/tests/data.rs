//! Data arrives, in every framing, in every way of serving it.
use super::*;
use crate::latency::rig::Watch;
use crate::{Device, Rest};
use std::os::unix::fs::{FileExt, MetadataExt};

const DISK: usize = 1 << 20;

#[test]
fn what_is_written_is_read_and_is_in_the_file() {
    for way in ways("what_is_written_is_read_and_is_in_the_file") {
        let file = image(&pattern(DISK, 3));
        let mut rig = rig(&file, way);
        let mut expected = pattern(DISK, 3);
        for (sector, sectors) in [(0, 1), (1, 1), (7, 9), (100, 256), (2047, 1), (0, 2048)] {
            let (from, len) = (sector * 512, sectors * 512);
            assert_eq!(rig.read(sector as u64, len), expected[from..from + len]);
            let data = pattern(len, from as u64 + 99);
            assert_eq!(rig.status(blk::T_OUT, sector as u64, &data), blk::S_OK);
            expected[from..from + len].copy_from_slice(&data);
            assert_eq!(rig.read(sector as u64, len), data);
            assert_eq!(rig.status(blk::T_FLUSH, 0, &[]), blk::S_OK);
            assert!(content(&file) == expected);
        }
    }
}

#[test]
fn framing_is_the_drivers_choice() {
    for way in ways("framing_is_the_drivers_choice") {
        let file = image(&pattern(DISK, 4));
        let mut rig = rig(&file, way);
        let data = pattern(1024, 5);
        // Write: header over three descriptors, the last of them with the first bytes of the data,
        // the rest over three more; two bytes of room, of which the second is the status.
        let mut bytes = header(blk::T_OUT, 6).to_vec();
        bytes.extend(&data);
        rig.poke(PAYLOAD, &bytes);
        rig.poke(STATUS, &[UNTOUCHED; 2]);
        let mut at = PAYLOAD;
        let readable: Vec<_> = [5, 7, 4 + 3, 500, 1, 520]
            .into_iter()
            .map(|len| {
                at += len as u64;
                segment(at - len as u64, len)
            })
            .collect();
        assert_eq!(at, PAYLOAD + 16 + 1024);
        let used = rig.one(&readable, &[segment(STATUS, 2)]).unwrap();
        assert_eq!(used.len, 1);
        assert_eq!(rig.peek(STATUS, 2), [UNTOUCHED, blk::S_OK]);

        // Read it back: data over odd pieces, the last of them with the status.
        rig.poke(HEADER, &header(blk::T_IN, 6));
        rig.poke(ROOM, &[UNTOUCHED; 1025]);
        let readable = [segment(HEADER, 3), segment(HEADER + 3, 12), segment(HEADER + 15, 1)];
        let writable = [segment(ROOM, 1), segment(ROOM + 1, 600), segment(ROOM + 601, 424)];
        let used = rig.one(&readable, &writable).unwrap();
        assert_eq!(used.len, 1025);
        assert_eq!(rig.peek(ROOM, 1024), data);
        assert_eq!(rig.peek(ROOM + 1024, 1), [blk::S_OK]);
    }
}

#[test]
fn a_chain_of_many_pieces_is_one_request() {
    for way in ways("a_chain_of_many_pieces_is_one_request") {
        let file = image(&pattern(DISK, 6));
        let mut rig = rig(&file, way);
        rig.poke(HEADER, &header(blk::T_IN, 8));
        // 200 pieces, backwards in memory.
        let pieces: Vec<_> = (0..200)
            .map(|piece| segment(ROOM + (199 - piece) * 512, 512))
            .chain([segment(STATUS, 1)])
            .collect();
        let used = rig.one(&[segment(HEADER, 16)], &pieces).unwrap();
        assert_eq!(used.len, 200 * 512 + 1);
        let mut data = Vec::new();
        for piece in &pieces[..200] {
            data.extend(rig.peek(piece.addr, 512));
        }
        assert!(data == content(&file)[8 * 512..208 * 512]);
    }
}

#[test]
fn discarded_and_zeroed_ranges_read_as_zeroes() {
    for way in ways("discarded_and_zeroed_ranges_read_as_zeroes") {
        let file = image(&pattern(DISK, 7));
        let mut rig = rig(&file, way);
        let mut expected = pattern(DISK, 7);

        // Several ranges, one of them empty; zeroes are promised, with and without unmapping.
        let ranges =
            [range(8, 16, 0), range(100, 1, blk::WRITE_ZEROES_F_UNMAP), range(5, 0, 0), range(2040, 8, 0)]
                .concat();
        assert_eq!(rig.status(blk::T_WRITE_ZEROES, 0, &ranges), blk::S_OK);
        for (sector, sectors) in [(8, 16), (100, 1), (2040, 8)] {
            expected[sector * 512..(sector + sectors) * 512].fill(0);
        }
        assert!(content(&file) == expected);

        // A discard may do nothing, but it may not touch the neighbours, and not make the file
        // shorter.
        let ranges = [range(1024, 512, 0), range(1800, 248, 0)].concat();
        assert_eq!(rig.status(blk::T_DISCARD, 0, &ranges), blk::S_OK);
        let after = content(&file);
        assert_eq!(after.len(), DISK);
        assert!(after[..1024 * 512] == expected[..1024 * 512]);
        assert!(after[1536 * 512..1800 * 512] == expected[1536 * 512..1800 * 512]);

        // Nothing to do is done at once.
        assert_eq!(rig.status(blk::T_DISCARD, 0, &range(0, 0, 0)), blk::S_OK);
    }
}

#[test]
fn a_discard_frees_space_where_the_file_system_can() {
    let file = image(&pattern(DISK, 8));
    file.as_file().sync_all().unwrap();
    let before = file.path().metadata().unwrap().blocks();
    let probe = image(&[1; 8192]);
    let hole = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
    if let Err(why) = rustix::fs::fallocate(probe.as_file(), hole, 0, 4096) {
        crate::rig::skipped("a_discard_frees_space_where_the_file_system_can", why.to_string());
        return;
    }
    for way in ways("a_discard_frees_space_where_the_file_system_can") {
        file.as_file().write_all_at(&pattern(DISK, 8), 0).unwrap();
        file.as_file().sync_all().unwrap();
        let mut rig = rig(&file, way);
        assert_eq!(rig.status(blk::T_DISCARD, 0, &range(0, 2048, 0)), blk::S_OK);
        assert!(file.path().metadata().unwrap().blocks() < before / 2);
        assert!(rig.read(0, DISK).iter().all(|byte| *byte == 0));
    }
}

#[test]
fn many_requests_in_flight_keep_apart() {
    for way in ways("many_requests_in_flight_keep_apart") {
        let file = image(&pattern(DISK, 9));
        let mut rig = rig(&file, way);
        // 240 requests of 4 KiB at once (chains of three in tables of their own), in an odd order,
        // twice.
        for (kind, seed) in [(blk::T_OUT, 10), (blk::T_IN, 10)] {
            for number in 0..240u64 {
                let block = number * 77 % 240;
                let (header_at, status_at) = (HEADER + number * 16, STATUS + number);
                let data_at = ROOM + block * 4096;
                rig.poke(header_at, &header(kind, block * 8));
                rig.poke(status_at, &[UNTOUCHED]);
                let data = segment(data_at, 4096);
                if kind == blk::T_OUT {
                    rig.poke(data_at, &pattern(4096, seed + block));
                    rig.driver.add(&[segment(header_at, 16), data], &[segment(status_at, 1)]).unwrap();
                } else {
                    rig.poke(data_at, &[UNTOUCHED; 4096]);
                    rig.driver.add(&[segment(header_at, 16)], &[data, segment(status_at, 1)]).unwrap();
                }
            }
            rig.driver.publish();
            let used = rig.run().unwrap();
            assert_eq!(used.len(), 240);
            assert_eq!(rig.peek(STATUS, 240), [blk::S_OK; 240]);
            for block in 0..240 {
                assert!(rig.peek(ROOM + block * 4096, 4096) == pattern(4096, seed + block), "block {block}");
            }
        }
    }
}

#[test]
fn queues_work_side_by_side() {
    for way in ways("queues_work_side_by_side") {
        let file = image(&vec![0; DISK]);
        let mut disk = Blk::open(BlkConfig { queues: 4, ..config(&file, way) }).unwrap();
        let features = disk.features();
        let handlers: Vec<_> = (0..4).map(|queue| disk.start_queue(queue, features).unwrap()).collect();
        std::thread::scope(|scope| {
            for (queue, handler) in handlers.into_iter().enumerate() {
                let file = &file;
                scope.spawn(move || {
                    // A separate machine for each queue, all on the same disk.
                    let other = image(&[0; 512]);
                    let dummy = Blk::open(config(&other, EngineChoice::Threads)).unwrap();
                    let mut rig = Rig::with_handler(dummy, features, handler);
                    let base = queue as u64 * 512;
                    for block in 0..64u64 {
                        let data = pattern(4096, base + block);
                        assert_eq!(rig.status(blk::T_OUT, base + block * 8, &data), blk::S_OK);
                        assert_eq!(rig.read(base + block * 8, 4096), data);
                    }
                    assert_eq!(rig.status(blk::T_FLUSH, 0, &[]), blk::S_OK);
                    drop(rig);
                    assert!(content(file).len() == DISK);
                });
            }
        });
        let expected: Vec<u8> = (0..4)
            .flat_map(|queue| (0..64).flat_map(move |block| pattern(4096, queue * 512 + block)))
            .collect();
        assert!(content(&file) == expected);
    }
}

#[test]
fn an_idle_serve_leaves_nothing_to_wake_for() {
    for way in ways("an_idle_serve_leaves_nothing_to_wake_for") {
        let file = image(&vec![0; DISK]);
        let mut rig = rig(&file, way);
        for _ in 0..50 {
            // `run` ends with a serve that found nothing.
            assert_eq!(rig.status(blk::T_OUT, 0, &[1; 65536]), blk::S_OK);
            assert_eq!(rig.status(blk::T_FLUSH, 0, &[]), blk::S_OK);
        }
        // The kernel may still be about to signal what was seen already; then one more round ends
        // it.
        let quiet = (0..10).any(|_| {
            std::thread::sleep(std::time::Duration::from_millis(5));
            let served = rig.serve().unwrap();
            assert_eq!(served, crate::Served::default());
            assert_ne!(rig.handler.rest(true), Rest::Serve, "there is nothing");
            !crate::rig::readable(crate::rig::registered(&mut *rig.handler))
        });
        assert!(quiet);
    }
}

#[test]
fn the_host_can_read_the_image_beside_the_guest() {
    for way in ways("the_host_can_read_the_image_beside_the_guest") {
        let file = image(&pattern(DISK, 11));
        let mut rig = rig(&file, way);
        let host = rig.device.image().unwrap();
        assert_eq!(rig.status(blk::T_OUT, 3, &[0x5a; 512]), blk::S_OK);
        let mut out = [0; 512];
        host.read_exact_at(&mut out, 3 * 512).unwrap();
        assert_eq!(out, [0x5a; 512]);
    }
}

#[test]
fn serving_through_io_uring_allocates_nothing() {
    match io_uring_available() {
        Ok(()) => allocates_nothing(EngineChoice::IoUring),
        Err(why) => skipped("serving_through_io_uring_allocates_nothing", why.to_string()),
    }
}

#[test]
fn serving_at_once_allocates_nothing() {
    allocates_nothing(EngineChoice::Immediate);
}

fn allocates_nothing(way: impl Into<Way>) {
    let file = image(&pattern(DISK, 12));
    let mut rig = rig(&file, way);
    // Its histograms are among what is allocated.
    let _watch = Watch::of(&mut rig.live);
    let round = |number: u64| {
        let kinds =
            [(blk::T_IN, 8), (blk::T_OUT, 16), (blk::T_FLUSH, 0), (blk::T_DISCARD, 0), (blk::T_GET_ID, 0)];
        for (at, (kind, sector)) in (0..).zip(kinds) {
            rig.poke(HEADER + at * 16, &header(kind, sector + number % 8));
        }
        rig.poke(PAYLOAD + 4096, &range(32, 8, 0));
        let header = |at: u64| segment(HEADER + at * 16, 16);
        let status = segment(STATUS, 1);
        for number in 0..12 {
            let room = segment(ROOM + number * 4096, 4096);
            rig.driver.add(&[header(0)], &[room, status]).unwrap();
            rig.driver.add(&[header(1), segment(PAYLOAD, 4096)], &[status]).unwrap();
        }
        rig.driver.add(&[header(2)], &[status]).unwrap();
        rig.driver.add(&[header(3), segment(PAYLOAD + 4096, 16)], &[status]).unwrap();
        rig.driver.add(&[header(4)], &[segment(ROOM, 20), status]).unwrap();
        rig.driver.publish();
        let mut allocated = 0;
        while rig.driver.in_flight() > 0 {
            let before = crate::rig::allocations::count();
            rig.handler.serve(&mut rig.live).unwrap();
            rig.live.latency().finish();
            allocated += crate::rig::allocations::count() - before;
            while rig.driver.pop_used().unwrap().is_some() {}
        }
        allocated
    };
    // Each of the 256 entries gets storage for pieces and for ranges at its first request of a
    // kind. Which entry a request gets is the driver's choice, so that is all that can be said;
    // 16200 requests are served.
    let allocated: u64 = (0..600).map(round).sum();
    assert!((1..=2 * 256).contains(&allocated), "{allocated} allocations");
}
