//! Who may have an image open together with whom: this program, and QEMU's.
use crate::daemon::{Daemon, Folder, paravane, patience, skip, without_sandbox};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// The table of docs/reference/images.md: who has it open, and what others may do then.
///
/// In the order of [`Wish::ALL`]. What programs of QEMU allow each other is left out.
const TABLE: [(&str, [&str; 6]); 4] = [
    ("`paravane serve`", ["no", "no", "no", "no", "no", "no"]),
    ("`paravane serve --read-only`, or as a base", ["no", "yes", "no", "no", "yes", "yes"]),
    ("QEMU, to write", ["no", "no", "no", "-", "-", "-"]),
    ("QEMU, to read", ["no", "yes", "no", "-", "-", "-"]),
];

/// A way to open the image, a column of the table.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Wish {
    Serve,
    Read,
    Commit,
    QemuWrites,
    QemuReads,
    QemuReadsShared,
}

impl Wish {
    const ALL: [Self; 6] =
        [Self::Serve, Self::Read, Self::Commit, Self::QemuWrites, Self::QemuReads, Self::QemuReadsShared];
}

/// The tools of a QEMU.
#[derive(Clone, Debug)]
struct Qemu {
    /// Of one that is not installed: where it was unpacked.
    root: Option<PathBuf>,
}

impl Qemu {
    fn tool(&self, name: &str) -> Command {
        let Some(root) = &self.root else { return Command::new(name) };
        let libraries = root.join(format!("usr/lib/{}-linux-gnu", std::env::consts::ARCH));
        let mut command = Command::new(root.join("lib64/ld-linux-x86-64.so.2"));
        command.arg("--library-path").arg(&libraries).arg(root.join("usr/bin").join(name));
        command.env("QEMU_MODULE_DIR", libraries.join("qemu"));
        command
    }
}

/// QEMUs of this host; skips `test` for those that are missing.
fn qemus(test: &str) -> Vec<Qemu> {
    let mut found = Vec::new();
    match Command::new("qemu-img").arg("--version").output() {
        Ok(_) => found.push(Qemu { root: None }),
        Err(error) => skip(test, format!("qemu-img (package qemu-utils): {error}")),
    }
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("debian-qemu");
    let unpacked = ["sid", "trixie"].map(|release| folder.join(format!("io-{release}")));
    match unpacked.into_iter().find(|root| root.join("usr/bin/qemu-nbd").exists()) {
        Some(root) => found.push(Qemu { root: Some(root) }),
        None => skip(test, "with a newer QEMU: run `scripts/debian-qemu sid qemu-io`"),
    }
    found
}

/// An image, and two overlays on it.
struct Images {
    folder: Folder,
    format: &'static str,
}

impl Images {
    fn new(format: &'static str) -> Self {
        let images = Self { folder: Folder::new(), format };
        images.done(&["create", "--format", format, "--size", "1M", &images.base()]);
        for name in ["one.qcow2", "two.qcow2"] {
            images.done(&["create", "--backing", &images.layer(), &images.folder.text(name)]);
        }
        images
    }

    fn base(&self) -> String {
        self.folder.text("base")
    }

    fn layer(&self) -> String {
        format!("{}:{}", self.format, self.base())
    }

    fn disk(&self, arguments: &[&str]) -> Output {
        paravane().arg("disk").args(arguments).output().unwrap()
    }

    fn done(&self, arguments: &[&str]) {
        let output = self.disk(arguments);
        assert!(output.status.success(), "{arguments:?}: {output:?}");
    }

    fn serve(&self, socket: &str, image: &[&str]) -> Result<Daemon, String> {
        let mut command = paravane();
        command.args(["serve", "blk", "--socket", &self.folder.text(socket), "--control", "off"]);
        let mut daemon = Daemon::spawn(command.args(image).args(without_sandbox()));
        match daemon.find("ready") {
            Ok(_) => Ok(daemon),
            Err(_) => Err(daemon.seen().join("\n")),
        }
    }

    fn serve_base(&self, socket: &str, more: &[&str]) -> Result<Daemon, String> {
        let base = self.base();
        self.serve(socket, &[&["--image", &base, "--format", self.format], more].concat())
    }

    fn serve_overlay(&self, socket: &str, name: &str) -> Result<Daemon, String> {
        let (image, layer) = (self.folder.text(name), self.layer());
        self.serve(socket, &["--image", &image, "--format", "qcow2", "--backing", &layer])
    }

    /// What each way to have this wish answers: nothing, or why not.
    fn outcomes(&self, qemu: &Qemu, wish: Wish) -> Vec<(String, Result<(), String>)> {
        let (base, layer) = (self.base(), self.layer());
        let (copy, fresh) = (self.folder.text("copy"), self.folder.text("fresh.qcow2"));
        let ours = |arguments: &[&str]| (format!("disk {arguments:?}"), answer(&self.disk(arguments)));
        let theirs = |name: &str, arguments: &[&str]| {
            let output = qemu.tool(name).args(arguments).arg(&base).output().unwrap();
            (format!("{name} {arguments:?}"), answer(&output))
        };
        let served = |what: &str, served: Result<Daemon, String>| (what.to_owned(), served.map(drop));
        match wish {
            Wish::Serve => vec![served("serve", self.serve_base("a", &[]))],
            Wish::Read => vec![
                served("serve --read-only", self.serve_base("a", &["--read-only"])),
                served("a base", self.serve_overlay("a", "two.qcow2")),
                ours(&["convert", "--force", &layer, &format!("raw:{copy}")]),
                ours(&["info", &base]),
                ours(&["create", "--force", "--backing", &layer, &fresh]),
            ],
            Wish::Commit => vec![ours(&["commit", &self.folder.text("two.qcow2"), "--backing", &layer])],
            Wish::QemuWrites => {
                vec![theirs("qemu-io", &["-f", self.format, "-c", "write -P 1 0 512"])]
            }
            Wish::QemuReads => {
                let mut all = vec![
                    theirs("qemu-io", &["-r", "-f", self.format, "-c", "read 0 512"]),
                    theirs("qemu-img", &["compare", "-f", self.format, "-F", self.format, &base]),
                ];
                if self.format == "qcow2" {
                    all.push(theirs("qemu-img", &["check", "-f", "qcow2"]));
                }
                all
            }
            Wish::QemuReadsShared => vec![
                theirs("qemu-img", &["compare", "-U", "-f", self.format, "-F", self.format, &base]),
                theirs("qemu-img", &["measure", "-U", "-f", self.format, "-O", "qcow2"]),
            ],
        }
    }
}

fn answer(output: &Output) -> Result<(), String> {
    match output.status.success() {
        true => Ok(()),
        false => Err(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
    }
}

/// A program of QEMU that has the image open, killed when dropped.
struct Held(Child);

impl Held {
    /// `qemu-nbd`, or `qemu-storage-daemon`.
    fn start(images: &Images, qemu: &Qemu, is_nbd: bool, writes: bool) -> Self {
        let (socket, pid) = (images.folder.text("nbd.sock"), images.folder.path("pid"));
        let (base, format) = (images.base(), images.format);
        let mut command = match is_nbd {
            true => {
                let mut command = qemu.tool("qemu-nbd");
                command.args(["-t", "-f", format, "-k", &socket]).args((!writes).then_some("-r")).arg(base);
                command.arg(format!("--pid-file={}", pid.display()));
                command
            }
            false => {
                let (read_only, writable) = if writes { ("off", "on") } else { ("on", "off") };
                let mut command = qemu.tool("qemu-storage-daemon");
                let file = format!("driver=file,node-name=f,filename={base},read-only={read_only}");
                let disk = format!("driver={format},node-name=d,file=f,read-only={read_only}");
                command.args(["--blockdev", &file, "--blockdev", &disk]);
                command.args(["--nbd-server", &format!("addr.type=unix,addr.path={socket}")]);
                let export = format!("type=nbd,id=e,node-name=d,writable={writable}");
                command.args(["--export", &export, "--pidfile"]).arg(&pid);
                command
            }
        };
        let held = Self(command.stdin(Stdio::null()).spawn().expect("QEMU's program starts"));
        let end = Instant::now() + patience();
        while !pid.exists() {
            assert!(Instant::now() < end, "{command:?} is not ready");
            std::thread::sleep(Duration::from_millis(2));
        }
        held
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Tries all that a row of the table says.
fn try_row(images: &Images, qemu: &Qemu, (holder, allowed): (&str, [&str; 6])) {
    for (wish, allowed) in Wish::ALL.into_iter().zip(allowed).filter(|(_, allowed)| *allowed != "-") {
        for (what, outcome) in images.outcomes(qemu, wish) {
            let context = format!("{holder} has {} open: {what} of {qemu:?}", images.format);
            assert_eq!(outcome.is_ok(), allowed == "yes", "{context}: {outcome:?}");
            if let (Err(why), Wish::Serve | Wish::Read | Wish::Commit) = (&outcome, wish) {
                assert!(why.contains("in use by"), "{context}: {why}");
            }
        }
    }
    // It reads no more than the header.
    let info = qemu.tool("qemu-img").args(["info", "-U", "-f", images.format]).arg(images.base()).output();
    assert!(info.as_ref().unwrap().status.success(), "{holder}: {info:?}");
}

#[test]
fn an_image_is_shared_with_qemu_as_the_table_says() {
    let test = "an_image_is_shared_with_qemu_as_the_table_says";
    let qemus = qemus(test);
    let [rw, ro, qemu_rw, qemu_ro] = TABLE;
    std::thread::scope(|scope| {
        for (qemu, format) in qemus.iter().flat_map(|qemu| ["raw", "qcow2"].map(|format| (qemu, format))) {
            scope.spawn(move || {
                let images = Images::new(format);
                let _daemon = images.serve_base("held", &[]).unwrap();
                try_row(&images, qemu, rw);
            });
            scope.spawn(move || {
                let images = Images::new(format);
                let daemon = images.serve_base("held", &["--read-only"]).unwrap();
                try_row(&images, qemu, ro);
                drop(daemon);
                let _daemon = images.serve_overlay("held", "one.qcow2").unwrap();
                try_row(&images, qemu, ro);
            });
            for is_nbd in [true, false] {
                scope.spawn(move || {
                    let images = Images::new(format);
                    let held = Held::start(&images, qemu, is_nbd, true);
                    try_row(&images, qemu, qemu_rw);
                    drop(held);
                    drop(std::fs::remove_file(images.folder.path("pid")));
                    drop(std::fs::remove_file(images.folder.path("nbd.sock")));
                    let _held = Held::start(&images, qemu, is_nbd, false);
                    try_row(&images, qemu, qemu_ro);
                });
            }
        }
    });
}

#[test]
fn the_table_of_the_book_is_the_one_that_is_tried() {
    let book = include_str!("../../../../docs/reference/images.md");
    for (holder, allowed) in TABLE {
        let cells = allowed.join(" | ");
        let row = format!("| {holder} | {cells} |");
        assert!(book.lines().any(|line| line == row), "{row:?} is not in the book");
    }
}
