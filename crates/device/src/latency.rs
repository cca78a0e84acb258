//! Latencies of requests, measured by the thread that serves their queue.
//!
//! ```text
//!   the thread learns     (a rate limit       the handler      the host has        used buffers
//!   of work: announce     holds them: hold)   takes: take      done: complete      signalled: finish
//!        |------- ring ----------|-- throttled --|------ host ------|---- interrupt ----|
//!        |------------------------ whole latency of the operation ---------------------|
//! ```
//! [`QueueLatency`] has the histograms of one queue: one of the whole latency for each
//! [`Operation`], one for each [`Stage`], and those of queue depth and batch size. It spans
//! restarts of the queue; its one writer is the [`LatencyRecorder`] of the live queue.
//!
//! **The start is an estimate.** A device cannot see when the driver made a buffer available. The
//! wait in the ring counts from the moment at which the thread learned of work: it woke, or, while
//! it polls or serves, it last looked at the ring and did not take the buffer. So it may be too
//! long for a thread that is awake, by the time between two looks, and it lacks the time before a
//! sleeping thread runs.
//!
//! **Probes.** Tracers see each stage begin and end: [`PROBES`].
//!
//! The clock is the processor's cycle counter where that runs at a constant rate, else
//! CLOCK_MONOTONIC. It is read one to four times a batch, never for each request.
mod histogram;
mod operation;
mod probe;
mod probes;
mod queue;
mod recorder;
mod request;
#[cfg(test)]
pub(crate) mod rig;
mod stage;

pub use histogram::Distribution;
pub use operation::Operation;
pub use probe::Probe;
pub(crate) use probes::ProbedQueue;
pub use probes::{PROBE_ARGUMENTS, PROBES};
pub use queue::{LatencySnapshot, QueueLatency};
pub use recorder::{LatencyRecorder, Taken, calibrate};
pub use request::{Request, RequestObserver, RequestRecord};
pub use stage::Stage;
