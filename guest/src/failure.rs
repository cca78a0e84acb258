//! Errors of drivers and of set-up, as the report has them.
use crate::report::Failure;
use paravane_driver::DriverError;
use paravane_spec::builtin::error;

/// Failure of a job that is impossible.
pub(crate) fn refusal(reason: &'static str) -> Failure {
    Failure { error: error::SETUP, detail: 0, sector: 0, reason }
}

/// Failure of a network job: a frame that is not as it must be.
pub(crate) fn wrong(detail: u64, reason: &'static str) -> Failure {
    Failure { error: error::MISMATCH, detail, sector: 0, reason }
}

/// An error of a driver that is being set up.
pub(crate) fn set_up(driver: DriverError) -> Failure {
    let (code_of_error, reason) = match driver {
        DriverError::Memory { .. } => (error::MEMORY, "the guest has too little memory for the job"),
        DriverError::Magic(_)
        | DriverError::Version(_)
        | DriverError::DeviceId { .. }
        | DriverError::Function { .. } => (error::SETUP, "no such device"),
        DriverError::Features(_) | DriverError::FeaturesRefused => {
            (error::SETUP, "driver and device agree on no features")
        }
        DriverError::Reset => (error::SETUP, "the device does not reset"),
        _ => (error::SETUP, "the device cannot be set up"),
    };
    Failure { error: code_of_error, detail: code(&driver), sector: 0, reason }
}

/// A driver's error as a number; 0: it has none.
///
/// For [`paravane_spec::builtin::DiskReport::error_detail`].
pub(crate) fn code(error: &DriverError) -> u64 {
    match error {
        DriverError::Magic(_) => 1,
        DriverError::Version(_) => 2,
        DriverError::DeviceId { .. } => 3,
        DriverError::Features(_) => 4,
        DriverError::FeaturesRefused => 5,
        DriverError::Reset => 6,
        DriverError::Queue(_) => 7,
        DriverError::Memory { .. } => 8,
        DriverError::NeedsReset => 9,
        DriverError::Config(_) => 10,
        DriverError::Ring(_) => 11,
        DriverError::ConfigUnstable => 12,
        DriverError::Request(_) => 13,
        DriverError::ShortAnswer { .. } => 14,
        DriverError::QueueReset(_) => 15,
        DriverError::Message(_) => 20,
        DriverError::Buffers { .. } => 21,
        DriverError::Function { .. } => 16,
        DriverError::Capabilities(_) => 17,
        DriverError::Structure(_) => 18,
        DriverError::Vector { .. } => 19,
        _ => 0,
    }
}

impl From<DriverError> for Failure {
    /// An error of a driver at work. What happens at set-up has another code.
    fn from(error: DriverError) -> Self {
        let reason = match error {
            DriverError::NeedsReset => "the device needs a reset",
            DriverError::ShortAnswer { .. } => "the device reports success with too few bytes",
            DriverError::Request(reason) => reason,
            DriverError::ConfigUnstable => "the device's configuration keeps changing",
            _ => "the device broke the ring protocol",
        };
        Self { error: error::RING, detail: code(&error), sector: 0, reason }
    }
}
