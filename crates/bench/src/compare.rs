//! Compares two runs, or two builds in one run: changes beyond the noise.
//!
//! ```text
//! figure -> shift, interval, p ([`shift`], [`rank`])
//!           p: the larger one, of the figure and of the figure relative to its controls
//! all p  -> significant figures (Benjamini-Hochberg, 5 %)
//! verdict: worse or better if significant, and larger than the floor; else same
//! floor:   the threshold, and how far the controls of the case moved
//! ```
//!
//! A figure is a metric of one subject in one case. Controls are what the change under test leaves
//! alone: peers, and yardsticks as `memcpy`. If they moved, the machine did.
use self::shift::Shift;
use crate::kind::Kind;
use crate::metric::Better;
use crate::results::Results;
use crate::subject::{OTHER_BUILD, PARAVANE};
use crate::{BenchError, Row};
use std::collections::HashMap;

pub use found::{Change, Comparison, Verdict};
pub(crate) use text::notes;

mod found;
mod rank;
mod shift;
mod text;

/// Expected share of false alarms among the figures called better or worse.
///
/// Of runs without any change, the share that has an alarm.
const RATE: f64 = 0.05;
/// Share of a benchmark's controls that a figure without a control is held to.
const MOST_CONTROLS: f64 = 0.9;

/// What a run is compared with.
#[derive(Clone, Copy, Debug)]
pub enum Baseline<'a> {
    /// An earlier run.
    Run {
        /// Its results.
        results: &'a Results,
        /// Its name in reports.
        name: &'a str,
    },
    /// The other build of the same run.
    OtherBuild,
}

impl Comparison {
    /// Compares `run` with `baseline`.
    ///
    /// Changes below `threshold` (0.05 is 5 %) count as noise.
    ///
    /// # Errors
    /// There is nothing to compare.
    pub fn of(run: &Results, baseline: Baseline<'_>, threshold: f64) -> Result<Self, BenchError> {
        let (pairs, name, test) = match baseline {
            Baseline::Run { results, name } => {
                (pairs_of_runs(run, results), describe(results, name), "Mann-Whitney")
            }
            Baseline::OtherBuild => {
                (pairs_of_builds(run), OTHER_BUILD.to_owned(), "Wilcoxon signed-rank, by round")
            }
        };
        if pairs.judged.is_empty() {
            return Err(match baseline {
                Baseline::Run { name, .. } => BenchError::NothingInCommon(name.to_owned()),
                Baseline::OtherBuild => BenchError::NoOtherBuild,
            });
        }
        let significant = significant(&pairs.judged.iter().map(|pair| pair.shift.p).collect::<Vec<_>>());
        let mut changes: Vec<Change> = pairs
            .judged
            .iter()
            .zip(significant)
            .map(|(pair, significant)| pair.change(pairs.floor(pair.after, threshold), significant))
            .collect();
        changes.sort_by(|a, b| b.shift.abs().total_cmp(&a.shift.abs()));
        let smallest = pairs.judged.iter().map(|pair| pair.shift.smallest).fold(0.0, f64::max);
        let number = pairs.judged.len();
        let for_one = |rounds: &usize| {
            let smallest = match baseline {
                Baseline::Run { .. } => rank::smallest_of_runs(*rounds, *rounds),
                Baseline::OtherBuild => rank::smallest_of_pairs(*rounds),
            };
            smallest * number as f64 <= RATE
        };
        Ok(Self {
            baseline: name,
            test,
            threshold,
            unmatched: pairs.unmatched,
            controls: pairs.controls.len(),
            largest_control: pairs.controls.iter().map(|(_, moved)| *moved).fold(0.0, f64::max),
            changed_peers: pairs.changed_peers,
            fewest_visible: (smallest * number as f64 / RATE).ceil().max(1.0) as usize,
            rounds_for_one: (1..64).find(for_one).unwrap_or(64),
            changes,
        })
    }

    /// Number of figures with this verdict.
    #[must_use]
    pub fn count(&self, verdict: Verdict) -> usize {
        self.changes.iter().filter(|change| change.verdict == verdict).count()
    }

    /// Renders the comparison for people, at most 80 columns wide.
    #[must_use]
    pub fn text(&self) -> String {
        text::render(self)
    }

    /// The statistics in a few sentences.
    #[must_use]
    pub fn method(&self) -> String {
        text::method(self)
    }
}

/// Name, program and date of a baseline.
fn describe(results: &Results, name: &str) -> String {
    match (results.program.as_str(), results.started.as_str()) {
        ("", _) => name.to_owned(),
        (program, started) => format!("{name} ({program}, {started})"),
    }
}

/// A figure of both sides.
struct Pair<'a> {
    before: &'a Row,
    after: &'a Row,
    shift: Shift,
}

impl Pair<'_> {
    fn change(&self, floor: f64, significant: bool) -> Change {
        let shift = self.shift.estimate;
        let verdict = match Better::of(&self.after.metric) {
            _ if !significant || shift.abs() <= floor => Verdict::Same,
            Better::Higher if shift > 0.0 => Verdict::Better,
            Better::Lower if shift < 0.0 => Verdict::Better,
            Better::Higher | Better::Lower => Verdict::Worse,
            Better::Neither => Verdict::Same,
        };
        let Row { bench, case, subject, metric, unit, .. } = self.after;
        Change {
            bench: bench.clone(),
            case: case.clone(),
            subject: subject.clone(),
            metric: metric.clone(),
            unit: unit.clone(),
            before: self.before.median,
            after: self.after.median,
            shift,
            interval: self.shift.interval,
            p: self.shift.p,
            floor,
            verdict,
        }
    }
}

/// The figures to judge, and those that show what the machine did.
struct Pairs<'a> {
    judged: Vec<Pair<'a>>,
    /// Figures of controls, and how far they moved.
    controls: Vec<(&'a Row, f64)>,
    unmatched: usize,
    changed_peers: Vec<String>,
}

impl Pairs<'_> {
    /// The relative change of `row` that counts as noise.
    fn floor(&self, row: &Row, threshold: f64) -> f64 {
        let of_metric = || {
            self.controls
                .iter()
                .filter(|(control, _)| control.bench == row.bench && control.metric == row.metric)
        };
        let of_case = of_metric().filter(|(control, _)| control.case == row.case).map(|(_, moved)| *moved);
        if let Some(most) = of_case.reduce(f64::max) {
            return most + threshold;
        }
        let mut moved: Vec<f64> = of_metric().map(|(_, moved)| *moved).collect();
        moved.sort_by(f64::total_cmp);
        let at = (moved.len() as f64 * MOST_CONTROLS) as usize;
        moved.get(at).or(moved.last()).copied().unwrap_or(0.0) + threshold
    }
}

/// What identifies a figure.
fn key(row: &Row) -> [&str; 5] {
    [&row.bench, &row.case, &row.subject, &row.metric, &row.unit]
}

/// The figures that two runs have in common.
fn pairs_of_runs<'a>(run: &'a Results, baseline: &'a Results) -> Pairs<'a> {
    let known: HashMap<_, &Row> = baseline.rows.iter().map(|row| (key(row), row)).collect();
    let changed_peers = run.changed_peers(baseline);
    let is_control = |row: &Row| {
        let peer = crate::kind::root(&row.subject);
        Kind::of(&row.subject).is_control() && !changed_peers.iter().any(|changed| changed == peer)
    };
    let (mut ours, mut controls, mut unmatched) = (Vec::new(), Vec::new(), 0);
    for after in run.rows.iter().filter(|row| Better::of(&row.metric) != Better::Neither) {
        let is_ours = Kind::of(&after.subject) == Kind::Ours;
        if !is_ours && !is_control(after) {
            continue;
        }
        let before = known.get(&key(after)).filter(|before| before.method == after.method);
        let shift = before.and_then(|before| Some((*before, shift::of_runs(&before.values, &after.values)?)));
        match shift {
            Some((before, shift)) if is_ours => ours.push(Pair { before, after, shift }),
            Some((before, shift)) => controls.push(Pair { before, after, shift }),
            None => unmatched += usize::from(is_ours),
        }
    }
    let mut by_place: HashMap<[&str; 3], Vec<&Pair<'_>>> = HashMap::new();
    for control in &controls {
        by_place.entry(place(control.after)).or_default().push(control);
    }
    for pair in &mut ours {
        if let Some(controls) = by_place.get(&place(pair.after)) {
            pair.shift.p = pair.shift.p.max(relative_p(pair, controls));
        }
    }
    let controls = controls.iter().map(|control| (control.after, control.shift.estimate.abs())).collect();
    Pairs { judged: ours, controls, unmatched, changed_peers }
}

/// What a figure has in common with its controls.
fn place(row: &Row) -> [&str; 3] {
    [&row.bench, &row.case, &row.metric]
}

/// The p of a figure relative to its controls in the same rounds.
///
/// 0 if rounds do not match.
///
/// A change of the machine cancels.
fn relative_p(pair: &Pair<'_>, controls: &[&Pair<'_>]) -> f64 {
    let relative = |row: &Row, side: for<'b> fn(&Pair<'b>) -> &'b Row| {
        let mut values = row.values.clone();
        for control in controls.iter().map(|control| side(control)) {
            if control.values.len() != values.len() || control.values.iter().any(|value| *value <= 0.0) {
                return None;
            }
            let share = 1.0 / controls.len() as f64;
            values.iter_mut().zip(&control.values).for_each(|(value, control)| *value /= control.powf(share));
        }
        Some(values)
    };
    let before = relative(pair.before, |pair| pair.before);
    let shift = before.zip(relative(pair.after, |pair| pair.after));
    shift.and_then(|(before, after)| shift::of_runs(&before, &after)).map_or(0.0, |shift| shift.p)
}

/// The figures of both builds of one run.
fn pairs_of_builds(run: &Results) -> Pairs<'_> {
    let of = |name: &'static str| run.rows.iter().filter(move |row| row.subject == name);
    let pair = |after: &'_ Row| {
        let same =
            |row: &&Row| (&row.bench, &row.case, &row.metric) == (&after.bench, &after.case, &after.metric);
        let before = of(OTHER_BUILD).find(same)?;
        Some((before, shift::of_pairs(&before.values, &after.values)?))
    };
    let judged = of(PARAVANE)
        .filter(|row| Better::of(&row.metric) != Better::Neither)
        .filter_map(|after| pair(after).map(|(before, shift)| Pair { before, after, shift }));
    Pairs { judged: judged.collect(), controls: Vec::new(), unmatched: 0, changed_peers: Vec::new() }
}

/// Which of these p are significant together (Benjamini and Hochberg).
fn significant(p: &[f64]) -> Vec<bool> {
    let mut sorted = p.to_vec();
    sorted.sort_by(f64::total_cmp);
    let holds = |(index, p): &(usize, &f64)| **p <= RATE * (index + 1) as f64 / sorted.len() as f64;
    let limit = sorted.iter().enumerate().rfind(holds).map(|(_, p)| *p);
    p.iter().map(|p| limit.is_some_and(|limit| *p <= limit)).collect()
}

#[cfg(test)]
mod tests;
