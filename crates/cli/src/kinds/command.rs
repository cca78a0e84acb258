//! The subcommands of `paravane serve`, one for each kind.
use super::endpoint::EndpointArgs;
use super::kind::{Arguments, Kind};
use super::{KINDS, find};
use clap::error::ErrorKind;
use clap::{ArgMatches, Command, FromArgMatches, Subcommand};

/// One device on the command line, or in a file.
#[derive(Debug)]
pub(crate) struct DeviceCommand {
    kind: &'static dyn Kind,
    pub(crate) arguments: Box<dyn Arguments>,
}

impl DeviceCommand {
    /// Reads the options of a device of this kind.
    ///
    /// # Errors
    /// An option is invalid.
    pub(crate) fn parse(kind: &'static dyn Kind, matches: &ArgMatches) -> Result<Self, clap::Error> {
        Ok(Self { kind, arguments: kind.parse(matches)? })
    }

    pub(crate) fn kind(&self) -> &'static dyn Kind {
        self.kind
    }

    pub(crate) fn endpoint(&self) -> &EndpointArgs {
        self.arguments.endpoint()
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
            .fold(command, |command, kind| command.subcommand(kind.options(Command::new(kind.name()))))
    }

    fn augment_subcommands_for_update(command: Command) -> Command {
        Self::augment_subcommands(command)
    }

    fn has_subcommand(name: &str) -> bool {
        find(name).is_some()
    }
}
