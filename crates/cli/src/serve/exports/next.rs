//! New settings of devices that are served, on their way; see [`super::exchange`].
use super::super::spec::DeviceSpec;
use crate::kinds::opening::Opening;
use paravane_export::Exchanged;
use std::sync::mpsc::Sender;

/// New settings of a group that is served, for which its devices have to be opened again.
pub(super) struct Next {
    /// Names this one, of all that there were.
    pub(super) number: u64,
    pub(super) specs: Vec<DeviceSpec>,
    /// What they are to replace.
    pub(super) of: Vec<DeviceSpec>,
    /// If the sessions cannot go on, they may end.
    pub(super) may_restart: bool,
    pub(super) stage: Stage,
}

/// How far [`Next`] is.
pub(super) enum Stage {
    Begins,
    Opens,
    Ready(Vec<Opening>),
}

/// Devices that a thread has opened for a [`Next`] of this number, or why they cannot go on.
pub(super) type Prepared = (u64, Result<Vec<Opening>, String>);

/// What a device hands over to its successor.
pub(super) type Handing = Sender<(String, Result<Exchanged, String>)>;

/// What has become of the sessions of a group that was exchanged, if they have not gone on.
pub(super) enum Note {
    /// They have ended.
    Ended(String),
    /// They go on with the old devices.
    Back(String),
}
