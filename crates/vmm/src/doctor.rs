//! Checks what KVM offers on this host, and what it costs.
mod cost;
mod kvm;
mod limit;

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
    fn ok(name: &'static str, found: impl Into<String>) -> Self {
        Self { name, level: Level::Ok, found: found.into(), remedy: String::new() }
    }

    fn warn(name: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { name, level: Level::Warn, found: found.into(), remedy: remedy.into() }
    }

    fn missing(name: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { name, level: Level::Missing, found: found.into(), remedy: remedy.into() }
    }
}

/// Checks KVM.
///
/// Takes less than a second and changes nothing.
#[must_use]
pub fn examine() -> Vec<Finding> {
    kvm::examine()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_problem_has_a_remedy() {
        let findings = examine();
        for finding in &findings {
            assert!(!finding.found.is_empty(), "{finding:?}");
            assert_eq!(finding.remedy.is_empty(), finding.level == Level::Ok, "{finding:?}");
        }
        assert_eq!(findings[0].name, "kvm");
        let usable = findings[0].level == Level::Ok;
        for name in [
            "ioeventfd",
            "ioeventfd limit",
            "irqfd",
            "msi",
            "irq routing",
            "exit cost",
            "kick cost",
            "ring 0",
        ] {
            assert_eq!(findings.iter().any(|finding| finding.name == name), usable, "{name}");
        }
    }
}
