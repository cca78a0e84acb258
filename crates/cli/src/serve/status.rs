//! `paravane status`: asks twice, and shows what happened in between.
use super::args::StatusArgs;
use super::control;
use super::report::{Device, Report};
use crate::{Failure, output};
use anyhow::Context;
use serde::Serialize;
use std::fmt::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// A daemon and what it does a second.
#[derive(Debug, Serialize)]
struct Daemon {
    control: PathBuf,
    #[serde(flatten)]
    report: Report,
    /// One for each device of the report, in its order; empty if no time went by.
    rates: Vec<Rates>,
}

/// A second, over all queues.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
struct Rates {
    /// Buffers given back to the driver.
    completed_per_s: f64,
    kicks_per_s: f64,
    interrupts_per_s: f64,
    /// From the guest, and to it: network cards only.
    transmitted_mb_per_s: f64,
    received_mb_per_s: f64,
}

pub(crate) fn main(args: &StatusArgs) -> Result<ExitCode, Failure> {
    let seconds = Duration::try_from_secs_f64(args.seconds).context("--seconds").map_err(Failure::request)?;
    let before = reports(args)?;
    let asked = Instant::now();
    let mut daemons = Vec::new();
    if seconds.is_zero() {
        daemons.extend(before.into_iter().map(|(control, report)| Daemon {
            control,
            report,
            rates: Vec::new(),
        }));
    } else {
        std::thread::sleep(seconds);
        let after = reports(args)?;
        let elapsed = asked.elapsed();
        for (control, report) in after {
            // One that was started since has no rates yet.
            let earlier = before.iter().find(|(path, before)| *path == control && before.pid == report.pid);
            let rates = match earlier {
                Some((_, earlier)) => rates(earlier, &report, elapsed),
                None => Vec::new(),
            };
            daemons.push(Daemon { control, report, rates });
        }
    }
    if args.json {
        output::print_json(&daemons)?;
    } else {
        output::print(&text(&daemons))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn reports(args: &StatusArgs) -> Result<Vec<(PathBuf, Report)>, anyhow::Error> {
    if let Some(path) = &args.control {
        let report = control::ask(path).with_context(|| path.display().to_string())?;
        return Ok(vec![(path.clone(), report)]);
    }
    let directory = control::directory();
    let directory =
        directory.context("XDG_RUNTIME_DIR names no directory; --control PATH names a daemon's socket")?;
    let found = control::ask_all(&directory).with_context(|| directory.display().to_string())?;
    let each = found.into_iter().map(|(path, report)| {
        let report = report.with_context(|| path.display().to_string())?;
        Ok((path, report))
    });
    each.collect()
}

fn rates(before: &Report, after: &Report, elapsed: Duration) -> Vec<Rates> {
    let of = |device: &Device| {
        let Some(earlier) = before.devices.iter().find(|earlier| earlier.name == device.name) else {
            return Rates::default();
        };
        // A device that was made anew in between counts from 0.
        let per_s = |now: u64, then: u64| now.saturating_sub(then) as f64 / elapsed.as_secs_f64();
        let ([kicks, _, completed, interrupts], [kicks0, _, completed0, interrupts0]) =
            (device.totals(), earlier.totals());
        let (net, net0) = (device.net.clone().unwrap_or_default(), earlier.net.clone().unwrap_or_default());
        Rates {
            completed_per_s: per_s(completed, completed0),
            kicks_per_s: per_s(kicks, kicks0),
            interrupts_per_s: per_s(interrupts, interrupts0),
            transmitted_mb_per_s: per_s(net.transmitted_bytes, net0.transmitted_bytes) * 1e-6,
            received_mb_per_s: per_s(net.received_bytes, net0.received_bytes) * 1e-6,
        }
    };
    after.devices.iter().map(of).collect()
}

const HEAD: [&str; 10] =
    ["DEVICE", "KIND", "CLIENT", "SESSIONS", "QUEUES", "DONE/s", "KICKS/s", "IRQS/s", "MB/s", "ERRORS"];

fn text(daemons: &[Daemon]) -> String {
    if daemons.is_empty() {
        return "no daemon of this user is there\n".to_owned();
    }
    let mut out = String::new();
    for daemon in daemons {
        let Report { pid, version, uptime_s, last_reload, devices, failed } = &daemon.report;
        // Writing to a String cannot fail.
        let _ = writeln!(
            out,
            "paravane {version}, process {pid}, up {uptime_s:.0} s, {}",
            daemon.control.display()
        );
        if !last_reload.is_empty() {
            let _ = writeln!(out, "last reload: {last_reload}");
        }
        let mut rows = vec![HEAD.map(str::to_owned)];
        for (number, device) in devices.iter().enumerate() {
            rows.push(row(device, daemon.rates.get(number)));
        }
        out += &aligned(&rows);
        for device in devices {
            for queue in &device.queues {
                if let Some(error) = &queue.error {
                    let _ = writeln!(out, "  ! {} queue {}: {error}", device.name, queue.index);
                }
            }
            if let Some(error) = &device.last_error {
                let _ = writeln!(out, "  ! {}: {error}", device.name);
            }
            if let Some(failed) = &device.failed {
                let _ =
                    writeln!(out, "  ! {} is served no more, a thread of it panicked: {failed}", device.name);
            }
        }
        for failed in failed {
            let _ = writeln!(out, "  ! {} is not served: {}", failed.name, failed.why);
        }
    }
    out
}

fn row(device: &Device, rates: Option<&Rates>) -> [String; 10] {
    let rate = |of: fn(&Rates) -> f64| rates.map_or("-".to_owned(), |rates| format!("{:.0}", of(rates)));
    let enabled = device.queues.iter().filter(|queue| queue.enabled).count();
    let megabytes = match (rates, &device.net) {
        (Some(rates), Some(_)) => {
            format!("{:.1} out {:.1} in", rates.transmitted_mb_per_s, rates.received_mb_per_s)
        }
        _ => "-".to_owned(),
    };
    [
        device.name.clone(),
        device.kind.clone(),
        match (&device.failed, device.connected) {
            (Some(_), _) => "failed",
            (None, true) => "connected",
            (None, false) => "-",
        }
        .to_owned(),
        device.sessions.to_string(),
        format!("{enabled}/{}", device.queues.len()),
        rate(|rates| rates.completed_per_s),
        rate(|rates| rates.kicks_per_s),
        rate(|rates| rates.interrupts_per_s),
        megabytes,
        (device.protocol_errors + device.latched() as u64).to_string(),
    ]
}

/// Columns as wide as what is in them.
fn aligned(rows: &[[String; 10]]) -> String {
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<_> = (0..HEAD.len()).map(width).collect();
    let line = |row: &[String; 10]| {
        let cells: Vec<_> = row.iter().zip(&widths).map(|(cell, &width)| format!("{cell:<width$}")).collect();
        format!("{}\n", cells.join("  ").trim_end())
    };
    rows.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serve::report::{Failed, Net, Queue};

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
        let failed = vec![Failed { name: "x".into(), why: "no image".into() }];
        let blown = Some("the fuse".into());
        let rng = Device { name: "r".into(), kind: "rng".into(), failed: blown, ..Device::default() };
        Report { pid: 5, devices: vec![disk, card, rng], failed, ..Report::default() }
    }

    #[test]
    fn rates_are_what_came_in_between() {
        let rates = rates(&report(10), &report(30), Duration::from_secs(2));
        assert_eq!((rates[0].completed_per_s, rates[0].kicks_per_s), (20.0, 0.0));
        assert_eq!((rates[1].received_mb_per_s, rates[1].transmitted_mb_per_s), (10.0, 0.0));
        // It was made anew, and counts from the beginning.
        assert_eq!(super::rates(&report(30), &report(10), Duration::from_secs(1))[0].completed_per_s, 0.0);
        assert_eq!(super::rates(&Report::default(), &report(9), Duration::from_secs(1))[0], Rates::default());
    }

    #[test]
    fn the_table_names_devices_and_what_is_wrong() {
        let rates = rates(&report(0), &report(4), Duration::from_secs(1));
        let text = text(&[Daemon { control: "/c.sock".into(), report: report(4), rates }]);
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines[0], "paravane , process 5, up 0 s, /c.sock");
        assert_eq!(lines[1].split_whitespace().collect::<Vec<_>>(), HEAD);
        let cells: Vec<_> = lines[2].split_whitespace().collect();
        assert_eq!(cells, ["vm0", "blk", "connected", "0", "1/2", "8", "0", "0", "-", "1"]);
        assert!(lines[3].contains("0.0 out 4.0 in"), "{text}");
        assert!(lines[4].starts_with("r ") && lines[4].contains(" failed "), "{text}");
        let wrong = [
            "  ! vm0 queue 1: it broke",
            "  ! r is served no more, a thread of it panicked: the fuse",
            "  ! x is not served: no image",
        ];
        assert_eq!(lines[5..], wrong);
        assert!(super::text(&[]).contains("no daemon"));
    }
}
