//! `paravane status`: asks daemons twice and shows the difference.
//!
//! ```text
//!   reports, rates --selection: devices and order--> JSON, or text: summary, table, problems
//! ```
mod daemon;
mod details;
pub(crate) mod latency;
pub(crate) mod order;
pub(crate) mod rates;
pub(crate) mod selection;
mod summary;
pub(crate) mod table;

use super::args::StatusArgs;
use super::control;
use super::report::{Device, Full, Report, Stopping, StorageErrors, Waiting};
use crate::failure::Failure;
use anyhow::Context;
use daemon::Daemon;
use paravane_command_line::{output, wrap};
use rates::rates;
use selection::Selection;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};
use summary::Summary;

/// Options of the text.
#[derive(Clone, Copy, Debug, Default)]
struct TextOptions {
    /// A filter hides some devices.
    filtered: bool,
    /// Show summaries only.
    summary: bool,
    /// Show operations, stages and queues of each device.
    details: bool,
    /// Maximum number of devices of a daemon.
    limit: Option<usize>,
    /// Columns of the terminal, if stdout is one.
    width: Option<usize>,
}

/// Exit status if a device of a file is not served.
const NOT_SERVED: u8 = 3;

pub(crate) fn main(args: &StatusArgs) -> Result<ExitCode, Failure> {
    let seconds = Duration::try_from_secs_f64(args.seconds).context("--seconds").map_err(Failure::request)?;
    let before = reports(args.control.as_deref())?;
    let asked = Instant::now();
    let mut daemons = Vec::new();
    let Answers { reports: after, silent } = if seconds.is_zero() {
        before.clone()
    } else {
        std::thread::sleep(seconds);
        reports(args.control.as_deref())?
    };
    let elapsed = asked.elapsed();
    for (control, report) in after {
        // A daemon that has started since has no rates yet.
        let is_it = |(path, before): &&(PathBuf, Report)| *path == control && before.pid == report.pid;
        let rates = match before.reports.iter().find(is_it).filter(|_| !seconds.is_zero()) {
            Some((_, earlier)) => rates(earlier, &report, elapsed),
            None => Vec::new(),
        };
        let all = report.devices.len();
        daemons.push(Daemon { control, report, rates, all, summary: Summary::default() });
    }
    let selection = Selection::new(args);
    for daemon in &mut daemons {
        selection.apply(daemon);
        daemon.summary = Summary::new(&daemon.report, &daemon.rates);
    }
    let options = TextOptions {
        filtered: selection.filters(),
        summary: args.summary,
        details: args.details,
        limit: selection.limit,
        width: wrap::terminal(),
    };
    if args.json {
        daemons.iter_mut().for_each(|daemon| daemon.truncate(selection.limit));
        output::print_json(&daemons)?;
    } else {
        output::print(&text(&daemons, options))?;
    }
    let mut missing: Vec<_> = silent;
    // --problems and --filter may hide a device that exists.
    if !args.problems && args.filter.is_none() {
        missing.extend(selection::missing(&args.devices, daemons.iter().flat_map(Daemon::names)));
    }
    if missing.is_empty() {
        let is_missed = daemons.iter().any(|daemon| !daemon.report.failed.is_empty());
        return Ok(if is_missed { ExitCode::from(NOT_SERVED) } else { ExitCode::SUCCESS });
    }
    Err(anyhow::anyhow!("{}", missing.join("; ")).into())
}

/// Answers of the daemons.
#[derive(Clone, Debug, Default)]
pub(crate) struct Answers {
    pub(crate) reports: Vec<(PathBuf, Report)>,
    /// Daemons without an answer, and why.
    pub(crate) silent: Vec<String>,
}

pub(crate) fn reports(control: Option<&Path>) -> Result<Answers, anyhow::Error> {
    if let Some(path) = control {
        let report = control::ask(path).with_context(|| path.display().to_string())?;
        return Ok(Answers { reports: vec![(path.to_owned(), report)], silent: Vec::new() });
    }
    let directory = control::directory();
    let directory = directory
        .context("XDG_RUNTIME_DIR is not set: name a daemon's control socket with --control PATH")?;
    let found = control::ask_all(&directory).with_context(|| directory.display().to_string())?;
    let mut answers = Answers::default();
    for (path, report) in found {
        match report {
            Ok(report) => answers.reports.push((path, report)),
            Err(error) => answers.silent.push(format!("{}: {error}", path.display())),
        }
    }
    Ok(answers)
}

fn text(daemons: &[Daemon], options: TextOptions) -> String {
    if daemons.is_empty() {
        return "no daemons running for this user\n".to_owned();
    }
    let mut out = String::new();
    for daemon in daemons {
        let Report { pid, version, uptime_s, last_reload, reload, devices, failed, waiting, .. } =
            &daemon.report;
        // Writing to a String cannot fail.
        let _ =
            writeln!(out, "paravane {version}, PID {pid}, up {uptime_s:.0} s, {}", daemon.control.display());
        if !last_reload.is_empty() {
            let time = reload.as_ref().map_or(String::new(), |reload| format!(" at {}", reload.time));
            line(&mut out, &format!("last reload{time}: {last_reload}"));
        }
        if let (Some(open), Some(most)) = (daemon.report.open_files, daemon.report.max_open_files)
            && open.saturating_mul(10) >= most.saturating_mul(9)
        {
            let _ = writeln!(out, "  ! {open} of {most} file descriptors in use: raise LimitNOFILE=");
        }
        let _ = writeln!(out, "{}", daemon.summary.line(options.filtered.then_some(daemon.all)));
        if options.summary {
            continue;
        }
        let shown = devices.len().min(options.limit.unwrap_or(usize::MAX));
        let rows = devices.iter().enumerate().map(|(index, device)| (device, daemon.rates.get(index)));
        if shown > 0 {
            out += &table::table(rows.take(shown), options.width);
        }
        if shown < devices.len() {
            let _ = writeln!(out, "({} more devices)", devices.len() - shown);
        }
        for device in &devices[..shown] {
            if options.details {
                out += &details::text(device);
            }
            problems(device, &mut out);
        }
        for Waiting { name, why, seconds } in waiting {
            line(&mut out, &format!("  ! {name}: waiting for {why} ({seconds:.0} s)"));
        }
        for failed in failed {
            let kept = if failed.kept { "; its session is kept" } else { "" };
            let again = failed.retry_s.map_or(String::new(), |time| format!("; tried again in {time:.0} s"));
            line(&mut out, &format!("  ! {}: not served: {}{kept}{again}", failed.name, failed.why));
        }
    }
    if let [first, others @ ..] = daemons
        && !others.is_empty()
    {
        let sum = others.iter().fold(first.summary.clone(), |sum, other| sum.plus(&other.summary));
        let all = daemons.iter().map(|daemon| daemon.all).sum();
        let _ = writeln!(out, "{} daemons: {}", daemons.len(), sum.line(options.filtered.then_some(all)));
    }
    out
}

/// Problems of a device, a line for each.
fn problems(device: &Device, out: &mut String) {
    let mut problem = |what: &str| line(out, &format!("  ! {}{what}", device.name));
    for queue in &device.queues {
        if let Some(error) = &queue.error {
            problem(&format!(" queue {}: {error}", queue.index));
        }
    }
    let full = device.full.as_ref().map(|Full { since, requests, error, .. }| {
        format!("full since {since}: {requests} writes wait for room: {error}")
    });
    let errors = [
        ("", device.last_error.as_ref()),
        ("sessions are not kept for the next daemon: ", device.not_kept.as_ref()),
        ("", device.host_error.as_ref()),
        ("", device.storage_errors.as_ref().filter(|errors| errors.total() > 0).map(storage).as_ref()),
        ("cannot read the size of the image: ", device.size_error.as_ref()),
        ("", full.as_ref()),
    ]
    .map(|(what, error)| error.map(|error| format!(": {what}{error}")));
    errors.iter().flatten().for_each(|error| problem(error));
    if device.image_deleted {
        problem(": the image was deleted; its data are lost when the device stops");
    }
    for store in device.stores.iter().filter(|store| store.has_problem()) {
        let what = match store.link.as_str() {
            "up" => "chunks are not cached".to_owned(),
            "stalled" => format!("no reply: {} requests wait", store.waiting),
            "reconnecting" => format!("connecting again: {} requests wait", store.waiting),
            "down" => "unreachable: requests fail".to_owned(),
            _ => "unusable: all requests fail".to_owned(),
        };
        let error = store.error.as_ref().map(|error| format!(": {error}")).unwrap_or_default();
        problem(&format!(": {} {what}{error}", store.location));
    }
    if let Some(Stopping { seconds, in_flight }) = &device.stopping {
        problem(&format!(": stopping for {seconds:.0} s: {in_flight} requests in flight"));
    }
    if let Some(failed) = &device.failed {
        problem(&format!(
            ": device failed (internal error: a thread panicked: {failed}); reload to restart it"
        ));
    }
}

/// The line of storage errors.
///
/// "storage errors: 3 write, 1 flush; last 2026-11-23T05:57:20.123Z: write, sector 8, 4096 bytes,
/// queue 0: No space left".
fn storage(errors: &StorageErrors) -> String {
    let counts = errors.operations().into_iter().filter(|(_, count)| *count > 0);
    let counts: Vec<_> = counts.map(|(name, count)| format!("{count} {name}")).collect();
    let mut text = format!("storage errors: {}", counts.join(", "));
    if let Some(last) = &errors.last {
        let sector = match last.sector {
            Some(sector) => format!(", sector {sector}, {} bytes", last.bytes),
            None => String::new(),
        };
        let _ = write!(
            text,
            "; last {}: {}{sector}, queue {}: {}",
            last.time, last.operation, last.queue, last.error
        );
    }
    text
}

/// Appends one line. Control characters of untrusted text are escaped.
fn line(out: &mut String, text: &str) {
    for c in text.chars() {
        match c.is_control() {
            true => out.extend(c.escape_default()),
            false => out.push(c),
        }
    }
    out.push('\n');
}

#[cfg(test)]
mod tests {
    use super::rates::Rates;
    use super::*;
    use crate::serve::report::{Failed, Net, Queue, Reload, StorageError};
    use table::HEAD;

    fn report(completed: u64) -> Report {
        let queue = |index| Queue { index, enabled: index == 0, completed, ..Queue::default() };
        let disk = Device {
            name: "vm0".into(),
            kind: "blk".into(),
            queues: vec![queue(0), Queue { error: Some("it broke".into()), ..queue(1) }],
            connected: true,
            ..Device::default()
        };
        let net = Net { received_bytes: completed * 1_000_000, ..Net::default() };
        let card = Device { name: "n".into(), kind: "net".into(), net: Some(net), ..Device::default() };
        let failed = vec![Failed { name: "x".into(), why: "no image".into(), ..Failed::default() }];
        let blown = Some("the fuse".into());
        let rng = Device { name: "r".into(), kind: "rng".into(), failed: blown, ..Device::default() };
        let stopping = Some(Stopping { seconds: 4.0, in_flight: 7 });
        let old = Device { name: "o".into(), kind: "blk".into(), stopping, ..Device::default() };
        let why = "device o to stop".into();
        let waiting = vec![Waiting { name: "n2".into(), why, seconds: 3.0 }];
        Report { pid: 5, devices: vec![disk, card, rng, old], failed, waiting, ..Report::default() }
    }

    #[test]
    fn rates_are_what_came_in_between() {
        let rates = rates(&report(10), &report(30), Duration::from_secs(2));
        assert_eq!((rates[0].completed_per_s, rates[0].kicks_per_s), (20.0, 0.0));
        assert_eq!((rates[1].received_mb_per_s, rates[1].transmitted_mb_per_s), (10.0, 0.0));
        // It was made anew, and counts from the beginning.
        assert_eq!(rates::rates(&report(30), &report(10), Duration::from_secs(1))[0].completed_per_s, 0.0);
        assert_eq!(rates::rates(&Report::default(), &report(9), Duration::from_secs(1))[0], Rates::default());
    }

    fn daemon() -> Daemon {
        let (report, rates) = (report(4), rates(&report(0), &report(4), Duration::from_secs(1)));
        let summary = Summary::new(&report, &rates);
        Daemon { control: "/c.sock".into(), all: report.devices.len(), report, rates, summary }
    }

    #[test]
    fn the_table_names_devices_and_what_is_wrong() {
        let text = text(&[daemon()], TextOptions::default());
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines[0], "paravane , PID 5, up 0 s, /c.sock");
        let summary = "4 devices, 1 connected, 1 failed, 1 stopping, 1 waiting, 1 not served, 3 with problems, 1 error, 8 done/s, 4.0 MB/s";
        assert_eq!(lines[1], summary);
        assert_eq!(lines[2].split_whitespace().collect::<Vec<_>>(), HEAD);
        let cells: Vec<_> = lines[3].split_whitespace().collect();
        assert_eq!(
            cells,
            ["vm0", "blk", "connected", "0", "1/2", "8", "-", "-", "-", "-", "0", "0", "-", "1"]
        );
        assert!(lines[4].contains("0.0/4.0"), "{text}");
        assert!(lines[5].starts_with("r ") && lines[5].contains(" failed "), "{text}");
        assert!(lines[6].starts_with("o ") && lines[6].contains(" stopping "), "{text}");
        let wrong = [
            "  ! vm0 queue 1: it broke",
            "  ! r: device failed (internal error: a thread panicked: the fuse); reload to restart it",
            "  ! o: stopping for 4 s: 7 requests in flight",
            "  ! n2: waiting for device o to stop (3 s)",
            "  ! x: not served: no image",
        ];
        assert_eq!(lines[7..], wrong);
        assert!(super::text(&[], TextOptions::default()).contains("no daemons"));
    }

    #[test]
    fn a_full_disk_is_a_line() {
        let mut daemon = daemon();
        let since = "2026-11-23T05:57:20.123Z".into();
        let full = Full { since, requests: 3, error: "No space".into(), ..Full::default() };
        daemon.report.devices[0].full = Some(full);
        assert!(daemon.report.devices[0].has_problem());
        let text = text(&[daemon], TextOptions::default());
        let line = "  ! vm0: full since 2026-11-23T05:57:20.123Z: 3 writes wait for room: No space";
        assert!(text.lines().any(|there| there == line), "{text}");
    }

    #[test]
    fn storage_errors_are_a_line_with_the_last_one() {
        let mut daemon = daemon();
        let last = StorageError {
            time: "2026-11-23T05:57:20.123Z".into(),
            operation: "write".into(),
            sector: Some(8),
            bytes: 4096,
            error: "No space left\n\u{1b}[31m".into(),
            ..StorageError::default()
        };
        let errors = StorageErrors { write: 3, flush: 1, last: Some(last), ..StorageErrors::default() };
        daemon.report.devices[0].storage_errors = Some(errors);
        let text = text(&[daemon], TextOptions::default());
        let line = "  ! vm0: storage errors: 3 write, 1 flush; last 2026-11-23T05:57:20.123Z: write, sector 8, 4096 bytes, \
                    queue 0: No space left\\n\\u{1b}[31m";
        assert!(text.lines().any(|there| there == line), "{text}");
        let row = text.lines().find(|line| line.starts_with("vm0 ")).unwrap();
        assert!(row.ends_with(" 5"), "{text}");
    }

    #[test]
    fn summaries_and_limits_make_it_short() {
        let summary = TextOptions { summary: true, ..TextOptions::default() };
        let text = super::text(&[daemon(), daemon()], summary);
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines.len(), 5, "{text}");
        assert!(lines[4].starts_with("2 daemons: 8 devices, 2 connected"), "{text}");
        let limit = TextOptions { limit: Some(1), filtered: true, ..TextOptions::default() };
        let text = super::text(&[daemon()], limit);
        assert!(text.contains("\n4 of 4 devices, ") && text.contains("\n(3 more devices)\n"), "{text}");
        assert!(text.contains("\nvm0 ") && !text.contains("\nn ") && !text.contains("the fuse"), "{text}");
        let mut daemon = daemon();
        daemon.report.last_reload = "2 unchanged".into();
        daemon.report.reload = Some(Reload { time: "T".into(), ..Reload::default() });
        (daemon.report.open_files, daemon.report.max_open_files) = (Some(1000), Some(1024));
        let text = super::text(&[daemon], TextOptions::default());
        assert!(text.contains("\nlast reload at T: 2 unchanged\n"), "{text}");
        assert!(text.contains("1000 of 1024 file descriptors"), "{text}");
    }
}
