//! Options that may hold a secret: an error shows them without it.
use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::{Arg, Command};
use std::ffi::OsStr;

/// Parses a location, or what holds one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Discreet<T>(pub(crate) fn(&OsStr) -> Result<T, String>);

impl<T: Clone + Send + Sync + 'static> TypedValueParser for Discreet<T> {
    type Value = T;

    fn parse_ref(&self, command: &Command, option: Option<&Arg>, value: &OsStr) -> Result<T, clap::Error> {
        self.0(value).or_else(|why| {
            let shown = paravane_store::without_secrets(&value.to_string_lossy());
            // For clap's error, which names the option.
            let refuse = OsStringValueParser::new().try_map(move |_| Err::<T, _>(why.clone()));
            refuse.parse_ref(command, option, OsStr::new(&shown))
        })
    }
}

#[cfg(test)]
mod tests {
    use crate::args::Cli;
    use crate::serve::config::Config;
    use clap::Parser;
    use std::path::Path;

    #[test]
    fn errors_show_no_secrets_of_a_location() {
        let locations = [
            ("http://user:secret@host/a.img", "holds no user or password"),
            ("nbd://user:sec/ret@host/a", "invalid port number"),
            ("nbd://host/a?password=secret", "unknown parameter password"),
            ("s3://b/k?endpoint=http://user:secret@host", "holds no user or password"),
            ("rbd:pool/disk:key=secret", "unknown parameter key"),
            ("ftp://user:secret@host/a", "unknown kind of URL"),
        ];
        for (location, why) in locations {
            let backing = format!("raw:{location}");
            let shows = |text: String| {
                assert!(text.contains(why), "{text}");
                assert!(!["secret", "user:", "ret@"].iter().any(|word| text.contains(word)), "{text}");
            };
            for option in [["--image", location], ["--backing", &backing]] {
                let start = ["paravane", "serve", "blk", "--image", "a.img", "--socket", "s"];
                let start = if option[0] == "--image" { &start[..3] } else { &start[..5] };
                let words = [start, &option[..], &["--socket", "s"]].concat();
                shows(Cli::try_parse_from(words).unwrap_err().to_string());
            }
            let text = format!("[[blk]]\nname = \"a\"\nimage = {location:?}\nsocket = \"s\"\n");
            shows(Config::parse(Path::new("d.toml"), &text).unwrap_err().to_string());
        }
    }
}
