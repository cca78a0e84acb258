//! `paravane bench density` with the program `paravane` as the server.
#![cfg(all(feature = "peers", feature = "program"))]
mod daemon;

use serde_json::Value;
use std::process::{Command, Stdio};

#[test]
fn a_daemon_with_a_hundred_disks_is_measured() {
    if !daemon::is_built("a_daemon_with_a_hundred_disks_is_measured") {
        return;
    }
    let mut command = Command::new(env!("CARGO_BIN_EXE_paravane-bench"));
    command.args(["density", "--quick", "--json", "--filter", "/100"]);
    let output = command.stdin(Stdio::null()).output().expect("the program starts");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    let rows: Vec<Value> = serde_json::from_slice(&output.stdout).expect("the rows are JSON");
    let value = |case: &str, metric: &str| {
        let row = rows
            .iter()
            .find(|row| row["case"] == case && row["subject"] == "paravane" && row["metric"] == metric);
        row.and_then(|row| row["median"].as_f64()).unwrap_or_else(|| panic!("{case}: no {metric}"))
    };
    for (case, metric) in [
        ("idle/100", "start-time"),
        ("idle/100", "rss-each"),
        ("connected/100", "connect-time"),
        ("load/100", "rate"),
        ("load/100", "cpu"),
    ] {
        assert!(value(case, metric) > 0.0, "{case}: {metric}");
    }
    // A socket for each disk, and what a client passes.
    assert!(value("idle/100", "descriptors") >= 100.0);
    assert!(value("connected/100", "descriptors") > value("idle/100", "descriptors"));
    assert!(rows.iter().all(|row| row["case"] != "load/1"), "the filter selects");
}
