//! Servers that do not behave: an error that says so, and never wrong bytes.
use crate::reader::{CHUNK, Memory, Reader, at_once, cache, content, open, perform};
use crate::server::{Answer, Request, Server, Then};
use paravane_store::{Job, Link, ObjectOptions, Store};
use paravane_test_support::{Random, patience};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;
use tempfile::TempDir;

const SIZE: usize = 10 * CHUNK as usize + 1000;

/// A server that answers the first request as it must, and others as `later` says.
fn later(later: impl Fn(&Request) -> Answer + Send + Sync + 'static) -> Server {
    let bytes = content(SIZE);
    let first = AtomicBool::new(true);
    Server::start(move |request| {
        if first.swap(false, Ordering::Relaxed) { Answer::good(&bytes, "a", request) } else { later(request) }
    })
}

#[test]
fn bytes_are_those_of_the_server() {
    let bytes = content(SIZE);
    let served = bytes.clone();
    let server = Server::start(move |request| Answer::good(&served, "a", request));
    let folder = TempDir::new().unwrap();
    let object = open(&server.url(), &at_once(), Some(&cache(folder.path()))).unwrap();
    assert_eq!(object.size(), SIZE as u64);
    assert!(object.limits().read_only);
    let mut reader = Reader::new(&object);
    let mut random = Random::new(1);
    for _ in 0..500 {
        let (offset, len) = (random.below(SIZE), 1 + random.below(3 * CHUNK as usize));
        let right = &bytes[offset..SIZE.min(offset + len)];
        let read = if random.once_in(4) {
            perform(&object, offset as u64, len)
        } else {
            reader.read(offset as u64, len)
        };
        assert!(read.as_deref() == Ok(right), "{offset} {len}");
    }
    // Beyond the end.
    assert_eq!(reader.read(SIZE as u64, 10), Ok(vec![]));
    assert_eq!(reader.read(u64::MAX, 10), Ok(vec![]));
    let status = object.status();
    let counters = status.cache.unwrap();
    assert_eq!((status.link, status.connections, status.error), (Link::Up, 1, None));
    assert_eq!((counters.miss_bytes, counters.used_bytes), (SIZE as u64, SIZE as u64));
    assert!(counters.hit_bytes > 0 && counters.not_kept == 0 && counters.evicted == 0);
    for request in &server.requests()[1..] {
        assert!(request.head.contains("if-match: \"a\"\r\n"), "{request:?}");
        assert!(request.head.contains("accept-encoding: identity\r\n"));
    }
}

#[test]
fn nothing_can_be_written() {
    let server = later(|_| Answer::status(500, ""));
    let object = open(&server.url(), &at_once(), None).unwrap();
    let mut reader = Reader::new(&object);
    let jobs = [
        (Job::Discard { offset: 0, len: 512 }, -libc::EROFS),
        (Job::Zeroes { offset: 0, len: 512, unmap: true }, -libc::EROFS),
        (Job::Flush, 0),
    ];
    for (job, result) in jobs {
        // SAFETY: without memory.
        unsafe { reader.0.push(1, job).unwrap() };
        assert_eq!(reader.outcome().result(), result);
        // SAFETY: without memory.
        assert_eq!(unsafe { object.perform(job) }, result);
    }
}

#[test]
fn objects_that_cannot_be_opened() {
    let refused = |answer: Answer, part: &str| {
        let server = Server::start(move |_| answer.clone());
        let error = open(&server.url(), &at_once(), None).unwrap_err();
        assert!(error.contains(part), "{error}");
    };
    refused(Answer::new("HTTP/1.1 200 OK\nContent-Length: 3\n", b"abc"), "does not serve ranges");
    refused(Answer::status(404, ""), "no such object");
    refused(Answer::status(403, ""), "credentials");
    refused(Answer::status(503, ""), "503");
    refused(Answer::status(416, "Content-Range: bytes */0\n"), "empty");
    refused(Answer::status(302, "Location: http://other.example/x?secret\n"), "http://other.example/x;");
    refused(Answer::status(301, "Location: /circle\n"), "circle");
    refused(Answer::new("HTTP/1.1 206 X\nContent-Range: bytes 0-0/9\nContent-Length: 1\n", b"a"), "ETag");
    let large = "ETag: \"a\"\nContent-Range: bytes 0-0/9223372036854775807\nContent-Length: 1\n";
    refused(Answer::new(&format!("HTTP/1.1 206 X\n{large}"), b"a"), "9223372036854775807");
    refused(Answer::new(&format!("HTTP/1.1 206 X\nX: {}\n", "x".repeat(1 << 20)), b""), "too large");
    refused(Answer::new("220 smtp.example ESMTP\n", b"").then(Then::Close), "no answer");
    refused(Answer::new("", b"").cut(10).then(Then::Close), "no answer");
}

#[test]
fn a_server_that_is_out_of_reach() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/x", listener.local_addr().unwrap());
    drop(listener);
    let error = open(&url, &at_once(), None).unwrap_err();
    assert!(error.contains("cannot connect to 127.0.0.1:") && error.contains("refused"), "{error}");
}

#[test]
fn redirects_to_the_same_server_are_followed() {
    let bytes = content(SIZE);
    let server = Server::start(move |request| match &*request.path {
        "/disk.img" | "/disk.img?token=hidden" => Answer::status(302, "Location: /blob/7?token=hidden\n"),
        "/blob/7?token=hidden" => Answer::good(&bytes, "a", request),
        path => panic!("{path}"),
    });
    let object = open(&server.url(), &at_once(), None).unwrap();
    assert_eq!(Reader::new(&object).read(5, 100).unwrap(), content(SIZE)[5..105]);
    assert!(object.status().location.ends_with("/blob/7"));
    // What a query has may be secret.
    let token = open(&format!("{}?token=hidden", server.url()), &at_once(), None);
    assert!(!format!("{object:?} {token:?}").contains("hidden"));
}

/// A server whose later answers make the object unusable, before and after a chunk is here.
fn unusable(part: &str, answer: impl Fn(&Request) -> Answer + Send + Sync + 'static) {
    let bytes = content(SIZE);
    let server = Server::start(move |request| match request.range {
        (0, _) => Answer::good(&bytes, "a", request),
        _ => answer(request),
    });
    let folder = TempDir::new().unwrap();
    let object = open(&server.url(), &ObjectOptions::default(), Some(&cache(folder.path()))).unwrap();
    let mut reader = Reader::new(&object);
    assert_eq!(reader.read(10, 10).unwrap(), content(SIZE)[10..20]);
    assert_eq!(reader.read(3 * CHUNK, 10), Err(libc::EIO));
    let status = object.status();
    assert_eq!(status.link, Link::Unusable, "{part}");
    assert!(status.error.as_ref().is_some_and(|error| error.contains(part)), "{status:?}");
    // What is here is of an object that is no more.
    assert_eq!(reader.read(10, 10), Err(libc::EIO));
    assert_eq!(perform(&object, 10, 10), Err(libc::EIO));
}

#[test]
fn a_change_makes_an_object_unusable() {
    let other = content(SIZE + 1);
    let bytes = content(SIZE);
    let good = bytes.clone();
    unusable("the object has changed", move |request| Answer::good(&good, "b", request));
    unusable("the object has changed", |_| Answer::status(412, ""));
    unusable("shorter", |_| Answer::status(416, ""));
    unusable("its size is another one", move |request| Answer::good(&other, "a", request));
    let good = bytes.clone();
    unusable("does not serve ranges any more", move |_| {
        Answer::new(&format!("HTTP/1.1 200 OK\nETag: \"a\"\nContent-Length: {SIZE}\n"), &good)
    });
    let good = bytes.clone();
    unusable("Content-Range is", move |request| {
        let (first, last) = request.range;
        Answer::range(&good, "a", (first - 1, last - 1), SIZE)
    });
    let good = bytes.clone();
    unusable("bytes, not 16384", move |request| {
        let body = &good[..20];
        let (first, last) = request.range;
        let head = format!("HTTP/1.1 206 X\nETag: \"a\"\nContent-Range: bytes {first}-{last}/{SIZE}\n");
        Answer::new(&format!("{head}Content-Length: 20\n"), body)
    });
    unusable("sends more than it was asked for", move |request| {
        let (first, last) = request.range;
        let head = format!("HTTP/1.1 206 X\nETag: \"a\"\nContent-Range: bytes {first}-{last}/{SIZE}\n");
        let mut body = b"8000\r\n".to_vec();
        body.extend_from_slice(&bytes[..0x8000]);
        body.extend_from_slice(b"\r\n0\r\n\r\n");
        Answer::new(&format!("{head}Transfer-Encoding: chunked\n"), &body)
    });
}

#[test]
fn a_server_that_fails_for_a_while_is_asked_again() {
    let bytes = content(SIZE);
    let served = bytes.clone();
    let count = AtomicUsize::new(0);
    let server = later(move |request| {
        let good = Answer::good(&served, "a", request);
        match count.fetch_add(1, Ordering::Relaxed) {
            0 => Answer::status(503, "Retry-After: 0\n"),
            1 => good.cut(100).then(Then::Close),
            2 => Answer::new("", b"").cut(2).then(Then::Close),
            3 => Answer::new("HTTP/1.1 206\0\n", b"").then(Then::Close),
            _ => good,
        }
    });
    let folder = TempDir::new().unwrap();
    let options = ObjectOptions { retry: Duration::from_secs(3600), ..ObjectOptions::default() };
    let object = open(&server.url(), &options, Some(&cache(folder.path()))).unwrap();
    assert_eq!(Reader::new(&object).read(5, 30_000).unwrap(), bytes[5..30_005]);
    let status = object.status();
    assert_eq!(status.link, Link::Up);
    assert!(status.reconnects >= 1 && status.error.is_some(), "{status:?}");
    // The first chunk was there after the second attempt: it is asked for no more.
    let starts: Vec<u64> = server.requests()[1..].iter().map(|request| request.range.0).collect();
    assert_eq!(starts, [0, 0, CHUNK, CHUNK, CHUNK]);
}

#[test]
fn requests_fail_when_the_time_is_over_until_the_server_is_back() {
    let bytes = content(SIZE);
    let works = Arc::new(AtomicBool::new(false));
    let server = later({
        let (bytes, works) = (bytes.clone(), works.clone());
        move |request| match works.load(Ordering::Relaxed) {
            true => Answer::good(&bytes, "a", request),
            false => Answer::status(500, ""),
        }
    });
    let object = open(&server.url(), &at_once(), None).unwrap();
    let mut reader = Reader::new(&object);
    assert_eq!(reader.read(0, 10), Err(libc::EIO));
    assert_eq!(perform(&object, 0, 10), Err(libc::EIO));
    let status = object.status();
    assert_eq!((status.link, status.waiting), (Link::Down, 0));
    assert!(status.error.unwrap().contains("500"));
    works.store(true, Ordering::Relaxed);
    assert_eq!(reader.read(0, 10).unwrap(), bytes[..10]);
    assert_eq!(object.status().link, Link::Up);
}

#[test]
fn a_server_that_stalls() {
    let bytes = content(SIZE);
    // 0.2 s, and up to 2 s on a busy host, where the answer that does come takes longer.
    let stall_timeout = patience() / 300;
    for cut in [usize::MAX, 100, CHUNK as usize + 100] {
        let served = bytes.clone();
        let server = later(move |request| Answer::good(&served, "a", request).cut(cut).then(Then::Stall));
        let options = ObjectOptions { stall_timeout, ..at_once() };
        let folder = TempDir::new().unwrap();
        let object = open(&server.url(), &options, Some(&cache(folder.path()))).unwrap();
        assert_eq!(Reader::new(&object).read(0, 2 * CHUNK as usize), Err(libc::EIO));
        let error = object.status().error.unwrap();
        assert!(error.contains(&format!("stalls for {stall_timeout:?}")), "{error}");
    }
}

#[test]
fn requests_that_wait_can_be_given_up() {
    let server = later(|request| Answer::good(&content(SIZE), "a", request).cut(100).then(Then::Stall));
    let folder = TempDir::new().unwrap();
    let open = || open(&server.url(), &at_once(), Some(&cache(folder.path()))).unwrap();
    let (object, other) = (open(), open());
    let mut reader = Reader::new(&object);
    let (mut one, mut two) = (Memory::new(100), Memory::new(100));
    reader.push(1, &mut one, 0);
    reader.push(2, &mut two, 5 * CHUNK);
    reader.0.submit().unwrap();
    let mut of_other = Reader::new(&other);
    let mut three = Memory::new(100);
    of_other.push(3, &mut three, 0);
    of_other.0.submit().unwrap();

    let mut outcomes = std::collections::VecDeque::new();
    reader.0.reap(&mut outcomes);
    assert!(outcomes.is_empty());
    reader.0.cancel();
    reader.0.wait().unwrap();
    reader.0.reap(&mut outcomes);
    let mut ended: Vec<_> = outcomes.drain(..).map(|outcome| (outcome.head(), outcome.result())).collect();
    ended.sort_unstable();
    assert_eq!(ended, [(1, -libc::ECANCELED), (2, -libc::ECANCELED)]);

    // The object that is closed has no requests any more; those of the other one wait.
    reader.push(1, &mut one, 0);
    reader.0.submit().unwrap();
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| perform(&object, 0, 100));
        object.close();
        assert_eq!(waits.join().unwrap(), Err(libc::EIO));
    });
    assert_eq!(reader.outcome().result(), -libc::EIO);
    assert_eq!(reader.read(0, 10), Err(libc::EIO));
    of_other.0.reap(&mut outcomes);
    assert!(outcomes.is_empty());
    // Its queue may go while it has requests.
    drop(of_other);
    assert_eq!((three.bytes, one.bytes), (vec![0xaa; 100], vec![0xaa; 100]));
}

#[test]
fn digests_tell_wrong_bytes() {
    let bytes = content(SIZE);
    let folder = TempDir::new().unwrap();
    let list = folder.path().join("list");
    let lines = bytes.chunks(CHUNK as usize).map(|chunk| {
        use sha2::Digest;
        sha2::Sha256::digest(chunk).iter().map(|byte| format!("{byte:02x}")).collect::<String>() + "  -\n"
    });
    std::fs::write(&list, lines.collect::<String>()).unwrap();
    let mut wrong = bytes.clone();
    wrong[3 * CHUNK as usize + 5] ^= 1;
    // No tag: the digests do.
    let without_tag = |bytes: Vec<u8>| {
        Server::start(move |request| {
            let mut answer = Answer::good(&bytes, "a", request);
            answer.bytes.splice(..b"HTTP/1.1 206 Partial Content\r\nETag: \"a\"".len(), *b"HTTP/1.1 206 X");
            answer
        })
    };
    let with_list = |url: String| format!("{url}#digests={}", list.display());
    let server = without_tag(wrong);
    let object = open(&with_list(server.url()), &at_once(), Some(&cache(folder.path()))).unwrap();
    let mut reader = Reader::new(&object);
    assert_eq!(reader.read(3 * CHUNK, 10), Err(libc::EIO));
    let error = object.status().error.unwrap();
    assert!(error.contains("the chunk at 49152 does not have its digest"), "{error}");
    assert_eq!(reader.read(0, 10).unwrap(), bytes[..10]);
    let server = without_tag(bytes.clone());
    let object = open(&with_list(server.url()), &at_once(), Some(&cache(folder.path()))).unwrap();
    assert_eq!(Reader::new(&object).read(0, SIZE).unwrap(), bytes);
    // Without the list, nothing would tell a change.
    assert!(open(&server.url(), &at_once(), None).unwrap_err().contains("name a file of digests"));
    // A list of chunks of another size is none of this object.
    let other = open(&with_list(server.url()), &at_once(), None).unwrap_err();
    assert!(other.contains("digests; the object has"), "{other}");
}

#[test]
fn whatever_a_server_does_there_are_no_wrong_bytes() {
    let bytes = content(SIZE);
    let mut failed = 0;
    for seed in 0..60 {
        let random = std::sync::Mutex::new(Random::new(seed));
        let served = bytes.clone();
        let server = later(move |request| {
            let mut random = random.lock().unwrap();
            let good = Answer::good(&served, "a", request);
            let (first, last) = request.range;
            match random.below(40) {
                0 => Answer::status(500, ""),
                1 => good.cut(random.below(40_000)).then(Then::Close),
                2 => Answer::range(&served, "a", (first, (last + 1).min(SIZE as u64 - 1)), SIZE),
                3 => Answer::range(&served, "b", (first, last), SIZE),
                4 => Answer::new("HTTP/1.1 200 OK\nETag: \"a\"\nContent-Length: 5\n", b"wrong"),
                5 => {
                    let mut answer = good;
                    let at = random.below(95);
                    answer.bytes[at] = random.u64() as u8;
                    // The body is right in its place; only the head is broken.
                    answer
                }
                6 => good.then(Then::Close),
                7 => Answer::status(412, ""),
                _ => good,
            }
        });
        let folder = TempDir::new().unwrap();
        let options = ObjectOptions { stall_timeout: patience() / 200, ..at_once() };
        let object = open(&server.url(), &options, Some(&cache(folder.path()))).unwrap();
        let mut reader = Reader::new(&object);
        let mut random = Random::new(seed);
        for _ in 0..20 {
            let (offset, len) = (random.below(SIZE), 1 + random.below(2 * CHUNK as usize));
            match reader.read(offset as u64, len) {
                Ok(read) => assert!(read == bytes[offset..SIZE.min(offset + len)], "{seed} {offset} {len}"),
                Err(error) => {
                    assert_eq!(error, libc::EIO);
                    failed += 1;
                }
            }
        }
    }
    assert!(failed > 20, "the server has not failed: {failed}");
}
