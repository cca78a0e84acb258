//! What a process holds: memory, threads, descriptors; how often its threads slept.
use nix::unistd::Pid;
use std::fs;
use std::io;

/// What a process holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Held {
    /// Resident memory in KiB.
    pub(super) rss: u64,
    /// Resident memory that no file backs, in KiB.
    pub(super) private: u64,
    /// Number of threads.
    pub(super) threads: u64,
    /// Number of open descriptors.
    pub(super) descriptors: u64,
}

impl Held {
    /// # Errors
    /// The process has ended, or the system hides it.
    pub(super) fn by(pid: Pid) -> io::Result<Self> {
        let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
        let field = |name| field(&status, name).ok_or(io::ErrorKind::InvalidData);
        let (rss, private, threads) = (field("VmRSS")?, field("RssAnon")?, field("Threads")?);
        let descriptors = fs::read_dir(format!("/proc/{pid}/fd"))?.count() as u64;
        Ok(Self { rss, private, threads, descriptors })
    }
}

/// How often the threads of a process have slept since their start.
///
/// # Errors
/// As [`Held::by`].
pub(super) fn sleeps(pid: Pid) -> io::Result<u64> {
    let mut sum = 0;
    for thread in fs::read_dir(format!("/proc/{pid}/task"))? {
        // A thread may end meanwhile.
        let status = fs::read_to_string(thread?.path().join("status")).unwrap_or_default();
        sum += field(&status, "voluntary_ctxt_switches").unwrap_or(0);
    }
    Ok(sum)
}

/// The number of a field of /proc/PID/status.
fn field(status: &str, name: &str) -> Option<u64> {
    let line = status.lines().find(|line| line.split(':').next() == Some(name))?;
    line.split_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_by_their_whole_name() {
        let status = "RssAnon:\t 12 kB\nVmRSS:\t    2048 kB\nThreads:\t3\nnonvoluntary_ctxt_switches:\t9\n";
        assert_eq!(field(status, "VmRSS"), Some(2048));
        assert_eq!(field(status, "voluntary_ctxt_switches"), None);
    }

    #[test]
    fn this_process_holds_something() {
        let held = Held::by(Pid::this()).unwrap();
        assert!(held.rss >= held.private && held.threads > 0 && held.descriptors > 2, "{held:?}");
        std::thread::sleep(std::time::Duration::from_millis(1));
        assert!(sleeps(Pid::this()).unwrap() > 0);
    }
}
