//! Figures collected round by round, which become rows at the end.
use crate::Row;
use crate::machine::load_average;
use crate::spread::Spread;

/// Name, unit and method of a figure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Figure {
    /// Name of the metric.
    pub(crate) metric: &'static str,
    /// Unit of the values.
    pub(crate) unit: &'static str,
    /// How it is measured.
    pub(crate) method: String,
}

impl Figure {
    pub(crate) fn new(metric: &'static str, unit: &'static str, method: impl Into<String>) -> Self {
        Self { metric, unit, method: method.into() }
    }
}

/// One figure over the rounds.
struct Series {
    case: String,
    subject: &'static str,
    figure: Figure,
    cpu: Option<usize>,
    values: Vec<f64>,
}

/// The figures of all samples of one round.
#[derive(Default)]
pub(crate) struct RoundSamples(Vec<(Figure, Vec<f64>)>);

impl RoundSamples {
    /// Adds the figures of a sample.
    pub(crate) fn add(&mut self, figures: Vec<(Figure, f64)>) {
        for (figure, value) in figures {
            match self.0.iter_mut().find(|(known, _)| known.metric == figure.metric) {
                Some((_, values)) => values.push(value),
                None => self.0.push((figure, vec![value])),
            }
        }
    }

    /// The median of each figure.
    pub(crate) fn medians(self) -> impl Iterator<Item = (Figure, f64)> {
        self.0.into_iter().filter_map(|(figure, values)| Some((figure, Spread::of(&values)?.median)))
    }
}

/// All figures, in order of appearance.
pub(crate) struct Collector {
    bench: &'static str,
    load_at_start: Option<f64>,
    all: Vec<Series>,
}

impl Collector {
    /// An empty collector.
    pub(crate) fn new(bench: &'static str) -> Self {
        Self { bench, load_at_start: load_average(), all: Vec::new() }
    }

    /// Adds the figures of a round of `subject` in `case`, pinned to `cpu`.
    pub(crate) fn add(
        &mut self,
        case: &str,
        subject: &'static str,
        cpu: Option<usize>,
        figures: impl IntoIterator<Item = (Figure, f64)>,
    ) {
        for (figure, value) in figures {
            let known = |series: &&mut Series| {
                series.subject == subject && series.case == case && series.figure.metric == figure.metric
            };
            match self.all.iter_mut().find(known) {
                Some(series) => series.values.push(value),
                None => {
                    let case = case.to_owned();
                    self.all.push(Series { case, subject, figure, cpu, values: vec![value] });
                }
            }
        }
    }

    /// The rows of all figures.
    pub(crate) fn rows(self) -> Vec<Row> {
        let load = [self.load_at_start, load_average()];
        let row = |series: Series| {
            let spread = Spread::of(&series.values)?;
            Some(Row {
                bench: self.bench.to_owned(),
                case: series.case,
                subject: series.subject.to_owned(),
                metric: series.figure.metric.to_owned(),
                unit: series.figure.unit.to_owned(),
                median: spread.median,
                min: spread.min,
                max: spread.max,
                rounds: u32::try_from(series.values.len()).unwrap_or(u32::MAX),
                values: series.values,
                method: series.figure.method,
                pinned_cpu: series.cpu,
                load,
            })
        };
        self.all.into_iter().filter_map(row).collect()
    }
}

/// The ratio of two rates, as a figure called `metric`.
pub(crate) fn ratio(
    of: &[(Figure, f64)],
    to: &[(Figure, f64)],
    metric: &'static str,
) -> Option<(Figure, f64)> {
    ratio_of("rate", of, to, metric)
}

/// The ratio of two values of `figure`, as a figure called `metric`.
fn ratio_of(
    figure: &str,
    of: &[(Figure, f64)],
    to: &[(Figure, f64)],
    metric: &'static str,
) -> Option<(Figure, f64)> {
    let value = |figures: &[(Figure, f64)]| {
        let (figure, value) = figures.iter().find(|(known, _)| known.metric == figure)?;
        Some((figure.method.clone(), *value))
    };
    let ((method, of), (_, to)) = (value(of)?, value(to)?);
    (to > 0.0).then(|| (Figure::new(metric, "1", method), of / to))
}

/// Figures, and the metrics that are their ratios to those of one subject.
#[cfg(feature = "peers")]
pub(crate) type Ratios = [(&'static str, &'static str)];

/// To the other build.
#[cfg(feature = "peers")]
pub(crate) const TO_OTHER: &Ratios =
    &[("rate", "rate-to-other"), ("cpu", "cpu-to-other"), ("instructions", "instructions-to-other")];
/// To SPDK.
#[cfg(feature = "peers")]
pub(crate) const TO_SPDK: &Ratios = &[("rate", "rate-to-spdk"), ("cpu", "cpu-to-spdk")];
/// To a local file.
#[cfg(feature = "peers")]
pub(crate) const TO_LOCAL: &Ratios = &[("rate", "rate-to-local"), ("cpu", "cpu-to-local")];
/// To QEMU's storage daemon.
#[cfg(feature = "peers")]
pub(crate) const TO_QEMU: &Ratios = &[("rate", "rate-to-qemu"), ("cpu", "cpu-to-qemu")];

/// Figures of a subject relative to those of another one in the same round.
#[cfg(feature = "peers")]
pub(crate) fn ratios(
    of: &[(Figure, f64)],
    to: &[(Figure, f64)],
    ratios: &'static Ratios,
) -> impl Iterator<Item = (Figure, f64)> {
    ratios.iter().filter_map(|(figure, metric)| ratio_of(figure, of, to, metric))
}

/// The method of a figure of a guest: clock, accelerator, scheduling class.
pub(crate) fn by(method: &str, accel: &str, real_time: bool) -> String {
    let class = if real_time { ", SCHED_FIFO" } else { "" };
    match accel {
        "kvm" => format!("{method}, KVM{class}"),
        other => format!("{method}, {other} machine{class}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_is_the_median_of_its_shots() {
        let mut collector = Collector::new("test");
        for round in 0..3 {
            let mut samples = RoundSamples::default();
            for value in [1.0, 100.0, 2.0] {
                let figure = |metric| Figure::new(metric, "us", by("clock", "kvm", true));
                samples.add(vec![(figure("rate"), value + f64::from(round)), (figure("cpu"), 7.0)]);
            }
            collector.add("a/case", "mmio", Some(1), samples.medians());
        }
        let rows = collector.rows();
        let rate = &rows[0];
        assert_eq!((rate.median, rate.min, rate.max, rate.rounds), (3.0, 2.0, 4.0, 3));
        assert_eq!(
            (rate.metric.as_str(), rate.method.as_str(), rate.pinned_cpu),
            ("rate", "clock, KVM, SCHED_FIFO", Some(1))
        );
        assert_eq!((rows.len(), rows[1].median), (2, 7.0));
    }

    #[test]
    fn ratios_are_of_the_figures_that_both_have() {
        let figures = |rate, cpu| {
            [("rate", rate), ("cpu", cpu)].map(|(metric, value)| (Figure::new(metric, "1", "clock"), value))
        };
        let (of, to) = (figures(90.0, 3.0), figures(100.0, 2.0));
        let found = |names| -> Vec<_> {
            ratios(&of, &to, names).map(|(figure, ratio)| (figure.metric, ratio)).collect()
        };
        assert_eq!(found(TO_OTHER), [("rate-to-other", 0.9), ("cpu-to-other", 1.5)]);
        assert_eq!(found(TO_LOCAL), [("rate-to-local", 0.9), ("cpu-to-local", 1.5)]);
    }
}
