//! Manual pages and shell completions, from the same words as `--help`.
use crate::Failure;
use crate::args::{Cli, ManualArgs};
use anyhow::Context;
use clap::CommandFactory;
use clap_complete::{Shell, generate_to};
use std::process::ExitCode;

/// The shells for which Debian has a place for completions.
const SHELLS: [Shell; 3] = [Shell::Bash, Shell::Zsh, Shell::Fish];

pub(crate) fn main(args: &ManualArgs) -> Result<ExitCode, Failure> {
    let directory = &args.directory;
    let named = || directory.display().to_string();
    std::fs::create_dir_all(directory).with_context(named)?;
    clap_mangen::generate_to(Cli::command(), directory).with_context(named)?;
    for shell in SHELLS {
        generate_to(shell, &mut Cli::command(), "paravane", directory).with_context(named)?;
    }
    Ok(ExitCode::SUCCESS)
}
