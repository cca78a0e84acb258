//! The report of a run, as text and as JSON.
use super::queues;
use crate::mac;
use crate::size::bytes;
use paravane_command_line::wrap;
use paravane_vmm::{
    CpuFigures, DirtyFigures, DiskResult, ExitFigures, MemoryFigures, NetResult, Outcome, Report,
};
use serde::Serialize;
use std::fmt::Write;

/// The report as JSON. Names and units are stable: add fields, never rename one.
#[derive(Debug, Serialize)]
pub(crate) struct JsonReport<'a> {
    /// All jobs are done and verified.
    verified: bool,
    /// "verified", "not verified", "cancelled" or "guest failed".
    outcome: &'static str,
    /// Problems, one line each.
    problems: Vec<&'a str>,
    /// The guest's registers after a crash or hang.
    registers: &'a [String],
    #[serde(flatten)]
    report: &'a Report,
}

pub(crate) fn json(report: &Report) -> JsonReport<'_> {
    JsonReport {
        verified: report.outcome == Outcome::Verified,
        outcome: outcome(report),
        problems: problems(report),
        registers: match &report.outcome {
            Outcome::GuestFailed(failure) => &failure.registers,
            _ => &[],
        },
        report,
    }
}

fn outcome(report: &Report) -> &'static str {
    match report.outcome {
        Outcome::Verified => "verified",
        Outcome::NotVerified(_) => "not verified",
        Outcome::Cancelled => "cancelled",
        Outcome::GuestFailed(_) => "guest failed",
    }
}

fn problems(report: &Report) -> Vec<&str> {
    match &report.outcome {
        Outcome::NotVerified(problems) => problems.iter().map(String::as_str).collect(),
        Outcome::GuestFailed(failure) => vec![&failure.reason],
        Outcome::Verified | Outcome::Cancelled => Vec::new(),
    }
}

/// Column of values in the text.
const INDENT: usize = 14;

/// The report as text.
pub(crate) fn text(report: &Report) -> String {
    let mut out = String::new();
    // Writing to a String cannot fail.
    let _ = write_text(&mut out, report);
    out
}

fn write_text(out: &mut String, report: &Report) -> std::fmt::Result {
    writeln!(out, "{}", outcome(report).to_uppercase())?;
    for problem in problems(report) {
        writeln!(out, "  ! {problem}")?;
    }
    if let Outcome::GuestFailed(failure) = &report.outcome {
        for line in &failure.registers {
            writeln!(out, "    {line}")?;
        }
    }
    for disk in &report.disks {
        write_disk(out, disk)?;
    }
    for net in &report.nets {
        write_net(out, net)?;
    }
    let mut row = |name: &str, value: String| {
        out.write_str(&wrap::row(&format!("  {name}"), INDENT, &value, wrap::columns()))
    };
    row("accel", format!("{} ({})", report.accel, report.accel_reason))?;
    let iommu = if report.iommu { ", devices behind IOMMU domains" } else { "" };
    let version = if report.mmio_version == Some(3) { " version 3" } else { "" };
    row("transport", format!("{}{version}, {} virtqueues{iommu}", report.transport, report.ring))?;
    row("boot", boot(report))?;
    let ExitFigures { notify, interrupt_status, interrupt_acknowledge, other } = report.exits_by_kind;
    let exits = report.exits;
    row(
        "exits",
        format!(
            "{exits} ({notify} kicks, {interrupt_status} reads of the interrupt status, {interrupt_acknowledge} \
             interrupt acknowledgements, {other} other)"
        ),
    )?;
    if let Some(exits) = report.kvm_exits {
        row("KVM exits", kvm_exits(exits))?;
    }
    for (line, number) in cpus(&report.cpus).zip(0..) {
        let names = queues::of_cpu(&report.queues, number);
        let names = if names.is_empty() { names } else { format!("; {names}") };
        row(&format!("CPU {number}"), line + &names)?;
    }
    row("kicks", format!("{} ({} by exit)", report.kicks, report.exit_kicks))?;
    row("queues", queues::paths(&report.queues))?;
    for (name, line) in queues::threads(report) {
        row(&name, line)?;
    }
    row("interrupts", format!("{} ({} by MSI)", report.interrupts, report.messages))?;
    if report.violations > 0 {
        row(
            "violations",
            format!("{} register accesses that the specification forbids drivers", report.violations),
        )?;
    }
    if let Some(dirty) = &report.dirty {
        row("dirty log", dirty_log(dirty))?;
    }
    if report.moves > 0 {
        row("moves", format!("{} of a queue's interrupts to another CPU", report.moves))?;
    }
    if report.entropy_bytes > 0 {
        row("entropy", format!("{} read by the guest", bytes(report.entropy_bytes)))?;
    }
    row("host CPU", format!("{:.2} s, {:.0} MB per CPU second", report.host_cpu_s, report.mb_per_cpu_s))?;
    row("guest RAM", guest_memory(&report.memory))?;
    row("memory", format!("{} beyond guest RAM", bytes(report.resident_overhead)))?;
    row("wall time", format!("{:.2} s", report.wall_s))
}

/// What it took the guest to publish its first request.
fn boot(report: &Report) -> String {
    let ms = report.boot_ms;
    let kvm = report.boot_kvm_exits.map(|exits| format!(", {exits} KVM exits")).unwrap_or_default();
    let exits = report.boot_exits.map(|exits| format!("; {exits} exits{kvm}")).unwrap_or_default();
    format!("{ms:.1} ms from process start to the first request{exits}")
}

/// Exits by KVM's count, in one line.
pub(super) fn kvm_exits(exits: u64) -> String {
    format!("{exits}, those that KVM handles included")
}

/// A line for each processor, if there are several.
pub(super) fn cpus(cpus: &[CpuFigures]) -> impl Iterator<Item = String> {
    let several = cpus.iter().filter(|_| cpus.len() > 1);
    several.map(|CpuFigures { exits, kvm_exits, cpu_s }| {
        let kvm = kvm_exits.map(|exits| format!(", {exits} KVM exits")).unwrap_or_default();
        format!("{exits} exits{kvm}, {cpu_s:.2} s of CPU time")
    })
}

/// What the host gave of guest RAM, in one line.
pub(super) fn guest_memory(memory: &MemoryFigures) -> String {
    let MemoryFigures { bytes: size, is_shared, resident, huge } = *memory;
    let kind = if is_shared { "shared" } else { "private" };
    format!("{} {kind}, {} used, {} of it in huge pages", bytes(size), bytes(resident), bytes(huge))
}

fn dirty_log(dirty: &DirtyFigures) -> String {
    let DirtyFigures { harvests, pages, device_pages, vcpu_pages, pages_per_s, verified } = dirty;
    let guest = match vcpu_pages {
        Some(pages) => format!("{pages} by the guest"),
        None => "writes of the guest are not logged".to_owned(),
    };
    let verified = match verified {
        Some(true) => "; verified: no write was missed",
        Some(false) => "; NOT VERIFIED: WRITES WERE MISSED",
        None => "",
    };
    format!(
        "{pages_per_s:.0} pages/s ({pages} pages in {harvests} collections: {device_pages} by devices, {guest}){verified}"
    )
}

fn write_disk(out: &mut String, disk: &DiskResult) -> std::fmt::Result {
    let queues = if disk.queues == 1 { String::new() } else { format!(", {} queues", disk.queues) };
    writeln!(
        out,
        "  disk        {} ({}, {}{queues}, {})",
        disk.path.display(),
        bytes(disk.bytes),
        disk.job,
        disk.engine
    )?;
    writeln!(out, "    verified  {} ({} bytes)", bytes(disk.bytes_verified), disk.bytes_verified)?;
    if !disk.sha256.is_empty() {
        writeln!(out, "    sha256    {}", disk.sha256)?;
    }
    if disk.iops > 0.0 {
        writeln!(out, "    rate      {:.0} IOPS, {:.1} MB/s", disk.iops, disk.mb_s)?;
        write_latency(out, [disk.p50_us, disk.p99_us, disk.p999_us])?;
    }
    Ok(())
}

fn write_net(out: &mut String, net: &NetResult) -> std::fmt::Result {
    let NetResult { network, queues, size, reply, frames, per_s, .. } = net;
    writeln!(out, "  net         {} ({network}, queue pairs: {queues})", mac::text(&net.mac))?;
    if reply == size {
        writeln!(out, "    verified  {frames} frames of {size} bytes, sent and returned")?;
    } else {
        writeln!(out, "    verified  {frames} frames of {size} bytes, {reply} bytes returned for each")?;
    }
    if *per_s > 0.0 {
        writeln!(out, "    rate      {per_s:.0} frames/s")?;
        write_latency(out, [net.p50_us, net.p99_us, net.p999_us])?;
    }
    Ok(())
}

fn write_latency(out: &mut String, [p50, p99, p999]: [f64; 3]) -> std::fmt::Result {
    writeln!(out, "    latency   p50 {p50:.0} µs, p99 {p99:.0} µs, p99.9 {p999:.0} µs")
}

#[cfg(test)]
mod tests {
    use super::*;
    use paravane_vmm::{GuestFailure, PhaseFigures};

    fn report(outcome: Outcome) -> Report {
        Report {
            outcome,
            accel: "thread",
            accel_reason: "asked for with --accel thread".into(),
            transport: "mmio",
            mmio_version: Some(3),
            ring: "split",
            iommu: true,
            dirty: Some(DirtyFigures {
                harvests: 4,
                pages: 30,
                device_pages: 20,
                vcpu_pages: None,
                pages_per_s: 12.5,
                verified: None,
            }),
            disks: vec![DiskResult {
                path: "a.img".into(),
                job: "hash",
                bytes: 1 << 20,
                queues: 1,
                sha256: "ab".repeat(32),
                bytes_verified: 1 << 20,
                requests: 1,
                iops: 1.0,
                mb_s: 2.0,
                p50_us: 3.0,
                p99_us: 4.0,
                p999_us: 5.0,
                engine: "io_uring".into(),
                problem: None,
            }],
            nets: vec![NetResult {
                network: "echo",
                mac: [2, 0, 0, 0, 0, 0xab],
                queues: 2,
                size: 64,
                reply: 1024,
                frames: 1000,
                per_s: 1.0,
                p50_us: 3.0,
                p99_us: 4.0,
                p999_us: 5.0,
                problem: None,
            }],
            exits: 1,
            kvm_exits: Some(9),
            cpus: vec![CpuFigures { exits: 1, kvm_exits: Some(9), cpu_s: 0.5 }],
            exits_by_kind: ExitFigures { notify: 1, ..ExitFigures::default() },
            kick_stops: None,
            measured: Some(PhaseFigures { kicks: 1, cpu_s: 0.25, ..PhaseFigures::default() }),
            kicks: 2,
            exit_kicks: 1,
            queues: Vec::new(),
            io_threads: Vec::new(),
            interrupts: 3,
            messages: 2,
            violations: 0,
            entropy_bytes: 0,
            moves: 0,
            host_cpu_s: 0.5,
            mb_per_cpu_s: 10.0,
            boot_ms: 1.5,
            boot_exits: Some(1),
            boot_kvm_exits: Some(8),
            wall_s: 2.0,
            memory: MemoryFigures { bytes: 128 << 20, resident: 64 << 20, ..MemoryFigures::default() },
            resident_overhead: 5 << 20,
        }
    }

    #[test]
    fn json_has_its_stable_names() {
        let value = serde_json::to_value(json(&report(Outcome::Verified))).unwrap();
        assert_eq!(value["verified"], true);
        let keys = [
            "accel",
            "accel_reason",
            "transport",
            "mmio_version",
            "exits",
            "kicks",
            "interrupts",
            "host_cpu_s",
            "boot_ms",
        ];
        for key in keys {
            assert!(!value[key].is_null(), "{key}");
        }
        assert_eq!(value["violations"], 0);
        let kvm = [&value["kvm_exits"], &value["boot_kvm_exits"], &value["cpus"][0]["kvm_exits"]];
        assert_eq!(kvm.map(|exits| exits.as_u64().unwrap()), [9, 8, 9]);
        assert_eq!(value["memory"]["resident_bytes"], 64 << 20);
        let measured = &value["measured"];
        assert_eq!((&measured["kicks"], &measured["cpu_s"]), (&1.into(), &0.25.into()));
        assert_eq!((&measured["interrupts"], &measured["exits_by_kind"]["notify"]), (&0.into(), &0.into()));
        assert_eq!(value["nets"][0]["mac"], "02:00:00:00:00:ab");
        for key in ["network", "queues", "size", "reply", "frames", "per_s", "p50_us", "p99_us", "p999_us"] {
            assert!(!value["nets"][0][key].is_null(), "{key}");
        }
        let disk = &value["disks"][0];
        for key in [
            "path",
            "bytes",
            "queues",
            "sha256",
            "bytes_verified",
            "iops",
            "mb_s",
            "p50_us",
            "p99_us",
            "p999_us",
        ] {
            assert!(!disk[key].is_null(), "{key}");
        }
    }

    #[test]
    fn a_failed_guest_shows_reason_and_registers() {
        let failure = GuestFailure { reason: "it hung".into(), registers: vec!["rip=0x1".into()] };
        let report = report(Outcome::GuestFailed(failure));
        let text = text(&report);
        assert!(text.starts_with("GUEST FAILED\n  ! it hung\n    rip=0x1\n"), "{text}");
        assert_eq!(serde_json::to_value(json(&report)).unwrap()["verified"], false);
    }

    #[test]
    fn exits_are_counted_until_the_first_request_and_in_all() {
        // Lines are broken where they get long.
        let text = text(&report(Outcome::Verified)).split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(text.contains("to the first request; 1 exits, 8 KVM exits"), "{text}");
        assert!(text.contains("KVM exits 9, those that KVM handles included"), "{text}");
        let others =
            Report { boot_exits: None, boot_kvm_exits: None, kvm_exits: None, ..report(Outcome::Cancelled) };
        let text = super::text(&others);
        assert!(text.contains("to the first request\n") && !text.contains("KVM exits"), "{text}");
    }

    #[test]
    fn sizes_are_written_for_people() {
        assert_eq!(bytes(512), "512 bytes");
        assert_eq!(bytes(64 << 20), "64.0 MiB");
    }
}
