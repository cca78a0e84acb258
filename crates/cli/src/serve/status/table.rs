//! Table of devices that fits the terminal.
use super::latency::{Percentiles, short_duration};
use super::rates::{self, Rates};
use crate::serve::report::Device;

const COLUMNS: usize = 14;
/// The cells of one line.
type Row = [String; COLUMNS];

pub(super) const HEAD: [&str; COLUMNS] = [
    "DEVICE", "KIND", "CLIENT", "SESSIONS", "QUEUES", "DONE/s", "P50", "P99", "P99.9", "DEPTH", "KICKS/s",
    "IRQS/s", "MB/s", "ERRORS",
];
/// Columns of words; the others hold numbers, aligned to the right.
const WORDS: [usize; 3] = [0, 1, 2];
/// Columns hidden on a narrow terminal, in this order.
///
/// IRQS/s, SESSIONS, P99.9, KICKS/s, KIND, DEPTH, P50, P99.
const SPARE: [usize; 8] = [11, 3, 8, 10, 1, 9, 6, 7];
/// Minimum width of long names before columns are hidden.
const NAME: usize = 24;
/// Minimum width of long names after that.
const SHORTEST_NAME: usize = 8;

/// All devices, in lines of at most `width` characters.
pub(super) fn table<'a>(
    devices: impl Iterator<Item = (&'a Device, Option<&'a Rates>)>,
    width: Option<usize>,
) -> String {
    let mut rows = vec![HEAD.map(str::to_owned)];
    rows.extend(devices.map(|(device, rates)| row(device, rates)));
    let widths: Vec<_> = (0..COLUMNS).map(|column| widest(&rows, column)).collect();
    let mut columns: Vec<_> = (0..COLUMNS).collect();
    // Columns are separated by two blanks.
    let others = |columns: &[usize]| columns[1..].iter().map(|&column| widths[column] + 2).sum::<usize>();
    let mut name = widths[0];
    if let Some(width) = width {
        let mut spare = SPARE.iter();
        while others(&columns) + name.min(NAME) > width
            && let Some(least) = spare.next()
        {
            columns.retain(|column| column != least);
        }
        name = name.min(width.saturating_sub(others(&columns)).max(SHORTEST_NAME));
    }
    let line = |row: &Row| {
        let cell = |&column: &usize| match column {
            0 => format!("{:name$}", shortened(&row[0], name)),
            _ if WORDS.contains(&column) => format!("{:1$}", row[column], widths[column]),
            _ => format!("{:>1$}", row[column], widths[column]),
        };
        let cells: Vec<_> = columns.iter().map(cell).collect();
        format!("{}\n", cells.join("  ").trim_end())
    };
    rows.iter().map(line).collect()
}

fn widest(rows: &[Row], column: usize) -> usize {
    rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0)
}

/// Shortens a name in the middle, as names differ at their ends.
pub(crate) fn shortened(name: &str, width: usize) -> String {
    let count = name.chars().count();
    if count <= width || width < 3 {
        return name.to_owned();
    }
    let (head, tail) = (width / 2, width - 1 - width / 2);
    name.chars().take(head).chain(['…']).chain(name.chars().skip(count - tail)).collect()
}

fn row(device: &Device, rates: Option<&Rates>) -> Row {
    let rate = |of: fn(&Rates) -> f64| rates.map_or("-".to_owned(), |rates| format!("{:.0}", of(rates)));
    let enabled = device.queues.iter().filter(|queue| queue.enabled).count();
    let megabytes = match (rates, &device.net) {
        (Some(rates), Some(_)) => {
            format!("{:.1}/{:.1}", rates.transmitted_mb_per_s, rates.received_mb_per_s)
        }
        _ => "-".to_owned(),
    };
    let (latency, depth) = rates::latency(device, rates);
    let percentile =
        |of: fn(Percentiles) -> u64| latency.map_or("-".to_owned(), |latency| short_duration(of(latency)));
    [
        device.name.clone(),
        device.kind.clone(),
        match (&device.failed, &device.stopping, device.connected) {
            (Some(_), _, _) => "failed",
            (None, Some(_), _) => "stopping",
            (None, None, true) => "connected",
            (None, None, false) => "-",
        }
        .to_owned(),
        device.sessions.to_string(),
        format!("{enabled}/{}", device.queues.len()),
        rate(|rates| rates.completed_per_s),
        percentile(|latency| latency.p50_ns),
        percentile(|latency| latency.p99_ns),
        percentile(|latency| latency.p999_ns),
        depth.map_or("-".to_owned(), |depth| format!("{depth:.1}")),
        rate(|rates| rates.kicks_per_s),
        rate(|rates| rates.interrupts_per_s),
        megabytes,
        device.errors().to_string(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serve::report::Net;

    fn devices() -> Vec<Device> {
        let disk = |name: &str| Device { name: name.into(), kind: "blk".into(), ..Device::default() };
        let net = Some(Net::default());
        let card =
            Device { name: "card".into(), kind: "net".into(), net, connected: true, ..Device::default() };
        vec![disk("vm1"), disk("a-cluster-with-a-long-name-and-a-disk-17"), card]
    }

    fn shown(width: Option<usize>) -> Vec<String> {
        let devices = devices();
        let latency = Percentiles { count: 100, p50_ns: 23_000, p99_ns: 1_200_000, p999_ns: 3_000_000 };
        let rates = Rates {
            transmitted_mb_per_s: 123.4,
            completed_per_s: 1_234_567.0,
            latency: Some(latency),
            depth: Some(3.25),
            ..Rates::default()
        };
        let text = table(devices.iter().map(|device| (device, Some(&rates))), width);
        text.lines().map(str::to_owned).collect()
    }

    #[test]
    fn a_table_fits_the_terminal() {
        for width in [60, 80, 100, 200] {
            let lines = shown(Some(width));
            assert!(lines.iter().all(|line| line.chars().count() <= width), "{width}:\n{}", lines.join("\n"));
            for head in ["DEVICE", "CLIENT", "QUEUES", "DONE/s", "MB/s", "ERRORS"] {
                assert!(lines[0].contains(head), "{width}: {}", lines[0]);
            }
            // Both ends of a long name are there.
            assert!(lines[2].starts_with("a-c") && lines[2].contains("-17"), "{width}: {}", lines[2]);
        }
        assert!(shown(Some(60))[2].contains('…'));
        // Nothing is shortened without a terminal.
        let lines = shown(None);
        assert_eq!(lines[0].split_whitespace().collect::<Vec<_>>(), HEAD);
        assert!(lines[2].starts_with("a-cluster-with-a-long-name-and-a-disk-17  blk"), "{}", lines[2]);
        let cells: Vec<_> = lines[3].split_whitespace().collect();
        let expected = "card net connected 0 0/0 1234567 23µs 1.2ms 3.0ms 3.2 0 0 123.4/0.0 0";
        assert_eq!(cells.join(" "), expected);
        assert!(shown(Some(80))[0].contains("P99"), "{}", shown(Some(80))[0]);
    }
}
