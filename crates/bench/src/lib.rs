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
//! A program that calls [`run`] calls [`child_main`] and `paravane_vmm::helper_main` first thing in its `main`.
mod barrier;
#[cfg(feature = "peers")]
mod blk;
#[cfg(feature = "peers")]
mod builds;
mod clock;
mod daemon;
mod dma;
mod error;
mod figures;
mod guest;
mod instructions;
mod machine;
mod memory;
#[cfg(feature = "peers")]
mod meter;
#[cfg(feature = "peers")]
mod net;
mod notify;
mod options;
mod poll;
mod published;
mod ring;
mod row;

mod spread;
mod stepped;
mod subject;
mod table;
mod transport;

pub use error::BenchError;

pub use options::{Client, Options};
pub use row::Row;
pub use stepped::{child_main, single_step};
pub use table::table;

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
