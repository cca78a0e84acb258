//! Queues that somebody else serves, for comparisons.
use paravane_device::net::Totals;
use paravane_io::QueueBackend;

/// Serves the queues of a machine in place of its I/O threads.
///
/// It has the same devices, and counts what the machine does not see.
pub trait QueueServer: std::fmt::Debug + Send + Sync {
    /// The back end of a queue that starts. A queue that it refuses is served by an I/O thread.
    fn backend(&self, device: usize, queue: u16) -> Box<dyn QueueBackend>;
    /// Counters so far.
    fn figures(&self) -> ServerFigures;
    /// Frames of network card `device` so far \[`None`: the machine's card counts them\].
    fn totals(&self, device: usize) -> Option<Totals> {
        let _ = device;
        None
    }
}

/// Counters of a [`QueueServer`].
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ServerFigures {
    /// Kicks that reached a device.
    pub kicks: u64,
    /// Interrupts raised.
    pub interrupts: u64,
    /// CPU seconds spent outside of this process.
    pub cpu_s: f64,
}
