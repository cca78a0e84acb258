//! What help, manual pages and the reference say of a command beside its options.
use crate::wrap;
use clap::Command;
use std::fmt::Write;

/// More about one command.
#[derive(Clone, Copy, Debug)]
pub struct Sections {
    /// Name with dashes: "paravane-serve".
    pub command: &'static str,
    /// Command lines, each with a short description.
    pub examples: Table,
    /// Statuses and their meanings.
    pub exit: &'static [(u8, &'static str)],
    /// Signals and what they do.
    pub signals: Table,
    /// Files that the command uses.
    pub files: Table,
    /// Variables that the command reads.
    pub environment: Table,
    /// Manual pages, with their chapters.
    pub see_also: &'static [&'static str],
}

/// Names and their meanings.
pub type Table = &'static [(&'static str, &'static str)];

/// Columns of the sections in `--help`. Narrower terminals wrap further.
const HELP_COLUMNS: usize = 80;

/// The rows of one section.
pub type Rows = Vec<(String, &'static str)>;

/// Exit status of a request that was refused.
pub const USAGE: (u8, &str) = (2, "The request was invalid; nothing was changed.");
/// Variable that every command reads.
pub const RUST_LOG: (&str, &str) = ("RUST_LOG", "Level of the log, also for each crate; overrides -v.");

/// A command without any section.
pub const NONE: Sections = Sections {
    command: "",
    examples: &[],
    exit: &[],
    signals: &[],
    files: &[],
    environment: &[],
    see_also: &[],
};

impl Sections {
    /// Heading and rows of each section that has any, in the order of man-pages(7).
    #[must_use]
    pub fn all(&self) -> Vec<(&'static str, Rows)> {
        let rows =
            |table: Table| -> Rows { table.iter().map(|&(name, text)| (name.to_owned(), text)).collect() };
        let exit = self.exit.iter().map(|&(status, text)| (status.to_string(), text)).collect();
        let all = [
            ("Signals", rows(self.signals)),
            ("Exit status", exit),
            ("Environment", rows(self.environment)),
            ("Files", rows(self.files)),
            ("Examples", rows(self.examples)),
        ];
        all.into_iter().filter(|(_, rows)| !rows.is_empty()).collect()
    }

    /// The end of `--help`: examples first, as operators look for those.
    fn help(&self) -> String {
        let mut out = String::new();
        // Writing to a String cannot fail.
        for (command, _) in self.examples {
            let first = if out.is_empty() { "Examples:\n" } else { "" };
            let _ = writeln!(out, "{first}  {command}");
        }
        for (heading, rows) in self.all().into_iter().filter(|&(heading, _)| heading != "Examples") {
            let _ = write!(out, "\n{heading}:\n");
            let width = rows.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
            for (name, text) in rows {
                out += &wrap::row(&format!("  {name}"), width + 4, text, HELP_COLUMNS);
            }
        }
        out.trim_end().to_owned()
    }
}

/// The command line with the sections of `of` at the end of each command's `--help`.
///
/// `of` gets names with dashes: "paravane-serve".
#[must_use]
pub fn with_sections(command: Command, of: impl Fn(&str) -> Option<&'static Sections>) -> Command {
    extend(command, "", &of)
}

fn extend(command: Command, parent: &str, of: &dyn Fn(&str) -> Option<&'static Sections>) -> Command {
    let name = match parent {
        "" => command.get_name().to_owned(),
        parent => format!("{parent}-{}", command.get_name()),
    };
    let command = match of(&name) {
        Some(sections) => command.after_long_help(sections.help()),
        None => command,
    };
    command.mut_subcommands(|subcommand| extend(subcommand, &name, of))
}
