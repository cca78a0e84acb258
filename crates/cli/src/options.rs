//! Options of a command as data, for manual pages and the reference.
use clap::{Arg, ArgAction, Command};

/// One option or argument.
pub(crate) struct OptionText {
    /// "depth" of `--depth`, or the name of an argument.
    pub(crate) name: String,
    /// "-v, --verbose", "--depth", "--image, --blk-file", or "NAME" of an argument.
    pub(crate) flags: String,
    /// "N" of `--depth <N>`; `None`: a switch or an argument.
    pub(crate) value: Option<String>,
    pub(crate) default: Option<String>,
    /// Heading of its group; `None`: the options of the command itself.
    pub(crate) heading: Option<String>,
    /// First sentence, without a period at its end.
    pub(crate) summary: String,
    /// Further paragraphs.
    pub(crate) details: Vec<String>,
    /// Possible values and their meanings.
    pub(crate) values: Vec<(String, String)>,
    /// The value may be left out.
    pub(crate) optional_value: bool,
    /// Type of the key in a file of devices.
    pub(crate) toml_type: &'static str,
    pub(crate) required: bool,
}

impl OptionText {
    /// "N", or "[=N]" if the value may be left out; `None`: it has none.
    pub(crate) fn value(&self) -> Option<String> {
        let value = self.value.as_ref()?;
        Some(if self.optional_value { format!("[={value}]") } else { value.clone() })
    }
}

/// The visible options and arguments of a command, in the order of `--help`.
pub(crate) fn of(command: &Command) -> Vec<OptionText> {
    let shown = |arg: &&Arg| !arg.is_hide_set() && !matches!(arg.get_id().as_str(), "help" | "version");
    command.get_arguments().filter(shown).map(option).collect()
}

fn option(arg: &Arg) -> OptionText {
    let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
    let (summary, said) = split_default(&help);
    let given: Vec<_> = arg.get_default_values().iter().map(|value| value.to_string_lossy()).collect();
    let takes_value = !matches!(arg.get_action(), ArgAction::SetTrue | ArgAction::Count);
    let long_help = arg.get_long_help().map(ToString::to_string).unwrap_or_default();
    let values = match takes_value {
        true => arg.get_possible_values(),
        false => Vec::new(),
    };
    let value_name =
        arg.get_value_names().map(|names| names.iter().map(ToString::to_string).collect::<Vec<_>>());
    let value_name =
        value_name.map_or_else(|| arg.get_id().to_string().to_uppercase(), |names| names.join(" "));
    let name = arg.get_long().map_or_else(|| arg.get_id().to_string(), ToOwned::to_owned);
    let aliases = arg.get_visible_aliases().unwrap_or_default();
    let aliases: String = aliases.iter().map(|alias| format!(", --{alias}")).collect();
    let flags = match (arg.get_short(), arg.get_long()) {
        (Some(short), Some(long)) => format!("-{short}, --{long}{aliases}"),
        (None, Some(long)) => format!("--{long}{aliases}"),
        (Some(short), None) => format!("-{short}"),
        (None, None) => value_name.clone(),
    };
    OptionText {
        flags,
        toml_type: toml_type(arg, &value_name),
        name,
        value: (takes_value && !arg.is_positional()).then_some(value_name),
        default: if given.is_empty() || !takes_value { said } else { Some(given.join(",")) },
        heading: arg.get_help_heading().map(ToOwned::to_owned),
        summary,
        details: long_help.split("\n\n").skip(1).map(ToOwned::to_owned).collect(),
        values: values
            .iter()
            .map(|value| {
                (value.get_name().to_owned(), value.get_help().map(ToString::to_string).unwrap_or_default())
            })
            .collect(),
        optional_value: arg.get_num_args().is_some_and(|range| range.min_values() == 0) && takes_value,
        required: arg.is_required_set(),
    }
}

/// Splits "text [default: value]".
fn split_default(help: &str) -> (String, Option<String>) {
    match help.strip_suffix(']').and_then(|help| help.rsplit_once(" [default: ")) {
        Some((text, default)) => (text.to_owned(), Some(default.to_owned())),
        None => (help.to_owned(), None),
    }
}

fn toml_type(arg: &Arg, value_name: &str) -> &'static str {
    match (arg.get_action(), value_name) {
        (ArgAction::SetTrue, _) => "boolean",
        (ArgAction::Append, _) => "list of strings",
        (_, "SIZE") => "size",
        (_, "N" | "SECONDS" | "MICROSECONDS" | "LINES" | "BYTES") => "integer",
        _ => "string",
    }
}

/// All commands that operators see, with their names with dashes, parents first.
pub(crate) fn commands(root: &Command) -> Vec<(String, Command)> {
    let mut all = all_commands(root);
    all.retain(|(_, command)| !command.is_hide_set());
    all
}

/// The same with those that `--help` does not list.
pub(crate) fn all_commands(root: &Command) -> Vec<(String, Command)> {
    fn walk(command: &Command, name: String, all: &mut Vec<(String, Command)>) {
        all.push((name.clone(), command.clone()));
        for below in command.get_subcommands().filter(|below| below.get_name() != "help") {
            walk(below, format!("{name}-{}", below.get_name()), all);
        }
    }
    let mut root = root.clone();
    root.build();
    let mut all = Vec::new();
    walk(&root, root.get_name().to_owned(), &mut all);
    all
}

/// Usage of a command: `paravane run [OPTIONS]`.
pub(crate) fn usage(command: &Command) -> String {
    let usage = command.clone().render_usage().to_string();
    usage.trim_start_matches("Usage:").split_whitespace().collect::<Vec<_>>().join(" ")
}

/// First sentence and further paragraphs of a command's description.
pub(crate) fn about(command: &Command) -> (String, Vec<String>) {
    let about = command.get_about().map(ToString::to_string).unwrap_or_default();
    let long = command.get_long_about().map(ToString::to_string).unwrap_or_default();
    (about, long.split("\n\n").skip(1).map(ToOwned::to_owned).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Cli;
    use clap::CommandFactory;

    /// Style: a summary of a line, values that are explained, numbers with units.
    #[test]
    fn every_option_has_a_summary_of_a_line_and_explained_values() {
        for (command, clap) in commands(&Cli::command()) {
            assert!(about(&clap).0.len() <= 80, "{command}: {}", about(&clap).0);
            for option in of(&clap) {
                let OptionText { name, summary, values, .. } = &option;
                assert!(!summary.is_empty() && !summary.ends_with('.'), "{command} {name}: {summary}");
                assert!(summary.len() <= 96, "{command} {name}: {summary}");
                assert!(values.iter().all(|(_, meaning)| !meaning.is_empty()), "{command} {name}");
            }
        }
    }
}
