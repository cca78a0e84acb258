//! USDT probes.
use super::markdown::Chapter;
use paravane_device::latency::{PROBE_ARGUMENTS, PROBES};

pub(super) fn chapter() -> String {
    let mut chapter = Chapter::new("Probes");
    chapter.paragraph(
        "USDT probes of the program, for bpftrace, perf, SystemTap and gdb; the provider is `paravane`. Each device \
         whose latencies are recorded has them: all devices of `paravane serve` without `--latencies off`, and those of \
         `paravane run`. Names and arguments are stable; new arguments come last. \
         [Trace with bpftrace](../howto/bpftrace.md) shows how to use them, \
         [Latencies](../explanation/latencies.md) explains the stages.",
    );
    let code = |name: &&str| format!("`{name}`");
    let rows = PROBES.iter().map(|probe| {
        let arguments: Vec<_> = probe.arguments.iter().map(code).collect();
        vec![code(&probe.name), probe.when.to_owned(), arguments.join(", ")]
    });
    chapter.table(&["Probe", "Fires when", "Arguments"], &rows.collect::<Vec<_>>());
    chapter.heading("Arguments");
    chapter.paragraph("The first argument is `arg0` in bpftrace, `$arg1` in SystemTap. All have 64 bits.");
    let rows = PROBE_ARGUMENTS.iter().map(|(name, meaning)| vec![code(name), (*meaning).to_owned()]);
    chapter.table(&["Argument", "Meaning"], &rows.collect::<Vec<_>>());
    chapter.finish()
}
