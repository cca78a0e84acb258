//! Every case with tiny samples: names are stable, counts are as promised.
use super::*;
use std::time::Duration;

const TINY: SampleSize = SampleSize { exchanges: 60, reading: Duration::from_millis(20), samples: 1 };
/// Metrics of every case with a rate and subject, in order.
///
/// With KVM, [`IN_KERNEL`] precede the last two, and [`BY_KVM`] these, if KVM counts exits.
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
const BY_KVM: &str = "kvm-exits";
/// The cases, and of those with a rate, whether there is one of one CPU to compare it with.
const RATES: [(&str, bool); 10] = [
    ("net/32/1024", false),
    ("net/32/1024/cpus2", true),
    ("net/32/1024/cpus4", true),
    ("net/1/1", false),
    ("blk/read4k/depth1", false),
    ("blk/read4k/depth1/cpus2", true),
    ("blk/read4k/depth1/cpus4", true),
    ("blk/read4k/depth32", false),
    ("blk/read4k/depth32/cpus2", true),
    ("blk/read4k/depth32/cpus4", true),
];
const BOOTS: [&str; 3] = ["boot", "boot/cpus2", "boot/cpus4"];
const SUBJECTS: [&str; 3] = ["mmio", "mmio-msi", "pci"];

/// The row with this case, subject and metric.
fn find<'a>(rows: &'a [Row], case: &str, subject: &str, metric: &str) -> &'a Row {
    rows.iter()
        .find(|row| row.case == case && row.subject == subject && row.metric == metric)
        .unwrap_or_else(|| panic!("{case}: {subject}: {metric} is missing"))
}

fn every_case_yields_every_row(accel: AccelChoice) -> Result<(), BenchError> {
    let rows = measure(&Case::all(false), accel, 1, TINY, &mut |_| {})?;
    let kvm = accel == AccelChoice::Kvm;
    let by_kvm = rows.iter().any(|row| row.metric == BY_KVM);
    let mut metrics = METRICS.to_vec();
    if kvm {
        metrics.splice(9..9, IN_KERNEL);
    }
    if by_kvm {
        metrics.insert(9, BY_KVM);
    }
    for (case, beside_one) in RATES {
        for subject in SUBJECTS {
            let of: Vec<&Row> =
                rows.iter().filter(|row| row.case == case && row.subject == subject).collect();
            let to_one = if beside_one { &["rate-to-1cpu"][..] } else { &[] };
            let relative = if subject == "mmio-msi" { &["rate-to-mmio", "rate-to-pci"][..] } else { &[] };
            let expected = [&metrics[..], to_one, relative].concat();
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
    for (case, subject) in BOOTS.iter().flat_map(|case| SUBJECTS.map(|subject| (*case, subject))) {
        let value = |metric| find(&rows, case, subject, metric).median;
        assert!(value("start-time") > 0.0 && value("exits") > 0.0, "{case}: {subject}");
        assert!(!by_kvm || value(BY_KVM) >= value("exits"), "{case}: {subject}");
    }
    let to_one = RATES.iter().filter(|(_, beside_one)| *beside_one).count();
    let boots = 3 * BOOTS.len() * (2 + usize::from(by_kvm));
    assert_eq!(rows.len(), RATES.len() * (3 * metrics.len() + 2) + 3 * to_one + boots);
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
fn a_quick_run_has_one_cpu() {
    let names: Vec<_> = Case::all(true).iter().map(Case::to_string).collect();
    assert_eq!(names, ["net/32/1024", "net/1/1", "blk/read4k/depth1", "blk/read4k/depth32", "boot"]);
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
