//! The daemon's options from command line and file, and what a new file changes of them.
use super::args::DaemonArgs;
use crate::log;
use std::num::NonZeroU32;

/// Default log lines per second and device.
const LOG_RATE: u32 = 1;

/// An option that both the command line and the file may give.
trait Layer {
    /// The value where `self` is from the command line, and `below` from the file.
    fn over(self, below: Self) -> Self;
}

impl<T> Layer for Option<T> {
    fn over(self, below: Self) -> Self {
        self.or(below)
    }
}

impl Layer for bool {
    fn over(self, below: Self) -> Self {
        self || below
    }
}

impl<T> Layer for Vec<T> {
    fn over(self, mut below: Self) -> Self {
        below.extend(self);
        below
    }
}

/// Writes code for every option; an incomplete list does not compile.
macro_rules! each_option {
    ($($option:ident),*) => {
        impl DaemonArgs {
            /// The daemon's options: those of the command line before those of the file.
            pub(super) fn over(self, file: Self) -> Self {
                Self { $($option: self.$option.over(file.$option)),* }
            }

            /// Names of the options that differ.
            pub(super) fn differing(&self, other: &Self) -> Vec<String> {
                let all = [$((stringify!($option), self.$option != other.$option)),*];
                all.iter().filter(|(_, differs)| *differs).map(|(name, _)| name.replace('_', "-")).collect()
            }
        }
    };
}

each_option!(
    control,
    metrics,
    holder,
    user,
    allow,
    no_sandbox,
    log_format,
    log_level,
    log_rate,
    max_client_memory,
    any_memory_file,
    max_memory,
    max_mappings,
    io_threads,
    cache,
    cache_size,
    stop_timeout
);

impl DaemonArgs {
    /// Level of the log without -v.
    pub(super) fn log_level(&self) -> log::Level {
        self.log_level.unwrap_or(log::Level::INFO)
    }

    /// Log lines per second and device; `None`: no limit.
    pub(super) fn log_rate(&self, verbose: u8) -> Option<NonZeroU32> {
        // -v disables the limit.
        NonZeroU32::new(self.log_rate.unwrap_or(if verbose == 0 { LOG_RATE } else { 0 }))
    }
}
