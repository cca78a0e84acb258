//! What guests are told of their devices, and keep while daemons come and go.
//!
//! ```text
//!   running daemon:  what it tells -----Offer--.
//!   ended daemon:    what it has recorded -----+--> Told::difference --none--> the new daemon begins
//!   new daemon:      what it would tell -------'          '--------some--> it exits with status 2
//! ```
//! A guest reads block size, number of queues and the like once, when its driver starts. So a new daemon
//! that would tell anything else is refused while the old one serves on, or before the session is
//! resumed.
use paravane_spec::feature;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Size of a disk in bytes. It may grow: the guest is told.
pub(crate) const SIZE: &str = "size";
pub(crate) const QUEUES: &str = "queues";
pub(crate) const PACKED: &str = "packed queues";
pub(crate) const IN_ORDER: &str = "IN_ORDER";

/// The driver uses it.
pub(crate) const USED: &str = "in use";
/// The device does not offer it.
pub(crate) const MISSING: &str = "not offered";

/// Facts by name. What is not known is left out.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct Told(BTreeMap<String, String>);

impl Told {
    pub(crate) fn put(&mut self, name: &str, value: impl ToString) {
        self.0.insert(name.to_owned(), value.to_string());
    }

    pub(crate) fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    /// Adds the facts of `other`.
    pub(crate) fn extend(&mut self, other: &Self) {
        self.0.extend(other.0.iter().map(|(name, value)| (name.clone(), value.clone())));
    }

    /// What a driver uses of its queues, by the features that it has accepted.
    pub(crate) fn accepted(&mut self, features: u64) {
        let uses = [(PACKED, feature::RING_PACKED), (IN_ORDER, feature::IN_ORDER)];
        for (name, _) in uses.into_iter().filter(|(_, bit)| features & bit != 0) {
            self.put(name, USED);
        }
    }

    /// The first fact that `new` has differently, in words.
    ///
    /// A disk that has grown is none: its guest is told.
    pub(crate) fn difference(&self, new: &Self) -> Option<String> {
        let number = |text: &str| text.parse::<u64>().ok();
        self.0.iter().find_map(|(name, value)| {
            let now = new.0.get(name).filter(|now| *now != value)?;
            let grows = name == SIZE && number(now) >= number(value);
            (!grows).then(|| format!("{name}: {value} for the guest, {now} here"))
        })
    }
}

/// What cannot be done if a device differs, and the way out.
pub(crate) const NOT_TAKEN: &str =
    "cannot take over: a guest would find another device; keep it as it is, or restart";
pub(crate) const NOT_RESUMED: &str = "cannot resume a session: a guest would find another device; keep it as it \
     was, or end the session by a restart of the holder";
