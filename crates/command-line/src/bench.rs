//! The command line of `paravane bench`, which is that of the program `paravane-bench`.
use crate::LogArgs;
use crate::sections::{NONE, RUST_LOG, Sections, USAGE, with_sections};
use clap::{Args, Command, FromArgMatches, ValueEnum};
use std::ffi::OsString;
use std::path::PathBuf;

/// Name of the program.
pub const PROGRAM: &str = "paravane-bench";

/// Measure Paravane beside other implementations, in interleaved rounds
///
/// Prints the median of the rounds for each case and subject. `paravane bench list` lists the
/// benchmarks, `paravane bench all` runs them one after another.
#[derive(Debug, Args)]
pub struct BenchArgs {
    /// Benchmark to run, `all`, or `list`
    pub name: String,
    /// Number of interleaved rounds, at least 5
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub rounds: u32,
    /// Run only cases whose path contains TEXT
    #[arg(long, value_name = "TEXT")]
    pub filter: Option<String>,
    /// Run fewer cases with shorter samples (transport, notify, blk, net, density)
    #[arg(long)]
    pub quick: bool,
    /// How the client waits for completions (blk, density)
    #[arg(long, value_enum, value_name = "HOW", default_value_t = Client::Event)]
    pub client: Client,
    /// Keep the CPUs of server and client busy with another thread (blk)
    #[arg(long)]
    pub contended: bool,
    /// Print the rows as a JSON list
    #[arg(long)]
    pub json: bool,
    /// Write a page with plots, and all numbers as JSON and CSV, to DIR
    ///
    /// DIR is created if missing. index.html needs no other file and no network.
    #[arg(long, value_name = "DIR")]
    pub report: Option<PathBuf>,
    /// Compare with the results.json of an earlier run, or with `other`
    ///
    /// Exits with 3 if a figure is worse beyond the noise. `other` compares with the build of
    /// PARAVANE_BENCH_OTHER in the same run, round by round (blk, net).
    #[arg(long, value_name = "FILE")]
    pub baseline: Option<PathBuf>,
    /// Least change in percent that --baseline reports
    #[arg(long, value_name = "PERCENT", default_value_t = 5.0, value_parser = percent, requires = "baseline")]
    pub threshold: f64,
}

/// A share of 0 to 1000 percent.
fn percent(text: &str) -> Result<f64, String> {
    let value: f64 = text.parse().map_err(|_| "not a number".to_owned())?;
    if (0.0..=1000.0).contains(&value) { Ok(value) } else { Err("not between 0 and 1000".to_owned()) }
}

/// How the client waits for completions.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum Client {
    /// Wait for an eventfd
    Event,
    /// Poll the used ring
    Poll,
}

/// What help and manual pages say beside the options.
pub const SECTIONS: Sections = Sections {
    command: "paravane-bench",
    examples: &[
        ("paravane bench list", "List the benchmarks."),
        ("paravane bench blk --quick --filter tmpfs", "Run some cases of a benchmark with short samples."),
        ("paravane bench all --report out", "Run everything and write out/index.html."),
        (
            "paravane bench blk --baseline out/results.json",
            "Compare with an earlier run; exit with 3 if a figure is worse.",
        ),
    ],
    exit: &[
        (0, "All cases ran; with --baseline, no figure is worse beyond the noise."),
        (1, "A case failed, or the report could not be written."),
        USAGE,
        (3, "With --baseline: a figure is worse beyond the noise."),
    ],
    environment: &[
        RUST_LOG,
        (
            "PARAVANE_BENCH_OTHER",
            "Another paravane binary to compare with (benchmarks blk, net and density).",
        ),
    ],
    see_also: &["paravane(1)"],
    ..NONE
};

/// The command line of the program, with its sections.
#[must_use]
pub fn command() -> Command {
    let program = Command::new(PROGRAM).bin_name("paravane bench").version(env!("CARGO_PKG_VERSION"));
    let command = BenchArgs::augment_args(LogArgs::augment_args(program.max_term_width(100)));
    with_sections(command, |name| (name == SECTIONS.command).then_some(const { &SECTIONS }))
}

/// Parses a command line.
///
/// # Errors
/// It is invalid, or asks for the help or version.
pub fn parse(words: impl Iterator<Item = OsString>) -> Result<(LogArgs, BenchArgs), clap::Error> {
    let mut command = command();
    let matches = command.try_get_matches_from_mut(words)?;
    let parsed =
        LogArgs::from_arg_matches(&matches).and_then(|log| Ok((log, BenchArgs::from_arg_matches(&matches)?)));
    parsed.map_err(|error| error.format(&mut command))
}
