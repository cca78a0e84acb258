//! The first error of a driver, which stays until the driver is dropped.
use crate::DriverError;

/// Holds the first error of a driver.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Latch(Option<DriverError>);

impl Latch {
    /// The latched error, if there is one.
    pub(crate) fn check(self) -> Result<(), DriverError> {
        self.0.map_or(Ok(()), Err)
    }

    /// Whether an error has latched.
    pub(crate) fn is_set(self) -> bool {
        self.0.is_some()
    }

    /// Latches the first error, and returns it.
    pub(crate) fn set(&mut self, error: impl Into<DriverError>) -> DriverError {
        *self.0.get_or_insert(error.into())
    }
}
