//! Jobs on a disk in memory that answers in any order and checks requests.
use super::{Buffers, Disk, Lane};
use crate::chance::Chance;
use crate::program::{hash_lane, test_lane};
use crate::report::{Failure, Header};
use crate::worker::Interrupts;
use crate::{Area, DmaArea, pattern};
use core::cell::{Cell, RefCell};
use core::ptr::NonNull;
use paravane_driver::blk::{Done, Request};
use paravane_driver::{DriverError, Message, Pool};
use paravane_spec::blk::{S_IOERR, S_OK};
use paravane_spec::builtin::{
    ABI, BOOT_MAGIC, BootInfo, DISK_REPORTS, DeviceEntry, DiskReport, MAX_DEVICES, error, order, part, state,
};
use sha2::{Digest, Sha256};
use std::rc::Rc;
use std::vec::Vec;
use std::{boxed::Box, vec};
use zerocopy::FromBytes;
extern crate std;

const MEMORY: usize = 4 << 20;
const REPORT: usize = 1 << 16;

/// What is wrong with the disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Fault {
    #[default]
    None,
    /// The request with this number fails.
    Fails(u64),
    /// The write with this number is acknowledged and not done.
    LosesWrite(u64),
    /// The read with this number brings one wrong bit, in its second sector.
    FlipsBit(u64),
    /// The request with this number comes back with another tag.
    WrongTag(u64),
    /// The request with this number breaks the protocol.
    Breaks(u64),
}

#[derive(Default)]
struct Inside {
    data: Vec<u8>,
    read_only: bool,
    no_flush: bool,
    slots: usize,
    fault: Fault,
    added: Vec<(Request, u64)>,
    published: Vec<(Request, u64)>,
    most_in_flight: usize,
    requests: u64,
    reads: u64,
    writes: u64,
    flushes: u64,
    /// Writes since the last flush.
    dirty: u64,
    order: Option<Chance>,
}

#[derive(Clone, Default)]
struct Fake(Rc<RefCell<Inside>>);

impl Fake {
    fn new(sectors: usize) -> Self {
        let fake = Self::default();
        *fake.0.borrow_mut() = Inside {
            data: (0..sectors * 512).map(|n| (n * 31 + n / 512) as u8).collect(),
            slots: 16,
            order: Some(Chance::new(99, sectors)),
            ..Inside::default()
        };
        fake
    }

    fn faulty(sectors: usize, fault: Fault) -> Self {
        let fake = Self::new(sectors);
        fake.0.borrow_mut().fault = fault;
        fake
    }
}

fn extent(request: &Request) -> Option<(core::ops::Range<u64>, bool)> {
    match request {
        Request::Read { sector, buffer } => Some((*sector..sector + buffer.area.len() as u64 / 512, false)),
        Request::Write { sector, buffer } => Some((*sector..sector + buffer.area.len() as u64 / 512, true)),
        _ => None,
    }
}

impl Inside {
    fn in_flight(&self) -> impl Iterator<Item = &(Request, u64)> {
        self.added.iter().chain(&self.published)
    }

    fn check(&self, request: &Request) {
        if let Some((range, writes)) = extent(request) {
            assert!(range.end * 512 <= self.data.len() as u64, "{range:?} is beyond the disk");
            for (other, _) in self.in_flight() {
                let Some((busy, busy_writes)) = extent(other) else { panic!("a request beside a flush") };
                let apart = range.end <= busy.start || busy.end <= range.start;
                assert!(apart || !(writes || busy_writes), "{range:?} is in flight, and one writes");
            }
        } else {
            assert_eq!(self.in_flight().count(), 0, "a flush beside other requests");
        }
    }

    fn serve(&mut self, request: Request) -> u8 {
        self.requests += 1;
        if self.fault == Fault::Fails(self.requests) {
            return S_IOERR;
        }
        match request {
            Request::Read { sector, buffer } => {
                self.reads += 1;
                let start = sector as usize * 512;
                let mut data = self.data[start..start + buffer.area.len()].to_vec();
                if self.fault == Fault::FlipsBit(self.reads) {
                    data[513] ^= 0x10;
                }
                assert!(buffer.area.write(0, &data));
            }
            Request::Write { sector, buffer } => {
                self.writes += 1;
                self.dirty += 1;
                assert!(!self.read_only);
                if self.fault != Fault::LosesWrite(self.writes) {
                    let start = sector as usize * 512;
                    let end = start + buffer.area.len();
                    assert!(buffer.area.read(0, &mut self.data[start..end]));
                }
            }
            Request::Flush => {
                self.flushes += 1;
                self.dirty = 0;
            }
            other => panic!("the jobs have no use for {other:?}"),
        }
        S_OK
    }
}

impl Disk for Fake {
    fn capacity(&self) -> u64 {
        self.0.borrow().data.len() as u64 / 512
    }
    fn read_only(&self) -> bool {
        self.0.borrow().read_only
    }
    fn has_flush(&self) -> bool {
        !self.0.borrow().no_flush
    }
    fn slots(&self) -> usize {
        self.0.borrow().slots
    }
    fn submit(&mut self, request: Request, tag: u64) -> Result<bool, DriverError> {
        let mut inside = self.0.borrow_mut();
        inside.check(&request);
        inside.added.push((request, tag));
        inside.most_in_flight = inside.most_in_flight.max(inside.in_flight().count());
        Ok(inside.most_in_flight <= inside.slots)
    }
    fn kick(&mut self) -> bool {
        let mut inside = self.0.borrow_mut();
        let added = core::mem::take(&mut inside.added);
        assert!(!added.is_empty(), "a kick for nothing");
        inside.published.extend(added);
        true
    }
    fn complete(&mut self) -> Result<Option<Done>, DriverError> {
        let mut inside = self.0.borrow_mut();
        let count = inside.published.len() as u64;
        if count == 0 {
            return Ok(None);
        }
        let chosen = inside.order.as_mut().map_or(0, |order| order.below(count));
        let (request, tag) = inside.published.swap_remove(chosen as usize);
        let status = inside.serve(request);
        if inside.fault == Fault::Breaks(inside.requests) {
            return Err(DriverError::ShortAnswer { expected: 2, len: 1 });
        }
        let tag = if inside.fault == Fault::WrongTag(inside.requests) { tag + 100 } else { tag };
        Ok(Some(Done { tag, status }))
    }
}

impl Interrupts for Fake {
    fn enable_interrupts(&mut self) -> bool {
        !self.0.borrow().published.is_empty()
    }
    fn disable_interrupts(&mut self) {}
    fn interrupt(&mut self) -> Result<u32, DriverError> {
        Ok(0)
    }
    fn set_message(&self, _number: u16, _message: Message) -> Result<(), DriverError> {
        Ok(())
    }
}

/// Guest memory for one test, never given back: areas have no lifetime.
struct Memory {
    whole: DmaArea,
    header: Header,
    pool: Pool,
}

fn memory() -> Memory {
    let pages = Box::leak(vec![[0u64; 512]; MEMORY / 4096].into_boxed_slice());
    let start = NonNull::new(pages.as_mut_ptr().cast::<u8>()).unwrap();
    // SAFETY: the allocation was leaked, so it stays mapped and no reference to it is left.
    let whole = DmaArea { area: unsafe { Area::new(start, MEMORY) }, addr: 0x40_0000 };
    let header = Header::new(whole.slice(0, REPORT).unwrap().area, 1);
    Memory { whole, header, pool: Pool::new(whole.slice(REPORT, MEMORY - REPORT).unwrap()) }
}

impl Memory {
    fn report(&self) -> DiskReport {
        let mut bytes = [0; size_of::<DiskReport>()];
        assert!(self.whole.area.read(DISK_REPORTS as usize, &mut bytes));
        DiskReport::read_from_bytes(&bytes).unwrap()
    }

    fn pass_map(&self) -> Vec<u32> {
        let report = self.report();
        let start = (report.pass_map - self.whole.addr) as usize;
        let mut bytes = vec![0; report.pass_map_blocks as usize * 4];
        assert!(self.whole.area.read(start, &mut bytes));
        bytes.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect()
    }
}

fn info(depth: u32, block: u32, duration_ns: u64, read_percent: u32) -> BootInfo {
    BootInfo {
        magic: BOOT_MAGIC,
        abi: ABI,
        inject: 0,
        clock_khz: 0,
        ram_size: 0,
        heap_base: 0,
        heap_size: 0,
        report_addr: 0,
        report_size: 0,
        duration_ns,
        seed: 12345,
        depth,
        block,
        completion: 0,
        read_percent,
        order: 0,
        time_kicks: 0,
        device_count: 1,
        transport: 0,
        cpus: 1,
        moves: 0,
        report_count: 1,
        reserved: 0,
        devices: [DeviceEntry { queues: 1, ..DeviceEntry::default() }; MAX_DEVICES],
    }
}

/// Steps a lane until its job is done or fails.
///
/// A job that stands still fails the test.
fn work(lane: &mut Lane<Fake>) -> Result<(), Failure> {
    let now = Cell::new(0);
    while !lane.is_done() {
        let step = lane.turn(|| {
            now.set(now.get() + 1000);
            now.get()
        })?;
        assert!(step.completed + step.sent > 0 || lane.is_done(), "the job stands still");
    }
    Ok(())
}

fn hash(disk: &Fake, memory: &mut Memory, depth: u32) -> Result<(), Failure> {
    let page = memory.header.disk(0).unwrap();
    let mut lane = hash_lane(disk.clone(), &info(depth, 4096, 0, 0), [0, 1], page, &mut memory.pool)?;
    work(&mut lane)
}

fn write_test(disk: &Fake, memory: &mut Memory, info: BootInfo, span: u64) -> Result<(), Failure> {
    write_part(disk, memory, info, span, [0, 1])
}

fn write_part(
    disk: &Fake,
    memory: &mut Memory,
    mut info: BootInfo,
    span: u64,
    [lane, queues]: [u32; 2],
) -> Result<(), Failure> {
    let page = memory.header.disk(0).unwrap();
    (info.devices[0].span, info.devices[0].queues) = (span, queues);
    let mut lane = test_lane(disk.clone(), &info, 0, lane, page, &mut memory.pool)?;
    work(&mut lane)
}

/// The disk holds what the pass map says, and beyond the span what it held before.
fn assert_pattern(disk: &Fake, passes: &[u32], block: usize) {
    let inside = disk.0.borrow();
    let before = Fake::new(inside.data.len() / 512);
    for (number, sector) in inside.data.chunks_exact(512).enumerate() {
        let sector: &[u8; 512] = sector.try_into().unwrap();
        match passes.get(number / (block / 512)) {
            Some(&pass) => assert!(pattern::check(sector, 12345, number as u64, pass), "sector {number}"),
            None => assert_eq!(sector[..], before.0.borrow().data[number * 512..][..512]),
        }
    }
}

#[test]
fn a_disk_of_any_size_is_hashed_in_order() {
    for (sectors, depth) in [(1, 1), (127, 1), (128, 4), (129, 4), (1000, 3), (1500, 1000)] {
        let (disk, mut memory) = (Fake::new(sectors), memory());
        hash(&disk, &mut memory, depth).unwrap();
        let report = memory.report();
        let expected: [u8; 32] = Sha256::digest(&disk.0.borrow().data).into();
        assert_eq!(report.sha256, expected, "{sectors} sectors, depth {depth}");
        let bytes = sectors as u64 * 512;
        assert_eq!((report.state, report.error), (state::DONE, error::NONE));
        assert_eq!((report.bytes_total, report.bytes_done, report.bytes), (bytes, bytes, bytes));
        assert_eq!(report.capacity, sectors as u64);
        assert_eq!(report.ops, bytes.div_ceil(64 << 10));
        assert_eq!(report.histogram.iter().map(|&count| u64::from(count)).sum::<u64>(), report.ops);
        assert!(report.elapsed_ns > 0);
        let inside = disk.0.borrow();
        assert_eq!((inside.writes, inside.flushes), (0, 0), "a hash job never writes");
        assert!(inside.most_in_flight <= (depth as usize).min(inside.slots));
    }
}

#[test]
fn a_queue_hashes_its_part_alone() {
    const CHUNK: usize = 64 << 10;
    for (sectors, parts) in [(1000, 2), (1500, 5), (128, 3), (129, 2)] {
        let mut read = 0;
        for number in 0..parts {
            let (disk, mut memory) = (Fake::new(sectors), memory());
            let page = memory.header.disk(0).unwrap();
            let info = info(4, 4096, 0, 0);
            let lane = hash_lane(disk.clone(), &info, [number, parts], page, &mut memory.pool);
            work(&mut lane.unwrap()).unwrap();
            let units = part((sectors as u64 * 512).div_ceil(CHUNK as u64), parts, number);
            let data = &disk.0.borrow().data;
            let bytes = |units: u64| (units as usize * CHUNK).min(data.len());
            let expected: [u8; 32] = Sha256::digest(&data[bytes(units.start)..bytes(units.end)]).into();
            let report = memory.report();
            assert_eq!((report.sha256, report.state), (expected, state::DONE), "{number} of {parts}");
            read += report.bytes_done;
        }
        assert_eq!(read, sectors as u64 * 512);
    }
}

#[test]
fn queues_write_their_parts_side_by_side() {
    const BLOCK: usize = 4096;
    let disk = Fake::new(1000);
    let mut passes = Vec::new();
    for lane in 0..3 {
        let mut memory = memory();
        let terms = info(4, BLOCK as u32, 200_000, 50);
        write_part(&disk, &mut memory, terms, 100 * BLOCK as u64, [lane, 3]).unwrap();
        let report = memory.report();
        assert_eq!((report.state, report.pass_map_blocks), (state::DONE, if lane == 0 { 34 } else { 33 }));
        passes.extend(memory.pass_map());
    }
    assert_eq!(passes.len(), 100);
    assert!(passes.iter().any(|&pass| pass > 1));
    assert_pattern(&disk, &passes, BLOCK);
    // Fewer blocks than queues.
    let refused = write_part(&disk, &mut memory(), info(4, 4096, 0, 50), 2 * 4096, [2, 3]);
    assert_eq!(refused.unwrap_err().error, error::SETUP);
}

#[test]
fn a_mixed_phase_that_is_held_goes_on() {
    let (disk, mut memory) = (Fake::new(64), memory());
    let page = memory.header.disk(0).unwrap();
    let mut info = info(4, 4096, 0, 50);
    info.devices[0].span = 64 * 512;
    let mut lane = test_lane(disk, &info, 0, 0, page, &mut memory.pool).unwrap();
    let now = Cell::new(0);
    let turn = |lane: &mut Lane<Fake>| {
        now.set(now.get() + 1000);
        lane.turn(|| now.get()).unwrap()
    };
    lane.hold(true);
    for _ in 0..1000 {
        turn(&mut lane);
    }
    assert_eq!(memory.report().state, state::MIX);
    lane.hold(false);
    for _ in 0..1000 {
        turn(&mut lane);
    }
    assert!(lane.is_done());
}

#[test]
fn an_empty_disk_has_the_hash_of_nothing() {
    let (disk, mut memory) = (Fake::new(0), memory());
    hash(&disk, &mut memory, 4).unwrap();
    let report = memory.report();
    assert_eq!(report.state, state::DONE);
    let expected: [u8; 32] = Sha256::digest([]).into();
    assert_eq!(report.sha256, expected);
    assert_eq!(disk.0.borrow().requests, 0);
}

#[test]
fn a_write_test_leaves_what_its_pass_map_says() {
    for (block, depth, percent) in
        [(512, 16, 50), (4096, 1, 50), (4096, 8, 0), (8192, 16, 100), (1536, 5, 30)]
    {
        let (disk, mut memory) = (Fake::new(1000), memory());
        let span = 300 * u64::from(block).min(1000);
        let blocks = span / u64::from(block);
        write_test(&disk, &mut memory, info(depth, block, 1_000_000, percent), span).unwrap();
        let report = memory.report();
        let passes = memory.pass_map();
        assert_eq!((report.state, report.error), (state::DONE, error::NONE));
        assert_eq!(passes.len() as u64, blocks);
        assert!(passes.iter().all(|&pass| pass >= 1));
        assert_eq!(passes.iter().any(|&pass| pass > 1), percent < 100);
        assert_pattern(&disk, &passes, block as usize);
        assert_eq!(report.bytes_done, report.bytes_total);
        assert_eq!(report.bytes, report.ops * u64::from(block));
        assert_eq!(report.bytes_done, 2 * blocks * u64::from(block) + report.bytes);
        assert!(report.bytes_verified >= blocks * u64::from(block));
        assert!(report.ops > 0 && report.elapsed_ns >= 900_000);
        assert_eq!(report.histogram.iter().map(|&count| u64::from(count)).sum::<u64>(), report.ops);
        let inside = disk.0.borrow();
        assert_eq!((inside.flushes, inside.dirty), (2, 0));
        assert_eq!(inside.requests, 2 * blocks + 2 + report.ops);
        assert_eq!(inside.most_in_flight, (depth as usize).min(blocks as usize));
    }
}

#[test]
fn in_order_every_block_has_its_turn() {
    let (disk, mut memory) = (Fake::new(72), memory());
    let terms = BootInfo { order: order::SEQUENTIAL, ..info(1, 4096, 200_000, 0) };
    write_test(&disk, &mut memory, terms, 72 * 512).unwrap();
    let passes = memory.pass_map();
    let (least, most) = (passes.iter().min().unwrap(), passes.iter().max().unwrap());
    assert!(*least > 2 && most - least <= 1, "{passes:?}");
}

#[test]
fn no_duration_means_no_mixed_phase() {
    let (disk, mut memory) = (Fake::new(64), memory());
    write_test(&disk, &mut memory, info(4, 4096, 0, 50), 64 * 512).unwrap();
    let report = memory.report();
    assert_eq!((report.state, report.ops, report.elapsed_ns), (state::DONE, 0, 0));
    assert_eq!(report.bytes_verified, 64 * 512);
    assert_eq!(memory.pass_map(), [1; 8]);
}

#[test]
fn one_block_is_never_in_flight_twice() {
    let (disk, mut memory) = (Fake::new(8), memory());
    // The fake disk checks it.
    write_test(&disk, &mut memory, info(16, 4096, 1_000_000, 50), 4096).unwrap();
    assert_eq!(memory.report().state, state::DONE);
    assert_pattern(&disk, &memory.pass_map(), 4096);
}

#[test]
fn a_disk_without_flush_is_not_flushed() {
    let (disk, mut memory) = (Fake::new(64), memory());
    disk.0.borrow_mut().no_flush = true;
    write_test(&disk, &mut memory, info(4, 4096, 100_000, 50), 64 * 512).unwrap();
    assert_eq!(memory.report().state, state::DONE);
    assert_eq!(disk.0.borrow().flushes, 0);
}

#[test]
fn a_span_that_is_no_multiple_of_the_block_leaves_the_rest_alone() {
    let (disk, mut memory) = (Fake::new(64), memory());
    write_test(&disk, &mut memory, info(4, 4096, 100_000, 50), 3 * 4096 + 512).unwrap();
    let passes = memory.pass_map();
    assert_eq!(passes.len(), 3);
    assert_pattern(&disk, &passes, 4096);
}

#[test]
fn a_wrong_bit_is_a_mismatch_at_its_sector() {
    let (disk, mut memory) = (Fake::faulty(64, Fault::FlipsBit(1)), memory());
    let failure = write_test(&disk, &mut memory, info(1, 4096, 0, 50), 64 * 512).unwrap_err();
    assert_eq!((failure.error, failure.sector), (error::MISMATCH, 1));
}

#[test]
fn a_lost_write_of_the_fill_is_found() {
    for lost in 1..=8 {
        let (disk, mut memory) = (Fake::faulty(64, Fault::LosesWrite(lost)), memory());
        let failure = write_test(&disk, &mut memory, info(4, 4096, 0, 50), 64 * 512).unwrap_err();
        assert_eq!(failure.error, error::MISMATCH, "write {lost}");
    }
}

#[test]
fn a_lost_write_of_the_mixed_phase_is_found() {
    // Clock, order and answers are the same in every run, so the last write is the same one.
    let terms = info(4, 4096, 500_000, 50);
    let (disk, mut memory) = (Fake::new(64), memory());
    write_test(&disk, &mut memory, terms, 64 * 512).unwrap();
    let last = disk.0.borrow().writes;
    assert!(last > 50, "{last}");
    let (disk, mut memory) = (Fake::faulty(64, Fault::LosesWrite(last)), self::memory());
    let failure = write_test(&disk, &mut memory, terms, 64 * 512).unwrap_err();
    assert_eq!(failure.error, error::MISMATCH);
}

#[test]
fn a_failed_request_ends_the_job_with_its_sector() {
    let (disk, mut memory) = (Fake::faulty(640, Fault::Fails(2)), memory());
    let failure = hash(&disk, &mut memory, 1).unwrap_err();
    assert_eq!((failure.error, failure.detail, failure.sector), (error::IO, u64::from(S_IOERR), 128));
}

#[test]
fn a_tag_that_is_not_in_flight_is_the_device_s_fault() {
    let (disk, mut memory) = (Fake::faulty(640, Fault::WrongTag(2)), memory());
    assert_eq!(hash(&disk, &mut memory, 2).unwrap_err().error, error::RING);
}

#[test]
fn a_broken_protocol_is_the_device_s_fault() {
    let (disk, mut memory) = (Fake::faulty(640, Fault::Breaks(3)), memory());
    let failure = hash(&disk, &mut memory, 2).unwrap_err();
    let code = crate::failure::code(&DriverError::ShortAnswer { expected: 2, len: 1 });
    assert_eq!((failure.error, failure.detail), (error::RING, code));
}

#[test]
fn what_cannot_be_tested_is_refused() {
    let refused = |disk: &Fake, block, span| {
        let mut memory = memory();
        write_test(disk, &mut memory, info(4, block, 0, 50), span).unwrap_err().error
    };
    let disk = Fake::new(64);
    assert_eq!(refused(&disk, 4096, 0), error::SETUP);
    assert_eq!(refused(&disk, 4096, 4095), error::SETUP);
    assert_eq!(refused(&disk, 4096, 65 * 512), error::SETUP);
    assert_eq!(refused(&disk, 4096, u64::MAX), error::SETUP);
    assert_eq!(refused(&Fake::new(0), 4096, 4096), error::SETUP);
    disk.0.borrow_mut().read_only = true;
    assert_eq!(refused(&disk, 4096, 64 * 512), error::SETUP);
    assert_eq!(disk.0.borrow().requests, 0);
}

#[test]
fn too_little_memory_is_said_so() {
    let (disk, mut memory) = (Fake::new(64), memory());
    let test = write_test(&disk, &mut memory, info(16, 1 << 20, 0, 50), 64 * 512);
    assert_eq!(test.unwrap_err().error, error::SETUP, "a block larger than the span");
    let disk = Fake::new(1 << 15);
    let test = write_test(&disk, &mut memory, info(16, 1 << 20, 0, 50), 1 << 24);
    assert_eq!(test.unwrap_err().error, error::MEMORY);
    let page = memory.header.disk(0).unwrap();
    let lane = hash_lane(disk, &info(16, 1 << 20, 0, 0), [0, 1], page, &mut memory.pool);
    assert_eq!(lane.map(|_| ()).unwrap_err().error, error::MEMORY);
}

#[test]
fn buffers_lie_side_by_side_and_end() {
    let memory = memory();
    let buffers = Buffers::new(memory.whole.slice(0, 4096).unwrap(), 1024);
    assert_eq!(buffers.slot(3, 1024).unwrap().addr, memory.whole.addr + 3072);
    assert!(buffers.slot(4, 1).is_none());
    assert!(buffers.slot(0, 1025).is_none());
    assert!(buffers.slot(usize::MAX, 1).is_none());
}
