//! Direct I/O and registered buffers: what is refused, and that both work.
use super::super::{Geometry, OpenError, OpenReason};
use super::*;
use crate::Device;
use crate::rig::{BASE, SIZE};
use paravane_dma::{Alarm, Backing, FileRange, MappingLimits, MappingPool, Region, RegionConfig};
use paravane_spec::blk::Config;
use zerocopy::FromBytes;

const DISK: usize = 1 << 20;

/// Pages of a file that are in the page cache.
fn cached(file: &NamedTempFile) -> usize {
    let len = file.as_file().metadata().unwrap().len() as usize;
    let (protection, flags) = (rustix::mm::ProtFlags::READ, rustix::mm::MapFlags::SHARED);
    // SAFETY: a new mapping that nothing accesses, and that is unmapped at the end.
    unsafe {
        let mapped =
            rustix::mm::mmap(std::ptr::null_mut(), len, protection, flags, file.as_file(), 0).unwrap();
        let mut pages = vec![0_u8; len.div_ceil(4096)];
        assert_eq!(libc::mincore(mapped, len, pages.as_mut_ptr()), 0);
        rustix::mm::munmap(mapped, len).unwrap();
        pages.iter().filter(|page| **page & 1 != 0).count()
    }
}

/// Drops the file's pages from the cache; `false` if impossible, as in memory.
fn is_thrown_out(file: &NamedTempFile) -> bool {
    file.as_file().sync_all().unwrap();
    rustix::fs::fadvise(file.as_file(), 0, None, rustix::fs::Advice::DontNeed).unwrap();
    cached(file) == 0
}

#[test]
fn nothing_of_the_disk_stays_in_the_page_cache() {
    let name = "nothing_of_the_disk_stays_in_the_page_cache";
    let file = image(&pattern(DISK, 60));
    if !is_thrown_out(&file) {
        return skipped(name, "temporary files are in memory");
    }
    for way in ways(name) {
        let mut rig = rig(&file, way);
        assert!(is_thrown_out(&file));
        assert_eq!(rig.status(blk::T_OUT, 64, &pattern(65536, 61)), blk::S_OK);
        assert_eq!(rig.read(64, 65536), pattern(65536, 61));
        assert_eq!(cached(&file) == 0, way.direct, "{way:?}");
    }
}

#[test]
fn memory_need_not_be_aligned() {
    for way in ways("memory_need_not_be_aligned") {
        let file = image(&vec![0; DISK]);
        let mut rig = rig(&file, way);
        // More than goes through a buffer at once, in odd pieces at odd addresses.
        let data = pattern(200 * 1024, 62);
        for (kind, at) in [(blk::T_OUT, PAYLOAD + 1), (blk::T_IN, ROOM + 7)] {
            rig.poke(HEADER, &header(kind, 8));
            if kind == blk::T_OUT {
                rig.poke(at, &data);
            }
            let pieces = [
                segment(at, 1001),
                segment(at + 1001, 99 * 1024),
                segment(at + 1001 + 99 * 1024, 101 * 1024 - 1001),
            ];
            let used = match kind {
                blk::T_OUT => rig.one(&[&[segment(HEADER, 16)], &pieces[..]].concat(), &[segment(STATUS, 1)]),
                _ => rig.one(&[segment(HEADER, 16)], &[&pieces[..], &[segment(STATUS, 1)]].concat()),
            };
            let written = if kind == blk::T_OUT { 1 } else { data.len() as u32 + 1 };
            assert_eq!((used.unwrap().len, rig.peek(STATUS, 1)[0]), (written, blk::S_OK), "{way:?}");
        }
        assert!(rig.peek(ROOM + 7, data.len()) == data, "{way:?}");
        assert!(content(&file)[8 * 512..][..data.len()] == data, "{way:?}");
    }
}

#[test]
fn parts_of_a_block_are_refused() {
    // A file that asks for larger blocks than sectors is hard to come by: the limits are what such
    // a disk has.
    let limits = super::super::request::Limits {
        capacity: 64,
        block: 8,
        read_only: false,
        discard: true,
        write_zeroes: true,
    };
    let file = image(&vec![0; DISK]);
    let mut rig = rig(&file, EngineChoice::Threads);
    let mut ask = |kind, sector, payload: &[u8], room: usize| {
        rig.poke(HEADER, &header(kind, sector));
        rig.poke(PAYLOAD, payload);
        let readable = [segment(HEADER, 16), segment(PAYLOAD, payload.len().max(1))];
        let readable = &readable[..if payload.is_empty() { 1 } else { 2 }];
        let writable = [segment(ROOM, room + 1)];
        rig.add(readable, &writable);
        let mut batch = rig.live.begin_batch();
        assert_eq!(batch.pop().unwrap(), 1);
        let chain = batch.chains.iter().next().unwrap();
        let head = chain.0.head;
        let command =
            super::super::request::parse(&batch.memory, chain, &limits, &mut Vec::new()).unwrap().command;
        batch.queue.complete(head, 0).unwrap();
        batch.queue.publish().unwrap();
        drop(batch);
        rig.driver.pop_used().unwrap().unwrap();
        command
    };
    use super::super::request::Command;
    assert_eq!(ask(blk::T_IN, 8, &[], 8192), Command::Read { offset: 4096, len: 8192 });
    assert_eq!(ask(blk::T_IN, 9, &[], 4096), Command::Answer(blk::S_IOERR));
    assert_eq!(ask(blk::T_IN, 8, &[], 512), Command::Answer(blk::S_IOERR));
    assert_eq!(ask(blk::T_OUT, 56, &[1; 4096], 0), Command::Write { offset: 28672, len: 4096 });
    assert_eq!(ask(blk::T_OUT, 4, &[1; 4096], 0), Command::Answer(blk::S_IOERR));
    assert_eq!(ask(blk::T_WRITE_ZEROES, 0, &range(8, 16, 0), 0), Command::WriteZeroes);
    assert_eq!(ask(blk::T_WRITE_ZEROES, 0, &range(8, 12, 0), 0), Command::Answer(blk::S_IOERR));
    assert_eq!(ask(blk::T_DISCARD, 0, &range(1, 8, 0), 0), Command::Answer(blk::S_IOERR));
}

#[test]
fn the_driver_is_told_the_block() {
    let file = image(&vec![0; DISK]);
    let block = match &*DIRECT_BLOCK {
        Ok(block) => *block,
        Err(why) => return skipped("the_driver_is_told_the_block", why),
    };
    let disk = Blk::open(BlkConfig { direct: true, ..config(&file, EngineChoice::Threads) }).unwrap();
    assert_eq!(disk.engine(), "threads, direct");
    let mut bytes = [0; size_of::<Config>()];
    disk.read_config(0, &mut bytes);
    let config = Config::read_from_bytes(&bytes).unwrap();
    assert_eq!(u64::from(config.blk_size), block);
    let physical = block << config.physical_block_exp;
    assert!((block..=4096).contains(&physical));
    assert_eq!(u64::from(config.discard_sector_alignment) * 512, physical);
    assert_eq!(u64::from(config.min_io_size) * block, physical);
}

#[test]
fn the_operator_names_the_block() {
    let file = image(&vec![0; DISK]);
    let open = |block, more: BlkConfig| Blk::open(BlkConfig { block_size: Some(block), ..more });
    let plain = || config(&file, EngineChoice::Threads);
    for block in [512, 1024, 4096] {
        let mut rig = Rig::new(open(block, plain()).unwrap());
        let mut bytes = [0; size_of::<Config>()];
        rig.device.read_config(0, &mut bytes);
        assert_eq!({ Config::read_from_bytes(&bytes).unwrap().blk_size }, block);
        assert_eq!(rig.status(blk::T_OUT, u64::from(block) / 512, &vec![1; block as usize]), blk::S_OK);
        assert_eq!(rig.status(blk::T_OUT, 1, &[1; 512]) == blk::S_OK, block == 512, "a part of a block");
    }
    for block in [0, 256, 513, 8192] {
        let refused = open(block, plain());
        assert!(
            matches!(refused, Err(OpenError { reason: OpenReason::Block { least: 512, .. }, .. })),
            "{block}: {refused:?}"
        );
    }
    let mut unlocked = Blk::prepare(plain()).unwrap();
    assert_eq!(unlocked.geometry().unwrap(), Geometry { size: DISK as u64, block: 512 });
    unlocked.keep_block(4096);
    unlocked.keep_block(1024);
    assert_eq!(unlocked.geometry().unwrap().block, 4096, "the first one counts");
    let disk = unlocked.lock().unwrap().unwrap();
    assert_eq!(disk.resizer().geometry(), Geometry { size: DISK as u64, block: 4096 });
    drop(disk);
    if DIRECT_BLOCK.is_ok() {
        let disk = open(512, BlkConfig { direct: true, ..plain() }).unwrap();
        assert_eq!(disk.current.image().file.block, 512);
    }
    file.as_file().set_len(DISK as u64 + 512).unwrap();
    assert!(matches!(
        open(4096, plain()),
        Err(OpenError { reason: OpenReason::Size { block: 4096, .. }, .. })
    ));
}

#[test]
fn what_cannot_be_is_refused_when_it_is_opened() {
    let file = image(&vec![0; DISK]);
    let asked = |direct, registered_buffers, engine, format| {
        let way = Way { engine, direct, registered_buffers };
        Blk::open(BlkConfig { format, ..config(&file, way) })
    };
    let refused = asked(true, false, EngineChoice::Auto, crate::blk::Format::Qcow2);
    assert!(matches!(refused, Err(OpenError { reason: OpenReason::DirectOfFormat, .. })), "{refused:?}");
    for (engine, name) in [(EngineChoice::Threads, "threads"), (EngineChoice::Immediate, "immediate")] {
        match asked(false, true, engine, crate::blk::Format::Raw) {
            Err(OpenError { reason: OpenReason::BuffersOfEngine { engine, .. }, .. }) => {
                assert!(engine.starts_with(name), "{engine}")
            }
            other => panic!("{other:?}"),
        }
    }
    // procfs has files, and nothing that goes past a cache.
    let direct = BlkConfig { direct: true, read_only: true, lock: false, ..BlkConfig::new("/proc/kallsyms") };
    match Blk::open(direct) {
        Err(
            OpenError { reason: OpenReason::Direct { .. }, .. }
            | OpenError { reason: OpenReason::Empty, .. }
            | OpenError { reason: OpenReason::Os { .. }, .. },
        ) => {}
        other => panic!("{other:?}"),
    }
}

#[test]
fn registered_memory_follows_the_map() {
    if let Err(why) = io_uring_available() {
        return skipped("registered_memory_follows_the_map", why.to_string());
    }
    let (before, after) = (pattern(DISK, 63), pattern(4096, 64));
    let file = image(&before);
    let mut rig = rig(&file, Way { registered_buffers: true, ..EngineChoice::IoUring.into() });
    assert!(rig.handler.keeps_memory());
    assert_eq!(rig.read(8, 4096), before[4096..8192]);
    let more = |gpa| {
        Region::new(RegionConfig { gpa, size: 1 << 20, backing: Backing::Pages, writable: true }).unwrap()
    };
    let read_into = |rig: &mut Rig<Blk>, addr: u64| {
        rig.poke(HEADER, &header(blk::T_IN, 16));
        let used = rig.one(&[segment(HEADER, 16)], &[segment(addr, 4096), segment(STATUS, 1)]).unwrap();
        assert_eq!((used.len, rig.peek(STATUS, 1)[0]), (4097, blk::S_OK));
        rig.peek(addr, 4096)
    };
    // Memory comes, goes, and other memory comes to the same place, perhaps at the same address of
    // ours.
    for _ in 0..4 {
        let new = more(BASE + SIZE);
        rig.memory.replace(vec![rig.region.clone(), new.clone()]).unwrap();
        assert_eq!(read_into(&mut rig, BASE + SIZE), before[8192..12288]);
        assert_eq!(Arc::strong_count(&new), 3, "ours, the map's, and the ring's");
        rig.memory.replace(vec![rig.region.clone()]).unwrap();
        // Its owner serves it after a change, and then nothing of it is kept.
        rig.serve().unwrap();
        assert_eq!(Arc::strong_count(&new), 1);
        assert_eq!(read_into(&mut rig, DATA + 0x30_0000), before[8192..12288]);
    }
    assert_eq!(rig.status(blk::T_OUT, 16, &after), blk::S_OK);
    assert_eq!(rig.read(16, 4096), after);
}

#[test]
fn memory_that_the_kernel_does_not_register_is_used_by_addresses() {
    let name = "memory_that_the_kernel_does_not_register_is_used_by_addresses";
    if let Err(why) = io_uring_available() {
        return skipped(name, why.to_string());
    }
    let content = pattern(DISK, 65);
    let file = image(&content);
    let mut rig = rig(&file, Way { registered_buffers: true, ..EngineChoice::IoUring.into() });
    // The pages of a file of a disk's are not to be held for long.
    let theirs = image(&vec![0; 1 << 20]);
    let range = FileRange { gpa: BASE + SIZE, size: 1 << 20, offset: 0, writable: true };
    let handed = theirs.as_file().try_clone().unwrap().into();
    let any = MappingPool::new(MappingLimits { any_file: true, ..MappingLimits::of_host() });
    let region = Region::guarded(range, handed, &Alarm::new().unwrap(), &any.quota()).unwrap();
    rig.memory.replace(vec![rig.region.clone(), region.clone()]).unwrap();
    assert_eq!(rig.read(8, 4096), content[4096..8192]);
    if Arc::strong_count(&region) == 3 {
        return skipped(name, "temporary files are in memory, and are registered");
    }
    rig.poke(HEADER, &header(blk::T_IN, 16));
    let used = rig.one(&[segment(HEADER, 16)], &[segment(BASE + SIZE, 4096), segment(STATUS, 1)]).unwrap();
    assert_eq!((used.len, rig.peek(STATUS, 1)[0]), (4097, blk::S_OK));
    assert_eq!(rig.peek(BASE + SIZE, 4096), content[8192..12288]);
}
