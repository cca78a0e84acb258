//! The plot of a case: a lane for each subject.
//!
//! ```text
//! paravane                        24.7k
//! ======|=o=oo-------------------------    bar and mark: median; dots: rounds
//! qemu-storage-daemon       10.2k  x0.41
//! ```
use super::groups::Case;
use super::html::{at, escape, number, ratio};
use super::scale::Scale;
use crate::Row;
use crate::kind::Kind;
use std::fmt::Write;

/// Width of a plot, in units of about a pixel.
const WIDTH: f64 = 400.0;
const LANE: f64 = 38.0;
const AXIS: f64 = 20.0;
/// Space beside the first and the last value.
const MARGIN: f64 = 5.0;

/// The style class of a subject.
pub(super) fn class(subject: &str) -> &'static str {
    match Kind::of(subject) {
        Kind::Ours => "ours",
        Kind::OtherBuild => "other",
        Kind::Peer => "peer",
        Kind::Yardstick => "yard",
        Kind::Published => "pub",
    }
}

/// Renders a case. The table with the identifier `table` has its numbers.
pub(super) fn render(case: &Case<'_>, metric: &str, table: &str) -> String {
    let values = case.rows.iter().flat_map(|row| [row.min, row.max]);
    let scale = Scale::of(values, MARGIN, WIDTH - 2.0 * MARGIN);
    let bottom = LANE * case.rows.len() as f64 + 2.0;
    let mut out = String::new();
    let kind = if scale.logarithmic { ", logarithmic scale" } else { "" };
    let _ = write!(
        out,
        "<figure><figcaption>{}<span>{}{}</span></figcaption>\
         <svg viewBox=\"0 0 {WIDTH} {}\" role=\"img\" aria-label=\"{} of {}\" aria-describedby=\"{table}\">",
        breakable(case.path),
        escape(case.unit),
        kind,
        at(bottom + AXIS),
        escape(metric),
        escape(case.path),
    );
    let mut grid = String::new();
    for tick in scale.ticks(5) {
        let x = scale.place(tick);
        let _ = write!(grid, "M{} 0V{}", at(x), at(bottom));
        let (x, anchor) = match x {
            x if x < 18.0 => (0.0, "start"),
            x if x > WIDTH - 18.0 => (WIDTH, "end"),
            x => (x, "middle"),
        };
        let _ = write!(
            out,
            "<text class=\"t\" x=\"{}\" y=\"{}\" text-anchor=\"{anchor}\">{}</text>",
            at(x),
            at(bottom + 14.0),
            number(tick)
        );
    }
    let _ = write!(out, "<path class=\"g\" d=\"{grid}\"/>");
    for (number, row) in case.rows.iter().enumerate() {
        lane(&mut out, case, row, &scale, LANE * number as f64);
    }
    out.push_str("</svg></figure>");
    out
}

/// One subject.
fn lane(out: &mut String, case: &Case<'_>, row: &Row, scale: &Scale, top: f64) {
    let (text, line) = (at(top + 13.0), top + 24.0);
    let compared = case.ratio(row).map(|value| format!("  {}", ratio(value))).unwrap_or_default();
    let name = row.subject.strip_prefix("published/").unwrap_or(&row.subject);
    let published = if name == row.subject { "" } else { " (published)" };
    let _ = write!(
        out,
        "<g class=\"{}\"><title>{}: median {}, {} to {}</title><text x=\"0\" y=\"{text}\">{}{published}</text>\
         <text class=\"v\" x=\"{WIDTH}\" y=\"{text}\">{}{compared}</text>",
        class(&row.subject),
        escape(&row.subject),
        number(row.median),
        number(row.min),
        number(row.max),
        escape(name),
        number(row.median),
    );
    let y = at(line);
    let median = scale.place(row.median);
    if !scale.logarithmic && row.median.is_finite() {
        let _ = write!(out, "<path class=\"b\" d=\"M{} {y}H{}\"/>", at(scale.place(0.0)), at(median));
    }
    if row.values.len() > 1 {
        let dots: String =
            row.values.iter().map(|value| format!("M{} {y}h0", at(scale.place(*value)))).collect();
        let _ = write!(out, "<path class=\"d\" d=\"{dots}\"/>");
    } else if row.max > row.min {
        let _ = write!(
            out,
            "<path class=\"r\" d=\"M{} {y}H{}\"/>",
            at(scale.place(row.min)),
            at(scale.place(row.max))
        );
    }
    let mark = if Kind::of(&row.subject) == Kind::Published {
        format!("M{} {}l5 5l-5 5l-5-5z", at(median), at(line - 5.0))
    } else {
        format!("M{} {}v12", at(median), at(line - 6.0))
    };
    let _ = write!(out, "<path class=\"m\" d=\"{mark}\"/></g>");
}

/// Escaped text that may break behind each slash.
pub(super) fn breakable(text: &str) -> String {
    escape(text).replace('/', "/<wbr>")
}
