//! Reads the file of `paravane serve --config`.
//!
//! ```text
//!  text --toml--> tables with spans --one table: options by the same names--> clap --> DeviceCommand --> DeviceSpec
//!                        '------------- line of the table, of each key ----------------> the line of an error
//! ```
//! A key is an option of the command line without its dashes. So options and keys share one list,
//! one validation and one manual. Unknown keys are errors.
use super::args::DaemonArgs;
use super::shelf::Place;
use super::spec::{self, DeviceSpec};
use crate::kinds::endpoint::NOT_IN_FILES;
use crate::kinds::{self, DeviceCommand, KINDS};
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};
use std::ffi::OsString;
use std::ops::Range;
use std::path::{Path, PathBuf};
use thiserror::Error;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// Maximum size in bytes; a thousand devices take less.
const MAX_LEN: u64 = 1 << 20;

/// The contents of a file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Config {
    pub(crate) daemon: DaemonArgs,
    pub(crate) devices: Vec<DeviceSpec>,
}

/// A file that cannot be used.
#[derive(Debug, Error)]
pub(crate) enum ConfigError {
    /// The file cannot be read.
    #[error("{}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// A line is invalid.
    #[error("{}:{line}: {what}", path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// Counted from 1.
        line: usize,
        /// The problem, with its key if it has one.
        what: String,
    },
}

impl Config {
    /// Reads the file. Relative paths in it are relative to its directory.
    ///
    /// # Errors
    /// The file cannot be read or is invalid.
    pub(crate) fn read(path: &Path) -> Result<Self, ConfigError> {
        Self::parse(path, &Self::text(path)?)
    }

    /// The text of the file.
    ///
    /// # Errors
    /// The file cannot be read.
    pub(crate) fn text(path: &Path) -> Result<String, ConfigError> {
        let os = |source| ConfigError::Read { path: path.to_owned(), source };
        let len = std::fs::metadata(path).map_err(os)?.len();
        if len > MAX_LEN {
            return Err(os(std::io::Error::other(format!("file too large: {len} bytes, at most {MAX_LEN}"))));
        }
        std::fs::read_to_string(path).map_err(os)
    }

    /// Parses a file with this text; see [`Config::read`].
    ///
    /// # Errors
    /// The text is invalid.
    pub(crate) fn parse(path: &Path, text: &str) -> Result<Self, ConfigError> {
        let locate = |Problem { at, what }| ConfigError::Invalid {
            path: path.to_owned(),
            line: 1 + text.bytes().take(at).filter(|&byte| byte == b'\n').count(),
            what,
        };
        let base = path.parent().unwrap_or(Path::new(""));
        let document = DeTable::parse(text).map_err(|error| {
            locate(Problem::at(&error.span().unwrap_or(0..0), error.message().replace('\n', " ")))
        })?;
        read(document.get_ref(), base).map_err(locate)
    }
}

/// A problem and its position in the text.
#[derive(Debug)]
struct Problem {
    at: usize,
    what: String,
}

impl Problem {
    fn at(span: &Range<usize>, what: impl Into<String>) -> Self {
        Self { at: span.start, what: what.into() }
    }
}

type Table<'a> = Spanned<DeValue<'a>>;

fn read(document: &DeTable<'_>, base: &Path) -> Result<Config, Problem> {
    let mut config = Config::default();
    let mut tables = Vec::new();
    for (key, value) in document {
        let name = key.get_ref().as_ref();
        if name == "daemon" {
            let read = |matches: &ArgMatches| DaemonArgs::from_arg_matches(matches);
            config.daemon = from_table(value, DaemonArgs::augment_args, read)?;
            continue;
        }
        let Some(kind) = kinds::find(name) else {
            let tables: Vec<_> = KINDS.iter().map(|kind| format!("[[{}]]", kind.name)).collect();
            let (last, others) = tables.split_last().map_or(("", &[][..]), |(last, rest)| (last, rest));
            let what = format!("unknown table {name:?}: use [daemon], {} or {last}", others.join(", "));
            return Err(Problem::at(&key.span(), what));
        };
        let read = |matches: &ArgMatches| DeviceCommand::parse(kind, matches);
        let DeValue::Array(list) = value.get_ref() else {
            return Err(Problem::at(
                &key.span(),
                format!("write [[{}]]: devices are arrays of tables", key.get_ref()),
            ));
        };
        for table in list {
            tables.push((table, from_table(table, |command| (kind.options)(command), read)?));
        }
    }
    // In the order of the file, across kinds.
    tables.sort_by_key(|(table, _)| table.span().start);
    for (table, command) in &tables {
        let mut device = DeviceSpec::new(command).map_err(|(option, what)| of_option(table, option, what))?;
        if span_of(table, "name").is_none() {
            return Err(Problem::at(&table.span(), "missing key name"));
        }
        device.resolve(base);
        config.devices.push(device);
    }
    spec::check_together(&config.devices)
        .map_err(|fault| of_option(tables[fault.device].0, fault.option, fault.what))?;
    let daemon = &mut config.daemon;
    let control = daemon.control.as_mut().filter(|path| *path != Path::new("off"));
    let holder = daemon.holder.as_mut().filter(|path| Place::new(path) != Place::Manager);
    for path in daemon.allow.iter_mut().chain(control).chain(holder).chain(&mut daemon.cache) {
        *path = base.join(&path);
    }
    Ok(config)
}

/// A problem with an option, at its key; if that is missing, at its table's start.
fn of_option(table: &Table<'_>, option: &str, what: impl Into<String>) -> Problem {
    let span = span_of(table, option).unwrap_or_else(|| table.span());
    Problem::at(&span, format!("{option}: {}", what.into()))
}

fn span_of(table: &Table<'_>, option: &str) -> Option<Range<usize>> {
    let DeValue::Table(table) = table.get_ref() else { return None };
    table.iter().find(|(key, _)| key.get_ref() == option).map(|(key, _)| key.span())
}

/// Parses one table as options of the command line.
fn from_table<T>(
    table: &Table<'_>,
    options: impl Fn(Command) -> Command,
    read: impl Fn(&ArgMatches) -> Result<T, clap::Error>,
) -> Result<T, Problem> {
    let DeValue::Table(entries) = table.get_ref() else {
        return Err(Problem::at(&table.span(), "not a table"));
    };
    let command = Command::new("table").no_binary_name(true).disable_help_flag(true);
    let command = options(command);
    let mut words: Vec<OsString> = Vec::new();
    for (key, value) in entries {
        let name = key.get_ref().as_ref();
        let keys = || command.get_arguments().filter(|option| is_key(option));
        let Some(option) = keys().find(|option| option.get_long() == Some(name)) else {
            let known: Vec<_> = keys().filter_map(Arg::get_long).collect();
            let what = format!("unknown key {name:?}: this table has {}", known.join(", "));
            return Err(Problem::at(&key.span(), what));
        };
        to_words(option, name, value, &mut words).map_err(|what| Problem::at(&key.span(), what))?;
    }
    let matches = command.try_get_matches_from(words).map_err(|error| explain(table, &error))?;
    read(&matches).map_err(|error| explain(table, &error))
}

fn is_key(option: &Arg) -> bool {
    option.get_long().is_some_and(|name| !NOT_IN_FILES.contains(&name))
}

/// Appends `key = value` as an option of the command line.
fn to_words(
    option: &Arg,
    key: &str,
    value: &Spanned<DeValue<'_>>,
    words: &mut Vec<OsString>,
) -> Result<(), String> {
    let one = |value: &DeValue<'_>| match value {
        DeValue::String(text) => Ok(text.to_string()),
        // TOML allows underscores in numbers.
        DeValue::Integer(number) if number.radix() == 10 => Ok(number.as_str().replace('_', "")),
        _ => Err(format!("{key}: not a string or decimal integer")),
    };
    match (option.get_action(), value.get_ref()) {
        (ArgAction::SetTrue, DeValue::Boolean(true)) => words.push(format!("--{key}").into()),
        (ArgAction::SetTrue, DeValue::Boolean(false)) => {}
        (ArgAction::SetTrue, _) => return Err(format!("{key}: not true or false")),
        (ArgAction::Append, DeValue::Array(list)) => {
            for value in list {
                words.push(format!("--{key}={}", one(value.get_ref())?).into());
            }
        }
        (ArgAction::Append, _) => return Err(format!("{key}: not a list")),
        (_, value) => words.push(format!("--{key}={}", one(value)?).into()),
    }
    Ok(())
}

/// Converts an error of the command line to one of the file.
fn explain(table: &Table<'_>, error: &clap::Error) -> Problem {
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => text.clone(),
        Some(ContextValue::Strings(list)) => list.join(", "),
        _ => String::new(),
    };
    // "--queues <N>" and "<--socket <PATH>|--connect <PATH>>" become "queues" and "socket or
    // connect".
    let keys = |text: &str| {
        let names = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '-'));
        let names = names.filter_map(|name| name.strip_prefix("--"));
        names.filter(|name| !NOT_IN_FILES.contains(name)).collect::<Vec<_>>().join(" or ")
    };
    let key = keys(&text(ContextKind::InvalidArg));
    match error.kind() {
        ErrorKind::MissingRequiredArgument => Problem::at(&table.span(), format!("missing key {key}")),
        ErrorKind::ArgumentConflict => {
            let other = keys(&text(ContextKind::PriorArg));
            of_option(table, &key, format!("excludes {other}: remove one of them"))
        }
        ErrorKind::InvalidValue => {
            let (value, known) = (text(ContextKind::InvalidValue), text(ContextKind::ValidValue));
            of_option(table, &key, format!("unknown value {value:?}: use one of {known}"))
        }
        _ => {
            let why = std::error::Error::source(error)
                .map_or_else(|| error.kind().to_string(), ToString::to_string);
            of_option(table, &key, format!("{:?}: {why}", text(ContextKind::InvalidValue)))
        }
    }
}

#[cfg(test)]
mod tests;
