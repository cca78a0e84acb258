//! What this host offers a microVM, and what it costs.
mod cost;
mod host;
mod kvm;
mod limit;

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

/// Looks at everything. Takes well under a second, changes nothing.
#[must_use]
pub fn examine() -> Vec<Finding> {
    let mut findings = kvm::examine();
    findings.extend(host::examine());
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whatever_is_not_as_it_should_be_has_a_remedy() {
        let findings = examine();
        for finding in &findings {
            assert!(!finding.found.is_empty(), "{finding:?}");
            assert_eq!(finding.remedy.is_empty(), finding.level == Level::Ok, "{finding:?}");
        }
        for name in ["kvm", "vhost-net", "vhost-vsock", "tun", "hugepages", "io_uring", "memlock"] {
            assert!(findings.iter().any(|finding| finding.name == name), "{name}");
        }
        let usable = findings[0].level == Level::Ok;
        for name in [
            "ioeventfd",
            "ioeventfd limit",
            "irqfd",
            "msi",
            "irq routing",
            "dirty ring",
            "exit cost",
            "kick cost",
            "ring 0",
        ] {
            assert_eq!(findings.iter().any(|finding| finding.name == name), usable, "{name}");
        }
    }
}
