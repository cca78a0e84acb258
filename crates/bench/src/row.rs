//! Results.
use serde::Serialize;

/// One row of a result: what was measured, on whom, and how it spread over the rounds.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// Benchmark: "ring", "poll", "dma", "barrier", "blk", "net", "transport" or "notify".
    pub bench: String,
    /// Path of the case: "split/device/1desc/batch32".
    pub case: String,
    /// "paravane", or the peer's name.
    pub subject: String,
    /// "time", "cycles", "instructions", "rate", "cpu" or "spins"; of "transport" and "notify" also latencies, and counts of exits and
    /// interrupts; of "blk" latencies, and counts of kicks and sleeps.
    pub metric: String,
    /// Unit of the values: "ns/chain".
    pub unit: String,
    /// Median of the rounds.
    pub median: f64,
    /// Smallest.
    pub min: f64,
    /// Largest.
    pub max: f64,
    /// Number of rounds.
    pub rounds: u32,
    /// How it was measured: "clock" (wall time), "thread clock" (CPU time of the measuring thread),
    /// "process clock" (CPU time of a child process, of "transport" of ours), "tsc" (the time stamp counter), "perf_event" (the processor's counter), "single-step"
    /// (each instruction of a child process) or "count". What follows a comma says how the threads or the guest ran; a
    /// figure that someone else published begins with "published".
    pub method: String,
    /// The CPU that the measuring thread was pinned to, unless the system refused.
    pub pinned_cpu: Option<usize>,
    /// The machine's load average over a minute, at the start and at the end of the run.
    pub load: [Option<f64>; 2],
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
            "method": "clock",
            "pinned_cpu": null,
            "load": [0.25, 1.0],
        }]);
        assert_eq!(serde_json::to_value([row]).unwrap(), expected);
    }
}
