//! SIGHUP: adds and removes devices without affecting the others.
use crate::daemon::{Daemon, Folder, names, patience, sandbox_usable, status};
use rustix::process::Signal;
use std::io::{ErrorKind, Read};
use std::os::unix::net::UnixStream;
use std::time::Duration;

fn disk(name: &str) -> String {
    format!("[[blk]]\nname = \"{name}\"\nimage = \"{name}.img\"\nsocket = \"{name}.sock\"\n")
}

fn reload(daemon: &mut Daemon) -> String {
    daemon.signal(Signal::HUP);
    daemon.wait_for("unchanged")
}

/// Whether the connection is still open.
pub(crate) fn is_open(mut stream: &UnixStream) -> bool {
    stream.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    match stream.read(&mut [0]) {
        Ok(0) => false,
        Ok(_) => panic!("nothing was asked"),
        Err(error) => matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut),
    }
}

/// Waits for the end of the connection.
pub(crate) fn is_closed(mut stream: &UnixStream) -> bool {
    stream.set_read_timeout(Some(patience())).unwrap();
    matches!(stream.read(&mut [0]), Ok(0))
}

#[test]
fn devices_come_and_go_and_the_others_stay() {
    let folder = Folder::new();
    for name in ["a", "b", "c"] {
        folder.image(&format!("{name}.img"));
    }
    let file = folder.write("d.toml", &(disk("a") + &disk("b")));
    let control = folder.text("control");
    let mut daemon = Daemon::start(&["--config", &file, "--control", &control]);
    assert_eq!(names(&status(&control)), ["a", "b"]);
    let (to_a, to_b) = (
        UnixStream::connect(folder.path("a.sock")).unwrap(),
        UnixStream::connect(folder.path("b.sock")).unwrap(),
    );

    // Editors may replace the file by another one of the same name.
    folder.write("new", &(disk("c") + &disk("b")));
    std::fs::rename(folder.path("new"), folder.path("d.toml")).unwrap();
    let line = reload(&mut daemon);
    assert!(line.contains("1 unchanged, 1 removed, 1 added, 0 failed"), "{line}");
    assert_eq!(names(&status(&control)), ["c", "b"]);
    assert!(!folder.path("a.sock").exists() && folder.path("c.sock").exists());
    assert!(is_open(&to_b) && is_closed(&to_a));

    // An invalid file changes nothing, and the log names the line.
    folder.write("d.toml", &(disk("a") + "queues = 0\n" + &disk("b")));
    daemon.signal(Signal::HUP);
    let line = daemon.wait_for("devices unchanged");
    assert!(line.contains("d.toml:5: queues: 0"), "{line}");
    let json = status(&control);
    assert_eq!(names(&json), ["c", "b"]);
    assert!(json["last_reload"].as_str().unwrap().contains("d.toml:5"), "{json}");
    assert!(is_open(&to_b));

    // So does an empty one: somebody writes it at this moment.
    folder.write("d.toml", "");
    daemon.signal(Signal::HUP);
    let line = daemon.wait_for("devices unchanged");
    assert!(line.contains("d.toml: the file is empty: reload again"), "{line}");
    assert_eq!(names(&status(&control)), ["c", "b"]);

    // A device that cannot be opened is left out, the others are served; a later reload serves it.
    std::fs::remove_file(folder.path("a.img")).unwrap();
    folder.write("d.toml", &(disk("a") + &disk("b")));
    let line = reload(&mut daemon);
    assert!(line.contains("1 unchanged, 1 removed, 0 added, 1 failed"), "{line}");
    let json = status(&control);
    assert_eq!((names(&json), &json["failed"][0]["name"]), (vec!["b"], &"a".into()));
    assert!(json["failed"][0]["why"].as_str().unwrap().contains("a.img"), "{json}");
    folder.image("a.img");
    let line = reload(&mut daemon);
    assert!(line.contains("1 unchanged, 0 removed, 1 added, 0 failed"), "{line}");
    assert_eq!(names(&status(&control)), ["a", "b"]);
    assert!(is_open(&to_b));
    assert_eq!(status(&control)["devices"][1]["sessions"], 1);

    let (status, log) = daemon.end();
    assert!(status.success(), "{log:?}");
    assert!(!folder.path("a.sock").exists() && !folder.path("b.sock").exists());
}

#[test]
fn a_file_behind_a_symbolic_link_is_read_again() {
    let (folder, elsewhere) = (Folder::new(), Folder::new());
    for name in ["a", "b"] {
        folder.image(&format!("{name}.img"));
    }
    elsewhere.write("real.toml", &disk("a"));
    std::os::unix::fs::symlink(elsewhere.path("real.toml"), folder.path("d.toml")).unwrap();
    let mut daemon = Daemon::start(&["--config", &folder.text("d.toml"), "--control", "off"]);
    elsewhere.write("new", &(disk("a") + &disk("b")));
    std::fs::rename(elsewhere.path("new"), elsewhere.path("real.toml")).unwrap();
    let line = reload(&mut daemon);
    assert!(line.contains("1 unchanged, 0 removed, 1 added, 0 failed"), "{line}");
}

#[test]
fn a_card_whose_cable_is_cut_is_made_anew() {
    let folder = Folder::new();
    let card = |name: &str, more: &str| {
        format!("[[net]]\nname = \"{name}\"\nsocket = \"{name}.sock\"\nlink = \"l\"\n{more}")
    };
    let file =
        folder.write("d.toml", &(card("a", "") + &card("b", "") + "[[rng]]\nname = \"r\"\nsocket = \"r\"\n"));
    let mut daemon = Daemon::start(&["--config", &file, "--control", "off"]);
    let to_a = UnixStream::connect(folder.path("a.sock")).unwrap();
    folder.write(
        "d.toml",
        &(card("a", "")
            + &card("b", "socket = \"c.sock\"\n").replacen("socket = \"b.sock\"\n", "", 1)
            + "[[rng]]\nname = \"r\"\nsocket = \"r\"\n"),
    );
    let line = reload(&mut daemon);
    assert!(line.contains("1 unchanged, 0 removed, 0 added, 0 failed, 2 restarted"), "{line}");
    assert!(is_closed(&to_a));
}

#[test]
fn a_path_that_the_sandbox_does_not_reach_is_named() {
    if !sandbox_usable("a_path_that_the_sandbox_does_not_reach_is_named") {
        return;
    }
    let (folder, elsewhere, allowed) = (Folder::new(), Folder::new(), Folder::new());
    folder.image("a.img");
    let file = folder.write("d.toml", &disk("a"));
    let control = folder.text("control");
    let arguments = ["--config", &file, "--control", &control, "--allow", allowed.root().to_str().unwrap()];
    let mut daemon = Daemon::start(&arguments);
    let other = |name: &str, image: String| {
        format!("[[blk]]\nname = \"{name}\"\nimage = \"{image}\"\nsocket = \"{name}.sock\"\n")
    };
    let text = disk("a") + &other("in", allowed.image("i.img")) + &other("out", elsewhere.image("o.img"));
    folder.write("d.toml", &text);
    let line = reload(&mut daemon);
    assert!(line.contains("1 unchanged, 0 removed, 1 added, 1 failed"), "{line}");
    let json = status(&control);
    assert_eq!(names(&json), ["a", "in"]);
    let why = json["failed"][0]["why"].as_str().unwrap();
    assert!(why.contains("o.img") && why.contains("restart the daemon"), "{why}");
}
