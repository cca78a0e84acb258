//! Transfers of qcow2 images that the engine below does, beside what workers do.
use super::qcow2::{check, create, disk as local, folder};
use super::stores::{LIMITS, TestStore};
use super::*;
use crate::Rest;
use crate::blk::Format;
use crate::rig::{becomes_readable, registered};
use paravane_ring::driver::BufferId;
use paravane_store::StoreLimits;
use proptest::prelude::*;
use std::fs::File;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use tempfile::TempDir;

const SIZE: u64 = 1 << 20;
const CLUSTER: usize = 4096;
/// Sectors of a cluster.
const SECTORS: u64 = CLUSTER as u64 / 512;

/// A disk in an image in a store, whose first four clusters are allocated and known.
struct Known {
    rig: Rig<Blk>,
    store: Arc<TestStore>,
    path: PathBuf,
    _folder: TempDir,
}

fn over(store: &Arc<TestStore>) -> Blk {
    Blk::over(store.clone(), BlkConfig { format: Format::Qcow2, ..BlkConfig::new("") }).unwrap()
}

impl Known {
    fn new(test: &str, options: &str) -> Option<Self> {
        let folder = folder(test)?;
        let path = create(&folder, "disk.qcow2", SIZE, &format!("cluster_size={CLUSTER}{options}"));
        let store = TestStore::new(&path, LIMITS);
        let disk = over(&store);
        assert_eq!(disk.engine(), "queues of the store, threads");
        let mut rig = Rig::new(disk);
        assert_eq!(rig.status(blk::T_OUT, 0, &pattern(4 * CLUSTER, 1)), blk::S_OK);
        assert_eq!(rig.read(0, 4 * CLUSTER), pattern(4 * CLUSTER, 1));
        Some(Self { rig, store, path, _folder: folder })
    }

    /// Jobs that the queue of the store has done.
    fn below(&self) -> u64 {
        self.store.orders.done.load(Ordering::Relaxed)
    }

    fn hold(&self, hold: bool) {
        self.store.orders.hold.store(hold, Ordering::Relaxed);
    }

    /// Adds a write whose parts lie at `at`, each in a page of its own.
    fn add_write(&mut self, at: u64, sector: u64, data: &[u8]) -> BufferId {
        self.rig.poke(at, &header(blk::T_OUT, sector));
        self.rig.poke(at + 0x2000, data);
        self.rig.add(&[segment(at, 16), segment(at + 0x2000, data.len())], &[segment(at + 0x1000, 1)])
    }

    /// Does a request while others are held.
    fn meanwhile(&mut self, kind: u32, sector: u64, payload: &[u8]) -> u8 {
        self.rig.poke(HEADER, &header(kind, sector));
        self.rig.poke(PAYLOAD, payload);
        let readable_parts = [segment(HEADER, 16), segment(PAYLOAD, payload.len())];
        let id = self.rig.add(&readable_parts, &[segment(STATUS, 1)]);
        loop {
            self.rig.serve().unwrap();
            if let Some(used) = self.rig.driver.pop_used().unwrap() {
                assert_eq!(used.id, id, "the others are held");
                return self.rig.peek(STATUS, 1)[0];
            }
            if self.rig.handler.rest(true) != Rest::Serve {
                assert!(becomes_readable(registered(&mut *self.rig.handler)), "a request was lost");
            }
        }
    }
}

#[test]
fn known_clusters_are_the_engines_below_and_all_else_is_the_workers() {
    let Some(mut known) = Known::new("known_clusters_are_the_engines_below_and_all_else_is_the_workers", "")
    else {
        return;
    };
    assert_eq!(known.below(), 1, "the write has entered its clusters, which lie in a row");
    assert!(known.rig.read(0, 4 * CLUSTER) == pattern(4 * CLUSTER, 1));
    assert_eq!(known.below(), 2);
    assert_eq!(known.rig.status(blk::T_OUT, SECTORS, &pattern(CLUSTER, 2)), blk::S_OK);
    assert_eq!(known.below(), 3);
    // The first part below, the rest by a worker, which allocates it.
    assert_eq!(known.rig.status(blk::T_OUT, 3 * SECTORS, &pattern(2 * CLUSTER, 3)), blk::S_OK);
    assert_eq!(known.below(), 4);
    let expected = [
        &pattern(4 * CLUSTER, 1)[..CLUSTER],
        &pattern(CLUSTER, 2),
        &pattern(4 * CLUSTER, 1)[2 * CLUSTER..3 * CLUSTER],
        &pattern(2 * CLUSTER, 3),
    ];
    assert_eq!(known.rig.read(0, 5 * CLUSTER), expected.concat());
    let before = known.below();
    assert_eq!(known.rig.status(blk::T_FLUSH, 0, &[]), blk::S_OK);
    assert_eq!(known.rig.status(blk::T_WRITE_ZEROES, 0, &range(0, SECTORS as u32, 1)), blk::S_OK);
    assert!(known.rig.read(0, CLUSTER) == [0; CLUSTER]);
    assert_eq!(known.below(), before, "a cluster of zeroes is not known");
    // Zeroes in a cluster that stays allocated.
    assert_eq!(known.rig.status(blk::T_WRITE_ZEROES, 0, &range(SECTORS, SECTORS as u32, 0)), blk::S_OK);
    assert!(known.rig.read(SECTORS, CLUSTER) == [0; CLUSTER]);
    let path = known.path.clone();
    drop(known.rig);
    check(&path);
}

#[test]
fn clusters_in_use_are_not_freed() {
    for (kind, flags) in [(blk::T_DISCARD, 0), (blk::T_WRITE_ZEROES, 1), (blk::T_WRITE_ZEROES, 0)] {
        for options in ["", ",compat=0.10"] {
            let Some(mut known) = Known::new("clusters_in_use_are_not_freed", options) else { return };
            known.hold(true);
            // A write of the second cluster is on its way when all four are freed.
            let write = known.add_write(ROOM, SECTORS, &pattern(CLUSTER, 2));
            let all = range(0, 4 * SECTORS as u32, flags);
            assert_eq!(known.meanwhile(kind, 0, &all), blk::S_OK);
            // What was freed is allocated again.
            let elsewhere = pattern(16 * CLUSTER, 3);
            assert_eq!(known.meanwhile(blk::T_OUT, 64 * SECTORS, &elsewhere), blk::S_OK);
            known.hold(false);
            let used = known.rig.run().unwrap();
            assert_eq!(used.iter().map(|used| used.id).collect::<Vec<_>>(), [write]);
            assert_eq!(known.rig.peek(ROOM + 0x1000, 1), [blk::S_OK]);
            assert!(known.rig.read(64 * SECTORS, elsewhere.len()) == elsewhere, "{kind} {flags} {options}");
            assert!(known.rig.read(SECTORS, CLUSTER) == pattern(CLUSTER, 2), "the write came last");
            if kind == blk::T_WRITE_ZEROES {
                assert!(known.rig.read(0, CLUSTER) == [0; CLUSTER]);
                assert!(known.rig.read(2 * SECTORS, 2 * CLUSTER) == [0; 2 * CLUSTER]);
            }
            // Nothing is in use any more.
            assert_eq!(known.rig.status(kind, 0, &all), blk::S_OK);
            if kind == blk::T_WRITE_ZEROES {
                assert!(known.rig.read(0, 4 * CLUSTER) == [0; 4 * CLUSTER]);
            }
            let path = known.path.clone();
            drop(known.rig);
            check(&path);
        }
    }
}

#[test]
fn zeroes_over_a_read_in_flight_are_zeroes_afterwards() {
    let Some(mut known) = Known::new("zeroes_over_a_read_in_flight_are_zeroes_afterwards", "") else {
        return;
    };
    known.hold(true);
    known.rig.poke(ROOM, &header(blk::T_IN, SECTORS));
    known.rig.add(&[segment(ROOM, 16)], &[segment(ROOM + 0x2000, CLUSTER), segment(ROOM + 0x1000, 1)]);
    // A part of the cluster, and beyond it.
    let zeroes = range(SECTORS + 2, 2 * SECTORS as u32, 1);
    assert_eq!(known.meanwhile(blk::T_WRITE_ZEROES, 0, &zeroes), blk::S_OK);
    known.hold(false);
    known.rig.run().unwrap();
    assert_eq!(known.rig.peek(ROOM + 0x1000, 1), [blk::S_OK]);
    let mut expected = pattern(4 * CLUSTER, 1);
    expected[CLUSTER + 1024..][..2 * CLUSTER].fill(0);
    assert!(known.rig.peek(ROOM + 0x2000, CLUSTER) == expected[CLUSTER..2 * CLUSTER]);
    assert!(known.rig.read(0, 4 * CLUSTER) == expected);
    let path = known.path.clone();
    drop(known.rig);
    check(&path);
}

#[test]
fn the_disk_does_not_end_before_a_request_in_flight() {
    let Some(mut known) = Known::new("the_disk_does_not_end_before_a_request_in_flight", "") else { return };
    known.hold(true);
    known.add_write(ROOM, 3 * SECTORS, &pattern(CLUSTER, 2));
    known.rig.serve().unwrap();
    let mut resizer = known.rig.device.resizer();
    let error = resizer.resize(2 * CLUSTER as u64).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ResourceBusy);
    assert!(resizer.resize(2 * SIZE).unwrap(), "it grows");
    known.hold(false);
    known.rig.run().unwrap();
    assert!(known.rig.read(3 * SECTORS, CLUSTER) == pattern(CLUSTER, 2));
    assert!(resizer.resize(2 * CLUSTER as u64).unwrap());
}

#[test]
fn what_lies_beyond_the_end_of_the_file_reads_as_zeroes() {
    let Some(known) = Known::new("what_lies_beyond_the_end_of_the_file_reads_as_zeroes", "") else { return };
    let Known { mut rig, store, path, _folder } = known;
    let before = store.orders.done.load(Ordering::Relaxed);
    assert_eq!(rig.status(blk::T_OUT, 8 * SECTORS, &pattern(CLUSTER, 4)), blk::S_OK);
    assert_eq!(rig.read(8 * SECTORS, CLUSTER), pattern(CLUSTER, 4));
    // The file ends within the cluster.
    let bytes = std::fs::read(&path).unwrap();
    let data = pattern(CLUSTER, 4);
    let at = CLUSTER * bytes.chunks(CLUSTER).position(|cluster| cluster == data).unwrap();
    File::options().write(true).open(&path).unwrap().set_len(at as u64 + 2048).unwrap();
    let expected = [&pattern(CLUSTER, 4)[..2048], &[0; 2048]].concat();
    assert_eq!(rig.read(8 * SECTORS, CLUSTER), expected);
    assert!(store.orders.done.load(Ordering::Relaxed) > before, "it was tried below");
}

#[test]
fn a_store_of_larger_blocks_is_the_workers() {
    let Some(folder) = folder("a_store_of_larger_blocks_is_the_workers") else { return };
    let path = create(&folder, "disk.qcow2", SIZE, "");
    let store = TestStore::new(&path, StoreLimits { block: 4096, ..LIMITS });
    let mut rig = Rig::new(over(&store));
    for seed in 0..3 {
        assert_eq!(rig.status(blk::T_OUT, 3, &pattern(1024, seed)), blk::S_OK);
        assert_eq!(rig.read(3, 1024), pattern(1024, seed));
    }
    assert_eq!(store.orders.done.load(Ordering::Relaxed), 0);
    drop(rig);
    check(&path);
}

#[test]
fn a_local_image_has_a_ring_and_may_register_memory() {
    let test = "a_local_image_has_a_ring_and_may_register_memory";
    let Some(folder) = folder(test) else { return };
    let path = create(&folder, "disk.qcow2", SIZE, "");
    if let Err(why) = io_uring_available() {
        return skipped(test, why.to_string());
    }
    for (registered_buffers, name) in
        [(false, "io_uring, threads"), (true, "io_uring with registered buffers, threads")]
    {
        let config = BlkConfig { engine: EngineChoice::IoUring, registered_buffers, ..local(&path) };
        let disk = Blk::open(config).unwrap();
        assert_eq!(disk.engine(), name);
        let mut rig = Rig::new(disk);
        for seed in 0..3 {
            assert_eq!(rig.status(blk::T_OUT, 100, &pattern(3 * 65536, seed)), blk::S_OK);
            assert_eq!(rig.read(100, 3 * 65536), pattern(3 * 65536, seed));
        }
        drop(rig);
        check(&path);
    }
}

/// A request among others that are in flight at the same time.
#[derive(Clone, Copy, Debug)]
struct AtOnce {
    kind: u32,
    sector: u64,
    sectors: u64,
    seed: u64,
}

fn at_once() -> impl Strategy<Value = AtOnce> {
    let kind = prop::sample::select(vec![
        blk::T_OUT,
        blk::T_OUT,
        blk::T_IN,
        blk::T_DISCARD,
        blk::T_WRITE_ZEROES,
        blk::T_FLUSH,
    ]);
    (kind, 0..96_u64, 1..=16_u64, any::<u64>()).prop_map(|(kind, sector, sectors, seed)| AtOnce {
        kind,
        sector,
        sectors,
        seed,
    })
}

impl AtOnce {
    /// Bytes of the disk.
    fn bytes(&self) -> std::ops::Range<usize> {
        let (from, len) = (self.sector as usize * 512, self.sectors as usize * 512);
        from..from + len
    }

    /// What its range holds afterwards, if no other request touches it. `None`: anything.
    fn leaves(&self) -> Option<Vec<u8>> {
        match self.kind {
            blk::T_OUT => Some(pattern(self.bytes().len(), self.seed)),
            blk::T_WRITE_ZEROES => Some(vec![0; self.bytes().len()]),
            _ => None,
        }
    }

    fn changes(&self) -> bool {
        matches!(self.kind, blk::T_OUT | blk::T_DISCARD | blk::T_WRITE_ZEROES)
    }
}

/// Does all requests of a batch at once, and follows them in `model`, whose bytes are unknown where
/// requests have raced.
fn do_at_once(rig: &mut Rig<Blk>, batch: &[AtOnce], model: &mut [Option<u8>]) {
    let place = |number: usize, base: u64| base + number as u64 * 0x4000;
    for (number, request) in batch.iter().enumerate() {
        let (header_at, status) = (HEADER + number as u64 * 16, STATUS + number as u64);
        rig.poke(header_at, &header(request.kind, request.sector));
        rig.poke(status, &[UNTOUCHED]);
        let mut parts = [vec![segment(header_at, 16)], vec![]];
        let flags = u32::from(request.seed % 2 == 0 && request.kind == blk::T_WRITE_ZEROES);
        let payload = match request.kind {
            blk::T_OUT => pattern(request.bytes().len(), request.seed),
            blk::T_DISCARD | blk::T_WRITE_ZEROES => range(request.sector, request.sectors as u32, flags),
            _ => Vec::new(),
        };
        if !payload.is_empty() {
            rig.poke(place(number, PAYLOAD), &payload);
            parts[0].push(segment(place(number, PAYLOAD), payload.len()));
        }
        if request.kind == blk::T_IN {
            parts[1].push(segment(place(number, ROOM), request.bytes().len()));
        }
        parts[1].push(segment(status, 1));
        rig.add(&parts[0], &parts[1]);
    }
    assert_eq!(rig.run().unwrap().len(), batch.len());
    assert_eq!(rig.peek(STATUS, batch.len()), vec![blk::S_OK; batch.len()]);
    let mut changes = vec![0_u8; model.len()];
    for request in batch.iter().filter(|request| request.changes()) {
        changes[request.bytes()].iter_mut().for_each(|count| *count += 1);
    }
    for (number, request) in batch.iter().enumerate().filter(|(_, request)| request.kind == blk::T_IN) {
        let data = rig.peek(place(number, ROOM), request.bytes().len());
        for (at, byte) in request.bytes().zip(data) {
            assert!(changes[at] > 0 || model[at].is_none_or(|known| known == byte), "byte {at} was read");
        }
    }
    for request in batch.iter().filter(|request| request.changes()) {
        let leaves = request.leaves();
        for (number, at) in request.bytes().enumerate() {
            model[at] = leaves.as_ref().filter(|_| changes[at] == 1).map(|leaves| leaves[number]);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn requests_at_once_keep_each_other_and_the_image_whole(
        batches in prop::collection::vec(prop::collection::vec(at_once(), 1..16), 1..12),
        in_store in any::<bool>(),
        old in any::<bool>(),
    ) {
        const TEST: &str = "requests_at_once_keep_each_other_and_the_image_whole";
        let Some(folder) = folder(TEST) else { return Ok(()) };
        let options = if old { "cluster_size=4096,compat=0.10" } else { "cluster_size=4096" };
        let path = create(&folder, "disk.qcow2", SIZE, options);
        let disk = match in_store {
            true => over(&TestStore::new(&path, LIMITS)),
            false => Blk::open(local(&path)).unwrap(),
        };
        let mut rig = Rig::new(disk);
        let mut model = vec![Some(0); 112 * 512];
        for batch in &batches {
            do_at_once(&mut rig, batch, &mut model);
        }
        let end = rig.read(0, model.len());
        for (at, byte) in end.iter().enumerate() {
            prop_assert!(model[at].is_none_or(|known| known == *byte), "byte {} at the end", at);
        }
        drop(rig);
        check(&path);
    }
}
