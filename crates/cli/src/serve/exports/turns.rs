//! Snapshots that are on their way.

/// A snapshot that is on its way.
pub(super) struct Turn {
    pub(super) device: String,
    /// The image is being replaced.
    pub(super) is_taking: bool,
}

/// The snapshots that are on their way, at most one for a device.
#[derive(Default)]
pub(super) struct Turns(pub(super) Vec<Turn>);

impl Turns {
    /// A device whose image is being replaced.
    pub(super) fn taking(&self) -> Option<&str> {
        self.0.iter().find(|turn| turn.is_taking).map(|turn| turn.device.as_str())
    }
}
