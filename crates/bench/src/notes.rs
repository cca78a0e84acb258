//! The notes of each benchmark.
use crate::{barrier, dma, latencies, notify, poll, ring, transport};
#[cfg(feature = "peers")]
use crate::{blk, density, net};

/// What the cases, subjects and metrics of a benchmark mean.
pub(crate) fn of(bench: &str) -> &'static [&'static str] {
    match bench {
        ring::NAME => ring::NOTES,
        poll::NAME => poll::NOTES,
        dma::NAME => dma::NOTES,
        barrier::NAME => barrier::NOTES,
        transport::NAME => transport::NOTES,
        notify::NAME => notify::NOTES,
        latencies::NAME => latencies::NOTES,
        #[cfg(feature = "peers")]
        blk::NAME => blk::NOTES,
        #[cfg(feature = "peers")]
        blk::handover::NAME => blk::handover::NOTES,
        #[cfg(feature = "peers")]
        net::NAME => net::NOTES,
        #[cfg(feature = "peers")]
        density::NAME => density::NOTES,
        _ => &[],
    }
}
