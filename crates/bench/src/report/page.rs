//! The page.
use super::groups::{Metric, Section, sections};
use super::html::{escape, id, number, ratio};
use super::{changes, overview, plot};
use crate::compare::Comparison;
use crate::kind::Kind;
use crate::{Results, published};
use std::fmt::Write;

/// Forbids the browser to load or run anything.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; img-src data:";

/// Renders the page.
pub(super) fn render(results: &Results, comparison: Option<&Comparison>) -> String {
    let sections = sections(&results.rows);
    let mut out = format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta http-equiv=\"Content-Security-Policy\" content=\"{POLICY}\">\
         <meta name=\"viewport\" content=\"width=device-width,initial-scale=1\"><link rel=\"icon\" href=\"data:,\">\
         <title>paravane bench, {}</title><style>\n{}</style></head>\n<body>\n<header><h1>paravane bench</h1>\
         <p class=\"mute\">{}, {}</p><nav aria-label=\"Sections\"><ul>",
        escape(&results.started),
        include_str!("style.css"),
        escape(&results.program),
        escape(&results.started),
    );
    let overview = overview::section(results);
    let mut links: Vec<(String, String)> = Vec::new();
    if comparison.is_some() {
        links.push(("comparison".to_owned(), "Comparison".to_owned()));
    }
    if !overview.is_empty() {
        links.push(("overview".to_owned(), "Beside peers".to_owned()));
    }
    links.push(("machine".to_owned(), "Machine and noise".to_owned()));
    links.extend(sections.iter().map(|section| (id(section.bench), section.bench.to_owned())));
    for (target, name) in links {
        let _ = write!(out, "<li><a href=\"#{target}\">{}</a></li>", escape(&name));
    }
    out.push_str("</ul></nav></header>\n<main>\n");
    if let Some(comparison) = comparison {
        out.push_str(&changes::section(comparison));
    }
    out.push_str(&overview);
    machine(&mut out, results);
    for part in &sections {
        section(&mut out, part);
    }
    out.push_str(
        "</main>\n<footer><h2>All numbers</h2><p><a href=\"results.json\">results.json</a>: every figure with its \
         rounds, and the machine. <a href=\"results.csv\">results.csv</a>: a line for each figure. \
         <a href=\"rounds.csv\">rounds.csv</a>: a line for each round. Two runs are compared by \
         <code>paravane bench NAME --baseline results.json</code>.</p></footer>\n</body></html>\n",
    );
    out
}

/// The machine, its noise and the command.
fn machine(out: &mut String, results: &Results) {
    let host = &results.host;
    out.push_str("<section id=\"machine\"><h2>Machine and noise</h2><dl>");
    let mut row = |name: &str, text: String| {
        let _ = write!(out, "<dt>{name}</dt><dd>{text}</dd>");
    };
    let place = if host.virtual_machine { ", virtual machine" } else { "" };
    row("Processor", format!("{}, {} CPUs{place}", escape(&host.cpu), host.cpus));
    row("Memory", format!("{} MiB", host.memory_mib));
    row("Kernel", format!("Linux {}", escape(&host.kernel)));
    row("KVM", if host.kvm.is_empty() { "none".to_owned() } else { escape(&host.kvm) });
    if let Some(governor) = &host.governor {
        row("Frequency governor", escape(governor));
    }
    let load = host.load.map(|load| load.map_or_else(|| "unknown".to_owned(), |load| format!("{load:.2}")));
    row("Load average", format!("{} at the start, {} at the end", load[0], load[1]));
    if let Some(steal) = host.steal_percent {
        row("Stolen by the hypervisor", format!("{steal:.1} % of CPU time"));
    }
    let peers: Vec<String> =
        results.peers.iter().map(|peer| escape(&format!("{} {}", peer.name, peer.version))).collect();
    if !peers.is_empty() {
        row("Peers", peers.join(", "));
    }
    row("Command", format!("<code>{}</code>", escape(&results.command_line())));
    for [name, value] in &results.environment {
        row("Environment", format!("<code>{}={}</code>", escape(name), escape(value)));
    }
    row("Started", format!("{}, {:.0} s", escape(&results.started), results.seconds));
    for omitted in &results.omitted {
        row("Omitted", format!("{}: {}", escape(&omitted.bench), escape(&omitted.reason)));
    }
    out.push_str(
        "</dl><p>Rounds are interleaved: each round measures all subjects, so that a change of the machine falls on \
         all of them. Compare subjects of one plot; times of other machines say little.</p></section>\n",
    );
}

/// A benchmark.
fn section(out: &mut String, section: &Section<'_>) {
    let id = id(section.bench);
    let summary = crate::summary(section.bench).unwrap_or_default();
    let _ = write!(
        out,
        "<section id=\"{id}\"><h2>{}</h2><p>{}</p><p class=\"mute\">{}",
        escape(section.bench),
        escape(summary),
        match section.rounds() {
            0 => "Published figures only.".to_owned(),
            rounds => format!("{rounds} rounds."),
        }
    );
    if let Some([median, worst]) = section.noise() {
        let _ = write!(
            out,
            " Noise: the middle half of the rounds spans {median:.1} % of the median (worst tenth of the figures: \
             {worst:.1} % and more)."
        );
    }
    let _ = write!(out, "</p>{}", legend(section));
    for (number, metric) in section.metrics.iter().enumerate() {
        render_metric(out, metric, &format!("{id}-{}", super::html::id(metric.name)), number == 0);
    }
    let mut notes: Vec<String> =
        crate::notes::of(section.bench).iter().map(|note| (*note).to_owned()).collect();
    let cases = section.metrics.iter().flat_map(|metric| &metric.cases);
    for citation in cases.filter_map(|case| published::citation(case.path)) {
        if !notes.contains(&citation) {
            notes.push(citation);
        }
    }
    if !notes.is_empty() {
        let items: String = notes.iter().map(|note| format!("<li>{}</li>", escape(note))).collect();
        let _ =
            write!(out, "<details open><summary>Notes</summary><ul class=\"note\">{items}</ul></details>");
    }
    out.push_str("</section>\n");
}

/// The marks that occur.
fn legend(section: &Section<'_>) -> String {
    let kinds = [
        (Kind::Ours, "ours", "Paravane"),
        (Kind::OtherBuild, "other", "other build of Paravane"),
        (Kind::Peer, "peer", "peer"),
        (Kind::Yardstick, "yard", "yardstick"),
        (Kind::Published, "pub", "published elsewhere"),
    ];
    let cases = || section.metrics.iter().filter(|metric| metric.plotted).flat_map(|metric| &metric.cases);
    let mut out = "<ul class=\"legend\">".to_owned();
    for (kind, class, words) in kinds {
        if !cases().flat_map(|case| &case.rows).any(|row| Kind::of(&row.subject) == kind) {
            continue;
        }
        let mark = match kind {
            Kind::Published => "<path class=\"m\" d=\"M17 2l5 5-5 5-5-5z\"/>",
            _ => "<path class=\"d\" d=\"M8 7h0M15 7h0M26 7h0\"/><path class=\"m\" d=\"M15 1v12\"/>",
        };
        let _ = write!(
            out,
            "<li><svg viewBox=\"0 0 34 14\" aria-hidden=\"true\"><g class=\"{class}\">{mark}</g></svg>{words}</li>"
        );
    }
    out + "<li>dot: a round; line: median; \u{d7}: relative to the first subject or paravane</li></ul>"
}

/// A metric: its plots, and a table of their numbers.
fn render_metric(out: &mut String, metric: &Metric<'_>, id: &str, open: bool) {
    let open = if open { " open" } else { "" };
    let cases = match metric.cases.len() {
        1 => "1 case".to_owned(),
        count => format!("{count} cases"),
    };
    let words = [metric.better.words(), &cases].into_iter().filter(|text| !text.is_empty());
    let _ = write!(
        out,
        "<details class=\"metric\"{open}><summary><h3>{}</h3><span>{}</span></summary>",
        escape(metric.name),
        words.collect::<Vec<_>>().join(", ")
    );
    let table = format!("{id}-table");
    if metric.plotted {
        out.push_str("<div class=\"plots\">");
        for case in &metric.cases {
            out.push_str(&plot::render(case, metric.name, &table));
        }
        out.push_str("</div>");
        let _ = write!(out, "<details><summary id=\"{table}\">Table of {}</summary>", escape(metric.name));
        render_table(out, metric);
        out.push_str("</details>");
    } else {
        render_table(out, metric);
    }
    out.push_str("</details>\n");
}

fn render_table(out: &mut String, metric: &Metric<'_>) {
    let _ = write!(
        out,
        "<div class=\"scroll\" tabindex=\"0\" role=\"region\" aria-label=\"Table of {}\"><table><thead><tr><th scope=\"col\">\
         Case</th><th class=\"l\" scope=\"col\">Subject</th><th scope=\"col\">Median</th><th scope=\"col\">Smallest</th>\
         <th scope=\"col\">Largest</th><th scope=\"col\">\u{d7}</th><th class=\"l\" scope=\"col\">Unit</th><th class=\"l\" scope=\"col\">Rounds</th>\
         </tr></thead><tbody>",
        escape(metric.name)
    );
    for case in &metric.cases {
        for (index, row) in case.rows.iter().enumerate() {
            let values: Vec<String> = row.values.iter().map(|value| number(*value)).collect();
            let _ = write!(
                out,
                "<tr{}><th scope=\"row\">{}</th><td class=\"l\">{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td>\
                 <td class=\"l\">{}</td><td class=\"rounds\" title=\"{}\">{}</td></tr>",
                if index == 0 { " class=\"first\"" } else { "" },
                plot::breakable(case.path),
                escape(&row.subject),
                number(row.median),
                number(row.min),
                number(row.max),
                case.ratio(row).map(ratio).unwrap_or_default(),
                escape(&row.unit),
                escape(&row.method),
                values.join(" "),
            );
        }
    }
    out.push_str("</tbody></table></div>");
}
