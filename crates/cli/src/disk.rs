//! `paravane disk`: images without a guest, and snapshots of served disks.
//!
//! ```text
//!   create   NewFile --> images::create --------------------> renamed to its place
//!   convert  Disk, NewFile --> images::copy, with a bar ----> renamed to its place
//!   commit   overlay, Disk --> images::merge, with a bar
//!   info     images::info --> text or JSON
//!   snapshot, fork   an overlay --> the daemon that serves the disk
//! ```
//! A new file is written under a temporary name: at its place there is all of it, or nothing. In a
//! store that is no file, a qcow2 image is written in place.
mod apart;
pub(crate) mod args;
mod commit;
mod convert;
mod create;
mod image;
mod info;
mod new_file;
mod next_start;
mod snapshot;
mod target;
mod work;

use crate::failure::Failure;
use args::{ForkArgs, SnapshotArgs};
use clap::{Args, Subcommand};
use std::process::ExitCode;

/// Create, describe, convert, merge and snapshot disk images
///
/// Layers are QEMU's qcow2: `qemu-img` checks, commits and rebases what these commands write, and
/// they work on what QEMU wrote. They need no QEMU. `snapshot` and `fork` are for a disk that a daemon
/// serves; to the others, an image that is in use is locked, and refused.
///
/// A LOCATION is a path or a URL, as for `paravane serve blk`. A new file is written under a
/// temporary name and renamed when it is complete and on disk: after an error, a signal or a crash
/// there is no half image at its place. In other stores, qcow2 images are written in place.
#[derive(Debug, Args)]
#[command(arg_required_else_help = false)]
pub(crate) struct DiskArgs {
    #[command(subcommand)]
    command: DiskCommand,
}

#[derive(Debug, Subcommand)]
enum DiskCommand {
    Create(create::CreateArgs),
    Info(info::InfoArgs),
    Convert(convert::ConvertArgs),
    Commit(commit::CommitArgs),
    Snapshot(SnapshotArgs),
    Fork(ForkArgs),
}

pub(crate) fn main(args: &DiskArgs) -> Result<ExitCode, Failure> {
    match &args.command {
        DiskCommand::Create(args) => create::main(args),
        DiskCommand::Info(args) => info::main(args),
        DiskCommand::Convert(args) => convert::main(args),
        DiskCommand::Commit(args) => commit::main(args),
        DiskCommand::Snapshot(SnapshotArgs { device, overlay, common }) => {
            return snapshot::take(device, std::slice::from_ref(overlay), common);
        }
        DiskCommand::Fork(ForkArgs { device, overlays, common }) => {
            return snapshot::take(device, overlays, common);
        }
    }?;
    Ok(ExitCode::SUCCESS)
}
