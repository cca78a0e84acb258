//! Images of every kind for tests.
use crate::daemon::Folder;
use std::path::Path;
use std::process::Command;

/// What is in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    Raw,
    Qcow2,
    /// An overlay over a raw image.
    Overlay,
    /// An overlay over an overlay over a raw image.
    Chain,
}

/// An image in a separate folder.
pub(crate) struct Image {
    format: Format,
    folder: Folder,
    /// Initial contents of the disk.
    before: Vec<u8>,
}

impl Image {
    /// Creates an image of `size` bytes, on disk or in memory.
    pub(crate) fn new(format: Format, in_memory: bool, len: usize) -> Self {
        let folder =
            Folder::within(Path::new(if in_memory { "/dev/shm" } else { env!("CARGO_TARGET_TMPDIR") }));
        let path = folder.text("disk.img");
        let image = Self { format, folder, before: base(format, len) };
        let size = len.to_string();
        let create = |name: &str, more: &[&str]| {
            let path = image.folder.text(name);
            qemu_img(&[&["create", "-q", "-f", "qcow2"], more, &[&path, &size]].concat());
        };
        match format {
            Format::Raw => std::fs::write(&path, &image.before).unwrap(),
            Format::Qcow2 => create("disk.img", &[]),
            Format::Overlay | Format::Chain => {
                std::fs::write(image.folder.path("base.raw"), &image.before).unwrap();
                let over = |name, base, format| create(name, &["-u", "-b", base, "-F", format]);
                if format == Format::Overlay {
                    over("disk.img", "base.raw", "raw");
                } else {
                    over("middle.qcow2", "base.raw", "raw");
                    over("disk.img", "middle.qcow2", "qcow2");
                }
            }
        }
        image
    }

    pub(crate) fn folder(&self) -> &Folder {
        &self.folder
    }

    /// Initial contents of the disk.
    pub(crate) fn before(&self) -> &[u8] {
        &self.before
    }

    /// Options of `paravane serve blk` for the image.
    pub(crate) fn options(&self) -> Vec<String> {
        let keys = self.keys().into_iter();
        keys.flat_map(|(key, values)| values.into_iter().flat_map(move |value| [format!("--{key}"), value]))
            .collect()
    }

    /// The options as keys of a file of devices.
    pub(crate) fn lines(&self) -> String {
        let line = |(key, values): (&str, Vec<String>)| match key {
            "backing" => format!("{key} = {values:?}\n"),
            _ => format!("{key} = {:?}\n", values[0]),
        };
        self.keys().into_iter().map(line).collect()
    }

    fn keys(&self) -> Vec<(&'static str, Vec<String>)> {
        let file = |format: &str, name| format!("{format}:{}", self.folder.text(name));
        let backing = match self.format {
            Format::Raw | Format::Qcow2 => vec![],
            Format::Overlay => vec![file("raw", "base.raw")],
            Format::Chain => vec![file("qcow2", "middle.qcow2"), file("raw", "base.raw")],
        };
        let format = if self.format == Format::Raw { "raw" } else { "qcow2" };
        let keys = vec![("image", vec![self.folder.text("disk.img")]), ("format", vec![format.to_owned()])];
        keys.into_iter().chain((!backing.is_empty()).then_some(("backing", backing))).collect()
    }

    /// Checks the image with qemu-img, and that its backing files are unchanged.
    pub(crate) fn check(&self) {
        if self.format != Format::Raw {
            qemu_img(&["check", "-q", "-f", "qcow2", &self.folder.text("disk.img")]);
        }
        if matches!(self.format, Format::Overlay | Format::Chain) {
            assert!(
                std::fs::read(self.folder.path("base.raw")).unwrap() == self.before,
                "the base was written"
            );
        }
    }

    /// Contents of the disk.
    pub(crate) fn content(&self) -> Vec<u8> {
        if self.format == Format::Raw {
            return std::fs::read(self.folder.path("disk.img")).unwrap();
        }
        let (image, flat) = (self.folder.text("disk.img"), self.folder.text("flat.raw"));
        qemu_img(&["convert", "-q", "-f", "qcow2", "-O", "raw", &image, &flat]);
        std::fs::read(flat).unwrap()
    }
}

fn base(format: Format, len: usize) -> Vec<u8> {
    match format {
        Format::Raw | Format::Qcow2 => vec![0; len],
        Format::Overlay | Format::Chain => (0..len).map(|at| (at >> 9) as u8 ^ at as u8).collect(),
    }
}

/// Runs `qemu-img`, which must succeed.
pub(crate) fn qemu_img(arguments: &[&str]) {
    let output = paravane_test_support::qemu_img(arguments);
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Whether `qemu-img` is installed; if not, `test` is skipped.
pub(crate) fn has_qemu_img(test: &str) -> bool {
    match Command::new("qemu-img").arg("--version").output() {
        Ok(_) => true,
        Err(error) => {
            crate::daemon::skip(test, format!("qemu-img (package qemu-utils): {error}"));
            false
        }
    }
}
