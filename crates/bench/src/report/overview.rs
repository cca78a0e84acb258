//! The plot on top: Paravane and its peers, a lane a pair, a dot a case.
use super::html::{at, escape, ratio};
use super::scale::Scale;
use crate::kind::root;
use crate::metric::Better;
use crate::spread::Spread;
use crate::{Results, Row};
use std::fmt::Write;

/// Metric, words for it, our subject, the peer's subject or the beginning of it.
struct Pairing {
    bench: &'static str,
    metric: &'static str,
    words: &'static str,
    ours: &'static str,
    peers: &'static [&'static str],
}

const fn pairing(
    bench: &'static str,
    metric: &'static str,
    words: &'static str,
    ours: &'static str,
    peers: &'static [&'static str],
) -> Pairing {
    Pairing { bench, metric, words, ours, peers }
}

const PAIRINGS: [Pairing; 8] = [
    pairing("blk", "rate", "Disk: requests per second", "paravane", &["qemu-storage-daemon"]),
    pairing("blk", "latency-p99", "Disk: 99th percentile of latency", "paravane", &["qemu-storage-daemon"]),
    pairing("blk", "cpu", "Disk: CPU time per request", "paravane", &["qemu-storage-daemon"]),
    pairing("net", "rate", "Network: packets per second", "paravane", &["dpdk-vhost"]),
    pairing(
        "ring",
        "time",
        "Virtqueue: time per buffer",
        "paravane",
        &["virtio-queue", "virtio-driver", "virtio-drivers", "ringtest/"],
    ),
    pairing("dma", "time", "Guest memory: time of an access", "paravane", &["vm-memory"]),
    pairing("dma", "time", "Guest memory with dirty log", "paravane/log", &["vm-memory/bitmap"]),
    pairing("dma", "time", "Guest memory behind an IOMMU", "paravane/iova", &["vm-memory/iommu"]),
];

/// One pair of subjects: how many times as good ours is, case by case.
struct Lane {
    words: String,
    peer: String,
    times: Vec<f64>,
    median: f64,
}

fn lanes(results: &Results) -> Vec<Lane> {
    let mut lanes = Vec::new();
    for pairing in &PAIRINGS {
        let of_metric =
            || results.rows.iter().filter(|row| row.bench == pairing.bench && row.metric == pairing.metric);
        for peer in pairing.peers {
            let is_peer =
                |row: &&Row| row.subject == *peer || (peer.ends_with('/') && row.subject.starts_with(peer));
            let mut times = Vec::new();
            for theirs in of_metric().filter(is_peer) {
                let ours = of_metric().find(|row| {
                    row.subject == pairing.ours && row.case == theirs.case && row.unit == theirs.unit
                });
                times.extend(ours.and_then(|ours| times_as_good(ours, theirs)));
            }
            let Some(spread) = Spread::of(&times) else { continue };
            let name = root(peer);
            let version = results.peers.iter().find(|known| known.name == name);
            let version = version.map(|known| format!(" {}", known.version)).unwrap_or_default();
            lanes.push(Lane {
                words: pairing.words.to_owned(),
                peer: format!("{name}{version}"),
                times,
                median: spread.median,
            });
        }
    }
    lanes
}

/// How many times as good ours is: the median of the ratios of each round.
fn times_as_good(ours: &Row, theirs: &Row) -> Option<f64> {
    let by_round = ours.values.len() == theirs.values.len() && !ours.values.is_empty();
    let ratio = if by_round {
        let pairs = ours.values.iter().zip(&theirs.values);
        Spread::of(&pairs.map(|(ours, theirs)| ours / theirs).collect::<Vec<_>>())?.median
    } else {
        ours.median / theirs.median
    };
    let times = if Better::of(&ours.metric) == Better::Higher { ratio } else { 1.0 / ratio };
    (times.is_finite() && times > 0.0).then_some(times)
}

/// Largest and smallest ratio on the scale.
const WIDEST: f64 = 64.0;

/// Where the parts of the plot are.
struct Layout {
    width: f64,
    /// Left edge of all text.
    left: f64,
    /// Left edge of the dots.
    dots: f64,
    /// Top of the first lane.
    top: f64,
    lane: f64,
    /// From the top of a lane to its dots.
    line: f64,
    /// Space below the last lane.
    below: f64,
}

/// A file with a heading, a foot and a style.
const FILE: Layout =
    Layout { width: 860.0, left: 20.0, dots: 300.0, top: 76.0, lane: 42.0, line: 19.0, below: 60.0 };
/// Labels beside the dots.
const WIDE: Layout =
    Layout { width: 900.0, left: 0.0, dots: 290.0, top: 24.0, lane: 42.0, line: 19.0, below: 24.0 };
/// Labels above the dots.
const NARROW: Layout =
    Layout { width: 400.0, left: 0.0, dots: 0.0, top: 24.0, lane: 58.0, line: 45.0, below: 24.0 };
/// Room for the median at the right edge.
const MEDIAN: f64 = 56.0;

/// Renders the plot; empty without pairs, unless it is a file.
fn render(results: &Results, layout: &Layout) -> String {
    let lanes = lanes(results);
    let is_file = layout.left > 0.0;
    if lanes.is_empty() && !is_file {
        return String::new();
    }
    let Layout { width, left, top, .. } = *layout;
    let all = || lanes.iter().flat_map(|lane| &lane.times).copied();
    let high = all().fold(2.0, f64::max).min(WIDEST);
    let low = all().fold(0.5, f64::min).max(1.0 / WIDEST);
    let length = width - left - layout.dots - MEDIAN - 12.0;
    let scale = Scale::logarithmic(low, high, layout.dots + 6.0, length);
    let bottom = top + layout.lane * lanes.len() as f64;
    let height = at(bottom + layout.below);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" class=\"overview\" viewBox=\"0 0 {width} {height}\" role=\"img\" \
         aria-label=\"Paravane beside its peers\""
    );
    if is_file {
        let _ = write!(
            out,
            " width=\"{width}\" height=\"{height}\"><style>{}</style><rect class=\"bg\" width=\"{width}\" \
             height=\"{height}\" rx=\"8\"/><text class=\"h\" x=\"{left}\" y=\"34\">Paravane beside its peers</text>",
            include_str!("overview.css")
        );
    } else {
        out.push('>');
    }
    axis(&mut out, &scale, [top, bottom], layout.dots);
    for (number, row) in lanes.iter().enumerate() {
        draw(&mut out, row, &scale, layout, top + layout.lane * number as f64);
    }
    if is_file {
        let (machine, y) = (escape(&foot(results)), at(bottom + 44.0));
        let _ = write!(out, "<text class=\"t\" x=\"{left}\" y=\"{y}\">{machine}</text>");
    }
    out.push_str("</svg>\n");
    out
}

/// The powers of two, and which side is better.
fn axis(out: &mut String, scale: &Scale, [top, bottom]: [f64; 2], left: f64) {
    let one = scale.place(1.0);
    let words =
        [("end", "\u{2190} peer better", one - 8.0), ("start", "Paravane better \u{2192}", one + 8.0)];
    for (anchor, text, x) in words {
        // Without room on the left, the right one says enough.
        if anchor == "start" || x > left + 84.0 {
            let (x, y) = (at(x), at(top - 9.0));
            let _ =
                write!(out, "<text class=\"t\" x=\"{x}\" y=\"{y}\" text-anchor=\"{anchor}\">{text}</text>");
        }
    }
    let ticks = (-6..=6).map(|power| 2_f64.powi(power));
    for tick in ticks.filter(|tick| scale.contains(*tick)) {
        let x = at(scale.place(tick));
        let class = if tick == 1.0 { "one" } else { "g" };
        let label = if tick < 0.2 { format!("\u{d7}1/{}", 1.0 / tick) } else { format!("\u{d7}{tick}") };
        let _ = write!(
            out,
            "<path class=\"{class}\" d=\"M{x} {}V{}\"/><text class=\"t\" x=\"{x}\" y=\"{}\" \
             text-anchor=\"middle\">{label}</text>",
            at(top),
            at(bottom),
            at(bottom + 15.0)
        );
    }
}

fn draw(out: &mut String, row: &Lane, scale: &Scale, layout: &Layout, top: f64) {
    let line = top + layout.line;
    let y = at(line);
    let dots: String = row.times.iter().map(|value| format!("M{} {y}h0", at(scale.place(*value)))).collect();
    let cases = if row.times.len() == 1 { "1 case".to_owned() } else { format!("{} cases", row.times.len()) };
    let left = at(layout.left);
    let _ = write!(
        out,
        "<g class=\"ours\"><text x=\"{left}\" y=\"{}\">{}</text><text class=\"vs\" x=\"{left}\" y=\"{}\">against \
         {}, {cases}</text><path class=\"d\" d=\"{dots}\"/><path class=\"m\" d=\"M{} {}v18\"/>\
         <text class=\"v\" x=\"{}\" y=\"{}\">{}</text></g>",
        at(top + 15.0),
        escape(&row.words),
        at(top + 31.0),
        escape(&row.peer),
        at(scale.place(row.median)),
        at(line - 9.0),
        at(layout.width - layout.left),
        at(line + 5.0),
        ratio(row.median),
    );
}

/// Machine and date in a line.
fn foot(results: &Results) -> String {
    let host = &results.host;
    let load = host.load[0].map(|load| format!(", load {load:.1}")).unwrap_or_default();
    let machine = if host.virtual_machine { "virtual machine, " } else { "" };
    let date = results.started.get(..10).unwrap_or_default();
    format!(
        "A dot: one case, the median ratio of its rounds. {}, {} CPUs, {machine}Linux {}{load}. {date}",
        host.cpu, host.cpus, host.kernel
    )
}

/// The plot as a file, which adapts to light and dark.
pub(super) fn file(results: &Results) -> String {
    render(results, &FILE)
}

/// The plot for wide and narrow pages, with its table; empty without pairs.
pub(super) fn section(results: &Results) -> String {
    let lanes = lanes(results);
    if lanes.is_empty() {
        return String::new();
    }
    let mut out = format!(
        "<section id=\"overview\"><h2>Beside peers</h2>\
         <p>How many times as good as the peer: one dot for each case, the median of the ratios of its rounds. \
         The bar marks the median of the cases.</p>\
         <figure class=\"wide\">{}</figure><figure class=\"narrow\">{}</figure>\
         <details><summary>Table</summary><div class=\"scroll\" tabindex=\"0\" role=\"region\" aria-label=\"Beside peers\">\
         <table><thead><tr><th scope=\"col\">Figure</th><th class=\"l\" scope=\"col\">Peer</th><th scope=\"col\">Cases</th>\
         <th scope=\"col\">Median</th><th scope=\"col\">Worst</th><th scope=\"col\">Best</th></tr></thead><tbody>",
        render(results, &WIDE),
        render(results, &NARROW)
    );
    for lane in &lanes {
        let Some(spread) = Spread::of(&lane.times) else { continue };
        let _ = write!(
            out,
            "<tr><th scope=\"row\">{}</th><td class=\"l\">{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td></tr>",
            escape(&lane.words),
            escape(&lane.peer),
            lane.times.len(),
            ratio(spread.median),
            ratio(spread.min),
            ratio(spread.max),
        );
    }
    out.push_str("</tbody></table></div></details></section>");
    out
}
