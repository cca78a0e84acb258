//! The sandbox denies what it must, as seen from inside.
use crate::daemon::{Daemon, Folder, is_root, paravane, sandbox_usable, skip, status, without_sandbox};
use crate::driver::{Driver, Wish};
use crate::images::{Format, Image, has_qemu_img};
use paravane_test_support::copy_program;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::Command;

/// A readable, writable and executable program.
fn forbidden(folder: &Folder) -> String {
    let path = folder.write("forbidden", "#!/bin/sh\nexit 0\n");
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
    path
}

/// Result of each attempt: "allowed", or the error.
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
        // A thread may have ended since it was listed.
        let Ok(text) = std::fs::read_to_string(task.unwrap().path().join("status")) else { continue };
        for word in ["Seccomp:\t2", "Seccomp_filters:\t3", "NoNewPrivs:\t1"] {
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
        // Errors of Landlock and of seccomp.
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
    // Files beside an image are accessible as images, but not executable.
    let inside = forbidden(&folder);
    let daemon = Daemon::start(&["--config", &file, "--control", "off", "--try-sandbox", &inside]);
    let beside = expected.map(|(attempt, outcome)| match attempt {
        "open" | "write" => (attempt, "allowed"),
        _ => (attempt, outcome),
    });
    assert_outcomes(&daemon, &beside);
}

/// Daemons of tests run as those of users do; `without_sandbox` says where that is impossible.
#[test]
fn no_other_test_turns_the_sandbox_off() {
    let mut found = Vec::new();
    let mut folders = vec![std::path::PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests"))];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            match path.extension().and_then(|extension| extension.to_str()) {
                None if path.is_dir() => folders.push(path),
                Some("rs") => {
                    let text = std::fs::read_to_string(&path).unwrap();
                    let option = concat!("\"--no", "-sandbox\"");
                    let name = path.file_name().unwrap().to_str().unwrap().to_owned();
                    found.extend(text.matches(option).map(|_| name.clone()));
                }
                _ => {}
            }
        }
    }
    found.sort();
    // The option itself, and the test below.
    assert_eq!(found, ["daemon.rs", "sandbox.rs"]);
}

#[test]
fn a_daemon_without_says_what_is_lost() {
    let (folder, elsewhere) = (Folder::new(), Folder::new());
    let file = forbidden(&elsewhere);
    let arguments =
        ["rng", "--socket", &folder.text("s"), "--control", "off", "--no-sandbox", "--try-sandbox", &file];
    let daemon = Daemon::start(&arguments);
    assert!(
        daemon.seen().iter().any(|line| line.contains("running without a sandbox: a guest that takes over"))
    );
    let outcomes = outcomes(&daemon);
    for attempt in ["open", "write", "exec", "tcp-listen", "udp", "unix"] {
        assert!(outcomes.contains(&(attempt.into(), "allowed".into())), "{attempt}: {outcomes:?}");
    }
}

#[test]
fn a_thread_that_panics_in_the_sandbox_ends_alone() {
    let (folder, elsewhere) = (Folder::new(), Folder::new());
    let (control, file) = (folder.text("control"), forbidden(&elsewhere));
    let arguments =
        ["serve", "rng", "--socket", &folder.text("s"), "--control", &control, "--try-sandbox", &file];
    // A backtrace opens the program and its libraries, which the sandbox denies.
    let mut command = paravane();
    command.args(arguments).args(crate::daemon::without_sandbox()).env("RUST_BACKTRACE", "full");
    let mut daemon = Daemon::spawn(&mut command);
    daemon.wait_for("a panic in the sandbox");
    daemon.wait_for("panicked=true");
    daemon.wait_for("ready");
    assert_eq!(status(&control)["devices"][0]["name"], "rng");
    let (ended, log) = daemon.end();
    assert!(ended.success(), "{log:?}");
}

/// The lines of capabilities(7) of /proc/PID/status, in this order.
const SETS: [&str; 5] = ["CapInh:", "CapPrm:", "CapEff:", "CapBnd:", "CapAmb:"];
const DAC_OVERRIDE: u64 = 1 << 1;
const NET_ADMIN: u64 = 1 << 12;
const IPC_LOCK: u64 = 1 << 14;

/// The capability sets of each thread.
fn capabilities(daemon: &Daemon) -> Vec<[u64; 5]> {
    let threads = std::fs::read_dir(format!("/proc/{}/task", daemon.pid())).unwrap();
    let of = |thread: &Path| {
        // A thread may have ended since it was listed.
        let text = std::fs::read_to_string(thread.join("status")).ok()?;
        Some(SETS.map(|name| {
            let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap();
            u64::from_str_radix(line.trim(), 16).unwrap()
        }))
    };
    threads.filter_map(|thread| of(&thread.unwrap().path())).collect()
}

/// All threads have exactly these capabilities and cannot gain others.
fn assert_capabilities(daemon: Daemon, kept: u64) {
    let threads = capabilities(&daemon);
    assert!(threads.len() > 2, "{threads:x?}");
    for thread in threads {
        assert_eq!(thread, [0, kept, kept, 0, 0], "of {SETS:?}");
    }
    let (ended, log) = daemon.end();
    assert!(ended.success(), "{log:?}");
}

#[test]
fn root_keeps_the_capabilities_that_its_devices_need() {
    const TEST: &str = "root_keeps_the_capabilities_that_its_devices_need";
    if !is_root() {
        return skip(TEST, "only root has capabilities");
    }
    if !sandbox_usable(TEST) {
        return;
    }
    let folder = Folder::new();
    let (image, socket) = (folder.image("vm.img"), folder.text("s"));
    let disk = ["blk", "--image", &image, "--socket", &socket, "--control", "off"];
    assert_capabilities(Daemon::start(&disk), DAC_OVERRIDE | IPC_LOCK);
    assert_capabilities(Daemon::start(&[&disk[..], &["--engine", "threads"]].concat()), DAC_OVERRIDE);
    if paravane_device::blk::io_uring_available().is_ok() {
        let registered = [&disk[..], &["--engine", "io_uring", "--registered-buffers"]].concat();
        assert_capabilities(Daemon::start(&registered), DAC_OVERRIDE | IPC_LOCK);
    }
    let file = folder.write("d.toml", "[[blk]]\nname = \"a\"\nimage = \"vm.img\"\nsocket = \"s\"\n");
    assert_capabilities(Daemon::start(&["--config", &file, "--control", "off"]), DAC_OVERRIDE | IPC_LOCK);
    if Path::new("/dev/net/tun").exists() {
        let tap = format!("pvtest{}", std::process::id());
        let tap = ["net", "--tap", &tap, "--socket", &socket, "--control", "off"];
        assert_capabilities(Daemon::start(&tap), DAC_OVERRIDE);
        let file =
            folder.write("n.toml", &format!("[[net]]\nname = \"n\"\ntap = \"{}\"\nsocket = \"s\"\n", tap[2]));
        assert_capabilities(
            Daemon::start(&["--config", &file, "--control", "off"]),
            DAC_OVERRIDE | IPC_LOCK | NET_ADMIN,
        );
    } else {
        skip(&format!("{TEST} for TAP devices"), "there is no /dev/net/tun");
    }
    let another = [&disk[..], &["--user", "nobody"]].concat();
    std::fs::set_permissions(folder.root(), PermissionsExt::from_mode(0o777)).unwrap();
    assert_capabilities(Daemon::start(&another), 0);
}

#[test]
fn the_control_socket_belongs_to_the_user_of_the_daemon() {
    const TEST: &str = "the_control_socket_belongs_to_the_user_of_the_daemon";
    if !is_root() {
        return skip(TEST, "only root can become another user");
    }
    let folder = Folder::new();
    std::fs::set_permissions(folder.root(), PermissionsExt::from_mode(0o777)).unwrap();
    let (socket, control) = (folder.text("s"), folder.text("control"));
    let daemon = Daemon::start(&["rng", "--socket", &socket, "--control", &control, "--user", "nobody"]);
    let [own, device] = [&control, &socket].map(|path| std::fs::metadata(path).unwrap());
    assert!(own.uid() != 0 && own.uid() == device.uid() && own.gid() == device.gid(), "{own:?}");
    assert_eq!(own.permissions().mode() & 0o777, 0o600);
    assert_eq!(status(&control)["devices"][0]["name"], "rng");
    let (ended, log) = daemon.end();
    assert!(ended.success(), "{log:?}");
}

/// I/O threads of an image start when a driver connects.
#[test]
fn threads_of_an_image_have_no_more_capabilities_than_others() {
    const TEST: &str = "threads_of_an_image_have_no_more_capabilities_than_others";
    if !is_root() {
        return skip(TEST, "only root has capabilities");
    }
    if !sandbox_usable(TEST) || !has_qemu_img(TEST) {
        return;
    }
    let image = Image::new(Format::Qcow2, false, 1 << 20);
    let (path, socket) = (image.folder().text("disk.img"), image.folder().text("s"));
    let arguments = ["blk", "--image", &path, "--format", "qcow2", "--socket", &socket, "--control", "off"];
    let daemon = Daemon::start(&arguments);
    let before = capabilities(&daemon).len();
    let wish = Wish { packed: false, event_idx: true, queues: 1, depth: 1 };
    let mut driver = Driver::connect(Path::new(&socket), wish).unwrap();
    driver.exercise(&mut vec![0; 1 << 20], 10, &mut crate::driver::Random::new(1));
    assert!(capabilities(&daemon).len() > before, "its threads are not there");
    assert_capabilities(daemon, DAC_OVERRIDE | IPC_LOCK);
}

#[test]
fn capabilities_that_another_user_was_given_are_dropped() {
    const TEST: &str = "capabilities_that_another_user_was_given_are_dropped";
    if !is_root() {
        return skip(TEST, "only root can give capabilities");
    }
    if !sandbox_usable(TEST) {
        return;
    }
    let folder = Folder::new();
    std::fs::set_permissions(folder.root(), PermissionsExt::from_mode(0o777)).unwrap();
    // A copy that the user may execute.
    copy_program(env!("CARGO_BIN_EXE_paravane"), folder.path("paravane"));
    let caps = "+net_admin,+dac_override,+sys_admin";
    let given = [format!("--inh-caps={caps}"), format!("--ambient-caps={caps}")];
    let mut command = Command::new("setpriv");
    command
        .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
        .args(given)
        .arg(folder.path("paravane"));
    command.args(["serve", "rng", "--socket", &folder.text("s"), "--control", "off"]);
    if let Err(error) = Command::new("setpriv").arg("--version").output() {
        return skip(TEST, format!("setpriv: {error}"));
    }
    let mut daemon = Daemon::spawn(&mut command);
    daemon.wait_for("ready");
    for thread in capabilities(&daemon) {
        let [inheritable, permitted, effective, _, ambient] = thread;
        let found = [inheritable, permitted, effective, ambient];
        assert_eq!(found, [0, DAC_OVERRIDE, DAC_OVERRIDE, 0], "{thread:x?}");
    }
}

/// What the image's own permissions refuse is not blamed on the sandbox.
#[test]
fn an_image_without_permission_is_not_outside_of_the_sandbox() {
    let test = "an_image_without_permission_is_not_outside_of_the_sandbox";
    if !sandbox_usable(test) {
        return;
    }
    let folder = Folder::new();
    let image = folder.image("vm.img");
    let changed =
        |flag: &str| Command::new("chattr").args([flag, &image]).status().is_ok_and(|done| done.success());
    if !changed("+i") {
        return skip(test, "chattr: not root, or not on this file system");
    }
    let socket = folder.text("s");
    let output = paravane()
        .args(["serve", "blk", "--image", &image, "--socket", &socket, "--control", "off"])
        .output()
        .unwrap();
    assert!(changed("-i"));
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(
        !output.status.success() && stderr.contains("is it immutable or append-only? see lsattr"),
        "{stderr}"
    );
    assert!(!stderr.contains("sandbox"), "{stderr}");
}

#[test]
fn a_daemon_without_a_control_socket_says_so() {
    let test = "a_daemon_without_a_control_socket_says_so";
    let folder = Folder::new();
    let no_folder = |command: &mut Command| {
        command.args(["rng", "--socket", &folder.text("s")]).args(without_sandbox());
        let mut daemon = Daemon::spawn(command);
        daemon.wait_for("no control socket: ")
    };
    let made = no_folder(paravane().env("RUNTIME_DIRECTORY", "/proc/nowhere").arg("serve"));
    assert!(made.contains("WARN") && made.contains("cannot create /proc/nowhere"), "{made}");
    if !is_root() {
        return skip(test, "another user: not root");
    }
    std::fs::set_permissions(folder.path("."), PermissionsExt::from_mode(0o777)).unwrap();
    copy_program(env!("CARGO_BIN_EXE_paravane"), folder.path("paravane"));
    let mut command = Command::new("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(folder.path("paravane"));
    command.env_remove("XDG_RUNTIME_DIR").env_remove("RUNTIME_DIRECTORY").arg("serve");
    if let Err(error) = Command::new("setpriv").arg("--version").output() {
        return skip(test, format!("setpriv: {error}"));
    }
    let unset = no_folder(&mut command);
    assert!(unset.contains("WARN") && unset.contains("XDG_RUNTIME_DIR is not set"), "{unset}");
}
