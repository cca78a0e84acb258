//! `paravane run --kernel`.
use super::progress;
use super::render::{cpus, guest_memory, kvm_exits};
use crate::failure::Failure;
use paravane_command_line::output;
use paravane_vmm::{LinuxConfig, LinuxEnd, LinuxReport, NamedDevice, Power, Progress};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

/// Runs a Linux guest. Its console is stdout, so the report goes to stderr.
pub(crate) fn main(
    config: &LinuxConfig,
    devices: Vec<NamedDevice>,
    started: Instant,
) -> Result<ExitCode, Failure> {
    let progress = Arc::new(Progress::default());
    progress::cancel_on_signal(&progress)?;
    let report = paravane_vmm::run_linux(config, devices, Box::new(std::io::stdout()), &progress, started)
        .map_err(|error| Failure { status: error.exit_status(), error: error.into() })?;
    for line in lines(&report) {
        output::complain(&line);
    }
    Ok(ExitCode::from(match report.end {
        LinuxEnd::Power(_) => 0,
        LinuxEnd::Failed(_) => 1,
        LinuxEnd::Cancelled => 130,
    }))
}

fn lines(report: &LinuxReport) -> Vec<String> {
    let (how, registers) = match &report.end {
        LinuxEnd::Power(Power::Off) => ("powered off".to_owned(), [].as_slice()),
        LinuxEnd::Power(Power::Reset) => ("rebooted".to_owned(), [].as_slice()),
        LinuxEnd::Failed(failure) => (format!("failed: {}", failure.reason), failure.registers.as_slice()),
        LinuxEnd::Cancelled => ("was stopped by a signal".to_owned(), [].as_slice()),
    };
    let LinuxReport { restarts, exits, kicks, interrupts, messages, wall_s, .. } = report;
    let restarts = match restarts {
        0 => String::new(),
        1 => " and 1 restart".to_owned(),
        _ => format!(" and {restarts} restarts"),
    };
    let sum = format!(
        "paravane: the guest {how} after {wall_s:.1} s{restarts}: {exits} exits, {kicks} kicks, \
         {interrupts} interrupts ({messages} by MSI)"
    );
    let boot = report.boot_s.map(|boot| format!("  first request: after {boot:.2} s"));
    let kvm = report.kvm_exits.map(|exits| format!("  KVM exits: {}", kvm_exits(exits)));
    let memory = format!("  guest RAM: {}", guest_memory(&report.memory));
    let cpus = cpus(&report.cpus).enumerate().map(|(number, line)| format!("  CPU {number}: {line}"));
    let registers = registers.iter().map(|line| format!("  {line}"));
    let faults = report.faults.iter().map(|fault| format!("  {fault}"));
    [sum]
        .into_iter()
        .chain(boot)
        .chain(kvm)
        .chain([memory])
        .chain(cpus)
        .chain(registers)
        .chain(faults)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use paravane_vmm::{CpuFigures, MemoryFigures};

    #[test]
    fn the_line_says_how_it_ended_and_what_failed() {
        let report = LinuxReport {
            end: LinuxEnd::Power(Power::Off),
            restarts: 2,
            faults: vec!["device 0: torn".into()],
            exits: 3,
            kvm_exits: Some(70),
            boot_s: Some(0.5),
            cpus: [(1, 0.25), (2, 0.5)]
                .map(|(exits, cpu_s)| CpuFigures { exits, kvm_exits: None, cpu_s })
                .to_vec(),
            kicks: 2,
            interrupts: 1,
            messages: 0,
            memory: MemoryFigures { bytes: 1 << 30, resident: 96 << 20, huge: 64 << 20, is_shared: false },
            wall_s: 1.25,
        };
        let lines = lines(&report);
        assert!(
            lines[0]
                .starts_with("paravane: the guest powered off after 1.2 s and 2 restarts: 3 exits, 2 kicks"),
            "{lines:?}"
        );
        assert_eq!(lines[1], "  first request: after 0.50 s");
        assert_eq!(lines[2], "  KVM exits: 70, those that KVM handles included");
        assert_eq!(lines[3], "  guest RAM: 1.0 GiB private, 96.0 MiB used, 64.0 MiB of it in huge pages");
        assert_eq!(lines[5], "  CPU 1: 2 exits, 0.50 s of CPU time");
        assert_eq!(lines[6], "  device 0: torn");
    }
}
