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
    for page in std::fs::read_dir(directory).with_context(named)? {
        let page = page.with_context(named)?.path();
        if page.extension().is_some_and(|extension| extension == "1") {
            let named = || page.display().to_string();
            let text = std::fs::read_to_string(&page).with_context(named)?;
            std::fs::write(&page, ragged_synopsis(&text)).with_context(named)?;
        }
    }
    for shell in SHELLS {
        generate_to(shell, &mut Cli::command(), "paravane", directory).with_context(named)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The page with a synopsis of unbroken words, at the left. Alternatives are one long word, between which and the margin troff
/// finds nothing to stretch.
fn ragged_synopsis(page: &str) -> String {
    page.replacen(".SH SYNOPSIS\n", ".SH SYNOPSIS\n.nh\n.ad l\n", 1).replacen(
        ".SH DESCRIPTION\n",
        ".ad b\n.hy\n.SH DESCRIPTION\n",
        1,
    )
}
