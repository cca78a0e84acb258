//! Text that operators read, reviewed as text.
//!
//! Help, manual pages, messages, and the generated reference.
//!
//! The expected texts are files below `tests/snapshots` and `docs/reference`. After a change of
//! words: `UPDATE_SNAPSHOTS=1 cargo test -p paravane-cli --test text`, then review the difference
//! in git.
mod messages;
mod snapshot;

use snapshot::Folder;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// All commands.
const COMMANDS: [&[&str]; 23] = [
    &[],
    &["run"],
    &["serve"],
    &["serve", "blk"],
    &["serve", "net"],
    &["serve", "rng"],
    &["hold"],
    &["reload"],
    &["status"],
    &["top"],
    &["trace"],
    &["disk"],
    &["disk", "create"],
    &["disk", "info"],
    &["disk", "convert"],
    &["disk", "commit"],
    &["disk", "snapshot"],
    &["disk", "fork"],
    &["doctor"],
    &["bench"],
    &["completions"],
    &["manuals"],
    &["reference"],
];

fn paravane() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_paravane"));
    command.stdin(Stdio::null()).env_remove("RUST_LOG").env_remove("COLUMNS");
    command
}

fn output(arguments: &[&str]) -> String {
    let output = paravane().args(arguments).output().expect("the program starts");
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}

/// What a command prints. `paravane bench` has another program print it, from the same definition.
fn help(command: &[&str], option: &str) -> String {
    match (command, option) {
        (["bench"], "-h") => paravane_command_line::bench::command().render_help().to_string(),
        (["bench"], _) => paravane_command_line::bench::command().render_long_help().to_string(),
        _ => output(&[command, &[option]].concat()),
    }
}

fn crate_folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Files that `paravane COMMAND FOLDER` writes: names and texts.
fn generated(command: &str) -> Vec<(String, String)> {
    let folder = tempfile::tempdir().expect("a folder");
    output(&[command, folder.path().to_str().expect("UTF-8")]);
    let mut files: Vec<_> =
        folder.path().read_dir().expect("a folder").map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let name = |path: &Path| path.file_name().unwrap().to_str().unwrap().to_owned();
    files.iter().map(|path| (name(path), std::fs::read_to_string(path).unwrap())).collect()
}

#[test]
fn help_is_as_reviewed() {
    let mut folder = Folder::new(crate_folder().join("tests/snapshots/help"));
    for command in COMMANDS {
        let words = [&["paravane"], command].concat();
        let mut text = String::new();
        for option in ["-h", "--help"] {
            text += &format!("$ {} {option}\n{}\n", words.join(" "), help(command, option));
        }
        folder.file(&format!("{}.txt", words.join("-")), &text);
    }
    folder.finish();
}

#[test]
fn manual_pages_are_as_reviewed() {
    let mut folder = Folder::new(crate_folder().join("tests/snapshots/man"));
    for (name, text) in generated("manuals") {
        // Completions follow from the help.
        if name.ends_with(".1") || name.ends_with(".5") {
            folder.file(&name, &text);
        }
    }
    folder.finish();
}

#[test]
fn the_generated_reference_is_fresh() {
    let docs = crate_folder().join("../../docs");
    if !docs.is_dir() {
        return paravane_test_support::skip(
            "the_generated_reference_is_fresh",
            format_args!("no {}", docs.display()),
        );
    }
    let mut folder = Folder::new(docs.join("reference")).with_others();
    for (name, text) in generated("reference") {
        folder.file(&name, &text);
    }
    folder.finish();
}

/// Errors, logs and other words of each crate that `paravane` consists of, by file.
#[test]
fn messages_are_as_reviewed() {
    let mut folder = Folder::new(crate_folder().join("tests/snapshots/messages"));
    for name in [
        "cli",
        "export",
        "vhost",
        "vmm",
        "attach",
        "device",
        "io",
        "transport",
        "notify",
        "ring",
        "dma",
        "driver",
        "bench",
        "command-line",
    ] {
        let sources = match name {
            "cli" => crate_folder().join("src"),
            other => crate_folder().join("..").join(other).join("src"),
        };
        match sources.is_dir() {
            true => folder.file(&format!("{name}.txt"), &messages::of(&sources)),
            false => folder = folder.with_others(),
        }
    }
    folder.finish();
}
