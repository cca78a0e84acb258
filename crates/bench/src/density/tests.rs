//! Tiny samples of the peer. The tests of the command line cover `paravane`.
use super::*;
use crate::builds::Build;
use crate::daemon::{STORAGE_DAEMON, is_installed};

const TINY: Lengths = Lengths {
    idle: Duration::from_millis(1),
    warm_up: Duration::from_millis(1),
    load: Duration::from_millis(20),
};

#[test]
fn every_case_yields_every_row() {
    let test = "density::every_case_yields_every_row";
    // `Subject::all` wants `paravane`, which is not beside this test.
    let Some(peer) = is_installed(STORAGE_DAEMON).then_some(Subject::StorageDaemon) else {
        return paravane_test_support::skip(test, format_args!("{STORAGE_DAEMON} is not installed"));
    };
    for client in [crate::Client::Event, crate::Client::Poll] {
        let cases = Cases::select("", true).unwrap();
        let options = Options { client, ..Options::default() };
        let rows = measure(&cases, std::slice::from_ref(&peer), &options, TINY, &mut |_| {}).unwrap();
        let of = |case: &str| {
            let of = rows.iter().filter(|row| row.case == case).map(|row| row.metric.as_str());
            of.collect::<Vec<_>>().join(" ")
        };
        let rest = "rss rss-each private threads descriptors descriptors-each idle-cpu \
                    idle-cpu-each";
        for count in [1, 100] {
            let start = "start-time start-time-each";
            assert_eq!(of(&format!("idle/{count}")), format!("{start} {rest}"));
            assert_eq!(of(&format!("connected/{count}")), format!("connect-time {rest}"));
        }
        let load = "rate latency-p50 latency-p99 cpu sleeps rss private";
        assert_eq!(of("load/1"), load);
        assert_eq!(of("load/100"), format!("{load} cpu-to-one"));
        let quiet = "rate latency-p50 latency-p99";
        assert_eq!(of("beside/idle"), quiet);
        assert_eq!(of("beside/read1024k"), format!("{quiet} p99-to-idle hog-rate"));
        assert!(rows.iter().all(|row| row.rounds == MIN_ROUNDS && row.subject == STORAGE_DAEMON));
    }
}

#[test]
fn a_server_that_ends_is_told_apart_from_one_that_is_slow() {
    let build = Build { name: "paravane", program: "/bin/false".into(), extra_args: Vec::new() };
    let cases = Cases::select("idle/1", true).unwrap();
    let subjects = [Subject::Paravane(build)];
    let result = measure(&cases, &subjects, &Options::default(), TINY, &mut |_| {});
    let error = result.map(|rows| rows.len()).unwrap_err().to_string();
    assert!(error.starts_with("the process ended") && error.ends_with("(subject paravane)"), "{error}");
}
