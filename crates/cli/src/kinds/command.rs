//! The subcommands of `paravane serve`, one for each kind.
use super::endpoint::EndpointArgs;
use super::kind::{Arguments, Kind};
use super::{KINDS, find};
use clap::error::ErrorKind;
use clap::{ArgMatches, Command, FromArgMatches, Subcommand};

/// One device on the command line, or in a file.
#[derive(Debug)]
pub(crate) struct DeviceCommand {
    pub(crate) kind: &'static Kind,
    pub(crate) endpoint: EndpointArgs,
    pub(crate) arguments: Box<dyn Arguments>,
}

impl DeviceCommand {
    /// Reads the options of a device of this kind.
    ///
    /// # Errors
    /// An option is invalid.
    pub(crate) fn parse(kind: &'static Kind, matches: &ArgMatches) -> Result<Self, clap::Error> {
        Ok(Self {
            kind,
            endpoint: EndpointArgs::from_arg_matches(matches)?,
            arguments: (kind.parse)(matches)?,
        })
    }

    /// Reads the options of a device of a machine, as words of the command line: none of an endpoint.
    ///
    /// # Errors
    /// An option is invalid.
    #[cfg(feature = "run")]
    pub(crate) fn for_machine(
        kind: &'static Kind,
        words: impl Iterator<Item = String>,
    ) -> Result<Self, clap::Error> {
        let command = Command::new(kind.name).no_binary_name(true).disable_help_flag(true);
        let command = EndpointArgs::unused((kind.options)(command));
        let words: Vec<_> = words.collect();
        let of_endpoint = |word: &&String| {
            let name = word.trim_start_matches("--").split('=').next();
            command.get_arguments().any(|arg| arg.is_hide_set() && arg.get_long() == name)
        };
        if let Some(word) = words.iter().find(of_endpoint) {
            let mut known = command.clone();
            return Err(known.error(ErrorKind::UnknownArgument, format!("unexpected argument '{word}'")));
        }
        Self::parse(kind, &command.try_get_matches_from(words)?)
    }
}

impl FromArgMatches for DeviceCommand {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let named = matches.subcommand().and_then(|(name, matches)| Some((find(name)?, matches)));
        let (kind, matches) = named.ok_or_else(|| clap::Error::new(ErrorKind::MissingSubcommand))?;
        Self::parse(kind, matches)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Subcommand for DeviceCommand {
    fn augment_subcommands(command: Command) -> Command {
        KINDS
            .iter()
            .fold(command, |command, kind| command.subcommand((kind.options)(Command::new(kind.name))))
    }

    fn augment_subcommands_for_update(command: Command) -> Command {
        Self::augment_subcommands(command)
    }

    fn has_subcommand(name: &str) -> bool {
        find(name).is_some()
    }
}
