//! Messages between `paravane disk snapshot` and a daemon.
use paravane_device::blk::{self, Format};
use serde::{Deserialize, Serialize};
use std::fmt;

/// A request for a snapshot of a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SnapshotRequest {
    pub(crate) device: String,
}

/// What a message says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Message {
    Base(Base),
    /// With the descriptors of the overlay.
    Overlay(OverlayRequest),
    Taken(Taken),
    /// Nothing has changed.
    Failed(String),
}

/// The image that a disk uses.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Base {
    /// Process of the daemon.
    pub(crate) pid: u32,
    /// Size of the disk in bytes.
    pub(crate) size: u64,
    /// Serial number that the guest knows the disk by.
    ///
    /// A daemon of an earlier version tells neither this nor options.
    #[serde(default)]
    pub(crate) serial: Option<String>,
    /// The image itself, which a path may not name for long; `None`: an earlier version.
    #[serde(default)]
    pub(crate) id: Option<BaseId>,
    #[serde(flatten)]
    pub(crate) start: NextStart,
}

/// The image that a disk used at a moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct BaseId {
    /// Numbers of its file system and file; `None`: a store that is no file.
    pub(crate) file: Option<[u64; 2]>,
    /// Number of snapshots of the disk before.
    pub(crate) generation: u64,
}

/// How a disk is started again, with its images.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct NextStart {
    pub(crate) image: Layer,
    /// Its backing files, top first.
    pub(crate) backing: Vec<Layer>,
    #[serde(default)]
    pub(crate) name: String,
    #[serde(default)]
    pub(crate) endpoint: StartOption,
    /// Options beside images, endpoint and serial number that are not the defaults.
    #[serde(default)]
    pub(crate) options: Vec<StartOption>,
}

/// An option of the command line.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StartOption {
    /// Without dashes.
    pub(crate) name: String,
    /// `None`: it has none.
    pub(crate) value: Option<String>,
}

impl StartOption {
    pub(crate) fn new(name: &str, value: impl ToString) -> Self {
        Self { name: name.to_owned(), value: Some(value.to_string()) }
    }

    pub(crate) fn flag(name: &str) -> Self {
        Self { name: name.to_owned(), value: None }
    }
}

/// An image and its format, with an absolute path or a URL.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Layer {
    #[serde(with = "FormatName")]
    pub(crate) format: Format,
    pub(crate) path: String,
    /// The URL lacks a query or password.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) lacks_secret: bool,
}

/// A format by its name.
#[derive(Serialize, Deserialize)]
#[serde(remote = "Format", rename_all = "lowercase")]
enum FormatName {
    Raw,
    Qcow2,
}

/// The overlay to use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct OverlayRequest {
    /// Absolute path.
    pub(crate) path: String,
    /// Longest pause of the disk, in microseconds.
    pub(crate) pause_limit_us: u64,
    /// The image that it was made for.
    #[serde(default)]
    pub(crate) base: Option<BaseId>,
}

/// A snapshot that was taken.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Taken {
    /// Time for which queues were held, in microseconds.
    pub(crate) pause_us: f64,
    /// Number of live queues.
    pub(crate) queues: usize,
    /// The image below is marked, so that it is not written to by mistake.
    pub(crate) marked: bool,
    pub(crate) engine: String,
    /// Why the image below is not on the disk yet.
    pub(crate) unsynced: Option<String>,
}

impl fmt::Display for Layer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.format.name(), self.path)
    }
}

impl From<blk::ImageId> for BaseId {
    fn from(blk::ImageId { file, generation }: blk::ImageId) -> Self {
        Self { file: file.map(|file| [file.device, file.inode]), generation }
    }
}

impl From<BaseId> for blk::ImageId {
    fn from(BaseId { file, generation }: BaseId) -> Self {
        Self { file: file.map(|[device, inode]| blk::FileId { device, inode }), generation }
    }
}
