//! `paravane disk info`.
use super::image::{format, layers, open_bytes};
use crate::failure::Failure;
use crate::images::{Backing, Format};
use crate::size::bytes;
use clap::Args;
use paravane_command_line::output;
use paravane_device::blk::images::{self, Info, Recorded};
use paravane_store::Location;
use serde::Serialize;
use std::fmt::Write;

/// Describe an image: format, sizes, backing file, features
///
/// Only the header is read. Without --format, a file that begins as qcow2 does is described as
/// qcow2, and every other one as raw; the report says so. A guest can write such a beginning into a
/// raw image: `paravane serve` and the other commands take no format from a report or a file.
#[derive(Debug, Args)]
pub(super) struct InfoArgs {
    /// Image to describe
    #[arg(value_name = "LOCATION")]
    location: Location,
    /// Format of the image [default: what its header suggests]
    #[arg(long, value_enum, value_name = "FORMAT")]
    format: Option<Format>,
    /// Backing file as FORMAT:LOCATION, to be compared; repeat per layer, top first
    ///
    /// Fails with status 2 if the image names another one.
    #[arg(long, value_name = "FORMAT:LOCATION")]
    backing: Vec<Backing>,
    /// Print the report as a JSON object
    #[arg(long)]
    json: bool,
}

pub(super) fn main(args: &InfoArgs) -> Result<(), Failure> {
    let place = open_bytes(&args.location, false)?;
    let info = images::info(&place, args.format.map(format)).map_err(Failure::request)?;
    if !args.backing.is_empty() {
        images::check_layers(&place, info.format, &layers(&args.backing)?).map_err(Failure::request)?;
    }
    let report = Report::new(args, &info);
    if args.json {
        output::print_json(&report)?;
    } else {
        output::print(&report.text())?;
    }
    Ok(())
}

/// The report, as JSON has it.
#[derive(Serialize)]
struct Report<'a> {
    image: String,
    format: &'static str,
    /// `option`, or `header`: the format is a guess.
    format_from: &'static str,
    disk_bytes: u64,
    file_bytes: u64,
    allocated_bytes: Option<u64>,
    qcow2: Option<Qcow2<'a>>,
}

#[derive(Serialize)]
struct Qcow2<'a> {
    version: u32,
    cluster_bytes: Option<u64>,
    backing_file: Option<&'a str>,
    backing_format: Option<&'a str>,
    snapshots: u32,
    bitmaps: u32,
    features: &'a [String],
    /// Why it cannot be served; `null`: it can.
    refused: Option<&'a str>,
}

impl<'a> Report<'a> {
    fn new(args: &InfoArgs, info: &'a Info) -> Self {
        Self {
            image: args.location.to_string(),
            format: info.format.name(),
            format_from: if args.format.is_some() { "option" } else { "header" },
            disk_bytes: info.size,
            file_bytes: info.file_size,
            allocated_bytes: info.allocated,
            qcow2: info.header.as_ref().map(Qcow2::new),
        }
    }

    fn text(&self) -> String {
        let guess = if self.format_from == "header" { " (by its header; a guest can write any)" } else { "" };
        let size = |n: u64| if n < 1024 { bytes(n) } else { format!("{} ({n} bytes)", bytes(n)) };
        let mut rows = vec![
            ("format", format!("{}{guess}", self.format)),
            ("disk", size(self.disk_bytes)),
            ("file", size(self.file_bytes)),
        ];
        rows.extend(self.allocated_bytes.map(|allocated| ("allocated", size(allocated))));
        if let Some(qcow2) = &self.qcow2 {
            qcow2.rows(&mut rows);
        }
        let mut out = format!("{}\n", self.image);
        for (name, value) in rows {
            // Writing to a String cannot fail.
            let _ = writeln!(out, "  {name:10} {value}");
        }
        out
    }
}

impl<'a> Qcow2<'a> {
    fn new(header: &'a Recorded) -> Self {
        let layout = header.layout.as_ref();
        Self {
            version: header.version,
            cluster_bytes: layout.map(|layout| layout.cluster_size),
            backing_file: layout.and_then(|layout| layout.backing.as_deref()),
            backing_format: layout.and_then(|layout| layout.backing_format.as_deref()),
            snapshots: header.snapshots,
            bitmaps: layout.map_or(0, |layout| layout.bitmaps),
            features: &header.features,
            refused: header.refused.as_deref(),
        }
    }

    fn rows(&self, rows: &mut Vec<(&'static str, String)>) {
        rows.push(("version", self.version.to_string()));
        rows.extend(self.cluster_bytes.map(|cluster| ("clusters", bytes(cluster))));
        // Quoted: a guest may have written them.
        rows.extend(self.backing_file.map(|name| {
            let format =
                self.backing_format.map_or_else(String::new, |format| format!(", format {format:?}"));
            ("backing", format!("{name:?}{format}"))
        }));
        if !self.features.is_empty() {
            rows.push(("features", self.features.join(", ")));
        }
        rows.push(("snapshots", self.snapshots.to_string()));
        rows.push(("bitmaps", self.bitmaps.to_string()));
        rows.extend(self.refused.map(|reason| ("refused", reason.to_owned())));
    }
}
