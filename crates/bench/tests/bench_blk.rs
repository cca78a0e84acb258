//! `paravane bench blk` with the program `paravane` as the server.
#![cfg(all(feature = "peers", feature = "program"))]
mod daemon;

use serde_json::Value;
use std::process::{Command, Stdio};

#[test]
fn the_server_serves_the_benchmark_in_both_layouts() {
    if !daemon::is_built("the_server_serves_the_benchmark_in_both_layouts") {
        return;
    }
    let mut command = Command::new(env!("CARGO_BIN_EXE_paravane-bench"));
    command.args(["blk", "--quick", "--json", "--filter", "/write4k/depth4"]);
    let output = command.stdin(Stdio::null()).output().expect("the program starts");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    let rows: Vec<Value> = serde_json::from_slice(&output.stdout).expect("the rows are JSON");
    for layout in ["split", "packed"] {
        let case = format!("tmpfs/{layout}/write4k/depth4");
        let value = |metric: &str| {
            let row = rows
                .iter()
                .find(|row| row["case"] == *case && row["subject"] == "paravane" && row["metric"] == metric);
            row.and_then(|row| row["median"].as_f64()).unwrap_or_else(|| panic!("{case}: no {metric}"))
        };
        for metric in ["rate", "latency-p50", "latency-p999", "cpu"] {
            assert!(value(metric) > 0.0, "{case}: {metric}");
        }
    }
    // Only Paravane has packed rings.
    assert!(
        rows.iter().all(|row| row["subject"] == "paravane" || row["case"] != "tmpfs/packed/write4k/depth4")
    );
}

#[test]
fn a_second_read_over_http_is_compared_with_a_local_file() {
    let test = "a_second_read_over_http_is_compared_with_a_local_file";
    if !daemon::is_built(test) {
        return;
    }
    let path = format!("{}:/usr/sbin", std::env::var("PATH").unwrap_or_default());
    if Command::new("nginx").env("PATH", path).arg("-v").stderr(Stdio::null()).status().is_err() {
        return paravane_test_support::skip(test, "nginx (package nginx-light)");
    }
    let mut command = Command::new(env!("CARGO_BIN_EXE_paravane-bench"));
    command.args(["blk", "--json", "--filter", "http-cached/split/read4k/depth32"]);
    // Images are on a disk.
    command.current_dir(env!("CARGO_TARGET_TMPDIR"));
    let output = command.stdin(Stdio::null()).output().expect("the program starts");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    let rows: Vec<Value> = serde_json::from_slice(&output.stdout).expect("the rows are JSON");
    let value = |subject: &str, metric: &str| {
        let row = rows.iter().find(|row| row["subject"] == subject && row["metric"] == metric);
        row.and_then(|row| row["median"].as_f64())
    };
    for metric in ["rate", "latency-p50", "cpu", "rate-to-local", "cpu-to-local"] {
        assert!(value("paravane", metric).is_some_and(|value| value > 0.0), "{metric}: {rows:?}");
    }
    // The base of the ratio.
    assert!(value("paravane/local", "rate").is_some_and(|rate| rate > 0.0), "{rows:?}");
    assert_eq!(value("paravane/local", "rate-to-local"), None);
}
