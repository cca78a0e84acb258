//! Results as a table for people.
use crate::{Row, barrier, dma, notify, poll, ring, transport};
#[cfg(feature = "peers")]
use crate::{blk, net};
use std::fmt::Write;

/// One line: a case and metric, with a cell for each subject.
struct Line<'a> {
    case: &'a str,
    metric: &'a str,
    unit: &'a str,
    rows: Vec<&'a Row>,
}

/// The rows as a table for people, ours beside each peer with the ratio. A ratio above 1 means that the
/// peer needs more.
#[must_use]
pub fn table(rows: &[Row]) -> String {
    let mut out = String::new();
    let Some(first) = rows.first() else {
        return "no results\n".to_owned();
    };
    let _ =
        writeln!(out, "{}: median of {} interleaved rounds (smallest to largest)", first.bench, first.rounds);
    let lines = lines(rows);
    // A block is a run of lines with the same subjects, so that each has its columns.
    for block in lines.chunk_by(|a, b| subjects(a) == subjects(b)) {
        out.push('\n');
        align(&mut out, &cells(block));
    }
    out.push('\n');
    footnotes(&mut out, rows);
    out
}

/// Rows of the same case and metric in one line, in order of appearance.
fn lines(rows: &[Row]) -> Vec<Line<'_>> {
    let mut lines: Vec<Line<'_>> = Vec::new();
    for row in rows {
        match lines.iter_mut().find(|line| line.case == row.case && line.metric == row.metric) {
            Some(line) => line.rows.push(row),
            None => {
                lines.push(Line { case: &row.case, metric: &row.metric, unit: &row.unit, rows: vec![row] });
            }
        }
    }
    lines
}

fn subjects<'a>(line: &Line<'a>) -> Vec<&'a str> {
    line.rows.iter().map(|row| row.subject.as_str()).collect()
}

/// Whom the others of a line are compared with: ours, or the first of ours.
fn base<'a>(line: &Line<'a>) -> Option<&'a Row> {
    line.rows.iter().find(|row| row.subject == ring::OURS).or(line.rows.first()).copied()
}

/// More subjects than this are shown without their spread, for a line to stay readable.
const MOST_WITH_SPREAD: usize = 4;

/// The text of a block: a heading and a row for each line.
fn cells(block: &[Line<'_>]) -> Vec<Vec<String>> {
    let mut heading: Vec<String> = ["case", "metric", "unit"].map(str::to_owned).to_vec();
    let base = block.first().and_then(base).map(|row| row.subject.as_str());
    let names = block.first().map(subjects).unwrap_or_default();
    let spread = names.len() <= MOST_WITH_SPREAD;
    for name in names {
        heading.push(name.to_owned());
        if spread {
            heading.push(String::new());
        }
        if Some(name) != base {
            heading.push("ratio".to_owned());
        }
    }
    let mut cells = vec![heading];
    let mut previous = "";
    for line in block {
        let case = if line.case == previous { "" } else { line.case };
        previous = line.case;
        let mut texts = vec![case.to_owned(), line.metric.to_owned(), line.unit.to_owned()];
        // Between variants of one thing, a percent counts.
        let decimals = match line.rows.iter().find(|row| row.subject == ring::OURS) {
            Some(ours) if ours.bench == ring::NAME => 1,
            Some(_) => 2,
            None => 3,
        };
        let base = self::base(line);
        for row in &line.rows {
            texts.push(number(row.median));
            if spread {
                texts.push(format!("({} to {})", number(row.min), number(row.max)));
            }
            if Some(row.subject.as_str()) != base.map(|row| row.subject.as_str()) {
                texts.push(match base {
                    // Of a rate, more is better.
                    Some(base) if row.metric == "rate" && row.median > 0.0 => {
                        format!("{:.decimals$}x", base.median / row.median)
                    }
                    Some(base) if row.metric != "rate" && base.median > 0.0 => {
                        format!("{:.decimals$}x", row.median / base.median)
                    }
                    _ => "-".to_owned(),
                });
            }
        }
        cells.push(texts);
    }
    cells
}

/// Three significant figures or so.
fn number(value: f64) -> String {
    let decimals = match value.abs() {
        size if size < 10.0 => 2,
        size if size < 100.0 => 1,
        _ => 0,
    };
    format!("{value:.decimals$}")
}

/// Writes cells in columns: the first three and the spreads to the left, figures to the right.
fn align(out: &mut String, cells: &[Vec<String>]) {
    let columns = cells.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        cells.iter().filter_map(|row| row.get(column)).map(|text| text.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    for row in cells {
        let mut line = String::new();
        for (column, (text, width)) in row.iter().zip(&widths).enumerate() {
            let left = column < 3 || text.is_empty() || text.starts_with('(');
            let _ = if left { write!(line, "{text:<width$}  ") } else { write!(line, "{text:>width$}  ") };
        }
        out.push_str(line.trim_end());
        out.push('\n');
    }
}

/// How the figures came about.
fn footnotes(out: &mut String, rows: &[Row]) {
    let mut methods: Vec<(&str, &str)> = Vec::new();
    for row in rows {
        let published = row.method.starts_with("published");
        if !published && !methods.contains(&(&row.metric, &row.method)) {
            methods.push((&row.metric, &row.method));
        }
    }
    let methods: Vec<String> =
        methods.iter().map(|(metric, method)| format!("{metric} by {}", explain(method))).collect();
    let _ = writeln!(out, "Measured: {}.", methods.join(", "));
    let first = rows.first();
    let counts_none = first.is_some_and(|row| [transport::NAME, notify::NAME].contains(&row.bench.as_str()));
    if !counts_none && !rows.iter().any(|row| row.metric == "instructions") {
        out.push_str(
            "Instructions: not counted, as this system offers neither a hardware counter nor ptrace.\n",
        );
    }
    let Some(first) = first else { return };
    if first.bench == ring::NAME {
        for note in ring::NOTES {
            let _ = writeln!(out, "{note}");
        }
        let two_threads = rows.iter().any(|row| row.metric == "rate");
        if two_threads && !rows.iter().any(|row| ring::stream::ringtest::is_program(&row.subject)) {
            let _ = writeln!(out, "{}", ring::stream::ringtest::MISSING);
        }
    }
    let notes = match first.bench.as_str() {
        poll::NAME => poll::NOTES,
        dma::NAME => dma::NOTES,
        barrier::NAME => barrier::NOTES,
        transport::NAME => transport::NOTES,
        notify::NAME => notify::NOTES,
        #[cfg(feature = "peers")]
        blk::NAME => blk::NOTES,
        #[cfg(feature = "peers")]
        net::NAME => net::NOTES,
        _ => &[],
    };
    for note in notes {
        let _ = writeln!(out, "{note}");
    }
    if let Some(other) = rows.iter().find(|row| row.subject != first.subject) {
        let base = match other.bench.as_str() {
            poll::NAME | barrier::NAME | transport::NAME | notify::NAME => "the first one",
            _ => ring::OURS,
        };
        let _ = writeln!(
            out,
            "ratio: the subject's median divided by {base}'s; of a rate {base}'s divided by the subject's.",
        );
    }
    let pinned = first
        .pinned_cpu
        .map_or_else(|| "not pinned to a CPU".to_owned(), |cpu| format!("pinned to CPU {cpu}"));
    let load = first.load.map(|load| load.map_or_else(|| "unknown".to_owned(), |load| format!("{load:.2}")));
    let _ =
        writeln!(out, "Machine: {pinned}; load average {} at the start, {} at the end.", load[0], load[1]);
}

fn explain(method: &str) -> &str {
    match method {
        "clock" => "the clock",
        "clock, SCHED_FIFO" => "the clock (two threads, SCHED_FIFO)",
        "thread clock" => "the thread's CPU clock",
        "process clock" => "the CPU clock of its process",
        "count" => "counting",
        "tsc" => "the time stamp counter",
        "perf_event" => "the processor's counter (user mode)",
        "single-step" => "stepping through a child process (exact, user mode)",
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(case: &str, subject: &str, metric: &str, median: f64) -> Row {
        Row {
            bench: "ring".to_owned(),
            case: case.to_owned(),
            subject: subject.to_owned(),
            metric: metric.to_owned(),
            unit: "ns/chain".to_owned(),
            median,
            min: median / 2.0,
            max: median * 2.0,
            rounds: 5,
            method: "clock".to_owned(),
            pinned_cpu: Some(1),
            load: [Some(0.5), None],
        }
    }

    #[test]
    fn columns_are_aligned_and_ratios_divide_by_ours() {
        let text = table(&[
            row("split/device/1desc/batch1", "paravane", "time", 12.0),
            row("split/device/1desc/batch1", "virtio-queue", "time", 120.0),
            row("split/device/4desc/indirect/batch32", "paravane", "time", 8.0),
            row("split/device/4desc/indirect/batch32", "virtio-queue", "time", 20.0),
            row("split/driver/1desc/batch1", "paravane", "time", 5.0),
            row("split/driver/1desc/batch1", "virtio-drivers", "time", 5.0),
        ]);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "ring: median of 5 interleaved rounds (smallest to largest)");
        let heading = lines[2];
        assert_eq!(
            heading.split_whitespace().collect::<Vec<_>>(),
            ["case", "metric", "unit", "paravane", "virtio-queue", "ratio"]
        );
        let ends = |line: &str, text: &str| line.find(text).map(|at| at + text.len());
        assert_eq!(ends(lines[3], "10.0x"), ends(heading, "ratio"));
        assert_eq!(ends(lines[4], "2.5x"), ends(heading, "ratio"));
        assert_eq!(ends(lines[3], "12.0"), ends(heading, "paravane"));
        assert_eq!(ends(lines[3], " 120"), ends(heading, "virtio-queue"));
        assert!(lines[3].contains("(6.00 to 24.0)"), "{}", lines[3]);
        assert!(lines[6].contains("virtio-drivers") && !lines[6].contains("virtio-queue"), "{}", lines[6]);
        assert!(lines[7].ends_with("1.0x"), "{}", lines[7]);
    }

    #[test]
    fn footnotes_say_how_and_where() {
        let text = table(&[row("split/device/1desc/batch1", "paravane", "time", 12.0)]);
        assert!(text.contains("Measured: time by the clock."));
        assert!(text.contains("Instructions: not counted"));
        assert!(text.contains("pinned to CPU 1; load average 0.50 at the start, unknown at the end"));
        assert!(!text.contains("ratio"));
        for note in ring::NOTES {
            assert!(text.contains(note));
        }
    }

    #[test]
    fn a_case_is_named_once() {
        let mut instructions = row("a", "paravane", "instructions", 60.0);
        instructions.method = "single-step".to_owned();
        let text = table(&[row("a", "paravane", "time", 12.0), instructions]);
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[3].starts_with("a "));
        assert!(lines[4].starts_with("  ") && lines[4].contains("instructions"));
        assert!(text.contains("instructions by stepping through a child process"));
    }

    #[test]
    fn nothing_measured_is_said() {
        assert_eq!(table(&[]), "no results\n");
    }
}
