//! `paravane doctor`.
use crate::args::DoctorArgs;
use crate::failure::Failure;
use crate::{output, wrap};
use paravane_vmm::doctor::{Finding, Level, examine};
use serde::Serialize;
use std::process::ExitCode;

#[derive(Debug, Serialize)]
struct JsonFinding<'a> {
    name: &'a str,
    level: &'a str,
    found: &'a str,
    remedy: &'a str,
}

pub(crate) fn main(args: &DoctorArgs) -> Result<ExitCode, Failure> {
    let findings = examine();
    if args.json {
        let rows: Vec<_> = findings
            .iter()
            .map(|f| JsonFinding { name: f.name, level: word(f.level), found: &f.found, remedy: &f.remedy })
            .collect();
        output::print_json(&rows)?;
    } else {
        output::print(&text(&findings, wrap::columns()))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn word(level: Level) -> &'static str {
    match level {
        Level::Ok => "ok",
        Level::Warn => "warn",
        Level::Missing => "missing",
    }
}

/// A row for each finding, wrapped in its column, with the remedy below it.
fn text(findings: &[Finding], columns: usize) -> String {
    let names = findings.iter().map(|finding| finding.name.len()).max().unwrap_or(0);
    let indent = "missing ".len() + names + 2;
    let row = |finding: &Finding| {
        let head = format!("{:<7} {}", word(finding.level), finding.name);
        let mut row = wrap::row(&head, indent, &finding.found, columns);
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
        let finding = |name, level, found: &str, remedy: &str| Finding {
            name,
            level,
            found: found.into(),
            remedy: remedy.into(),
        };
        let findings = [
            finding("kvm", Level::Ok, "API 12", ""),
            finding(
                "vhost-net",
                Level::Missing,
                "no such file and some more words",
                "load the module vhost_net for queues of network cards",
            ),
        ];
        let wanted = "ok      kvm        API 12\n\
                      missing vhost-net  no such file and some\n\
                      \x20                  more words\n\
                      \x20                  -> load the module\n\
                      \x20                     vhost_net for queues\n\
                      \x20                     of network cards\n";
        assert_eq!(text(&findings, 42), wanted);
        assert!(text(&findings, 80).lines().all(|line| line.chars().count() <= 80));
    }
}
