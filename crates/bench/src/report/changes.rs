//! The comparison with a baseline: a plot of changes, a table of all figures.
use super::html::{at, escape, number};
use super::plot::breakable;
use super::scale::Scale;
use crate::compare::{Change, Comparison, Verdict, notes};
use std::fmt::Write;

/// The most changes in the plot.
const PLOTTED: usize = 40;
/// Room for the change in percent at the right edge.
const FIGURE: f64 = 62.0;
/// Changes beyond are drawn at the edge.
const EDGE: f64 = 1.0;

/// Renders the section.
pub(super) fn section(comparison: &Comparison) -> String {
    let count = |verdict| comparison.count(verdict);
    let mut out = format!(
        "<section id=\"comparison\"><h2>Compared with {}</h2><ul class=\"verdict\">\
         <li class=\"worse\"><b>{}</b>worse</li><li class=\"better\"><b>{}</b>better</li><li><b>{}</b>same</li></ul>",
        escape(&comparison.baseline),
        count(Verdict::Worse),
        count(Verdict::Better),
        count(Verdict::Same)
    );
    for note in notes(comparison) {
        let _ = write!(out, "<p>{}</p>", escape(&note));
    }
    let changed: Vec<&Change> =
        comparison.changes.iter().filter(|change| change.verdict != Verdict::Same).collect();
    if !changed.is_empty() {
        let largest = &changed[..changed.len().min(PLOTTED)];
        let _ = write!(
            out,
            "<figure class=\"wide\">{}</figure><figure class=\"narrow\">{}</figure>\
             <p class=\"note\">Line: interval of 95 %. Shaded: noise.</p>",
            plot(largest, 900.0, 300.0),
            plot(largest, 400.0, 0.0)
        );
        if changed.len() > PLOTTED {
            let _ = write!(out, "<p class=\"note\">The {PLOTTED} largest of {} changes.</p>", changed.len());
        }
    }
    table(&mut out, comparison);
    let _ = write!(out, "<p class=\"note\">{}</p></section>", escape(&comparison.method()));
    out
}

/// A lane for each change: its interval, and the range that counts as noise.
///
/// Labels are `beside` wide, or above if 0.
fn plot(changes: &[&Change], width: f64, beside: f64) -> String {
    let (lane, line) = if beside > 0.0 { (38.0, 18.0) } else { (56.0, 44.0) };
    let ends = changes.iter().flat_map(|change| {
        [change.interval[0], change.interval[1], change.shift, change.floor, -change.floor]
    });
    let ends = ends.map(|value| value.clamp(-EDGE, EDGE)).filter(|value| value.is_finite());
    let widest = 1.05 * ends.fold(0.02, |widest, value| f64::max(widest, value.abs()));
    let scale = Scale::linear(-widest, widest, beside + 4.0, width - beside - FIGURE - 8.0);
    let bottom = lane * changes.len() as f64 + 2.0;
    let mut out = format!(
        "<svg class=\"overview\" viewBox=\"0 0 {width} {}\" role=\"img\" aria-label=\"Changes beyond the noise\" \
         aria-describedby=\"changes\">",
        at(bottom + 20.0)
    );
    for tick in scale.ticks(5) {
        let x = at(scale.place(tick));
        let (class, label) = if tick == 0.0 { ("one", "0 %".to_owned()) } else { ("g", percent(tick, 0)) };
        let _ = write!(
            out,
            "<path class=\"{class}\" d=\"M{x} 0V{}\"/><text class=\"t\" x=\"{x}\" y=\"{}\" \
             text-anchor=\"middle\">{label}</text>",
            at(bottom),
            at(bottom + 14.0),
        );
    }
    for (index, change) in changes.iter().enumerate() {
        let top = lane * index as f64;
        let (low, high) = (scale.place(-change.floor), scale.place(change.floor));
        let (y, class) = (top + line, class(change.verdict));
        let _ = write!(
            out,
            "<g class=\"{class}\"><rect class=\"floor\" x=\"{}\" y=\"{}\" width=\"{}\" height=\"10\"/>\
             <text x=\"0\" y=\"{}\">{} {}</text><text class=\"vs\" x=\"0\" y=\"{}\">{} {}</text>\
             <text class=\"v\" x=\"{width}\" y=\"{}\">{}</text>\
             <path class=\"r\" d=\"M{} {}H{}\"/><path class=\"m\" d=\"M{} {}v14\"/></g>",
            at(low),
            at(y - 5.0),
            at(high - low),
            at(top + 14.0),
            escape(&change.bench),
            escape(&change.case),
            at(top + 29.0),
            escape(&change.subject),
            escape(&change.metric),
            at(y + 4.0),
            percent(change.shift, 1),
            at(scale.place(change.interval[0])),
            at(y),
            at(scale.place(change.interval[1])),
            at(scale.place(change.shift)),
            at(y - 7.0),
        );
    }
    out.push_str("</svg>");
    out
}

fn table(out: &mut String, comparison: &Comparison) {
    out.push_str(
        "<details id=\"changes\"><summary>All figures</summary><div class=\"scroll\" tabindex=\"0\" role=\"region\" \
         aria-label=\"All figures compared\"><table><thead><tr><th scope=\"col\">Case</th><th class=\"l\" scope=\"col\">Subject</th>\
         <th class=\"l\" scope=\"col\">Metric</th><th scope=\"col\">Before</th><th scope=\"col\">After</th><th scope=\"col\">Change</th>\
         <th scope=\"col\">Interval of 95 %</th><th scope=\"col\">p</th><th scope=\"col\">Noise</th><th class=\"l\" scope=\"col\">Verdict</th>\
         </tr></thead><tbody>",
    );
    for change in &comparison.changes {
        let _ = write!(
            out,
            "<tr><th scope=\"row\">{} {}</th><td class=\"l\">{}</td><td class=\"l\">{}, {}</td><td>{}</td><td>{}</td>\
             <td>{}</td><td>{} to {}</td><td>{:.4}</td><td>{:.1} %</td><td class=\"l\">{}</td></tr>",
            escape(&change.bench),
            breakable(&change.case),
            escape(&change.subject),
            escape(&change.metric),
            escape(&change.unit),
            number(change.before),
            number(change.after),
            percent(change.shift, 1),
            percent(change.interval[0], 1),
            percent(change.interval[1], 1),
            change.p,
            100.0 * change.floor,
            class(change.verdict)
        );
    }
    out.push_str("</tbody></table></div></details>");
}

fn class(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Worse => "worse",
        Verdict::Better => "better",
        Verdict::Same => "same",
    }
}

fn percent(value: f64, decimals: usize) -> String {
    format!("{:+.decimals$} %", 100.0 * value).replace('-', "\u{2212}")
}
