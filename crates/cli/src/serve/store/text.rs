//! Texts of the messages between a daemon and a holder.
//!
//! | message | descriptors | answer |
//! |---|---|---|
//! | (connection) | | `HOLD=1`, `HELD=number`; or `ERROR=` and the end of the connection |
//! | `FDSTORE=1`, `FDNAME=name`, optionally `FDPOLL=0` | 1 to 253 | `OK=1`, or `ERROR=reason`: none is held |
//! | `FDSTOREREMOVE=1`, `FDNAME=name` | | `OK=1`, also if no descriptor has the name |
//! | `LIMIT=1` | | `LIMIT=number` of descriptors that may be held |
//! | `TAKE=1`, optionally `FROM=index` | | `FDNAME=name` for each descriptor, which go along; or `END=number` |
//!
//! Each is lines of `KEY=value`, in any order. The first two are the messages of
//! sd_pid_notify_with_fds(3), so that a service manager understands them as well. Others of systemd
//! are refused: what the holder does not know it would silently lose.
//!
//! Each message has one answer, so neither side fills the other's queue. A daemon takes all
//! descriptors by asking again from the index after the last one, until `END`.
use std::collections::BTreeMap;
use std::fmt::{self, Display};
use std::str::FromStr;
use std::sync::Arc;
use thiserror::Error;

/// Maximum number of descriptors in a message (the kernel's SCM_MAX_FD).
pub(crate) const MAX_FDS: usize = 253;
/// Maximum length of a name in bytes.
pub(crate) const MAX_NAME: usize = 255;
/// Maximum length of a message to the holder in bytes.
pub(crate) const MAX_REQUEST: usize = 1024;
/// Maximum length of an answer in bytes.
pub(crate) const MAX_ANSWER: usize = 16 << 10;
/// Version of these messages.
const VERSION: u32 = 1;

/// Keys of messages to the holder.
const KEYS: [&str; 7] = ["FDSTORE", "FDSTOREREMOVE", "TAKE", "LIMIT", "FDNAME", "FROM", "FDPOLL"];

/// A text is no message.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub(crate) enum TextError {
    #[error("name is not 1 to {MAX_NAME} printable ASCII characters without ':'")]
    Name,
    #[error("message is not UTF-8")]
    Encoding,
    #[error("line without '='")]
    Line,
    #[error("unknown key {0:?}")]
    Key(String),
    #[error("{0} has an invalid value or is repeated")]
    Value(&'static str),
    #[error(
        "message has none or several of FDSTORE=1, FDSTOREREMOVE=1, TAKE=1 and LIMIT=1, or other keys do not fit"
    )]
    Kind,
    #[error("unknown answer")]
    Answer,
}

/// Name of held descriptors.
///
/// What systemd accepts: printable ASCII characters without ':'.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Name(Arc<str>);

impl Name {
    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Name {
    type Err = TextError;

    fn from_str(text: &str) -> Result<Self, TextError> {
        let is_valid = |byte: u8| (b' '..=b'~').contains(&byte) && byte != b':';
        if (1..=MAX_NAME).contains(&text.len()) && text.bytes().all(is_valid) {
            Ok(Self(text.into()))
        } else {
            Err(TextError::Name)
        }
    }
}

impl Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A message of a daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Request {
    /// Hold the descriptors of this message under a name.
    Store(Name),
    /// Close all descriptors of a name.
    Remove(Name),
    /// Send copies of descriptors, from this index on.
    Take { from: usize },
    /// Say how many descriptors may be held.
    Limit,
}

impl Display for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            // A service manager without FDPOLL=0 closes descriptors that report an error or a
            // hangup: those of a client that has disconnected, for example.
            Self::Store(name) => write!(f, "FDSTORE=1\nFDNAME={name}\nFDPOLL=0\n"),
            Self::Remove(name) => write!(f, "FDSTOREREMOVE=1\nFDNAME={name}\n"),
            Self::Take { from } => write!(f, "TAKE=1\nFROM={from}\n"),
            Self::Limit => f.write_str("LIMIT=1\n"),
        }
    }
}

/// Keys and values of a message.
fn lines(bytes: &[u8]) -> Result<impl Iterator<Item = Result<(&str, &str), TextError>>, TextError> {
    let text = std::str::from_utf8(bytes).map_err(|_| TextError::Encoding)?;
    let text = text.strip_suffix('\n').unwrap_or(text);
    Ok(text.split('\n').map(|line| line.split_once('=').ok_or(TextError::Line)))
}

impl Request {
    /// Parses the text of a message.
    ///
    /// # Errors
    /// A line has no '=', an unknown key or an invalid value, or the keys do not fit together.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, TextError> {
        let mut all = BTreeMap::new();
        for line in lines(bytes)? {
            let (key, value) = line?;
            let known = KEYS.into_iter().find(|known| *known == key);
            let key = known.ok_or_else(|| TextError::Key(key.to_owned()))?;
            let is_valid = match key {
                "FDNAME" => value.parse::<Name>().map(|_| true)?,
                "FROM" => value.parse::<usize>().is_ok(),
                // The holder looks at no descriptor that it holds.
                "FDPOLL" => value == "0",
                _ => value == "1",
            };
            if !is_valid || all.insert(key, value).is_some() {
                return Err(TextError::Value(key));
            }
        }
        // In the order of the alphabet.
        match all.into_iter().collect::<Vec<_>>()[..] {
            [("FDNAME", name), ("FDPOLL", _), ("FDSTORE", _)] | [("FDNAME", name), ("FDSTORE", _)] => {
                Ok(Self::Store(name.parse()?))
            }
            [("FDNAME", name), ("FDSTOREREMOVE", _)] => Ok(Self::Remove(name.parse()?)),
            [("FROM", from), ("TAKE", _)] => {
                from.parse().map(|from| Self::Take { from }).map_err(|_| TextError::Kind)
            }
            [("TAKE", _)] => Ok(Self::Take { from: 0 }),
            [("LIMIT", _)] => Ok(Self::Limit),
            _ => Err(TextError::Kind),
        }
    }
}

/// An answer of the holder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// The connection is served. Number of held descriptors.
    Hello { held: usize },
    /// The request is done.
    Done,
    /// The request is refused, and nothing has changed.
    Refused(String),
    /// Names of the descriptors of this message, in the same order.
    Held(Vec<Name>),
    /// There are no more. Number of held descriptors.
    End { total: usize },
    /// Number of descriptors that may be held.
    Limit { most: usize },
}

impl Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Hello { held } => write!(f, "HOLD={VERSION}\nHELD={held}\n"),
            Self::Done => f.write_str("OK=1\n"),
            Self::Refused(why) => writeln!(f, "ERROR={}", why.replace('\n', " ")),
            Self::Held(names) => names.iter().try_for_each(|name| writeln!(f, "FDNAME={name}")),
            Self::End { total } => writeln!(f, "END={total}"),
            Self::Limit { most } => writeln!(f, "LIMIT={most}"),
        }
    }
}

impl Answer {
    /// Parses the text of an answer.
    ///
    /// # Errors
    /// It is none, or of another version.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, TextError> {
        let lines = lines(bytes)?.collect::<Result<Vec<_>, _>>()?;
        let number = |value: &str| value.parse().map_err(|_| TextError::Answer);
        match lines[..] {
            [("HOLD", version), ("HELD", held)] if version.parse() == Ok(VERSION) => {
                Ok(Self::Hello { held: number(held)? })
            }
            [("OK", "1")] => Ok(Self::Done),
            [("ERROR", why)] => Ok(Self::Refused(why.to_owned())),
            [("END", total)] => Ok(Self::End { total: number(total)? }),
            [("LIMIT", most)] => Ok(Self::Limit { most: number(most)? }),
            _ => {
                let name = |(key, value): &(&str, &str)| match *key {
                    "FDNAME" => value.parse(),
                    _ => Err(TextError::Answer),
                };
                Ok(Self::Held(lines.iter().map(name).collect::<Result<_, _>>()?))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> Name {
        text.parse().unwrap()
    }

    #[test]
    fn requests_are_parsed_as_written() {
        let all = [
            Request::Store(name("vm0-disk.kick")),
            Request::Remove(name(&"n".repeat(MAX_NAME))),
            Request::Take { from: 0 },
            Request::Take { from: 253 },
            Request::Limit,
        ];
        for request in all {
            let text = request.to_string();
            assert!(text.len() <= MAX_REQUEST);
            assert_eq!(Request::parse(text.as_bytes()), Ok(request));
        }
        assert_eq!(Request::parse(b"FDNAME=a b\nFDSTORE=1"), Ok(Request::Store(name("a b"))));
        assert_eq!(Request::parse(b"TAKE=1"), Ok(Request::Take { from: 0 }));
    }

    #[test]
    fn answers_are_parsed_as_written() {
        let all = [
            Answer::Hello { held: 7 },
            Answer::Done,
            Answer::Refused("no room = none".to_owned()),
            Answer::Held(vec![name("a"), name("b"), name("a")]),
            Answer::End { total: 3 },
            Answer::Limit { most: 4096 },
        ];
        for answer in all {
            assert_eq!(Answer::parse(answer.to_string().as_bytes()), Ok(answer));
        }
        for bad in ["", "\n", "HOLD=2\nHELD=0", "OK=2", "END=-1", "FDNAME=a\nEND=1", "FDNAME=a:b"] {
            assert!(Answer::parse(bad.as_bytes()).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn names_are_those_of_systemd() {
        for good in ["a", "vm0 disk", "~!", "a=b"] {
            assert_eq!(name(good).as_str(), good);
        }
        for bad in ["", "a:b", "a\nb", "a\tb", "\u{7f}", "ä", &"n".repeat(MAX_NAME + 1)] {
            assert_eq!(bad.parse::<Name>(), Err(TextError::Name), "{bad:?}");
        }
    }

    #[test]
    fn malformed_requests_are_refused() {
        let long = format!("FDSTORE=1\nFDNAME={}", "n".repeat(MAX_NAME + 1));
        let cases: &[(&[u8], TextError)] = &[
            (b"", TextError::Line),
            (b"\n", TextError::Line),
            (b"FDSTORE", TextError::Line),
            (b"\xff=1", TextError::Encoding),
            (b"READY=1", TextError::Key("READY".into())),
            (b"FDSTORE=1", TextError::Kind),
            (b"FDNAME=a", TextError::Kind),
            (b"FDSTORE=1\nFDSTOREREMOVE=1\nFDNAME=a", TextError::Kind),
            (b"FDSTORE=1\nTAKE=1\nFDNAME=a", TextError::Kind),
            (b"FDSTORE=1\nFROM=1\nFDNAME=a", TextError::Kind),
            (b"LIMIT=1\nTAKE=1", TextError::Kind),
            (b"LIMIT=2", TextError::Value("LIMIT")),
            (b"FDSTOREREMOVE=1\nFDPOLL=0\nFDNAME=a", TextError::Kind),
            (b"TAKE=1\nFDNAME=a", TextError::Kind),
            (b"FDSTORE=2\nFDNAME=a", TextError::Value("FDSTORE")),
            (b"FDSTORE=1\nFDSTORE=1\nFDNAME=a", TextError::Value("FDSTORE")),
            (b"FDSTORE=1\nFDNAME=a\nFDNAME=b", TextError::Value("FDNAME")),
            (b"FDSTORE=1\nFDNAME=a\nFDPOLL=1", TextError::Value("FDPOLL")),
            (b"TAKE=1\nFROM=-1", TextError::Value("FROM")),
            (b"TAKE=1\nFROM=99999999999999999999", TextError::Value("FROM")),
            (b"FDSTORE=1\nFDNAME=", TextError::Name),
            (b"FDSTORE=1\nFDNAME=a:b", TextError::Name),
            (b"FDSTORE=1\nFDNAME=a\0b", TextError::Name),
            (long.as_bytes(), TextError::Name),
        ];
        for (text, error) in cases {
            assert_eq!(Request::parse(text).as_ref(), Err(error), "{:?}", String::from_utf8_lossy(text));
        }
    }
}
