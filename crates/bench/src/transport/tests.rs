//! Every case with tiny samples: names are stable, counts are as promised.
use super::*;
use std::time::Duration;

const TINY: SampleSize = SampleSize { exchanges: 60, reading: Duration::from_millis(20), samples: 1 };
/// Metrics of every case and subject, in order.
///
/// With KVM, [`IN_KERNEL`] precede the last two.
const METRICS: [&str; 11] = [
    "rate",
    "latency-p50",
    "latency-p99",
    "latency-p999",
    "exits",
    "exits-notify",
    "exits-status",
    "exits-acknowledge",
    "exits-other",
    "interrupts",
    "cpu",
];
const IN_KERNEL: [&str; 2] = ["kernel-notify", "kernel-eoi"];

/// The row with this case, subject and metric.
fn find<'a>(rows: &'a [Row], case: &str, subject: &str, metric: &str) -> &'a Row {
    rows.iter()
        .find(|row| row.case == case && row.subject == subject && row.metric == metric)
        .unwrap_or_else(|| panic!("{case}: {subject}: {metric} is missing"))
}

fn every_case_yields_every_row(accel: AccelChoice) -> Result<(), BenchError> {
    let rows = measure(&Case::ALL, accel, 1, TINY, &mut |_| {})?;
    let kvm = accel == AccelChoice::Kvm;
    let mut metrics = METRICS.to_vec();
    if kvm {
        metrics.splice(9..9, IN_KERNEL);
    }
    for case in ["net/32/1024", "net/1/1", "blk/read4k/depth1", "blk/read4k/depth32"] {
        for subject in ["mmio", "mmio-msi", "pci"] {
            let of: Vec<&Row> =
                rows.iter().filter(|row| row.case == case && row.subject == subject).collect();
            let relative = ["rate-to-mmio", "rate-to-pci"];
            let expected =
                if subject == "mmio-msi" { [&metrics[..], &relative].concat() } else { metrics.clone() };
            assert_eq!(of.iter().map(|row| row.metric.as_str()).collect::<Vec<_>>(), expected);
            let how = if kvm { ", KVM" } else { ", thread machine" };
            assert!(of.iter().all(|row| row.bench == NAME && row.method.contains(how)), "{of:?}");
            let value = |metric| find(&rows, case, subject, metric).median;
            assert!(value("rate") > 0.0 && value("cpu") > 0.0, "{of:?}");
            assert!(0.0 < value("latency-p50") && value("latency-p50") <= value("latency-p999"), "{of:?}");
            let parts: f64 =
                ["exits-notify", "exits-status", "exits-acknowledge", "exits-other"].map(value).iter().sum();
            assert!((value("exits") - parts).abs() < 1e-9, "{of:?}");
            // Only a wired interrupt has a status to read, if there was an interrupt at all.
            let asked = value("exits-status") + value("exits-acknowledge");
            assert!(asked == 0.0 || subject == "mmio", "{of:?}");
            assert_eq!(value("exits-notify"), 0.0, "every kick is an eventfd: {of:?}");
        }
    }
    assert_eq!(rows.len(), 4 * (3 * metrics.len() + 2));
    Ok(())
}

#[test]
fn every_case_yields_every_row_in_a_thread() {
    every_case_yields_every_row(AccelChoice::Thread).unwrap();
}

#[test]
fn every_case_yields_every_row_under_kvm() {
    if !crate::guest::kvm("transport::every_case_yields_every_row_under_kvm") {
        return;
    }
    every_case_yields_every_row(AccelChoice::Kvm).unwrap();
}

#[test]
fn a_filter_selects_cases_and_published_figures() {
    let run = |filter: &str| {
        run(
            &Options { rounds: 1, filter: Some(filter.to_owned()), quick: false, ..Options::default() },
            &mut |_| {},
        )
    };
    let rows = run("virtio-mmio-v3-2019/").unwrap();
    assert_eq!(rows.len(), 3);
    assert!(rows.iter().all(|row| row.bench == NAME && row.subject.starts_with("published/")));
    assert!(matches!(run("net/32/1025"), Err(BenchError::NoCase(_))));
}

#[test]
fn the_table_compares_with_mmio_and_says_what_it_measured() {
    let row = |subject: &str, median: f64| Row {
        case: "net/1/1".to_owned(),
        subject: subject.to_owned(),
        metric: "rate".to_owned(),
        median,
        ..crate::published::virtio_mmio_v3::rows().remove(0)
    };
    let text = crate::table(&[row("mmio", 1000.0), row("mmio-msi", 2000.0)]);
    assert!(text.contains("0.50"), "{text}");
    assert!(!text.contains("Instructions: not counted"), "{text}");
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(NOTES.iter().all(|note| words.contains(note)), "{text}");
}
