//! The measuring instrument behind `paravane bench`.
//!
//! ```text
//! list()  names   run(name) -> Vec<Row>   table(rows) -> text, or the rows as JSON
//!
//! run: for round { for case { for subject { one sample } } }   rounds interleaved, then medians
//! ```
//!
//! A benchmark measures; it asserts nothing about what it finds. Peers, the published crates that ours are
//! measured beside, sit behind the cargo feature `peers`, which is on by default; without it there are
//! rows of ours only.
//!
//! A program that calls [`run`] calls [`child_main`] and `paravane_vmm::owner_main` first thing in its `main`.
use serde::Serialize;

mod barrier;
#[cfg(feature = "peers")]
mod blk;
#[cfg(feature = "peers")]
mod builds;
mod daemon;
mod dma;
mod guest;
mod instructions;
mod machine;
mod memory;
#[cfg(feature = "peers")]
mod meter;
#[cfg(feature = "peers")]
mod net;
mod notify;
mod poll;
mod published;
mod ring;
mod series;
mod spread;
mod table;
mod transport;

pub use instructions::single_step;
pub use instructions::single_step::child_main;
pub use table::table;

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

/// A benchmark that can be run by name.
#[derive(Clone, Copy, Debug)]
pub struct Benchmark {
    /// Its name on the command line.
    pub name: &'static str,
    /// One line.
    pub summary: &'static str,
}

/// All benchmarks.
#[must_use]
pub fn list() -> &'static [Benchmark] {
    &[
        Benchmark {
            name: ring::NAME,
            summary: "cost of a virtqueue, device and driver side, one thread and two, beside its peers",
        },
        Benchmark {
            name: poll::NAME,
            summary: "the cost of poll tokens that do not repeat: four ways to count",
        },
        Benchmark {
            name: dma::NAME,
            summary: "an access to guest memory: direct, translated, logged, beside memcpy and vm-memory",
        },
        #[cfg(feature = "peers")]
        Benchmark {
            name: blk::NAME,
            summary: "a disk over vhost-user: paravane serve beside qemu-storage-daemon, with the crate virtio-driver as the client",
        },
        #[cfg(feature = "peers")]
        Benchmark {
            name: net::NAME,
            summary: "a network card over vhost-user: paravane serve beside DPDK's vhost driver, with DPDK's virtio-user as the client",
        },
        Benchmark {
            name: transport::NAME,
            summary: "request/response and reads over mmio, mmio with messages, and PCI: rates, latencies, exits",
        },
        Benchmark {
            name: notify::NAME,
            summary: "what a kick costs: by an exit, by ioeventfd, to another process; and an interrupt, by irqfd and by a call",
        },
        Benchmark {
            name: barrier::NAME,
            summary: "what the order of an access costs: none, by direction, a full barrier before each",
        },
    ]
}

/// What to run.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Interleaved rounds; fewer than 5 are taken as 5.
    pub rounds: u32,
    /// Only cases whose path contains this.
    pub filter: Option<String>,
    /// Fewer cases and shorter samples, where a benchmark has a short form.
    pub quick: bool,
    /// How the client of `blk` learns of completions.
    pub client: Client,
}

/// Those of `cases` whose path contains `filter`.
///
/// # Errors
/// There is none.
#[cfg(feature = "peers")]
fn select<C: std::fmt::Display>(mut cases: Vec<C>, filter: &str) -> Result<Vec<C>, BenchError> {
    cases.retain(|case| case.to_string().contains(filter));
    if cases.is_empty() { Err(BenchError::NoCase(filter.to_owned())) } else { Ok(cases) }
}

/// How a client learns that its device is done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Client {
    /// The device interrupts: it signals an eventfd.
    #[default]
    Event,
    /// It looks at the ring all the time.
    Poll,
}

impl Client {
    /// What it is called in results and on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Event => "event",
            Self::Poll => "poll",
        }
    }
}

/// Why a benchmark did not run.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// there is no benchmark called {0}
    #[error("there is no benchmark called {0:?}; `paravane bench list` names them")]
    Unknown(String),
    /// no case matches {0:?}
    #[error("no case matches {0:?}")]
    NoCase(String),
    /// {subject} does not work: {reason}
    #[error("{subject} does not work: {reason}")]
    Subject {
        /// Who was to be measured.
        subject: &'static str,
        /// What went wrong.
        reason: String,
    },
    /// cannot {what}: {source}
    #[error("cannot {what}: {source}")]
    Os {
        /// What was tried.
        what: &'static str,
        /// Why not.
        source: std::io::Error,
    },
}

/// Runs the benchmark called `name`. `progress` is called with what is being measured.
///
/// # Errors
/// See [`BenchError`].
pub fn run(name: &str, options: &Options, progress: &mut dyn FnMut(&str)) -> Result<Vec<Row>, BenchError> {
    match name {
        dma::NAME => dma::run(options, progress),
        barrier::NAME => barrier::run(options, progress),
        ring::NAME => ring::run(options, progress),
        poll::NAME => poll::run(options, progress),
        #[cfg(feature = "peers")]
        blk::NAME => blk::run(options, progress),
        #[cfg(feature = "peers")]
        net::NAME => net::run(options, progress),
        transport::NAME => transport::run(options, progress),
        notify::NAME => notify::run(options, progress),
        _ => Err(BenchError::Unknown(name.to_owned())),
    }
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

    #[test]
    fn an_unknown_benchmark_is_named() {
        let options = Options { rounds: 5, filter: None, ..Options::default() };
        let error = run("rings", &options, &mut |_| {}).unwrap_err();
        assert_eq!(
            error.to_string(),
            "there is no benchmark called \"rings\"; `paravane bench list` names them"
        );
        assert!(list().iter().any(|benchmark| benchmark.name == "ring"));
    }
}
