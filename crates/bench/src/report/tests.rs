//! The page is complete, well-formed, self-contained, and safe.
use super::*;
use crate::compare::Baseline;
use crate::{Recorder, Row};

/// Rows of every kind, one with a hostile name.
fn rows() -> Vec<Row> {
    let row = |bench: &str, case: &str, subject: &str, metric: &str, values: &[f64]| {
        let spread = crate::spread::Spread::of(values).unwrap();
        Row {
            bench: bench.to_owned(),
            case: case.to_owned(),
            subject: subject.to_owned(),
            metric: metric.to_owned(),
            unit: "1/s".to_owned(),
            median: spread.median,
            min: spread.min,
            max: spread.max,
            rounds: values.len() as u32,
            values: values.to_vec(),
            method: "clock".to_owned(),
            pinned_cpu: Some(1),
            load: [Some(0.5), None],
        }
    };
    let mut rows = vec![
        row("blk", "tmpfs/read4k/depth1", "paravane", "rate", &[70.0, 71.0, 69.0, 70.5, 90.0]),
        row("blk", "tmpfs/read4k/depth1", "qemu-storage-daemon", "rate", &[50.0, 51.0, 49.0, 50.5, 20.0]),
        row("blk", "tmpfs/read4k/depth1", "paravane/other", "rate", &[60.0, 61.0, 62.0, 60.5, 61.0]),
        row("blk", "tmpfs/read4k/depth1", "paravane", "sleeps", &[0.0, 0.0, 0.0, 1.0, 0.0]),
        row("blk", "<script>alert('x')</script>", "\"><img src=x>", "cpu", &[-1.0, f64::NAN, 2.0]),
        row("dma", "read64", "memcpy", "time", &[1.0, 2.0, 3.0]),
        row("dma", "read64", "paravane", "time", &[100.0, 200.0, 300.0]),
    ];
    rows.extend(crate::published::virtio_mmio_v3::rows());
    rows.extend(crate::published::wrap_counters::rows());
    rows
}

fn results() -> Results {
    Recorder::start("2026-01-01T00:00:00Z".to_owned()).finish("paravane 0.1".to_owned(), rows(), Vec::new())
}

fn page() -> String {
    let (before, mut after) = (results(), results());
    for row in &mut after.rows {
        row.values.iter_mut().for_each(|value| *value *= 0.5);
    }
    let name = "<b>base.json";
    let comparison = Comparison::of(&after, Baseline::Run { results: &before, name }, 0.05).unwrap();
    page::render(&after, Some(&comparison))
}

/// Every element is closed, in order.
fn check_nesting(text: &str) {
    const VOID: [&str; 5] = ["meta", "link", "wbr", "br", "!DOCTYPE"];
    let mut open = Vec::new();
    for part in text.split('<').skip(1) {
        let (tag, _) = part.split_once('>').unwrap_or_else(|| panic!("no end of <{part}"));
        let name = tag.split([' ', '\n']).next().unwrap();
        if let Some(name) = name.strip_prefix('/') {
            assert_eq!(open.pop(), Some(name), "{part}");
        } else if !tag.ends_with('/') && !VOID.contains(&name) {
            open.push(name);
        }
    }
    assert!(open.is_empty(), "{open:?}");
}

#[test]
fn the_page_is_well_formed_and_loads_nothing() {
    let page = page();
    check_nesting(&page);
    for word in ["<script", "<img", "<b>base", " src=\"", "@import", "url(", "http:", "onload"] {
        let around = page.find(word).map(|at| &page[at..page.len().min(at + 80)]);
        assert_eq!(around.filter(|text| !text.starts_with("http://www.w3.org/2000/svg")), None, "{word}");
    }
    let identifiers: Vec<&str> =
        page.split(" id=\"").skip(1).filter_map(|part| part.split('"').next()).collect();
    let mut unique = identifiers.clone();
    unique.sort_unstable();
    unique.dedup();
    assert_eq!(unique.len(), identifiers.len(), "{identifiers:?}");
    for part in page.split("aria-describedby=\"").skip(1) {
        let target = part.split('"').next().unwrap();
        assert!(identifiers.contains(&target), "{target}");
    }
}

#[test]
fn every_figure_is_in_the_page() {
    let page = page();
    for row in rows() {
        assert!(page.contains(&html::escape(&row.subject)), "{}", row.subject);
        assert!(page.contains(&plot::breakable(&row.case)), "{}", row.case);
    }
    for text in
        ["virtio-mmio-v3-2019: &quot;", "Load average", "other build of Paravane", "Beside peers", "worse"]
    {
        assert!(page.contains(text), "{text}");
    }
}

#[test]
fn a_folder_has_every_file() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().join("new/folder");
    let results = results();
    let page = report(&folder, &results, None).unwrap();
    assert!(page.ends_with("index.html"));
    for name in ["results.json", "results.csv", "rounds.csv", "overview.svg"] {
        assert!(folder.join(name).metadata().unwrap().len() > 0, "{name}");
    }
    check_nesting(&fs::read_to_string(folder.join("overview.svg")).unwrap());
    let again = Results::read(&folder.join("results.json")).unwrap();
    assert_eq!(again.rows.len(), results.rows.len());
    assert!(report(&page, &results, None).unwrap_err().to_string().contains("cannot write"));
}

#[test]
fn no_rows_make_an_empty_page() {
    check_nesting(&page::render(&Results::default(), None));
    check_nesting(&overview::file(&Results::default()));
}
