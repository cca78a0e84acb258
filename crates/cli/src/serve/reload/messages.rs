//! Messages between `paravane reload` and a daemon.
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// Name of the outcome of the daemon's own settings. No device has it.
pub(crate) const DAEMON: &str = "[daemon]";

/// A request for a reload.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ReloadRequest {}

/// What a message says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Message {
    Ready,
    Begin(Wish),
    /// What the daemon waits for.
    Working(String),
    Done(Vec<DeviceOutcome>),
    /// Nothing has changed.
    Failed(String),
}

/// What a client wants.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Wish {
    /// Devices that may restart though their clients have to reconnect.
    pub(crate) restart: BTreeSet<String>,
    /// Say what a reload would do, of this file. Do nothing.
    pub(crate) plan: Option<String>,
    /// Seconds to wait for devices.
    pub(crate) patience_s: u64,
}

/// What has become of a device, or will.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Outcome {
    Unchanged,
    /// Changed while it is served.
    Changed,
    /// Opened again, and its session goes on.
    Exchanged,
    /// Opened again; a client has to reconnect.
    Restarted,
    Added,
    Removed,
    /// Left as it was.
    Refused,
    Failed,
    /// Not done yet.
    Waiting,
}

/// The outcome of a reload for one device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DeviceOutcome {
    pub(crate) name: String,
    pub(crate) outcome: Outcome,
    /// Settings that differ.
    #[serde(default)]
    pub(crate) keys: Vec<String>,
    /// Why it is not done, and the way out.
    #[serde(default)]
    pub(crate) why: Option<String>,
}
