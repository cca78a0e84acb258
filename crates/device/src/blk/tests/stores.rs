//! Images in stores that are no files.
use super::fake_queue::{FakeHost, FakeQueue};
use super::model::{DISK, Model, SECTORS, op};
use super::*;
use crate::blk::images::{Disk, Use};
use crate::blk::{Format, Layer, LayerSource, OnFull, OpenError, OpenReason};
use crate::{Device, blk::tests::qcow2 as qcow2_tests};
use paravane_store::{Job, Pieces, Rest, Store, StoreLimits, StoreQueue, StoreStatus};
use proptest::prelude::*;
use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// A store on a file: jobs end in the opposite order, and transfers are short.
#[derive(Debug)]
pub(super) struct TestStore {
    file: Arc<File>,
    limits: StoreLimits,
    size: AtomicU64,
    /// As an export of an NBD server.
    pub(super) has_fixed_size: bool,
    /// What its queues share with the test.
    pub(super) orders: Arc<Orders>,
}

/// Orders of the test to the queues of a store, and what they have done.
#[derive(Debug, Default)]
pub(super) struct Orders {
    /// Jobs are begun later.
    pub(super) hold: AtomicBool,
    /// Jobs done.
    pub(super) done: AtomicU64,
    /// Where the store ends by now, if it has shrunk; 0: it has not.
    shrunk: AtomicU64,
    /// The store has been asked for its size.
    asked: AtomicBool,
}

impl Orders {
    fn is_outside(&self, job: Job) -> bool {
        let shrunk = self.shrunk.load(Ordering::Relaxed);
        shrunk > 0 && is_outside(job, shrunk)
    }
}

pub(super) const LIMITS: StoreLimits = StoreLimits::FILE;

impl TestStore {
    pub(super) fn new(file: &Path, limits: StoreLimits) -> Arc<Self> {
        let file = File::options().read(true).write(true).open(file).unwrap();
        let size = file.metadata().unwrap().len().into();
        Arc::new(Self { file: file.into(), limits, size, has_fixed_size: false, orders: Arc::default() })
    }
}

/// Does a job on the file, as far as the limits allow it.
///
/// # Safety
/// As [`paravane_store::file::perform`].
unsafe fn perform(file: &File, limits: &StoreLimits, job: Job) -> i32 {
    match job {
        Job::Zeroes { .. } if !limits.zeroes => -libc::EOPNOTSUPP,
        Job::Discard { .. } if !limits.discard => -libc::EOPNOTSUPP,
        // SAFETY: the caller's promise.
        job => unsafe { paravane_store::file::perform(file, job) },
    }
}

/// Whether a job writes beyond the end.
fn is_outside(job: Job, size: u64) -> bool {
    // SAFETY: the list is valid while the job is.
    let len = |pieces: Pieces| unsafe { pieces.slices() }.iter().map(|piece| piece.len as u64).sum::<u64>();
    match job {
        Job::Write { pieces, offset, .. } => offset + len(pieces) > size,
        Job::Zeroes { offset, len, .. } | Job::Discard { offset, len } => offset + len > size,
        Job::Read { .. } | Job::Flush => false,
    }
}

impl Store for TestStore {
    fn queue(&self, _jobs: u16) -> io::Result<Box<dyn StoreQueue>> {
        let (file, limits, orders) = (self.file.clone(), self.limits, self.orders.clone());
        Ok(Box::new(FakeQueue::new(TestHost { file, limits, orders })))
    }

    unsafe fn perform(&self, job: Job) -> i32 {
        if is_outside(job, self.size()) || self.orders.is_outside(job) {
            return -libc::ENOSPC;
        }
        // SAFETY: the caller's promise.
        unsafe { perform(&self.file, &self.limits, job) }
    }

    fn size(&self) -> u64 {
        self.size.load(Ordering::Relaxed)
    }

    fn end(&self) -> u64 {
        match (self.orders.asked.load(Ordering::Relaxed), self.orders.shrunk.load(Ordering::Relaxed)) {
            (true, end @ 1..) => end,
            _ => self.size(),
        }
    }

    fn refresh(&self) -> io::Result<u64> {
        self.orders.asked.store(true, Ordering::Relaxed);
        Err(io::Error::other("the server answers, and the size is another one"))
    }

    fn set_size(&self, size: u64) -> io::Result<()> {
        if self.has_fixed_size {
            return Err(io::ErrorKind::Unsupported.into());
        }
        self.file.set_len(size)?;
        self.size.store(size, Ordering::Relaxed);
        Ok(())
    }

    fn limits(&self) -> StoreLimits {
        self.limits
    }

    fn status(&self) -> StoreStatus {
        StoreStatus { location: "test://host/vm0".into(), ..StoreStatus::default() }
    }
}

/// Does the jobs of a queue in the opposite order.
#[derive(Debug)]
struct TestHost {
    file: Arc<File>,
    limits: StoreLimits,
    orders: Arc<Orders>,
}

impl FakeHost for TestHost {
    fn run(&mut self, jobs: &mut VecDeque<(u16, Job)>, done: &mut Vec<(u16, i32)>) {
        for (head, job) in jobs.drain(..).rev() {
            self.orders.done.fetch_add(1, Ordering::Relaxed);
            let result = match self.orders.is_outside(job) {
                true => -libc::ENOSPC,
                // SAFETY: the memory is valid until the outcome is reaped.
                false => unsafe { perform(&self.file, &self.limits, job) },
            };
            done.push((head, result));
        }
    }

    fn is_prompt(&self) -> bool {
        !self.orders.hold.load(Ordering::Relaxed)
    }

    fn begun(&self) -> usize {
        usize::MAX
    }

    fn rest(&self, _: bool, has_outcomes: bool) -> Rest {
        Rest::serve_if(has_outcomes)
    }
}

fn over(store: &Arc<TestStore>, config: BlkConfig) -> Result<Blk, OpenError> {
    Blk::over(store.clone(), config)
}

fn qcow2() -> BlkConfig {
    BlkConfig { format: Format::Qcow2, ..BlkConfig::new("") }
}

fn agrees(ops: &[super::model::Op], limits: StoreLimits, features: impl Fn(u64) -> u64) {
    let file = image(&pattern(DISK, 1));
    let disk = over(&TestStore::new(file.path(), limits), BlkConfig::new("")).unwrap();
    let features = features(disk.features());
    let mut rig = Rig::with_features(disk, features);
    let mut model = Model { bytes: pattern(DISK, 1), unknown: vec![false; DISK] };
    for op in ops {
        model.apply(op, &mut rig);
    }
    drop(rig);
    for (at, byte) in content(&file).into_iter().enumerate() {
        assert!(model.unknown[at] || model.bytes[at] == byte, "byte {at} of the file");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn a_disk_in_a_store_is_an_array_of_bytes(
        ops in prop::collection::vec(op(), 1..40),
        (zeroes, discard, flush) in any::<(bool, bool, bool)>(),
    ) {
        let refused = if flush { 0 } else { blk::F_FLUSH };
        agrees(&ops, StoreLimits { zeroes, discard, ..LIMITS }, |offered| offered & !refused);
    }

    #[test]
    fn a_qcow2_image_in_a_store_is_one_too(ops in prop::collection::vec(op(), 1..40), zeroes in any::<bool>()) {
        let Some(folder) = qcow2_tests::folder("a_qcow2_image_in_a_store_is_one_too") else { return Ok(()) };
        let path = qcow2_tests::create(&folder, "model.qcow2", DISK as u64, "");
        let store = TestStore::new(&path, StoreLimits { zeroes, ..LIMITS });
        let mut rig = Rig::new(over(&store, qcow2()).unwrap());
        let mut model = Model { bytes: vec![0; DISK], unknown: vec![false; DISK] };
        for op in &ops {
            model.apply(op, &mut rig);
        }
        let end = rig.read(0, DISK);
        for (at, byte) in end.iter().enumerate() {
            prop_assert!(model.unknown[at] || model.bytes[at] == *byte, "byte {}", at);
        }
        drop(rig);
        qcow2_tests::check(&path);
        qcow2_tests::compare(&path, &end);
    }
}

#[test]
fn an_overlay_on_a_base_in_a_store_keeps_the_base() {
    let test = "an_overlay_on_a_base_in_a_store_keeps_the_base";
    let Some(folder) = qcow2_tests::folder(test) else { return };
    let base = image(&pattern(DISK, 5));
    let top = qcow2_tests::create_on(&folder, "top.qcow2", base.path(), "raw", DISK as u64);
    let store = TestStore::new(base.path(), StoreLimits { read_only: true, ..LIMITS });
    let backing = vec![Layer { source: LayerSource::Store(store), format: Format::Raw }];
    let config = BlkConfig { backing, ..qcow2_tests::disk(&top) };
    // The header names the file below the store.
    assert!(matches!(Blk::open(config.clone()), Err(OpenError { reason: OpenReason::Layer { .. }, .. })));
    // As snapshots named it once.
    let early =
        qcow2_tests::create_on(&folder, "early.qcow2", "/run/test:/host/vm0".as_ref(), "raw", DISK as u64);
    drop(Blk::open(BlkConfig { path: early, ..config.clone() }).unwrap());
    let disk = Blk::open(BlkConfig { force_layers: true, ..config }).unwrap();
    let mut rig = Rig::new(disk);
    assert_eq!(rig.read(0, DISK), pattern(DISK, 5));
    assert_eq!(rig.status(blk::T_OUT, 7, &pattern(512, 6)), blk::S_OK);
    assert_eq!(rig.read(7, 512), pattern(512, 6));
    assert_eq!(rig.read(8, 512), pattern(DISK, 5)[8 * 512..9 * 512]);
    assert!(content(&base) == pattern(DISK, 5));
}

#[test]
fn what_a_store_cannot_do_is_refused() {
    let file = image(&pattern(DISK, 1));
    let read_only = TestStore::new(file.path(), StoreLimits { read_only: true, ..LIMITS });
    let refused = |config| over(&read_only, config).unwrap_err();
    assert!(matches!(refused(BlkConfig::new("")), OpenError { reason: OpenReason::ReadOnly, .. }));
    let read = BlkConfig { read_only: true, ..BlkConfig::new("") };
    let engine = EngineChoice::Threads;
    assert!(matches!(
        refused(BlkConfig { engine, ..read.clone() }),
        OpenError { reason: OpenReason::EngineOfStore, .. }
    ));
    assert!(matches!(
        refused(BlkConfig { direct: true, ..read.clone() }),
        OpenError { reason: OpenReason::Direct { .. }, .. }
    ));
    let disk = over(&read_only, read).unwrap();
    assert_eq!((disk.engine().as_str(), disk.size()), ("queues of the store", DISK as u64));
    assert!(disk.image().is_err());
    let empty = image(&[]);
    let store = TestStore::new(empty.path(), LIMITS);
    assert!(matches!(
        over(&store, BlkConfig::new("")).unwrap_err(),
        OpenError { reason: OpenReason::Empty, .. }
    ));
}

#[test]
fn a_raw_image_that_ends_within_a_block_is_refused_everywhere() {
    let test = "a_raw_image_that_ends_within_a_block_is_refused_everywhere";
    for (len, block) in [(511, 1), (DISK + 80, 1), (DISK + 512, 4096)] {
        let file = image(&pattern(len, 1));
        let store = TestStore::new(file.path(), StoreLimits { block, ..LIMITS });
        let is_odd = |error: OpenError| match error {
            OpenError { reason: OpenReason::StoreSize { size, block: told, .. }, .. } => {
                assert_eq!((size, told), (len as u64, u64::from(block.max(512))));
            }
            other => panic!("{other:?}"),
        };
        is_odd(over(&store, BlkConfig::new("")).unwrap_err());
        is_odd(over(&store, BlkConfig { read_only: true, ..BlkConfig::new("") }).unwrap_err());
        let place = LayerSource::Store(store.clone());
        is_odd(Disk::open(&place, Format::Raw, &[], Use::Read).unwrap_err());
        if let Some(folder) = qcow2_tests::folder(test) {
            let top = qcow2_tests::create_on(&folder, "top.qcow2", file.path(), "raw", DISK as u64);
            let backing = vec![Layer { source: place, format: Format::Raw }];
            let force_layers = true;
            is_odd(Blk::open(BlkConfig { backing, force_layers, ..qcow2_tests::disk(&top) }).unwrap_err());
        }
    }
}

#[test]
fn a_qcow2_image_may_end_within_a_sector_of_its_store() {
    let test = "a_qcow2_image_may_end_within_a_sector_of_its_store";
    let Some(folder) = qcow2_tests::folder(test) else { return };
    let content: Vec<u8> = (0..DISK / 8).flat_map(|at| ((at / 7) as u64).to_le_bytes()).collect();
    let (raw, path) = (image(&content), folder.path().join("compressed.qcow2"));
    let (from, to) = (qcow2_tests::text(raw.path()), qcow2_tests::text(&path));
    qcow2_tests::done(&["convert", "-c", "-f", "raw", "-O", "qcow2", from, to]);
    // qemu-img fills the last sector.
    let mut bytes = std::fs::read(&path).unwrap();
    while bytes.last() == Some(&0) {
        bytes.pop();
    }
    bytes.truncate(bytes.len().max(1));
    assert_ne!(bytes.len() % 512, 0, "the end is not at a sector");
    std::fs::write(&path, &bytes).unwrap();
    let store = TestStore::new(&path, LIMITS);
    let mut rig = Rig::new(over(&store, BlkConfig { read_only: true, ..qcow2() }).unwrap());
    assert!(rig.read(0, DISK) == content);
    let disk = Disk::open(&LayerSource::Store(store), Format::Qcow2, &[], Use::Read).unwrap();
    let mut found = vec![0; DISK];
    disk.read(&mut found, 0).unwrap();
    assert!(found == content);
}

#[test]
fn a_write_beyond_the_end_of_a_store_that_has_shrunk_does_not_wait() {
    let test = "a_write_beyond_the_end_of_a_store_that_has_shrunk_does_not_wait";
    let raw = image(&pattern(DISK, 1));
    let folder = qcow2_tests::folder(test);
    let path = folder.as_ref().map(|folder| qcow2_tests::create(folder, "a.qcow2", DISK as u64, ""));
    let formats = [Some((raw.path(), BlkConfig::new(""))), path.as_deref().map(|path| (path, qcow2()))];
    for (path, config) in formats.into_iter().flatten() {
        let mut store = TestStore::new(path, LIMITS);
        Arc::get_mut(&mut store).unwrap().has_fixed_size = true;
        let mut rig = Rig::new(over(&store, BlkConfig { on_full: OnFull::Wait, ..config }).unwrap());
        store.orders.shrunk.store(DISK as u64 / 2, Ordering::Relaxed);
        // The thread that asks the store wakes the queue, long before a test would give up.
        assert_eq!(rig.status(blk::T_OUT, SECTORS - 2, &[7; 512]), blk::S_IOERR);
        assert!(store.orders.asked.load(Ordering::Relaxed));
        assert_eq!(rig.device.full().status(), None);
        // From now on it is known.
        assert_eq!(rig.status(blk::T_OUT, SECTORS - 1, &[7; 512]), blk::S_IOERR);
        assert_eq!(rig.device.full().times(), 1);
    }
}

#[test]
fn a_driver_is_told_how_large_a_discard_must_be() {
    let file = image(&pattern(DISK, 1));
    let alignment = |discard_block, physical_block| {
        let store = TestStore::new(file.path(), StoreLimits { discard_block, physical_block, ..LIMITS });
        let disk = over(&store, BlkConfig::new("")).unwrap();
        let mut config = paravane_spec::blk::Config::default();
        disk.read_config(0, zerocopy::IntoBytes::as_mut_bytes(&mut config));
        (u32::from_le(config.discard_sector_alignment), config.physical_block_exp)
    };
    assert_eq!(alignment(64 << 10, 4096), (128, 3));
    assert_eq!(alignment(4096, 4096), (8, 3));
    // A store that errs does not make it smaller than a block.
    assert_eq!(alignment(0, 4096), (8, 3));
}

#[test]
fn a_disk_in_a_store_follows_its_size_and_block() {
    let file = image(&pattern(DISK, 1));
    let store = TestStore::new(file.path(), StoreLimits { block: 4096, ..LIMITS });
    let mut disk = over(&store, BlkConfig::new("")).unwrap();
    assert_eq!(disk.size(), SECTORS * 512);
    let mut config = [0; 24];
    disk.read_config(0, &mut config);
    assert_eq!(config[20..24], 4096_u32.to_le_bytes());
    store.set_size(2 * DISK as u64).unwrap();
    assert!(disk.refresh().unwrap());
    assert_eq!(disk.size(), 2 * DISK as u64);
    assert!(disk.resizer().resize(DISK as u64).unwrap());
    assert_eq!(file.as_file().metadata().unwrap().len(), DISK as u64);
}
