//! Chapters of the reference in the documentation, made from the code.
mod features;
mod markdown;
pub(crate) mod names;
mod probes;

use crate::args::{Cli, FolderArgs};
use crate::doctor;
use crate::failure::Failure;
use crate::options::{self, OptionText};
use crate::sections;
use crate::serve::keys;
use crate::serve::metrics::exposition::Family;
use crate::serve::metrics::families;
use crate::serve::report::Report;
use anyhow::Context;
use clap::CommandFactory;
use markdown::Chapter;
use std::process::ExitCode;

pub(crate) fn main(args: &FolderArgs) -> Result<ExitCode, Failure> {
    let directory = &args.directory;
    std::fs::create_dir_all(directory).with_context(|| directory.display().to_string())?;
    let chapters = [
        ("options.md", options_chapter()),
        ("devices-toml.md", keys_chapter()),
        ("metrics.md", metrics_chapter()),
        ("exit-status.md", exit_chapter()),
        ("doctor.md", doctor_chapter()),
        ("protocol-features.md", features::chapter()?),
        ("probes.md", probes::chapter()),
    ];
    for (name, text) in chapters {
        let file = directory.join(name);
        std::fs::write(&file, text).with_context(|| file.display().to_string())?;
    }
    Ok(ExitCode::SUCCESS)
}

/// "paravane run" of "paravane-run".
fn words(command: &str) -> String {
    command.replace('-', " ")
}

fn options_chapter() -> String {
    let mut chapter = Chapter::new("Commands and options");
    chapter.paragraph(
        "Sizes are numbers of bytes, or numbers with k, M, G or T (powers of 1024). Options of the daemon work with \
         `paravane serve` and its subcommands; they are listed once.",
    );
    let commands = options::commands(&Cli::command());
    for (name, command) in &commands {
        let (summary, description) = options::about(command);
        chapter.heading(&words(name));
        chapter.paragraph(&format!("{}.", summary));
        chapter.code("text", &options::usage(command));
        description.iter().for_each(|paragraph| chapter.paragraph(&markdown::text(paragraph)));
        let all = options::of(command);
        let inherited = |option: &OptionText| {
            let is_global = |(parent, command): &(String, clap::Command)| {
                name.starts_with(parent.as_str())
                    && name != parent
                    && options::of(command).iter().any(|other| other.flags == option.flags)
            };
            commands.iter().any(is_global)
        };
        let own: Vec<_> = all.iter().filter(|option| !inherited(option)).collect();
        let rows: Vec<_> = own.iter().map(|option| option_row(option)).collect();
        if !rows.is_empty() {
            chapter.table(&["Option", "Value", "Default", "Meaning"], &rows);
        }
        for option in own {
            let lists = option.details.iter().filter(|paragraph| markdown::is_verbatim(paragraph));
            lists.for_each(|list| chapter.code("text", list));
        }
        if let Some(sections) = sections::of(name) {
            for (heading, rows) in sections.all().into_iter().filter(|&(heading, _)| heading != "Exit status")
            {
                chapter.subheading(heading);
                chapter
                    .list(rows.into_iter().map(|(name, text)| format!("`{name}`: {}", markdown::text(text))));
            }
        }
    }
    chapter.finish()
}

fn option_row(option: &OptionText) -> Vec<String> {
    let value = option.value().map_or_else(String::new, |value| format!("`{value}`"));
    vec![format!("`{}`", option.flags), value, default(option), meaning(option, |text| text.to_owned())]
}

fn default(option: &OptionText) -> String {
    match (&option.default, option.required) {
        (Some(default), _) => markdown::text(default),
        (None, true) => "(required)".to_owned(),
        (None, false) => String::new(),
    }
}

/// Summary, details and possible values in one cell.
fn meaning(option: &OptionText, words: impl Fn(&str) -> String) -> String {
    let mut text = format!("{}.", option.summary);
    for paragraph in option.details.iter().filter(|paragraph| !markdown::is_verbatim(paragraph)) {
        text += &format!(" {paragraph}");
    }
    let mut text = markdown::text(&words(&text));
    for (value, meaning) in &option.values {
        text += &format!("<br>`{value}`: {}.", markdown::text(meaning));
    }
    text
}

fn keys_chapter() -> String {
    let mut chapter = Chapter::new("Keys of devices.toml");
    keys::introduction().iter().for_each(|paragraph| chapter.paragraph(&markdown::text(paragraph)));
    chapter.code("toml", &keys::example());
    for table in keys::tables() {
        chapter.heading(&format!("`{}`", table.header));
        chapter.paragraph(table.summary);
        let row = |option: &OptionText| {
            let default = match option.name.as_str() {
                // On the command line, the name has a default.
                "name" => "(required)".to_owned(),
                _ if option.toml_type == "boolean" => "false".to_owned(),
                _ => table.words(&default(option)),
            };
            let meaning = meaning(option, |text| table.words(text));
            vec![format!("`{}`", option.name), option.toml_type.to_owned(), default, meaning]
        };
        chapter
            .table(&["Key", "Type", "Default", "Meaning"], &table.keys.iter().map(row).collect::<Vec<_>>());
    }
    chapter.finish()
}

fn metrics_chapter() -> String {
    let mut chapter = Chapter::new("Metrics");
    chapter.paragraph(
        "`paravane serve --metrics ADDRESS:PORT` serves these metrics at `/metrics`: as OpenMetrics 1.0 to clients that \
         accept it, else in the text format of Prometheus (0.0.4). A histogram has samples `_bucket` (label `le`), `_sum` and \
         `_count`. \
         Counters start at 0 when their device starts. The label `device` is the name of the device, `kind` that of its \
         subcommand. Metrics without a value, for example sizes of network cards, are left out.",
    );
    let row = |metric: &Family| {
        let labels: Vec<_> = metric.labels.iter().map(|label| format!("`{label}`")).collect();
        let name = format!("`{}`", metric.name());
        let unit = metric.unit().to_owned();
        vec![name, metric.kind().to_owned(), labels.join(", "), unit, format!("{}.", metric.help)]
    };
    let rows: Vec<_> = families::exposition(&Report::default()).families.iter().map(row).collect();
    chapter.table(&["Metric", "Type", "Labels", "Unit", "Meaning"], &rows);
    chapter.paragraph(
        "`operation` is read, write, flush, discard or write_zeroes. `reason` is malformed (not a frame, or an invalid \
         header), refused (by the host) or no_room (larger than the guest's buffers).",
    );
    chapter.paragraph(
        "The `operation` of a latency is read, write, flush, discard, write_zeroes, other, frame_out, frame_in or entropy, \
         and appears with its first request; queues are summed. `stage` is ring (waiting for the I/O thread), throttled (rate \
         limit), host (storage or network) or interrupt. `thread` is io0, io1, ...; a \
         thread that devices share has no `device` and `kind`. Buckets end at 1, 2 and 5 times powers of ten \
         from 10 µs to 10 s, those of stages at powers of ten; a latency may be counted up to 1/8 too high. The processes' \
         metrics have the names that Prometheus's client libraries use.",
    );
    chapter.heading("Number of series");
    chapter.paragraph(&format!(
        "A disk with reads, writes, flushes and one I/O thread of its own has {} series, {} of them for each operation and {} for each \
         stage. A device without requests has about {}. To keep fewer, drop the buckets of stages with \
         `metric_relabel_configs`: [Watch latency](../howto/watch-latency.md#prometheus).",
        families::SERIES_OF_A_DISK,
        families::SERIES_OF_AN_OPERATION,
        families::SERIES_OF_A_STAGE,
        families::SERIES_OF_A_DISK - 3 * families::SERIES_OF_AN_OPERATION - 4 * families::SERIES_OF_A_STAGE,
    ));
    chapter.paragraph(families::COST);
    chapter.code("sh", "cargo test --release -p paravane-cli --bin paravane scrape_cost -- --nocapture\n");
    chapter.finish()
}

fn doctor_chapter() -> String {
    let mut chapter = Chapter::new("Findings of doctor");
    chapter.paragraph(
        "`paravane doctor` checks the host, `paravane doctor --config FILE` what the devices of a file need, and \
         `paravane doctor --client SOCKET` what the VMM of a device and the driver of its guest have negotiated. \
         `--json` prints a list of objects with these fields; names are stable, findings may be added.",
    );
    let fields = [
        ("name", "Name of the finding, see below."),
        ("device", "Name of the device that it is about, else null."),
        ("level", "ok, warn (works, with a loss) or missing."),
        ("found", "What was found, with units."),
        ("remedy", "What to do; empty if the level is ok."),
    ];
    let rows = fields.map(|(field, text)| vec![format!("`{field}`"), text.to_owned()]);
    chapter.table(&["Field", "Meaning"], &rows);
    for (heading, names) in [
        ("Host", doctor::names::HOST),
        ("Devices", doctor::names::DEVICES),
        ("Client", doctor::names::CLIENT),
    ] {
        chapter.heading(heading);
        let row = |&(name, text): &(&str, &str)| vec![format!("`{name}`"), markdown::text(text)];
        chapter.table(&["Name", "Question"], &names.iter().map(row).collect::<Vec<_>>());
    }
    chapter.finish()
}

fn exit_chapter() -> String {
    let mut chapter = Chapter::new("Exit status");
    chapter.paragraph("With a status other than 0, the last line on stderr tells why.");
    for sections in sections::all() {
        chapter.heading(&words(sections.command));
        let row = |&(status, text): &(u8, &str)| vec![status.to_string(), text.to_owned()];
        chapter.table(&["Status", "Meaning"], &sections.exit.iter().map(row).collect::<Vec<_>>());
    }
    chapter.finish()
}
