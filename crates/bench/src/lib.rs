//! The benchmarks behind `paravane bench`, which starts the program `paravane-bench`.
//!
//! ```text
//! list() -> names    run(name) -> Vec<Row>    table(rows) -> text, or the rows as JSON
//!
//! run: for round { for case { for subject { one sample } } }   then the median of the rounds
//! ```
//!
//! Rounds are interleaved: a change of the machine's speed falls on all subjects alike. A benchmark
//! asserts nothing about its figures. The cargo feature `peers` (on by default) adds published
//! crates as subjects; without it, only Paravane is measured.
//!
//! A program that calls [`run`] must call [`child_main`] at the start of its `main`: benchmarks start
//! the program again as a child.
mod barrier;
#[cfg(feature = "peers")]
mod blk;
#[cfg(feature = "peers")]
mod builds;
mod clock;
mod compare;
#[cfg(feature = "peers")]
mod daemon;
#[cfg(feature = "peers")]
mod density;
#[cfg(feature = "peers")]
mod disk_connection;
mod dma;
mod error;
mod figures;
mod guest;
mod host;
mod instructions;
mod kind;
mod latencies;
mod machine;
mod memory;
#[cfg(feature = "peers")]
mod meter;
mod metric;
#[cfg(feature = "peers")]
mod net;
mod notes;
mod notify;
mod options;
mod peers;
mod poll;
mod published;
mod report;
mod results;
mod ring;
mod row;
mod spread;
mod stepped;
mod subject;
mod table;
mod text;
mod transport;
#[cfg(feature = "peers")]
mod turns;

pub use compare::{Baseline, Change, Comparison, Verdict};
pub use error::BenchError;
pub use host::Host;
pub use peers::PeerVersion;
pub use report::{prepare, report};
pub use results::{Omitted, Recorder, Results};

pub use options::{Client, Options};
pub use row::Row;
pub use stepped::{child_main, single_step};
pub use table::table;

/// A benchmark that can be run by name.
#[derive(Clone, Copy, Debug)]
pub struct Benchmark {
    /// Name on the command line.
    pub name: &'static str,
    /// Summary of one line.
    pub summary: &'static str,
}

/// All benchmarks.
#[must_use]
pub fn list() -> &'static [Benchmark] {
    &[
        Benchmark {
            name: ring::NAME,
            summary: "virtqueues: device and driver side, one thread and two, beside peers",
        },
        Benchmark { name: poll::NAME, summary: "poll tokens that do not repeat: cost of four ways to count" },
        Benchmark {
            name: dma::NAME,
            summary: "accesses to guest memory: direct, translated, logged, beside peers",
        },
        #[cfg(feature = "peers")]
        Benchmark { name: blk::NAME, summary: "a disk over vhost-user, beside qemu-storage-daemon and SPDK" },
        #[cfg(feature = "peers")]
        Benchmark { name: net::NAME, summary: "a network card over vhost-user, beside DPDK's vhost driver" },
        #[cfg(feature = "peers")]
        Benchmark {
            name: blk::handover::NAME,
            summary: "how long requests wait while a disk changes daemons (--take-over)",
        },
        #[cfg(feature = "peers")]
        Benchmark {
            name: density::NAME,
            summary: "one daemon with 1 to 1000 disks, beside qemu-storage-daemon",
        },
        Benchmark {
            name: transport::NAME,
            summary: "mmio, mmio with message interrupts, and PCI: rates, latencies, exits",
        },
        Benchmark {
            name: notify::NAME,
            summary: "kicks by exit, ioeventfd, to another process; interrupts by irqfd",
        },
        Benchmark {
            name: barrier::NAME,
            summary: "memory ordering of an access: none, by direction, a full barrier",
        },
        Benchmark {
            name: latencies::NAME,
            summary: "cost of recording latencies: instructions, clock readings, time",
        },
    ]
}

/// The summary of the benchmark called `name`.
fn summary(name: &str) -> Option<&'static str> {
    list().iter().find(|benchmark| benchmark.name == name).map(|benchmark| benchmark.summary)
}

/// Runs the benchmark called `name`.
///
/// Calls `progress` with the case and subject before each sample.
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
        blk::handover::NAME => blk::handover::run(options, progress),
        #[cfg(feature = "peers")]
        net::NAME => net::run(options, progress),
        #[cfg(feature = "peers")]
        density::NAME => density::run(options, progress),
        transport::NAME => transport::run(options, progress),
        notify::NAME => notify::run(options, progress),
        latencies::NAME => latencies::run(options, progress),
        _ => Err(BenchError::Unknown(name.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `paravane bench list` prints the summaries in column 13.
    #[test]
    fn summaries_fit_a_terminal() {
        for benchmark in list() {
            assert!(benchmark.summary.len() <= 68, "{}", benchmark.summary);
        }
    }

    #[test]
    fn an_unknown_benchmark_is_named() {
        let options = Options { rounds: 5, filter: None, ..Options::default() };
        let error = run("rings", &options, &mut |_| {}).unwrap_err();
        assert_eq!(error.to_string(), "no benchmark \"rings\"; run `paravane bench list`");
        assert!(list().iter().any(|benchmark| benchmark.name == "ring"));
    }
}
