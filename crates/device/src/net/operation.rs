//! Operations of network cards.
use crate::latency::Operation;

/// A command of the control queue.
pub static OTHER: Operation = Operation::new(0, c"other", "Commands");
/// A frame from the guest.
pub static FRAME_OUT: Operation = Operation::new(1, c"frame_out", "Frames from the guest");
/// A frame to the guest.
pub static FRAME_IN: Operation = Operation::new(2, c"frame_in", "Frames to the guest");
