//! Findings of `paravane doctor`.
use serde::Serialize;

/// Judgement of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Level {
    /// Good.
    Ok,
    /// Works with a loss.
    Warn,
    /// Missing.
    Missing,
}

/// One finding.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Finding {
    /// One of [`names`](super::names).
    pub(crate) name: &'static str,
    /// `None`: it is about the host.
    pub(crate) device: Option<String>,
    pub(crate) level: Level,
    pub(crate) found: String,
    /// Empty if the level is [`Level::Ok`].
    pub(crate) remedy: String,
}

impl Finding {
    pub(crate) fn new(
        name: &'static str,
        level: Level,
        found: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self { name, device: None, level, found: found.into(), remedy: remedy.into() }
    }

    pub(crate) fn ok(name: &'static str, found: impl Into<String>) -> Self {
        Self::new(name, Level::Ok, found, "")
    }

    pub(crate) fn warn(name: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::new(name, Level::Warn, found, remedy)
    }

    pub(crate) fn missing(name: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::new(name, Level::Missing, found, remedy)
    }

    /// Whether the reference has its name.
    #[cfg(test)]
    pub(crate) fn is_documented(&self) -> bool {
        use super::names;
        let all = [names::HOST, names::DEVICES, names::CLIENT];
        all.iter().any(|names| names.iter().any(|(name, _)| *name == self.name))
    }
}

pub(super) fn word(level: Level) -> &'static str {
    match level {
        Level::Ok => "ok",
        Level::Warn => "warn",
        Level::Missing => "missing",
    }
}
