//! How a program ends when it fails.

/// An error that ends the program without a report.
#[derive(Debug)]
pub struct Failure {
    /// Exit status: 1 or 2.
    pub status: u8,
    /// Printed on one line.
    pub error: anyhow::Error,
}

impl Failure {
    /// The request was invalid; nothing was changed.
    pub fn request(error: impl Into<anyhow::Error>) -> Self {
        Self { status: 2, error: error.into() }
    }
}

impl<E: Into<anyhow::Error>> From<E> for Failure {
    fn from(error: E) -> Self {
        Self { status: 1, error: error.into() }
    }
}

/// The error and its causes.
///
/// A cause that the text before it includes already is left out.
#[must_use]
pub fn one_line(error: &anyhow::Error) -> String {
    error.chain().map(ToString::to_string).fold(String::new(), |line, cause| {
        if line.is_empty() {
            cause
        } else if line.contains(&cause) {
            line
        } else {
            format!("{line}: {cause}")
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context;

    #[derive(Debug, thiserror::Error)]
    #[error("cannot do it: {source}")]
    struct Named {
        source: std::io::Error,
    }

    #[test]
    fn a_cause_is_named_once() {
        let inner = || std::io::Error::other("no room");
        assert_eq!(one_line(&Named { source: inner() }.into()), "cannot do it: no room");
        let chained = Err::<(), _>(inner()).context("cannot make a disk").unwrap_err();
        assert_eq!(one_line(&chained), "cannot make a disk: no room");
    }
}
