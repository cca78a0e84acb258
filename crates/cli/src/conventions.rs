//! Conventions for vhost-user back-end programs.
//!
//! QEMU's docs/interop/vhost-user.rst, section "Backend program conventions", and the schema
//! docs/interop/vhost-user.json.
//!
//! ```text
//!  /usr/share/qemu/vhost-user/50-paravane-blk.json   names the program
//!    --> /usr/libexec/paravane/vhost-user-blk        a link to `paravane`, read as `paravane serve blk`
//!          --print-capabilities                      answers in JSON, whatever else is on the line
//!          --socket-path=PATH or --fd=N ...          serves, as `paravane serve blk` does
//! ```
//! Management software starts a program with options only, so the name of the link selects the
//! device.
use crate::kinds::{self, Kind};
use paravane_command_line::output;
use serde::Serialize;
use std::ffi::OsString;
use std::path::Path;

/// Name of a program, before the kind.
const PROGRAM: &str = "vhost-user-";

#[derive(Debug, Serialize)]
struct Capabilities {
    #[serde(rename = "type")]
    device_type: &'static str,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    features: &'static [&'static str],
}

/// Prints the capabilities of a kind as JSON.
///
/// # Errors
/// stdout cannot be written.
pub(crate) fn print_capabilities(kind: &Kind) -> Result<(), anyhow::Error> {
    output::print_json(&Capabilities { device_type: kind.device_type, features: kind.capabilities })
}

/// The command line.
///
/// Started as `vhost-user-blk`, that is `paravane serve blk` with its options.
pub(crate) fn expand(words: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut words: Vec<_> = words.collect();
    let of_program = |word| kinds::find(Path::new(word).file_name()?.to_str()?.strip_prefix(PROGRAM)?);
    if let Some(kind) = words.first().and_then(of_program) {
        words.splice(..1, ["paravane", "serve", kind.name].map(OsString::from));
    }
    words
}

/// The kind whose capabilities an expanded command line asks for.
///
/// Other options are ignored, unknown and missing ones too.
pub(crate) fn asked(words: &[OsString]) -> Option<&'static Kind> {
    let options = words.iter().take_while(|word| *word != "--");
    options.clone().find(|word| *word == "--print-capabilities")?;
    let mut served = options.skip(1).skip_while(|word| *word != "serve");
    served.find_map(|word| kinds::find(word.to_str()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<OsString> {
        expand(line.split(' ').map(OsString::from))
    }

    #[test]
    fn the_name_of_the_program_selects_the_device() {
        for (line, expanded) in [
            ("/usr/libexec/paravane/vhost-user-blk --fd=3", "paravane serve blk --fd=3"),
            ("vhost-user-rng", "paravane serve rng"),
            ("./paravane serve net --echo", "./paravane serve net --echo"),
            ("vhost-user-gpu --fd=3", "vhost-user-gpu --fd=3"),
        ] {
            let expanded: Vec<_> = expanded.split(' ').map(OsString::from).collect();
            assert_eq!(words(line), expanded);
        }
        assert!(expand(std::iter::empty()).is_empty());
    }

    #[test]
    fn capabilities_are_asked_for_beside_any_other_option() {
        let kind = |line| asked(&words(line)).map(|kind| kind.name);
        assert_eq!(kind("vhost-user-blk --print-capabilities"), Some("blk"));
        assert_eq!(kind("vhost-user-net --nonsense --print-capabilities --fd=x"), Some("net"));
        assert_eq!(kind("paravane -v serve --control off rng --print-capabilities"), Some("rng"));
        for line in [
            "paravane serve blk",
            "paravane serve --print-capabilities",
            "paravane bench blk --print-capabilities",
            "vhost-user-blk -- --print-capabilities",
        ] {
            assert_eq!(kind(line), None, "{line}");
        }
    }
}
