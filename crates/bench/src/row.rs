//! One figure of a result.
use serde::{Deserialize, Deserializer, Serialize};

/// One figure: a metric of one subject in one case, over all rounds.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Row {
    /// Name of the benchmark, as [`crate::list`] has it.
    pub bench: String,
    /// Path of the case, for example "split/device/1desc/batch32".
    pub case: String,
    /// "paravane", a variant of it, or the name of a peer.
    pub subject: String,
    /// Metric, for example "time", "rate", "cpu" or "instructions".
    pub metric: String,
    /// Unit of the values, for example "ns/chain".
    pub unit: String,
    /// Median of the rounds.
    #[serde(deserialize_with = "number")]
    pub median: f64,
    /// Smallest value of a round.
    #[serde(deserialize_with = "number")]
    pub min: f64,
    /// Largest value of a round.
    #[serde(deserialize_with = "number")]
    pub max: f64,
    /// Number of rounds.
    pub rounds: u32,
    /// Value of each round, in order; empty if only the spread is known.
    #[serde(default, deserialize_with = "numbers")]
    pub values: Vec<f64>,
    /// How it was measured.
    ///
    /// * "clock": wall time.
    /// * "thread clock": CPU time of the measuring thread.
    /// * "process clock": CPU time of a process.
    /// * "tsc": time stamp counter.
    /// * "perf_event": hardware counter.
    /// * "single-step": steps of a child process.
    /// * "count": a number of events.
    /// * "published ...": published by someone else.
    ///
    /// Words after a comma say how the threads or the guest ran.
    pub method: String,
    /// CPU of the measuring thread, if it was pinned.
    pub pinned_cpu: Option<usize>,
    /// Load average over one minute, at the start and at the end of the run.
    pub load: [Option<f64>; 2],
}

/// A number; JSON has `null` for infinity and for what is no number.
fn number<'de, D: Deserializer<'de>>(source: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(source)?.unwrap_or(f64::NAN))
}

fn numbers<'de, D: Deserializer<'de>>(source: D) -> Result<Vec<f64>, D::Error> {
    let values: Vec<Option<f64>> = Deserialize::deserialize(source)?;
    Ok(values.into_iter().map(|value| value.unwrap_or(f64::NAN)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_has_the_promised_fields() {
        let row = Row {
            bench: "ring".to_owned(),
            case: "split/device/1desc/batch32".to_owned(),
            subject: "paravane".to_owned(),
            metric: "time".to_owned(),
            unit: "ns/chain".to_owned(),
            median: 7.5,
            min: 7.0,
            max: 9.25,
            rounds: 5,
            values: vec![7.0, 7.5, 7.25, 9.25, 8.0],
            method: "clock".to_owned(),
            pinned_cpu: None,
            load: [Some(0.25), Some(1.0)],
        };
        let expected = serde_json::json!([{
            "bench": "ring",
            "case": "split/device/1desc/batch32",
            "subject": "paravane",
            "metric": "time",
            "unit": "ns/chain",
            "median": 7.5,
            "min": 7.0,
            "max": 9.25,
            "rounds": 5,
            "values": [7.0, 7.5, 7.25, 9.25, 8.0],
            "method": "clock",
            "pinned_cpu": null,
            "load": [0.25, 1.0],
        }]);
        assert_eq!(serde_json::to_value([row]).unwrap(), expected);
        let rows: Vec<Row> = serde_json::from_value(expected).unwrap();
        assert_eq!((rows[0].median, rows[0].values.len(), rows[0].pinned_cpu), (7.5, 5, None));
    }
}
