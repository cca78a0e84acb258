//! What is measured: the cases and their paths.

/// A case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Case {
    /// Request and response, in bytes of payload.
    Exchange { request: u32, response: u32 },
    /// Reads of 4 KiB, `depth` in flight.
    Read { depth: u32 },
}

impl Case {
    /// Every case.
    pub(super) const ALL: [Self; 4] = [
        Self::Exchange { request: 32, response: 1024 },
        Self::Exchange { request: 1, response: 1 },
        Self::Read { depth: 1 },
        Self::Read { depth: 32 },
    ];
}

impl std::fmt::Display for Case {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Exchange { request, response } => write!(f, "net/{request}/{response}"),
            Self::Read { depth } => write!(f, "blk/read4k/depth{depth}"),
        }
    }
}
