//! Files with expected texts.
use std::fmt::Write;
use std::path::PathBuf;

/// A folder of expected texts, and how they differ.
pub(crate) struct Folder {
    path: PathBuf,
    names: Vec<String>,
    differences: String,
    others: bool,
}

impl Folder {
    pub(crate) fn new(path: PathBuf) -> Self {
        Self { path, names: Vec::new(), differences: String::new(), others: false }
    }

    /// Accepts further files in the folder.
    pub(crate) fn with_others(self) -> Self {
        Self { others: true, ..self }
    }

    /// Compares `text` with the file `name`, or writes the file with UPDATE_SNAPSHOTS.
    pub(crate) fn file(&mut self, name: &str, text: &str) {
        self.names.push(name.to_owned());
        let path = self.path.join(name);
        if std::env::var_os("UPDATE_SNAPSHOTS").is_some() {
            std::fs::create_dir_all(&self.path).expect("the folder is created");
            std::fs::write(&path, text).expect("the file is written");
            return;
        }
        let expected = std::fs::read_to_string(&path).unwrap_or_default();
        if expected != text {
            let _ = writeln!(self.differences, "{}:\n{}", path.display(), difference(&expected, text));
        }
    }

    /// Fails if a text differs, or if the folder has a file that nothing generates.
    pub(crate) fn finish(mut self) {
        let entries = self.path.read_dir().into_iter().flatten();
        for entry in entries.map(|entry| entry.expect("an entry")) {
            let name = entry.file_name().into_string().expect("UTF-8");
            if self.others || self.names.contains(&name) {
                continue;
            }
            if std::env::var_os("UPDATE_SNAPSHOTS").is_some() {
                std::fs::remove_file(entry.path()).expect("the file is removed");
            } else {
                let _ = writeln!(self.differences, "{}: not generated any more", entry.path().display());
            }
        }
        assert!(
            self.differences.is_empty(),
            "text has changed; after `UPDATE_SNAPSHOTS=1 cargo test -p paravane-cli --test text`, review the difference\n{}",
            self.differences
        );
    }
}

/// Removed lines with `-`, added ones with `+`, each with its number.
fn difference(old: &str, new: &str) -> String {
    let (old, new): (Vec<_>, Vec<_>) = (old.lines().collect(), new.lines().collect());
    let common = |a: &[&str], b: &[&str]| a.iter().zip(b).take_while(|(a, b)| a == b).count();
    let start = common(&old, &new);
    let (mut a, mut b) = (start, start);
    let mut out = String::new();
    // Each step looks for the nearest line that both have.
    while a < old.len() || b < new.len() {
        if a < old.len() && b < new.len() && old[a] == new[b] {
            (a, b) = (a + 1, b + 1);
            continue;
        }
        let (next_a, next_b) = next_common(&old[a..], &new[b..]);
        for (offset, line) in old[a..a + next_a].iter().enumerate() {
            let _ = writeln!(out, "  {:5} - {line}", a + offset + 1);
        }
        for (offset, line) in new[b..b + next_b].iter().enumerate() {
            let _ = writeln!(out, "  {:5} + {line}", b + offset + 1);
        }
        (a, b) = (a + next_a, b + next_b);
    }
    out
}

/// Distances to the nearest line that is in both, or to the ends.
fn next_common(old: &[&str], new: &[&str]) -> (usize, usize) {
    for sum in 0..old.len() + new.len() {
        for a in 0..=sum.min(old.len().saturating_sub(1)) {
            let b = sum - a;
            if a < old.len() && b < new.len() && old[a] == new[b] {
                return (a, b);
            }
        }
    }
    (old.len(), new.len())
}

#[test]
fn a_difference_names_the_lines() {
    let difference = difference("a\nb\nc\nd\n", "a\nB\nc\nd\ne\n");
    assert_eq!(difference, "      2 - b\n      2 + B\n      5 + e\n");
}
