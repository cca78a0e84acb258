//! Figures of this process and of its I/O threads, readable in the sandbox.
//!
//! ```text
//!   ProcessFiles::open --sandbox--> IoThread::open for each I/O thread --seal--> report: pread(2), fstat(2)
//!   (/proc/self: fd, statm, stat)   (/proc/self/task/TID/schedstat)
//! ```
//! Nothing is opened for a report: a sealed daemon opens no files.
use super::report;
use rustix::fs::{Mode, OFlags};
use rustix::io::pread;
use rustix::param::{clock_ticks_per_second, page_size};
use rustix::process::{Resource, getrlimit};
use rustix::time::{ClockId, clock_gettime};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::SystemTime;

/// Directory of the threads of this process.
pub(crate) const TASKS: &str = "/proc/self/task";

/// Files about this process. Must be opened before the sandbox is entered.
#[derive(Debug)]
pub(crate) struct ProcessFiles {
    descriptors: Option<File>,
    memory: Option<File>,
    started_unix_s: Option<f64>,
    /// Keeps the directory in the kernel's cache, and so the sandbox's rule for it.
    _tasks: Option<OwnedFd>,
}

impl ProcessFiles {
    pub(crate) fn open() -> Self {
        let directory =
            File::options().read(true).custom_flags(OFlags::DIRECTORY.bits() as i32).open("/proc/self/fd");
        let tasks =
            rustix::fs::open(TASKS, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
        Self {
            descriptors: directory.ok(),
            memory: File::open("/proc/self/statm").ok(),
            started_unix_s: started(),
            _tasks: tasks.ok(),
        }
    }

    /// Figures of the process. Those that the kernel does not tell are `None`.
    pub(crate) fn report(&self) -> report::Process {
        let [size, resident] =
            self.memory.as_ref().and_then(numbers).map_or([None; 2], |pages| pages.map(Some));
        let bytes = |pages: Option<u64>| Some(pages?.saturating_mul(page_size() as u64));
        report::Process {
            cpu_s: seconds(clock_gettime(ClockId::ProcessCPUTime)),
            resident_bytes: bytes(resident),
            virtual_bytes: bytes(size),
            started_unix_s: self.started_unix_s,
        }
    }

    /// Number of open descriptors.
    ///
    /// `None`: the kernel does not count them (before Linux 6.2), or /proc is not mounted.
    pub(crate) fn count(&self) -> Option<u64> {
        // stat(2) reports it as the size of the directory.
        let size = self.descriptors.as_ref()?.metadata().ok()?.len();
        (size > 0).then_some(size)
    }
}

/// One I/O thread of a device.
#[derive(Debug)]
pub(crate) struct IoThread {
    name: String,
    figures: Option<File>,
}

impl IoThread {
    /// Opens the figures of I/O thread `index` of a device.
    ///
    /// `number` is its thread number in the kernel.
    pub(crate) fn open(index: usize, number: i32) -> Self {
        let path = Path::new(TASKS).join(number.to_string()).join("schedstat");
        Self { name: format!("io{index}"), figures: File::open(path).ok() }
    }

    /// Figures of the thread. `None`: it has ended, or the kernel does not tell them.
    pub(crate) fn report(&self) -> Option<report::Thread> {
        // Time on a CPU and time in a run queue, in nanoseconds.
        let [ran, waited] = numbers(self.figures.as_ref()?)?;
        Some(report::Thread {
            name: self.name.clone(),
            cpu_s: ran as f64 * 1e-9,
            run_delay_s: waited as f64 * 1e-9,
        })
    }
}

/// The first two numbers of a file.
fn numbers(file: &File) -> Option<[u64; 2]> {
    let mut text = [0; 128];
    let len = pread(file, &mut text, 0).ok()?;
    let text = std::str::from_utf8(&text[..len]).ok()?;
    let mut numbers = text.split_whitespace().map(|word| word.parse().ok());
    Some([numbers.next()??, numbers.next()??])
}

fn seconds(time: rustix::time::Timespec) -> f64 {
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// When this process started, in seconds since 1970.
fn started() -> Option<f64> {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    // proc_pid_stat(5): field 22. The name, field 2, ends with the last parenthesis.
    let (_, fields) = stat.rsplit_once(')')?;
    let ticks: u64 = fields.split_whitespace().nth(19)?.parse().ok()?;
    let age = seconds(clock_gettime(ClockId::Boottime)) - ticks as f64 / clock_ticks_per_second() as f64;
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).ok()?;
    Some(now.as_secs_f64() - age)
}

/// RLIMIT_NOFILE. `None`: unlimited.
pub(crate) fn limit() -> Option<u64> {
    getrlimit(Resource::Nofile).current
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_are_counted_where_the_kernel_does() {
        let files = ProcessFiles::open();
        if let Some(count) = files.count() {
            // At least the three that every process has, and the directory.
            assert!(count >= 4 && limit().is_none_or(|limit| count <= limit), "{count}");
        }
    }

    #[test]
    fn a_process_and_its_threads_tell_their_figures() {
        let process = ProcessFiles::open().report();
        assert!(process.cpu_s >= 0.0);
        let (resident, size) = (process.resident_bytes.unwrap(), process.virtual_bytes.unwrap());
        assert!(0 < resident && resident <= size, "{process:?}");
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs_f64();
        let started = process.started_unix_s.unwrap();
        // After 2020, and not in the future but for the clock's resolution.
        assert!(started > 1.577e9 && started < now + 1.0, "{started}");

        let thread = rustix::thread::gettid().as_raw_nonzero().get();
        let this = IoThread::open(3, thread).report();
        assert_eq!(this.map(|thread| thread.name), Some("io3".to_owned()));
        assert_eq!(IoThread::open(0, -1).report(), None, "there is no such thread");
    }
}
