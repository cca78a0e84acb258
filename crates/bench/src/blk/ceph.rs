//! Images in a Ceph cluster, which somebody else has made (`scripts/ceph-one`).
use crate::daemon::is_installed;
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The cluster's configuration.
const CONF: &str = "PARAVANE_CEPH_CONF";
/// Ceph's program for images (Debian: ceph-common).
const PROGRAM: &str = "rbd";
/// The pool of the images.
pub(super) const POOL: &str = "pool";
/// QEMU's module for images of Ceph (Debian: qemu-block-extra).
const MODULE: &str = "block-rbd.so";

/// Whether images can be in a cluster.
pub(super) fn is_there() -> bool {
    conf().is_some() && is_installed(PROGRAM)
}

/// Configuration of the cluster, if one is named.
fn conf() -> Option<PathBuf> {
    Some(std::env::var_os(CONF)?.into())
}

/// What follows the name of an image, where `before` is what names the configuration.
pub(super) fn with_conf(before: &str) -> String {
    format!("{before}{}", conf().unwrap_or_default().display())
}

/// Whether `qemu-storage-daemon` can open images of Ceph.
pub(super) fn qemu_can() -> bool {
    super::qemu_module::is_there(MODULE)
}

/// An image in the cluster, removed when dropped.
#[derive(Debug)]
pub(super) struct CephImage {
    conf: PathBuf,
    name: String,
}

impl CephImage {
    /// Copies a file into the cluster.
    ///
    /// # Errors
    /// No cluster is named, or it refuses.
    pub(super) fn import(file: &Path, name: &str) -> io::Result<Self> {
        let conf = conf().ok_or_else(|| io::Error::other(format!("{CONF} names no cluster")))?;
        let image = Self { conf, name: image_name(name) };
        image.run("import", &[file.as_os_str().to_owned(), image.path()])?;
        Ok(image)
    }

    fn path(&self) -> OsString {
        format!("{POOL}/{}", self.name).into()
    }

    fn run(&self, what: &str, arguments: &[OsString]) -> io::Result<()> {
        let mut command = Command::new(PROGRAM);
        command.arg("--conf").arg(&self.conf).args(["--no-progress", what]).args(arguments);
        let output = command.stdin(Stdio::null()).output()?;
        if output.status.success() {
            return Ok(());
        }
        let why = String::from_utf8_lossy(&output.stderr);
        let why = why.lines().next_back().unwrap_or_default();
        Err(io::Error::other(format!("{PROGRAM} {what} failed: {why}")))
    }
}

impl Drop for CephImage {
    fn drop(&mut self) {
        // Its server has ended, but the cluster may not have noticed yet: then it stays there.
        let _ = self.run("rm", &[self.path()]);
    }
}

/// Name of an image in the cluster, of this process alone.
pub(super) fn image_name(name: &str) -> String {
    format!("paravane-bench-{}-{name}", std::process::id())
}
