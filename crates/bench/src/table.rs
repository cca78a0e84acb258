//! Results as a table for people, at most 80 columns wide.
use crate::text::{WIDTH, number, wrap};
use crate::{Row, barrier, notify, poll, published, ring, transport};
use std::fmt::Write;

/// Most subjects of a block that shows the spread in one line.
///
/// Blocks with more omit it, unless each subject has a line.
const MOST_WITH_SPREAD: usize = 4;

/// One case and metric, with a row for each subject.
struct Line<'a> {
    case: &'a str,
    metric: &'a str,
    unit: &'a str,
    rows: Vec<&'a Row>,
}

/// Renders rows as a table, with notes that explain it.
///
/// The first subject of a case, or `paravane`, is the base that the others are compared with. A
/// ratio above 1 means that the subject needs more than the base; for a rate, that it does less.
#[must_use]
pub fn table(rows: &[Row]) -> String {
    let mut out = String::new();
    let Some(first) = rows.first() else {
        return "no results\n".to_owned();
    };
    let _ =
        writeln!(out, "{}: median of {} interleaved rounds (smallest to largest)", first.bench, first.rounds);
    let lines = lines(rows);
    // A block is a run of lines with the same subjects.
    for block in lines.chunk_by(|a, b| subjects(a) == subjects(b)) {
        out.push('\n');
        out.push_str(&render(block));
    }
    out.push('\n');
    footnotes(&mut out, rows);
    out
}

/// Groups rows by case and metric, in order of appearance.
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

/// The reference row of a line: `paravane`, or the first one.
fn base<'a>(line: &Line<'a>) -> Option<&'a Row> {
    line.rows.iter().find(|row| row.subject == crate::subject::PARAVANE).or(line.rows.first()).copied()
}

/// Renders a block in the first of three layouts that fits the width.
///
/// 1. A line for each metric, subjects side by side, the case in the first column.
/// 2. The same below a line with the case.
/// 3. A line for each subject, below a line with case, metric and unit.
fn render(block: &[Line<'_>]) -> String {
    let cells = cells(block);
    let side_by_side = align(&cells, 3);
    if fits(&side_by_side) {
        return side_by_side;
    }
    let narrow: Vec<Vec<String>> = cells.iter().map(|row| row[1..].to_vec()).collect();
    let narrow = align(&narrow, 2);
    if narrow.lines().all(|line| line.chars().count() + 2 <= WIDTH) {
        let mut out = String::new();
        let mut aligned = narrow.lines();
        if let Some(heading) = aligned.next() {
            let _ = writeln!(out, "  {heading}");
        }
        for (text, row) in aligned.zip(&cells[1..]) {
            if !row[0].is_empty() {
                let _ = writeln!(out, "{}", row[0]);
            }
            let _ = writeln!(out, "  {text}");
        }
        return out;
    }
    let mut out = String::new();
    for line in block {
        let _ = writeln!(out, "{}: {}, {}", line.case, line.metric, line.unit);
        let cells: Vec<Vec<String>> = line
            .rows
            .iter()
            .map(|row| vec![row.subject.clone(), number(row.median), spread(row), ratio(line, row)])
            .collect();
        for text in align(&cells, 1).lines() {
            let _ = writeln!(out, "  {text}");
        }
    }
    out
}

fn fits(text: &str) -> bool {
    text.lines().all(|line| line.chars().count() <= WIDTH)
}

/// The cells of a block: a heading, then a row for each line.
fn cells(block: &[Line<'_>]) -> Vec<Vec<String>> {
    let mut heading: Vec<String> = ["case", "metric", "unit"].map(str::to_owned).to_vec();
    let base = block.first().and_then(base).map(|row| row.subject.as_str());
    let names = block.first().map(subjects).unwrap_or_default();
    let with_spread = names.len() <= MOST_WITH_SPREAD;
    for name in names {
        heading.push(name.to_owned());
        if with_spread {
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
        for row in &line.rows {
            texts.push(number(row.median));
            if with_spread {
                texts.push(spread(row));
            }
            if Some(row.subject.as_str()) != base {
                texts.push(ratio(line, row));
            }
        }
        cells.push(texts);
    }
    cells
}

fn spread(row: &Row) -> String {
    format!("({} to {})", number(row.min), number(row.max))
}

/// The ratio of a row to the base of its line; empty for the base.
fn ratio(line: &Line<'_>, row: &Row) -> String {
    let Some(base) = base(line).filter(|base| base.subject != row.subject) else { return String::new() };
    // Between variants of one thing, a percent counts.
    let decimals = match line.rows.iter().find(|row| row.subject == crate::subject::PARAVANE) {
        Some(ours) if ours.bench == ring::NAME => 1,
        Some(_) => 2,
        None => 3,
    };
    // More is better for a rate.
    let (dividend, divisor) =
        if row.metric == "rate" { (base.median, row.median) } else { (row.median, base.median) };
    if divisor > 0.0 { format!("{:.decimals$}x", dividend / divisor) } else { "-".to_owned() }
}

/// Aligns cells: the first `left` and the spreads left, figures right.
fn align(cells: &[Vec<String>], left: usize) -> String {
    let columns = cells.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        cells.iter().filter_map(|row| row.get(column)).map(|text| text.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut out = String::new();
    for row in cells {
        let mut line = String::new();
        for (column, (text, width)) in row.iter().zip(&widths).enumerate() {
            let to_left = column < left || text.is_empty() || text.starts_with('(');
            let _ = if to_left { write!(line, "{text:<width$}  ") } else { write!(line, "{text:>width$}  ") };
        }
        out.push_str(line.trim_end());
        out.push('\n');
    }
    out
}

/// Appends what the figures mean and how they were measured.
fn footnotes(out: &mut String, rows: &[Row]) {
    let Some(first) = rows.first() else { return };
    for text in crate::notes::of(&first.bench) {
        wrap(out, text);
    }
    let mut citations: Vec<String> = rows
        .iter()
        .filter(|row| is_published(row))
        .filter_map(|row| published::citation(&row.case))
        .collect();
    citations.dedup();
    for text in citations {
        wrap(out, &text);
    }
    let mut methods: Vec<(&str, Vec<&str>)> = Vec::new();
    for row in rows.iter().filter(|row| !is_published(row)) {
        match methods.iter_mut().find(|(method, _)| *method == row.method) {
            Some((_, metrics)) if metrics.contains(&row.metric.as_str()) => {}
            Some((_, metrics)) => metrics.push(&row.metric),
            None => methods.push((&row.method, vec![&row.metric])),
        }
    }
    if !methods.is_empty() {
        let methods: Vec<String> = methods
            .iter()
            .map(|(method, metrics)| format!("{} by {}", metrics.join(", "), explain(method)))
            .collect();
        wrap(out, &format!("Measured: {}.", methods.join("; ")));
    }
    let counts_none = [transport::NAME, notify::NAME, "density"].contains(&first.bench.as_str());
    if !counts_none && !rows.iter().any(|row| row.metric == "instructions") {
        wrap(out, "Instructions: not counted; this system offers neither a hardware counter nor ptrace.");
    }
    let two_threads = first.bench == ring::NAME && rows.iter().any(|row| row.metric == "rate");
    if two_threads && !rows.iter().any(|row| ring::stream::ringtest::is_program(&row.subject)) {
        wrap(out, ring::stream::ringtest::MISSING);
    }
    #[cfg(feature = "peers")]
    if first.bench == crate::blk::NAME && !rows.iter().any(|row| row.case.starts_with("blkio/")) {
        wrap(out, crate::blk::blkio::MISSING);
    }
    #[cfg(feature = "peers")]
    if first.bench == crate::blk::NAME && !rows.iter().any(|row| row.subject == crate::blk::spdk::NAME) {
        wrap(out, &crate::blk::spdk::missing());
    }
    #[cfg(feature = "peers")]
    if first.bench == crate::blk::NAME && !crate::blk::http::is_there() {
        wrap(out, crate::blk::http::MISSING);
    }
    #[cfg(feature = "peers")]
    if first.bench == crate::density::NAME
        && !rows.iter().any(|row| row.subject == crate::daemon::STORAGE_DAEMON)
    {
        wrap(out, crate::density::MISSING);
    }
    if rows.iter().any(|row| row.subject != first.subject) {
        let base = match first.bench.as_str() {
            poll::NAME | barrier::NAME | transport::NAME | notify::NAME => "the first subject",
            _ => crate::subject::PARAVANE,
        };
        wrap(
            out,
            &format!(
                "ratio: the subject's median divided by that of {base}; for a rate, the reverse. Above 1, the \
                 subject needs more than {base}, or does less."
            ),
        );
    }
    let pinned = first
        .pinned_cpu
        .map_or_else(|| "not pinned to a CPU".to_owned(), |cpu| format!("pinned to CPU {cpu}"));
    let load = first.load.map(|load| load.map_or_else(|| "unknown".to_owned(), |load| format!("{load:.2}")));
    wrap(out, &format!("Machine: {pinned}; load average {} at the start, {} at the end.", load[0], load[1]));
}

/// Whether someone else published this figure.
fn is_published(row: &Row) -> bool {
    row.method.starts_with("published")
}

fn explain(method: &str) -> &str {
    match method {
        "clock" => "wall clock",
        "clock, SCHED_FIFO" => "wall clock (two threads, SCHED_FIFO)",
        "thread clock" => "CPU clock of the thread",
        "process clock" => "CPU clock of the process",
        "count" => "counting",
        "tsc" => "time stamp counter",
        "perf_event" => "hardware counter (user mode)",
        "single-step" => "single-stepping a child process (exact, user mode)",
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
            values: vec![median; 5],
            method: "clock".to_owned(),
            pinned_cpu: Some(1),
            load: [Some(0.5), None],
        }
    }

    /// The words of a text, however it is wrapped.
    fn words(text: &str) -> String {
        text.split_whitespace().collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn columns_are_aligned_and_ratios_divide_by_paravane() {
        let text = table(&[
            row("a/1", "paravane", "time", 12.0),
            row("a/1", "peer", "time", 120.0),
            row("a/32", "paravane", "time", 8.0),
            row("a/32", "peer", "time", 20.0),
            row("b/1", "paravane", "time", 5.0),
            row("b/1", "other", "time", 5.0),
        ]);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "ring: median of 5 interleaved rounds (smallest to largest)");
        let heading = lines[2];
        assert_eq!(
            heading.split_whitespace().collect::<Vec<_>>(),
            ["case", "metric", "unit", "paravane", "peer", "ratio"]
        );
        let ends = |line: &str, text: &str| line.find(text).map(|at| at + text.len());
        assert_eq!(ends(lines[3], "10.0x"), ends(heading, "ratio"));
        assert_eq!(ends(lines[4], "2.5x"), ends(heading, "ratio"));
        assert_eq!(ends(lines[3], "12.0"), ends(heading, "paravane"));
        assert_eq!(ends(lines[3], " 120"), ends(heading, "peer"));
        assert!(lines[3].contains("(6.00 to 24.0)"), "{}", lines[3]);
        assert!(lines[6].contains("other") && !lines[6].contains("peer"), "{}", lines[6]);
        assert!(lines[7].ends_with("1.0x"), "{}", lines[7]);
    }

    #[test]
    fn a_case_gets_a_line_if_it_leaves_no_room() {
        let case = "split/device/4desc/indirect/in-order/batch32";
        let text = table(&[row(case, "paravane", "time", 12.0), row(case, "peer", "time", 6.0)]);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[3], case);
        assert!(lines[4].starts_with("  time") && lines[4].ends_with("0.5x"), "{}", lines[4]);
    }

    #[test]
    fn many_subjects_get_a_line_each() {
        let names = ["paravane", "virtio-queue", "ringtest/virtio_ring_0_9", "ringtest/virtio_ring_inorder"];
        let rows: Vec<Row> = names.iter().map(|name| row("split/roundtrip", name, "time", 12.0)).collect();
        let text = table(&rows);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[2], "split/roundtrip: time, ns/chain");
        assert!(lines[3].starts_with("  paravane ") && lines[3].ends_with("(6.00 to 24.0)"), "{}", lines[3]);
        assert!(lines[6].ends_with("1.0x"), "{}", lines[6]);
    }

    #[test]
    fn no_line_is_wider_than_a_terminal() {
        let names = ["paravane", "published/kvm_read_write_page", "vm-memory/bitmap", "memcpy"];
        for bench in crate::list() {
            let case = "notify/stream/host-to-guest/65536/colocated";
            let rows = names.map(|name| Row {
                bench: bench.name.to_owned(),
                method: "clock, KVM, SCHED_FIFO".to_owned(),
                ..row(case, name, "exits-acknowledge", 123_456.0)
            });
            for line in table(&rows).lines() {
                assert!(line.chars().count() <= WIDTH, "{line}");
            }
        }
    }

    #[test]
    fn footnotes_say_how_and_where() {
        let text = words(&table(&[row("split/device/1desc/batch1", "paravane", "time", 12.0)]));
        assert!(text.contains("Measured: time by wall clock."), "{text}");
        assert!(text.contains("Instructions: not counted"));
        assert!(text.contains("pinned to CPU 1; load average 0.50 at the start, unknown at the end"));
        assert!(!text.contains("ratio"));
        for note in ring::NOTES {
            assert!(text.contains(note), "{note}");
        }
    }

    #[test]
    fn published_figures_are_cited() {
        let text = words(&table(&published::virtio_mmio_v3::rows()));
        assert!(text.contains("virtio-mmio-v3-2019: \"virtio-mmio: add features"), "{text}");
        assert!(!text.contains("Measured"), "{text}");
    }

    #[test]
    fn a_case_is_named_once() {
        let mut instructions = row("a", "paravane", "instructions", 60.0);
        instructions.method = "single-step".to_owned();
        let text = table(&[row("a", "paravane", "time", 12.0), instructions]);
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[3].starts_with("a "));
        assert!(lines[4].starts_with("  ") && lines[4].contains("instructions"));
        assert!(words(&text).contains("instructions by single-stepping a child process"));
    }

    #[test]
    fn no_rows_give_no_table() {
        assert_eq!(table(&[]), "no results\n");
    }
}
