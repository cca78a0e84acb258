//! `paravane bench`.
use crate::args::{BenchArgs, Client};
use crate::failure::Failure;
use crate::{output, wrap};
use paravane_bench::{BenchError, Options};
use std::io::{IsTerminal, Write as _};
use std::process::ExitCode;

pub(crate) fn main(args: &BenchArgs) -> Result<ExitCode, Failure> {
    if args.name == "list" {
        let mut out = String::new();
        for benchmark in paravane_bench::list() {
            out += &wrap::row(benchmark.name, 12, benchmark.summary, wrap::columns());
        }
        output::print(&out)?;
        return Ok(ExitCode::SUCCESS);
    }
    let client = match args.client {
        Client::Event => paravane_bench::Client::Event,
        Client::Poll => paravane_bench::Client::Poll,
    };
    let options = Options { rounds: args.rounds, filter: args.filter.clone(), quick: args.quick, client };
    let show = std::io::stderr().is_terminal();
    let mut progress = |what: &str| {
        if show {
            // Failure to show progress is no error.
            let _ = write!(std::io::stderr(), "\r\x1b[K{what}");
        }
    };
    let result = paravane_bench::run(&args.name, &options, &mut progress);
    progress("");
    let rows = result.map_err(|error| match error {
        BenchError::Unknown(_) | BenchError::NoCase(_) => Failure::request(error),
        _ => error.into(),
    })?;
    if args.json {
        output::print_json(&rows)?;
    } else {
        output::print(&paravane_bench::table(&rows))?;
    }
    Ok(ExitCode::SUCCESS)
}
