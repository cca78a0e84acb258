//! Which way of a metric is better, and which metrics are plotted.

/// Which change of a metric is an improvement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Better {
    /// More is better.
    Higher,
    /// Less is better.
    Lower,
    /// Neither: it describes how a program worked.
    Neither,
}

/// Metrics that are plotted, the most telling first.
const PLOTTED: [&str; 17] = [
    "rate",
    "time",
    "outage",
    "latency-p50",
    "latency-p99",
    "cpu",
    "cpu-to-one",
    "start-time",
    "rss",
    "threads",
    "mb-per-cpu",
    "kick-stop",
    "cycles",
    "instructions",
    "exits",
    "call",
    "scaling",
];

/// Beginnings of metrics of which less is better.
const LESS: [&str; 18] = [
    "latency",
    "kick-stop",
    "exits",
    "kvm-exits",
    "outage",
    "handover-time",
    "clock-reads",
    "start-time",
    "rss",
    "private",
    "threads",
    "descriptors",
    "idle-cpu",
    "cpu-to-one",
    "cpu-to-spdk",
    "cpu-to-local",
    "cpu-to-qemu",
    "run-delay",
];

impl Better {
    /// The direction of the metric with this name.
    pub(crate) fn of(metric: &str) -> Self {
        match metric {
            "rate" | "mb-per-cpu" | "scaling" => Self::Higher,
            // These ratios have a build of this run below the line.
            "rate-to-other" | "cpu-to-other" | "instructions-to-other" => Self::Neither,
            _ if metric.starts_with("rate-to-") => Self::Higher,
            "time" | "cpu" | "cycles" | "instructions" | "call" => Self::Lower,
            _ if LESS.iter().any(|start| metric.starts_with(start)) => Self::Lower,
            _ => Self::Neither,
        }
    }

    /// Words for a heading; empty for [`Better::Neither`].
    pub(crate) fn words(self) -> &'static str {
        match self {
            Self::Higher => "higher is better",
            Self::Lower => "lower is better",
            Self::Neither => "",
        }
    }
}

/// The place of a metric among those that are plotted.
pub(crate) fn plotted(metric: &str) -> Option<usize> {
    PLOTTED.iter().position(|known| *known == metric)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_of_sleeps_are_no_improvement() {
        let all = |metrics: &[&str], better| metrics.iter().all(|metric| Better::of(metric) == better);
        assert!(all(&["rate", "rate-to-dpdk", "rate-to-spdk", "rate-to-local"], Better::Higher));
        assert!(all(
            &[
                "latency-p999",
                "exits-notify",
                "outage-p99",
                "clock-reads",
                "rss-each",
                "cpu-to-spdk",
                "cpu-to-local",
                "cpu-to-qemu"
            ],
            Better::Lower
        ));
        assert!(all(&["sleeps", "rate-to-other", "cpu-to-other"], Better::Neither));
        assert!(plotted("rate") < plotted("cpu") && plotted("spins").is_none());
    }
}
