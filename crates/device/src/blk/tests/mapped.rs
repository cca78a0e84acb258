//! Images in memory, copied without system calls where possible.
use super::*;
use crate::rig::{BASE, SIZE};
use crate::{Device as _, Rest};
use paravane_dma::{Alarm, FileRange, HostSlice, MappingQuota, Region};
use paravane_store::{Job, Pieces, StoreQueue};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::collections::VecDeque;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::ptr::NonNull;

const DISK: usize = 4 << 20;

/// An image of memory, all of which is a hole, and a disk of it.
fn disk() -> (File, Rig<Blk>) {
    let memory = File::from(memfd_create(c"image", MemfdFlags::CLOEXEC).unwrap());
    memory.set_len(DISK as u64).unwrap();
    let rig = of(&memory);
    (memory, rig)
}

/// By which it is opened anew, and not locked yet.
fn path(memory: &File) -> String {
    format!("/proc/self/fd/{}", memory.as_raw_fd())
}

fn of(memory: &File) -> Rig<Blk> {
    let rig = Rig::new(Blk::open(BlkConfig::new(path(memory))).unwrap());
    assert!(is_mapped(&rig.device));
    rig
}

/// kB that the image takes.
fn taken(memory: &File) -> u64 {
    memory.metadata().unwrap().blocks() / 2
}

#[test]
fn jobs_are_done_when_they_are_submitted_or_given_up_before() {
    let (memory, rig) = disk();
    let mut engine = rig.device.current.attached().engine.queue(8).unwrap();
    let mut data = pattern(3 * 512, 80);
    let mut slices: Vec<_> =
        data.chunks_mut(512).map(|part| HostSlice { ptr: part.as_mut_ptr(), len: part.len() }).collect();
    let mut jobs = slices.iter_mut().enumerate().map(|(number, slice)| {
        let pieces = Pieces { first: NonNull::from(slice), count: 1 };
        (number as u16, Job::Write { pieces, offset: number as u64 * 512, durable: false })
    });
    let mut push = |engine: &mut Box<dyn StoreQueue>, count| {
        for (head, job) in jobs.by_ref().take(count) {
            // SAFETY: slices and data live until the outcomes are reaped.
            unsafe { engine.push(head, job) }.unwrap();
        }
    };
    let reaped = |engine: &mut Box<dyn StoreQueue>| {
        let mut outcomes = VecDeque::new();
        engine.reap(&mut outcomes);
        outcomes.iter().map(|outcome| (outcome.head(), outcome.result())).collect::<Vec<_>>()
    };
    push(&mut engine, 1);
    assert_eq!((engine.rest(false), reaped(&mut engine)), (Rest::Serve, vec![]));
    engine.cancel();
    assert_eq!((engine.rest(false), taken(&memory)), (Rest::Serve, 0), "nothing was written");
    assert_eq!(reaped(&mut engine), [(0, -libc::ECANCELED)]);
    push(&mut engine, 2);
    engine.submit().unwrap();
    engine.cancel();
    assert_eq!(reaped(&mut engine), [(1, 512), (2, 512)]);
    assert_ne!(engine.rest(false), Rest::Serve);
    let mut written = vec![0; 3 * 512];
    memory.read_exact_at(&mut written, 0).unwrap();
    data[..512].fill(0);
    assert!(written == data);
}

#[test]
fn what_is_not_there_is_not_made_by_reading_it() {
    let (memory, mut rig) = disk();
    for sector in (0..DISK / 512).step_by(128) {
        assert!(rig.read(sector as u64, 65536).iter().all(|byte| *byte == 0));
    }
    assert_eq!(taken(&memory), 0);
    // Writing part of a page allocates the page, and not its neighbours.
    assert_eq!(rig.status(blk::T_OUT, 17, &pattern(512, 70)), blk::S_OK);
    assert_eq!(rig.read(17, 512), pattern(512, 70));
    let mut around = vec![0; 65536];
    around[17 * 512..18 * 512].copy_from_slice(&pattern(512, 70));
    assert!(rig.read(0, 65536) == around);
    assert_eq!(taken(&memory), 4);
    // Discarded pages are gone, and reading does not allocate them again.
    let whole = pattern(65536, 71);
    assert_eq!(rig.status(blk::T_OUT, 0, &whole), blk::S_OK);
    assert_eq!((taken(&memory), rig.read(0, 65536) == whole), (64, true));
    assert_eq!(rig.status(blk::T_DISCARD, 0, &range(16, 64, 0)), blk::S_OK);
    let zeroes = range(96, 8, blk::WRITE_ZEROES_F_UNMAP);
    assert_eq!(rig.status(blk::T_WRITE_ZEROES, 0, &zeroes), blk::S_OK);
    let mut expected = whole;
    expected[16 * 512..80 * 512].fill(0);
    expected[96 * 512..104 * 512].fill(0);
    assert!(rig.read(0, 65536) == expected);
    assert_eq!(taken(&memory), 64 - 32 - 4);
}

#[test]
fn a_batch_of_all_kinds_is_done_in_one_serve() {
    let (memory, rig) = disk();
    drop(rig);
    memory.write_all_at(&pattern(DISK / 2, 77), 0).unwrap();
    let mut rig = of(&memory);
    // By number: in one piece, in two, a hole (a system call), no transfer, out of range.
    let count = 60;
    let sector = |number: u64| match number % 5 {
        2 => (DISK / 2 / 512) as u64 + number * 8,
        4 => (DISK / 512) as u64,
        _ => number * 8,
    };
    for number in 0..count {
        let kind = if number % 5 == 3 { blk::T_GET_ID } else { blk::T_IN };
        rig.poke(HEADER + number * 16, &header(kind, sector(number)));
        let (room, status) = (ROOM + number * 8192, segment(STATUS + number, 1));
        rig.poke(STATUS + number, &[UNTOUCHED]);
        let data = match number % 5 {
            1 => vec![segment(room, 512), segment(room + 4096, 3584), status],
            _ => vec![segment(room, 4096), status],
        };
        rig.driver.add(&[segment(HEADER + number * 16, 16)], &data).unwrap();
    }
    rig.driver.publish();
    let served = rig.serve().unwrap();
    assert_eq!((u64::from(served.taken), u64::from(served.completed)), (count, count));
    for number in 0..count {
        let (room, status) = (ROOM + number * 8192, rig.peek(STATUS + number, 1)[0]);
        assert_eq!(status, if number % 5 == 4 { blk::S_IOERR } else { blk::S_OK });
        let all = &pattern(DISK / 2, 77);
        let expected = &all[number as usize * 4096..][..4096];
        match number % 5 {
            0 => assert!(rig.peek(room, 4096) == expected),
            1 => assert!(
                rig.peek(room, 512) == expected[..512] && rig.peek(room + 4096, 3584) == expected[512..]
            ),
            2 => assert!(rig.peek(room, 4096) == [0; 4096]),
            _ => {}
        }
    }
    assert_eq!(taken(&memory), (DISK / 2 / 1024) as u64);
}

#[test]
fn transfers_before_a_broken_request_are_done() {
    let (memory, mut rig) = disk();
    let data = pattern(4096, 78);
    assert_eq!(rig.status(blk::T_OUT, 0, &pattern(4096, 79)), blk::S_OK);
    rig.poke(HEADER, &header(blk::T_OUT, 0));
    rig.poke(PAYLOAD, &data);
    rig.driver.add(&[segment(HEADER, 16), segment(PAYLOAD, 4096)], &[segment(STATUS, 1)]).unwrap();
    rig.driver.add(&[segment(HEADER, 15)], &[segment(STATUS, 1)]).unwrap();
    rig.driver.publish();
    assert!(matches!(rig.serve(), Err(ServeError::Queue(QueueError::Request { .. }))));
    let mut found = vec![0; 4096];
    memory.read_exact_at(&mut found, 0).unwrap();
    assert!(found == data);
}

#[test]
fn data_that_was_there_before_is_known() {
    let (memory, rig) = disk();
    drop(rig);
    for at in [0, 8192, DISK as u64 - 512] {
        memory.write_all_at(&pattern(512, at), at).unwrap();
    }
    let before = taken(&memory);
    let mut rig = of(&memory);
    for at in [0, 8192, DISK as u64 - 512] {
        assert_eq!(rig.read(at / 512, 512), pattern(512, at));
    }
    // Writes through the mapping reach the file, and writes to the file show in it.
    let data = pattern(200 * 1024, 72);
    for _ in 0..2 {
        assert_eq!(rig.status(blk::T_OUT, 8, &data), blk::S_OK);
        let mut found = vec![0; data.len()];
        memory.read_exact_at(&mut found, 4096).unwrap();
        assert!(found == data);
        memory.write_all_at(&[9; 512], 8192).unwrap();
        assert_eq!(rig.read(16, 512), [9; 512]);
    }
    assert!(taken(&memory) > before);
}

#[test]
fn a_file_that_becomes_shorter_is_used_by_system_calls_from_then_on() {
    let (memory, mut rig) = disk();
    let data = pattern(65536, 73);
    for sector in [0, 2048] {
        assert_eq!(rig.status(blk::T_OUT, sector, &data), blk::S_OK);
        assert!(rig.read(sector, 65536) == data);
    }
    memory.set_len(1 << 20).unwrap();
    let answer = rig.request(blk::T_IN, 2048, &[], 4096);
    assert_eq!((answer.status, answer.used), (blk::S_IOERR, 1));
    assert!(rig.read(0, 65536) == data, "the rest is as it was");
    // A write makes the file longer again, as it does with other disks.
    let other = pattern(65536, 74);
    assert_eq!(rig.status(blk::T_OUT, 2048, &other), blk::S_OK);
    assert!(rig.read(2048, 65536) == other);
    let mut found = vec![0; 65536];
    memory.read_exact_at(&mut found, 1 << 20).unwrap();
    assert!(found == other);
}

#[test]
fn an_image_that_is_only_read_is_mapped_so() {
    let (memory, rig) = disk();
    drop(rig);
    memory.write_all_at(&pattern(4096, 75), 0).unwrap();
    let config = BlkConfig { read_only: true, ..BlkConfig::new(path(&memory)) };
    let mut rig = Rig::new(Blk::open(config).unwrap());
    assert!(is_mapped(&rig.device));
    assert_eq!(rig.read(0, 4096), pattern(4096, 75));
    assert_eq!(rig.status(blk::T_OUT, 0, &[1; 512]), blk::S_IOERR);
    assert_eq!(rig.read(0, 4096), pattern(4096, 75));
}

#[test]
fn memory_that_is_gone_is_not_written_to_the_disk() {
    let (_memory, mut rig) = disk();
    let before = pattern(65536, 76);
    assert_eq!(rig.status(blk::T_OUT, 0, &before), blk::S_OK);
    let theirs = memfd_create(c"a-client", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&theirs, 1 << 20).unwrap();
    let range = FileRange { gpa: BASE + SIZE, size: 1 << 20, offset: 0, writable: true };
    let alarm = Alarm::new().unwrap();
    let region =
        Region::guarded(range, theirs.try_clone().unwrap(), &alarm, &MappingQuota::default()).unwrap();
    rig.memory.replace(vec![rig.region.clone(), region.clone()]).unwrap();
    let write = |rig: &mut Rig<Blk>, len| {
        rig.poke(HEADER, &header(blk::T_OUT, 0));
        rig.one(&[segment(HEADER, 16), segment(BASE + SIZE + 512, len)], &[segment(STATUS, 1)]).unwrap();
        rig.peek(STATUS, 1)[0]
    };
    rig.poke(BASE + SIZE + 512, &before[..8192]);
    assert_eq!(write(&mut rig, 8192), blk::S_OK);
    ftruncate(&theirs, 4096).unwrap();
    // First it is found out in the middle of the copy, then it is known.
    for lost in [false, true] {
        assert_eq!(region.lost(), lost);
        assert_eq!(write(&mut rig, 65536), blk::S_IOERR);
        assert!(alarm.take() != lost);
    }
    assert!(rig.read(0, 65536) == before);
}

#[test]
fn a_retired_disk_holds_no_lock() {
    let memory = File::from(memfd_create(c"image", MemfdFlags::CLOEXEC).unwrap());
    memory.set_len(DISK as u64).unwrap();
    let config = || BlkConfig::new(path(&memory));
    let disk = Box::new(Blk::open(config()).unwrap());
    assert!(is_mapped(&disk));
    let mapping = disk.retire().expect("the mapping is left");
    drop(Blk::open(config()).unwrap());
    drop(mapping);
    // Mapped by the description that holds the lock.
    let file = File::options().read(true).write(true).open(path(&memory)).unwrap();
    let disk = Box::new(Blk::of(file, config()).unwrap());
    assert!(is_mapped(&disk) && disk.retire().is_none());
    drop(Blk::open(config()).unwrap());
}

#[test]
fn a_disk_on_a_shared_thread_copies_a_little_at_a_time() {
    // 32 reads of 128 KiB are there at once, as from a guest that reads without a pause.
    const READS: u64 = 32;
    const LEN: usize = 128 << 10;
    let takes = |shares: bool| {
        let (_memory, mut rig) = disk();
        rig.live.share_thread(shares);
        let mut takes = Vec::new();
        for round in 0..2 {
            for read in 0..READS {
                rig.poke(HEADER + 16 * read, &header(blk::T_IN, 0));
                let room = [segment(ROOM, LEN), segment(STATUS + read, 1)];
                rig.driver.add(&[segment(HEADER + 16 * read, 16)], &room).unwrap();
            }
            rig.driver.publish();
            let mut done = 0;
            while done < READS {
                let served = rig.serve().unwrap();
                assert_eq!(served.taken, served.completed);
                done += u64::from(served.taken);
                takes.push(served.taken);
            }
            while rig.driver.pop_used().unwrap().is_some() {}
            assert_eq!(done, READS, "round {round}");
        }
        takes
    };
    // The first turn cannot know how large requests are.
    assert_eq!(takes(false), [32, 32]);
    assert!(takes(true)[1..].iter().all(|taken| *taken == 2), "{:?}", takes(true));
}

#[test]
fn a_sparse_image_of_any_size_takes_bounded_memory() {
    for bytes in [1 << 50, 1 << 60, i64::MAX as u64 / 512 * 512] {
        let memory = File::from(memfd_create(c"image", MemfdFlags::CLOEXEC).unwrap());
        memory.set_len(bytes).unwrap();
        let unlocked = Blk::prepare(BlkConfig::new(path(&memory))).unwrap();
        let disk = unlocked.lock().unwrap().unwrap();
        assert_eq!(disk.size(), bytes);
        let mut rig = Rig::new(disk);
        for sector in [0, bytes / 1024, bytes / 512 - 8] {
            assert_eq!(rig.status(blk::T_OUT, sector, &pattern(4096, sector)), blk::S_OK);
            assert_eq!(rig.read(sector, 4096), pattern(4096, sector));
        }
        assert!(taken(&memory) < 64, "{} kB", taken(&memory));
    }
}
