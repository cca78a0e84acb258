//! `paravane disk convert` to what exists: files, block devices, exports of NBD servers, images of Ceph.
use paravane_test_support::{CephCluster, Random, skip, wait_until};
use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use tempfile::TempDir;

const MIB: u64 = 1 << 20;

fn random(len: u64, seed: u64) -> Vec<u8> {
    let mut random = Random::new(seed);
    (0..len / 8).flat_map(|_| random.u64().to_le_bytes()).collect()
}

/// A folder with a source of 8 MiB, of which 1 MiB is data.
struct Folder(TempDir);

impl Folder {
    fn new() -> Self {
        let folder = Self(tempfile::tempdir().unwrap());
        let source = File::create(folder.path("from.raw")).unwrap();
        source.set_len(8 * MIB).unwrap();
        source.write_all_at(&random(MIB, 1), 3 * MIB).unwrap();
        folder
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn convert(&self, arguments: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_paravane"));
        command.current_dir(self.0.path()).stdin(Stdio::null()).args(["disk", "convert"]);
        command.args(arguments.split(' '));
        command
    }

    fn done(&self, arguments: &str) -> String {
        let output = self.convert(arguments).output().unwrap();
        assert!(output.status.success(), "{arguments}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// Runs a command that fails, and returns the last line on stderr.
    fn fails(&self, status: i32, arguments: &str) -> String {
        last_line(status, arguments, self.convert(arguments).output().unwrap())
    }

    /// A file of random data.
    fn garbage(&self, name: &str, len: u64) -> Vec<u8> {
        let data = random(len, 2);
        std::fs::write(self.path(name), &data).unwrap();
        data
    }

    /// What the source holds, and then zeroes.
    fn expected(&self, len: u64) -> Vec<u8> {
        let mut content = std::fs::read(self.path("from.raw")).unwrap();
        content.resize(len as usize, 0);
        content
    }

    fn nbdkit(&self, test: &str, arguments: &[&str]) -> Option<Nbdkit> {
        let socket = self.path("nbd.sock");
        let _ = std::fs::remove_file(&socket);
        let mut command = Command::new("nbdkit");
        command.args(["--foreground", "--exit-with-parent", "--unix"]).arg(&socket).args(arguments);
        let server = match command.current_dir(self.0.path()).stderr(Stdio::null()).spawn() {
            Ok(child) => Nbdkit(child),
            Err(error) => {
                skip(test, format!("nbdkit: {error}"));
                return None;
            }
        };
        wait_until("nbdkit listens", || UnixStream::connect(&socket).is_ok());
        Some(server)
    }

    fn url(&self) -> String {
        format!("nbd+unix:///?socket={}", self.path("nbd.sock").display())
    }
}

fn last_line(status: i32, what: &str, output: Output) -> String {
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(status), "{what}: {stderr}");
    stderr.lines().last().unwrap_or_default().to_owned()
}

/// Killed when dropped.
struct Nbdkit(Child);

impl Drop for Nbdkit {
    fn drop(&mut self) {
        self.0.kill().expect("nbdkit is killed");
        self.0.wait().expect("nbdkit ends");
    }
}

#[test]
fn a_file_that_is_there_is_overwritten_in_place() {
    let folder = Folder::new();
    let old = folder.garbage("to.raw", 9 * MIB);
    let inode = folder.path("to.raw").metadata().unwrap().ino();
    for (status, arguments, part) in [
        (2, "raw:from.raw raw:to.raw", "is there already"),
        (2, "raw:from.raw raw:missing.raw --target-exists", "No such file"),
        (2, "raw:from.raw raw:from.raw --target-exists", "is the source, or one of its layers"),
        (2, "raw:from.raw raw:to.raw --force --target-exists", "cannot be used with"),
        (
            2,
            "raw:to.raw raw:from.raw --target-exists",
            "has 8388608 bytes, less than the 9437184 bytes to copy",
        ),
        (2, "raw:from.raw raw:http://host/x --target-exists", "HTTP and S3 servers cannot be written"),
        (2, "raw:from.raw raw:nbd://host/x", "is a store, whose content would be lost; --target-exists"),
    ] {
        let line = folder.fails(status, arguments);
        assert!(line.contains(part), "{arguments}: {line}");
    }
    assert!(std::fs::read(folder.path("to.raw")).unwrap() == old);
    let output = folder.done("raw:from.raw raw:to.raw --target-exists");
    assert_eq!(output, "to.raw: raw, 9.0 MiB, 1.0 MiB written\n");
    assert!(std::fs::read(folder.path("to.raw")).unwrap() == folder.expected(9 * MIB));
    folder.done("raw:from.raw qcow2:to.raw --target-exists");
    folder.done("qcow2:to.raw raw:again.raw");
    assert!(std::fs::read(folder.path("again.raw")).unwrap() == folder.expected(8 * MIB));
    assert_eq!(folder.path("to.raw").metadata().unwrap().ino(), inode);
}

#[test]
fn an_export_is_overwritten_and_zeroed_where_it_must_be() {
    let test = "an_export_is_overwritten_and_zeroed_where_it_must_be";
    let folder = Folder::new();
    for options in [
        &["file", "to.raw"][..],
        &["--no-sr", "file", "to.raw"],
        &["--filter=nozero", "file", "to.raw"],
        &[
            "--filter=blocksize-policy",
            "file",
            "to.raw",
            "blocksize-minimum=4096",
            "blocksize-error-policy=error",
        ],
    ] {
        folder.garbage("to.raw", 12 * MIB);
        // A hole that need not be zeroed.
        punch(&File::options().write(true).open(folder.path("to.raw")).unwrap(), 5 * MIB, MIB);
        let Some(server) = folder.nbdkit(test, options) else { return };
        let url = folder.url();
        assert!(folder.fails(2, &format!("raw:{url} raw:{url} --target-exists")).contains("is the source"));
        folder.done(&format!("raw:from.raw raw:{url} --target-exists"));
        drop(server);
        assert!(std::fs::read(folder.path("to.raw")).unwrap() == folder.expected(12 * MIB), "{options:?}");
    }
}

/// Makes a hole.
fn punch(file: &File, offset: u64, len: u64) {
    use rustix::fs::{FallocateFlags, fallocate};
    fallocate(file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, offset, len).unwrap();
}

#[test]
fn holes_of_an_export_are_not_read() {
    let folder = Folder::new();
    let arguments = ["--filter=log", "memory", "64G", "logfile=log"];
    let Some(server) = folder.nbdkit("holes_of_an_export_are_not_read", &arguments) else { return };
    let url = folder.url();
    folder.done(&format!("raw:from.raw raw:{url} --target-exists"));
    folder.done(&format!("raw:{url} qcow2:copy.qcow2"));
    drop(server);
    let log = std::fs::read_to_string(folder.path("log")).unwrap();
    let bytes = |request: &str| -> u64 {
        let lines = log.lines().filter(|line| line.contains(&format!(" {request} id=")));
        let count = |line: &str| {
            let hex = line.split("count=0x").nth(1).unwrap().split(' ').next().unwrap();
            u64::from_str_radix(hex, 16).unwrap()
        };
        lines.map(count).sum()
    };
    // The beginning may be looked at, too.
    let read = bytes("Read");
    assert!((MIB..MIB + 4096).contains(&read), "{read}: {log}");
    assert_eq!((bytes("Write"), bytes("Zero")), (MIB, 0), "{log}");
}

#[test]
fn a_write_that_fails_is_told() {
    let folder = Folder::new();
    folder.garbage("to.raw", 8 * MIB);
    for refused in ["error-pwrite-rate=100%", "error-zero-rate=100%"] {
        let arguments = ["--filter=error", "file", "to.raw", "error=ENOSPC", refused];
        let Some(_server) = folder.nbdkit("a_write_that_fails_is_told", &arguments) else { return };
        let line = folder.fails(1, &format!("raw:from.raw raw:{} --target-exists", folder.url()));
        assert!(line.contains("holds a part of the copy") && line.contains("No space left"), "{line}");
    }
}

#[test]
fn writes_that_a_lost_server_had_are_told() {
    let test = "writes_that_a_lost_server_had_are_told";
    let folder = Folder::new();
    std::fs::write(folder.path("from.raw"), random(32 * MIB, 3)).unwrap();
    for (through, status) in [("", 1), ("&write-through=on", 0)] {
        File::create(folder.path("to.raw")).unwrap().set_len(32 * MIB).unwrap();
        // Some seconds long.
        let arguments = ["--filter=rate", "file", "to.raw", "rate=64M"];
        let Some(server) = folder.nbdkit(test, &arguments) else { return };
        let what = format!("raw:from.raw raw:{}{through} --target-exists", folder.url());
        let child = folder.convert(&what).stderr(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        wait_until("data is written", || folder.path("to.raw").metadata().unwrap().blocks() > 0);
        drop(server);
        let _server = folder.nbdkit(test, &arguments).expect("it was there before");
        let output = child.wait_with_output().unwrap();
        if status == 0 {
            assert!(output.status.success(), "{output:?}");
        } else {
            let line = last_line(1, &what, output);
            assert!(line.contains("the server may have lost writes; run the command again"), "{line}");
        }
        assert!(std::fs::read(folder.path("to.raw")).unwrap() == random(32 * MIB, 3));
    }
}

#[test]
fn a_block_device_needs_the_option() {
    let folder = Folder::new();
    folder.garbage("device", 9 * MIB);
    let output = Command::new("losetup").args(["--find", "--show"]).arg(folder.path("device")).output();
    let device = match output {
        Ok(output) if output.status.success() => String::from_utf8(output.stdout).unwrap().trim().to_owned(),
        other => return skip("a_block_device_needs_the_option", format!("losetup: {other:?}")),
    };
    let lines = [false, true].map(|force| {
        let force = if force { " --force" } else { "" };
        folder.convert(&format!("raw:from.raw raw:{device}{force}")).output().unwrap()
    });
    let done = folder.convert(&format!("raw:from.raw raw:{device} --target-exists")).output().unwrap();
    let itself = folder.convert(&format!("raw:{device} raw:{device} --target-exists")).output().unwrap();
    assert!(Command::new("losetup").args(["--detach", &device]).status().unwrap().success());
    for line in lines {
        let line = last_line(2, "without the option", line);
        assert!(
            line.contains("is a block device") && line.contains("--target-exists overwrites it"),
            "{line}"
        );
    }
    assert!(done.status.success(), "{done:?}");
    assert!(last_line(2, "to itself", itself).contains("is the source"));
    assert!(std::fs::read(folder.path("device")).unwrap() == folder.expected(9 * MIB));
}

#[test]
fn an_image_of_ceph_is_written_and_read() {
    let Some(cluster) = CephCluster::find("an_image_of_ceph_is_written_and_read") else { return };
    let _up = cluster.in_use();
    let folder = Folder::new();
    let name = format!("test-convert-{}", std::process::id());
    let url = format!("rbd:pool/{name}:conf={}", cluster.conf().display());
    let before = folder.fails(2, &format!("raw:from.raw raw:{url} --target-exists"));
    cluster.run("rbd", &["create", &format!("pool/{name}"), "--size", "9M"]);
    let refused = folder.fails(2, &format!("raw:from.raw raw:{url}"));
    let first = folder.done(&format!("raw:from.raw raw:{url} --target-exists"));
    folder.done(&format!("raw:{url} raw:copy.raw"));
    cluster.run("rbd", &["rm", "--no-progress", &format!("pool/{name}")]);
    assert!(before.contains("there is no such image"), "{before}");
    assert!(refused.contains("--target-exists overwrites it"), "{refused}");
    assert!(first.ends_with("raw, 9.0 MiB, 1.0 MiB written\n"), "{first}");
    assert!(std::fs::read(folder.path("copy.raw")).unwrap() == folder.expected(9 * MIB));
    assert!(folder.path("copy.raw").metadata().unwrap().blocks() * 512 <= MIB + 65536);
}
