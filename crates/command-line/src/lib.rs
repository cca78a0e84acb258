//! What the programs `paravane` and `paravane-bench` share of their command lines and output.
//!
//! ```text
//! command line --usage--> one line    result --output, wrap--> stdout    error --Failure, one_line--> exit status
//!
//! sections: the end of --help, and of manual pages    bench: the command line of `paravane bench`
//! ```
//! `paravane bench` starts `paravane-bench`, so both must know its options: one to complete, document
//! and pass them, the other one to obey them.
mod failure;
mod log_args;
mod usage;

pub mod bench;
pub mod output;
pub mod sections;
pub mod wrap;

pub use failure::{Failure, one_line};
pub use log_args::LogArgs;
pub use usage::usage;
