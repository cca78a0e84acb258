//! The level of the log.
use clap::{ArgAction, Args};

/// How much is logged.
#[derive(Clone, Copy, Debug, Args)]
#[command(about = None, long_about = None)]
pub struct LogArgs {
    /// Log more on stderr: -v info, -vv debug, -vvv trace [default: warn; serve, hold: info]
    ///
    /// `serve` and `hold` start at info: there, -v is debug and -vv is trace. RUST_LOG overrides the level.
    #[arg(short, long, action = ArgAction::Count, global = true, display_order = 998)]
    pub verbose: u8,
}
