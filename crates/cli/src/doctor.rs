//! `paravane doctor`.
mod client;
mod devices;
pub(crate) mod finding;
pub(crate) mod host;
mod kernel;
pub(crate) mod names;
pub(crate) mod negotiated;

use crate::args::DoctorArgs;
use crate::failure::Failure;
use crate::serve::config::Config;
use finding::{Finding, Level};
use paravane_command_line::{output, wrap};
use std::process::ExitCode;

pub(crate) fn main(args: &DoctorArgs) -> Result<ExitCode, Failure> {
    let (findings, strict) = match (&args.client, &args.config) {
        (Some(client), _) => {
            let device = client::find(client, args.control.as_deref())?;
            let name = device.name.clone();
            let of_device = |finding| Finding { device: Some(name.clone()), ..finding };
            (client::judge(&device).into_iter().map(of_device).collect(), true)
        }
        (None, Some(file)) => (devices::examine(&Config::read(file).map_err(Failure::request)?), true),
        (None, None) => (of_host(), false),
    };
    if args.json {
        output::print_json(&findings)?;
    } else {
        output::print(&text(&findings, wrap::columns()))?;
    }
    let is_missing = findings.iter().any(|finding| finding.level == Level::Missing);
    Ok(if strict && is_missing { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn of_host() -> Vec<Finding> {
    let mut findings = of_kvm();
    findings.extend(kernel::examine());
    findings.extend([host::landlock(), host::nofile(host::descriptors()), host::governor()]);
    findings
}

#[cfg(feature = "run")]
fn of_kvm() -> Vec<Finding> {
    use paravane_vmm::doctor::Level as OfKvm;
    let finding = |finding: paravane_vmm::doctor::Finding| {
        let level = match finding.level {
            OfKvm::Ok => Level::Ok,
            OfKvm::Warn => Level::Warn,
            OfKvm::Missing => Level::Missing,
        };
        Finding::new(finding.name, level, finding.found, finding.remedy)
    };
    paravane_vmm::doctor::examine().into_iter().map(finding).collect()
}

/// Devices of other VMMs do not use KVM.
#[cfg(not(feature = "run"))]
fn of_kvm() -> Vec<Finding> {
    Vec::new()
}

/// A row for each finding, wrapped in its column, with the remedy below it.
fn text(findings: &[Finding], columns: usize) -> String {
    let names = findings.iter().map(|finding| finding.name.len()).max().unwrap_or(0);
    let indent = "missing ".len() + names + 2;
    let row = |finding: &Finding| {
        let head = format!("{:<7} {}", finding::word(finding.level), finding.name);
        let found = match &finding.device {
            Some(device) => format!("{device}: {}", finding.found),
            None => finding.found.clone(),
        };
        let mut row = wrap::row(&head, indent, &found, columns);
        if !finding.remedy.is_empty() {
            let arrow = format!("{:indent$}-> ", "");
            row += &wrap::row(&arrow, arrow.len(), &finding.remedy, columns);
        }
        row
    };
    findings.iter().map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn findings_wrap_with_the_remedy_below() {
        let findings = [
            Finding::new("kvm", Level::Ok, "API 12", ""),
            Finding {
                device: Some("vm0".into()),
                ..Finding::new(
                    "vhost-net",
                    Level::Missing,
                    "no such file and some more words",
                    "load the module vhost_net for queues of network cards",
                )
            },
        ];
        let wanted = "ok      kvm        API 12\n\
                      missing vhost-net  vm0: no such file and\n\
                      \x20                  some more words\n\
                      \x20                  -> load the module\n\
                      \x20                     vhost_net for queues\n\
                      \x20                     of network cards\n";
        assert_eq!(text(&findings, 42), wanted);
        assert!(text(&findings, 80).lines().all(|line| line.chars().count() <= 80));
    }

    #[test]
    fn findings_of_the_host_are_documented() {
        for finding in of_host() {
            assert!(finding.is_documented(), "{finding:?}");
            assert_eq!(finding.remedy.is_empty(), finding.level == Level::Ok, "{finding:?}");
        }
    }
}
