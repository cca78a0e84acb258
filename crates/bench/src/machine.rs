//! What the machine does besides, and where on it we measure.
use nix::sched::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};
use nix::unistd::Pid;

/// The load average of the last minute, if the system tells.
pub(crate) fn load_average() -> Option<f64> {
    std::fs::read_to_string("/proc/loadavg").ok()?.split_whitespace().next()?.parse().ok()
}

/// The calling thread stays on one CPU until this is dropped.
pub(crate) struct Pinned {
    cpu: usize,
    before: CpuSet,
}

impl Pinned {
    /// Pins the calling thread to the CPU that it runs on; `None` if the system refuses.
    pub(crate) fn here() -> Option<Self> {
        let thread = Pid::from_raw(0);
        let before = sched_getaffinity(thread).ok()?;
        let cpu = sched_getcpu().ok()?;
        let mut one = CpuSet::new();
        one.set(cpu).ok()?;
        sched_setaffinity(thread, &one).ok()?;
        Some(Self { cpu, before })
    }

    /// The CPU.
    pub(crate) fn cpu(&self) -> usize {
        self.cpu
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // Nothing depends on it: refused, the thread merely stays where it is.
        let _ = sched_setaffinity(Pid::from_raw(0), &self.before);
    }
}
