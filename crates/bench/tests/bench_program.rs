//! The program `paravane-bench`: its command line, and benchmarks that need no other program.
#![cfg(feature = "program")]
use paravane_test_support::skip;
use serde_json::Value;
use std::fs::File;
use std::process::{Command, Stdio};

fn bench() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_paravane-bench"));
    command.stdin(Stdio::null());
    command
}

#[test]
fn the_list_has_benchmarks_and_other_names_are_refused() {
    let list = bench().args(["list"]).output().unwrap();
    let list = String::from_utf8(list.stdout).unwrap();
    for name in ["ring", "poll", "dma", "barrier"] {
        assert!(list.lines().any(|line| line.starts_with(name)), "{name} is not in {list}");
    }
    let unknown = bench().args(["nonsense"]).output().unwrap();
    assert_eq!(unknown.status.code(), Some(2));
}

#[test]
fn help_is_that_of_paravane_bench() {
    let help = bench().arg("--help").output().unwrap();
    assert!(help.status.success());
    let help = String::from_utf8(help.stdout).unwrap();
    assert!(help.starts_with("Measure Paravane beside other implementations"), "{help}");
    assert!(help.contains("Usage: paravane bench [OPTIONS] <NAME>"), "{help}");
    assert!(help.contains("PARAVANE_BENCH_OTHER"), "{help}");
}

#[test]
fn a_closed_stdout_or_stderr_is_no_error() {
    let closed = || rustix::pipe::pipe().unwrap().1;
    for argument in ["--help", "list"] {
        let output = bench().arg(argument).stdout(closed()).stderr(Stdio::piped()).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && stderr.is_empty(), "{argument}: {stderr}");
    }
    assert_eq!(bench().arg("nonsense").stderr(closed()).status().unwrap().code(), Some(2));
}

/// Both benchmarks of guest memory, on cases that count no instructions.
///
/// Every subject has its figures, and published ones are labelled.
#[test]
fn benchmarks_of_memory_print_what_they_measured_and_what_others_published() {
    let rows_of = |name: &str, filter: &str| -> Vec<Value> {
        let out = bench().args([name, "--filter", filter, "--json"]).output().unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        serde_json::from_slice(&out.stdout).unwrap()
    };
    let text = |row: &Value, field: &str| row[field].as_str().unwrap().to_owned();
    for (name, filter, subjects) in [
        ("dma", "write/80KiB/regions1/maps256/repeated", vec!["memcpy", "paravane", "paravane/iova+log"]),
        ("dma", "threads1/spaces1/mix", vec!["paravane", "paravane/mutex"]),
        ("barrier", "ring/rx/1500B", vec!["relaxed", "by-direction", "full"]),
    ] {
        let rows = rows_of(name, filter);
        for subject in subjects {
            let row = rows.iter().find(|row| row["subject"] == subject && row["metric"] == "time");
            let row = row.unwrap_or_else(|| panic!("{name} {filter}: no time of {subject}"));
            assert_eq!((text(row, "bench"), text(row, "case")), (name.to_owned(), filter.to_owned()));
            assert_eq!(row["rounds"], 5);
        }
    }
    for (name, series) in [("dma", "vfio-dma-rw-2020/"), ("barrier", "dma-barrier-2012/")] {
        let rows = rows_of(name, series);
        assert!(!rows.is_empty());
        for row in rows {
            assert!(
                text(&row, "subject").starts_with("published/")
                    && text(&row, "method").starts_with("published")
            );
        }
    }
}

/// Only the program itself can start its helper process.
#[test]
fn kicks_reach_another_process() {
    if let Err(error) = File::options().read(true).write(true).open("/dev/kvm") {
        return skip("kicks_reach_another_process", format_args!("/dev/kvm: {error}"));
    }
    for case in ["rr/1/separate", "blk/random-write/inflight8/separate", "stream/host-to-guest/1024/separate"]
    {
        let out = bench().args(["notify", "--quick", "--json", "--filter", case]).output().unwrap();
        assert_eq!(out.status.code(), Some(0), "{}", String::from_utf8_lossy(&out.stderr));
        let rows: Vec<Value> = serde_json::from_slice(&out.stdout).unwrap();
        let value = |metric: &str| {
            let row = rows.iter().find(|row| row["subject"] == "process" && row["metric"] == metric);
            row.unwrap_or_else(|| panic!("{case}: {metric} is missing"))["median"].as_f64().unwrap()
        };
        assert_eq!(value("exits"), 0.0, "{case}");
        // Without the other process's counts there would be none.
        assert!(value("kicks") > 0.0, "{case}");
    }
}
