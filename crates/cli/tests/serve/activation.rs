//! Sockets created by systemd or by a VMM.
use crate::daemon::{Daemon, Folder, assert_refused, names, status, without_sandbox};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Command, Stdio};

/// Starts the daemon as systemd does.
///
/// `listener` is descriptor 3, with the name `name`.
fn activated(listener: &UnixListener, name: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new("sh");
    let script = "exec 3<&0 </dev/null; LISTEN_PID=$$ LISTEN_FDS=1 exec \"$@\"";
    command
        .args(["-c", script, "sh", env!("CARGO_BIN_EXE_paravane"), "serve"])
        .args(arguments)
        .args(without_sandbox());
    let copy = OwnedFd::from(listener.try_clone().expect("the listener is copied"));
    command.stdin(Stdio::from(copy)).env("LISTEN_FDNAMES", name).env_remove("RUST_LOG");
    command
}

#[test]
fn systemd_may_listen() {
    let folder = Folder::new();
    let listener = UnixListener::bind(folder.path("s")).unwrap();
    let control = folder.text("c");
    let arguments = ["rng", "--name", "vm0", "--socket-activation", "--control", &control];
    let mut daemon = Daemon::spawn(&mut activated(&listener, "vm0", &arguments));
    daemon.wait_for("ready");
    let before = status(&control);
    assert_eq!((names(&before), &before["devices"][0]["endpoint"]), (vec!["vm0"], &"activated".into()));
    let client = UnixStream::connect(folder.path("s")).unwrap();
    let connected = || status(&control)["devices"][0]["sessions"] == 1;
    let start = std::time::Instant::now();
    while !connected() {
        assert!(start.elapsed() < crate::daemon::patience(), "nobody took the connection");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    drop(client);
    let (status, log) = daemon.end();
    assert!(status.success(), "{log:?}");
    assert!(folder.path("s").exists(), "the socket is systemd's");
}

#[test]
fn a_socket_of_another_name_is_not_taken() {
    let folder = Folder::new();
    let listener = UnixListener::bind(folder.path("s")).unwrap();
    let arguments = ["rng", "--name", "vm0", "--socket-activation", "--control", "off"];
    let output = activated(&listener, "vm1", &arguments).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("no socket of this name"), "{stderr}");
    let none = crate::daemon::paravane().arg("serve").args(arguments).arg("--check").output().unwrap();
    assert!(none.status.success());
    assert_refused(
        &crate::daemon::paravane().args(["serve", "rng"]).output().unwrap(),
        "--socket-activation",
    );
}

#[test]
fn a_vmm_that_listens_is_tried_again_and_again() {
    let folder = Folder::new();
    let arguments = ["rng", "--connect", &folder.text("s"), "--control", "off"];
    let mut daemon = Daemon::start(&arguments);
    for session in 1..=3 {
        // At first nothing listens; then a VMM listens and disconnects.
        std::thread::sleep(std::time::Duration::from_millis(50));
        let listener = UnixListener::bind(folder.path("s")).unwrap();
        let (stream, _) = listener.accept().unwrap();
        daemon.wait_for(&format!("client connected device=\"rng\" session={session}"));
        std::fs::remove_file(folder.path("s")).unwrap();
        drop((stream, listener));
        daemon.wait_for("client disconnected");
    }
    let (status, log) = daemon.end();
    assert!(status.success(), "{log:?}");
}
