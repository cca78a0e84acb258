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
pub(crate) mod image;
mod taker;

pub(crate) use giver::Giver;
pub(crate) use taker::{Taker, find};

use super::spec::DeviceSpec;
use super::told::Told;
use image::OfferedImage;
use paravane_device::blk::FileId;
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
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
        let file = file.map(|file| [file.device, file.inode]);
        let image = kind.disk().map(|disk| OfferedImage { file, ..disk.offered_image() });
        Self { name: name.clone(), kind: kind.name().to_owned(), endpoint: endpoint.to_string(), image, told }
    }

    /// Whether both are the same device with the same image.
    pub(crate) fn is(&self, other: &Self) -> bool {
        (&self.name, &self.kind, &self.endpoint, &self.image)
            == (&other.name, &other.kind, &other.endpoint, &other.image)
    }
}
