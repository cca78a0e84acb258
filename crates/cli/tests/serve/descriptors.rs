//! Descriptors of clients, which the daemon must not have before it knows what they are.
//!
//! ```text
//!   client --a file on FUSE--> connection: peeked by the inspector, whose copy cannot be closed
//!                              daemon: closes the connection, and never has the descriptor
//! ```
use crate::daemon::{Daemon, Folder, patience, status};
use crate::raw::{Machine, Raw};
use crate::rig::DISK;
use paravane_spec::vhost_user::{MemoryTable, request};
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

fn daemon(folder: &Folder, more: &[&str]) -> Daemon {
    std::fs::write(folder.path("disk.img"), vec![0; DISK]).unwrap();
    let [image, socket, control] = ["disk.img", "s", "control"].map(|name| folder.text(name));
    let arguments = ["blk", "--image", &image, "--socket", &socket, "--control", &control];
    Daemon::start(&[&arguments[..], more].concat())
}

fn last_error(folder: &Folder) -> String {
    status(&folder.text("control"))["devices"][0]["last_error"].as_str().unwrap_or_default().to_owned()
}

/// Requests whose descriptor is a file, with their payloads.
fn requests(machine: &Machine) -> [(u32, Vec<u8>); 5] {
    let queue = 0_u64.as_bytes().to_vec();
    let table = [MemoryTable { regions: 1, padding: 0 }.as_bytes(), machine.region().as_bytes()].concat();
    [
        (request::SET_MEM_TABLE, table),
        (request::SET_VRING_KICK, queue.clone()),
        (request::SET_VRING_CALL, queue.clone()),
        (request::SET_VRING_ERR, queue),
        (request::SET_BACKEND_REQ_FD, Vec::new()),
    ]
}

#[test]
fn a_file_on_a_disk_is_never_taken() {
    let folder = Folder::new();
    let daemon = daemon(&folder, &[]);
    let program = File::open(std::env::current_exe().unwrap()).unwrap();
    let machine = Machine::new(0, 64, 4);
    for (request, payload) in requests(&machine) {
        let raw = Raw::connect(&folder.path("s"));
        raw.begin(0);
        let fds: [BorrowedFd<'_>; 1] = [program.as_fd()];
        // The daemon may disconnect before all of it is sent.
        let _ = raw.send(request, &payload, &fds);
        assert!(raw.is_closed(), "request {request}");
        drop(raw);
        let end = Instant::now() + patience();
        while !last_error(&folder).starts_with("message with a descriptor that cannot be taken") {
            assert!(Instant::now() < end, "request {request}: {}", last_error(&folder));
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    // What the kernel alone serves is taken.
    let raw = Raw::connect(&folder.path("s"));
    let mut machine = Machine::new(0, 64, 4);
    machine.attach(&raw, 0, false);
    machine.fill(DISK, &mut crate::driver::Random::new(3));
    machine.finish(&mut vec![0; DISK]);
    drop(raw);
    assert!(daemon.end().0.success());
}

#[test]
fn a_file_on_a_disk_is_taken_where_that_is_allowed() {
    let folder = Folder::new();
    let daemon = daemon(&folder, &["--any-memory-file"]);
    // Beside the program, which is on no tmpfs.
    let place = Folder::within(std::env::current_exe().unwrap().parent().unwrap());
    let file = File::options().read(true).write(true).create_new(true).open(place.path("memory")).unwrap();
    file.set_len(crate::raw::MEMORY).unwrap();
    let machine = Machine::new(0, 64, 4);
    let raw = Raw::connect(&folder.path("s"));
    raw.begin(0);
    machine.share_as(&raw, file.as_fd());
    drop(raw);
    assert!(daemon.end().0.success());
}
