//! What is known of a device's queues.

/// How a queue's kicks arrive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KickPath {
    /// By exits: no ioeventfds were given, or queues share an address.
    #[default]
    Exits,
    /// By an ioeventfd.
    IoEventFd,
    /// By exits, since the host refused an ioeventfd.
    Refused,
}

impl KickPath {
    /// Word for reports: `exits`, `ioeventfd` or `refused`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Exits => "exits",
            Self::IoEventFd => "ioeventfd",
            Self::Refused => "refused",
        }
    }
}

/// A queue that the driver has started at least once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct QueueStatus {
    /// Queue index.
    pub queue: u16,
    /// Whether it was started and not stopped since.
    pub live: bool,
    /// Index of the I/O thread that has it, or had it last.
    pub thread: usize,
    /// Changes of thread.
    pub moves: u64,
    /// How kicks arrive, since the last start.
    pub kicks_by: KickPath,
    /// Kicks that came as exits.
    pub exit_kicks: u64,
    /// Chains taken plus chains completed, since the first start.
    pub work: u64,
}
