//! Arguments of `paravane disk snapshot` and `fork`.
use clap::Args;
use std::path::PathBuf;

/// Freeze the image of a served disk; the guest goes on in an overlay
///
/// Creates the qcow2 image OVERLAY on the image that the disk uses, and has the daemon switch to
/// it. The guest sees a pause, which is printed. Its writes go to OVERLAY from then on, and the image
/// below is not written to again: it has all writes that were completed before, as after a crash.
/// Freeze the file systems of the guest first (fsfreeze) for one that is consistent for them.
///
/// If anything fails, OVERLAY is removed and the disk runs on as it was.
///
/// Change the command line or file of the daemon as printed: the next daemon must be started with
/// OVERLAY. Where the file system has extended attributes, the image below is marked, and is not
/// served for writing by mistake.
#[derive(Debug, Args)]
pub(crate) struct SnapshotArgs {
    /// Name of the device
    #[arg(value_name = "DEVICE")]
    pub(crate) device: String,
    /// Image to create; on the same host, and kept as long as the disk
    #[arg(value_name = "OVERLAY")]
    pub(crate) overlay: PathBuf,
    #[command(flatten)]
    pub(crate) common: LiveArgs,
}

/// Take a snapshot of a served disk, and make overlays on it for other guests
///
/// As `paravane disk snapshot`, with more overlays on the same frozen image. The first OVERLAY is
/// for the guest that runs, the others for new disks, which begin with what it had at that moment.
#[derive(Debug, Args)]
pub(crate) struct ForkArgs {
    /// Name of the device
    #[arg(value_name = "DEVICE")]
    pub(crate) device: String,
    /// Images to create: for the guest that runs, then for the others
    #[arg(value_name = "OVERLAY", num_args = 2.., required = true)]
    pub(crate) overlays: Vec<PathBuf>,
    #[command(flatten)]
    pub(crate) common: LiveArgs,
}

/// Options of commands for disks that are served.
#[derive(Debug, Args)]
pub(crate) struct LiveArgs {
    /// Ask only the daemon with this control socket
    #[arg(long, value_name = "PATH")]
    pub(crate) control: Option<PathBuf>,
    /// Give up if requests in flight take longer than TIME to end, up to 60s
    #[arg(long, value_name = "TIME", default_value = "1s")]
    pub(crate) pause_limit: humantime::Duration,
    /// Print the result as JSON
    #[arg(long)]
    pub(crate) json: bool,
}
