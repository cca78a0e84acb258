//! The plot on top: Paravane beside its peers, a lane for each pair, a dot for each case.
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
    pairing("dma", "time", "Guest memory: time per access", "paravane", &["vm-memory"]),
    pairing("dma", "time", "with dirty log", "paravane/log", &["vm-memory/bitmap"]),
    pairing("dma", "time", "with IOMMU", "paravane/iova", &["vm-memory/iommu"]),
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

/// Largest and smallest ratio that has a place of its own.
const WIDEST: f64 = 64.0;

/// Renders the plot, `width` wide; empty without pairs. `with_style` makes it a file of its own.
fn render(results: &Results, width: f64, with_style: bool) -> String {
    let lanes = lanes(results);
    if lanes.is_empty() && !with_style {
        return String::new();
    }
    let (top, lane, axis) = (if with_style { 58.0 } else { 24.0 }, 42.0, 24.0);
    let (margin, figure) = (if with_style { 16.0 } else { 4.0 }, 54.0);
    let all = || lanes.iter().flat_map(|lane| &lane.times).copied();
    let high = all().fold(2.0, f64::max).min(WIDEST);
    let low = all().fold(0.5, f64::min).max(1.0 / WIDEST);
    let scale = Scale::logarithmic(low, high, margin + 4.0, width - 2.0 * margin - figure - 8.0);
    let bottom = top + lane * lanes.len() as f64;
    let height = at(bottom + axis + if with_style { 26.0 } else { 0.0 });
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" class=\"overview\" viewBox=\"0 0 {width} {height}\" role=\"img\" \
         aria-label=\"Paravane beside its peers\""
    );
    if with_style {
        let _ = write!(
            out,
            " width=\"{width}\" height=\"{height}\"><style>{}</style><rect class=\"bg\" width=\"{width}\" \
             height=\"{height}\" rx=\"8\"/><text class=\"h\" x=\"{margin}\" y=\"26\">Paravane beside its \
             peers</text>",
            include_str!("overview.css")
        );
    } else {
        out.push('>');
    }
    let one = scale.place(1.0);
    let words =
        [("end", "\u{2190} peer better", one - 8.0), ("start", "Paravane better \u{2192}", one + 8.0)];
    for (anchor, text, x) in words {
        // Without room to the left, the right one says enough.
        if anchor == "start" || x > 90.0 + margin {
            let _ = write!(
                out,
                "<text class=\"t\" x=\"{}\" y=\"{}\" text-anchor=\"{anchor}\">{text}</text>",
                at(x),
                at(top - 10.0)
            );
        }
    }
    let ticks = [1.0 / 64.0, 1.0 / 32.0, 0.0625, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0];
    for tick in ticks.into_iter().filter(|tick| (low / 1.15..=high * 1.15).contains(tick)) {
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
    for (number, row) in lanes.iter().enumerate() {
        draw(&mut out, row, &scale, top + lane * number as f64, width - margin);
    }
    if with_style {
        let _ = write!(
            out,
            "<text class=\"t\" x=\"{margin}\" y=\"{}\">{}</text>",
            at(bottom + axis + 16.0),
            escape(&foot(results))
        );
    }
    out.push_str("</svg>\n");
    out
}

fn draw(out: &mut String, row: &Lane, scale: &Scale, top: f64, right: f64) {
    let y = at(top + 28.0);
    let dots: String = row.times.iter().map(|value| format!("M{} {y}h0", at(scale.place(*value)))).collect();
    let median = at(scale.place(row.median));
    let cases = if row.times.len() == 1 { "1 case".to_owned() } else { format!("{} cases", row.times.len()) };
    let _ = write!(
        out,
        "<g class=\"ours\"><text x=\"{}\" y=\"{}\">{} <tspan class=\"vs\">against {}, {cases}</tspan></text>\
         <path class=\"d\" d=\"{dots}\"/><path class=\"m\" d=\"M{median} {}v16\"/>\
         <text class=\"v\" x=\"{}\" y=\"{}\">{}</text></g>",
        at(scale.place(0.0) - 4.0),
        at(top + 13.0),
        escape(&row.words),
        escape(&row.peer),
        at(top + 20.0),
        at(right),
        at(top + 33.0),
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
    render(results, 760.0, true)
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
         <table><thead><tr><th scope=\"col\">Figure</th><th scope=\"col\">Peer</th><th scope=\"col\">Cases</th>\
         <th scope=\"col\">Median</th><th scope=\"col\">Worst</th><th scope=\"col\">Best</th></tr></thead><tbody>",
        render(results, 900.0, false),
        render(results, 400.0, false)
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
