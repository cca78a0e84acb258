//! Encrypted connections.
use crate::certificates::certificates;
use crate::disk::{Buffer, read, write};
use crate::model::Model;
use crate::open;
use crate::servers::{Running, Server, free_port, has};
use paravane_store::nbd::{NbdError, NbdOptions};
use paravane_store::{Job, Link, Rest, Store, StoreQueue, WakeSet};
use paravane_test_support::{wait_for, wait_until};
use rustix::buffer::spare_capacity;
use rustix::event::epoll;
use std::collections::VecDeque;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use tempfile::TempDir;

/// A folder with some of the files, under the names that both sides expect.
fn folder(all: &Path, files: &[(&str, &str)]) -> TempDir {
    let folder = TempDir::new().unwrap();
    for (from, to) in files {
        fs::copy(all.join(from), folder.path().join(to)).unwrap();
    }
    folder
}

const OURS: [(&str, &str); 3] = [
    ("ca-cert.pem", "ca-cert.pem"),
    ("client-cert.pem", "client-cert.pem"),
    ("client-key.pem", "client-key.pem"),
];
const THEIRS: [(&str, &str); 3] = [
    ("ca-cert.pem", "ca-cert.pem"),
    ("server-cert.pem", "server-cert.pem"),
    ("server-key.pem", "server-key.pem"),
];

fn nbdkit(files: &Path, more: &'static str) -> Server {
    let files = files.to_owned();
    Server::start("nbdkit", move |socket, _| {
        let mut list = vec!["-f".into(), "-U".into(), socket.display().to_string(), "--tls=require".into()];
        list.push(format!("--tls-certificates={}", files.display()));
        list.extend(more.split_whitespace().map(Into::into));
        list
    })
}

fn tls_url(server: &Server, files: &Path, name: &str) -> String {
    let (socket, files) = (server.socket().display(), files.display());
    format!("nbds+unix:///?socket={socket}&tls-certificates={files}&tls-hostname={name}")
}

/// Waits as an I/O thread does: for each time that the queue's descriptor becomes readable.
fn finish(queue: &mut dyn StoreQueue, jobs: usize) {
    let poll = Arc::new(epoll::create(epoll::CreateFlags::CLOEXEC).unwrap());
    queue.register(Some(&WakeSet::new(&poll, 0))).unwrap();
    let (mut outcomes, mut events) = (VecDeque::new(), Vec::with_capacity(1));
    queue.submit().unwrap();
    loop {
        // Until nothing comes, as a thread that polls for a while.
        let before = outcomes.len();
        queue.reap(&mut outcomes);
        queue.submit().unwrap();
        if outcomes.len() == jobs {
            break;
        }
        if outcomes.len() == before && queue.rest(true) != Rest::Serve {
            let patience = rustix::event::Timespec { tv_sec: 20, tv_nsec: 0 };
            epoll::wait(&poll, spare_capacity(&mut events), Some(&patience)).unwrap();
            assert!(!events.is_empty(), "{} of {jobs} jobs have ended, and nothing wakes", outcomes.len());
            events.clear();
        }
    }
    assert!(outcomes.iter().all(|outcome| outcome.result() == 1 << 20), "{outcomes:?}");
}

/// More than the socket takes, and more than is received in one turn.
#[test]
fn large_transfers_go_on_by_themselves() {
    let test = "large_transfers_go_on_by_themselves";
    if !has(test, "nbdkit") || !has(test, "certtool") {
        return;
    }
    let all = TempDir::new().unwrap();
    certificates(all.path());
    let (theirs, ours) = (folder(all.path(), &THEIRS), folder(all.path(), &OURS));
    // By TCP: a socket of it tells of room only if it had none.
    let serve = |more: &[&str]| {
        let port = free_port();
        let mut command = Command::new("nbdkit");
        command.args(["-f", "-i", "127.0.0.1", "-p", &port.to_string(), "-t", "8"]).args(more);
        let child = command.args(["memory", "24M"]).stderr(Stdio::null()).spawn().unwrap();
        wait_until("nbdkit to listen", || std::net::TcpStream::connect(("127.0.0.1", port)).is_ok());
        (Running(child), port)
    };
    let (_encrypted, port) =
        serve(&["--tls=require", &format!("--tls-certificates={}", theirs.path().display())]);
    let (_plain, plain) = serve(&[]);
    let encrypted = format!("nbds://localhost:{port}/?tls-certificates={}", ours.path().display());
    for url in [encrypted, format!("nbd://localhost:{plain}/")] {
        let store = open(&url, NbdOptions::default()).unwrap();
        let mut queue = store.queue(24).unwrap();
        let mut buffers: Vec<_> = (0..24).map(|byte| Buffer::new(vec![byte; 1 << 20])).collect();
        for (buffer, number) in buffers.iter_mut().zip(0_u16..) {
            let job = Job::Write { pieces: buffer.pieces(), offset: u64::from(number) << 20, durable: false };
            // SAFETY: the buffers live until the outcomes.
            unsafe { queue.push(number, job) }.unwrap();
        }
        finish(&mut *queue, 24);
        let mut back: Vec<_> = (0..24).map(|_| Buffer::new(vec![0xee; 1 << 20])).collect();
        for (buffer, number) in back.iter_mut().zip(0_u16..) {
            let job = Job::Read { pieces: buffer.pieces(), offset: u64::from(number) << 20 };
            // SAFETY: as above.
            unsafe { queue.push(number, job) }.unwrap();
        }
        finish(&mut *queue, 24);
        assert!(back.iter().zip(&buffers).all(|(back, buffer)| back.data() == buffer.data()));
    }
}

#[test]
fn an_encrypted_disk() {
    if !has("an_encrypted_disk", "nbdkit") || !has("an_encrypted_disk", "certtool") {
        return;
    }
    let all = TempDir::new().unwrap();
    certificates(all.path());
    let (theirs, ours) = (folder(all.path(), &THEIRS), folder(all.path(), &OURS));
    for more in ["--tls-verify-peer -t 8 memory 4M", "--no-sr -t 8 memory 4M"] {
        let mut server = nbdkit(theirs.path(), more);
        let url = tls_url(&server, ours.path(), "localhost");
        let store = open(&url, NbdOptions::default()).unwrap();
        let mut queue = store.queue(16).unwrap();
        let mut model = Model::new(store.size(), store.limits(), 16, 21);
        model.run(&mut *queue, 500);
        // Large transfers, both ways at once.
        model.longest = 2 << 20;
        model.run(&mut *queue, 100);
        let image = read(&mut *queue, 0, 4 << 20).unwrap();
        model.compare(&image);
        assert_eq!(store.status().reconnects, 0);
        server.kill();
        server.restart();
        assert_eq!(write(&mut *queue, 0, &[1; 4096], false), 4096);
        assert_eq!(read(&mut *queue, 0, 4096), Ok(vec![1; 4096]));
        assert!(store.status().reconnects >= 1);
        // The files are needed no more once it is open.
        assert!(
            open(&server.url(""), NbdOptions::default())
                .is_err_and(|error| matches!(error, NbdError::NeedsTls))
        );
    }
}

#[test]
fn qemu_nbd_and_nbd_over_tls_on_tcp() {
    let name = "qemu_nbd_and_nbd_over_tls_on_tcp";
    if !has(name, "qemu-nbd") || !has(name, "certtool") {
        return;
    }
    let all = TempDir::new().unwrap();
    certificates(all.path());
    let (theirs, ours) = (folder(all.path(), &THEIRS), folder(all.path(), &OURS));
    let image = all.path().join("image");
    fs::File::create(&image).unwrap().set_len(4 << 20).unwrap();
    let port = free_port();
    let mut command = Command::new("qemu-nbd");
    command.args(["-t", "-f", "raw", "-x", "disk", "-e", "4", "-b", "127.0.0.1", "-p", &port.to_string()]);
    let credentials =
        format!("tls-creds-x509,id=tls,endpoint=server,verify-peer=yes,dir={}", theirs.path().display());
    let server =
        Running(command.args(["--object", &credentials, "--tls-creds", "tls"]).arg(&image).spawn().unwrap());
    let files = ours.path().display();
    let url = format!("nbds://localhost:{port}/disk?tls-certificates={files}");
    let open = || open(&url, NbdOptions::default());
    let store = wait_for("the server", || format!("{:?}", open().err()), || open().ok());
    let mut queue = store.queue(16).unwrap();
    let mut model = Model::new(store.size(), store.limits(), 16, 22);
    model.run(&mut *queue, 500);
    assert!(!store.extents(0, 4 << 20).unwrap().is_empty());
    assert_eq!(store.status().link, Link::Up);
    drop((queue, store));
    model.compare(&fs::read(&image).unwrap());
    drop(server);
}

#[test]
fn wrong_certificates_are_named() {
    let name = "wrong_certificates_are_named";
    if !has(name, "nbdkit") || !has(name, "certtool") {
        return;
    }
    let all = TempDir::new().unwrap();
    certificates(all.path());
    let (theirs, ours) = (folder(all.path(), &THEIRS), folder(all.path(), &OURS));
    let server = nbdkit(theirs.path(), "--tls-verify-peer memory 1M");
    let fails = |server: &Server, files: &Path, name: &str, part: &str| {
        let error = open(&tls_url(server, files, name), NbdOptions::default()).unwrap_err();
        assert!(matches!(error, NbdError::Tls(_) | NbdError::Io { .. }), "{error:?}");
        assert!(error.to_string().contains(part), "{error} instead of {part}");
    };
    fails(&server, ours.path(), "elsewhere", "not valid for name");
    let other = folder(all.path(), &[("other-ca-cert.pem", "ca-cert.pem")]);
    fails(&server, other.path(), "localhost", "UnknownIssuer");
    let empty = TempDir::new().unwrap();
    fails(&server, empty.path(), "localhost", "ca-cert.pem");
    let keyless = folder(all.path(), &OURS[..2]);
    fails(&server, keyless.path(), "localhost", "client-key.pem");
    fs::write(keyless.path().join("ca-cert.pem"), "no certificate").unwrap();
    fails(&server, keyless.path(), "localhost", "holds no certificate");
    // A client without a certificate: the server hangs up.
    let anonymous = folder(all.path(), &OURS[..1]);
    assert!(open(&tls_url(&server, anonymous.path(), "localhost"), NbdOptions::default()).is_err());
    let files = [THEIRS[0], ("expired-cert.pem", "server-cert.pem"), ("expired-key.pem", "server-key.pem")];
    let late = folder(all.path(), &files);
    let expired = nbdkit(late.path(), "memory 1M");
    fails(&expired, ours.path(), "localhost", "certificate expired");
    // One that expires while the disk is open, seen at the next connection.
    let mut server = nbdkit(theirs.path(), "memory 1M");
    let store = open(&tls_url(&server, ours.path(), "localhost"), NbdOptions::default()).unwrap();
    let mut queue = store.queue(4).unwrap();
    server.kill();
    for (from, to) in &files[1..] {
        fs::copy(all.path().join(from), theirs.path().join(to)).unwrap();
    }
    server.restart();
    let mut outcomes = std::collections::VecDeque::new();
    let status = || format!("{:?}", store.status());
    wait_for("the expired certificate", status, || {
        queue.reap(&mut outcomes);
        store.status().error.filter(|error| error.contains("certificate expired"))
    });
    assert_eq!(store.status().link, Link::Reconnecting);
    // A server without TLS is not spoken to.
    let plain = Server::nbdkit("memory 1M");
    let error = open(&tls_url(&plain, ours.path(), "localhost"), NbdOptions::default()).unwrap_err();
    assert!(matches!(error, NbdError::Refused { what: "TLS", .. }), "{error}");
}
