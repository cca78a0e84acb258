//! The list of places with `unsafe` in ARCHITECTURE.md is complete.
use std::fs;
use std::path::{Path, PathBuf};

fn repository() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the repository")
}

/// Sources below `folder` that are no tests.
fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for path in entries.map(|entry| entry.expect("an entry").path()) {
        let stem = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
        if stem == "rig" || stem == "test" || stem.ends_with("tests") || stem.ends_with("_test") {
            continue;
        }
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// Whether code before the module of tests has the keyword.
fn is_unsafe(text: &str) -> bool {
    let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or(text);
    let words = |line: &str| {
        let code = line.split("//").next().unwrap_or(line);
        code.split(|c: char| !c.is_alphanumeric() && c != '_').any(|word| word == "unsafe")
    };
    code.lines().any(words)
}

/// Paths in the first column of the table.
fn listed() -> Vec<String> {
    let text = fs::read_to_string(repository().join("ARCHITECTURE.md")).expect("ARCHITECTURE.md");
    let section = text.split("\n## Places with unsafe\n").nth(1).expect("the section");
    let rows =
        section.split("\n## ").next().unwrap_or(section).lines().filter(|line| line.starts_with("| `"));
    rows.flat_map(|row| row.split('|').nth(1).unwrap_or_default().split('`').skip(1).step_by(2))
        .map(ToOwned::to_owned)
        .collect()
}

#[test]
fn every_place_with_unsafe_is_listed_and_has_some() {
    let (root, listed) = (repository(), listed());
    let mut files = Vec::new();
    let crates =
        fs::read_dir(root.join("crates")).expect("crates").map(|entry| entry.expect("an entry").path());
    for folder in crates
        .filter(|path| !path.ends_with("bench") && !path.ends_with("test-support"))
        .chain([root.join("guest")])
    {
        sources(&folder.join("src"), &mut files);
    }
    assert!(files.len() > 300 && listed.len() > 15, "{} sources, {} places", files.len(), listed.len());
    let found = files.iter().filter(|path| is_unsafe(&fs::read_to_string(path).expect("a source")));
    let found: Vec<_> = found.map(|path| path.strip_prefix(&root).expect("below it")).collect();
    let is_in = |path: &Path, place: &String| path.starts_with(place);
    let missing: Vec<_> =
        found.iter().filter(|path| !listed.iter().any(|place| is_in(path, place))).collect();
    let stale: Vec<_> = listed.iter().filter(|place| !found.iter().any(|path| is_in(path, place))).collect();
    assert!(missing.is_empty(), "not listed in ARCHITECTURE.md: {missing:?}");
    assert!(stale.is_empty(), "listed in ARCHITECTURE.md, without unsafe: {stale:?}");
}
