//! What an answer must say before its bytes are taken for those of the object.
use hyper::StatusCode;
use hyper::header::{
    CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE, ETAG, HeaderName, HeaderValue, IF_MATCH,
    IF_UNMODIFIED_SINCE, LAST_MODIFIED, LOCATION,
};
use hyper::http::response::Parts;
use std::fmt::Write;

/// Why there are no bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// The server may answer later.
    Again(String),
    /// The server refuses; asking again right away is of no use.
    Refused(String),
    /// The bytes are elsewhere: the value of `Location`.
    Redirect(String),
    /// The object is another one, or the server does not keep to the protocol.
    Unusable(String),
}

impl Failure {
    /// What happened.
    pub(super) fn message(&self) -> &str {
        match self {
            Self::Again(text) | Self::Refused(text) | Self::Unusable(text) => text,
            Self::Redirect(_) => "the server redirects",
        }
    }
}

/// What tells an object from another one at the same place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ObjectIdentity {
    /// Bytes.
    pub(super) size: u64,
    /// Header that each answer has, and condition that each request states.
    validator: Option<Validator>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Validator {
    header: HeaderName,
    condition: HeaderName,
    value: HeaderValue,
}

impl ObjectIdentity {
    /// Of the answer to a request for the first byte.
    ///
    /// # Errors
    /// The object cannot be read by ranges.
    pub(super) fn of(head: &Parts) -> Result<Self, Failure> {
        let refused = |why: &str| Err(Failure::Refused(why.into()));
        match head.status {
            StatusCode::PARTIAL_CONTENT => {}
            StatusCode::OK => {
                return refused("the server does not serve ranges: it answers with the whole object");
            }
            StatusCode::RANGE_NOT_SATISFIABLE => return refused("the object is empty"),
            _ => return Err(status(head)),
        }
        encoding(head)?;
        let range = text(head, &CONTENT_RANGE).unwrap_or_default();
        let size = range.strip_prefix("bytes 0-0/").and_then(|size| size.parse().ok());
        let Some(size) = size.filter(|size| *size > 0) else {
            return Err(Failure::Refused(format!(
                "the server's Content-Range is {:?}, not \"bytes 0-0/SIZE\"",
                shortened(range)
            )));
        };
        let found = |header: HeaderName, condition, valid: fn(&[u8]) -> bool| {
            let value = head.headers.get(&header).filter(|value| valid(value.as_bytes()))?.clone();
            Some(Validator { header, condition, value })
        };
        // A weak tag is equal for bytes that differ.
        let validator = found(ETAG, IF_MATCH, |tag| tag.len() > 2 && tag.starts_with(b"\""))
            .or_else(|| found(LAST_MODIFIED, IF_UNMODIFIED_SINCE, |date| !date.is_empty()));
        Ok(Self { size, validator })
    }

    /// Whether a change of the object is noticed.
    pub(super) fn is_certain(&self) -> bool {
        self.validator.is_some()
    }

    /// The condition of a request for bytes of this object.
    pub(super) fn condition(&self) -> Option<(&HeaderName, &HeaderValue)> {
        self.validator.as_ref().map(|validator| (&validator.condition, &validator.value))
    }

    /// Bytes that differ for objects that differ.
    pub(super) fn bytes(&self) -> Vec<u8> {
        let mut bytes = self.size.to_le_bytes().to_vec();
        if let Some(validator) = &self.validator {
            bytes.extend_from_slice(validator.header.as_str().as_bytes());
            bytes.push(0);
            bytes.extend_from_slice(validator.value.as_bytes());
        }
        bytes
    }

    /// Checks that an answer has the bytes from `first` to `last` of this object.
    ///
    /// # Errors
    /// It has not.
    pub(super) fn check(&self, head: &Parts, first: u64, last: u64) -> Result<(), Failure> {
        let unusable = |why: String| Err(Failure::Unusable(why));
        match head.status {
            StatusCode::PARTIAL_CONTENT | StatusCode::OK => {}
            StatusCode::PRECONDITION_FAILED => return unusable("the object has changed".into()),
            StatusCode::RANGE_NOT_SATISFIABLE => {
                return unusable("the object has changed: it is shorter".into());
            }
            _ => return Err(status(head)),
        }
        if let Some(Validator { header, value, .. }) = &self.validator {
            match head.headers.get(header) {
                Some(now) if now == value => {}
                Some(_) => return unusable(format!("the object has changed: {header} is another one")),
                None => {
                    return unusable(format!(
                        "the server leaves {header} out, so that a change would not show"
                    ));
                }
            }
        }
        if head.status == StatusCode::OK {
            return unusable("the server does not serve ranges any more".into());
        }
        encoding(head)?;
        let range = text(head, &CONTENT_RANGE).unwrap_or_default();
        let wanted = format!("bytes {first}-{last}/{}", self.size);
        if range != wanted {
            // Another size is a change.
            let size = range.rsplit('/').next().and_then(|size| size.parse::<u64>().ok());
            if size.is_some_and(|size| size != self.size) {
                return unusable("the object has changed: its size is another one".into());
            }
            return unusable(format!("the server's Content-Range is {:?}, not {wanted:?}", shortened(range)));
        }
        let len = last - first + 1;
        match text(head, &CONTENT_LENGTH) {
            Some(text) if text.parse() != Ok(len) => {
                unusable(format!("the server sends {} bytes, not {len}", shortened(text)))
            }
            _ => Ok(()),
        }
    }
}

fn text<'a>(head: &'a Parts, name: &HeaderName) -> Option<&'a str> {
    head.headers.get(name).and_then(|value| value.to_str().ok())
}

/// The beginning of what a server says, for messages.
fn shortened(text: &str) -> String {
    let mut short: String = text.chars().take(80).collect();
    if short.len() < text.len() {
        let _ = write!(short, "...");
    }
    short
}

fn encoding(head: &Parts) -> Result<(), Failure> {
    match text(head, &CONTENT_ENCODING) {
        None | Some("identity") => Ok(()),
        Some(other) => Err(Failure::Unusable(format!(
            "the server encodes the object ({}), so that its ranges are others",
            shortened(other)
        ))),
    }
}

/// The meaning of a status other than success.
fn status(head: &Parts) -> Failure {
    let status = head.status;
    match status.as_u16() {
        301..=303 | 307 | 308 => match text(head, &LOCATION) {
            Some(to) => Failure::Redirect(to.into()),
            None => Failure::Refused(format!("the server redirects to nowhere ({status})")),
        },
        401 | 403 => Failure::Refused(format!("the server refuses access ({status}); check the credentials")),
        404 | 410 => Failure::Refused(format!("the server has no such object ({status})")),
        408 | 425 | 429 | 500..=599 => Failure::Again(format!("the server answers {status}")),
        _ => Failure::Refused(format!("the server answers {status}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hyper::Response;

    fn head(status: u16, headers: &[(&str, &str)]) -> Parts {
        let mut response = Response::builder().status(status);
        for (name, value) in headers {
            response = response.header(*name, *value);
        }
        response.body(()).unwrap().into_parts().0
    }

    fn identity() -> ObjectIdentity {
        ObjectIdentity::of(&head(206, &[("content-range", "bytes 0-0/1000"), ("etag", "\"a\"")])).unwrap()
    }

    fn refused(status: u16, headers: &[(&str, &str)], part: &str) {
        match ObjectIdentity::of(&head(status, headers)).unwrap_err() {
            Failure::Refused(why) | Failure::Unusable(why) => assert!(why.contains(part), "{why}"),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn an_object_is_known_by_its_tag_or_date() {
        let (name, value) = (&IF_MATCH, &HeaderValue::from_static("\"a\""));
        assert_eq!((identity().size, identity().condition()), (1000, Some((name, value))));
        let date = "Wed, 21 Oct 2015 07:28:00 GMT";
        let range = ("content-range", "bytes 0-0/7");
        let weak =
            ObjectIdentity::of(&head(206, &[range, ("etag", "W/\"a\""), ("last-modified", date)])).unwrap();
        assert_eq!(weak.condition().unwrap().0, IF_UNMODIFIED_SINCE);
        let none = ObjectIdentity::of(&head(206, &[range])).unwrap();
        assert!(!none.is_certain() && weak.is_certain());
        assert_ne!(none.bytes(), weak.bytes());
    }

    #[test]
    fn objects_without_ranges_are_refused() {
        refused(200, &[], "does not serve ranges");
        refused(206, &[], "Content-Range is \"\"");
        for range in ["bytes 0-0/*", "bytes 0-1/10", "bytes 0-0/0", "bytes 0-0/-1", "items 0-0/1"] {
            refused(206, &[("content-range", range)], range);
        }
        refused(206, &[("content-range", &"x".repeat(5000))], "xxx...");
        refused(206, &[("content-encoding", "gzip")], "encodes");
        refused(416, &[("content-range", "bytes */0")], "empty");
        refused(403, &[], "credentials");
        refused(404, &[], "no such object");
        refused(302, &[], "nowhere");
        assert_eq!(
            ObjectIdentity::of(&head(307, &[("location", "/x")])),
            Err(Failure::Redirect("/x".into()))
        );
        assert!(matches!(ObjectIdentity::of(&head(503, &[])), Err(Failure::Again(_))));
    }

    #[test]
    fn an_answer_has_what_was_asked_for() {
        let good = [("content-range", "bytes 10-19/1000"), ("etag", "\"a\""), ("content-length", "10")];
        let check = |status, headers: &[(&str, &str)]| identity().check(&head(status, headers), 10, 19);
        assert_eq!(check(206, &good), Ok(()));
        assert_eq!(check(206, &good[..2]), Ok(()));
        let unusable = |status, headers: &[(&str, &str)], part: &str| match check(status, headers) {
            Err(Failure::Unusable(why)) => assert!(why.contains(part), "{why}"),
            other => panic!("{other:?}"),
        };
        unusable(412, &[], "changed");
        unusable(416, &[], "changed");
        unusable(206, &[good[0]], "leaves etag out");
        unusable(206, &[good[0], ("etag", "\"b\"")], "changed");
        unusable(200, &[good[1]], "ranges any more");
        unusable(200, &[("etag", "\"b\"")], "changed");
        unusable(206, &[("content-range", "bytes 10-19/1001"), good[1]], "size");
        unusable(206, &[("content-range", "bytes 0-9/1000"), good[1]], "bytes 10-19/1000");
        unusable(206, &[("content-type", "multipart/byteranges"), good[1]], "Content-Range is \"\"");
        unusable(206, &[good[0], good[1], ("content-length", "11")], "11 bytes");
        unusable(206, &[good[0], good[1], ("content-encoding", "br")], "encodes");
        assert!(matches!(check(404, &[]), Err(Failure::Refused(_))));
        assert!(matches!(check(503, &[]), Err(Failure::Again(_))));
    }
}
