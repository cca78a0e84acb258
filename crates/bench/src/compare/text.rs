//! A comparison as text.
use super::found::{Change, Comparison, Verdict};
use crate::text::{number, wrap};
use std::fmt::Write;

/// The most changes of a kind that are listed.
const LISTED: usize = 20;

/// Renders a comparison, at most 80 columns wide.
pub(super) fn render(comparison: &Comparison) -> String {
    let mut out = String::new();
    let count = |verdict| comparison.count(verdict);
    wrap(
        &mut out,
        &format!(
            "compared with {}: {} worse, {} better, {} same",
            comparison.baseline,
            count(Verdict::Worse),
            count(Verdict::Better),
            count(Verdict::Same)
        ),
    );
    for (verdict, heading) in [(Verdict::Worse, "worse"), (Verdict::Better, "better")] {
        let changes: Vec<&Change> =
            comparison.changes.iter().filter(|change| change.verdict == verdict).collect();
        if !changes.is_empty() {
            let _ = writeln!(out, "\n{heading} beyond the noise:");
        }
        for change in changes.iter().take(LISTED) {
            let Change { bench, case, subject, metric, unit, .. } = change;
            let _ = writeln!(out, "  {bench} {case} {subject}");
            let _ = writeln!(
                out,
                "    {metric} {} -> {} {unit}: {}",
                number(change.before),
                number(change.after),
                shift(change)
            );
        }
        if changes.len() > LISTED {
            let _ = writeln!(out, "  and {} more; --report DIR lists all", changes.len() - LISTED);
        }
    }
    out.push('\n');
    for sentence in notes(comparison) {
        wrap(&mut out, &sentence);
    }
    wrap(&mut out, &method(comparison));
    out
}

/// The change in percent, with its interval.
pub(crate) fn shift(change: &Change) -> String {
    let percent = |value: f64| format!("{:+.1} %", 100.0 * value);
    format!("{} ({} to {})", percent(change.shift), percent(change.interval[0]), percent(change.interval[1]))
}

/// What to know about this comparison.
pub(crate) fn notes(comparison: &Comparison) -> Vec<String> {
    let mut notes = Vec::new();
    if comparison.controls > 0 {
        notes.push(format!(
            "Controls: {} figures of peers and yardsticks moved by up to {:.1} %.",
            comparison.controls,
            100.0 * comparison.largest_control
        ));
    }
    if !comparison.changed_peers.is_empty() {
        notes.push(format!(
            "No controls, because their versions differ: {}.",
            comparison.changed_peers.join(", ")
        ));
    }
    if comparison.unmatched > 0 {
        notes.push(format!(
            "Not compared: {} figures that the baseline lacks, has without rounds, or measured by another method.",
            comparison.unmatched
        ));
    }
    if comparison.fewest_visible > 1 {
        notes.push(format!(
            "With this number of rounds, a change is seen only if at least {} of {} figures change. To see \
             one, measure {} rounds on both sides (--rounds), or fewer cases (--filter).",
            comparison.fewest_visible,
            comparison.changes.len(),
            comparison.rounds_for_one
        ));
    }
    notes
}

/// The statistics in a few sentences.
pub(super) fn method(comparison: &Comparison) -> String {
    let (relative, control) = match comparison.controls {
        0 => ("", ""),
        _ => (", also relative to the controls of its case", " plus the largest change of a control"),
    };
    format!(
        "Method: a figure is better or worse if the rounds differ{relative} ({}, two-sided, false discovery \
         rate 5 % over {} figures), and if the change exceeds {:.1} %{control}. Change: Hodges-Lehmann \
         estimate (interval of 95 %).",
        comparison.test,
        comparison.changes.len(),
        100.0 * comparison.threshold
    )
}
