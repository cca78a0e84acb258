//! How the program ends when it fails.
use crate::log;

/// An error that ends the program without a report.
pub(crate) struct Failure {
    /// Exit status: 1 or 2.
    pub(crate) status: u8,
    /// Printed on one line.
    pub(crate) error: anyhow::Error,
}

impl Failure {
    /// The request was invalid; nothing was changed.
    pub(crate) fn request(error: impl Into<anyhow::Error>) -> Self {
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
pub(crate) fn one_line(error: &anyhow::Error) -> String {
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

/// Ends the process at once: threads still run, and nothing is dropped.
pub(crate) fn exit(status: u8) -> ! {
    log::finish();
    std::process::exit(status.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context;

    #[test]
    fn a_cause_is_named_once() {
        let inner = || std::io::Error::other("no room");
        let named = paravane_vmm::RunError::Os { what: "do it", source: inner() };
        assert_eq!(one_line(&named.into()), "cannot do it: no room");
        let chained = Err::<(), _>(inner()).context("cannot make a disk").unwrap_err();
        assert_eq!(one_line(&chained), "cannot make a disk: no room");
    }
}
