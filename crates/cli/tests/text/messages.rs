//! Finds string literals of errors, logs and output in sources without tests.
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// Calls, macros and attributes by which a literal is known, innermost first.
const KINDS: [(&str, &[&str]); 8] = [
    (
        "",
        &[
            "assert",
            "assert_eq",
            "assert_ne",
            "debug_assert",
            "debug_assert_eq",
            "unreachable",
            "panic",
            "expect",
            "cfg",
            "allow",
            "include_str",
            "env",
            "doc",
            "asm",
            "must_use",
            "deprecated",
            "serde",
        ],
    ),
    (
        "error",
        &[
            "error",
            "anyhow",
            "bail",
            "ensure",
            "context",
            "with_context",
            "Err",
            "ok_or",
            "ok_or_else",
            "map_err",
        ],
    ),
    ("error log", &["tracing::error"]),
    ("warn log", &["tracing::warn"]),
    ("info log", &["tracing::info"]),
    ("debug log", &["tracing::debug", "tracing::trace"]),
    ("help", &["arg", "command"]),
    ("output", &["println", "eprintln", "complain"]),
];

/// The words of all files below `sources`.
pub(crate) fn of(sources: &Path) -> String {
    let mut files = Vec::new();
    collect(sources, &mut files);
    files.sort();
    let mut out = String::new();
    for file in files {
        let text = std::fs::read_to_string(&file).expect("a source");
        let found = literals(without_tests(&text));
        if !found.is_empty() {
            let _ = writeln!(out, "{}", file.strip_prefix(sources).expect("below").display());
            for (kind, words) in found {
                let _ = writeln!(out, "  {kind:9}  {words}");
            }
        }
    }
    out
}

/// The source up to its inline module of tests.
fn without_tests(source: &str) -> &str {
    let mut modules = source.match_indices("#[cfg(test)]\nmod ");
    let inline = modules.find(|(at, start)| {
        let rest = &source[at + start.len()..];
        rest[rest.find([';', '{']).unwrap_or(0)..].starts_with('{')
    });
    &source[..inline.map_or(source.len(), |(at, _)| at)]
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in folder.read_dir().expect("a folder") {
        let path = entry.expect("an entry").path();
        let stem = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default().to_owned();
        // Texts of the last five are in other snapshots.
        let is_test = stem == "tests" || stem.ends_with("_tests") || stem.ends_with("_test");
        if is_test || matches!(&*stem, "sections" | "reference" | "manuals" | "keys" | "probes") {
            continue;
        }
        if path.is_dir() {
            collect(&path, files);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
}

/// Kinds and words of the literals of a source, in order.
fn literals(source: &str) -> Vec<(&'static str, String)> {
    let mut found = Vec::new();
    // Names in front of the open brackets.
    let mut open: Vec<&str> = Vec::new();
    let mut rest = source;
    let mut name = "";
    while let Some(c) = rest.chars().next() {
        let mut step = c.len_utf8();
        match c {
            '/' if rest.starts_with("//") => step = rest.find('\n').unwrap_or(rest.len()),
            '\'' => step = char_literal(rest),
            '"' => {
                let (words, len) = literal(rest);
                if let Some(kind) = kind(&open, &words) {
                    found.push((kind, words));
                }
                step = len;
            }
            'r' if rest.starts_with("r\"") || rest.starts_with("r#\"") => {
                let hashes = rest[1..].find('"').unwrap_or(0);
                let end = format!("\"{}", "#".repeat(hashes));
                step = 2
                    + hashes
                    + rest[2 + hashes..].find(&end).map_or(rest.len() - 2 - hashes, |at| at + end.len());
            }
            '(' | '[' | '{' => {
                open.push(if c == '(' { name } else { "" });
                name = "";
            }
            ')' | ']' | '}' => {
                open.pop();
                name = "";
            }
            c if c.is_alphanumeric() || c == '_' => {
                let end = |c: char| !(c.is_alphanumeric() || matches!(c, '_' | ':'));
                step = rest.find(end).unwrap_or(rest.len());
                name = &rest[..step];
            }
            '!' => {}
            _ => name = "",
        }
        rest = &rest[step..];
    }
    found
}

/// Length of a character, or of the quote of a lifetime.
fn char_literal(rest: &str) -> usize {
    let mut chars = rest.char_indices().skip(1);
    let escaped = chars.next().is_some_and(|(_, c)| c == '\\');
    let end = match escaped {
        true => rest[3..].find('\'').map(|at| at + 4),
        false => chars.next().filter(|&(_, c)| c == '\'').map(|(at, _)| at + 1),
    };
    end.unwrap_or(1)
}

/// The words of a literal on one line, and its length in the source.
fn literal(rest: &str) -> (String, usize) {
    let mut words = String::new();
    let mut chars = rest.char_indices().skip(1);
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => return (words, at + 1),
            '\\' => match chars.next() {
                // The line goes on behind its indentation.
                Some((at, '\n')) => {
                    let blanks = rest[at + 1..].len() - rest[at + 1..].trim_start().len();
                    for _ in 0..blanks {
                        chars.next();
                    }
                }
                Some((_, c)) => words.extend(['\\', c]),
                None => break,
            },
            '\n' => words += "\\n",
            c => words.push(c),
        }
    }
    (words, rest.len())
}

/// The kind of a literal, if it has words for operators.
fn kind(open: &[&str], words: &str) -> Option<&'static str> {
    let is_text = words.contains(' ') && words.chars().filter(|c| c.is_alphabetic()).count() > 3;
    let of_call = |name: &&str| {
        let known = KINDS.iter().find(|(_, names)| names.contains(name));
        known.map(|&(kind, _)| kind)
    };
    match open.iter().rev().find_map(of_call) {
        Some("") => None,
        Some(kind) if is_text || kind.ends_with("log") => Some(kind),
        None if is_text => Some("text"),
        _ => None,
    }
}

#[test]
fn literals_have_their_kinds() {
    let source = r##"
        // "no comment"
        #[error("broken: {0}")]
        fn f<'a>(c: char) -> Result<(), String> {
            assert!(c != '"', "an assertion");
            tracing::warn!(%error, "it goes \
                            on");
            Err(format!("too {c}"))
        }
        const RAW: &str = r#"raw " text"#;
        const HELP: &str = "some words";
    "##;
    let wanted =
        [("error", "broken: {0}"), ("warn log", "it goes on"), ("error", "too {c}"), ("text", "some words")];
    assert_eq!(literals(source), wanted.map(|(kind, words)| (kind, words.to_owned())));
}
