//! `--device KIND[,OPTION[=VALUE]]...`: a device of any kind that `paravane serve` has.
use crate::kinds::endpoint::Endpoint;
use crate::kinds::kind::Spec;
use crate::kinds::observe::Observe;
use crate::kinds::opening::{Earlier, LinkEnds, OpenContext, Opened};
use crate::kinds::{self, DeviceCommand};
use anyhow::Context;
use paravane_vmm::NamedDevice;
use std::str::FromStr;
use std::sync::Arc;

/// One device of the command line.
#[derive(Clone, Debug)]
pub(crate) struct DeviceArg {
    kind: &'static str,
    spec: Arc<dyn Spec>,
}

impl FromStr for DeviceArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut words = text.split(',');
        let name = words.next().unwrap_or_default();
        let Some(kind) = kinds::find(name) else {
            return Err(format!("unknown kind {name:?}: use {}", kinds::names("or")));
        };
        let words = words.map(|word| format!("--{word}"));
        let command = DeviceCommand::for_machine(kind, words).map_err(|error| {
            let text = error.to_string();
            text.lines().next().unwrap_or_default().trim_start_matches("error: ").to_owned()
        })?;
        let spec = command.arguments.check(kind.name(), &Endpoint::Activated);
        let spec = spec.map_err(|(option, why)| format!("{option}: {why}"))?;
        Ok(Self { kind: kind.name(), spec })
    }
}

/// What has to stay until the guest has ended.
pub(crate) struct Observed(#[expect(dead_code, reason = "is dropped")] Vec<Box<dyn Observe>>);

/// Opens the devices.
///
/// # Errors
/// One of them cannot be opened.
pub(crate) fn open(args: &[DeviceArg]) -> Result<(Vec<NamedDevice>, Observed), anyhow::Error> {
    let (mut devices, mut observers, mut links) = (Vec::new(), Vec::new(), LinkEnds::default());
    for (number, DeviceArg { kind, spec }) in args.iter().enumerate() {
        let name = format!("{kind} {number}");
        let open = || spec.open(&name, &OpenContext::default(), &mut links, Earlier::default())?.opened();
        let Opened { device, observer, back_end, hold: _ } =
            { open }().with_context(|| format!("--device {kind}"))?;
        tracing::info!(device = name, back_end, "attached");
        devices.push(NamedDevice::new(&name, device));
        observers.push(observer);
    }
    Ok((devices, Observed(observers)))
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
            let error = parse(text).unwrap_err();
            assert!(error.contains(why), "{text}: {error}");
        }
    }
}
