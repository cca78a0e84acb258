//! Images, their formats and layers, on the command line.
use crate::choices::Choice;
use crate::discreet::Discreet;
use clap::builder::ValueParserFactory;
use paravane_device::blk::Format;
use paravane_store::{Location, LocationError};

pub(crate) const FORMATS: &[Choice<Format>] =
    &[("raw", "The bytes of the disk", Format::Raw), ("qcow2", "QEMU's qcow2", Format::Qcow2)];

/// A backing file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Backing {
    pub(crate) format: Format,
    pub(crate) location: Location,
}

/// Parses a path or a URL.
pub(crate) fn location() -> Discreet<Location> {
    Discreet(|text| match text.is_empty() {
        true => Err("empty path".to_owned()),
        false => Location::from_os(text).map_err(|error| error.reason),
    })
}

impl ValueParserFactory for Backing {
    type Parser = Discreet<Self>;

    fn value_parser() -> Self::Parser {
        Discreet(|text| text.to_str().ok_or_else(|| "is not UTF-8".to_owned())?.parse())
    }
}

impl std::str::FromStr for Backing {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (format, path) = match text.split_once(':') {
            Some(("raw", path)) => (Format::Raw, path),
            Some(("qcow2", path)) => (Format::Qcow2, path),
            _ => return Err("missing format: write raw:LOCATION or qcow2:LOCATION".to_owned()),
        };
        match path {
            "" => Err("empty path".to_owned()),
            path => Ok(Self { format, location: path.parse().map_err(|error: LocationError| error.reason)? }),
        }
    }
}
