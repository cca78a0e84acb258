//! The cache: shared, bounded, kept over a restart, and no obstacle when it cannot be written.
use crate::reader::{CHUNK, Memory, Reader, at_once, cache, content, open};
use crate::server::{Answer, Server};
use paravane_store::{CacheConfig, Link, Object, Outcome, Rest, Store};
use paravane_test_support::{Random, skip};
use std::collections::VecDeque;
use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use tempfile::TempDir;

const SIZE: usize = 64 * CHUNK as usize;

fn server() -> (Server, Vec<u8>) {
    let bytes = content(SIZE);
    let served = bytes.clone();
    (Server::start(move |request| Answer::good(&served, "a", request)), bytes)
}

#[test]
fn a_thousand_opens_share_a_cache_and_a_request() {
    let (server, bytes) = server();
    let folder = TempDir::new().unwrap();
    let config = cache(folder.path());
    let objects: Vec<_> =
        (0..1000).map(|_| open(&server.url(), &at_once(), Some(&config)).unwrap()).collect();
    assert_eq!(server.requests().len(), 1, "one asks what the object is");
    std::thread::scope(|scope| {
        for objects in objects.chunks(250) {
            scope.spawn(|| {
                let mut readers: Vec<_> = objects.iter().map(|object| Reader::new(object)).collect();
                for reader in &mut readers {
                    assert_eq!(
                        reader.read(3 * CHUNK + 5, 4096).unwrap(),
                        bytes[3 * CHUNK as usize + 5..][..4096]
                    );
                }
            });
        }
    });
    assert_eq!(server.requests().len(), 2, "and one fetches the chunk");
    let counters = objects[0].status().cache.unwrap();
    assert_eq!((counters.miss_bytes, counters.used_bytes), (CHUNK, CHUNK));
    let hits: u64 = objects.iter().map(|object| object.status().cache.unwrap().hit_bytes).sum();
    assert!(hits.is_multiple_of(4096) && hits <= 999 * 4096, "{hits}");
}

#[test]
fn reads_that_are_submitted_together_may_be_hits_and_misses() {
    let (server, bytes) = server();
    let folder = TempDir::new().unwrap();
    let object = open(&server.url(), &at_once(), Some(&cache(folder.path()))).unwrap();
    let mut reader = Reader::new(&object);
    for chunk in [0, 1, 2, 5] {
        reader.read(chunk * CHUNK, 8).unwrap();
    }
    let before = object.status().cache.unwrap();
    // Chunks 3 and 4 are absent. One read has an absent chunk and one that is here; the last is short.
    let places = [CHUNK - 100, 3 * CHUNK, 0, 4 * CHUNK + 50, 5 * CHUNK, 2 * CHUNK + 7, 6 * CHUNK - 300];
    for places in [&places[..], &[0; 150], &[SIZE as u64 - 10, SIZE as u64, 9, 10, 11]] {
        let mut memories: Vec<_> = places.iter().map(|_| Memory::new(200)).collect();
        for (head, (memory, at)) in memories.iter_mut().zip(places).enumerate() {
            reader.push(head as u16, memory, *at);
        }
        let mut outcomes = VecDeque::new();
        while outcomes.len() < places.len() {
            reader.0.wait().unwrap();
            reader.0.reap(&mut outcomes);
        }
        outcomes.make_contiguous().sort_by_key(Outcome::head);
        for (head, outcome) in outcomes.iter().enumerate() {
            let at = places[head] as usize;
            let len = (SIZE - at).min(200);
            assert_eq!((usize::from(outcome.head()), outcome.result()), (head, len as i32));
            assert!(memories[head].bytes[..len] == bytes[at..at + len]);
        }
    }
    let after = object.status().cache.unwrap();
    assert_eq!(after.miss_bytes - before.miss_bytes, 3 * CHUNK);
    assert_eq!(after.hit_bytes - before.hit_bytes, (5 + 150 + 3) * 200);
}

#[test]
fn reads_that_were_not_submitted_are_cancelled() {
    let (server, _) = server();
    let folder = TempDir::new().unwrap();
    let object = open(&server.url(), &at_once(), Some(&cache(folder.path()))).unwrap();
    let mut reader = Reader::new(&object);
    reader.read(0, 8).unwrap();
    let mut memory = Memory::new(200);
    reader.push(3, &mut memory, 0);
    assert_eq!(reader.0.rest(false), Rest::Serve);
    reader.0.cancel();
    let outcome = reader.outcome();
    assert_eq!((outcome.head(), outcome.result()), (3, -libc::ECANCELED));
    assert!(memory.bytes.iter().all(|byte| *byte == 0xaa));
}

#[test]
fn chunks_are_kept_until_the_object_is_another_one() {
    let bytes = content(SIZE);
    let served = Arc::new(Mutex::new((bytes.clone(), "a")));
    let server = Server::start({
        let served = served.clone();
        move |request| {
            let served = served.lock().unwrap();
            Answer::good(&served.0, served.1, request)
        }
    });
    let folder = TempDir::new().unwrap();
    let open = || open(&server.url(), &at_once(), Some(&cache(folder.path()))).unwrap();
    let object = open();
    assert!(Reader::new(&object).read(0, SIZE).unwrap() == bytes);
    drop(object);
    let before = server.requests().len();
    let object = open();
    assert_eq!(object.status().cache.unwrap().used_bytes, SIZE as u64);
    assert!(Reader::new(&object).read(0, SIZE).unwrap() == bytes);
    assert_eq!(server.requests().len(), before + 1, "only what the object is");
    drop(object);

    let other: Vec<u8> = bytes.iter().map(|byte| !byte).collect();
    *served.lock().unwrap() = (other.clone(), "b");
    let object = open();
    assert_eq!(object.status().cache.unwrap().used_bytes, 0);
    assert!(Reader::new(&object).read(0, SIZE).unwrap() == other);
}

#[test]
fn damaged_chunks_are_fetched_again() {
    let (server, bytes) = server();
    let folder = TempDir::new().unwrap();
    let open = || open(&server.url(), &at_once(), Some(&cache(folder.path()))).unwrap();
    let object = open();
    assert!(Reader::new(&object).read(0, SIZE).unwrap() == bytes);
    drop(object);
    let mut random = Random::new(5);
    for ending in ["map", "chunks"] {
        for _ in 0..20 {
            for entry in std::fs::read_dir(folder.path()).unwrap() {
                let path = entry.unwrap().path();
                if path.extension().unwrap() == ending {
                    let mut file = std::fs::read(&path).unwrap();
                    for _ in 0..5 {
                        let at = random.below(file.len());
                        file[at] = random.u64() as u8;
                    }
                    if random.once_in(5) {
                        file.truncate(random.below(file.len()));
                    }
                    std::fs::write(path, file).unwrap();
                }
            }
            let object = open();
            assert!(Reader::new(&object).read(0, SIZE).unwrap() == bytes);
        }
    }
}

#[test]
fn readers_in_order_have_chunks_fetched_ahead() {
    let (server, bytes) = server();
    let folder = TempDir::new().unwrap();
    let config = CacheConfig { read_ahead: 8 * CHUNK as u32, ..cache(folder.path()) };
    let object = open(&server.url(), &at_once(), Some(&config)).unwrap();
    let mut reader = Reader::new(&object);
    for at in (0..SIZE).step_by(4096) {
        assert!(reader.read(at as u64, 4096).unwrap() == bytes[at..at + 4096]);
    }
    let counters = object.status().cache.unwrap();
    assert_eq!(counters.miss_bytes + counters.read_ahead_bytes, SIZE as u64, "each chunk once");
    assert!(counters.read_ahead_bytes >= SIZE as u64 * 3 / 4, "{counters:?}");
    let gets = server.requests().len() - 1;
    assert!(gets < 24, "{gets} requests for 64 chunks");
}

#[test]
fn eviction_keeps_to_the_limit_under_readers() {
    let (server, bytes) = server();
    let folder = TempDir::new().unwrap();
    let limit = 10 * CHUNK;
    let config = CacheConfig { limit_bytes: limit, read_ahead: 2 * CHUNK as u32, ..cache(folder.path()) };
    let object = open(&server.url(), &at_once(), Some(&config)).unwrap();
    let most = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (object, bytes, most): (&Object, _, _) = (&object, &bytes, &most);
            scope.spawn(move || {
                let mut reader = Reader::new(object);
                let mut random = Random::new(thread);
                for _ in 0..1500 {
                    // Half of them where the others are, so that chunks are evicted under them.
                    let end = if random.once_in(2) { 12 * CHUNK as usize } else { SIZE };
                    let at = random.below(end);
                    let len = 1 + random.below(2 * CHUNK as usize);
                    let read = reader.read(at as u64, len).unwrap();
                    assert!(read == bytes[at..SIZE.min(at + len)], "{at} {len}");
                    let used = object.status().cache.unwrap().used_bytes;
                    most.fetch_max(used as usize, Ordering::Relaxed);
                }
            });
        }
    });
    let status = object.status();
    let counters = status.cache.unwrap();
    assert!(counters.evicted > 100 && counters.not_kept == 0, "{counters:?}");
    assert!(most.into_inner() as u64 <= limit, "{counters:?}");
    assert_eq!((counters.limit_bytes, status.link), (limit, Link::Up));
    drop(object);
    let blocks = |entry: std::io::Result<std::fs::DirEntry>| {
        std::os::unix::fs::MetadataExt::blocks(&entry.unwrap().metadata().unwrap()) * 512
    };
    let used: u64 = std::fs::read_dir(folder.path()).unwrap().map(blocks).sum();
    assert!(used <= limit + (64 << 10), "{used} bytes on the disk");
}

#[test]
fn memory_is_the_cache_without_a_folder() {
    let bytes = content(4 << 20);
    let served = bytes.clone();
    let server = Server::start(move |request| Answer::good(&served, "a", request));
    let options = paravane_store::ObjectOptions { memory_bytes: 1 << 20, ..at_once() };
    let object = open(&server.url(), &options, None).unwrap();
    let mut reader = Reader::new(&object);
    for _ in 0..3 {
        for at in (0..bytes.len()).step_by(100_000) {
            let right = &bytes[at..bytes.len().min(at + 100_000)];
            assert!(reader.read(at as u64, 100_000).unwrap() == right);
        }
    }
    let counters = object.status().cache.unwrap();
    assert!(counters.used_bytes <= 1 << 20 && counters.evicted > 0 && counters.hit_bytes > 0, "{counters:?}");
}

/// A small tmpfs, unmounted when dropped.
struct SmallDisk(TempDir);

impl SmallDisk {
    fn new() -> Option<Self> {
        let path = TempDir::new().unwrap();
        let mount =
            Command::new("mount").args(["-t", "tmpfs", "-o", "size=256k", "test"]).arg(path.path()).output();
        mount.is_ok_and(|output| output.status.success()).then_some(Self(path))
    }

    fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.path()).status();
    }
}

#[test]
fn a_full_disk_costs_nothing_but_the_cache() {
    let Some(disk) = SmallDisk::new() else {
        return skip("a_full_disk_costs_nothing_but_the_cache", "a tmpfs cannot be mounted");
    };
    let (server, bytes) = server();
    let object = open(&server.url(), &at_once(), Some(&cache(disk.path()))).unwrap();
    let mut reader = Reader::new(&object);
    for _ in 0..2 {
        assert!(reader.read(0, SIZE).unwrap() == bytes);
    }
    let used = object.status().cache.unwrap().used_bytes;
    assert!(used > 0);
    // The rest of the disk is gone, too: not a chunk fits any more.
    drop((reader, object));
    for entry in std::fs::read_dir(disk.path()).unwrap() {
        std::fs::remove_file(entry.unwrap().path()).unwrap();
    }
    let object = open(&server.url(), &at_once(), Some(&cache(disk.path()))).unwrap();
    let mut rest = std::fs::File::create(disk.path().join("rest")).unwrap();
    while rest.write_all(&[1; 4096]).is_ok() {}
    let mut reader = Reader::new(&object);
    assert!(reader.read(0, SIZE).unwrap() == bytes);
    assert!(reader.read(0, SIZE).unwrap() == bytes);
    let status = object.status();
    assert!(status.cache.unwrap().not_kept > 0, "{status:?}");
    assert_eq!(status.link, Link::Up);
}

#[test]
fn a_folder_that_is_missing_is_an_error() {
    let (server, _) = server();
    let error = open(&server.url(), &at_once(), Some(&cache(Path::new("/missing/folder")))).unwrap_err();
    assert!(error.contains("cache /missing/folder: No such file"), "{error}");
    let config = CacheConfig { chunk_bytes: 5000, ..cache(Path::new("/")) };
    assert!(open(&server.url(), &at_once(), Some(&config)).unwrap_err().contains("power of two"));
}
