//! Snapshots of devices that may meanwhile stop, be handed over, or get another image.
//!
//! ```text
//!   begin_snapshot   the device is served, and no other snapshot of it is on its way --> SnapshotTurn
//!   (the client creates the overlay: all may change meanwhile, and the image is not kept open)
//!   SnapshotTurn::take   still the same device, and served: until the end no reload and no hand-over begins
//!   dropped          the next snapshot, reload or hand-over
//! ```
//! All steps are under the lock of the devices, so that of two parties one is first.
use super::group::State;
use super::state::{Exports, Inner, Turn};
use crate::serve::snapshot::messages::NextStart;
use crate::serve::take_over::image::OfferedImage;
use paravane_device::blk::{ImageId, Overlay, OverlayBase, Snapshot, Snapshots};
use paravane_export::Noter;
use std::path::Path;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Longest wait until the record of a session names another image.
const NOTE_PATIENCE: Duration = Duration::from_secs(5);

/// The right to take the next snapshot of a device.
pub(crate) struct SnapshotTurn {
    exports: Exports,
    device: String,
    /// Number of the group whose device it is.
    group: u64,
    snapshots: Weak<Snapshots>,
    start: NextStart,
}

/// What an overlay is made for.
pub(crate) struct SnapshotBase {
    pub(crate) base: OverlayBase,
    /// How the disk is started again, without the overlay.
    pub(crate) start: NextStart,
    /// Serial number that the guest knows the disk by.
    pub(crate) serial: String,
}

impl Exports {
    /// Begins a snapshot of a disk that is served.
    ///
    /// # Errors
    /// There is no such disk, or another snapshot of it is on its way.
    pub(crate) fn begin_snapshot(&self, device: &str) -> Result<SnapshotTurn, String> {
        let mut inner = self.inner();
        if inner.turns.iter().any(|turn| turn.device == device) {
            return Err("another snapshot of the disk is being taken; try again".to_owned());
        }
        let (group, snapshots, start) = inner.snapshots(device)?;
        let snapshots = Arc::downgrade(&snapshots);
        inner.turns.push(Turn { device: device.to_owned(), is_taking: false });
        Ok(SnapshotTurn { exports: self.clone(), device: device.to_owned(), group, snapshots, start })
    }
}

impl Inner {
    /// A device whose image is being replaced.
    pub(super) fn taking(&self) -> Option<&str> {
        self.turns.iter().find(|turn| turn.is_taking).map(|turn| turn.device.as_str())
    }

    /// The group of a disk that is served, what takes its snapshots, and how it is started again.
    fn snapshots(&self, device: &str) -> Result<(u64, Arc<Snapshots>, NextStart), String> {
        let served = self.groups.iter().filter_map(|group| match &group.state {
            State::Served(members) => Some((group.id, members)),
            _ => None,
        });
        let mut members = served.flat_map(|(id, members)| members.iter().map(move |member| (id, member)));
        let (group, member) = members
            .find(|(_, member)| member.spec.name == device)
            .ok_or_else(|| format!("no device is named {device:?}"))?;
        let (snapshots, start) = member.snapshots()?;
        Ok((group, snapshots, start))
    }

    /// See [`ServedDevice::noter`](super::served::ServedDevice::noter).
    fn noter(&self, device: &str) -> Option<(Noter, Vec<u8>)> {
        self.served().find(|member| member.spec.name == device).map(|member| member.noter())
    }
}

impl SnapshotTurn {
    /// The image of the disk.
    ///
    /// # Errors
    /// The disk has no snapshots, or has stopped.
    pub(crate) fn base(&self) -> Result<SnapshotBase, String> {
        let snapshots = self.snapshots.upgrade().ok_or_else(|| self.is_gone())?;
        let base = snapshots.base().map_err(|error| error.to_string())?;
        Ok(SnapshotBase { base, start: self.start.clone(), serial: snapshots.serial() })
    }

    /// Has the disk write to `overlay`, which was made for the image `made_for`.
    ///
    /// # Errors
    /// The disk has stopped or got another image, or the overlay cannot be used. Nothing has changed.
    pub(crate) fn take(
        &self,
        overlay: Overlay,
        made_for: ImageId,
        path: &Path,
        limit: Duration,
    ) -> Result<Snapshot, String> {
        let (snapshots, noter, before) = self.start()?;
        // Before the first write to the overlay, for a daemon that starts after a crash.
        let note = OfferedImage::overlay(path, overlay.file_id()).to_note();
        let taken = match noter.note(note, NOTE_PATIENCE) {
            true => snapshots.take(overlay, made_for, limit).map_err(|error| error.to_string()),
            false => Err("the record of the session was not written in time; try again".to_owned()),
        };
        let taken = taken.inspect_err(|_| {
            if !noter.note(before, NOTE_PATIENCE) {
                tracing::warn!(
                    device = self.device,
                    "the record of the session names an overlay that is not used"
                );
            }
        })?;
        self.exports.replaced(&self.device, path, &taken);
        Ok(taken)
    }

    /// From here on the device is neither reloaded nor handed over.
    ///
    /// Returns also what notes the image for a later daemon, and the present note.
    fn start(&self) -> Result<(Arc<Snapshots>, Noter, Vec<u8>), String> {
        let mut inner = self.exports.inner();
        let (group, snapshots, _) = inner.snapshots(&self.device).map_err(|_| self.is_gone())?;
        if group != self.group {
            return Err(self.is_gone());
        }
        if let Some(turn) = inner.turns.iter_mut().find(|turn| turn.device == self.device) {
            turn.is_taking = true;
        }
        let (noter, before) = inner.noter(&self.device).ok_or_else(|| self.is_gone())?;
        Ok((snapshots, noter, before))
    }

    fn is_gone(&self) -> String {
        format!("device {} was stopped, handed over or started anew meanwhile; try again", self.device)
    }
}

impl Drop for SnapshotTurn {
    fn drop(&mut self) {
        self.exports.inner().turns.retain(|turn| turn.device != self.device);
        // A reload may wait for it.
        self.exports.notifier().signal();
    }
}
