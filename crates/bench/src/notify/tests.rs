//! Every case with tiny samples: names are stable, counts are as promised.
use super::*;
use std::time::Duration;

const TINY: SampleSize = SampleSize {
    blocks: Duration::from_millis(5),
    stream: 1 << 20,
    frames: (40, 60),
    exchanges: 20,
    injections: 5,
};
/// A test program cannot own queues; the tests of the command line cover `process`.
const SUBJECTS: &[Subject] = &[Subject::Inline, Subject::Exit, Subject::IoEventFd];
const METRICS: [&str; 8] =
    ["rate", "mb-per-cpu", "kick-stop", "kick-stop-p50", "kicks", "exits", "interrupts", "cpu"];

fn every_case_yields_every_row(accel: AccelChoice) {
    let cases: Vec<(Case, Placement)> =
        Case::all().into_iter().map(|case| (case, Placement::Separate)).collect();
    let rows = measure(&cases, &[], SUBJECTS, accel, 1, TINY, &mut |_| {}).unwrap();
    for (case, placement) in &cases {
        let path = format!("{case}/{placement}");
        for &subject in SUBJECTS {
            let of: Vec<&Row> =
                rows.iter().filter(|row| row.case == path && row.subject == subject.name()).collect();
            assert_eq!(of.iter().map(|row| row.metric.as_str()).collect::<Vec<_>>(), METRICS);
            let value = |metric| of.iter().find(|row| row.metric == metric).unwrap().median;
            for metric in ["rate", "mb-per-cpu", "kick-stop", "kick-stop-p50", "cpu"] {
                assert!(value(metric) > 0.0, "{metric}: {of:?}");
            }
            // A stream of few frames can end, with all its kicks, before the measured phase.
            match (subject, case) {
                (Subject::IoEventFd, _) => assert_eq!(value("exits"), 0.0, "{of:?}"),
                (_, Case::Stream { .. }) => {}
                _ => assert!(value("exits") > 0.0, "{of:?}"),
            }
        }
    }
    assert_eq!(rows.len(), cases.len() * SUBJECTS.len() * METRICS.len());
}

#[test]
fn every_case_yields_every_row_in_a_thread() {
    every_case_yields_every_row(AccelChoice::Thread);
}

#[test]
fn every_case_yields_every_row_under_kvm() {
    if crate::guest::kvm("notify::every_case_yields_every_row_under_kvm") {
        every_case_yields_every_row(AccelChoice::Kvm);
    }
}

#[test]
fn a_filter_selects_cases_and_published_figures() {
    let options = |filter: &str| Options {
        rounds: 1,
        filter: Some(filter.to_owned()),
        quick: true,
        ..Options::default()
    };
    let rows = run(&options("ioeventfd-2010/rr"), &mut |_| {}).unwrap();
    assert_eq!(rows.len(), 12);
    assert!(rows.iter().all(|row| row.bench == NAME && row.subject.starts_with("published/")));
    assert!(matches!(run(&options("rr/2"), &mut |_| {}), Err(BenchError::NoCase(_))));
}

#[test]
fn every_published_figure_has_a_case() {
    let cases: Vec<String> = Case::all().iter().map(|case| format!("ioeventfd-2010/{case}")).collect();
    let mut published: Vec<String> = published::ioeventfd::rows().into_iter().map(|row| row.case).collect();
    published.dedup();
    assert_eq!(published, cases);
}
