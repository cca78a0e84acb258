//! Tiny samples of the peer. The tests of the command line cover `paravane`.
use super::*;
use crate::builds::Build;
use crate::daemon::{STORAGE_DAEMON, is_installed};
use std::time::Duration;

const TINY: SampleLength = SampleLength {
    warm_up: Duration::from_millis(1),
    timed: Duration::from_millis(5),
    counted: Duration::from_millis(1),
};
const METRICS: [&str; 8] =
    ["rate", "latency-p50", "latency-p99", "latency-p999", "cpu", "kicks", "sleeps", "repeated-kicks"];

/// The peer; if it is not installed, reports that `test` is skipped.
fn peer(test: &str) -> Option<Subject> {
    // `Subject::all` wants `paravane`, which is not beside this test.
    let found = is_installed(STORAGE_DAEMON).then_some(Subject::StorageDaemon);
    if found.is_none() {
        paravane_test_support::skip(test, format_args!("{} is not installed", STORAGE_DAEMON));
    }
    found
}

#[test]
fn every_kind_of_work_yields_every_row() {
    let Some(peer) = peer("blk::every_kind_of_work_yields_every_row") else { return };
    for client in [crate::Client::Event, crate::Client::Poll] {
        let cases = Case::select("tmpfs/split/", true, Present::default()).unwrap();
        let cases: Vec<Case> = cases.into_iter().filter(|case| case.depth == 4).collect();
        let options = Options { client, ..Options::default() };
        let rows = measure(&cases, std::slice::from_ref(&peer), &options, TINY, &mut |_| {}).unwrap();
        for case in &cases {
            let path = case.to_string();
            let of: Vec<&Row> =
                rows.iter().filter(|row| row.case == path && row.metric != "instructions").collect();
            assert_eq!(of.iter().map(|row| row.metric.as_str()).collect::<Vec<_>>(), METRICS);
            let value = |metric| of.iter().find(|row| row.metric == metric).unwrap().median;
            for metric in ["rate", "latency-p50", "cpu"] {
                assert!(value(metric) > 0.0, "{metric}: {of:?}");
            }
            assert!(of.iter().all(|row| row.subject == STORAGE_DAEMON && row.rounds == MIN_ROUNDS));
            assert_eq!(value("sleeps") == 0.0, client == crate::Client::Poll, "{of:?}");
        }
    }
}

#[test]
fn a_server_that_ends_is_told_apart_from_one_that_is_slow() {
    let build = Build { name: "paravane", program: "/bin/false".into(), extra_args: Vec::new() };
    let subject = Subject::Paravane(build);
    let cases = Case::select("tmpfs/split/read4k/depth4", true, Present::default()).unwrap();
    let result = measure(&cases, &[subject], &Options::default(), TINY, &mut |_| {});
    let error = result.map(|rows| rows.len()).unwrap_err().to_string();
    assert!(error.starts_with("tmpfs/split/read4k/depth4: the process ended"), "{error}");
    assert!(error.ends_with("(subject paravane)"), "{error}");
}
