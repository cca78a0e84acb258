//! `paravane doctor`.
use crate::args::DoctorArgs;
use crate::{Failure, output};
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
        output::print(&text(&findings))?;
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

fn text(findings: &[Finding]) -> String {
    let width = findings.iter().map(|finding| finding.name.len()).max().unwrap_or(0);
    findings
        .iter()
        .map(|finding| {
            let remedy =
                if finding.remedy.is_empty() { String::new() } else { format!(" -> {}", finding.remedy) };
            format!("{:<7} {:width$}  {}{remedy}\n", word(finding.level), finding.name, finding.found)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_each_with_the_remedy_behind() {
        let findings = [
            Finding { name: "kvm", level: Level::Ok, found: "API 12".into(), remedy: String::new() },
            Finding {
                name: "vhost-net",
                level: Level::Missing,
                found: "no".into(),
                remedy: "modprobe it".into(),
            },
        ];
        assert_eq!(text(&findings), "ok      kvm        API 12\nmissing vhost-net  no -> modprobe it\n");
    }
}
