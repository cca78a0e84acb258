//! A busy machine: a thread on each CPU that never sleeps, and how long others wait for it.
use crate::machine::Pinned;
use nix::unistd::Pid;
use std::fs;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// Threads that spin in the ordinary scheduling class, one on each CPU, until dropped.
pub(super) struct BusyThreads {
    end: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl BusyThreads {
    pub(super) fn start(cpus: &[usize]) -> Self {
        let end = Arc::new(AtomicBool::new(false));
        let spin = |&cpu: &usize| {
            let end = Arc::clone(&end);
            std::thread::spawn(move || {
                let _pinned = Pinned::to(cpu);
                // Relaxed pairs with nothing: the thread only has to see it at some time.
                while !end.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            })
        };
        let threads = cpus.iter().map(spin).collect();
        Self { end, threads }
    }
}

impl Drop for BusyThreads {
    fn drop(&mut self) {
        // Relaxed pairs with nothing, as above.
        self.end.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // Its panic is printed.
            let _ = thread.join();
        }
    }
}

/// Time for which threads could run and no CPU ran them, since they started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RunDelay {
    /// Of all threads of the server.
    pub(super) server: Duration,
    /// Of this thread.
    pub(super) client: Duration,
}

impl RunDelay {
    /// # Errors
    /// The process has ended, or the kernel keeps no such statistics.
    pub(super) fn now(server: Pid) -> io::Result<Self> {
        let mut sum = Duration::ZERO;
        for thread in fs::read_dir(format!("/proc/{server}/task"))? {
            // A thread may end meanwhile.
            sum += read(&thread?.path().join("schedstat")).unwrap_or_default();
        }
        Ok(Self { server: sum, client: read(Path::new("/proc/thread-self/schedstat"))? })
    }
}

/// The second number: nanoseconds on a run queue.
fn read(path: &Path) -> io::Result<Duration> {
    let text = fs::read_to_string(path)?;
    let number = text.split_whitespace().nth(1).and_then(|word| word.parse().ok());
    number.map(Duration::from_nanos).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn busy_threads_end_when_dropped() {
        let threads = BusyThreads::start(&crate::machine::cpus());
        assert!(!threads.threads.is_empty());
        let delay = RunDelay::now(Pid::this()).unwrap();
        assert!(delay.server >= delay.client);
    }
}
