//! Rows by benchmark, metric and case, in order of appearance.
use crate::Row;
use crate::kind::Kind;
use crate::metric::{Better, plotted};
use crate::spread::Spread;
use crate::subject::PARAVANE;

/// The rows of a benchmark.
pub(super) struct Section<'a> {
    pub(super) bench: &'a str,
    /// Metrics that are plotted come first.
    pub(super) metrics: Vec<Metric<'a>>,
}

/// The rows of a metric.
pub(super) struct Metric<'a> {
    pub(super) name: &'a str,
    pub(super) better: Better,
    pub(super) plotted: bool,
    pub(super) cases: Vec<Case<'a>>,
}

/// The rows of a case.
pub(super) struct Case<'a> {
    pub(super) path: &'a str,
    pub(super) unit: &'a str,
    pub(super) rows: Vec<&'a Row>,
}

/// Groups all rows.
pub(super) fn sections(rows: &[Row]) -> Vec<Section<'_>> {
    let mut sections: Vec<Section<'_>> = Vec::new();
    for row in rows {
        let section = entry(
            &mut sections,
            |section| section.bench == row.bench,
            || Section { bench: &row.bench, metrics: Vec::new() },
        );
        let metric = entry(
            &mut section.metrics,
            |metric| metric.name == row.metric,
            || Metric {
                name: &row.metric,
                better: Better::of(&row.metric),
                plotted: plotted(&row.metric).is_some(),
                cases: Vec::new(),
            },
        );
        let case = entry(
            &mut metric.cases,
            |case| case.path == row.case && case.unit == row.unit,
            || Case { path: &row.case, unit: &row.unit, rows: Vec::new() },
        );
        case.rows.push(row);
    }
    for section in &mut sections {
        section.metrics.sort_by_key(|metric| plotted(metric.name).unwrap_or(usize::MAX));
    }
    sections
}

fn entry<T>(list: &mut Vec<T>, is: impl Fn(&T) -> bool, make: impl FnOnce() -> T) -> &mut T {
    let at = list.iter().position(is).unwrap_or_else(|| {
        list.push(make());
        list.len() - 1
    });
    &mut list[at]
}

impl Section<'_> {
    /// Spread of the rounds in percent: of the median figure and of the worst tenth.
    ///
    /// A figure's spread is the range of the middle half of its rounds, relative to the median.
    /// Counts do not count, and only figures with at least four rounds.
    pub(super) fn noise(&self) -> Option<[f64; 2]> {
        let rows = self.metrics.iter().filter(|metric| metric.plotted).flat_map(|metric| &metric.cases);
        let mut spreads: Vec<f64> =
            rows.flat_map(|case| &case.rows).filter_map(|row| relative_spread(row)).collect();
        spreads.sort_by(f64::total_cmp);
        let middle = Spread::of(&spreads)?.median;
        Some([100.0 * middle, 100.0 * spreads[(spreads.len() * 9 / 10).min(spreads.len() - 1)]])
    }

    /// The most rounds of a figure.
    pub(super) fn rounds(&self) -> u32 {
        let cases = self.metrics.iter().flat_map(|metric| &metric.cases);
        let measured = |row: &&&Row| Kind::of(&row.subject) != Kind::Published;
        cases.flat_map(|case| &case.rows).filter(measured).map(|row| row.rounds).max().unwrap_or(0)
    }
}

fn relative_spread(row: &Row) -> Option<f64> {
    if row.values.len() < 4 || Kind::of(&row.subject) == Kind::Published || row.method == "single-step" {
        return None;
    }
    let mut sorted = row.values.clone();
    sorted.sort_by(f64::total_cmp);
    let (low, high) = (sorted[sorted.len() / 4], sorted[sorted.len() - 1 - sorted.len() / 4]);
    (row.median > 0.0 && low.is_finite() && high.is_finite()).then(|| (high - low) / row.median)
}

impl Case<'_> {
    /// The row that others are compared with: `paravane`, or the first one.
    pub(super) fn base(&self) -> Option<&Row> {
        self.rows.iter().find(|row| row.subject == PARAVANE).or(self.rows.first()).copied()
    }

    /// The median of a row divided by that of the base; `None` for the base.
    pub(super) fn ratio(&self, row: &Row) -> Option<f64> {
        let base = self.base().filter(|base| base.subject != row.subject)?;
        (base.median > 0.0 && row.median >= 0.0).then(|| row.median / base.median)
    }
}
