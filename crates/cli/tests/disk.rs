//! `paravane disk`, end to end: what one program writes, the other one checks.
//!
//! QEMU's `qemu-img` is the other one. Without it, all but a few tests are skipped.
use paravane_device::blk::{Blk, BlkConfig, Format, Layer, LayerSource};
use paravane_test_support::{Random, skip};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};
use serde_json::Value;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;
use tempfile::TempDir;

const MIB: u64 = 1 << 20;

/// A folder in which both programs run.
struct Folder(TempDir);

impl Folder {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    /// `None`, said loudly, where QEMU's tool is missing.
    fn with_qemu_img(test: &str) -> Option<Self> {
        match Command::new("qemu-img").arg("--version").output() {
            Ok(_) => Some(Self::new()),
            Err(error) => {
                skip(test, format!("qemu-img (package qemu-utils): {error}"));
                None
            }
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn command(&self, program: &str, arguments: &str) -> Command {
        let mut command = Command::new(program);
        command.current_dir(self.0.path()).stdin(Stdio::null()).args(arguments.split(' '));
        command
    }

    fn disk(&self, arguments: &str) -> Output {
        self.command(env!("CARGO_BIN_EXE_paravane"), &format!("disk {arguments}")).output().unwrap()
    }

    /// Runs a command that succeeds, and returns its output.
    fn done(&self, arguments: &str) -> String {
        let output = self.disk(arguments);
        assert!(output.status.success(), "disk {arguments}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// Runs a command that fails, and returns the last line on stderr.
    fn fails(&self, status: i32, arguments: &str) -> String {
        let output = self.disk(arguments);
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(status), "disk {arguments}: {stderr}");
        stderr.lines().last().unwrap_or_default().to_owned()
    }

    fn info(&self, arguments: &str) -> Value {
        serde_json::from_str(&self.done(&format!("info --json {arguments}"))).unwrap()
    }

    fn qemu_img(&self, arguments: &str) -> String {
        let output = self.command("qemu-img", arguments).output().unwrap();
        assert!(output.status.success(), "qemu-img {arguments}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    fn qemu_info(&self, name: &str) -> Value {
        serde_json::from_str(&self.qemu_img(&format!("info --output=json {name}"))).unwrap()
    }

    /// Writes to an image as QEMU's guest would.
    fn qemu_io(&self, format: &str, name: &str, commands: &[&str]) {
        let mut command = self.command("qemu-io", &format!("-f {format}"));
        command.args(commands.iter().flat_map(|line| ["-c", line]));
        let output = command.arg(name).output().unwrap();
        assert!(output.status.success(), "qemu-io {name} {commands:?}: {output:?}");
    }

    fn names(&self) -> Vec<String> {
        let entries = self.0.path().read_dir().unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// A base with data, and an overlay of QEMU's with data and zeroes over it.
    fn layers(&self) {
        let mut random = Random::new(7);
        let data: Vec<u8> = (0..3 * MIB / 8).flat_map(|_| random.u64().to_le_bytes()).collect();
        let base = File::create(self.path("base.raw")).unwrap();
        base.set_len(16 * MIB).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&base, &data, MIB).unwrap();
        self.qemu_img("create -q -f qcow2 -b base.raw -F raw top.qcow2 20M");
        let lines = ["write -P 7 2M 100k", "write -z 3M 200k", "write -P 9 19M 512", "write -P 0 5M 64k"];
        self.qemu_io("qcow2", "top.qcow2", &lines);
    }
}

#[test]
fn qemu_accepts_what_create_makes() {
    let Some(folder) = Folder::with_qemu_img("qemu_accepts_what_create_makes") else { return };
    folder.done("create --size 3G plain.qcow2");
    folder.done("create --format raw --size 5M plain.raw");
    folder.qemu_img("check -q plain.qcow2");
    let plain = folder.qemu_info("plain.qcow2");
    assert_eq!((&plain["virtual-size"], &plain["cluster-size"]), (&(3 * 1024 * MIB).into(), &65536.into()));
    let raw = folder.path("plain.raw").metadata().unwrap();
    assert_eq!((raw.len(), raw.blocks()), (5 * MIB, 0));
    // An overlay takes its size from the base, and QEMU finds the base from any folder.
    folder.layers();
    std::fs::create_dir(folder.path("sub")).unwrap();
    folder.done("create --backing qcow2:top.qcow2 --cluster-size 4k over.qcow2");
    folder.done("create --backing qcow2:over.qcow2 sub/deep.qcow2");
    let over = folder.qemu_info("over.qcow2");
    assert_eq!((&over["virtual-size"], &over["cluster-size"]), (&(20 * MIB).into(), &4096.into()));
    assert_eq!(
        (&over["backing-filename"], &over["backing-filename-format"]),
        (&"top.qcow2".into(), &"qcow2".into())
    );
    for name in ["over.qcow2", "sub/deep.qcow2"] {
        folder.qemu_img(&format!("check -q {name}"));
        folder.qemu_img(&format!("compare -q -f qcow2 -F qcow2 {name} top.qcow2"));
    }
    // QEMU writes to it, too.
    folder.qemu_io("qcow2", "over.qcow2", &["write -P 3 0 1M", "read -P 7 2M 100k"]);
    folder.qemu_img("check -q over.qcow2");
}

#[test]
fn invalid_requests_change_nothing() {
    let folder = Folder::new();
    std::fs::write(folder.path("there.img"), "data").unwrap();
    std::fs::create_dir(folder.path("folder")).unwrap();
    for (arguments, part) in [
        ("create --size 1M there.img", "there.img: is there already; --force replaces it"),
        ("create --size 1M --force folder", "not a regular file"),
        ("create new.img", "--size"),
        ("create --size 1000 new.img", "multiple of 512"),
        ("create --size 1M --cluster-size 3k new.img", "power of two"),
        ("create --size 1M --format raw --cluster-size 4k new.img", "--cluster-size"),
        ("create --size 1M --format raw --backing raw:there.img new.img", "--backing"),
        ("create --backing raw:missing.img new.img", "missing.img"),
        ("create --backing qcow2:there.img new.img", "is not a qcow2 image"),
        ("create --backing there.img new.img", "missing format"),
        ("create --size 1M missing/new.img", "missing/new.img: cannot create"),
        ("create --size 1M nbd://127.0.0.1/vm0", "--force overwrites it"),
        ("create --format raw --force --size 1M nbd://127.0.0.1/vm0", "is a store, whose size is fixed"),
        ("info missing.img", "missing.img"),
        ("info --format qcow2 there.img", "is not a qcow2 image"),
        ("create --size 1M ftp://host/new.img", "unknown kind of URL"),
        ("info file:///tmp/vm.img", "write its path, /tmp/vm.img"),
        ("convert there.img raw:new.img", "missing format"),
        ("convert qcow2:there.img raw:new.img", "is not a qcow2 image"),
        ("convert raw:there.img raw:new.img --backing raw:there.img", "there.img"),
        ("commit there.img --backing raw:there.img", "is not a qcow2 image"),
        ("commit there.img", "--backing"),
    ] {
        let line = folder.fails(2, arguments);
        assert!(line.contains(part), "{arguments}: {line}");
    }
    assert_eq!(folder.names(), ["folder", "there.img"]);
    assert_eq!(std::fs::read(folder.path("there.img")).unwrap(), b"data");
    folder.done("create --size 1M --force there.img");
    assert_eq!(folder.info("there.img")["disk_bytes"], MIB);
}

#[test]
fn an_image_that_is_served_is_refused() {
    let folder = Folder::new();
    folder.done("create --format raw --size 4M base.raw");
    folder.done("create --backing raw:base.raw top.qcow2");
    let layer = Layer { source: LayerSource::Path(folder.path("base.raw")), format: Format::Raw };
    let serve = |read_only| {
        let config =
            BlkConfig { format: Format::Qcow2, read_only, ..BlkConfig::new(folder.path("top.qcow2")) };
        Blk::open(BlkConfig { backing: vec![layer.clone()], ..config }).unwrap()
    };
    let served = serve(false);
    for arguments in [
        "info top.qcow2",
        "convert qcow2:top.qcow2 --backing raw:base.raw raw:copy.raw",
        "commit top.qcow2 --backing raw:base.raw",
        "create --force --size 1M top.qcow2",
        "create --force --format raw --size 1M base.raw",
        "create --backing qcow2:top.qcow2 over.qcow2",
        "convert raw:base.raw --force qcow2:top.qcow2",
    ] {
        let line = folder.fails(2, arguments);
        assert!(line.contains("in use by another process"), "{arguments}: {line}");
    }
    drop(served);
    // Served for reading: it can be read, and its base not written.
    let served = serve(true);
    folder.done("info top.qcow2");
    folder.done("convert qcow2:top.qcow2 --backing raw:base.raw raw:copy.raw");
    assert!(folder.fails(2, "commit top.qcow2 --backing raw:base.raw").contains("base.raw: in use"));
    drop(served);
    folder.done("commit top.qcow2 --backing raw:base.raw");
    assert_eq!(folder.names(), ["base.raw", "copy.raw", "top.qcow2"]);
}

#[test]
fn a_converted_disk_is_the_same_and_sparse() {
    let Some(folder) = Folder::with_qemu_img("a_converted_disk_is_the_same_and_sparse") else { return };
    folder.layers();
    let output = folder.done("convert qcow2:top.qcow2 --backing raw:base.raw raw:copy.raw");
    assert!(output.starts_with("copy.raw: raw, 20.0 MiB, ") && output.ends_with(" written\n"), "{output}");
    folder.done("convert qcow2:top.qcow2 --backing raw:base.raw --cluster-size 2M qcow2:copy.qcow2");
    folder.done("convert raw:copy.raw qcow2:again.qcow2");
    folder.qemu_img("convert -q -c -f raw -O qcow2 copy.raw compressed.qcow2");
    folder.done("convert qcow2:compressed.qcow2 raw:last.raw");
    for (format, name) in
        [("raw", "copy.raw"), ("qcow2", "copy.qcow2"), ("qcow2", "again.qcow2"), ("raw", "last.raw")]
    {
        folder.qemu_img(&format!("compare -q -f qcow2 -F {format} top.qcow2 {name}"));
        if format == "qcow2" {
            folder.qemu_img(&format!("check -q {name}"));
        }
    }
    // 3 MiB of data are in the base, less than 1 MiB in the overlay.
    for name in ["copy.raw", "last.raw", "again.qcow2"] {
        let allocated = folder.path(name).metadata().unwrap().blocks() * 512;
        assert!(allocated <= 4 * MIB + 128 * 1024, "{name}: {allocated}");
    }
    assert!(folder.fails(2, "convert raw:copy.raw raw:last.raw").contains("--force"));
    folder.done("convert raw:copy.raw raw:last.raw --force --quiet");
    // Permissions of a new file are those that the user's mask leaves.
    let plain = folder.path("plain");
    std::fs::write(&plain, "").unwrap();
    let mode = |path: &Path| path.metadata().unwrap().mode();
    assert_eq!(mode(&folder.path("copy.raw")), mode(&plain));
}

/// An NBD server whose exports are the files of a folder, killed when dropped.
struct Nbdkit(std::process::Child);

impl Nbdkit {
    fn start(folder: &Folder, test: &str) -> Option<Self> {
        let (socket, exports) = (folder.path("nbd.sock"), folder.path("exports"));
        let mut command = Command::new("nbdkit");
        command.args(["--foreground", "--exit-with-parent", "--unix"]).arg(&socket);
        command.arg("file").arg(format!("dir={}", exports.display()));
        let child = match command.stderr(Stdio::null()).spawn() {
            Ok(child) => Self(child),
            Err(error) => {
                skip(test, format!("nbdkit: {error}"));
                return None;
            }
        };
        paravane_test_support::wait_until("nbdkit to listen", || UnixStream::connect(&socket).is_ok());
        Some(child)
    }
}

impl Drop for Nbdkit {
    fn drop(&mut self) {
        self.0.kill().expect("nbdkit is killed");
        self.0.wait().expect("nbdkit ends");
    }
}

#[test]
fn bases_overlays_and_sources_can_be_in_a_store() {
    let test = "bases_overlays_and_sources_can_be_in_a_store";
    let Some(folder) = Folder::with_qemu_img(test) else { return };
    folder.layers();
    std::fs::create_dir(folder.path("exports")).unwrap();
    std::fs::copy(folder.path("base.raw"), folder.path("exports/base.raw")).unwrap();
    // Of an earlier use.
    std::fs::copy(folder.path("base.raw"), folder.path("exports/spare")).unwrap();
    let Some(nbdkit) = Nbdkit::start(&folder, test) else { return };
    let url = |name: &str| format!("nbd+unix:///{name}?socket={}", folder.path("nbd.sock").display());
    let (base, spare) = (url("base.raw"), url("spare"));

    // QEMU finds the server by the name in the overlay.
    folder.done(&format!("create --backing raw:{base} over.qcow2"));
    assert_eq!(folder.qemu_info("over.qcow2")["backing-filename"], base);
    folder.qemu_img("compare -q -f qcow2 -F raw over.qcow2 base.raw");
    folder.qemu_io("qcow2", "over.qcow2", &["write -P 5 1M 1M", "write -z 8k 64k"]);
    folder.done(&format!("convert qcow2:over.qcow2 --backing raw:{base} raw:flat.raw"));
    folder.qemu_img("compare -q -f qcow2 -F raw over.qcow2 flat.raw");

    // An overlay in a store, over what the store held.
    let line = folder.fails(2, &format!("create --backing raw:base.raw {spare}"));
    assert!(line.contains("--force overwrites it"), "{line}");
    folder.done(&format!("create --force --backing raw:base.raw {spare}"));
    let report = folder.info(&spare);
    assert_eq!((&report["format"], &report["disk_bytes"]), (&"qcow2".into(), &(16 * MIB).into()));
    assert_eq!((&report["file_bytes"], &report["allocated_bytes"]), (&(16 * MIB).into(), &Value::Null));
    folder.qemu_img(&format!("check -q -f qcow2 {spare}"));
    folder.qemu_img(&format!("compare -q -f qcow2 -F raw {spare} base.raw"));
    folder.done(&format!("convert --target-exists raw:flat.raw qcow2:{spare}"));
    folder.qemu_img(&format!("check -q -f qcow2 {spare}"));
    folder.qemu_img(&format!("compare -q -f qcow2 -F raw {spare} flat.raw"));

    // What ends within a sector is not cut off: a raw image is refused, of a qcow2 image all is read.
    std::fs::write(folder.path("exports/odd"), vec![7; 100_080]).unwrap();
    let odd = url("odd");
    let commands = [
        format!("convert raw:{odd} raw:cut.raw"),
        format!("convert qcow2:over.qcow2 --backing raw:{odd} raw:cut.raw"),
        format!("create --backing raw:{odd} cut.qcow2"),
    ];
    for command in commands {
        let line = folder.fails(2, &command);
        assert!(line.contains("multiple of 512"), "{command}: {line}");
    }
    assert!(!folder.path("cut.raw").exists() && !folder.path("cut.qcow2").exists());
    let content: Vec<u8> = (0..MIB / 8).flat_map(|at| (at / 7).to_le_bytes()).collect();
    std::fs::write(folder.path("plain.raw"), content).unwrap();
    folder.qemu_img("convert -c -f raw -O qcow2 plain.raw exports/packed");
    let packed = folder.path("exports/packed");
    let mut bytes = std::fs::read(&packed).unwrap();
    bytes.truncate(bytes.iter().rposition(|byte| *byte != 0).unwrap() + 1);
    assert_ne!(bytes.len() % 512, 0, "the file ends at a sector");
    std::fs::write(&packed, bytes).unwrap();
    folder.done(&format!("convert qcow2:{} raw:unpacked.raw", url("packed")));
    folder.qemu_img("compare -q -f raw -F raw unpacked.raw plain.raw");

    folder.done(&format!("commit over.qcow2 --backing raw:{base}"));
    drop(nbdkit);
    folder.qemu_img("compare -q -f raw -F raw exports/base.raw flat.raw");
    let line = folder.fails(2, &format!("info {base}"));
    assert!(line.contains("nbd+unix:///base.raw"), "{line}");
}

#[test]
fn a_terminal_shows_a_bar() {
    let folder = Folder::new();
    folder.done("create --format raw --size 64M disk.raw");
    for (quiet, shows) in [("", true), (" --quiet", false)] {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let size = Winsize { ws_row: 24, ws_col: 100, ws_xpixel: 0, ws_ypixel: 0 };
        tcsetwinsize(&master, size).unwrap();
        let terminal = PathBuf::from(ptsname(&master, Vec::new()).unwrap().into_string().unwrap());
        let stderr = File::options().read(true).write(true).open(&terminal).unwrap();
        let arguments = format!("disk convert raw:disk.raw raw:copy.raw --force{quiet}");
        let mut command = folder.command(env!("CARGO_BIN_EXE_paravane"), &arguments);
        let mut child = command.env("TERM", "xterm").stdout(Stdio::null()).stderr(stderr).spawn().unwrap();
        drop(command);
        let mut shown = Vec::new();
        // EIO: nobody has the terminal any more.
        let _ = File::from(master).read_to_end(&mut shown);
        assert!(child.wait().unwrap().success());
        let shown = String::from_utf8_lossy(&shown);
        assert_eq!(shown.contains("converting"), shows, "{shown:?}");
    }
}

#[test]
fn a_signal_leaves_no_half_target() {
    let folder = Folder::new();
    // Two million steps: tables of clusters of 512 bytes map 32 KiB each.
    folder.done("create --size 64G --cluster-size 512 large.qcow2");
    let mut stopped = 0;
    for _ in 0..20 {
        let mut command = folder
            .command(env!("CARGO_BIN_EXE_paravane"), "disk convert qcow2:large.qcow2 raw:copy.raw --force");
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        while folder.names().len() < 2 && child.try_wait().unwrap().is_none() {
            std::thread::yield_now();
        }
        let process = nix::unistd::Pid::from_raw(child.id().try_into().unwrap());
        // It may have ended.
        let _ = nix::sys::signal::kill(process, nix::sys::signal::Signal::SIGINT);
        let output = child.wait_with_output().unwrap();
        match output.status.code() {
            Some(130) => {
                let stderr = String::from_utf8_lossy(&output.stderr);
                assert!(stderr.contains("stopped by a signal"), "{stderr}");
                assert_eq!(folder.names(), ["large.qcow2"]);
                stopped += 1;
            }
            // It was done before the signal came.
            Some(0) => std::fs::remove_file(folder.path("copy.raw")).unwrap(),
            other => panic!("{other:?}: {output:?}"),
        }
        if stopped == 3 {
            break;
        }
    }
    assert!(stopped > 0, "no signal came in time");
}

#[test]
fn a_commit_merges_the_overlay_into_its_base() {
    let Some(folder) = Folder::with_qemu_img("a_commit_merges_the_overlay_into_its_base") else { return };
    folder.layers();
    folder.qemu_img("convert -q -f qcow2 -O raw top.qcow2 flat.raw");
    let output = folder.done("commit top.qcow2 --backing raw:base.raw");
    assert!(output.starts_with("base.raw: ") && output.contains("merged from top.qcow2"), "{output}");
    folder.qemu_img("compare -q -f raw -F raw flat.raw base.raw");
    // The overlay still reads the same, and once more is once more the same.
    folder.qemu_img("compare -q -f raw -F qcow2 flat.raw top.qcow2");
    folder.done("commit top.qcow2 --backing raw:base.raw");
    folder.qemu_img("compare -q -f raw -F raw flat.raw base.raw");
    assert_eq!(folder.path("base.raw").metadata().unwrap().len(), 20 * MIB);

    // Three layers: the top goes into the middle.
    folder.done("create --backing raw:base.raw middle.qcow2");
    folder.done("create --backing qcow2:middle.qcow2 upper.qcow2");
    folder.qemu_io("qcow2", "middle.qcow2", &["write -P 1 0 1M", "write -P 2 4M 1M"]);
    folder.qemu_io("qcow2", "upper.qcow2", &["write -P 3 512k 1M", "write -z 4M 64k", "discard 2M 1M"]);
    folder.qemu_img("convert -q -f qcow2 -O raw upper.qcow2 flat.raw");
    let before = std::fs::read(folder.path("base.raw")).unwrap();
    folder.done("commit upper.qcow2 --backing qcow2:middle.qcow2 --backing raw:base.raw");
    folder.qemu_img("check -q middle.qcow2");
    folder.qemu_img("compare -q -f raw -F qcow2 flat.raw middle.qcow2");
    assert!(before == std::fs::read(folder.path("base.raw")).unwrap(), "the base was written");
    // QEMU goes on with the result.
    folder.qemu_img("commit -q -f qcow2 middle.qcow2");
    folder.qemu_img("compare -q -f raw -F raw flat.raw base.raw");
}

#[test]
fn a_commit_that_is_killed_is_finished_by_the_next_one() {
    let Some(folder) = Folder::with_qemu_img("a_commit_that_is_killed_is_finished_by_the_next_one") else {
        return;
    };
    let mut random = Random::new(11);
    // Small clusters, so that there are many steps.
    folder.done("create --size 64M --cluster-size 4k base.qcow2");
    folder.qemu_io("qcow2", "base.qcow2", &["write -P 1 0 16M"]);
    folder.done("create --backing qcow2:base.qcow2 --cluster-size 512 top.qcow2");
    let writes: Vec<_> =
        (0..400).map(|n| format!("write -P {} {}k 9k", n % 255 + 1, random.below(64 << 10) & !7)).collect();
    let writes: Vec<_> = writes.iter().map(String::as_str).collect();
    folder.qemu_io("qcow2", "top.qcow2", &writes);
    folder.qemu_img("convert -q -f qcow2 -O raw top.qcow2 flat.raw");
    for _ in 0..20 {
        let arguments = "disk commit top.qcow2 --backing qcow2:base.qcow2";
        let mut command = folder.command(env!("CARGO_BIN_EXE_paravane"), arguments);
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        // What follows holds wherever the kill comes.
        std::thread::sleep(Duration::from_micros(random.below(60_000) as u64));
        child.kill().unwrap();
        child.wait().unwrap();
        folder.qemu_img("compare -q -f raw -F qcow2 flat.raw top.qcow2");
    }
    folder.done("commit top.qcow2 --backing qcow2:base.qcow2");
    folder.qemu_img("compare -q -f raw -F qcow2 flat.raw base.qcow2");
    // Clusters that were lost to a kill (status 3) are no damage.
    let check = folder.command("qemu-img", "check -q -f qcow2 base.qcow2").output().unwrap();
    assert!(matches!(check.status.code(), Some(0 | 3)), "{check:?}");
}

#[test]
fn a_commit_into_another_base_needs_force() {
    let Some(folder) = Folder::with_qemu_img("a_commit_into_another_base_needs_force") else { return };
    folder.layers();
    std::fs::copy(folder.path("base.raw"), folder.path("other.raw")).unwrap();
    let before = std::fs::read(folder.path("other.raw")).unwrap();
    let line = folder.fails(2, "commit top.qcow2 --backing raw:other.raw");
    assert!(line.contains("\"base.raw\" (raw), not other.raw (raw)"), "{line}");
    let line = folder.fails(2, "commit top.qcow2 --backing qcow2:base.raw");
    assert!(line.contains("\"base.raw\" (raw), not base.raw (qcow2)"), "{line}");
    folder.done("create --size 1M alone.qcow2");
    assert!(folder.fails(2, "commit alone.qcow2 --backing raw:base.raw").contains("has no backing file"));
    assert!(before == std::fs::read(folder.path("other.raw")).unwrap(), "the other one was written");
    folder.done("commit top.qcow2 --backing raw:other.raw --force-layers");
    folder.qemu_img("compare -q -f qcow2 -F raw top.qcow2 other.raw");
}

/// One layer of three is left out, which reads as another disk.
#[test]
fn layers_that_the_images_do_not_name_are_refused() {
    let test = "layers_that_the_images_do_not_name_are_refused";
    let Some(folder) = Folder::with_qemu_img(test) else { return };
    folder.qemu_img("create -q -f qcow2 base.qcow2 16M");
    folder.qemu_img("create -q -f qcow2 -b base.qcow2 -F qcow2 middle.qcow2");
    folder.qemu_img("create -q -f qcow2 -b middle.qcow2 -F qcow2 top.qcow2");
    folder.qemu_io("qcow2", "middle.qcow2", &["write -P 9 0 64k"]);
    let why = "top.qcow2: has backing file \"middle.qcow2\" (qcow2), not base.qcow2 (qcow2); pass that one, or \
               --force-layers if it was moved";
    for command in ["convert qcow2:top.qcow2 raw:out.raw", "info top.qcow2", "commit top.qcow2"] {
        let line = folder.fails(2, &format!("{command} --backing qcow2:base.qcow2"));
        assert!(line.contains(why), "{line}");
    }
    assert!(!folder.path("out.raw").exists());
    let all = "--backing qcow2:middle.qcow2 --backing qcow2:base.qcow2";
    folder.done(&format!("info top.qcow2 {all}"));
    folder.done(&format!("convert qcow2:top.qcow2 {all} raw:out.raw"));
    assert_eq!(std::fs::read(folder.path("out.raw")).unwrap()[0], 9);
    let line = folder.fails(2, "convert qcow2:top.qcow2 --backing raw:base.qcow2 raw:wrong.raw");
    assert!(line.contains("begins like qcow2"), "{line}");
    let whole = std::fs::metadata(folder.path("base.qcow2")).unwrap().len().next_multiple_of(512);
    File::options().write(true).open(folder.path("base.qcow2")).unwrap().set_len(whole).unwrap();
    let line = folder.fails(2, "convert qcow2:top.qcow2 --backing raw:base.qcow2 raw:wrong.raw");
    assert!(line.contains("not base.qcow2 (raw)"), "{line}");
    folder.done("convert qcow2:top.qcow2 --backing qcow2:base.qcow2 --force-layers raw:forced.raw");
    assert_eq!(std::fs::read(folder.path("forced.raw")).unwrap()[0], 0);
}

#[test]
fn an_overlay_that_hides_a_part_of_its_base_and_a_base_in_disguise_are_warned_of() {
    let test = "an_overlay_that_hides_a_part_of_its_base";
    let Some(folder) = Folder::with_qemu_img(test) else { return };
    folder.qemu_img("create -q -f qcow2 base.qcow2 16M");
    for (arguments, why) in [
        ("create --backing qcow2:base.qcow2 --size 8M top.qcow2", "the rest is not seen"),
        ("info top.qcow2 --backing qcow2:base.qcow2", "the rest is not seen"),
        ("create --backing raw:base.qcow2 --size 16M wrong.qcow2", "the raw image begins like qcow2"),
        ("info --format raw base.qcow2", "the raw image begins like qcow2"),
    ] {
        let output = folder.disk(arguments);
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(
            output.status.success() && stderr.contains("WARN") && stderr.contains(why),
            "{arguments}: {stderr}"
        );
    }
}

#[test]
fn info_says_where_the_format_comes_from() {
    let Some(folder) = Folder::with_qemu_img("info_says_where_the_format_comes_from") else { return };
    folder.layers();
    let top = folder.info("top.qcow2");
    assert_eq!((&top["format"], &top["format_from"]), (&"qcow2".into(), &"header".into()));
    assert_eq!((&top["disk_bytes"], &top["qcow2"]["backing_file"]), (&(20 * MIB).into(), &"base.raw".into()));
    assert_eq!(top["qcow2"]["refused"], Value::Null);
    let raw = folder.info("--format raw top.qcow2");
    assert_eq!((&raw["format"], &raw["format_from"]), (&"raw".into(), &"option".into()));
    assert_eq!((&raw["qcow2"], &raw["disk_bytes"]), (&Value::Null, &raw["file_bytes"]));
    let text = folder.done("info top.qcow2");
    assert!(text.contains("qcow2 (by its header; a guest can write any)"), "{text}");
    assert!(text.contains("\"base.raw\", format \"raw\""), "{text}");
    assert!(folder.done("info --format qcow2 top.qcow2").contains("format     qcow2\n"));
    folder.qemu_img("create -q -f qcow2 -o encrypt.format=aes,encrypt.key-secret=s --object secret,id=s,data=x aes.qcow2 1M");
    let aes = folder.info("aes.qcow2");
    assert_eq!(aes["qcow2"]["features"], serde_json::json!(["encryption-aes"]));
    assert!(aes["qcow2"]["refused"].as_str().unwrap().contains("is encrypted (AES)"));
}

#[test]
fn an_image_that_the_new_one_is_based_on_is_not_replaced() {
    const TEST: &str = "an_image_that_the_new_one_is_based_on_is_not_replaced";
    let Some(folder) = Folder::with_qemu_img(TEST) else { return };
    folder.qemu_img("create -q -f qcow2 x 4M");
    folder.qemu_io("qcow2", "x", &["write -P 65 0 64k"]);
    folder.done("create --backing qcow2:x top");
    folder.done("create --backing qcow2:top higher");
    std::fs::hard_link(folder.path("x"), folder.path("hard")).unwrap();
    std::os::unix::fs::symlink("x", folder.path("link")).unwrap();
    let before = std::fs::read(folder.path("x")).unwrap();
    let refused = "the new image is based on it";
    for target in ["x", "./x", "link", "hard"] {
        for backing in ["x", "./x", "link", "hard", "top", "higher"] {
            let told = folder.fails(2, &format!("create --backing qcow2:{backing} {target} --force"));
            assert!(told.contains(refused), "{target} on {backing}: {told}");
        }
        for source in ["qcow2:x", "qcow2:hard", "qcow2:top --backing qcow2:x"] {
            let told = folder.fails(2, &format!("convert -q {source} raw:{target} --force"));
            assert!(told.contains(refused), "{source} to {target}: {told}");
        }
        let told = folder.fails(2, &format!("commit -q x --backing qcow2:{target} --force"));
        assert!(told.contains("is the overlay itself"), "{told}");
    }
    assert_eq!(std::fs::read(folder.path("x")).unwrap(), before);
    assert_eq!(folder.names(), ["hard", "higher", "link", "top", "x"]);
    // Another one is.
    folder.done("create --backing qcow2:x top --force");
    folder.done("convert -q --force qcow2:x qcow2:higher");
    folder.qemu_img("check -q top");
}

/// While a new image is made, the one that it replaces and those that it is made from are locked.
#[test]
fn an_image_is_locked_until_it_is_replaced() {
    let folder = Folder::new();
    let raw = |name: &str| {
        File::create(folder.path(name)).unwrap().set_len(64 * MIB).unwrap();
        folder.path(name)
    };
    let (_, old) = (raw("from"), raw("old"));
    let data: Vec<u8> = (0..4 << 20).map(|at: u32| (at >> 9) as u8 | 1).collect();
    std::fs::write(folder.path("from"), data).unwrap();
    let held = Blk::open(BlkConfig::new(&old)).unwrap();
    let told = folder.fails(2, "convert -q --force raw:from raw:old");
    assert!(told.contains("in use by another process"), "{told}");
    let told = folder.fails(2, "create --force --size 1M old");
    assert!(told.contains("in use by another process"), "{told}");
    drop(held);
    // Seen from outside: the lock is there as long as the temporary file.
    let mut command =
        folder.command(env!("CARGO_BIN_EXE_paravane"), "disk convert -q --force raw:from raw:old");
    let mut child = command.spawn().unwrap();
    let mut seen = 0;
    let observer = File::open(&old).unwrap();
    while child.try_wait().unwrap().is_none() {
        let is_made = || folder.names().iter().any(|name| name.starts_with(".old."));
        let (before, lock, after) = (is_made(), is_locked(&observer), is_made());
        if before && after {
            assert!(lock, "not locked while the new image is made");
            seen += 1;
        }
    }
    assert!(child.wait().unwrap().success());
    eprintln!("looked at the lock {seen} times");
    assert!(!is_locked(&observer));
}

/// Whether another process has the image locked for writing.
fn is_locked(file: &File) -> bool {
    let locks = std::fs::read_to_string("/proc/locks").unwrap();
    let file = format!(":{} ", file.metadata().unwrap().ino());
    locks.lines().any(|line| ["OFDLCK", "WRITE", &file].iter().all(|part| line.contains(part)))
}
