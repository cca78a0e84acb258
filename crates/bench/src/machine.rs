//! What the machine does besides, and where and how on it we measure.
use nix::sched::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};
use nix::unistd::Pid;

/// Set to `0`, measurements with two threads stay in the ordinary scheduling class.
pub(crate) const FIFO_ENV: &str = "PARAVANE_BENCH_FIFO";

/// The load average of the last minute, if the system tells.
pub(crate) fn load_average() -> Option<f64> {
    std::fs::read_to_string("/proc/loadavg").ok()?.split_whitespace().next()?.parse().ok()
}

/// The CPUs that the calling thread may use; none if the system does not tell.
pub(crate) fn cpus() -> Vec<usize> {
    let Ok(set) = sched_getaffinity(Pid::from_raw(0)) else { return Vec::new() };
    (0..CpuSet::count()).filter(|&cpu| set.is_set(cpu).unwrap_or(false)).collect()
}

/// Two CPUs to pin to, the one for the host's part first. Neither where there is only one.
pub(crate) fn two_cpus() -> (Option<usize>, Option<usize>) {
    match cpus()[..] {
        [host, guest, ..] => (Some(host), Some(guest)),
        _ => (None, None),
    }
}

/// The calling thread stays on one CPU until this is dropped.
pub(crate) struct Pinned {
    cpu: usize,
    before: CpuSet,
}

impl Pinned {
    /// Pins the calling thread to the CPU that it runs on; `None` if the system refuses.
    pub(crate) fn here() -> Option<Self> {
        Self::to(sched_getcpu().ok()?)
    }

    /// Pins the calling thread to `cpu`; `None` if the system refuses.
    pub(crate) fn to(cpu: usize) -> Option<Self> {
        Self::among(&[cpu])
    }

    /// Lets the calling thread, and what it starts meanwhile, run on `cpus`; `None` if the system refuses.
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

/// The calling thread, and what it starts meanwhile, runs before all ordinary threads until this is dropped:
/// two threads that wait for each other by spinning are not measured while one of them is off its CPU.
pub(crate) struct RealTime(());

impl RealTime {
    /// Enters SCHED_FIFO at its lowest priority; `None` if the system refuses or the user does not want it.
    pub(crate) fn enter() -> Option<Self> {
        if std::env::var_os(FIFO_ENV).is_some_and(|value| value == "0") {
            return None;
        }
        schedule(libc::SCHED_FIFO, 1).then_some(Self(()))
    }

    /// From here on the calling thread also runs before what it has started: it can end what goes astray.
    pub(crate) fn raise(&self) {
        // Refused, it merely finds out later.
        schedule(libc::SCHED_FIFO, 2);
    }
}

impl Drop for RealTime {
    fn drop(&mut self) {
        // A thread may always give up its privilege.
        schedule(libc::SCHED_OTHER, 0);
    }
}

/// Where and how the two threads run.
#[derive(Clone, Debug)]
pub(crate) struct ThreadPlacement {
    /// CPU of the driver and of the device, if there are two.
    pub(crate) cpus: Option<[usize; 2]>,
    /// Whether real-time scheduling is to be asked for.
    pub(crate) real_time: bool,
}

impl ThreadPlacement {
    /// The first two CPUs that there are.
    pub(crate) fn choose() -> Self {
        match cpus().as_slice() {
            &[first, second, ..] => {
                // Only where both threads have a CPU of their own: one that spins would keep out the other.
                Self { cpus: Some([second, first]), real_time: RealTime::enter().is_some() }
            }
            _ => Self { cpus: None, real_time: false },
        }
    }

    /// What this is called in results.
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
    let parameter = libc::sched_param { sched_priority };
    // SAFETY: the kernel reads one structure, which lives during the call; 0 is the calling thread.
    unsafe { libc::sched_setscheduler(0, policy, &raw const parameter) == 0 }
}
