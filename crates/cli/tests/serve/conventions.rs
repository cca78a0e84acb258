//! Conventions of vhost-user programs: names, options, capabilities, discovery.
use crate::daemon::{Daemon, Folder, assert_refused, paravane, patience, status, without_sandbox};
use crate::driver::{Driver, Random, Wish};
use crate::raw::{Ask, Machine, Raw};
use paravane_spec::feature::ACCESS_PLATFORM;
use paravane_spec::vhost_user::request;
use serde_json::Value;
use std::fs;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::symlink;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

const WISH: Wish = Wish { packed: false, event_idx: true, queues: 1, depth: 4 };
const PROGRAMS: [(&str, &str, &str); 4] = [
    ("blk", "vhost-user-blk", "block"),
    ("net", "vhost-user-net", "net"),
    ("rng", "vhost-user-rng", "rng"),
    ("console", "vhost-user-console", "console"),
];

/// The program under another name, as the package installs it.
fn linked(folder: &Folder, name: &str) -> PathBuf {
    let link = folder.path(name);
    if !link.exists() {
        symlink(env!("CARGO_BIN_EXE_paravane"), &link).unwrap();
    }
    link
}

fn capabilities(output: &Output) -> Value {
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Runs `command` with `fd` as descriptor 5.
fn with_descriptor_5(command: &[&str], fd: OwnedFd) -> Command {
    let mut shell = Command::new("sh");
    shell.args(["-c", "exec 5<&0 </dev/null; exec \"$@\"", "sh"]).args(command).args(without_sandbox());
    shell.stdin(Stdio::from(fd)).env_remove("RUST_LOG").env_remove("NOTIFY_SOCKET");
    shell
}

/// Served as `paravane serve rng --fd 5`.
fn rng(fd: OwnedFd, more: &[&str]) -> Command {
    let program = env!("CARGO_BIN_EXE_paravane");
    with_descriptor_5(&[&[program, "serve", "rng", "--fd", "5"], more].concat(), fd)
}

#[test]
fn capabilities_are_printed_beside_any_other_option() {
    let folder = Folder::new();
    for (kind, program, device_type) in PROGRAMS {
        let link = linked(&folder, program);
        let asked = |command: &mut Command, more: &[&str]| {
            capabilities(&command.args(more).arg("--print-capabilities").output().unwrap())
        };
        let answer = asked(&mut Command::new(&link), &[]);
        assert_eq!(answer["type"], device_type);
        let features = answer["features"].as_array();
        match kind {
            "blk" => assert_eq!(features.unwrap(), &["read-only", "blk-file"]),
            // The schema has no features of this type.
            _ => assert_eq!(features, None),
        }
        assert_eq!(asked(&mut Command::new(&link), &["--fd=77", "--nonsense", "word"]), answer);
        assert_eq!(asked(paravane().args(["serve", kind]), &[]), answer);
    }
}

#[test]
fn a_disk_is_served_by_the_options_of_the_conventions() {
    let folder = Folder::new();
    let image = folder.image("vm.img");
    let program = linked(&folder, "vhost-user-blk");
    let arguments = [
        format!("--blk-file={image}"),
        format!("--socket-path={}", folder.text("s")),
        "--control=off".to_owned(),
    ];
    let mut command = Command::new(program);
    command.args(arguments).args(without_sandbox()).stdin(Stdio::null()).env_remove("NOTIFY_SOCKET");
    let mut daemon = Daemon::spawn(&mut command);
    daemon.wait_for("ready");
    let mut model = vec![0; 1 << 20];
    Driver::connect(&folder.path("s"), WISH).unwrap().exercise(&mut model, 100, &mut Random::new(1));
    let (ended, log) = daemon.end();
    assert!(ended.success(), "{log:?}");
    assert!(fs::read(&image).unwrap() == model, "the image is not what was written");
}

#[test]
fn a_disk_is_served_on_a_listening_descriptor() {
    let folder = Folder::new();
    let image = folder.image("vm.img");
    let listener = UnixListener::bind(folder.path("s")).unwrap();
    let (program, control) = (linked(&folder, "vhost-user-blk"), folder.text("c"));
    let blk_file = format!("--blk-file={image}");
    let command = [program.to_str().unwrap(), "--fd=5", &blk_file, "--control", &control];
    let mut daemon = Daemon::spawn(&mut with_descriptor_5(&command, listener.into()));
    daemon.wait_for("ready");
    assert_eq!(status(&control)["devices"][0]["endpoint"], "descriptor 5");
    let mut model = vec![0; 1 << 20];
    for seed in 1..=2 {
        let mut driver = Driver::connect(&folder.path("s"), WISH).unwrap();
        driver.exercise(&mut model, 50, &mut Random::new(seed));
    }
    let (ended, log) = daemon.end();
    assert!(ended.success(), "{log:?}");
    assert!(folder.path("s").exists(), "the socket is the parent's");
    assert!(fs::read(&image).unwrap() == model, "the image is not what was written");
}

/// libvirt makes a pair of sockets and gives the other end to QEMU.
#[test]
fn a_connected_descriptor_is_served_until_the_client_disconnects() {
    for sent in [&b""[..], b"no message of vhost-user"] {
        let (near, far) = UnixStream::pair().unwrap();
        let mut daemon = Daemon::spawn(&mut rng(near.into(), &["--control", "off"]));
        daemon.wait_for("ready");
        (&mut &far).write_all(sent).unwrap();
        drop(far);
        daemon.wait_for("exiting");
        let (ended, log) = daemon.wait();
        assert!(ended.success(), "{log:?}");
    }
}

/// The back channel is the client's: it may end at any time, with and without an IOMMU.
#[test]
fn a_connected_descriptor_outlives_its_back_channel() {
    for (translated, sent) in [(0, &b""[..]), (ACCESS_PLATFORM, b""), (ACCESS_PLATFORM, b"no reply")] {
        let folder = Folder::new();
        let image = folder.image("vm.img");
        let (near, far) = UnixStream::pair().unwrap();
        let program = env!("CARGO_BIN_EXE_paravane");
        let command = [program, "serve", "blk", "--image", &image, "--fd", "5", "--control", "off"];
        let mut daemon = Daemon::spawn(&mut with_descriptor_5(&command, near.into()));
        daemon.wait_for("ready");
        let raw = Raw { socket: far };
        let mut machine = Machine::new(translated, 64, 4);
        machine.attach(&raw, 0, false);
        let (mut back, theirs) = UnixStream::pair().unwrap();
        raw.say(request::SET_BACKEND_REQ_FD, &[0_u8; 0][..], &[theirs.as_fd()]);
        drop(theirs);
        back.write_all(sent).unwrap();
        drop(back);
        daemon.wait_for("client closed its back channel");
        // With an IOMMU the request waits for a translation that nobody is asked for.
        machine.ask(0, Ask::Read, 0, 512);
        machine.kick();
        let mut model = fs::read(&image).unwrap();
        let end = Instant::now() + patience();
        while translated == 0 && machine.in_flight() > 0 {
            assert!(Instant::now() < end, "the request is not served");
            machine.wait(Duration::from_millis(1));
            machine.reap(&mut model);
        }
        raw.ask_number(request::GET_FEATURES);
        drop(raw);
        daemon.wait_for("exiting");
        let (ended, log) = daemon.wait();
        assert!(ended.success(), "{log:?}");
    }
}

#[test]
fn descriptors_that_are_no_sockets_are_refused() {
    let null = || OwnedFd::from(fs::File::open("/dev/null").unwrap());
    assert_refused(&rng(null(), &[]).output().unwrap(), "descriptor 5 is not a Unix stream socket");
    assert_refused(&paravane().args(["serve", "rng", "--fd", "99"]).output().unwrap(), "is not open");
    assert_refused(&paravane().args(["serve", "rng", "--fd", "2"]).output().unwrap(), "--fd");
    let both = paravane().args(["serve", "rng", "--fd", "5", "--socket-path", "s"]).output().unwrap();
    assert_refused(&both, "cannot be used with");
}

#[test]
fn a_file_of_devices_has_no_descriptors() {
    let folder = Folder::new();
    let device = "[[rng]]\nname = \"r\"\n";
    for (key, what) in
        [("fd = 5\n", "unknown key \"fd\""), ("", "missing key socket or connect or socket-activation")]
    {
        let file = folder.write("d.toml", &format!("{device}{key}"));
        let output = paravane().args(["serve", "--check", "--config", &file]).output().unwrap();
        assert_refused(&output, what);
        assert!(!String::from_utf8_lossy(&output.stderr).contains("print-capabilities"));
    }
}

/// By QEMU's docs/interop/vhost-user.json.
#[test]
fn discovery_files_describe_the_programs_of_the_package() {
    const TEST: &str = "discovery_files_describe_the_programs_of_the_package";
    let folder = Folder::new();
    let files = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/vhost-user");
    for (kind, program, device_type) in PROGRAMS {
        let text = fs::read(files.join(format!("50-paravane-{kind}.json"))).unwrap();
        let file: Value = serde_json::from_slice(&text).unwrap();
        let schema = |name: &str| format!("crates/cli/tests/schemas/{name}.schema.json");
        let faults = ["/description", "/type", "/binary"];
        crate::schema::assert_valid(TEST, &schema("vhost-user-backend"), &file, &faults);
        assert_eq!(file["type"], device_type);
        let binary = Path::new(file["binary"].as_str().unwrap());
        assert_eq!(binary.file_name().unwrap(), program);
        let output = Command::new(linked(&folder, program)).arg("--print-capabilities").output().unwrap();
        let answer = capabilities(&output);
        assert_eq!(answer["type"], file["type"]);
        crate::schema::assert_valid(TEST, &schema("vhost-user-capabilities"), &answer, &["/type"]);
    }
    assert_eq!(fs::read_dir(files).unwrap().count(), PROGRAMS.len());
}
