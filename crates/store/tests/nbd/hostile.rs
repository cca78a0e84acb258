//! Replies that break the protocol, each by a server that does so on its first connection.
use crate::disk::{Buffer, perform, read, write};
use crate::open;
use crate::script::{Asked, Peer, Said, Scripted, Style, chunk, simple};
use paravane_store::nbd::NbdOptions;
use paravane_store::{Job, Link, Store};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

/// The right data for a read.
fn data(asked: &Asked) -> Vec<u8> {
    (asked.offset..asked.offset + asked.len).map(|at| (at / 512 * 7 + at) as u8).collect()
}

/// Answers all as it should be.
fn serve(peer: &mut Peer) {
    while let Some(asked) = peer.request() {
        let data = if asked.command == 0 { data(&asked) } else { Vec::new() };
        peer.answer(&asked, &data);
    }
}

/// A read of 8192 bytes at 4096 gets a wrong reply, then a right one on a new connection.
fn recovers(style: Style, wrong: impl Fn(&Asked) -> Vec<u8> + Send + Sync + 'static, part: &str) {
    let server = Scripted::start(
        move |_| Said::new(style),
        move |mut peer| {
            if peer.number == 0 {
                let Some(asked) = peer.request() else { return };
                let message = wrong(&asked);
                peer.say(&message);
                while peer.request().is_some() {}
            }
            serve(&mut peer);
        },
    );
    let store = open(&server.url(), NbdOptions::default()).unwrap();
    let mut queue = store.queue(8).unwrap();
    let expected: Vec<u8> = (4096..12288_u64).map(|at| (at / 512 * 7 + at) as u8).collect();
    assert!(read(&mut *queue, 4096, 8192).unwrap() == expected, "{part}");
    let status = store.status();
    assert_eq!((status.link, status.reconnects, status.connections), (Link::Up, 1, 1));
    let error = status.error.unwrap();
    assert!(error.contains("breaks the protocol") && error.contains(part), "{error} instead of {part}");
    assert_eq!(server.connections(), 2);
}

#[test]
fn a_reply_begins_with_a_wrong_word() {
    for style in [Style::Simple, Style::Structured, Style::Extended] {
        recovers(style, |_| vec![0x55; 64], "begins with 0x55555555");
    }
    // Of another layout.
    recovers(Style::Simple, |asked| chunk(Style::Structured, asked, true, 0, &[]), "begins with 0x668e33ef");
    recovers(Style::Extended, |asked| simple(asked.cookie, 0), "begins with 0x67446698");
    recovers(Style::Structured, |asked| simple(asked.cookie, 5), "needs a structured one");
}

#[test]
fn a_reply_to_no_request() {
    recovers(Style::Simple, |asked| simple(asked.cookie ^ 1, 0), "unknown request");
    recovers(Style::Simple, |asked| simple(asked.cookie ^ 1 << 40, 0), "unknown request");
    for style in [Style::Structured, Style::Extended] {
        let other = move |asked: &Asked| {
            chunk(style, &Asked { cookie: !asked.cookie, ..asked.clone() }, true, 0, &[])
        };
        recovers(style, other, "unknown request");
    }
    let elsewhere =
        |asked: &Asked| chunk(Style::Extended, &Asked { offset: 8, ..asked.clone() }, true, 0, &[]);
    recovers(Style::Extended, elsewhere, "not that of the request");
}

/// A chunk of data at an offset.
fn piece(style: Style, asked: &Asked, done: bool, offset: u64, data: &[u8]) -> Vec<u8> {
    chunk(style, asked, done, 1, &[&offset.to_be_bytes(), data].concat())
}

#[test]
fn a_chunk_is_not_what_was_asked_for() {
    for style in [Style::Structured, Style::Extended] {
        recovers(style, move |asked| piece(style, asked, true, 4096, &[1; 4096]), "before all is there");
        recovers(style, move |asked| chunk(style, asked, true, 0, &[]), "before all is there");
        recovers(style, move |asked| piece(style, asked, true, 4096, &[1; 8193]), "8201 bytes");
        recovers(style, move |asked| piece(style, asked, true, 4095, &[1; 8192]), "outside of its request");
        recovers(style, move |asked| piece(style, asked, true, 12288, &[1; 1]), "outside of its request");
        recovers(style, move |asked| piece(style, asked, true, u64::MAX, &[1; 8]), "outside of its request");
        recovers(style, move |asked| chunk(style, asked, true, 1, &[0; 8]), "8 bytes");
        recovers(style, move |asked| chunk(style, asked, true, 1, &[0; 3]), "3 bytes");
        recovers(style, move |asked| chunk(style, asked, false, 0, &[]), "does not answer");
        recovers(style, move |asked| chunk(style, asked, true, 0, &[1]), "has 1 bytes");
        recovers(style, move |asked| chunk(style, asked, true, 7, &[]), "type 7 does not answer");
        recovers(style, move |asked| chunk(style, asked, true, 5, &[0; 12]), "type 5 does not answer");
        recovers(style, move |asked| chunk(style, asked, true, 6, &[0; 24]), "type 6 does not answer");
        recovers(style, move |asked| chunk(style, asked, true, 2, &[0; 11]), "11 bytes");
        let hole = |offset: u64, len: u32| [&offset.to_be_bytes()[..], &len.to_be_bytes()].concat();
        recovers(
            style,
            move |asked| chunk(style, asked, true, 2, &hole(4096, 8193)),
            "outside of its request",
        );
        recovers(style, move |asked| chunk(style, asked, true, 2, &hole(4096, 0)), "outside of its request");
        recovers(style, move |asked| chunk(style, asked, true, 1 << 15 | 1, &[0; 6]), "without an error");
        recovers(style, move |asked| chunk(style, asked, true, 1 << 15 | 1, &[0, 0, 0, 5, 0, 1]), "6 bytes");
        recovers(style, move |asked| chunk(style, asked, true, 1 << 15 | 1, &[0; 5]), "5 bytes");
        let far = [&[0, 0, 0, 5, 0, 0][..], &u64::MAX.to_be_bytes()].concat();
        recovers(style, move |asked| chunk(style, asked, true, 1 << 15 | 2, &far), "outside of its request");
        let twice = move |asked: &Asked| {
            [
                piece(style, asked, false, 8192, &[1; 4096]),
                piece(style, asked, false, 4096, &[1; 4096]),
                piece(style, asked, true, 8191, &[1; 1]),
            ]
            .concat()
        };
        recovers(style, twice, "again");
        let huge = move |asked: &Asked| {
            let mut message = chunk(style, asked, true, 1, &[0; 8]);
            let end = if style == Style::Extended { 32 } else { 20 };
            message[end - 4..end].copy_from_slice(&u32::MAX.to_be_bytes());
            message
        };
        recovers(style, huge, "4294967295 bytes");
        let endless =
            move |asked: &Asked| chunk(style, asked, false, 1 << 15 | 1, &[0, 0, 0, 5, 0, 0]).repeat(10_000);
        recovers(style, endless, "too many error chunks");
    }
}

#[test]
fn a_reply_comes_twice() {
    for style in [Style::Simple, Style::Structured, Style::Extended] {
        let server = Scripted::start(
            move |_| Said::new(style),
            move |mut peer| {
                if peer.number == 0 {
                    let Some(asked) = peer.request() else { return };
                    for _ in 0..2 {
                        peer.answer(&asked, &data(&asked));
                    }
                    while peer.request().is_some() {}
                }
                serve(&mut peer);
            },
        );
        let store = open(&server.url(), NbdOptions::default()).unwrap();
        let mut queue = store.queue(8).unwrap();
        for offset in [0, 4096, 8192] {
            let expected: Vec<u8> = (offset..offset + 4096).map(|at| (at / 512 * 7 + at) as u8).collect();
            assert!(read(&mut *queue, offset, 4096).unwrap() == expected);
        }
        let status = store.status();
        assert_eq!((status.link, status.reconnects), (Link::Up, 1));
        assert!(status.error.unwrap().contains("unknown request"));
    }
}

#[test]
fn replies_come_in_any_order_and_in_any_pieces() {
    for style in [Style::Structured, Style::Extended] {
        let server = Scripted::start(
            move |_| Said::new(style),
            move |mut peer| {
                let mut requests: Vec<Asked> = (0..8).map(|_| peer.request().unwrap()).collect();
                requests.reverse();
                let mut messages = Vec::new();
                for part in [3_usize, 1, 0, 2] {
                    for (number, asked) in requests.iter().enumerate() {
                        let all = data(asked);
                        let (quarter, offset) = (all.len() / 4, asked.offset + (part * all.len() / 4) as u64);
                        let piece_of = &all[part * quarter..(part + 1) * quarter];
                        if number == 2 && part == 0 {
                            let hole = [&offset.to_be_bytes()[..], &(quarter as u32).to_be_bytes()].concat();
                            messages.extend(chunk(style, asked, false, 2, &hole));
                        } else {
                            messages.extend(piece(style, asked, part == 2 && number != 5, offset, piece_of));
                        }
                    }
                }
                // That of the hole is done; this one needs a chunk of its own.
                messages.extend(chunk(style, &requests[5], true, 0, &[]));
                for bytes in messages.chunks(777) {
                    peer.say(bytes);
                }
                serve(&mut peer);
            },
        );
        let store = open(&server.url(), NbdOptions::default()).unwrap();
        let mut queue = store.queue(8).unwrap();
        let mut buffers: Vec<_> = (0..8).map(|_| Buffer::new(vec![0xee; 64 << 10])).collect();
        for (head, buffer) in buffers.iter_mut().enumerate() {
            let job = Job::Read { pieces: buffer.pieces(), offset: (head as u64) << 16 };
            // SAFETY: the buffers live until all outcomes are there.
            unsafe { queue.push(head as u16, job) }.unwrap();
        }
        let mut outcomes = std::collections::VecDeque::new();
        while outcomes.len() < 8 {
            queue.wait().unwrap();
            queue.reap(&mut outcomes);
        }
        for (head, buffer) in buffers.iter().enumerate() {
            let offset = (head as u64) << 16;
            let mut expected: Vec<u8> =
                (offset..offset + (64 << 10)).map(|at| (at / 512 * 7 + at) as u8).collect();
            if head == 5 {
                expected[..16 << 10].fill(0);
            }
            assert!(buffer.data() == expected, "request {head}");
        }
        assert!(outcomes.iter().all(|outcome| outcome.result() == 64 << 10));
        assert_eq!(store.status().reconnects, 0);
    }
}

#[test]
fn an_error_after_data_is_the_result_and_the_next_request_works() {
    let server = Scripted::start(
        |_| Said::new(Style::Structured),
        |mut peer| {
            let asked = peer.request().unwrap();
            let style = Style::Structured;
            let text = b"bad \x07sector";
            let body = [&[0, 0, 0, 5][..], &(text.len() as u16).to_be_bytes(), text, &4096_u64.to_be_bytes()]
                .concat();
            let message = [
                piece(style, &asked, false, 4096, &[9; 4096]),
                chunk(style, &asked, false, 1 << 15 | 2, &body),
                // A type that nobody knows is an error, too.
                chunk(style, &asked, false, 1 << 15 | 77, &[0, 0, 0, 28, 0, 0, 1, 2, 3]),
                chunk(style, &asked, true, 0, &[]),
            ];
            peer.say(&message.concat());
            serve(&mut peer);
        },
    );
    let store = open(&server.url(), NbdOptions::default()).unwrap();
    let mut queue = store.queue(8).unwrap();
    assert_eq!(read(&mut *queue, 4096, 8192), Err(-libc::EIO));
    assert!(read(&mut *queue, 0, 512).is_ok());
    let status = store.status();
    assert_eq!((status.link, status.reconnects), (Link::Up, 0));
    assert_eq!(status.error.as_deref(), Some("the server says: bad sector"));
}

#[test]
fn a_server_that_always_breaks_the_protocol_is_unusable() {
    let server = Scripted::start(
        |_| Said::new(Style::Structured),
        |mut peer| {
            while peer.request().is_some() {
                peer.say(&[0x11; 20]);
            }
        },
    );
    let store = open(&server.url(), NbdOptions::default()).unwrap();
    let mut queue = store.queue(8).unwrap();
    assert_eq!(read(&mut *queue, 0, 512), Err(-libc::EIO));
    assert_eq!(write(&mut *queue, 0, &[1; 512], false), -libc::EIO);
    let status = store.status();
    assert_eq!((status.link, status.reconnects), (Link::Unusable, 2));
    assert!(status.error.unwrap().contains("0x11111111"));
}

#[test]
fn a_request_that_the_server_dies_of_fails_alone() {
    let server = Scripted::start(
        |_| Said::new(Style::Structured),
        |mut peer| {
            while let Some(asked) = peer.request() {
                if asked.command == 0 && asked.offset == 512 {
                    return;
                }
                peer.answer(&asked, &if asked.command == 0 { data(&asked) } else { Vec::new() });
            }
        },
    );
    let store = open(&server.url(), NbdOptions::default()).unwrap();
    let mut queue = store.queue(8).unwrap();
    assert_eq!(read(&mut *queue, 512, 512), Err(-libc::EIO));
    assert!(read(&mut *queue, 0, 512).is_ok());
    assert_eq!(store.status().link, Link::Up);
}

#[test]
fn a_reply_before_the_request_is_complete_reads_no_memory_later() {
    // More than a socket takes, so that the reply comes in the middle.
    let server = Scripted::start(
        |_| Said { size: 64 << 20, ..Said::new(Style::Simple) },
        |mut peer| {
            use std::io::Read;
            if peer.number == 0 {
                let mut header = [0; 28];
                peer.stream.read_exact(&mut header).unwrap();
                let cookie = u64::from_be_bytes(header[8..16].try_into().unwrap());
                peer.say(&simple(cookie, 0));
                while peer.stream.read(&mut [0; 4096]).is_ok_and(|len| len > 0) {}
                return;
            }
            serve(&mut peer);
        },
    );
    let store = open(&server.url(), NbdOptions::default()).unwrap();
    let mut queue = store.queue(8).unwrap();
    assert_eq!(write(&mut *queue, 0, &vec![1; 16 << 20], false), 16 << 20);
    assert_eq!(store.status().reconnects, 1);
}

#[test]
fn what_the_server_lacks_is_done_without_it_or_told() {
    let server =
        Scripted::start(|_| Said { flags: 1, ..Said::new(Style::Simple) }, |mut peer| serve(&mut peer));
    let store = open(&server.url(), NbdOptions::default()).unwrap();
    let mut queue = store.queue(8).unwrap();
    assert_eq!(perform(&mut *queue, Job::Flush), 0);
    assert_eq!(perform(&mut *queue, Job::Discard { offset: 0, len: 4096 }), 0);
    let zeroes = Job::Zeroes { offset: 0, len: 4096, unmap: true };
    assert_eq!(perform(&mut *queue, zeroes), -libc::EOPNOTSUPP);
    assert_eq!(write(&mut *queue, 0, &[1; 512], true), 512);
    assert!(!store.limits().discard && !store.limits().zeroes);
    let error = store.set_size(1).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::Unsupported);
}

/// What a server gets for each job.
#[test]
fn jobs_are_requests_with_the_right_flags() {
    for (flags, through) in [(1 | 4 | 8 | 32 | 64, false), (1 | 4 | 32 | 64, false), (1 | 4 | 8 | 64, true)] {
        let log = Arc::new(Mutex::new(Vec::new()));
        let shared = log.clone();
        let said = move |_| Said {
            flags,
            size: 8 << 30,
            blocks: Some([512, 4096, 8192]),
            ..Said::new(Style::Simple)
        };
        let server = Scripted::start(said, move |mut peer| {
            while let Some(asked) = peer.request() {
                shared.lock().unwrap().push((asked.command, asked.flags, asked.offset, asked.len));
                peer.answer(&asked, &if asked.command == 0 { data(&asked) } else { Vec::new() });
            }
        });
        let mut options = NbdOptions::default();
        options.write_through = through;
        let store = open(&server.url(), options).unwrap();
        let mut queue = store.queue(8).unwrap();
        let fua = u16::from(flags & 8 != 0);
        let check = |what: &str, expected: &[(u16, u16, u64, u64)]| {
            assert_eq!(*log.lock().unwrap(), expected, "{what}, flags {flags}");
            log.lock().unwrap().clear();
        };
        let plain = if through { fua } else { 0 };
        assert_eq!(write(&mut *queue, 512, &[1; 9216], false), 9216);
        check("write", &[(1, plain, 512, 8192), (1, plain, 8704, 1024)]);
        assert_eq!(write(&mut *queue, 512, &[1; 512], true), 512);
        match fua {
            1 => check("durable", &[(1, 1, 512, 512)]),
            _ => check("durable", &[(1, 0, 512, 512), (3, 0, 0, 0)]),
        }
        assert_eq!(read(&mut *queue, 0, 16384).unwrap().len(), 16384);
        check("read", &[(0, 0, 0, 8192), (0, 0, 8192, 8192)]);
        assert_eq!(perform(&mut *queue, Job::Flush), 0);
        check("flush", &[(3, 0, 0, 0)]);
        let len = (2 << 30) + 4096;
        assert_eq!(perform(&mut *queue, Job::Zeroes { offset: 4096, len, unmap: false }), 0);
        let gib = 1 << 30;
        check(
            "zeroes",
            &[
                (6, 2 | plain, 4096, gib),
                (6, 2 | plain, 4096 + gib, gib),
                (6, 2 | plain, 4096 + 2 * gib, 4096),
            ],
        );
        // Holes are whole units of 2 MiB; the rest is zeroed in place.
        let mib = 1 << 20;
        assert_eq!(perform(&mut *queue, Job::Zeroes { offset: mib, len: 6 * mib, unmap: true }), 0);
        check(
            "unmap",
            &[(6, 2 | plain, mib, mib), (6, plain, 2 * mib, 4 * mib), (6, 2 | plain, 6 * mib, mib)],
        );
        assert_eq!(perform(&mut *queue, Job::Zeroes { offset: 0, len: 512, unmap: true }), 0);
        check("unmap a little", &[(6, 2 | plain, 0, 512)]);
        assert_eq!(perform(&mut *queue, Job::Discard { offset: 0, len: 512 }), 0);
        match flags & 32 {
            0 => check("discard", &[]),
            _ => check("discard", &[(4, 0, 0, 512)]),
        }
        assert_eq!(perform(&mut *queue, Job::Discard { offset: 100, len: 512 }), -libc::EINVAL);
        check("unaligned", &[]);
    }
}

#[test]
fn a_connection_for_each_queue_if_the_server_allows_it() {
    for (flag, connections) in [(crate::script::MULTI_CONN, 3), (0, 1)] {
        let most = Arc::new(AtomicU32::new(0));
        let shared = most.clone();
        let said = move |_| Said {
            flags: Said::new(Style::Structured).flags | flag,
            ..Said::new(Style::Structured)
        };
        let server = Scripted::start(said, move |mut peer| {
            shared.fetch_or(1 << peer.number, Ordering::SeqCst);
            serve(&mut peer);
        });
        let mut options = NbdOptions::default();
        options.connections = 3;
        let store = open(&server.url(), options).unwrap();
        assert_eq!(store.status().connections, connections);
        let mut queues: Vec<_> = (0..4).map(|_| store.queue(8).unwrap()).collect();
        for queue in &mut queues {
            assert_eq!(write(&mut **queue, 0, &[1; 512], false), 512);
        }
        assert_eq!(most.load(Ordering::SeqCst), (1 << connections) - 1);
    }
}
