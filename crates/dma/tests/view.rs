//! File views, and what the owners of files do to them meanwhile.
#![cfg(not(any(miri, loom)))]
use paravane_dma::{
    Alarm, Backing, DirtyLog, DirtyPages, FileRange, FileView, HostSlice, MappingQuota, Memory, NotWritten,
    Region, RegionConfig, Segment, is_lost,
};
use paravane_test_support::wait_until;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

const PAGE: usize = 4096;
const LEN: usize = 64 * PAGE;

fn filled(byte: u8) -> OwnedFd {
    let file = File::from(memfd_create(c"an-image", MemfdFlags::CLOEXEC).unwrap());
    file.write_all_at(&[byte; LEN], 0).unwrap();
    file.into()
}

fn view(file: &OwnedFd, writable: bool) -> FileView {
    FileView::new(file.try_clone().unwrap(), LEN as u64, writable, &Alarm::new().unwrap()).unwrap()
}

/// Guest memory, and all of it as a piece.
fn memory() -> (Arc<Region>, HostSlice) {
    let config = RegionConfig { gpa: 0, size: LEN as u64, backing: Backing::Pages, writable: true };
    let region = Region::new(config).unwrap();
    let piece = HostSlice { ptr: region.host().as_ptr(), len: LEN };
    (region, piece)
}

fn part(piece: &HostSlice, from: usize, len: usize) -> HostSlice {
    assert!(from + len <= piece.len);
    HostSlice { ptr: piece.ptr.wrapping_add(from), len }
}

fn bytes(piece: &HostSlice) -> Vec<u8> {
    let mut out = vec![0; piece.len];
    // SAFETY: the region that it is in lives.
    unsafe { piece.read(&mut out) };
    out
}

#[test]
fn what_is_copied_is_in_the_file_and_the_other_way_round() {
    let file = filled(1);
    let (_region, all) = memory();
    let view = view(&file, true);
    let pattern: Vec<u8> = (0..LEN).map(|at| (at * 7 + at / 256) as u8).collect();
    // SAFETY: the region lives, and is writable.
    unsafe { all.write(&pattern) };
    let mut expected = vec![1; LEN];
    // Short and long, at odd offsets, and all of it.
    for (to, from, len) in [(0, 5, 1), (4095, 77, 2), (100, 3, 5000), (512, 1024, 130 * 512), (0, 0, LEN)] {
        // SAFETY: as above.
        assert_eq!(unsafe { view.write(to as u64, &part(&all, from, len)) }, Ok(()));
        expected[to..to + len].copy_from_slice(&pattern[from..from + len]);
        let mut found = vec![0; LEN];
        File::from(file.try_clone().unwrap()).read_exact_at(&mut found, 0).unwrap();
        assert!(found == expected, "{len} bytes at {to}");
    }
    // SAFETY: as above.
    unsafe { all.write(&[0; LEN]) };
    // SAFETY: as above.
    assert!(unsafe { view.read(4097, &part(&all, 3, 9000)) });
    assert!(bytes(&part(&all, 3, 9000)) == expected[4097..13097]);
    assert_eq!((bytes(&part(&all, 2, 1)), bytes(&part(&all, 9003, 1))), (vec![0], vec![0]));
    assert!(!view.lost());
}

#[test]
fn spans_are_copied_and_noted() {
    let file = filled(1);
    let (region, all) = memory();
    let memory = Memory::new(vec![region]).unwrap();
    let log = DirtyLog::new(memory.end(), PAGE as u64).unwrap();
    memory.start_log(log.clone(), Duration::from_secs(60)).unwrap();
    let view = view(&file, true);
    let mut handle = memory.handle();
    let guard = handle.enter();
    let into = guard.write_span(PAGE as u64 + 8, PAGE).expect("RAM");
    into.expect_first::<512>();
    view.expect_first::<false, 512>(0, PAGE);
    assert!(view.read_span(100, &into));
    assert!(!view.read_span(LEN as u64 - PAGE as u64 + 1, &into), "it has no more");
    assert!(bytes(&part(&all, PAGE + 8, PAGE)) == [1; PAGE]);
    assert_eq!(bytes(&part(&all, PAGE + 7, 1)), [0]);
    // From two pieces of a buffer, of which the second one has it.
    let segments = [Segment { addr: 0, len: 16 }, Segment { addr: 0, len: 600 }];
    let from = guard.read_span_of(&segments, 16, 600).expect("RAM");
    from.expect_first::<512>();
    assert_eq!(view.write_span(5, &from), Ok(()));
    assert_eq!(view.write_span(LEN as u64, &from), Err(NotWritten::Outside));
    drop(guard);
    let mut found = vec![0; 700];
    File::from(file.try_clone().unwrap()).read_exact_at(&mut found, 0).unwrap();
    assert!(found[..5] == [1; 5] && found[5..605] == [0; 600] && found[605..] == [1; 95]);
    let mut pages = DirtyPages::new(0, LEN as u64, PAGE as u64).unwrap();
    log.harvest(&mut pages);
    assert_eq!(pages.iter().collect::<Vec<_>>(), [PAGE as u64, 2 * PAGE as u64]);
}

#[test]
fn a_view_for_reading_is_not_written() {
    let file = filled(1);
    let (_region, all) = memory();
    let view = view(&file, false);
    // SAFETY: the region lives.
    assert_eq!(unsafe { view.write(0, &all) }, Err(NotWritten::ReadOnly));
}

#[test]
fn nothing_is_done_beyond_its_end() {
    let file = filled(1);
    let (_region, all) = memory();
    let view = view(&file, true);
    for offset in [1, LEN as u64, LEN as u64 + 1, u64::MAX, u64::MAX - LEN as u64 + 1] {
        // SAFETY: the region lives, and is writable.
        unsafe {
            assert!(!view.read(offset, &all));
            assert_eq!(view.write(offset, &all), Err(NotWritten::Outside));
        }
    }
    assert!(bytes(&all).iter().all(|byte| *byte == 0));
    // SAFETY: as above.
    assert!(unsafe { view.read(LEN as u64, &part(&all, 0, 0)) }, "nothing is there");
}

#[test]
fn a_file_that_is_not_there_is_not_mapped() {
    let file = filled(1);
    let alarm = Alarm::new().unwrap();
    assert!(FileView::new(file.try_clone().unwrap(), LEN as u64 + 1, true, &alarm).is_err());
    let null = File::open("/dev/null").unwrap();
    assert!(FileView::new(null.into(), 1, false, &alarm).is_err());
}

/// Threads read a file that shrinks. A read that is not lost is correct.
#[test]
fn who_finds_it_not_lost_has_not_read_zeroes() {
    let good = AtomicU64::new(0);
    for _ in 0..100 {
        let file = filled(0x5a);
        let view = view(&file, false);
        let before = good.load(Ordering::Relaxed);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    let (_region, all) = memory();
                    loop {
                        // SAFETY: the region lives, and is writable.
                        assert!(unsafe { view.read(0, &all) });
                        if view.lost() {
                            return;
                        }
                        assert!(bytes(&all).iter().all(|byte| *byte == 0x5a));
                        good.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
            // While they read: at least once before.
            wait_until("a good read", || good.load(Ordering::Relaxed) > before);
            ftruncate(&file, 0).unwrap();
        });
        assert!(view.lost());
    }
}

/// A thread writes from memory that is lost meanwhile.
///
/// Each byte of the file keeps its value or gets the given one.
#[test]
fn zeroes_in_the_place_of_what_is_gone_are_not_written() {
    for _ in 0..100 {
        let (file, theirs) = (filled(1), filled(0x5a));
        let view = view(&file, true);
        let alarm = Alarm::new().unwrap();
        let range = FileRange { gpa: 0, size: LEN as u64, offset: 0, writable: true };
        let region =
            Region::guarded(range, theirs.try_clone().unwrap(), &alarm, &MappingQuota::default()).unwrap();
        let all = HostSlice { ptr: region.host().as_ptr(), len: LEN };
        assert!(!is_lost(&[all]));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // SAFETY: the region lives.
                while unsafe { view.write(0, &all) } == Ok(()) {}
            });
            std::thread::sleep(std::time::Duration::from_micros(300));
            ftruncate(&theirs, 0).unwrap();
        });
        assert!(region.lost() && is_lost(&[all]) && alarm.take());
        let (_other, elsewhere) = memory();
        assert!(!is_lost(&[elsewhere]) && is_lost(&[elsewhere, part(&all, 5, 1)]));
        // SAFETY: as above.
        assert_eq!(unsafe { view.write(0, &part(&all, 0, 512)) }, Err(NotWritten::Lost));
        assert!(!view.lost(), "it is the memory that is gone, and not the file");
        let mut found = vec![0; LEN];
        File::from(file).read_exact_at(&mut found, 0).unwrap();
        assert!(found.iter().all(|byte| *byte != 0));
        drop(region);
        assert!(!is_lost(&[all]), "unmapped, or another mapping by now");
    }
}
