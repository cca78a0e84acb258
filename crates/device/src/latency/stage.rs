//! Stages of a request.
use std::ffi::CStr;

/// Stages of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// Waited in the ring for the thread; for a frame to the guest, the frame waited for a buffer.
    Ring,
    /// Held by a rate limit.
    Throttled,
    /// Host I/O: taken from the ring (or let go by the limit), until the host was done.
    Host,
    /// Done by the host, until the used buffer was published and signalled.
    Interrupt,
}

impl Stage {
    /// All stages, in the order of a request.
    pub const ALL: [Self; 4] = [Self::Ring, Self::Throttled, Self::Host, Self::Interrupt];

    /// Name in reports: "ring", "throttled", "host", "interrupt".
    #[must_use]
    pub fn name(self) -> &'static str {
        self.c_name().to_str().unwrap_or_default()
    }

    /// The name as probes report it.
    pub(super) fn c_name(self) -> &'static CStr {
        match self {
            Self::Ring => c"ring",
            Self::Throttled => c"throttled",
            Self::Host => c"host",
            Self::Interrupt => c"interrupt",
        }
    }
}
