//! Rate limits.
use super::checked::OptionError;
use crate::size::Size;
use clap::Args;
use paravane_device::{Rate, RateLimit};
use std::num::NonZeroU64;

/// Rate limits of a device, shared by its queues.
///
/// A network card has them for each direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Args)]
#[command(next_help_heading = "Rate limits")]
pub(crate) struct LimitArgs {
    /// Maximum bytes of data per second; network: in each direction [default: no limit]
    #[arg(long, value_name = "SIZE")]
    pub(crate) bytes_per_second: Option<Size>,
    /// Burst in bytes after an idle time [default: 0.1 s of --bytes-per-second]
    #[arg(long, value_name = "SIZE", requires = "bytes_per_second")]
    pub(crate) burst_bytes: Option<Size>,
    /// Maximum requests or frames per second; network: in each direction [default: no limit]
    #[arg(long, value_name = "N")]
    pub(crate) ops_per_second: Option<u64>,
    /// Burst in requests or frames after an idle time [default: 0.1 s of --ops-per-second]
    #[arg(long, value_name = "N", requires = "ops_per_second")]
    pub(crate) burst_ops: Option<u64>,
}

impl LimitArgs {
    /// The limits of a device that has been checked.
    pub(crate) fn rates(&self) -> RateLimit {
        self.check().unwrap_or_default()
    }

    /// The limits.
    ///
    /// # Errors
    /// A rate is 0.
    pub(crate) fn check(&self) -> Result<RateLimit, OptionError> {
        let rate = |option, per_second: Option<u64>, burst: Option<u64>| {
            let Some(per_second) = per_second else { return Ok(None) };
            let none = || (option, "0 would block all traffic: omit the option for no limit".to_owned());
            let per_second = NonZeroU64::new(per_second).ok_or_else(none)?;
            Ok(Some(Rate { per_second, burst: burst.unwrap_or(per_second.get() / 10) }))
        };
        let bytes = |size: Option<Size>| size.map(|Size(bytes)| bytes);
        Ok(RateLimit {
            bytes: rate("bytes-per-second", bytes(self.bytes_per_second), bytes(self.burst_bytes))?,
            ops: rate("ops-per-second", self.ops_per_second, self.burst_ops)?,
        })
    }
}
