//! Exports of real servers.
use crate::disk::{Buffer, perform, read, write};
use crate::model::Model;
use crate::open;
use crate::servers::{Server, free_port, has, output};
use paravane_store::nbd::{NbdError, NbdOptions};
use paravane_store::{Job, Link, Store, StoreExtent, StoreLimits};
use paravane_test_support::wait_until;
use std::fs;
use std::net::TcpStream;
use std::process::Command;

const MIB: u64 = 1 << 20;

/// All extents from `offset` on.
fn extents(store: &dyn Store, offset: u64) -> Vec<StoreExtent> {
    let (mut at, mut found) = (offset, Vec::new());
    while at < store.size() {
        found.extend(store.extents(at, store.size() - at).unwrap());
        at = found.last().map(|last: &StoreExtent| last.offset + last.len).unwrap();
    }
    found
}

/// Runs random jobs on two queues, one after the other and then by turns.
fn check(url: &str, seed: u64) {
    let store = open(url, NbdOptions::default()).unwrap();
    let mut queues = [store.queue(32).unwrap(), store.queue(32).unwrap()];
    let mut model = Model::new(store.size(), store.limits(), 32, seed);
    model.run(&mut *queues[0], 300);
    model.run(&mut *queues[1], 300);
    // The other queue of a shared connection gets its share meanwhile.
    let (first, second) = queues.split_at_mut(1);
    for _ in 0..100 {
        assert_eq!(perform(&mut *second[0], Job::Flush), 0);
        model.push(&mut *first[0]);
        model.reap(&mut *first[0]);
    }
    model.settle(&mut *first[0]);
    let size = store.size() as usize;
    let image: Vec<u8> = (0..size)
        .step_by(1 << 18)
        .flat_map(|at| read(&mut *second[0], at as u64, (1 << 18).min(size - at)).unwrap())
        .collect();
    model.compare(&image);
    let status = store.status();
    assert_eq!((status.link, status.reconnects, status.waiting, status.error), (Link::Up, 0, 0, None));
}

#[test]
fn nbdkit_with_a_disk_in_memory() {
    if !has("nbdkit_with_a_disk_in_memory", "nbdkit") {
        return;
    }
    for (seed, arguments) in [
        "memory 4M",
        "--no-sr memory 4M",
        "-t 16 --filter=multi-conn memory 4M",
        "--filter=multi-conn memory 4M multi-conn-mode=disable",
        "--filter=fua memory 4M fuamode=emulate",
        "--filter=fua memory 4M fuamode=force",
        "--filter=nozero memory 4M",
        "--filter=nozero memory 4M zeromode=notrim",
        "--filter=noextents memory 4M",
        "--filter=blocksize-policy memory 4M blocksize-minimum=4096 blocksize-preferred=65536 blocksize-maximum=65536 blocksize-error-policy=error",
        "--filter=blocksize-policy memory 4M blocksize-minimum=512 blocksize-preferred=512 blocksize-maximum=8192 blocksize-error-policy=error",
        "sparse-random 4M",
    ]
    .into_iter()
    .enumerate()
    {
        println!("{arguments}");
        let server = Server::nbdkit(arguments);
        if arguments.starts_with("sparse") {
            if !has("nbdkit_with_a_disk_in_memory for sparse disks", "nbdcopy") {
                continue;
            }
            let store = open(&server.url(""), options(true)).unwrap();
            let mut queue = store.queue(4).unwrap();
            let whole = read(&mut *queue, 0, 4 << 20).unwrap();
            let copy = server.folder.path().join("copy");
            output("nbdcopy", &[&server.url(""), copy.to_str().unwrap()]);
            assert!(whole == fs::read(copy).unwrap(), "differs from what nbdcopy reads");
            continue;
        }
        check(&server.url(""), seed as u64);
    }
}

fn options(read_only: bool) -> NbdOptions {
    let mut options = NbdOptions::default();
    options.read_only = read_only;
    options
}

#[test]
fn qemu_nbd_with_files() {
    if !has("qemu_nbd_with_files", "qemu-nbd") || !has("qemu_nbd_with_files", "qemu-img") {
        return;
    }
    for (seed, format, arguments) in [
        (1, "raw", "--discard=unmap -e 8"),
        (2, "raw", "--discard=unmap --cache=none -e 1"),
        (3, "qcow2", "--discard=unmap --detect-zeroes=unmap -e 8"),
    ] {
        println!("{format} {arguments}");
        let server = Server::start("qemu-nbd", move |socket, folder| {
            let image = folder.join("image");
            if !image.exists() {
                output("qemu-img", &["create", "-q", "-f", format, image.to_str().unwrap(), "4M"]);
            }
            let mut list: Vec<String> = arguments.split_whitespace().map(Into::into).collect();
            list.extend(["-t", "-f", format, "-x", "disk", "-k"].map(Into::into));
            list.extend([socket.display().to_string(), image.display().to_string()]);
            list
        });
        check(&server.url("disk"), seed);
        let store = open(&server.url("disk"), NbdOptions::default()).unwrap();
        assert_eq!(StoreLimits { block: 1, ..store.limits() }, StoreLimits::FILE);
        let mut queue = store.queue(4).unwrap();
        // What is freed is a hole for others, too.
        assert_eq!(perform(&mut *queue, Job::Zeroes { offset: 0, len: 4 * MIB, unmap: true }), 0);
        assert_eq!(write(&mut *queue, MIB, &vec![5; MIB as usize], true), MIB as i32);
        assert_eq!(perform(&mut *queue, Job::Zeroes { offset: 3 * MIB, len: MIB, unmap: false }), 0);
        let found = extents(&store, 0);
        let zeroes: Vec<_> = found.iter().map(|extent| (extent.offset, extent.len, extent.zeroes)).collect();
        let expected = [(0, MIB, true), (MIB, MIB, false), (2 * MIB, 2 * MIB, true)];
        let joined = zeroes.iter().fold(Vec::new(), |mut joined: Vec<(u64, u64, bool)>, part| {
            match joined.last_mut() {
                Some(last) if last.2 == part.2 => last.1 += part.1,
                _ => joined.push(*part),
            }
            joined
        });
        assert_eq!(joined, expected);
        assert!(found[0].hole, "{found:?}");
        drop((queue, store));
        let map = output("qemu-img", &["map", "--output=json", &server.url("disk")]);
        let mapped = map.matches("\"zero\": false").count();
        assert_eq!(mapped, 1, "{map}");
    }
}

#[test]
fn extents_agree_with_those_of_qemu() {
    if !has("extents_agree_with_those_of_qemu", "nbdkit")
        || !has("extents_agree_with_those_of_qemu", "nbdinfo")
    {
        return;
    }
    let server = Server::nbdkit("sparse-random 64M seed=5 percent=30 runlength=65536");
    let store = open(&server.url(""), options(true)).unwrap();
    let found = extents(&store, 0);
    assert!(found.len() > 20, "{found:?}");
    let map = output("nbdinfo", &["--map", &server.url("")]);
    let theirs: Vec<Vec<u64>> = map
        .lines()
        .map(|line| line.split_whitespace().take(3).map(|word| word.parse().unwrap()).collect())
        .collect();
    let ours: Vec<_> = found
        .iter()
        .map(|extent| vec![extent.offset, extent.len, u64::from(extent.hole) | u64::from(extent.zeroes) << 1])
        .collect();
    assert_eq!(ours, theirs);
    let part = store.extents(found[3].offset + 512, found[3].len - 512).unwrap();
    assert_eq!(part, [StoreExtent { offset: found[3].offset + 512, len: found[3].len - 512, ..found[3] }]);
    // A server without block status.
    let server = Server::nbdkit("--no-sr memory 1M");
    let store = open(&server.url(""), NbdOptions::default()).unwrap();
    assert_eq!(extents(&store, 4096), [StoreExtent::data(4096, MIB - 4096)]);
    store.prefetch(0, 4096).unwrap();
}

#[test]
fn nbd_server_over_tcp() {
    if !has("nbd_server_over_tcp", "nbd-server") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (image, config, port) = (folder.path().join("image"), folder.path().join("config"), free_port());
    fs::File::create(&image).unwrap().set_len(4 * MIB).unwrap();
    let text = format!(
        "[generic]\nport = {port}\nlistenaddr = 127.0.0.1\n[disk]\nexportname = {}\nflush = true\nfua = true\ntrim = true\n",
        image.display()
    );
    fs::write(&config, text).unwrap();
    let file = folder.path().join("pid");
    // It goes to the background.
    let started = Command::new("nbd-server").arg("-C").arg(&config).arg("-p").arg(&file).status().unwrap();
    assert!(started.success());
    let url = format!("nbd://127.0.0.1:{port}/disk");
    wait_until("nbd-server to listen", || TcpStream::connect(("127.0.0.1", port)).is_ok());
    let _background = Background(fs::read_to_string(file).unwrap().trim().to_owned());
    check(&url, 9);
    let error = open(&url.replace("/disk", "/other"), NbdOptions::default()).unwrap_err();
    assert!(matches!(error, NbdError::NoExport(_) | NbdError::Io { .. }), "{error}");
}

/// A process that is not a child, by its number; ended with the value.
struct Background(String);

impl Drop for Background {
    fn drop(&mut self) {
        let _ = Command::new("kill").arg(&self.0).status();
    }
}

#[test]
fn errors_of_a_server_are_those_of_the_job() {
    if !has("errors_of_a_server_are_those_of_the_job", "nbdkit") {
        return;
    }
    for (arguments, error) in [
        ("--filter=error memory 1M error=ENOSPC error-pwrite-rate=100%", -libc::ENOSPC),
        ("--filter=error memory 1M error=EIO error-pwrite-rate=100%", -libc::EIO),
        ("--filter=error --no-sr memory 1M error=ENOMEM error-pwrite-rate=100%", -libc::ENOMEM),
    ] {
        let server = Server::nbdkit(arguments);
        let store = open(&server.url(""), NbdOptions::default()).unwrap();
        let mut queue = store.queue(4).unwrap();
        assert_eq!(write(&mut *queue, 0, &[1; 4096], false), error);
        assert_eq!(read(&mut *queue, 0, 4096), Ok(vec![0; 4096]));
        assert_eq!(read(&mut *queue, MIB - 512, 1024), Err(-libc::EINVAL));
        assert_eq!(write(&mut *queue, MIB, &[1; 512], false), -libc::ENOSPC);
        assert_eq!(store.status().link, Link::Up);
        let mut empty = Buffer::new(Vec::new());
        assert_eq!(perform(&mut *queue, Job::Read { pieces: empty.pieces(), offset: 0 }), 0);
    }
    let server = Server::nbdkit("--filter=error memory 1M error=EPERM error-pread-rate=100%");
    let store = open(&server.url(""), NbdOptions::default()).unwrap();
    assert_eq!(read(&mut *store.queue(4).unwrap(), 0, 100_000), Err(-libc::EPERM));
}

#[test]
fn an_export_is_checked_when_it_is_opened() {
    if !has("an_export_is_checked_when_it_is_opened", "nbdkit") {
        return;
    }
    let server = Server::nbdkit("-r memory 1M");
    assert!(matches!(open(&server.url(""), NbdOptions::default()), Err(NbdError::ReadOnly)));
    let store = open(&server.url(""), options(true)).unwrap();
    assert!(store.limits().read_only);
    let blocks = "blocksize-minimum=65536 blocksize-preferred=65536 blocksize-maximum=1M";
    let arguments: &'static str = format!("--filter=blocksize-policy memory 1M {blocks}").leak();
    let server = Server::nbdkit(arguments);
    assert!(matches!(open(&server.url(""), NbdOptions::default()), Err(NbdError::Block(65536))));
    let server = Server::nbdkit("--filter=exportname memory 1M exportname=disk exportname-strict=true");
    let error = open(&server.url("other"), NbdOptions::default()).unwrap_err();
    assert!(matches!(error, NbdError::NoExport(_) | NbdError::Refused { .. }), "{error}");
    let socket = server.folder.path().join("nobody");
    let nobody = format!("nbd+unix:///?socket={}", socket.display());
    assert!(matches!(open(&nobody, NbdOptions::default()), Err(NbdError::Connect(_))));
    let blocks = "--filter=blocksize-policy memory 9999 blocksize-minimum=512 blocksize-preferred=4096";
    let server = Server::nbdkit(blocks);
    let error = open(&server.url(""), NbdOptions::default()).unwrap_err();
    assert!(error.to_string().contains("not a multiple of its smallest block"), "{error}");
}

#[test]
fn an_export_is_read_to_its_last_byte() {
    if !has("an_export_is_read_to_its_last_byte", "nbdkit") {
        return;
    }
    let server = Server::nbdkit("memory 9999");
    let store = open(&server.url(""), NbdOptions::default()).unwrap();
    assert_eq!((store.size(), store.end()), (9999, 9999));
    let mut queue = store.queue(4).unwrap();
    assert_eq!(write(&mut *queue, 9728, &[7; 271], false), 271);
    assert_eq!(read(&mut *queue, 9000, 999), Ok([vec![0; 728], vec![7; 271]].concat()));
}

#[test]
fn an_export_that_has_shrunk_is_noticed() {
    if !has("an_export_that_has_shrunk_is_noticed", "nbdkit") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    let file = std::fs::File::create(&path).unwrap();
    file.set_len(MIB).unwrap();
    let text: &'static str = format!("file {}", path.display()).leak();
    let server = Server::nbdkit(text);
    let store = open(&server.url(""), NbdOptions::default()).unwrap();
    file.set_len(MIB / 2).unwrap();
    assert_eq!((store.size(), store.end()), (MIB, MIB), "nobody has asked");
    let error = store.refresh().unwrap_err().to_string();
    assert!(error.contains("shrunk from 1048576 to 524288"), "{error}");
    // Requests are checked against the size that its user knows.
    assert_eq!((store.size(), store.end()), (MIB, MIB / 2));
}

#[test]
fn threads_that_wait_share_a_connection() {
    if !has("threads_that_wait_share_a_connection", "nbdkit") {
        return;
    }
    let server = Server::nbdkit("-t 16 memory 4M");
    let store = open(&server.url(""), NbdOptions::default()).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..100_u64 {
            let store = &store;
            scope.spawn(move || {
                for round in 0..20_u8 {
                    let offset = thread * 4096;
                    let mut buffer = Buffer::new(vec![round ^ thread as u8; 4096]);
                    let job = Job::Write { pieces: buffer.pieces(), offset, durable: false };
                    // SAFETY: the buffer outlives the call.
                    assert_eq!(unsafe { store.perform(job) }, 4096);
                    let mut back = Buffer::new(vec![0; 4096]);
                    let job = Job::Read { pieces: back.pieces(), offset };
                    // SAFETY: as above.
                    assert_eq!(unsafe { store.perform(job) }, 4096);
                    assert!(back.data() == buffer.data());
                }
            });
        }
    });
}

#[test]
fn writes_are_durable_where_the_location_asks_for_it() {
    if !has("writes_are_durable_where_the_location_asks_for_it", "nbdkit") {
        return;
    }
    for (asked, seen) in [("", "fua=0"), ("&write-through=off", "fua=0"), ("&write-through=on", "fua=1")] {
        let server = Server::start("nbdkit", |socket, folder| {
            let log = format!("logfile={}", folder.join("log").display());
            let list = ["-f", "-U", &socket.display().to_string(), "--filter=log", "memory", "1M", &log];
            list.map(Into::into).into()
        });
        let store = open(&(server.url("") + asked), NbdOptions::default()).unwrap();
        assert_eq!(write(&mut *store.queue(1).unwrap(), 4096, &[7; 512], false), 512);
        let log = fs::read_to_string(server.folder.path().join("log")).unwrap();
        let line = log.lines().find(|line| line.contains(" Write ")).unwrap();
        assert!(line.contains(seen), "{asked}: {line}");
    }
}
