//! The client of a device that is always busy: large reads in order, without a pause.
use super::case::Hog;
use super::disks::LARGE;
use crate::disk_connection::{DiskConnection, Wanted};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::thread::JoinHandle;
use std::time::Duration;

/// Time limit for the device to be connected.
const START: Duration = Duration::from_secs(10);
/// Time after which the thread looks whether it must end.
const LOOK: u8 = 50;

/// A thread with requests in flight until dropped.
pub(super) struct HogClient {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    result: Receiver<Result<(), String>>,
}

#[derive(Default)]
struct Shared {
    end: AtomicBool,
    requests: AtomicU64,
}

impl HogClient {
    /// Connects to `socket` and starts.
    ///
    /// # Errors
    /// Why there is no device, in one line.
    pub(super) fn start(socket: PathBuf, bytes: u64) -> Result<Self, String> {
        let shared = Arc::new(Shared::default());
        let (sender, result) = channel();
        let of_thread = Arc::clone(&shared);
        let thread = std::thread::spawn(move || {
            // The receiver takes the first two messages: connected, ended.
            let _ = match Requests::new(socket, bytes) {
                Ok(mut requests) => {
                    let _ = sender.send(Ok(()));
                    sender.send(requests.run(&of_thread))
                }
                Err(error) => sender.send(Err(error)),
            };
        });
        let client = Self { shared, thread: Some(thread), result };
        client.result.recv_timeout(START).map_err(|_| "the hog is not connected".to_owned())??;
        Ok(client)
    }

    /// Requests completed so far.
    ///
    /// # Errors
    /// What the device did wrong, in one line.
    pub(super) fn requests(&self) -> Result<u64, String> {
        match self.result.try_recv() {
            Ok(Err(error)) => Err(error),
            // Relaxed pairs with nothing: a count that orders nothing.
            _ => Ok(self.shared.requests.load(Ordering::Relaxed)),
        }
    }
}

impl Drop for HogClient {
    fn drop(&mut self) {
        // Relaxed pairs with nothing: the thread only has to see it at some time.
        self.shared.end.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // Its panic is printed.
            let _ = thread.join();
        }
    }
}

struct Requests {
    disk: DiskConnection,
    bytes: u64,
    next: u64,
}

impl Requests {
    fn new(socket: PathBuf, bytes: u64) -> Result<Self, String> {
        let wanted = Wanted { packed: false, capacity: LARGE, depth: Hog::DEPTH, bytes };
        let mut disk = DiskConnection::new(&socket, wanted, || None)?;
        disk.queue.set_used_notif_enabled(true);
        Ok(Self { disk, bytes, next: 0 })
    }

    fn run(&mut self, shared: &Shared) -> Result<(), String> {
        for request in 0..Hog::DEPTH {
            self.submit(request)?;
        }
        self.kick()?;
        let mut completed = Vec::with_capacity(Hog::DEPTH);
        // Relaxed pairs with nothing, as in `drop`.
        while !shared.end.load(Ordering::Relaxed) {
            match poll(&mut [PollFd::new(self.disk.call.as_fd(), PollFlags::POLLIN)], PollTimeout::from(LOOK))
            {
                Ok(0) | Err(Errno::EINTR) => continue,
                Ok(_) => drop(self.disk.call.read().map_err(|error| error.to_string())?),
                Err(error) => return Err(error.to_string()),
            }
            for completion in self.disk.queue.completions() {
                if completion.ret != 0 {
                    return Err(format!("a request failed with status {}", completion.ret));
                }
                completed.push(completion.context);
            }
            shared.requests.fetch_add(completed.len() as u64, Ordering::Relaxed);
            while let Some(request) = completed.pop() {
                self.submit(request)?;
            }
            self.kick()?;
        }
        Ok(())
    }

    fn submit(&mut self, request: usize) -> Result<(), String> {
        let len = self.bytes as usize;
        let data = self.disk.buffers.of(request, len);
        let offset = self.next % (LARGE / self.bytes) * self.bytes;
        self.next += 1;
        // SAFETY: the buffer lives as long as the queue, and only this request uses it until it
        // completes.
        unsafe { self.disk.queue.read_raw(offset, data, len, request) }
            .map_err(|error| format!("cannot submit a request: {error}"))
    }

    fn kick(&mut self) -> Result<(), String> {
        if self.disk.queue.avail_notif_needed() {
            self.disk.kick.notify().map_err(|error| format!("cannot kick: {error}"))?;
        }
        Ok(())
    }
}
