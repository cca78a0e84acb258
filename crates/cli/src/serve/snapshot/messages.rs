//! Messages between `paravane disk snapshot` and a daemon.
use paravane_device::blk;
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
    pub(crate) image: Layer,
    /// Size of the disk in bytes.
    pub(crate) size: u64,
    /// Its backing files, top first.
    pub(crate) backing: Vec<Layer>,
}

/// An image and its format, with an absolute path.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Layer {
    pub(crate) format: Format,
    pub(crate) path: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Format {
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
        write!(f, "{}:{}", self.format, self.path)
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Raw => "raw",
            Self::Qcow2 => "qcow2",
        })
    }
}

impl From<blk::Format> for Format {
    fn from(format: blk::Format) -> Self {
        match format {
            blk::Format::Raw => Self::Raw,
            blk::Format::Qcow2 => Self::Qcow2,
        }
    }
}

impl From<Format> for blk::Format {
    fn from(format: Format) -> Self {
        match format {
            Format::Raw => Self::Raw,
            Format::Qcow2 => Self::Qcow2,
        }
    }
}
