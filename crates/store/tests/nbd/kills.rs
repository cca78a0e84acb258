//! Servers that are killed, and connections that are cut, under verified load.
use crate::disk::read;
use crate::model::Model;
use crate::open;
use crate::servers::{Server, has, output};
use paravane_store::nbd::NbdOptions;
use paravane_store::{Link, Store, StoreStatus};
use paravane_test_support::Random;
use std::fs;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, ScopedJoinHandle};
use std::time::Duration;

const SIZE: usize = 4 << 20;
const KILLS: usize = 25;
/// Kills until all jobs in flight get the time to be done. A job fails that is lost 16 times.
const STREAK: usize = 8;

/// Kills the server under the load of two queues, in two threads; compares the image at last.
fn survives(mut server: Server, export: &str, options: NbdOptions, kill: impl Fn(&mut Server)) -> Server {
    let store = open(&server.url(export), options).unwrap();
    let connections = store.status().connections;
    let ends = AtomicBool::new(false);
    // How often all jobs of a load were done.
    let settled = [AtomicUsize::new(0), AtomicUsize::new(0)];
    let models = thread::scope(|scope| {
        let load = |half: u64| {
            let mut queue = store.queue(16).unwrap();
            let mut model = Model::new(SIZE as u64 / 2, store.limits(), 16, half + 1);
            model.base = half * SIZE as u64 / 2;
            while !ends.load(Ordering::Relaxed) {
                model.run(&mut *queue, 50);
                settled[half as usize].fetch_add(1, Ordering::Relaxed);
            }
            model
        };
        let loads = [scope.spawn(move || load(0)), scope.spawn(move || load(1))];
        let count = || settled.each_ref().map(|count| count.load(Ordering::Relaxed));
        let mut random = Random::new(5);
        for number in 0..KILLS {
            let before = count();
            // A load that has ended has panicked, which its end tells.
            while number % STREAK == 0
                && count().iter().zip(before).any(|(now, before)| *now == before)
                && !loads.iter().any(ScopedJoinHandle::is_finished)
            {
                thread::sleep(Duration::from_millis(1));
            }
            thread::sleep(Duration::from_millis(1 + random.below(30) as u64));
            let before = store.status().reconnects;
            kill(&mut server);
            server.restart();
            // Also when nobody has noticed it yet.
            let is_back = |status: StoreStatus| status.link == Link::Up && status.reconnects > before;
            while !is_back(store.status()) {
                thread::sleep(Duration::from_millis(1));
            }
        }
        ends.store(true, Ordering::Relaxed);
        loads.map(|load| load.join().unwrap())
    });
    let status = store.status();
    assert!(status.reconnects >= KILLS as u64, "{status:?}");
    println!("{} and {} jobs, {} reconnects", models[0].done, models[1].done, status.reconnects);
    let mut queue = store.queue(16).unwrap();
    for (half, model) in models.iter().enumerate() {
        model.compare(&read(&mut *queue, (half * SIZE / 2) as u64, SIZE / 2).unwrap());
    }
    let status = store.status();
    assert!(status.waiting == 0 && status.error.is_some(), "{status:?}");
    assert!(status.connections >= 1 && status.connections <= connections);
    server
}

#[test]
fn nbdkit_is_killed() {
    if !has("nbdkit_is_killed", "nbdkit") {
        return;
    }
    let start = |more: &'static str, delays: &'static str| {
        Server::start("nbdkit", move |socket, folder| {
            let image = folder.join("image");
            if !image.exists() {
                fs::File::create(&image).unwrap().set_len(SIZE as u64).unwrap();
            }
            let mut list: Vec<String> = vec!["-f".into(), "-U".into(), socket.display().to_string()];
            list.extend(more.split_whitespace().map(Into::into));
            list.extend(["file".into(), image.display().to_string()]);
            list.extend(delays.split_whitespace().map(Into::into));
            list
        })
    };
    survives(start("-t 8", ""), "", NbdOptions::default(), Server::kill);
    survives(start("--no-sr -t 8", ""), "", NbdOptions::default(), Server::kill);
    let mut options = NbdOptions::default();
    options.connections = 1;
    survives(start("-t 8 --filter=delay", "rdelay=1ms wdelay=1ms"), "", options, Server::kill);
}

#[test]
fn qemu_nbd_is_killed() {
    if !has("qemu_nbd_is_killed", "qemu-nbd") || !has("qemu_nbd_is_killed", "qemu-img") {
        return;
    }
    let kill = Server::kill as fn(&mut Server);
    for (format, write_through, kill) in [
        ("raw", false, kill),
        ("raw", false, Server::terminate),
        ("raw", true, kill),
        // It has tables in its own memory.
        ("qcow2", true, kill),
    ] {
        let server = Server::start("qemu-nbd", move |socket, folder| {
            let image = folder.join("image");
            if !image.exists() {
                output("qemu-img", &["create", "-q", "-f", format, image.to_str().unwrap(), "4M"]);
            }
            let mut list: Vec<String> =
                ["--discard=unmap", "-t", "-e", "4", "-f", format, "-x", "disk", "-k"].map(Into::into).into();
            list.extend([socket.display().to_string(), image.display().to_string()]);
            list
        });
        let mut options = NbdOptions::default();
        options.write_through = write_through;
        let mut server = survives(server, "disk", options, kill);
        if format == "qcow2" {
            server.kill();
            let image = server.folder.path().join("image");
            let check = Command::new("qemu-img").arg("check").arg(image).output().unwrap();
            // 3: clusters that nothing refers to are left. A killed server leaves some.
            let text = String::from_utf8_lossy(&check.stdout);
            assert!(matches!(check.status.code(), Some(0 | 3)), "{text}");
        }
    }
}

/// Passes bytes on, and cuts each connection somewhere.
fn cutter(to: PathBuf, listener: UnixListener) {
    let random = Arc::new(Mutex::new(Random::new(11)));
    thread::spawn(move || {
        for client in listener.incoming() {
            let client = client.unwrap();
            let Ok(server) = UnixStream::connect(&to) else { continue };
            for (from, to) in [(&client, &server), (&server, &client)] {
                let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                // Some of them early, most of them in the middle of something.
                let mut left = {
                    let mut random = random.lock().unwrap();
                    let most = if random.once_in(4) { 64 << 10 } else { 4 << 20 };
                    1 + random.below(most)
                };
                thread::spawn(move || {
                    let mut bytes = vec![0; 16 << 10];
                    loop {
                        let want = bytes.len().min(left);
                        let got = from.read(&mut bytes[..want]).unwrap_or(0);
                        left -= got;
                        if got == 0 || to.write_all(&bytes[..got]).is_err() || left == 0 {
                            let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
                            return;
                        }
                    }
                });
            }
        }
    });
}

#[test]
fn connections_are_cut_anywhere() {
    if !has("connections_are_cut_anywhere", "nbdkit") {
        return;
    }
    // With more threads for a connection, nbdkit 1.32 may end with an assertion when one is cut.
    for arguments in ["-t 1 memory 4M", "-t 1 --no-sr memory 4M"] {
        let server = Server::nbdkit(arguments);
        let path = server.folder.path().join("cutter");
        cutter(server.socket().to_owned(), UnixListener::bind(&path).unwrap());
        let url = format!("nbd+unix:///?socket={}", path.display());
        let mut options = NbdOptions::default();
        options.connections = 1;
        // The first connection may be cut in its negotiation.
        let store = (0..1000).find_map(|_| open(&url, options).ok()).unwrap();
        let mut queue = store.queue(8).unwrap();
        let mut model = Model::new(store.size(), store.limits(), 8, 77);
        model.longest = 100 << 10;
        for _ in 0..1000 {
            model.run(&mut *queue, 20);
            if store.status().reconnects > 50 {
                break;
            }
        }
        let status = store.status();
        assert!(status.reconnects > 50, "{status:?}");
        let mut image = Vec::new();
        for part in 0..64 {
            image.extend(read(&mut *queue, part << 16, 1 << 16).unwrap());
        }
        model.compare(&image);
        assert!(matches!(store.status().link, Link::Up | Link::Reconnecting));
    }
}
