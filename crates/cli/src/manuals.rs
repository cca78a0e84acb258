//! Manual pages and shell completions, made from the command line.
mod roff;

use crate::args::{Cli, CompletionsArgs, FolderArgs, SHELLS};
use crate::failure::Failure;
use crate::options::{self, OptionText};
use crate::sections;
use crate::serve::keys;
use anyhow::Context;
use clap::{Command, CommandFactory};
use clap_complete::{generate, generate_to};
use paravane_command_line::output;
use roff::Page;
use std::process::ExitCode;

/// Date of the last change to a page's text.
///
/// The snapshot of the pages shows when it is due.
const DATE: &str = "2026-11-23";

pub(crate) fn main(args: &FolderArgs) -> Result<ExitCode, Failure> {
    let directory = &args.directory;
    let named = || directory.display().to_string();
    std::fs::create_dir_all(directory).with_context(named)?;
    for (name, text) in pages() {
        let page = directory.join(name);
        std::fs::write(&page, text).with_context(|| page.display().to_string())?;
    }
    for (.., shell) in SHELLS {
        generate_to(*shell, &mut Cli::command(), "paravane", directory).with_context(named)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints the completions of a shell.
pub(crate) fn completions(args: &CompletionsArgs) -> Result<ExitCode, Failure> {
    let mut text = Vec::new();
    generate(args.shell, &mut Cli::command(), "paravane", &mut text);
    output::print(&String::from_utf8_lossy(&text))?;
    Ok(ExitCode::SUCCESS)
}

/// File names and texts of all pages.
fn pages() -> Vec<(String, String)> {
    let commands = options::all_commands(&Cli::command());
    let mut pages: Vec<_> = commands
        .iter()
        .map(|(name, command)| {
            let below = |other: &&(String, Command)| {
                other
                    .0
                    .strip_prefix(name.as_str())
                    .is_some_and(|rest| rest.starts_with('-') && !rest[1..].contains('-'))
            };
            let below: Vec<_> = commands.iter().filter(below).collect();
            (format!("{name}.1"), page(name, command, &below))
        })
        .collect();
    pages.push(("paravane-devices.toml.5".to_owned(), devices_page()));
    pages
}

fn page(name: &str, command: &Command, below: &[&(String, Command)]) -> String {
    let (summary, description) = options::about(command);
    let mut page = Page::new(name, 1, DATE, &summary);
    page.heading("Synopsis");
    page.synopsis(&options::usage(command));
    if !description.is_empty() {
        page.heading("Description");
        description.iter().for_each(|paragraph| page.paragraph(paragraph));
    }
    if !below.is_empty() {
        page.heading("Commands");
        for (name, command) in below.iter().filter(|(_, command)| !command.is_hide_set()) {
            page.tagged(&format!("{name}(1)"), "", &format!("{}.", options::about(command).0));
        }
    }
    let all = options::of(command);
    let mut headings: Vec<&str> = vec!["Options"];
    for heading in all.iter().filter_map(|option| option.heading.as_deref()) {
        if !headings.contains(&heading) {
            headings.push(heading);
        }
    }
    for heading in headings {
        let group: Vec<_> =
            all.iter().filter(|option| option.heading.as_deref().unwrap_or("Options") == heading).collect();
        if !group.is_empty() {
            page.heading(&if heading == "Options" {
                "Options".to_owned()
            } else {
                format!("{heading} options")
            });
        }
        for option in group {
            let value = option.value().unwrap_or_default();
            entry(&mut page, option, &option.flags, &value, |text| text.to_owned());
        }
    }
    end(&mut page, name);
    page.finish()
}

fn entry(page: &mut Page, option: &OptionText, tag: &str, value: &str, words: impl Fn(&str) -> String) {
    page.tagged(tag, value, &words(&sentence(option)));
    option.details.iter().for_each(|paragraph| page.continued(&words(paragraph)));
    let values: Vec<_> =
        option.values.iter().map(|(name, text)| (name.clone(), format!("{text}."))).collect();
    page.list(&values);
}

fn sentence(option: &OptionText) -> String {
    match &option.default {
        Some(default) => format!("{}. Default: {default}.", option.summary),
        None => format!("{}.", option.summary),
    }
}

/// The sections behind the options.
fn end(page: &mut Page, name: &str) {
    let Some(sections) = sections::of(name) else { return };
    for (heading, rows) in sections.all() {
        page.heading(heading);
        for (name, text) in rows {
            if heading == "Examples" {
                page.paragraph(text);
                page.verbatim(&format!("    {name}"));
            } else {
                page.tagged(&name, "", text);
            }
        }
    }
    page.heading("See also");
    page.paragraph(&sections.see_also.join(", "));
}

/// The page of the file of devices.
fn devices_page() -> String {
    let mut page = Page::new("paravane-devices.toml", 5, DATE, "devices of paravane serve --config");
    page.heading("Synopsis");
    page.synopsis("/etc/paravane/devices.toml");
    page.heading("Description");
    keys::introduction().iter().for_each(|paragraph| page.paragraph(paragraph));
    page.heading("Tables");
    for table in keys::tables() {
        page.subheading(&table.header);
        page.paragraph(table.summary);
        for option in &table.keys {
            let value = format!("= {}", option.toml_type);
            entry(&mut page, option, &option.name, &value, |text| table.words(text));
        }
    }
    page.heading("Files");
    page.tagged("/etc/paravane/devices.toml", "", "Devices of paravane.service.");
    page.heading("Examples");
    page.verbatim(&keys::example());
    page.heading("See also");
    page.paragraph("paravane-serve(1), paravane-status(1)");
    page.finish()
}
