//! The two text formats of metrics: OpenMetrics 1.0, and Prometheus 0.0.4.
//!
//! ```text
//!   Exposition --begin, samples--> families: head (name, kind, help), samples --text(format)--> text, kept
//! ```
//! The samples are the same in both formats; the heads are not: a counter's family is `kicks` in
//! OpenMetrics and `kicks_total` in the other, which knows no info metrics either. So samples are
//! written once, and a text is made of them when the first client asks for its format.
use hyper::body::Bytes;
use std::borrow::Cow;
use std::fmt::Write;
use std::sync::OnceLock;

/// Text format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    OpenMetrics,
    /// Also for clients that name no format.
    Prometheus,
}

impl Format {
    /// The format for a client with this header `Accept`.
    pub(crate) fn accepted(accept: Option<&str>) -> Self {
        let open = |range: &str| {
            let mut parts = range.split(';').map(str::trim);
            parts.next() == Some("application/openmetrics-text") && !parts.any(|part| part == "q=0")
        };
        match accept {
            Some(list) if list.split(',').any(open) => Self::OpenMetrics,
            _ => Self::Prometheus,
        }
    }

    pub(crate) fn content_type(self) -> &'static str {
        match self {
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::Prometheus => "text/plain; version=0.0.4; charset=utf-8",
        }
    }
}

/// Kind of a family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Counter,
    Gauge,
    Info,
    Histogram,
}

impl Kind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Info => "info",
            Self::Histogram => "histogram",
        }
    }

    /// Suffix of its samples.
    pub(crate) fn suffix(self) -> &'static str {
        match self {
            Self::Counter => "_total",
            Self::Info => "_info",
            Self::Gauge | Self::Histogram => "",
        }
    }
}

/// A metric and its samples.
#[derive(Debug)]
pub(crate) struct Family {
    name: &'static str,
    kind: Kind,
    pub(crate) help: &'static str,
    pub(crate) labels: Vec<&'static str>,
    samples: String,
}

impl Family {
    /// Name of its samples; of a histogram, without `_bucket`, `_sum` and `_count`.
    pub(crate) fn name(&self) -> String {
        format!("{}{}", self.name, self.kind.suffix())
    }

    /// "counter", "gauge", "histogram" or "info".
    pub(crate) fn kind(&self) -> &'static str {
        self.kind.name()
    }

    pub(crate) fn unit(&self) -> &'static str {
        match self.name {
            name if name.ends_with("_bytes") => "bytes",
            name if name.ends_with("_seconds") => "seconds",
            _ if self.help.ends_with("(0 or 1)") => "0 or 1",
            _ if self.kind == Kind::Info => "",
            _ => "count",
        }
    }

    fn head(&self, format: Format, out: &mut String) {
        let Self { name, kind, help, .. } = self;
        let (suffix, kind) = match (format, kind) {
            (Format::OpenMetrics, kind) => ("", kind.name()),
            (Format::Prometheus, Kind::Info) => (kind.suffix(), Kind::Gauge.name()),
            (Format::Prometheus, kind) => (kind.suffix(), kind.name()),
        };
        // Writing to a String cannot fail.
        let _ = write!(out, "# HELP {name}{suffix} {help}.\n# TYPE {name}{suffix} {kind}\n");
    }
}

/// One set of metrics.
#[derive(Debug, Default)]
pub(crate) struct Exposition {
    /// In the order in which they are served, those without samples too.
    pub(crate) families: Vec<Family>,
    /// One for each format.
    texts: [OnceLock<Bytes>; 2],
}

impl Exposition {
    /// Begins a family; the next samples are its.
    pub(super) fn begin(
        &mut self,
        name: &'static str,
        kind: Kind,
        help: &'static str,
        labels: &[&'static str],
    ) -> Samples<'_> {
        self.families.push(Family { name, kind, help, labels: labels.to_vec(), samples: String::new() });
        let family = self.families.last_mut().unwrap_or_else(|| unreachable!("it was pushed"));
        Samples { name, suffix: kind.suffix(), out: &mut family.samples }
    }

    /// The text in one format.
    pub(crate) fn text(&self, format: Format) -> Bytes {
        let make = || {
            let samples: usize = self.families.iter().map(|family| family.samples.len() + 256).sum();
            let mut out = String::with_capacity(samples);
            for family in self.families.iter().filter(|family| !family.samples.is_empty()) {
                family.head(format, &mut out);
                out += &family.samples;
            }
            if format == Format::OpenMetrics {
                out += "# EOF\n";
            }
            Bytes::from(out)
        };
        self.texts[format as usize].get_or_init(make).clone()
    }
}

/// Writes the samples of one family.
pub(super) struct Samples<'a> {
    name: &'static str,
    suffix: &'static str,
    out: &'a mut String,
}

impl Samples<'_> {
    /// Adds a sample. `labels`: see [`labels`].
    pub(super) fn add(&mut self, labels: &str, value: f64) {
        self.line(self.suffix, labels, value);
    }

    /// Adds a histogram: cumulative counts by upper bounds, the sum, the count.
    pub(super) fn histogram(
        &mut self,
        labels: &str,
        buckets: impl Iterator<Item = (&'static str, u64)>,
        (sum, count): (f64, u64),
    ) {
        for (bound, count) in buckets.chain([("+Inf", count)]) {
            let Self { name, out, .. } = self;
            // Writing to a String cannot fail.
            let _ = writeln!(out, "{name}_bucket{{{labels},le=\"{bound}\"}} {count}");
        }
        self.line("_sum", labels, sum);
        self.line("_count", labels, count as f64);
    }

    fn line(&mut self, suffix: &str, labels: &str, value: f64) {
        let Self { name, out, .. } = self;
        let _ = match labels {
            "" => writeln!(out, "{name}{suffix} {value}"),
            labels => writeln!(out, "{name}{suffix}{{{labels}}} {value}"),
        };
    }
}

/// Labels as samples take them: `device="vm0",kind="blk"`.
pub(super) fn labels(labels: &[(&str, &str)]) -> String {
    let one = |&(name, value): &(&str, &str)| format!("{name}=\"{}\"", escaped(value));
    labels.iter().map(one).collect::<Vec<_>>().join(",")
}

fn escaped(value: &str) -> Cow<'_, str> {
    if !value.contains(['\\', '"', '\n']) {
        return value.into();
    }
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n").into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_formats_have_the_same_samples() {
        let mut all = Exposition::default();
        all.begin("build", Kind::Info, "Version", &["version"])
            .add(&labels(&[("version", "a\"b\\c\nd")]), 1.0);
        let mut kicks = all.begin("kicks", Kind::Counter, "Kicks", &["device"]);
        kicks.add("device=\"a\"", 18_014_398_509_481_984.0);
        kicks.add("", 0.25);
        all.begin("empty", Kind::Gauge, "No samples", &[]);
        let buckets = [("0.5", 1), ("1.0", 3)];
        all.begin("wait_seconds", Kind::Histogram, "Wait", &["a"]).histogram(
            "a=\"b\"",
            buckets.into_iter(),
            (2.5, 4),
        );
        let open = "# HELP build Version.\n# TYPE build info\nbuild_info{version=\"a\\\"b\\\\c\\nd\"} 1\n\
                    # HELP kicks Kicks.\n# TYPE kicks counter\n\
                    kicks_total{device=\"a\"} 18014398509481984\nkicks_total 0.25\n\
                    # HELP wait_seconds Wait.\n# TYPE wait_seconds histogram\n\
                    wait_seconds_bucket{a=\"b\",le=\"0.5\"} 1\nwait_seconds_bucket{a=\"b\",le=\"1.0\"} 3\n\
                    wait_seconds_bucket{a=\"b\",le=\"+Inf\"} 4\nwait_seconds_sum{a=\"b\"} 2.5\n\
                    wait_seconds_count{a=\"b\"} 4\n# EOF\n";
        assert_eq!(all.text(Format::OpenMetrics), open);
        let plain = open
            .replace("build Version", "build_info Version")
            .replace("build info", "build_info gauge")
            .replace("kicks Kicks", "kicks_total Kicks")
            .replace("kicks counter", "kicks_total counter")
            .replace("# EOF\n", "");
        assert_eq!(all.text(Format::Prometheus), plain);
    }

    #[test]
    fn a_client_gets_open_metrics_if_it_accepts_it() {
        let prometheus = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,\
                          text/plain;version=0.0.4;q=0.5,*/*;q=0.1";
        assert_eq!(Format::accepted(Some(prometheus)), Format::OpenMetrics);
        assert_eq!(Format::accepted(Some("text/plain, application/openmetrics-text")), Format::OpenMetrics);
        for other in
            [None, Some("*/*"), Some(""), Some("application/openmetrics-text; q=0"), Some("text/html")]
        {
            assert_eq!(Format::accepted(other), Format::Prometheus, "{other:?}");
        }
    }
}
