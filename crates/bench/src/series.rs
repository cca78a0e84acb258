//! Figures that are gathered round by round, and become rows at the end.
use crate::Row;
use crate::machine::load_average;
use crate::spread::Spread;

/// What a figure is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Figure {
    /// Name.
    pub(crate) metric: &'static str,
    /// Unit.
    pub(crate) unit: &'static str,
    /// How it came about.
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

/// All of them, in the order in which they first came.
pub(crate) struct Gathered {
    bench: &'static str,
    load_at_start: Option<f64>,
    all: Vec<Series>,
}

impl Gathered {
    /// None yet.
    pub(crate) fn new(bench: &'static str) -> Self {
        Self { bench, load_at_start: load_average(), all: Vec::new() }
    }

    /// What one sample of `subject` in `case` came to; it was pinned to `cpu`.
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

    /// The rows.
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
                method: series.figure.method,
                pinned_cpu: series.cpu,
                load,
            })
        };
        self.all.into_iter().filter_map(row).collect()
    }
}

/// How a figure of a guest came about: `method`, and what ran the guest.
pub(crate) fn by(method: &str, accel: &str) -> String {
    match accel {
        "kvm" => format!("{method}, KVM"),
        other => format!("{method}, {other} machine"),
    }
}
