//! Consoles. Linux uses one in scripts/vhost-clients: uml-console, qemu-console.
use crate::daemon::{Daemon, Folder, assert_refused, paravane, status};
use paravane_test_support::wait_until;
use rustix::process::Signal;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;

fn mode(path: &Path) -> u32 {
    std::fs::metadata(path).unwrap().permissions().mode() & 0o777
}

/// Terminal programs that the console of the daemon sees.
fn readers(control: &str) -> u64 {
    status(control)["devices"][0]["figures"]["readers"].as_u64().unwrap()
}

#[test]
fn a_terminal_socket_is_private_and_survives_kills_and_take_overs() {
    let folder = Folder::new();
    let (terminal, control) = (folder.path("term"), folder.text("c"));
    let arguments = [
        "console",
        "--terminal-socket",
        &folder.text("term"),
        "--socket",
        &folder.text("s"),
        "--control",
        &control,
    ];
    let killed = Daemon::start(&arguments);
    assert_eq!(mode(&terminal), 0o600);
    killed.signal(Signal::KILL);
    killed.wait();
    assert!(terminal.exists());
    // Nobody listens there any more.
    let first = Daemon::start(&arguments);
    let _program = UnixStream::connect(&terminal).unwrap();
    wait_until("the console has a reader", || readers(&control) == 1);
    assert_refused(
        &paravane()
            .args([
                "serve",
                "console",
                "--terminal-socket",
                &folder.text("term"),
                "--socket",
                &folder.text("t"),
            ])
            .args(["--control", "off"])
            .output()
            .unwrap(),
        "in use by another process",
    );
    let second = Daemon::start(&[&arguments[..], &["--take-over"]].concat());
    let (ended, log) = first.wait();
    assert!(ended.success(), "{log:?}");
    wait_until("the new daemon listens", || UnixStream::connect(&terminal).is_ok());
    assert_eq!(mode(&terminal), 0o600);
    assert!(status(&control)["devices"][0]["back_end"].as_str().unwrap().starts_with("terminal socket "));
    let (ended, log) = second.end();
    assert!(ended.success(), "{log:?}");
    assert!(!terminal.exists());
}

#[test]
fn a_log_has_one_writer_and_is_appended() {
    let folder = Folder::new();
    let (log, socket) = (folder.text("log"), folder.text("s"));
    let arguments = ["console", "--log", &log, "--socket", &socket, "--control", "off"];
    assert!(Daemon::start(&arguments).end().0.success());
    assert_eq!(mode(&folder.path("log")), 0o600);
    folder.write("log", "kept");
    assert!(Daemon::start(&arguments).end().0.success());
    assert_eq!(std::fs::read(folder.path("log")).unwrap(), b"kept");
    let console = |name| format!("[[console]]\nname = \"{name}\"\nlog = \"log\"\nsocket = \"{name}\"\n");
    let file = folder.write("d.toml", &(console("a") + &console("b")));
    let output = paravane().args(["serve", "--check", "--config", &file]).output().unwrap();
    assert_refused(&output, "already used by device \"a\"");
}

#[test]
fn a_pseudo_terminal_is_named() {
    let folder = Folder::new();
    let control = folder.text("c");
    let daemon = Daemon::start(&["console", "--pty", "--socket", &folder.text("s"), "--control", &control]);
    let report = status(&control);
    let path = report["devices"][0]["back_end"].as_str().unwrap().strip_prefix("pty ").unwrap();
    let terminal = std::fs::OpenOptions::new().read(true).write(true).open(path).unwrap();
    wait_until("the console has a reader", || readers(&control) == 1);
    drop(terminal);
    wait_until("the reader has gone", || readers(&control) == 0);
    assert!(daemon.end().0.success());
}
