//! What this host offers a microVM, and what it costs.

/// How a finding is to be taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// As it should be.
    Ok,
    /// Works, with a loss.
    Warn,
    /// Missing.
    Missing,
}

/// One line of the doctor's report.
#[derive(Clone, Debug)]
pub struct Finding {
    /// What was looked at: "kvm", "ioeventfd", "exit cost" ...
    pub name: &'static str,
    /// Judgement.
    pub level: Level,
    /// What was found, with units.
    pub found: String,
    /// What to do about it; empty if nothing.
    pub remedy: String,
}

/// Looks at everything. Takes well under a second, changes nothing.
#[must_use]
pub fn examine() -> Vec<Finding> {
    todo!()
}
