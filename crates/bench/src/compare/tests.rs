//! Synthetic runs with a seed: rates of false alarms and of missed changes.
use super::*;

/// SplitMix64, which needs no state but a counter.
struct Random(u64);

impl Random {
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Nearly normal, deviation 1.
    fn normal(&mut self) -> f64 {
        (0..12).map(|_| self.next()).sum::<f64>() - 6.0
    }

    /// Noise of a round: some percent, and now and then a disturbed round.
    fn noise(&mut self, deviation: f64) -> f64 {
        let spoilt = if self.next() < 0.05 { 1.0 + self.next() } else { 1.0 };
        (deviation * self.normal()).exp() * spoilt
    }
}

/// A synthetic machine.
#[derive(Clone, Copy)]
struct Machine {
    figures: usize,
    rounds: usize,
    deviation: f64,
    /// A factor of all values.
    speed: f64,
}

const METRICS: [&str; 3] = ["time", "latency-p99", "cpu"];

fn row(case: usize, subject: &str, metric: &str, values: Vec<f64>) -> Row {
    let spread = crate::spread::Spread::of(&values).unwrap();
    Row {
        bench: "blk".to_owned(),
        case: format!("case{case}"),
        subject: subject.to_owned(),
        metric: metric.to_owned(),
        unit: "us".to_owned(),
        median: spread.median,
        min: spread.min,
        max: spread.max,
        rounds: values.len() as u32,
        values,
        method: "clock".to_owned(),
        pinned_cpu: None,
        load: [None, None],
    }
}

impl Machine {
    /// A run; `slower` is the case whose figures of ours grow by a factor.
    fn run(self, random: &mut Random, subjects: &[&str], slower: Option<(usize, f64)>) -> Results {
        let mut rows = Vec::new();
        for case in 0..self.figures {
            let metric = METRICS[case % METRICS.len()];
            // All subjects of a round share its drift.
            let drift: Vec<f64> = (0..self.rounds).map(|_| random.noise(self.deviation / 2.0)).collect();
            for subject in subjects {
                let factor = match slower {
                    Some((slow, factor)) if slow == case && *subject == "paravane" => factor,
                    _ => 1.0,
                };
                let value = |drift: &f64| 100.0 * self.speed * factor * drift * random.noise(self.deviation);
                rows.push(row(case, subject, metric, drift.iter().map(value).collect()));
            }
        }
        Results { rows, ..Results::default() }
    }
}

fn worse(before: &Results, after: &Results) -> usize {
    let baseline = Baseline::Run { results: before, name: "before" };
    Comparison::of(after, baseline, 0.05).unwrap().count(Verdict::Worse)
}

const QUIET: Machine = Machine { figures: 20, rounds: 5, deviation: 0.03, speed: 1.0 };

#[test]
fn equal_runs_rarely_raise_an_alarm() {
    let mut random = Random(18);
    for (rounds, deviation) in [(5, 0.03), (5, 0.3), (8, 0.1)] {
        for subjects in [&["paravane"][..], &["paravane", "virtio-queue"]] {
            let machine = Machine { rounds, deviation, ..QUIET };
            let alarms = (0..60)
                .filter(|_| {
                    let before = machine.run(&mut random, subjects, None);
                    worse(&before, &machine.run(&mut random, subjects, None)) > 0
                })
                .count();
            // 5 % of 60 are 3; 9 are beyond chance.
            assert!(alarms < 9, "{rounds} rounds, noise {deviation}, {subjects:?}: {alarms} of 60");
        }
    }
}

#[test]
fn equal_builds_rarely_raise_an_alarm() {
    let mut random = Random(19);
    for rounds in [5, 9, 13] {
        let machine = Machine { rounds, deviation: 0.1, ..QUIET };
        let alarms = (0..60)
            .filter(|_| {
                let run = machine.run(&mut random, &["paravane", "paravane/other"], None);
                Comparison::of(&run, Baseline::OtherBuild, 0.0).unwrap().count(Verdict::Worse) > 0
            })
            .count();
        assert!(alarms < 9, "{rounds} rounds: {alarms} of 60");
    }
}

#[test]
fn a_slower_machine_is_no_alarm_if_peers_show_it() {
    let mut random = Random(20);
    let subjects = ["paravane", "virtio-queue", "memcpy"];
    let alarms = (0..30)
        .filter(|_| {
            let before = Machine { rounds: 9, ..QUIET }.run(&mut random, &subjects, None);
            let slow = Machine { rounds: 9, speed: 1.3, ..QUIET };
            let after = slow.run(&mut random, &subjects, None);
            // Without controls, most figures are an alarm.
            let alone = before.rows.iter().filter(|row| row.subject == "paravane").cloned().collect();
            assert!(worse(&Results { rows: alone, ..Results::default() }, &after) > 10);
            worse(&before, &after) > 0
        })
        .count();
    assert!(alarms < 6, "{alarms} of 30");
}

#[test]
fn a_slower_figure_is_found() {
    let mut random = Random(21);
    let machine = Machine { rounds: 13, ..QUIET };
    for subjects in [&["paravane"][..], &["paravane", "virtio-queue"]] {
        let found = (0..30)
            .filter(|_| {
                let before = machine.run(&mut random, subjects, None);
                let after = machine.run(&mut random, subjects, Some((7, 1.25)));
                let baseline = Baseline::Run { results: &before, name: "before" };
                let comparison = Comparison::of(&after, baseline, 0.05).unwrap();
                comparison.changes.iter().any(|c| c.case == "case7" && c.verdict == Verdict::Worse)
            })
            .count();
        assert!(found > 20, "{subjects:?}: {found} of 30");
    }
}

#[test]
fn a_slower_build_is_found_through_drift() {
    let mut random = Random(22);
    let machine = Machine { figures: 6, rounds: 12, deviation: 0.03, speed: 1.0 };
    let found = (0..30)
        .filter(|_| {
            let run = machine.run(&mut random, &["paravane", "paravane/other"], Some((3, 1.2)));
            let comparison = Comparison::of(&run, Baseline::OtherBuild, 0.05).unwrap();
            comparison.count(Verdict::Worse) == 1 && comparison.changes[0].case == "case3"
        })
        .count();
    assert!(found > 24, "{found} of 30");
}

#[test]
fn few_rounds_are_said_to_be_few() {
    let mut random = Random(23);
    let before = QUIET.run(&mut random, &["paravane"], None);
    let after = QUIET.run(&mut random, &["paravane"], None);
    let baseline = Baseline::Run { results: &before, name: "base.json" };
    let comparison = Comparison::of(&after, baseline, 0.05).unwrap();
    // 2 of 252 arrangements, 20 figures: 0.0079 * 20 / 0.05.
    assert_eq!((comparison.fewest_visible, comparison.rounds_for_one), (4, 6));
    let text = comparison.text();
    assert!(text.contains("measure 6 rounds"), "{text}");
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
}

#[test]
fn directions_methods_and_peers_decide() {
    let values = |from: f64| (0..9).map(|i| from + f64::from(i) / 10.0).collect::<Vec<_>>();
    let side = |value: f64| {
        let mut rate = row(0, "paravane", "rate", values(value));
        rate.unit = "requests/s".to_owned();
        let mut method = row(1, "paravane", "time", values(value));
        method.method = format!("clock of {value}");
        Results {
            rows: vec![rate, row(0, "paravane", "sleeps", values(value)), method],
            ..Results::default()
        }
    };
    let (before, after) = (side(100.0), side(80.0));
    let compare =
        |after, results| Comparison::of(after, Baseline::Run { results, name: "base.json" }, 0.05).unwrap();
    let comparison = compare(&after, &before);
    assert_eq!((comparison.count(Verdict::Worse), comparison.changes.len(), comparison.unmatched), (1, 1, 1));
    assert_eq!(compare(&before, &after).count(Verdict::Better), 1);
    assert_eq!(compare(&before, &before).count(Verdict::Same), 2);
    let none = Results::default();
    let error =
        Comparison::of(&after, Baseline::Run { results: &none, name: "base.json" }, 0.05).unwrap_err();
    assert!(error.to_string().starts_with("base.json: no figure in common"), "{error}");
    assert!(Comparison::of(&after, Baseline::OtherBuild, 0.05).is_err());
}
