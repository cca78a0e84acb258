//! Threads that devices share.
//!
//! ```text
//!   Threads::start --> io: --io-threads threads and their watcher    for devices without --workers
//!                  '-> protocol: as many as there is work, two at rest
//! ```
use super::args::DaemonArgs;
use super::process::IoThread;
use super::report;
use super::spec::DeviceSpec;
use anyhow::{Context, anyhow};
use paravane_export::ProtocolThreads;
use paravane_io::IoPool;
use paravane_vhost::ExportConfig;
use parking_lot::Mutex;
use std::sync::Arc;
use std::thread::available_parallelism;
use std::time::Duration;

/// Most I/O threads.
const MAX: u16 = 256;
/// Most I/O threads by default.
const MAX_DEFAULT: usize = 8;

/// Threads that devices share.
pub(crate) struct Threads {
    pub(crate) io: Arc<IoPool>,
    pub(crate) protocol: ProtocolThreads,
    /// Figures of the I/O threads.
    figures: Mutex<Vec<Figures>>,
}

/// Figures of the threads that served the queues of one I/O thread.
///
/// When one is blocked, another one takes over.
struct Figures {
    /// Kernel's number of the thread.
    id: i32,
    thread: IoThread,
    /// CPU time and run delay of those before it, without what it had when it took over, in seconds.
    before: [f64; 2],
}

impl Figures {
    fn new(index: usize, id: i32) -> Self {
        Self { id, thread: IoThread::open(index, id), before: [0.0; 2] }
    }

    /// Figures of all these threads. `None`: the kernel does not tell them.
    fn report(&self) -> Option<report::Thread> {
        let now = self.thread.report()?;
        let [cpu_s, run_delay_s] = self.before;
        Some(report::Thread { cpu_s: now.cpu_s + cpu_s, run_delay_s: now.run_delay_s + run_delay_s, ..now })
    }

    /// Goes on with the figures of another thread, if that has taken over.
    fn follow(&mut self, index: usize, id: i32) {
        if id != self.id {
            let times = |of: Option<report::Thread>| of.map_or([0.0; 2], |of| [of.cpu_s, of.run_delay_s]);
            let (before, thread) = (times(self.report()), IoThread::open(index, id));
            let start = times(thread.report());
            *self = Self { id, thread, before: [before[0] - start[0], before[1] - start[1]] };
        }
    }
}

/// Number of I/O threads.
///
/// # Errors
/// The option is out of range.
pub(crate) fn count(daemon: &DaemonArgs) -> Result<usize, anyhow::Error> {
    match daemon.io_threads {
        None => Ok(available_parallelism().map_or(1, |cpus| cpus.get().min(MAX_DEFAULT))),
        Some(count @ 1..=MAX) => Ok(count.into()),
        Some(count) => Err(anyhow!("--io-threads: {count} is out of range: use 1 to {MAX}")),
    }
}

impl Threads {
    /// Starts `count` I/O threads.
    ///
    /// # Errors
    /// The host refuses threads or descriptors.
    pub(crate) fn start(count: usize) -> Result<Self, anyhow::Error> {
        // Devices say how long their queues are polled.
        let io = IoPool::shared(count, Duration::ZERO).context("cannot start the I/O threads")?;
        let protocol = ProtocolThreads::new().context("cannot start a thread")?;
        let open = |(index, id)| Figures::new(index, id);
        let figures = Mutex::new(io.ids().into_iter().enumerate().map(open).collect());
        Ok(Self { io: Arc::new(io), protocol, figures })
    }

    /// Has an export use them.
    pub(crate) fn share(&self, spec: &DeviceSpec, config: &mut ExportConfig) {
        config.protocol_threads = Some(self.protocol.clone());
        config.io_pool = spec.workers.is_none().then(|| Arc::clone(&self.io));
    }

    /// Figures of the I/O threads.
    pub(crate) fn report(&self) -> Vec<report::Thread> {
        let mut figures = self.figures.lock();
        for (index, (figures, id)) in figures.iter_mut().zip(self.io.ids()).enumerate() {
            figures.follow(index, id);
        }
        figures.iter().filter_map(Figures::report).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Uses the CPU for so long, and waits to be told to end.
    fn busy(until: f64) -> i32 {
        let (send, receive) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let id = rustix::thread::gettid().as_raw_nonzero().get();
            while Figures::new(0, id).report().is_some_and(|figures| figures.cpu_s < until) {}
            send.send(id).unwrap();
            loop {
                std::thread::park();
            }
        });
        receive.recv().unwrap()
    }

    #[test]
    fn figures_go_on_when_a_thread_takes_over() {
        let mut figures = Figures::new(0, busy(0.02));
        let before = figures.report().unwrap();
        assert!(before.cpu_s >= 0.02);
        figures.follow(0, busy(0.01));
        let after = figures.report().unwrap();
        assert!(after.cpu_s >= before.cpu_s && after.name == "io0", "{before:?} {after:?}");
    }
}
