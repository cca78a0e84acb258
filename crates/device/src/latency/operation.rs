//! The operations of a device.
use std::ffi::CStr;

/// An operation whose latency is measured: an entry of the table that its device brings.
#[derive(Debug, PartialEq, Eq)]
pub struct Operation {
    index: usize,
    /// The name as probes report it.
    pub(super) name: &'static CStr,
    about: &'static str,
}

impl Operation {
    /// Most operations of a device.
    pub const MOST: usize = 6;

    /// Entry `index` of a table, with its name in reports and its meaning.
    ///
    /// # Panics
    /// At compile time: the index is [`Operation::MOST`] or more, or the name is not ASCII.
    #[must_use]
    pub const fn new(index: usize, name: &'static CStr, about: &'static str) -> Self {
        assert!(index < Self::MOST && name.to_bytes().is_ascii());
        Self { index, name, about }
    }

    /// Its index in the table.
    #[must_use]
    pub const fn index(&self) -> usize {
        self.index
    }

    /// Name in reports: "read", "write_zeroes", "frame_in".
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.name.to_str().unwrap_or_default()
    }

    /// What it is, for operators.
    #[must_use]
    pub fn about(&self) -> &'static str {
        self.about
    }
}
