//! Copies that skip what layers call zeroes, to targets that are new or hold something.
use super::super::images::{self, Content, Disk, Extent, ImageError, NewImage, NewQcow2, Use};
use super::pattern;
use super::qcow2::{check, create_on, done, folder, layer, text};
use super::stores::{LIMITS, TestStore};
use crate::blk::block_status::BlockStatus;
use crate::blk::{Format, Layer, LayerSource, OpenError, OpenReason};
use paravane_store::file::FileStore;
use paravane_store::{Job, Pieces, Store, StoreExtent, StoreLimits, StoreQueue, StoreStatus};
use proptest::prelude::*;
use std::fs::File;
use std::io;
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

const MIB: u64 = 1 << 20;
const SIZE: u64 = 64 * MIB;

/// A store on a file that counts bytes, and fails on request.
#[derive(Debug)]
struct Recorder {
    store: Arc<TestStore>,
    file: Arc<dyn Store>,
    /// It knows which parts are zeroes.
    tells: bool,
    read: AtomicU64,
    written: AtomicU64,
    zeroed: AtomicU64,
    /// Writes fail that reach this offset.
    broken_from: AtomicU64,
    flushes_fail: AtomicBool,
}

impl Recorder {
    fn new(file: &Path, limits: StoreLimits, tells: bool) -> Arc<Self> {
        Arc::new(Self {
            store: TestStore::new(file, limits),
            file: FileStore::of(File::open(file).unwrap()),
            tells,
            read: 0.into(),
            written: 0.into(),
            zeroed: 0.into(),
            broken_from: u64::MAX.into(),
            flushes_fail: false.into(),
        })
    }

    fn counts(&self) -> (u64, u64, u64) {
        let count = |count: &AtomicU64| count.load(Ordering::Relaxed);
        (count(&self.read), count(&self.written), count(&self.zeroed))
    }
}

impl Store for Recorder {
    fn queue(&self, jobs: u16) -> io::Result<Box<dyn StoreQueue>> {
        self.store.queue(jobs)
    }

    unsafe fn perform(&self, job: Job) -> i32 {
        // SAFETY: the list is valid while the job is.
        let len = |pieces: Pieces| unsafe { pieces.slices() }.iter().map(|piece| piece.len as u64).sum();
        let block = u64::from(self.limits().block);
        let (count, offset, len) = match job {
            Job::Read { pieces, offset } => (&self.read, offset, len(pieces)),
            Job::Write { pieces, offset, .. } => (&self.written, offset, len(pieces)),
            Job::Zeroes { offset, len, .. } => (&self.zeroed, offset, len),
            Job::Flush if self.flushes_fail.load(Ordering::Relaxed) => return -libc::EIO,
            Job::Flush | Job::Discard { .. } => (&self.read, 0, 0),
        };
        if !(offset | len).is_multiple_of(block) {
            return -libc::EINVAL;
        }
        if !matches!(job, Job::Read { .. }) && offset + len > self.broken_from.load(Ordering::Relaxed) {
            return -libc::EIO;
        }
        count.fetch_add(len, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { self.store.perform(job) }
    }

    fn size(&self) -> u64 {
        self.store.size()
    }

    fn set_size(&self, size: u64) -> io::Result<()> {
        self.store.set_size(size)
    }

    fn extents(&self, offset: u64, len: u64) -> io::Result<Vec<StoreExtent>> {
        if !self.tells {
            return Ok(vec![StoreExtent::data(offset, len)]);
        }
        let (status, mut at, mut found) = (BlockStatus::default(), offset, Vec::new());
        while at < offset + len {
            let (zeroes, part) = status.zeroes(&self.file, at, offset + len - at)?;
            found.push(if zeroes { StoreExtent::hole(at, part) } else { StoreExtent::data(at, part) });
            at += part;
        }
        Ok(found)
    }

    fn limits(&self) -> StoreLimits {
        self.store.limits()
    }

    fn status(&self) -> StoreStatus {
        self.store.status()
    }
}

fn on(_: u64) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// A sparse file with data at some places.
fn sparse(path: &Path, size: u64, data: &[(u64, u64)]) {
    let file = File::create(path).unwrap();
    file.set_len(size).unwrap();
    for &(offset, len) in data {
        file.write_all_at(&pattern(len as usize, offset | 1), offset).unwrap();
    }
}

fn source(store: &Arc<Recorder>) -> LayerSource {
    LayerSource::Store(store.clone())
}

#[test]
fn holes_of_every_layer_are_not_read() {
    let Some(folder) = folder("holes_of_every_layer_are_not_read") else { return };
    let path = |name: &str| folder.path().join(name);
    sparse(&path("base"), SIZE, &[(10 * MIB, MIB), (50 * MIB, 4096)]);
    let top = create_on(&folder, "top.qcow2", &path("base"), "raw", SIZE);
    // Clusters that are allocated, and were never written.
    done(&["create", "-q", "-f", "qcow2", "-o", "preallocation=metadata", text(&path("full.qcow2")), "64M"]);
    let copied = |disk: &Disk| {
        sparse(&path("copy"), SIZE, &[]);
        let to = Disk::open(&LayerSource::Path(path("copy")), Format::Raw, &[], Use::Write).unwrap();
        let written = images::copy(disk, &to, Content::Zeroes, &mut on).unwrap();
        drop(to);
        (written, std::fs::read(path("copy")).unwrap())
    };
    for tells in [true, false] {
        let (base, image) = (Recorder::new(&path("base"), LIMITS, tells), Recorder::new(&top, LIMITS, tells));
        let layers = [Layer { source: source(&base), format: Format::Raw }];
        let disk = Disk::open(&source(&image), Format::Qcow2, &layers, Use::Read).unwrap();
        assert_eq!(disk.extent(0, SIZE).unwrap().0, if tells { Extent::Hole } else { Extent::Data });
        let (written, copy) = copied(&disk);
        assert_eq!(written, MIB + 4096);
        assert!(copy == std::fs::read(path("base")).unwrap());
        let (read, ..) = base.counts();
        // The beginning may be looked at, too.
        let least = if tells { MIB + 4096 } else { SIZE };
        assert!((least..least + 4096).contains(&read), "{read}");
    }
    // The same in files.
    let file = |name: &str| LayerSource::Path(path(name));
    let disk = Disk::open(&file("top.qcow2"), Format::Qcow2, &[layer(&path("base"), Format::Raw)], Use::Read);
    assert_eq!(disk.unwrap().extent(0, SIZE).unwrap(), (Extent::Hole, 10 * MIB));
    let full = Disk::open_alone(&file("full.qcow2")).unwrap();
    assert_eq!(full.extent(0, SIZE).unwrap().0, Extent::Zeroes, "merging must zero what is below");
}

#[test]
fn a_target_is_zeroed_where_it_is_not_known_to_be() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    sparse(&path("from"), 16 * MIB, &[(4 * MIB, MIB)]);
    let from = Disk::open(&LayerSource::Path(path("from")), Format::Raw, &[], Use::Read).unwrap();
    for (tells, zeroes) in [(true, true), (true, false), (false, true), (false, false)] {
        sparse(&path("to"), 32 * MIB, &[(0, MIB), (4 * MIB, 2 * MIB), (31 * MIB, MIB)]);
        let store = Recorder::new(&path("to"), StoreLimits { zeroes, ..LIMITS }, tells);
        let to = Disk::overwrite(&source(&store), &NewImage::Raw(16 * MIB)).unwrap();
        assert_eq!(images::copy(&from, &to, Content::Unknown, &mut on).unwrap(), MIB);
        let (_, written, zeroed) = store.counts();
        let unknown = if tells { 3 * MIB } else { 31 * MIB };
        assert_eq!((written, zeroed), if zeroes { (MIB, unknown) } else { (MIB + unknown, zeroed) });
        let mut expected = std::fs::read(path("from")).unwrap();
        expected.resize(32 << 20, 0);
        assert!(std::fs::read(path("to")).unwrap() == expected);
    }
}

#[test]
fn the_end_of_a_copy_tells_of_every_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    sparse(&path("from"), 16 * MIB, &[(0, 512), (8 * MIB, MIB)]);
    let from = Disk::open(&LayerSource::Path(path("from")), Format::Raw, &[], Use::Read).unwrap();
    let failed = |broken_from, flushes_fail| {
        sparse(&path("to"), 16 * MIB, &[(3 * MIB, MIB)]);
        let store = Recorder::new(&path("to"), LIMITS, true);
        store.broken_from.store(broken_from, Ordering::Relaxed);
        store.flushes_fail.store(flushes_fail, Ordering::Relaxed);
        let to = Disk::overwrite(&source(&store), &NewImage::Raw(16 * MIB)).unwrap();
        match images::copy(&from, &to, Content::Unknown, &mut on) {
            Err(ImageError::Io { action, .. }) => action,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(failed(9 * MIB - 512, false), "write");
    assert_eq!(failed(4 * MIB - 512, false), "write zeroes");
    assert_eq!(failed(u64::MAX, true), "make writes durable");
}

#[test]
fn what_cannot_be_overwritten_stays_as_it_was() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    sparse(&path("old"), 2 * MIB, &[(0, 2 * MIB)]);
    let place = LayerSource::Path(path("old"));
    let old = std::fs::read(path("old")).unwrap();
    match Disk::overwrite(&place, &NewImage::Raw(2 * MIB + 512)) {
        Err(ImageError::Small { target, source_size, .. }) => {
            assert_eq!((target, source_size), (2 * MIB, 2 * MIB + 512));
        }
        other => panic!("{other:?}"),
    }
    let wrong = NewQcow2 { size: MIB, cluster_size: 100, backing: None };
    assert!(matches!(Disk::overwrite(&place, &NewImage::Qcow2(wrong)), Err(ImageError::New { .. })));
    let reader = Disk::open(&place, Format::Raw, &[], Use::Read).unwrap();
    for new in
        [NewImage::Raw(MIB), NewImage::Qcow2(NewQcow2 { size: MIB, cluster_size: 65536, backing: None })]
    {
        let error = Disk::overwrite(&place, &new).unwrap_err();
        assert!(matches!(error, ImageError::Open(OpenError { reason: OpenReason::InUse, .. })), "{error}");
    }
    drop(reader);
    assert!(std::fs::read(path("old")).unwrap() == old);
    let missing = LayerSource::Path(path("missing"));
    assert!(matches!(Disk::overwrite(&missing, &NewImage::Raw(MIB)), Err(ImageError::Open(_))));
}

#[test]
fn a_qcow2_image_is_made_where_something_is() {
    let Some(folder) = folder("a_qcow2_image_is_made_where_something_is") else { return };
    let path = |name: &str| folder.path().join(name);
    for name in ["from", "same"] {
        sparse(&path(name), 8 * MIB, &[(MIB, 3 * MIB), (7 * MIB, 512)]);
    }
    let from = Disk::open(&LayerSource::Path(path("from")), Format::Raw, &[], Use::Read).unwrap();
    let new = NewImage::Qcow2(NewQcow2 { size: 8 * MIB, cluster_size: 65536, backing: None });
    for is_file in [true, false] {
        sparse(&path("to"), 16 * MIB, &[(0, 16 * MIB)]);
        let store = Recorder::new(&path("to"), LIMITS, true);
        let place = if is_file { LayerSource::Path(path("to")) } else { source(&store) };
        let to = Disk::overwrite(&place, &new).unwrap();
        images::copy(&from, &to, Content::Zeroes, &mut on).unwrap();
        drop(to);
        check(&path("to"));
        done(&["compare", "-q", "-f", "raw", "-F", "qcow2", text(&path("same")), text(&path("to"))]);
        // A file is emptied first.
        assert_eq!(path("to").metadata().unwrap().len() < 8 * MIB, is_file);
    }
}

/// Parts of a disk in units of 512 bytes: data or holes.
fn parts() -> impl Strategy<Value = Vec<(u64, u64)>> {
    prop::collection::vec((0..2000_u64, 1..300_u64), 0..6)
        .prop_map(|parts| parts.into_iter().map(|(at, len)| (at * 512, len * 512)).collect())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn a_copy_is_the_source_and_then_zeroes(
        (from_parts, to_parts) in (parts(), parts()),
        sectors in 1..2400_u64,
        more in 0..600_u64,
        (from_block, to_block) in (prop::sample::select(vec![1, 512, 4096]), prop::sample::select(vec![1, 512, 4096])),
        (from_tells, to_tells, zeroes) in any::<(bool, bool, bool)>(),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let aligned = |size: u64, block: u32| size.next_multiple_of(block.into());
        let size = aligned(sectors * 512, from_block);
        let larger = aligned(size + more * 512, to_block);
        let inside = |parts: &[(u64, u64)], size: u64| -> Vec<(u64, u64)> {
            parts.iter().filter(|(at, len)| at + len <= size).copied().collect()
        };
        sparse(&path("from"), size, &inside(&from_parts, size));
        sparse(&path("to"), larger, &inside(&to_parts, larger));
        let from = Recorder::new(&path("from"), StoreLimits { block: from_block, ..LIMITS }, from_tells);
        let to = Recorder::new(&path("to"), StoreLimits { block: to_block, zeroes, ..LIMITS }, to_tells);
        let disk = Disk::open(&source(&from), Format::Raw, &[], Use::Read).unwrap();
        let target = Disk::overwrite(&source(&to), &NewImage::Raw(size)).unwrap();
        images::copy(&disk, &target, Content::Unknown, &mut on).unwrap();
        let mut expected = std::fs::read(path("from")).unwrap();
        expected.resize(larger as usize, 0);
        prop_assert!(std::fs::read(path("to")).unwrap() == expected);
    }
}
