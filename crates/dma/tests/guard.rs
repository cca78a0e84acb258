//! A client that truncates its memory fails its own device, and nothing else.
#![cfg(not(any(loom, miri)))]

use paravane_dma::{
    Access, Alarm, Backing, DirtyLog, FileRange, HostSlice, LogError, MappingLimits, MappingPool,
    MappingQuota, Memory, MemoryError, Region, RegionConfig, Segment, is_lost,
};
use paravane_test_support::skip;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

const PAGE: u64 = 4096;
const MIB: u64 = 1 << 20;
const HUGE: u64 = 2 * MIB;

/// A file that may shrink.
fn file(size: u64) -> OwnedFd {
    let file = memfd_create(c"a-client", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&file, size).unwrap();
    file
}

fn range(gpa: u64, size: u64, offset: u64) -> FileRange {
    FileRange { gpa, size, offset, writable: true }
}

fn guarded(range: FileRange, file: &OwnedFd) -> (Arc<Region>, Arc<Alarm>) {
    let alarm = Alarm::new().unwrap();
    let region = Region::guarded(range, file.try_clone().unwrap(), &alarm, &MappingQuota::default()).unwrap();
    (region, alarm)
}

fn rings(alarm: &Alarm, patience: Duration) -> bool {
    let timeout = Timespec::try_from(patience).unwrap();
    poll(&mut [PollFd::new(alarm, PollFlags::IN)], Some(&timeout)).unwrap() == 1
}

#[test]
fn a_region_is_the_part_of_the_file_that_was_named() {
    let file = File::from(file(64 * PAGE));
    file.write_all_at(b"before", 4 * PAGE - 6).unwrap();
    file.write_all_at(b"inside", 4 * PAGE).unwrap();
    let file = OwnedFd::from(file);
    let (region, alarm) = guarded(range(0x10_0000, 8 * PAGE, 4 * PAGE), &file);
    assert_eq!((region.gpa(), region.size(), region.offset()), (0x10_0000, 8 * PAGE, 4 * PAGE));
    let memory = Memory::new(vec![region.clone()]).unwrap();
    let mut handle = memory.handle();
    let guard = handle.enter();
    let mut bytes = [0; 6];
    guard.read(0x10_0000, &mut bytes, Access::READ).unwrap();
    assert_eq!(&bytes, b"inside");
    guard.write(0x10_0000 + 8 * PAGE - 4, b"last", Access::WRITE).unwrap();
    assert!(guard.write(0x10_0000 + 8 * PAGE, b"behind", Access::WRITE).is_err());
    let mut last = [0; 6];
    File::from(file).read_exact_at(&mut last, 12 * PAGE - 4).unwrap();
    assert_eq!(&last, b"last\0\0");
    assert!(!region.lost() && !alarm.take());
}

#[test]
fn a_file_that_has_no_such_bytes_is_refused() {
    let alarm = Alarm::new().unwrap();
    let open = |range| Region::guarded(range, file(4 * PAGE), &alarm, &MappingQuota::default());
    assert!(open(range(0, 4 * PAGE, 0)).is_ok());
    for (size, offset) in [(5, 0), (4, 1), (1, 4), (1, u64::MAX / PAGE), (u64::MAX / PAGE, 0)] {
        let error = open(range(0, size * PAGE, offset * PAGE)).unwrap_err();
        assert!(matches!(error, MemoryError::Os { what: "map", .. }), "{error}");
    }
    for range in [range(1, PAGE, 0), range(0, 100, 0), range(0, 0, 0), range(0, PAGE, 100)] {
        assert!(matches!(open(range), Err(MemoryError::Unaligned { .. })));
    }
    assert!(matches!(open(range(u64::MAX - PAGE + 1, 2 * PAGE, 0)), Err(MemoryError::Wraps { .. })));
    let (pipe, _other) = std::io::pipe().unwrap();
    assert!(Region::guarded(range(0, PAGE, 0), pipe.into(), &alarm, &MappingQuota::default()).is_err());
    assert!(
        Region::guarded(
            range(0, PAGE, 0),
            File::open("/dev/zero").unwrap().into(),
            &alarm,
            &MappingQuota::default()
        )
        .is_err()
    );
}

/// A page fault on a file of another file system waits for whoever serves that.
#[test]
fn a_file_that_is_not_in_memory_is_refused_unless_that_is_allowed() {
    let alarm = Alarm::new().unwrap();
    let program = || OwnedFd::from(File::open(std::env::current_exe().unwrap()).unwrap());
    let part = FileRange { writable: false, ..range(0, PAGE, 0) };
    let wanted = "must be in memory: a memfd, or on tmpfs or hugetlbfs (or use --any-memory-file)";
    let error = Region::guarded(part, program(), &alarm, &MappingQuota::default()).unwrap_err();
    assert!(error.to_string().contains(wanted), "{error}");
    let log = DirtyLog::guarded(program(), 0, 8, &alarm, &MappingQuota::default()).unwrap_err();
    assert!(log.to_string().contains(wanted), "{log}");
    let any = MappingPool::new(MappingLimits { any_file: true, ..MappingLimits::of_host() });
    assert!(Region::guarded(part, program(), &alarm, &any.quota()).is_ok());
    // tmpfs, by a name in the file system.
    let path = format!("/dev/shm/paravane-guard-{}", std::process::id());
    let Ok(named) = File::options().read(true).write(true).create_new(true).open(&path) else {
        return skip("a_file_that_is_not_in_memory_is_refused_unless_that_is_allowed", "no /dev/shm");
    };
    std::fs::remove_file(&path).unwrap();
    named.set_len(PAGE).unwrap();
    assert!(Region::guarded(range(0, PAGE, 0), named.into(), &alarm, &MappingQuota::default()).is_ok());
}

#[test]
fn a_file_that_was_opened_to_be_read_makes_a_region_that_is() {
    let made = file(PAGE);
    let path = format!("/proc/self/fd/{}", made.as_raw_fd());
    let alarm = Alarm::new().unwrap();
    let read_only = || OwnedFd::from(File::open(&path).unwrap());
    assert!(Region::guarded(range(0, PAGE, 0), read_only(), &alarm, &MappingQuota::default()).is_err());
    let region = Region::guarded(
        FileRange { writable: false, ..range(0, PAGE, 0) },
        read_only(),
        &alarm,
        &MappingQuota::default(),
    );
    let memory = Memory::new(vec![region.unwrap()]).unwrap();
    let mut handle = memory.handle();
    assert!(handle.enter().write(0, b"no", Access::WRITE).is_err());
    assert!(handle.enter().read(0, &mut [0; 8], Access::READ).is_ok());
}

#[test]
fn a_file_that_shrinks_under_a_thread_fails_its_region_and_not_the_process() {
    let file = file(MIB);
    let (region, alarm) = guarded(range(0, MIB, 0), &file);
    let other_file = self::file(MIB);
    let (other, silent) = guarded(range(MIB, MIB, 0), &other_file);
    let memory = Memory::new(vec![region.clone(), other.clone()]).unwrap();
    let (stop, turns) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for number in 0..2 {
            let (memory, stop, turns) = (&memory, &stop, &turns);
            scope.spawn(move || {
                let mut handle = memory.handle();
                let data = [number + 1; 3000];
                let mut back = [0; 3000];
                while !stop.load(Ordering::Relaxed) {
                    let guard = handle.enter();
                    for at in (0..2 * MIB - PAGE).step_by(40_000) {
                        guard.write(at + 17, &data, Access::WRITE).unwrap();
                        guard.read(at + 17, &mut back, Access::READ).unwrap();
                        guard.read_obj::<u64>(at, Access::READ).unwrap();
                    }
                    turns.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        while turns.load(Ordering::Relaxed) < 10 {
            std::thread::yield_now();
        }
        assert!(!region.lost() && !alarm.take());
        ftruncate(&file, MIB / 2).unwrap();
        assert!(rings(&alarm, paravane_test_support::patience()));
        assert!(region.lost());
        let before = turns.load(Ordering::Relaxed);
        while turns.load(Ordering::Relaxed) < before + 10 {
            std::thread::yield_now();
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert!(alarm.take());
    assert!(!other.lost() && !silent.take());
    // What was written after the loss is private: the remaining part of the file does not change
    // any more.
    let mut handle = memory.handle();
    handle.enter().write(0, b"too late", Access::WRITE).unwrap();
    let mut found = [0; 8];
    File::from(file).read_exact_at(&mut found, 0).unwrap();
    assert_ne!(&found, b"too late");
    assert!(rings(&silent, Duration::ZERO) == silent.take());
}

#[test]
fn what_is_lost_can_be_had_anew() {
    for turn in 0..3_u8 {
        let file = file(16 * PAGE);
        let (region, alarm) = guarded(range(0, 16 * PAGE, 0), &file);
        let memory = Memory::new(vec![region.clone()]).unwrap();
        let mut handle = memory.handle();
        ftruncate(&file, 0).unwrap();
        assert_eq!(handle.enter().read_obj::<u8>(5 * PAGE, Access::READ), Ok(0), "turn {turn}");
        assert!(region.lost() && alarm.take() && !alarm.take());
        // A reference to it, and a mapping.
        let mapping = handle.enter().map(0, 8, Access::READ).unwrap();
        memory.replace(vec![]).unwrap();
        drop((memory, handle, region));
        assert_eq!(mapping.len(), 8);
    }
}

#[test]
fn the_kernel_finds_nothing_where_the_file_has_ended() {
    let file = file(16 * PAGE);
    let (region, alarm) = guarded(range(0, 16 * PAGE, 0), &file);
    let memory = Memory::new(vec![region.clone()]).unwrap();
    let mut handle = memory.handle();
    let mut pieces: Vec<HostSlice> = Vec::new();
    let segments = [Segment { addr: 8 * PAGE, len: 4096 }];
    let guard = handle.enter().map_segments(&segments, 0, 4096, Access::WRITE, &mut pieces).unwrap();
    ftruncate(&file, 4 * PAGE).unwrap();
    let image = memfd_create(c"an-image", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&image, PAGE).unwrap();
    // SAFETY: the mapping guard keeps the pieces mapped; the list has one entry, of the layout of
    // an iovec.
    let moved = unsafe { libc::preadv(image.as_raw_fd(), pieces.as_ptr().cast(), 1, 0) };
    assert_eq!((moved, std::io::Error::last_os_error().raw_os_error()), (-1, Some(libc::EFAULT)));
    assert!(!region.lost() && !alarm.take(), "no access of ours was made");
    drop(guard);
    handle.enter().fill(8 * PAGE, 1, 1, Access::WRITE).unwrap();
    assert!(region.lost() && alarm.take());
}

#[test]
fn pages_of_hugetlbfs_are_guarded_whole() {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
    let made = memfd_create(c"a-client", flags).and_then(|file| ftruncate(&file, 2 * HUGE).map(|()| file));
    let file = match made {
        Ok(file) => file,
        Err(error) => return skip("pages_of_hugetlbfs_are_guarded_whole", error.to_string()),
    };
    let alarm = Alarm::new().unwrap();
    // As QEMU does around the hole below 1 MiB: the range begins inside the first page, and ends
    // inside the second.
    let part = range(0xc_0000, 2 * HUGE - 0xc_0000 - PAGE, 0xc_0000);
    let region = match Region::guarded(part, file.try_clone().unwrap(), &alarm, &MappingQuota::default()) {
        Ok(region) => region,
        Err(error) => return skip("pages_of_hugetlbfs_are_guarded_whole", error.to_string()),
    };
    let memory = Memory::new(vec![region.clone()]).unwrap();
    let mut handle = memory.handle();
    handle.enter().write(0xc_0000, b"first", Access::WRITE).unwrap();
    handle.enter().write(HUGE + 5, b"second", Access::WRITE).unwrap();
    let (whole, _) = guarded(range(0, 2 * HUGE, 0), &file);
    let view = Memory::new(vec![whole]).unwrap();
    let mut bytes = [0; 5];
    view.handle().enter().read(0xc_0000, &mut bytes, Access::READ).unwrap();
    assert_eq!(&bytes, b"first");
    assert!(
        Region::guarded(
            range(0, 2 * HUGE + PAGE, 0),
            file.try_clone().unwrap(),
            &alarm,
            &MappingQuota::default()
        )
        .is_err()
    );
    ftruncate(&file, HUGE).unwrap();
    assert_eq!(handle.enter().read_obj::<u8>(0xc_0000, Access::READ), Ok(b'f'));
    assert!(!region.lost());
    assert_eq!(handle.enter().read_obj::<u8>(HUGE + 5, Access::READ), Ok(0));
    assert!(region.lost() && alarm.take());
}

#[test]
fn a_log_may_shrink_if_it_is_guarded() {
    let file = file(2 * PAGE);
    assert!(matches!(DirtyLog::attach(file.try_clone().unwrap(), 0, PAGE), Err(LogError::MayShrink)));
    let alarm = Alarm::new().unwrap();
    let log =
        DirtyLog::guarded(file.try_clone().unwrap(), PAGE, 64, &alarm, &MappingQuota::default()).unwrap();
    assert!(matches!(
        DirtyLog::guarded(file.try_clone().unwrap(), 2 * PAGE, 8, &alarm, &MappingQuota::default()),
        Err(LogError::Extent { .. })
    ));
    assert_eq!((log.end(), log.size()), (512 * PAGE, 64));
    let config = RegionConfig { gpa: 0, size: 512 * PAGE, backing: Backing::Pages, writable: true };
    let memory = Memory::new(vec![Region::new(config).unwrap()]).unwrap();
    memory.start_log(log.clone(), paravane_test_support::patience()).unwrap();
    let mut handle = memory.handle();
    handle.enter().write(9 * PAGE, b"marked", Access::WRITE).unwrap();
    let file = File::from(file);
    let mut word = [0; 8];
    file.read_exact_at(&mut word, PAGE).unwrap();
    assert_eq!(u64::from_le_bytes(word), 1 << 9);
    assert!(!log.lost());
    file.set_len(PAGE).unwrap();
    handle.enter().write(10 * PAGE, b"marked nowhere", Access::WRITE).unwrap();
    assert!(log.lost() && alarm.take());
}

#[test]
fn a_sealed_file_is_guarded_as_well() {
    let file = file(PAGE);
    fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
    let (region, alarm) = guarded(range(0, PAGE, 0), &file);
    assert!(ftruncate(&file, 0).is_err());
    let memory = Memory::new(vec![region.clone()]).unwrap();
    assert_eq!(memory.handle().enter().read_obj::<u8>(0, Access::READ), Ok(0));
    assert!(!region.lost() && !alarm.take());
}

/// Runs the test `name` in a process with `PARAVANE_CHILD` set.
fn in_child(name: &str) -> ExitStatus {
    let program = std::env::current_exe().unwrap();
    let mut child = Command::new(program);
    child.args(["--exact", name, "--test-threads=1"]).env("PARAVANE_CHILD", name);
    child.output().unwrap().status
}

fn is_child() -> bool {
    let nothing = rustix::process::Rlimit { current: Some(0), maximum: Some(0) };
    let child = std::env::var_os("PARAVANE_CHILD").is_some();
    if child {
        rustix::process::setrlimit(rustix::process::Resource::Core, nothing).unwrap();
    }
    child
}

/// Reads a byte beyond the end of a file, in an unprotected mapping.
fn fault() {
    let file = file(PAGE);
    let flags = rustix::mm::MapFlags::SHARED;
    // SAFETY: a new mapping.
    let at = unsafe {
        rustix::mm::mmap(std::ptr::null_mut(), PAGE as usize, rustix::mm::ProtFlags::READ, flags, &file, 0)
    };
    let at = at.unwrap().cast::<u8>();
    ftruncate(&file, 0).unwrap();
    // SAFETY: mapped; the fault is intended.
    let _ = unsafe { at.read_volatile() };
}

/// Survives the truncation of a client's file.
fn survive() {
    let file = file(PAGE);
    let (region, alarm) = guarded(range(0, PAGE, 0), &file);
    let memory = Memory::new(vec![region]).unwrap();
    ftruncate(&file, 0).unwrap();
    let mut handle = memory.handle();
    assert_eq!(handle.enter().read_obj::<u8>(0, Access::READ), Ok(0));
    assert!(alarm.take());
}

#[test]
fn a_fault_elsewhere_still_kills() {
    if is_child() {
        survive();
        fault();
        std::process::exit(7);
    }
    assert_eq!(in_child("a_fault_elsewhere_still_kills").signal(), Some(libc::SIGBUS));
}

#[test]
fn a_signal_that_is_sent_still_kills() {
    if is_child() {
        // Rust's own handler lets the first one pass. SAFETY: no code is part of it.
        unsafe { libc::signal(libc::SIGBUS, libc::SIG_DFL) };
        survive();
        // SAFETY: ends this process.
        unsafe { libc::kill(libc::getpid(), libc::SIGBUS) };
        std::thread::sleep(paravane_test_support::patience());
        std::process::exit(7);
    }
    assert_eq!(in_child("a_signal_that_is_sent_still_kills").signal(), Some(libc::SIGBUS));
}

#[test]
fn the_handler_that_was_there_still_has_its_faults() {
    extern "C" fn first(_: libc::c_int) {
        // SAFETY: ends the process at once, as a signal handler may.
        unsafe { libc::_exit(42) };
    }
    if is_child() {
        // SAFETY: `first` does what a handler may do.
        unsafe { libc::signal(libc::SIGBUS, first as *const () as usize) };
        survive();
        fault();
        std::process::exit(7);
    }
    assert_eq!(in_child("the_handler_that_was_there_still_has_its_faults").code(), Some(42));
}

#[test]
fn what_is_ignored_when_it_is_sent_is_no_excuse_for_a_fault() {
    if is_child() {
        // SAFETY: no code is part of it.
        unsafe { libc::signal(libc::SIGBUS, libc::SIG_IGN) };
        survive();
        // SAFETY: nothing comes of it.
        unsafe { libc::kill(libc::getpid(), libc::SIGBUS) };
        fault();
        std::process::exit(7);
    }
    let status = in_child("what_is_ignored_when_it_is_sent_is_no_excuse_for_a_fault");
    assert_eq!(status.signal(), Some(libc::SIGBUS));
}

#[test]
fn an_alarm_has_a_descriptor_and_is_silent_at_first() {
    let alarm = Alarm::new().unwrap();
    assert!(!rings(&alarm, Duration::ZERO) && !alarm.take());
    rustix::io::write(alarm.as_fd(), &1_u64.to_ne_bytes()).unwrap();
    assert!(rings(&alarm, Duration::ZERO) && alarm.take() && !alarm.take());
}

#[test]
fn what_is_mapped_counts_until_it_is_unmapped() {
    let alarm = Alarm::new().unwrap();
    let limits = MappingLimits { max_client_memory: 4 * PAGE, ..MappingLimits::of_host() };
    let quota = MappingPool::new(limits).quota();
    let first = Region::guarded(range(0, 3 * PAGE, 0), file(4 * PAGE), &alarm, &quota).unwrap();
    assert_eq!((quota.mapped(), quota.mappings()), (3 * PAGE, 1));
    let error = Region::guarded(range(0, 2 * PAGE, 0), file(2 * PAGE), &alarm, &quota).unwrap_err();
    let said = "cannot map 8 KiB more for this client, which has 12 KiB mapped, limit 16 KiB: raise max-client-memory";
    assert_eq!(error.to_string(), said);
    // A log maps whole pages.
    let log = DirtyLog::guarded(file(PAGE), 8, 64, &alarm, &quota).unwrap();
    assert_eq!((quota.mapped(), quota.mappings()), (4 * PAGE, 2));
    assert!(matches!(DirtyLog::guarded(file(PAGE), 0, 8, &alarm, &quota), Err(LogError::Quota(_))));
    drop(first);
    assert_eq!((quota.mapped(), quota.mappings()), (PAGE, 1));
    // A mapping that is refused for another reason is not counted.
    assert!(Region::guarded(range(0, 3 * PAGE, 0), file(PAGE), &alarm, &quota).is_err());
    assert!(DirtyLog::guarded(file(PAGE), 0, 2 * PAGE, &alarm, &quota).is_err());
    drop(log);
    assert_eq!((quota.mapped(), quota.mappings()), (0, 0));
}

#[test]
fn thousands_of_mappings_are_guarded_and_the_one_that_is_lost_is_found() {
    // More than the process could protect once; `vm.max_map_count` is 65530 by default.
    const MANY: usize = 5000;
    let (alarm, silent) = (Alarm::new().unwrap(), Alarm::new().unwrap());
    // Prevents neighbours from becoming one mapping of the kernel: each is the same page. One
    // descriptor for each 250.
    let files: Vec<_> = (0..MANY.div_ceil(250)).map(|_| file(PAGE)).collect();
    let quotas: Vec<_> = {
        let pool = MappingPool::new(MappingLimits { max_mappings: 1 << 20, ..MappingLimits::of_host() });
        files.iter().map(|_| pool.quota()).collect()
    };
    if let Some(why) = too_few_descriptors(MANY) {
        return skip("thousands_of_mappings_are_guarded_and_the_one_that_is_lost_is_found", &why);
    }
    let mut regions: Vec<_> = (0..MANY)
        .map(|number| {
            let (file, quota) = (&files[number / 250], &quotas[number / 250]);
            Region::guarded(range(0, PAGE, 0), file.try_clone().unwrap(), &silent, quota).unwrap()
        })
        .collect();
    let taken = file(PAGE);
    let last =
        Region::guarded(range(0, PAGE, 0), taken.try_clone().unwrap(), &alarm, &MappingQuota::default())
            .unwrap();
    ftruncate(&taken, 0).unwrap();
    let memory = Memory::new(vec![last.clone()]).unwrap();
    memory.handle().enter().write(0, b"gone", Access::WRITE).unwrap();
    assert!(last.lost() && alarm.take() && !silent.take());
    let piece = |region: &Region| HostSlice { ptr: region.host().as_ptr(), len: PAGE as usize };
    assert!(is_lost(&[piece(&last)]) && !is_lost(&[piece(&regions[0]), piece(&regions[MANY - 1])]));
    // A free slot is used again, and is not lost.
    regions.drain(..10);
    drop((last, memory));
    let again = Region::guarded(range(0, PAGE, 0), file(PAGE), &silent, &MappingQuota::default()).unwrap();
    assert!(!again.lost() && !is_lost(&[piece(&again)]));
}

/// Raises the limit on descriptors; returns the reason if that fails.
fn too_few_descriptors(wanted: usize) -> Option<String> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
    let enough = maximum.is_none_or(|most| most > wanted as u64 + 500);
    (!enough).then(|| format!("a process may have {maximum:?} descriptors only"))
}
