//! Load, CPUs and scheduling class.
use nix::sched::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};
use nix::unistd::Pid;

/// Environment variable; `0` keeps measurements in the ordinary scheduling class.
pub(crate) const FIFO_ENV: &str = "PARAVANE_BENCH_FIFO";

/// The load average over one minute, if known.
pub(crate) fn load_average() -> Option<f64> {
    std::fs::read_to_string("/proc/loadavg").ok()?.split_whitespace().next()?.parse().ok()
}

/// The CPUs that the calling thread may use; empty if unknown.
pub(crate) fn cpus() -> Vec<usize> {
    let Ok(set) = sched_getaffinity(Pid::from_raw(0)) else { return Vec::new() };
    (0..CpuSet::count()).filter(|&cpu| set.is_set(cpu).unwrap_or(false)).collect()
}

/// Two CPUs to pin to, for the host and for the guest; `None` with one CPU.
pub(crate) fn two_cpus() -> (Option<usize>, Option<usize>) {
    match cpus()[..] {
        [host, guest, ..] => (Some(host), Some(guest)),
        _ => (None, None),
    }
}

/// CPUs to pin to, for the host's threads and for a guest with `wanted` CPUs.
///
/// Each side has as many as the guest, or half of all if these are fewer. None with one CPU.
pub(crate) fn cpus_apart(wanted: usize) -> [Vec<usize>; 2] {
    let all = cpus();
    let each = wanted.min(all.len() / 2);
    [all[..each].to_vec(), all[each..2 * each].to_vec()]
}

/// Keeps the calling thread on a set of CPUs until dropped.
pub(crate) struct Pinned {
    cpu: usize,
    before: CpuSet,
}

impl Pinned {
    /// Pins the calling thread to its current CPU; `None` if refused.
    pub(crate) fn here() -> Option<Self> {
        Self::to(sched_getcpu().ok()?)
    }

    /// Pins the calling thread to `cpu`; `None` if refused.
    pub(crate) fn to(cpu: usize) -> Option<Self> {
        Self::among(&[cpu])
    }

    /// Restricts the calling thread and its children to `cpus`; `None` if refused.
    pub(crate) fn among(cpus: &[usize]) -> Option<Self> {
        let thread = Pid::from_raw(0);
        let before = sched_getaffinity(thread).ok()?;
        let mut set = CpuSet::new();
        for &cpu in cpus {
            set.set(cpu).ok()?;
        }
        sched_setaffinity(thread, &set).ok()?;
        Some(Self { cpu: *cpus.first()?, before })
    }

    /// The first CPU of the set.
    pub(crate) fn cpu(&self) -> usize {
        self.cpu
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // If refused, the thread stays on its CPU. Nothing depends on it.
        let _ = sched_setaffinity(Pid::from_raw(0), &self.before);
    }
}

/// Runs this thread and its children before all ordinary threads until dropped.
///
/// Two threads that wait for each other by spinning then keep their CPUs.
pub(crate) struct RealTime(());

impl RealTime {
    /// Enters SCHED_FIFO at its lowest priority.
    ///
    /// `None` if the system refuses, or if [`FIFO_ENV`] forbids it.
    pub(crate) fn enter() -> Option<Self> {
        if std::env::var_os(FIFO_ENV).is_some_and(|value| value == "0") {
            return None;
        }
        schedule(libc::SCHED_FIFO, 1).then_some(Self(()))
    }

    /// Raises this thread's priority above its children's, so that it can stop them.
    pub(crate) fn raise(&self) {
        // If refused, a hanging child is found later.
        schedule(libc::SCHED_FIFO, 2);
    }
}

impl Drop for RealTime {
    fn drop(&mut self) {
        // Dropping a privilege cannot fail.
        schedule(libc::SCHED_OTHER, 0);
    }
}

/// CPUs and scheduling class of two threads.
#[derive(Clone, Debug)]
pub(crate) struct ThreadPlacement {
    /// CPUs of the driver and of the device; `None` with one CPU.
    pub(crate) cpus: Option<[usize; 2]>,
    /// Whether the threads run as SCHED_FIFO.
    pub(crate) real_time: bool,
}

impl ThreadPlacement {
    /// Chooses the first two CPUs.
    pub(crate) fn choose() -> Self {
        match cpus().as_slice() {
            &[first, second, ..] => {
                // On one CPU, a spinning real-time thread would block the other.
                Self { cpus: Some([second, first]), real_time: RealTime::enter().is_some() }
            }
            _ => Self { cpus: None, real_time: false },
        }
    }

    /// Method in results.
    pub(crate) fn method(&self) -> &'static str {
        match (self.cpus, self.real_time) {
            (Some(_), true) => "clock, SCHED_FIFO",
            (Some(_), false) => "clock",
            (None, _) => "clock, one CPU, yielding",
        }
    }
}

/// Puts the calling thread into a scheduling class.
fn schedule(policy: libc::c_int, sched_priority: libc::c_int) -> bool {
    // SAFETY: plain integers, of which musl has more than glibc. Zero is a value of each.
    let mut parameter: libc::sched_param = unsafe { std::mem::zeroed() };
    parameter.sched_priority = sched_priority;
    // SAFETY: the kernel reads one structure, which lives during the call; 0 is the calling thread.
    unsafe { libc::sched_setscheduler(0, policy, &raw const parameter) == 0 }
}
