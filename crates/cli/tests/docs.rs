//! Relative links of all Markdown pages, their anchors, and the pages of the book.
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

fn repository() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the repository")
}

/// All Markdown files below `folder`, without what is built.
fn pages(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry")) {
        let (path, name) = (entry.path(), entry.file_name());
        let name = name.to_string_lossy();
        if path.is_dir() && !name.starts_with('.') && !["target", "corpus"].contains(&&*name) {
            pages(&path, found);
        } else if name.ends_with(".md") {
            found.push(path);
        }
    }
}

/// The lines of a page outside fenced code.
fn prose(text: &str) -> impl Iterator<Item = &str> {
    let mut fenced = false;
    text.lines().filter(move |line| {
        let fence = line.trim_start().starts_with("```");
        fenced ^= fence;
        !fenced && !fence
    })
}

/// Targets of inline links: `[text](target)`.
fn links(text: &str) -> Vec<String> {
    let lines: Vec<_> = prose(text).collect();
    let text = lines.join("\n");
    let targets = text.split("](").skip(1).filter_map(|rest| rest.split_once(')'));
    targets
        .map(|(target, _)| target.to_owned())
        .filter(|target| !target.contains(char::is_whitespace))
        .collect()
}

/// Anchors of a page's headings, as forges and mdBook make them.
fn anchors(text: &str) -> BTreeSet<String> {
    let headings = prose(text).filter_map(|line| line.strip_prefix('#'));
    let kept = |c: &char| c.is_alphanumeric() || "-_ ".contains(*c);
    headings
        .map(|line| line.trim_start_matches('#').trim().to_lowercase())
        .map(|line| line.chars().filter(kept).collect::<String>().replace(' ', "-"))
        .collect()
}

#[test]
fn relative_links_lead_somewhere() {
    let mut all = Vec::new();
    pages(&repository(), &mut all);
    assert!(all.len() > 30, "{} pages", all.len());
    let mut broken = Vec::new();
    for page in &all {
        let text = fs::read_to_string(page).expect("a page");
        for link in links(&text).into_iter().filter(|link| !link.contains(':')) {
            let (path, anchor) = link.split_once('#').unwrap_or((&link, ""));
            let target = if path.is_empty() { page.clone() } else { page.with_file_name(path) };
            let is_there = target.exists()
                && (anchor.is_empty()
                    || anchors(&fs::read_to_string(&target).unwrap_or_default()).contains(anchor));
            if !is_there {
                broken.push(format!("{}: {link}", page.display()));
            }
        }
    }
    assert!(broken.is_empty(), "broken links:\n{}", broken.join("\n"));
}

#[test]
fn every_page_is_in_the_book() {
    let docs = repository().join("docs");
    let summary = fs::read_to_string(docs.join("SUMMARY.md")).expect("SUMMARY.md");
    let listed: BTreeSet<_> = links(&summary).into_iter().map(|link| docs.join(link)).collect();
    let mut all = Vec::new();
    pages(&docs, &mut all);
    all.retain(|page| !page.ends_with("SUMMARY.md") && !listed.contains(page));
    assert!(all.is_empty(), "not in docs/SUMMARY.md: {all:?}");
}
