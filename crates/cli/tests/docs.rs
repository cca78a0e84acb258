//! Relative links of all Markdown pages, their anchors, and the pages of the book.
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use paravane_spec::mmio_msi::{self as msi, command, state};

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

/// Texts of headings that others print: the C library, QEMU.
const FOREIGN: [&str; 6] = [
    "No such file or directory",
    "Invalid argument",
    "Device or resource busy",
    "No space left on device",
    "Cannot allocate memory",
    "CAP_NET_ADMIN",
];

/// The string literals of a Rust source, joined; what is filled in is left out.
fn literals(source: &str) -> String {
    let (mut text, mut depth) = (String::new(), 0);
    let mut pieces = source.chars().peekable();
    let mut is_inside = false;
    while let Some(next) = pieces.next() {
        match (is_inside, next) {
            (false, '\'') if pieces.peek() == Some(&'"') => drop(pieces.next()),
            (_, '"') => {
                (is_inside, depth) = (!is_inside, 0);
                text.push('\n');
            }
            (true, '\\') => match pieces.next() {
                Some('\n') => while pieces.next_if(|next| next.is_whitespace()).is_some() {},
                Some(escaped) => text.push(escaped),
                None => {}
            },
            (true, '{') => depth += 1,
            (true, '}') => depth = (depth - 1).max(0),
            (true, next) if depth == 0 => text.push(next),
            _ => {}
        }
    }
    text
}

fn sources(folder: &Path, text: &mut String) {
    for entry in fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path()) {
        if entry.is_dir() {
            sources(&entry, text);
        } else if entry.extension().is_some_and(|extension| extension == "rs") {
            text.push_str(&literals(&fs::read_to_string(entry).expect("a source")));
        }
    }
}

/// The message of a heading, in pieces that no name or number interrupts.
fn pieces(message: &str) -> Vec<&str> {
    let parts = message.split("...").flat_map(|part| part.split(": "));
    let parts = parts.flat_map(|part| part.split(|c: char| c.is_ascii_digit())).map(|part| part.trim());
    parts.filter(|part| part.contains(' ') && !FOREIGN.contains(part)).collect()
}

#[test]
fn every_heading_of_troubleshooting_is_a_message() {
    let text = fs::read_to_string(repository().join("docs/troubleshooting.md")).expect("the page");
    let mut printed = String::new();
    for entry in fs::read_dir(repository().join("crates")).expect("the crates") {
        let folder = entry.expect("an entry").path().join("src");
        if folder.is_dir() {
            sources(&folder, &mut printed);
        }
    }
    let headings = prose(&text).filter_map(|line| line.strip_prefix("### "));
    let ours = headings.filter(|heading| !heading.starts_with("QEMU"));
    let messages = ours.flat_map(|heading| heading.split('`').skip(1).step_by(2));
    let mut count = 0;
    let strange: Vec<_> =
        messages.inspect(|_| count += 1).flat_map(pieces).filter(|piece| !printed.contains(piece)).collect();
    assert!(count > 40, "{count} messages");
    assert!(strange.is_empty(), "in headings, and printed by no code: {strange:#?}");
}

/// File and function of a row that names both.
fn call(row: &str) -> Option<(&str, &str)> {
    let cells: Vec<_> = row.trim_matches('|').split('|').map(str::trim).collect();
    let &[_, file, function] = cells.as_slice() else { return None };
    Some((file.strip_prefix('`')?.strip_suffix('`')?, function.strip_prefix('`')?.strip_suffix('`')?))
}

#[test]
fn the_calls_of_a_request_exist() {
    let page = fs::read_to_string(repository().join("docs/library/recipes.md")).expect("the page");
    let calls: Vec<_> = page.lines().filter_map(call).collect();
    assert!(calls.len() > 10, "{calls:?}");
    for (file, function) in calls {
        let source =
            fs::read_to_string(repository().join(file)).unwrap_or_else(|error| panic!("{file}: {error}"));
        assert!(source.contains(&format!("fn {function}(")), "{file} has no function {function}");
    }
}

/// Adds the sources of a file or of a folder.
fn read_all(path: &Path, text: &mut String) {
    if path.is_dir() {
        let entries = fs::read_dir(path).expect("a folder");
        entries.for_each(|entry| read_all(&entry.expect("an entry").path(), text));
    } else {
        text.push_str(&fs::read_to_string(path).expect("a source"));
    }
}

#[test]
fn the_tests_that_answer_reviews_exist() {
    let page = fs::read_to_string(repository().join("contrib/README.md")).expect("the page");
    let mut count = 0;
    for row in page.lines().filter(|line| line.matches(" | ").count() == 2) {
        let shown = row.rsplit(" | ").next().expect("a cell");
        for group in shown.trim_end_matches(" |").split("; ") {
            let Some((file, tests)) = group.split_once("`: ") else { continue };
            let mut source = String::new();
            read_all(&repository().join("crates").join(file.trim_start_matches('`')), &mut source);
            for test in tests.split(", ").map(|test| test.trim_matches('`')) {
                assert!(source.contains(&format!("fn {test}(")), "{file} has no test {test}");
                count += 1;
            }
        }
    }
    assert!(count > 12, "{count} tests");
}

/// Numbers of the lines that a patch of `contrib/linux` adds as `#define NAME NUMBER` to `header`.
fn defined(header: &str) -> BTreeMap<String, u64> {
    let folder = repository().join("contrib/linux");
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(folder).expect("the series").map(|entry| entry.expect("an entry").path()) {
        let patch = fs::read_to_string(entry).expect("a patch");
        let files = patch
            .split("\ndiff --git ")
            .filter(|file| file.lines().next().is_some_and(|names| names.ends_with(&format!("/{header}"))));
        for line in files.flat_map(|file| file.lines()) {
            let Some(definition) = line.strip_prefix("+#define ") else { continue };
            let (name, value) = definition.split_once(char::is_whitespace).expect("name and value");
            found.insert(name.to_owned(), number(value.trim()));
        }
    }
    found
}

/// A number as headers of Linux have it: `12`, `0x0c`, `(1 << 3)`.
fn number(text: &str) -> u64 {
    if let Some(bit) = text.strip_prefix("(1 << ").and_then(|rest| rest.strip_suffix(')')) {
        return 1 << number(bit);
    }
    let parsed = match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => text.parse(),
    };
    parsed.unwrap_or_else(|error| panic!("{text}: {error}"))
}

#[test]
fn the_linux_series_has_the_numbers_of_the_reference() {
    let features = [("NOTIFICATION", msi::F_NOTIFICATION), ("MSI", msi::F_MSI)];
    let features =
        features.map(|(name, mask)| (format!("VIRTIO_F_MMIO_{name}"), mask.trailing_zeros().into()));
    let mut expected = BTreeMap::from(features);
    // The end of the transports' bits lies behind them.
    expected.insert("VIRTIO_TRANSPORT_F_END".to_owned(), u64::from(msi::F_MSI.trailing_zeros()) + 1);
    assert_eq!(defined("include/uapi/linux/virtio_config.h"), expected);

    let registers = [
        ("NOTIFY_BASE", msi::NOTIFY_BASE),
        ("NOTIFY_ALIGN", 4096),
        ("NOTIFY_MULTIPLIER", msi::NOTIFY_MULTIPLIER),
        ("MSI_LIMIT", msi::MSI_LIMIT),
        ("MSI_ADDRESS_LOW", msi::MSI_ADDRESS_LOW),
        ("MSI_ADDRESS_HIGH", msi::MSI_ADDRESS_HIGH),
        ("MSI_DATA", msi::MSI_DATA),
        ("MSI_COMMAND", msi::MSI_COMMAND),
        ("MSI_STATE", msi::MSI_STATE),
        ("QUEUE_SEL_CONFIG", msi::SELECT_CONFIGURATION.into()),
        ("MSI_CMD_ENABLE", command::ENABLE.into()),
        ("MSI_CMD_DISABLE", command::DISABLE.into()),
        ("MSI_CMD_CONFIGURE", command::CONFIGURE.into()),
        ("MSI_CMD_MASK", command::MASK.into()),
        ("MSI_CMD_UNMASK", command::UNMASK.into()),
        ("MSI_CMD_UNCONFIGURE", command::UNCONFIGURE.into()),
        ("MSI_STATE_ON", state::ON.into()),
        ("MSI_STATE_CONFIGURED", state::CONFIGURED.into()),
        ("MSI_STATE_MASKED", state::MASKED.into()),
        ("MSI_STATE_PENDING", state::PENDING.into()),
        ("MSI_STATE_REFUSED", state::REFUSED.into()),
    ];
    let registers = registers.map(|(name, number)| (format!("VIRTIO_MMIO_{name}"), number));
    assert_eq!(defined("include/uapi/linux/virtio_mmio.h"), BTreeMap::from(registers));
}
