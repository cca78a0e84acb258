//! `paravane bench --report` and `--baseline`.
#![cfg(feature = "program")]
#[path = "../../cli/tests/schema/mod.rs"]
mod schema;

use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

/// A case of a few seconds, with a yardstick.
const CASE: [&str; 3] = ["dma", "--filter", "threads1/spaces1/mix"];

fn bench(arguments: &[&str], more: &[&Path]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_paravane-bench"));
    command.args(arguments).args(more).stdin(Stdio::null()).env_remove("PARAVANE_BENCH_OTHER");
    command.output().expect("the program starts")
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The results with every figure of `paravane` ten times as good.
fn better(results: &str) -> String {
    let mut results: Value = serde_json::from_str(results).unwrap();
    for row in results["rows"].as_array_mut().unwrap() {
        let subject = row["subject"].as_str().unwrap();
        let factor = if ["rate", "scaling"].contains(&row["metric"].as_str().unwrap()) { 10.0 } else { 0.1 };
        if subject.starts_with("paravane") {
            for value in row["values"].as_array_mut().unwrap() {
                *value = (value.as_f64().unwrap() * factor).into();
            }
        }
    }
    results.to_string()
}

#[test]
fn a_run_that_is_worse_than_its_baseline_ends_with_three() {
    let folder = tempfile::tempdir().unwrap();
    let report = folder.path().join("report");
    let output = bench(&[&CASE[..], &["--report"]].concat(), &[&report]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(stderr(&output).contains("report/index.html"), "{}", stderr(&output));
    let page = fs::read_to_string(report.join("index.html")).unwrap();
    assert!(page.contains("threads1") && page.contains("Load average"), "{page}");
    for name in ["results.csv", "rounds.csv", "overview.svg"] {
        assert!(report.join(name).is_file(), "{name}");
    }
    let results = fs::read_to_string(report.join("results.json")).unwrap();
    schema::assert_valid(
        "a_run_that_is_worse_than_its_baseline_ends_with_three",
        "docs/reference/bench-results.schema.json",
        &serde_json::from_str(&results).unwrap(),
        &["/format", "/host/load", "/rows/0/median", "/peers/0/version"],
    );
    let baseline = folder.path().join("better.json");
    fs::write(&baseline, better(&results)).unwrap();
    let output = bench(&[&CASE[..], &["--json", "--baseline"]].concat(), &[&baseline]);
    assert_eq!(output.status.code(), Some(3), "{}", stderr(&output));
    assert!(stderr(&output).contains("worse beyond the noise"), "{}", stderr(&output));
    let rows: Vec<Value> = serde_json::from_slice(&output.stdout).expect("stdout is JSON");
    assert_eq!(rows[0]["values"].as_array().unwrap().len(), 5);
}

#[test]
fn a_baseline_that_cannot_be_read_is_refused_before_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("none.json");
    let refused = |arguments: &[&str], more: &[&Path], words: &str| {
        let output = bench(arguments, more);
        assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
        assert!(stderr(&output).contains(words), "{}", stderr(&output));
    };
    let all = ["all", "--baseline"];
    refused(&all, &[&file], "none.json");
    fs::write(&file, "{}").unwrap();
    refused(&all, &[&file], "results have format 0");
    refused(&["all", "--report"], &[&file.join("below")], "cannot write");
    refused(&["ring", "--threshold", "3"], &[], "--baseline");
    refused(&["all", "--filter", "no such case"], &[], "no case contains");
}

#[test]
fn published_figures_have_a_report() {
    let folder = tempfile::tempdir().unwrap();
    let arguments = ["all", "--filter", "dma-barrier-2012", "--report"];
    let output = bench(&arguments, &[folder.path()]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let page = fs::read_to_string(folder.path().join("index.html")).unwrap();
    assert!(page.contains("Benjamin Herrenschmidt"), "{page}");
}
