//! That what the sandbox is to refuse is refused, as seen from inside.
use crate::daemon::{Daemon, Folder, sandbox_usable};
use std::os::unix::fs::PermissionsExt;

/// A program that could be read, written and executed.
fn forbidden(folder: &Folder) -> String {
    let path = folder.write("forbidden", "#!/bin/sh\nexit 0\n");
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
    path
}

/// The word for each attempt: "allowed", or the error.
fn outcomes(daemon: &Daemon) -> Vec<(String, String)> {
    let lines = daemon.seen().iter().filter(|line| line.contains("attempt="));
    lines
        .map(|line| {
            let attempt = line.split("attempt=\"").nth(1).unwrap().split('"').next().unwrap();
            let outcome = match line.split_once("error=") {
                Some((_, error)) => error.split(" (os error").next().unwrap(),
                None => "allowed",
            };
            (attempt.to_owned(), outcome.to_owned())
        })
        .collect()
}

fn assert_outcomes(daemon: &Daemon, expected: &[(&str, &str)]) {
    let outcomes = outcomes(daemon);
    let outcomes: Vec<_> =
        outcomes.iter().map(|(attempt, outcome)| (attempt.as_str(), outcome.as_str())).collect();
    assert_eq!(outcomes, expected, "{:?}", daemon.seen());
}

const NOT_PERMITTED: &str = "Operation not permitted";

#[test]
fn one_device_gives_up_files_programs_and_sockets() {
    if !sandbox_usable("one_device_gives_up_files_programs_and_sockets") {
        return;
    }
    let (folder, elsewhere) = (Folder::new(), Folder::new());
    let (image, socket, file) = (folder.image("vm.img"), folder.text("s"), forbidden(&elsewhere));
    let arguments = [
        "blk",
        "--image",
        &image,
        "--socket",
        &socket,
        "--control",
        "off",
        "--try-sandbox",
        &file,
        "--workers",
        "2",
    ];
    let daemon = Daemon::start(&arguments);
    let all = ["open", "write", "exec", "tcp-listen", "tcp-connect", "udp", "unix"];
    assert_outcomes(&daemon, &all.map(|attempt| (attempt, NOT_PERMITTED)));
    // In no thread otherwise.
    let mut threads = 0;
    for task in std::fs::read_dir(format!("/proc/{}/task", daemon.pid())).unwrap() {
        let text = std::fs::read_to_string(task.unwrap().path().join("status")).unwrap();
        for word in ["Seccomp:\t2", "Seccomp_filters:\t2", "NoNewPrivs:\t1"] {
            assert!(text.lines().any(|line| line == word), "{word:?} is not in\n{text}");
        }
        threads += 1;
    }
    assert!(threads > 1);
}

#[test]
fn a_daemon_that_takes_more_devices_keeps_their_directories() {
    if !sandbox_usable("a_daemon_that_takes_more_devices_keeps_their_directories") {
        return;
    }
    let (folder, elsewhere) = (Folder::new(), Folder::new());
    folder.image("vm.img");
    let file = folder.write("d.toml", "[[blk]]\nname = \"a\"\nimage = \"vm.img\"\nsocket = \"s\"\n");
    let outside = forbidden(&elsewhere);
    let daemon = Daemon::start(&["--config", &file, "--control", "off", "--try-sandbox", &outside]);
    let expected = [
        // Landlock's words, and seccomp's.
        ("open", "Permission denied"),
        ("write", "Permission denied"),
        ("exec", NOT_PERMITTED),
        ("tcp-listen", NOT_PERMITTED),
        ("tcp-connect", NOT_PERMITTED),
        ("udp", NOT_PERMITTED),
        ("unix", "allowed"),
    ];
    assert_outcomes(&daemon, &expected);
    drop(daemon);
    // What is beside an image may be one, and still is no program.
    let inside = forbidden(&folder);
    let daemon = Daemon::start(&["--config", &file, "--control", "off", "--try-sandbox", &inside]);
    let beside = expected.map(|(attempt, outcome)| match attempt {
        "open" | "write" => (attempt, "allowed"),
        _ => (attempt, outcome),
    });
    assert_outcomes(&daemon, &beside);
}

#[test]
fn a_daemon_without_says_what_is_lost() {
    let (folder, elsewhere) = (Folder::new(), Folder::new());
    let file = forbidden(&elsewhere);
    let arguments =
        ["rng", "--socket", &folder.text("s"), "--control", "off", "--no-sandbox", "--try-sandbox", &file];
    let daemon = Daemon::start(&arguments);
    assert!(daemon.seen().iter().any(|line| line.contains("no sandbox: a guest that takes over")));
    let outcomes = outcomes(&daemon);
    for attempt in ["open", "write", "exec", "tcp-listen", "udp", "unix"] {
        assert!(outcomes.contains(&(attempt.into(), "allowed".into())), "{attempt}: {outcomes:?}");
    }
}
