//! A daemon that was killed while it started another program: that program has its sockets until it runs.
use crate::daemon::{Daemon, Folder, skip, status};
use rustix::net::{SocketAddrUnix, getsockname, sockopt};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, Signal, pidfd_getfd, pidfd_open};
use std::os::fd::OwnedFd;

/// A copy of the socket that the daemon listens on at `path`. `None`: the host refuses it.
fn listener(daemon: &Daemon, path: &str) -> Option<OwnedFd> {
    let process = Pid::from_raw(daemon.pid().cast_signed()).unwrap();
    let process = pidfd_open(process, PidfdFlags::empty()).unwrap();
    let wanted = SocketAddrUnix::new(path).unwrap();
    let fds = std::fs::read_dir(format!("/proc/{}/fd", daemon.pid())).ok()?;
    let numbers = fds.filter_map(|fd| fd.ok()?.file_name().to_str()?.parse().ok());
    let copies = numbers.filter_map(|number| pidfd_getfd(&process, number, PidfdGetfdFlags::empty()).ok());
    let is_wanted = |fd: &OwnedFd| {
        getsockname(fd).is_ok_and(|name| SocketAddrUnix::try_from(name) == Ok(wanted.clone()))
            && sockopt::socket_acceptconn(fd) == Ok(true)
    };
    copies.into_iter().find(is_wanted)
}

#[test]
fn a_socket_of_a_dead_daemon_is_replaced() {
    let folder = Folder::new();
    let (image, socket, control) = (folder.image("a.img"), folder.text("a.sock"), folder.text("control"));
    let arguments = ["blk", "--image", &image, "--socket", &socket, "--control", &control];
    let daemon = Daemon::start(&arguments);
    let Some(copy) = listener(&daemon, &control) else {
        return skip(
            "a_socket_of_a_dead_daemon_is_replaced",
            "this user may not copy descriptors of a process",
        );
    };
    let first = daemon.pid();
    daemon.signal(Signal::KILL);
    drop(daemon.wait());
    let second = Daemon::start(&arguments);
    assert_eq!(status(&control)["pid"], second.pid());
    assert_ne!(first, second.pid());
    // A live daemon keeps its socket.
    let third = Daemon::spawn(
        crate::daemon::paravane()
            .args([
                "serve",
                "blk",
                "--image",
                &image,
                "--socket",
                &folder.text("b.sock"),
                "--control",
                &control,
            ])
            .args(crate::daemon::without_sandbox()),
    );
    let (ended, log) = third.wait();
    assert_eq!(ended.code(), Some(1), "{log:?}");
    assert!(log.iter().any(|line| line.contains("in use by another process")), "{log:?}");
    drop((copy, second));
}
