//! Checks what KVM offers on this host, and what it costs.
mod cost;
mod finding;
mod kvm;
mod limit;

pub use finding::{Finding, Level};

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
