//! Servers that go away, come back otherwise, or say nothing.
use crate::disk::{Buffer, read, write};
use crate::open;
use crate::script::{Asked, FUA, MULTI_CONN, Peer, READ_ONLY, Said, Scripted, Style};
use crate::servers::{Server, has};
use paravane_dma::HostSlice;
use paravane_store::nbd::{Nbd, NbdError, NbdOptions};
use paravane_store::{Job, Link, Outcome, Pieces, Rest, Store, StoreQueue, StoreStatus, WakeSet};
use paravane_test_support::patience;
use rustix::event::{Timespec, epoll};
use std::collections::VecDeque;
use std::fs;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

/// Waits until the status is as wanted.
fn wait_for(store: &Nbd, wanted: impl Fn(&StoreStatus) -> bool) -> StoreStatus {
    let status = || format!("{:?}", store.status());
    paravane_test_support::wait_for("a status", status, || Some(store.status()).filter(&wanted))
}

fn serve(peer: &mut Peer) {
    while let Some(asked) = peer.request() {
        let data = if asked.command == 0 { vec![7; asked.len as usize] } else { Vec::new() };
        peer.answer(&asked, &data);
    }
}

/// Jobs that all live until they are done.
struct Jobs {
    buffers: Vec<Buffer>,
    outcomes: VecDeque<Outcome>,
}

impl Jobs {
    fn new() -> Self {
        Self { buffers: Vec::new(), outcomes: VecDeque::new() }
    }

    fn write(&mut self, queue: &mut dyn StoreQueue, offset: u64) {
        let mut buffer = Buffer::new(vec![offset as u8; 4096]);
        let job = Job::Write { pieces: buffer.pieces(), offset, durable: false };
        // SAFETY: the buffers live as long as the jobs; boxes do not move.
        unsafe { queue.push(self.buffers.len() as u16, job) }.unwrap();
        queue.submit().unwrap();
        self.buffers.push(buffer);
    }

    /// Results by head, when this many are there.
    fn results(&mut self, queue: &mut dyn StoreQueue, count: usize) -> Vec<(u16, i32)> {
        while self.outcomes.len() < count {
            queue.wait().unwrap();
            queue.reap(&mut self.outcomes);
        }
        let mut results: Vec<_> =
            self.outcomes.iter().map(|outcome| (outcome.head(), outcome.result())).collect();
        results.sort_unstable();
        results
    }
}

#[test]
fn what_was_in_flight_is_sent_again_in_order_and_first() {
    for style in [Style::Simple, Style::Structured, Style::Extended] {
        let log = Arc::new(Mutex::new(Vec::new()));
        let (shared, (gate, opened)) = (log.clone(), channel::<()>());
        let opened = Mutex::new(opened);
        let server = Scripted::start(
            move |_| Said::new(style),
            move |mut peer| {
                match peer.number {
                    0 => {
                        let mut requests: Vec<Asked> = (0..8).map(|_| peer.request().unwrap()).collect();
                        // The first and the sixth are acknowledged.
                        peer.answer(&requests[0], &[]);
                        peer.answer(&requests[5], &[]);
                        shared.lock().unwrap().append(&mut requests);
                        opened.lock().unwrap().recv().unwrap();
                    }
                    // Cut again in the middle of sending again.
                    1 => {
                        assert_eq!(peer.request().unwrap().offset, 4096);
                        assert_eq!(peer.request().unwrap().offset, 8192);
                    }
                    _ => {
                        while let Some(asked) = peer.request() {
                            shared.lock().unwrap().push(asked.clone());
                            peer.answer(&asked, &[]);
                        }
                    }
                }
            },
        );
        let store = open(&server.url(), NbdOptions::default()).unwrap();
        let mut queue = store.queue(16).unwrap();
        let mut jobs = Jobs::new();
        for number in 0..8 {
            jobs.write(&mut *queue, number * 4096);
        }
        assert_eq!(jobs.results(&mut *queue, 2), [(0, 4096), (5, 4096)]);
        gate.send(()).unwrap();
        jobs.write(&mut *queue, 8 * 4096);
        assert_eq!(jobs.results(&mut *queue, 9).len(), 9);
        let log = log.lock().unwrap();
        let offsets: Vec<_> = log.iter().map(|asked| asked.offset / 4096).collect();
        assert_eq!(offsets, [0, 1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4, 6, 7, 8]);
        assert!(log.iter().all(|asked| asked.data == vec![asked.offset as u8; 4096]));
        let cookies: std::collections::HashSet<_> = log.iter().map(|asked| asked.cookie).collect();
        assert_eq!(cookies.len(), log.len(), "a cookie of the lost connection is used again");
    }
}

/// Requests that a new server gets if the first one is lost after `answers` answers to a durable
/// write in three parts.
fn requests_after_a_loss(flags: u16, options: NbdOptions, answers: usize) -> Vec<(u16, u16, u64, u64)> {
    let log = Arc::new(Mutex::new(Vec::new()));
    let shared = log.clone();
    let said = move |_| Said { flags, blocks: Some([512, 4096, 8192]), ..Said::new(Style::Simple) };
    let server = Scripted::start(said, move |mut peer| {
        if peer.number == 0 {
            for _ in 0..answers {
                let asked = peer.request().unwrap();
                peer.answer(&asked, &[]);
            }
            peer.request().unwrap();
            return;
        }
        while let Some(asked) = peer.request() {
            shared.lock().unwrap().push((asked.command, asked.flags, asked.offset, asked.len));
            peer.answer(&asked, &[]);
        }
    });
    let store = open(&server.url(), options).unwrap();
    let durable = !options.write_through;
    assert_eq!(write(&mut *store.queue(4).unwrap(), 4096, &[1; 20_480], durable), 20_480);
    assert_eq!(store.status().reconnects, 1);
    log.lock().unwrap().clone()
}

#[test]
fn parts_that_a_lost_server_need_not_have_kept_are_sent_again() {
    let mut through = NbdOptions::default();
    through.write_through = true;
    let all = Said::new(Style::Simple).flags;
    for options in [NbdOptions::default(), through] {
        // Only the flush behind the last part would have made any of them durable.
        let whole = [(1, 0, 4096, 8192), (1, 0, 12_288, 8192), (1, 0, 20_480, 4096), (3, 0, 0, 0)];
        for answers in 0..4 {
            assert_eq!(requests_after_a_loss(all & !FUA, options, answers), whole, "{answers} answers");
        }
        let parts = [(1, 1, 4096, 8192), (1, 1, 12_288, 8192), (1, 1, 20_480, 4096)];
        for answers in 0..3 {
            assert_eq!(requests_after_a_loss(all, options, answers), parts[answers..], "{answers} answers");
        }
    }
}

#[test]
fn an_export_that_has_changed_is_unusable_until_it_is_back() {
    type Change = fn(Said) -> Said;
    let changes: [(Change, &str); 4] = [
        (|said| Said { size: said.size / 2, ..said }, "shrunk from 1048576 to 524288"),
        (|said| Said { flags: said.flags | READ_ONLY, ..said }, "become read-only"),
        (|said| Said { flags: said.flags & !MULTI_CONN, ..said }, "takes one connection"),
        (|said| Said { blocks: Some([4096, 4096, 1 << 20]), ..said }, "have grown from 1 to 4096"),
    ];
    thread::scope(|scope| {
        for (change, part) in changes {
            scope.spawn(move || {
                let changed = Arc::new(AtomicBool::new(false));
                let shared = changed.clone();
                let said = move |_| {
                    let base = Said::new(Style::Structured);
                    let said = Said { flags: base.flags | MULTI_CONN, ..base };
                    if shared.load(Ordering::SeqCst) { change(said) } else { said }
                };
                let shared = changed.clone();
                let server = Scripted::start(said, move |mut peer| {
                    while let Some(asked) = peer.request() {
                        if asked.offset == 4096 && !shared.swap(true, Ordering::SeqCst) {
                            return;
                        }
                        peer.answer(&asked, &[]);
                    }
                });
                let mut options = NbdOptions::default();
                options.connections = 2;
                let store = open(&server.url(), options).unwrap();
                let mut queue = store.queue(4).unwrap();
                assert_eq!(write(&mut *queue, 4096, &[1; 512], false), -libc::EIO);
                let status = wait_for(&store, |status| status.link == Link::Unusable);
                assert!(status.error.as_deref().is_some_and(|error| error.contains(part)), "{status:?}");
                assert_eq!(write(&mut *queue, 0, &[1; 512], false), -libc::EIO);
                changed.store(false, Ordering::SeqCst);
                wait_for(&store, |status| status.link == Link::Up);
                assert_eq!(write(&mut *queue, 0, &[1; 512], false), 512);
            });
        }
    });
}

#[test]
fn jobs_fail_when_the_time_is_over_and_work_when_the_server_is_back() {
    let name = "jobs_fail_when_the_time_is_over_and_work_when_the_server_is_back";
    if !has(name, "nbdkit") {
        return;
    }
    let mut server = Server::nbdkit("memory 1M");
    let mut options = NbdOptions::default();
    options.request_timeout = Duration::from_millis(100);
    let store = open(&server.url(""), options).unwrap();
    let mut queue = store.queue(4).unwrap();
    server.kill();
    assert_eq!(write(&mut *queue, 0, &[1; 512], false), -libc::EIO);
    assert_eq!(store.status().link, Link::Down);
    assert_eq!(read(&mut *queue, 0, 512), Err(-libc::EIO));
    let mut buffer = Buffer::new(vec![0; 512]);
    let job = Job::Read { pieces: buffer.pieces(), offset: 0 };
    // SAFETY: the buffer outlives the call.
    assert_eq!(unsafe { store.perform(job) }, -libc::EIO);
    let status =
        wait_for(&store, |status| status.error.as_deref().is_some_and(|text| text.contains("connect")));
    assert_eq!((status.connections, status.link), (0, Link::Down));
    server.restart();
    wait_for(&store, |status| status.link == Link::Up);
    assert_eq!(write(&mut *queue, 0, &[1; 512], false), 512);
    assert!(store.status().reconnects >= 1);
}

#[test]
fn a_disk_that_is_closed_waits_for_nothing() {
    if !has("a_disk_that_is_closed_waits_for_nothing", "nbdkit") {
        return;
    }
    let mut server = Server::nbdkit("memory 1M");
    let store = open(&server.url(""), NbdOptions::default()).unwrap();
    let mut queue = store.queue(4).unwrap();
    server.kill();
    let mut jobs = Jobs::new();
    jobs.write(&mut *queue, 0);
    // Notices that the connection is gone.
    let mut none = VecDeque::new();
    queue.reap(&mut none);
    let status = wait_for(&store, |status| status.waiting == 1);
    assert_eq!(status.link, Link::Reconnecting);
    store.close();
    assert_eq!(jobs.results(&mut *queue, 1), [(0, -libc::EIO)]);
    assert_eq!(write(&mut *queue, 0, &[1; 512], false), -libc::EIO);
    drop(queue);
    drop(store);
}

#[test]
fn jobs_that_no_server_has_seen_are_cancelled() {
    let (gate, opened) = channel::<()>();
    let opened = Mutex::new(opened);
    let server = Scripted::start(
        |_| Said { size: 64 << 20, ..Said::new(Style::Structured) },
        move |mut peer| {
            if peer.number == 0 {
                let asked = peer.request().unwrap();
                opened.lock().unwrap().recv().unwrap();
                peer.answer(&asked, &[]);
            }
            serve(&mut peer);
        },
    );
    let store = open(&server.url(), NbdOptions::default()).unwrap();
    let mut queue = store.queue(8).unwrap();
    let mut jobs = Jobs::new();
    jobs.write(&mut *queue, 0);
    // It fills the socket, so that the next one is not even sent in part.
    let mut large = Buffer::in_pieces(vec![3; 32 << 20], &[1 << 20]);
    let job = Job::Write { pieces: large.pieces(), offset: 1 << 20, durable: false };
    // SAFETY: the buffer outlives the job.
    unsafe { queue.push(6, job) }.unwrap();
    queue.submit().unwrap();
    jobs.write(&mut *queue, 8192);
    jobs.buffers.push(Buffer::new(vec![1; 512]));
    let job = Job::Write { pieces: jobs.buffers[2].pieces(), offset: 0, durable: false };
    // SAFETY: as above.
    unsafe { queue.push(7, job) }.unwrap();
    queue.cancel();
    assert_eq!(jobs.results(&mut *queue, 2), [(1, -libc::ECANCELED), (7, -libc::ECANCELED)]);
    gate.send(()).unwrap();
    let results = jobs.results(&mut *queue, 4);
    assert_eq!(results, [(0, 4096), (1, -libc::ECANCELED), (6, 32 << 20), (7, -libc::ECANCELED)]);
}

#[test]
fn a_queue_ends_with_jobs_in_flight() {
    let (gate, opened) = channel::<()>();
    let opened = Mutex::new(opened);
    let server = Scripted::start(
        |_| Said { size: 64 << 20, ..Said::new(Style::Structured) },
        move |mut peer| {
            if peer.number == 0 {
                let mut asked: Vec<_> = (0..2).map(|_| peer.request().unwrap()).collect();
                asked.sort_by_key(|asked| asked.command);
                opened.lock().unwrap().recv().unwrap();
                peer.answer(&asked[0], &vec![7; asked[0].len as usize]);
                peer.answer(&asked[1], &[]);
            }
            serve(&mut peer);
        },
    );
    let store = open(&server.url(), NbdOptions::default()).unwrap();
    let mut other = store.queue(4).unwrap();
    let mut queue = store.queue(4).unwrap();
    let mut buffer = Buffer::new(vec![0; 100_000]);
    let job = Job::Read { pieces: buffer.pieces(), offset: 0 };
    // SAFETY: the buffer outlives the queue, which ends all access to it.
    unsafe { queue.push(0, job) }.unwrap();
    queue.submit().unwrap();
    let mut jobs = Jobs::new();
    jobs.write(&mut *other, 0);
    drop(queue);
    gate.send(()).unwrap();
    assert_eq!(jobs.results(&mut *other, 1), [(0, 4096)]);
    assert!(read(&mut *other, 0, 4096).unwrap() == [7; 4096]);
    assert!(buffer.data().iter().all(|byte| *byte == 0), "memory was written after the queue's end");
    // And in the middle of a request that is not sent yet.
    let mut queue = store.queue(4).unwrap();
    let mut large = Buffer::in_pieces(vec![3; 32 << 20], &[1 << 20]);
    let job = Job::Write { pieces: large.pieces(), offset: 0, durable: false };
    // SAFETY: as above.
    unsafe { queue.push(0, job) }.unwrap();
    queue.submit().unwrap();
    drop(queue);
    drop(large);
    assert!(read(&mut *other, 0, 4096).unwrap() == [7; 4096]);
}

#[test]
fn a_server_that_does_not_answer_is_left_if_that_is_wanted() {
    let server = Scripted::start(
        |_| Said::new(Style::Structured),
        |mut peer| {
            if peer.number == 0 {
                // Until the client ends the connection.
                while peer.request().is_some() {}
                return;
            }
            serve(&mut peer);
        },
    );
    let mut options = NbdOptions::default();
    options.stall_timeout = Some(Duration::from_millis(50));
    let store = open(&server.url(), options).unwrap();
    let mut queue = store.queue(4).unwrap();
    assert!(read(&mut *queue, 0, 4096).unwrap() == [7; 4096]);
    let status = store.status();
    // A busy host may be slow to answer on the next connection, too.
    assert!(status.link == Link::Up && status.reconnects >= 1, "{status:?}");
    assert!(status.error.unwrap().contains("no reply for 50ms"));
}

#[test]
fn a_server_that_stops_for_a_while_is_waited_for() {
    if !has("a_server_that_stops_for_a_while_is_waited_for", "nbdkit") {
        return;
    }
    let server = Server::nbdkit("memory 1M");
    let store = open(&server.url(""), NbdOptions::default()).unwrap();
    let mut queue = store.queue(4).unwrap();
    server.signal("STOP");
    let mut jobs = Jobs::new();
    jobs.write(&mut *queue, 0);
    let status = wait_for(&store, |status| status.error.is_some());
    let error = status.error.unwrap();
    assert!(error.starts_with("1 requests have had no reply for"), "{error}");
    assert_eq!((status.link, status.connections, status.waiting), (Link::Stalled, 4, 1));
    server.signal("CONT");
    assert_eq!(jobs.results(&mut *queue, 1), [(0, 4096)]);
    let status = store.status();
    assert_eq!((status.link, status.error, status.reconnects), (Link::Up, None, 0));
}

#[test]
fn an_export_that_has_grown_is_used_after_a_refresh() {
    if !has("an_export_that_has_grown_is_used_after_a_refresh", "nbdkit") {
        return;
    }
    let server = Server::start("nbdkit", |socket, folder| {
        let image = folder.join("image");
        fs::File::create(&image).unwrap().set_len(1 << 20).unwrap();
        ["-f", "-U", socket.to_str().unwrap(), "file", image.to_str().unwrap()].map(Into::into).into()
    });
    let store = open(&server.url(""), NbdOptions::default()).unwrap();
    let mut queue = store.queue(4).unwrap();
    assert_eq!((store.size(), store.refresh().unwrap()), (1 << 20, 1 << 20));
    let image = fs::File::options().write(true).open(server.folder.path().join("image")).unwrap();
    image.set_len(2 << 20).unwrap();
    assert_eq!(store.refresh().unwrap(), 2 << 20);
    assert_eq!(store.size(), 2 << 20);
    assert_eq!(write(&mut *queue, (2 << 20) - 4096, &[1; 4096], false), 4096);
    image.set_len(1 << 20).unwrap();
    let error = store.refresh().unwrap_err().to_string();
    assert!(error.contains("shrunk from 2097152 to 1048576"), "{error}");
    assert_eq!(store.size(), 2 << 20);
}

#[test]
fn a_server_that_shuts_down_is_left_without_an_error() {
    let server = Scripted::start(
        |_| Said::new(Style::Structured),
        |mut peer| {
            if peer.number == 0 {
                let asked = peer.request().unwrap();
                peer.say(&crate::script::chunk(
                    Style::Structured,
                    &asked,
                    true,
                    1 << 15 | 1,
                    &[0, 0, 0, 108, 0, 0],
                ));
            }
            serve(&mut peer);
        },
    );
    let store = open(&server.url(), NbdOptions::default()).unwrap();
    let mut queue = store.queue(4).unwrap();
    assert!(read(&mut *queue, 0, 4096).unwrap() == [7; 4096]);
    assert_eq!(store.status().error.as_deref(), Some("the server is shutting down"));
}

/// A page that nobody may access.
struct NoAccess(*mut u8);

impl NoAccess {
    fn new() -> Self {
        use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
        // SAFETY: a new mapping.
        let page =
            unsafe { mmap_anonymous(std::ptr::null_mut(), 4096, ProtFlags::empty(), MapFlags::PRIVATE) };
        Self(page.unwrap().cast())
    }
}

impl Drop for NoAccess {
    fn drop(&mut self) {
        // SAFETY: the mapping of `new`.
        unsafe { rustix::mm::munmap(self.0.cast(), 4096) }.unwrap();
    }
}

#[test]
fn memory_that_cannot_be_accessed_fails_its_job_only() {
    if !has("memory_that_cannot_be_accessed_fails_its_job_only", "nbdkit") {
        return;
    }
    for arguments in ["memory 8M", "--no-sr memory 8M"] {
        let server = Server::nbdkit(arguments);
        let store = open(&server.url(""), NbdOptions::default()).unwrap();
        let mut queue = store.queue(8).unwrap();
        let page = NoAccess::new();
        let mut data = vec![5; 1 << 20];
        let mut list =
            [HostSlice { ptr: data.as_mut_ptr(), len: data.len() }, HostSlice { ptr: page.0, len: 4096 }];
        let pieces = |list: &mut [HostSlice]| Pieces {
            first: NonNull::new(list.as_mut_ptr()).unwrap(),
            count: list.len() as u32,
        };
        let mut jobs = Jobs::new();
        jobs.write(&mut *queue, 0);
        let bad = Job::Write { pieces: pieces(&mut list), offset: 1 << 20, durable: false };
        // SAFETY: all memory stays mapped; the host refuses to read the page.
        unsafe { queue.push(7, bad) }.unwrap();
        for offset in [4096, 8192] {
            jobs.write(&mut *queue, offset);
        }
        let results = jobs.results(&mut *queue, 4);
        assert_eq!(results, [(0, 4096), (1, 4096), (2, 4096), (7, -libc::EFAULT)]);
        jobs.outcomes.clear();
        // Nothing of it is sent if the first byte is missing.
        list.swap(0, 1);
        let bad = Job::Write { pieces: pieces(&mut list[..1]), offset: 1 << 20, durable: false };
        // SAFETY: as above.
        unsafe { queue.push(7, bad) }.unwrap();
        assert_eq!(jobs.results(&mut *queue, 1), [(7, -libc::EFAULT)]);
        jobs.outcomes.clear();
        list.swap(0, 1);
        let bad = Job::Read { pieces: pieces(&mut list), offset: 1 << 20 };
        // SAFETY: as above; the page is far behind what is copied by this process.
        unsafe { queue.push(7, bad) }.unwrap();
        assert_eq!(jobs.results(&mut *queue, 1), [(7, -libc::EFAULT)]);
        assert_eq!(read(&mut *queue, 8192, 4096), Ok(vec![0; 4096]));
        assert_eq!(store.status().link, Link::Up);
    }
}

#[test]
fn the_first_connection_can_have_a_limit_of_its_own() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let _silent = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let mut options = NbdOptions::default();
    options.connect_timeout = Duration::from_secs(3600);
    options.open_timeout = Some(Duration::from_millis(1));
    let error = open(&format!("nbd+unix:///?socket={}", path.display()), options).unwrap_err();
    assert!(
        matches!(&error, NbdError::Io { error, .. } if error.kind() == std::io::ErrorKind::TimedOut),
        "{error:?}"
    );
}

#[test]
fn a_thread_that_watches_queues_is_told_of_each_connection() {
    let server = Scripted::start(
        |_| Said::new(Style::Structured),
        |mut peer| {
            // The first connection is lost after an answer.
            while let Some(asked) = peer.request() {
                peer.answer(&asked, &[]);
                if peer.number == 0 {
                    return;
                }
            }
        },
    );
    let store = open(&server.url(), NbdOptions::default()).unwrap();
    // One connection, one thread, two queues.
    let mut queues = [store.queue(4).unwrap(), store.queue(4).unwrap()];
    let epoll = Arc::new(epoll::create(epoll::CreateFlags::CLOEXEC).unwrap());
    for (token, queue) in (0..).zip(&mut queues) {
        queue.register(Some(&WakeSet::new(&epoll, token))).unwrap();
    }
    let start = Instant::now();
    for round in 0..6_u64 {
        let at = (round % 2) as usize;
        let mut jobs = Jobs::new();
        jobs.write(&mut *queues[at], round * 4096);
        if round == 3 {
            // Also while a thread watches, a queue can be waited for.
            queues[at].wait().unwrap();
        }
        while jobs.outcomes.is_empty() {
            assert!(start.elapsed() < patience(), "nothing tells of the outcome of write {round}");
            let mut told = Vec::with_capacity(8);
            let patience = Timespec { tv_sec: patience().as_secs() as i64, tv_nsec: 0 };
            if queues[at].rest(true) != Rest::Serve {
                epoll::wait(&epoll, rustix::buffer::spare_capacity(&mut told), Some(&patience)).unwrap();
                assert!(!told.is_empty(), "the thread slept for long in write {round}");
            }
            for queue in &mut queues {
                queue.reap(&mut jobs.outcomes);
            }
        }
        assert_eq!(jobs.outcomes[0].result(), 4096);
    }
    for queue in &mut queues {
        queue.register(None).unwrap();
    }
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    let mut told = Vec::with_capacity(8);
    drop(server);
    epoll::wait(&epoll, rustix::buffer::spare_capacity(&mut told), Some(&at_once)).unwrap();
    assert!(told.is_empty(), "{} events", told.len());
    // One that ends is watched no more.
    queues[0].register(Some(&WakeSet::new(&epoll, 0))).unwrap();
    drop(queues);
    told.clear();
    epoll::wait(&epoll, rustix::buffer::spare_capacity(&mut told), Some(&at_once)).unwrap();
    assert!(told.is_empty(), "{} events", told.len());
}
