//! A process that fills a cache is killed time after time: a chunk is right or absent.
use crate::reader::{CHUNK, Reader, at_once, cache, content, open};
use crate::server::{Answer, Server};
use paravane_store::{CacheConfig, Store};
use paravane_test_support::Random;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use tempfile::TempDir;

const SIZE: usize = 200 * CHUNK as usize + 77;
const KILLS: u64 = 30;

fn config(folder: &Path) -> CacheConfig {
    // Evicts as well.
    CacheConfig { limit_bytes: 120 * CHUNK, read_ahead: 4 * CHUNK as u32, ..cache(folder) }
}

/// Not a test of its own: the process that is killed. It reads for ever.
#[test]
fn child() {
    let Ok(url) = std::env::var("PARAVANE_TEST_OBJECT") else { return };
    let folder = std::env::var("PARAVANE_TEST_CACHE").unwrap();
    let object = open(&url, &at_once(), Some(&config(Path::new(&folder)))).unwrap();
    let bytes = content(SIZE);
    let mut reader = Reader::new(&object);
    let mut random = Random::new(std::process::id().into());
    let mut reads = 0;
    loop {
        let (at, len) = (random.below(SIZE), 1 + random.below(3 * CHUNK as usize));
        assert!(reader.read(at as u64, len).unwrap() == bytes[at..SIZE.min(at + len)]);
        reads += 1;
        println!("read {reads}");
    }
}

/// Starts the process and waits for some reads.
fn start(server: &Server, folder: &Path, reads: usize) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "killed::child", "--nocapture", "--test-threads=1"]);
    command.env("PARAVANE_TEST_OBJECT", server.url()).env("PARAVANE_TEST_CACHE", folder);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::inherit()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let line = format!("read {reads}");
    assert!(lines.any(|found| found.unwrap() == line), "the child has ended");
    // The pipe is closed with it: the child would end, so a thread reads the rest.
    std::thread::spawn(move || lines.for_each(drop));
    child
}

#[test]
fn a_chunk_is_right_or_absent_after_a_kill() {
    let bytes = content(SIZE);
    let served = bytes.clone();
    let server = Server::start(move |request| Answer::good(&served, "a", request));
    let folder = TempDir::new().unwrap();
    let mut random = Random::new(9);
    let mut kept = 0;
    for kill in 0..KILLS {
        let mut child = start(&server, folder.path(), 1 + random.below(150));
        // Anywhere in the next reads.
        std::thread::sleep(std::time::Duration::from_micros(random.below(3000) as u64));
        child.kill().unwrap();
        child.wait().unwrap();
        // A copy, in which what is read evicts nothing.
        let copy = TempDir::new().unwrap();
        for entry in std::fs::read_dir(folder.path()).unwrap() {
            let entry = entry.unwrap();
            std::fs::copy(entry.path(), copy.path().join(entry.file_name())).unwrap();
        }
        let object = open(&server.url(), &at_once(), Some(&cache(copy.path()))).unwrap();
        let counters = object.status().cache.unwrap();
        assert!(counters.used_bytes > 0 && counters.used_bytes <= 120 * CHUNK, "{kill}: {counters:?}");
        kept += counters.used_bytes;
        let mut reader = Reader::new(&object);
        for at in (0..SIZE).step_by(CHUNK as usize) {
            let right = &bytes[at..SIZE.min(at + CHUNK as usize)];
            assert!(reader.read(at as u64, CHUNK as usize).unwrap() == right, "{kill}: {at}");
        }
        let fetched = object.status().cache.unwrap().miss_bytes;
        assert_eq!(fetched, SIZE as u64 - counters.used_bytes, "{kill}: what was kept was right");
    }
    assert!(kept > KILLS * 20 * CHUNK, "{kept}");
}

#[test]
fn the_next_process_has_the_cache_when_the_first_one_is_gone() {
    let bytes = content(SIZE);
    let served = bytes.clone();
    let server = Server::start(move |request| Answer::good(&served, "a", request));
    let folder = TempDir::new().unwrap();
    let mut child = start(&server, folder.path(), 30);
    let object = open(&server.url(), &at_once(), Some(&config(folder.path()))).unwrap();
    let mut reader = Reader::new(&object);
    assert!(reader.read(0, 100).unwrap() == bytes[..100]);
    let status = object.status();
    assert!(status.error.unwrap().contains("used by another process; chunks are kept in memory"));
    child.kill().unwrap();
    child.wait().unwrap();
    // Misses look after the lock, at most once a second.
    let mut random = Random::new(3);
    while object.status().error.is_some() {
        let at = random.below(SIZE);
        assert!(reader.read(at as u64, 100).unwrap() == bytes[at..SIZE.min(at + 100)]);
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    assert!(object.status().cache.unwrap().used_bytes > 0);
    assert!(reader.read(0, SIZE).unwrap() == bytes);
}
