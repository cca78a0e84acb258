//! What the specification forbids.

/// Access that the specification forbids the driver.
pub(crate) struct Violation;
