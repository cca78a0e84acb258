//! `--take-over`: a new daemon takes the sessions of the running one, which then exits.
//!
//! ```text
//!   new daemon (taker)                                   running daemon (giver)
//!   reads its configuration, opens its images
//!   (not locked); what fails here changes nothing
//!   {"hand_over": {"version": 1}}                ----->  same user or root? no other take-over?
//!                                                <-----  Offer: its devices; or Refused
//!   the same devices and images, and their guests
//!   would be told the same? else it exits
//!   Begin                                        ----->  still what was offered? drains all devices at the same time
//!                                                <-----  Control, Metrics: listening sockets
//!                                                <-----  Device: record and descriptors, as each is drained
//!   locks the image, resumes the session
//!   Taken                                        ----->  ...
//!                                                <-----  End, when all devices are sent
//!                                                        exits when all are taken
//! ```
//! | what fails | result |
//! |---|---|
//! | anything before Begin | the new daemon exits with status 2; the running one serves on |
//! | a device does not drain within the stop timeout | it alone ends: its client has to reconnect |
//! | the new daemon after Begin | the old one exits with status 1: its devices are gone |
//! | the old daemon after Begin | the new one serves what it has, and starts the others anew |
//!
//! The connection is one to the control socket (see [`super::control`]); its client has a name. The
//! image's descriptor is not passed: its lock shows that no request of the old daemon is in flight.
mod giver;
mod taker;

pub(crate) use giver::Giver;
pub(crate) use taker::{Taker, find};

use super::args::Format;
use super::spec::{DeviceSpec, Kind};
use super::told::Told;
use paravane_device::blk::FileId;
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

/// Version of the messages and of the records.
pub(crate) const VERSION: u32 = 1;
/// Longest wait for a message that the other daemon can send at once.
const PATIENCE: Duration = Duration::from_secs(30);

/// What a message says. Some carry a record or descriptors.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Message {
    Offer(Offer),
    /// Nothing was changed.
    Refused(String),
    Begin,
    /// With the control socket.
    Control,
    /// With the socket of the metrics.
    Metrics,
    /// With the record and descriptors of the device of this name.
    Device(String),
    /// The device is not handed over, or not resumed.
    Failed {
        name: String,
        why: String,
    },
    Taken(String),
    End,
}

/// What a daemon can hand over.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Offer {
    pid: u32,
    version: String,
    devices: Vec<Offered>,
    /// Address of the metrics.
    metrics: Option<SocketAddr>,
    /// Number of take-overs so far.
    take_overs: u64,
}

/// A device of an offer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Offered {
    pub(crate) name: String,
    pub(crate) kind: String,
    pub(crate) endpoint: String,
    /// `None`: no disk, or an earlier version does not tell.
    #[serde(default)]
    pub(crate) image: Option<OfferedImage>,
    /// Empty: no VMM has been connected, or the daemon does not tell.
    #[serde(default)]
    pub(crate) told: Told,
}

impl Offered {
    /// Of a device that is served, or of one that is to be.
    ///
    /// `file`: that of a disk's image, if it is open.
    pub(crate) fn new(spec: &DeviceSpec, file: Option<FileId>, told: Told) -> Self {
        let DeviceSpec { name, kind, endpoint, .. } = spec;
        let image = match kind {
            Kind::Blk(blk) => Some(OfferedImage {
                location: blk.image.to_string(),
                format: match blk.format {
                    Format::Raw => "raw".to_owned(),
                    Format::Qcow2 => "qcow2".to_owned(),
                },
                file: file.map(|file| [file.device, file.inode]),
            }),
            _ => None,
        };
        Self { name: name.clone(), kind: kind.name().to_owned(), endpoint: endpoint.to_string(), image, told }
    }

    /// Whether both are the same device with the same image.
    pub(crate) fn is(&self, other: &Self) -> bool {
        (&self.name, &self.kind, &self.endpoint, &self.image)
            == (&other.name, &other.kind, &other.endpoint, &other.image)
    }
}

/// The image of a disk that is offered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct OfferedImage {
    pub(crate) location: String,
    pub(crate) format: String,
    /// Numbers of its file system and file; `None`: it lies in another store.
    pub(crate) file: Option<[u64; 2]>,
}

impl OfferedImage {
    /// The overlay that a snapshot goes on with.
    pub(crate) fn overlay(path: &Path, file: Option<FileId>) -> Self {
        let file = file.map(|file| [file.device, file.inode]);
        Self { location: path.display().to_string(), format: "qcow2".to_owned(), file }
    }

    /// As the note of an export, for a daemon that starts after a crash.
    pub(crate) fn to_note(&self) -> Vec<u8> {
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// The image in a note; `None`: an earlier version has noted nothing.
    pub(crate) fn from_note(note: &[u8]) -> Option<Self> {
        serde_json::from_slice(note).ok()
    }

    /// Whether a guest that used this image last may go on with `other`.
    ///
    /// One that was moved, or made anew under the same name, is taken for the same.
    pub(crate) fn goes_on_with(&self, other: &Self) -> bool {
        (self.file.is_some() && self.file == other.file) || self.location == other.location
    }

    /// Whether its path names it still.
    pub(crate) fn is_there(&self) -> bool {
        let found = FileId::at(Path::new(&self.location)).map(|file| [file.device, file.inode]);
        self.file.is_some() && found.ok() == self.file
    }

    /// Whether both are the same image.
    pub(crate) fn is(&self, other: &Self) -> bool {
        let same = match (self.file, other.file) {
            // The paths may differ, as in two name spaces.
            (Some(one), Some(other)) => one == other,
            (None, None) => self.location == other.location,
            _ => false,
        };
        same && self.format == other.format
    }
}
