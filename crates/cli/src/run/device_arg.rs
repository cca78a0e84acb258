//! `--device KIND[,OPTION[=VALUE]]...`: a device of any kind that `paravane serve` has.
use crate::kinds::kind::{Kind, Spec};
use crate::kinds::{self, DeviceCommand};
use anyhow::{anyhow, bail};
use std::str::FromStr;
use std::sync::Arc;

/// One device of the command line.
#[derive(Clone, Debug)]
pub(crate) struct DeviceArg {
    pub(crate) kind: &'static str,
    pub(crate) spec: Arc<dyn Spec>,
}

impl FromStr for DeviceArg {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self, anyhow::Error> {
        let mut words = text.split(',');
        let kind = words.next().unwrap_or_default();
        let Some(kind) = kinds::find(kind) else {
            bail!("unknown kind {kind:?}: use {}", kinds::names("or"));
        };
        Self::new(kind, words.map(|word| format!("--{word}")))
    }
}

impl DeviceArg {
    /// A device of this kind, by words of the command line.
    ///
    /// # Errors
    /// An option is invalid.
    pub(crate) fn new(
        kind: &'static Kind,
        words: impl IntoIterator<Item = String>,
    ) -> Result<Self, anyhow::Error> {
        let command = DeviceCommand::for_machine(kind, words.into_iter()).map_err(|error| {
            let text = error.to_string();
            anyhow!("{}", text.lines().next().unwrap_or_default().trim_start_matches("error: "))
        })?;
        let spec = command.arguments.check(kind.name, &command.endpoint);
        let spec = spec.map_err(|(option, why)| anyhow!("{option}: {why}"))?;
        Ok(Self { kind: kind.name, spec })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_those_of_serve_without_sockets_and_threads() {
        let parse = |text: &str| text.parse::<DeviceArg>();
        assert_eq!(parse("rng").unwrap().kind, "rng");
        assert!(parse("console,pty,window=80x25").is_ok());
        for (text, why) in [
            ("disk", "unknown kind \"disk\": use blk, net"),
            ("console", "required"),
            ("console,pty,log=/x", "cannot be used with"),
            ("console,pty,window=0x0", "invalid value"),
            ("rng,socket=/s", "unexpected argument"),
            ("rng,workers=2", "unexpected argument"),
            ("blk,image=/x,queues=0", "queues: 0 is out of range"),
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(why), "{text}: {error}");
        }
    }
}
