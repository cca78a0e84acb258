//! Findings.

/// Judgement of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// Good.
    Ok,
    /// Works with a loss.
    Warn,
    /// Missing.
    Missing,
}

/// One finding of the report.
#[derive(Clone, Debug)]
pub struct Finding {
    /// Name: "kvm", "ioeventfd", "exit cost".
    pub name: &'static str,
    /// Severity.
    pub level: Level,
    /// The finding, with units.
    pub found: String,
    /// Remedy; empty for [`Level::Ok`].
    pub remedy: String,
}

impl Finding {
    pub(super) fn ok(name: &'static str, found: impl Into<String>) -> Self {
        Self { name, level: Level::Ok, found: found.into(), remedy: String::new() }
    }

    pub(super) fn warn(name: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { name, level: Level::Warn, found: found.into(), remedy: remedy.into() }
    }

    pub(super) fn missing(name: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { name, level: Level::Missing, found: found.into(), remedy: remedy.into() }
    }
}
