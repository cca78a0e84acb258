//! A kind of device is named in its own files, and nowhere else in the program.
use std::fs;
use std::path::{Path, PathBuf};

/// Files that name a kind, and why.
const EXCEPTIONS: [(&str, &str); 1] = [("disk/next_start.rs", "prints the command line that serves a disk")];

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap().map(Result::unwrap) {
        match entry.path() {
            path if path.is_dir() => sources(&path, found),
            path => found.push(path),
        }
    }
}

/// Names of the list, as in the source: `&blk::BlkKind`.
fn names(list: &str) -> Vec<String> {
    let list = list.split_once("pub(crate) static KINDS").expect("the list").1.split_once(';').unwrap().0;
    let entries = list.split('&').filter_map(|entry| entry.split_once("::"));
    entries.map(|(name, _)| name.to_owned()).collect()
}

#[test]
fn no_other_file_names_a_kind() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let names = names(&fs::read_to_string(root.join("kinds.rs")).unwrap());
    assert!(names.len() >= 4, "{names:?}");
    let (mut all, mut found) = (Vec::new(), Vec::new());
    sources(&root, &mut all);
    for path in all {
        let name = path.strip_prefix(&root).unwrap().to_str().unwrap();
        let of_kinds = name == "kinds.rs" || name.starts_with("kinds/");
        if of_kinds || name.ends_with("tests.rs") || EXCEPTIONS.iter().any(|(file, _)| *file == name) {
            continue;
        }
        let text = fs::read_to_string(&path).unwrap();
        let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap();
        for (number, line) in (1..).zip(code.lines().filter(|line| !line.trim_start().starts_with("//"))) {
            if names.iter().any(|name| line.contains(&format!("\"{name}\""))) {
                found.push(format!("{name}:{number}: {line}"));
            }
        }
    }
    assert!(found.is_empty(), "ask the list of kinds instead:\n{}", found.join("\n"));
}
