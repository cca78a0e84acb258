//! A service manager with a descriptor store, as that of systemd.
//!
//! It takes FDSTORE=1 and FDSTOREREMOVE=1, keeps an open file only once, drops without a word what
//! exceeds its maximum, and passes all descriptors to each daemon that it starts.
use crate::daemon::patience;
use crate::fds::{self, Received};
use rustix::net::RecvFlags;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};

/// First number of the descriptors that are passed (sd_listen_fds(3)).
const FIRST: RawFd = 3;
/// Where descriptors are moved out of the way of the others.
const AWAY: RawFd = 500;

type Stored = Arc<Mutex<Vec<(String, OwnedFd)>>>;

pub(crate) struct Manager {
    socket: PathBuf,
    stored: Stored,
    maximum: Arc<AtomicUsize>,
    marks: Receiver<()>,
}

/// Whether two descriptors are of one open file (kcmp(2)).
fn is_same(one: &OwnedFd, other: &OwnedFd) -> bool {
    let own = std::process::id();
    // KCMP_FILE is 0.
    // SAFETY: the call takes any numbers, and changes nothing.
    unsafe { libc::syscall(libc::SYS_kcmp, own, own, 0, one.as_raw_fd(), other.as_raw_fd()) == 0 }
}

fn take(stored: &Stored, maximum: usize, text: &str, fds: Vec<OwnedFd>) {
    let has = |line: &str| text.lines().any(|found| found == line);
    let name = text.lines().find_map(|line| line.strip_prefix("FDNAME=")).unwrap_or("stored");
    let mut stored = stored.lock().unwrap();
    if has("FDSTOREREMOVE=1") {
        stored.retain(|(stored, _)| stored != name);
    } else if has("FDSTORE=1") {
        // Without it, the manager drops descriptors whose other end is closed.
        assert!(has("FDPOLL=0"), "{text}");
        for fd in fds {
            if stored.len() < maximum && !stored.iter().any(|(_, stored)| is_same(stored, &fd)) {
                stored.push((name.to_owned(), fd));
            }
        }
    }
}

impl Manager {
    /// Begins to listen; keeps at most `maximum` descriptors.
    pub(crate) fn new(folder: &Path, maximum: usize) -> Self {
        let socket = folder.join("notify");
        let listener = UnixDatagram::bind(&socket).unwrap();
        let stored = Stored::default();
        let (mark, marks) = channel();
        let maximum = Arc::new(AtomicUsize::new(maximum));
        let (of_thread, maximum_now) = (stored.clone(), maximum.clone());
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            loop {
                let received = fds::receive(&listener, &mut buffer, fds::MOST, RecvFlags::empty()).unwrap();
                let Received { len, fds, .. } = received;
                match &buffer[..len] {
                    b"MARK=1" if mark.send(()).is_err() => return,
                    b"MARK=1" => {}
                    text => take(
                        &of_thread,
                        maximum_now.load(Ordering::Relaxed),
                        &String::from_utf8_lossy(text),
                        fds,
                    ),
                }
            }
        });
        Self { socket, stored, maximum, marks }
    }

    /// Changes the number of descriptors that are kept at most.
    pub(crate) fn set_maximum(&self, maximum: usize) {
        self.maximum.store(maximum, Ordering::Relaxed);
    }

    /// Number of stored descriptors, when all messages so far have been read.
    pub(crate) fn stored(&self) -> usize {
        UnixDatagram::unbound().unwrap().send_to(b"MARK=1", &self.socket).unwrap();
        self.marks.recv_timeout(patience()).unwrap();
        self.stored.lock().unwrap().len()
    }

    /// A command that starts this program as a service, with all descriptors.
    pub(crate) fn command(&self, program: &str) -> Command {
        let count = self.stored();
        let stored = self.stored.lock().unwrap();
        let names: Vec<&str> = stored.iter().map(|(name, _)| name.as_str()).collect();
        let fds: Vec<OwnedFd> = stored.iter().map(|(_, fd)| fd.try_clone().unwrap()).collect();
        let mut command = Command::new("sh");
        command.args(["-c", "LISTEN_PID=$$ exec \"$@\"", "sh", program]).stdin(Stdio::null());
        command.env_remove("RUST_LOG").env("NOTIFY_SOCKET", &self.socket);
        if count > 0 {
            command.env("LISTEN_FDS", count.to_string()).env("LISTEN_FDNAMES", names.join(":"));
        }
        let pass = move || {
            let mut away = Vec::with_capacity(fds.len());
            for fd in &fds {
                // SAFETY: duplicates an open descriptor.
                away.push(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_DUPFD_CLOEXEC, AWAY) });
            }
            for (number, fd) in (FIRST..).zip(away) {
                // SAFETY: no descriptor of the new program has this number: it is about to start.
                if unsafe { libc::dup2(fd, number) } < 0 {
                    return Err(std::io::Error::last_os_error());
                }
            }
            Ok(())
        };
        // SAFETY: between fork and exec, `pass` calls nothing but fcntl and dup2, and allocates: the
        // tests that use it accept that, as the C library's allocator works after a fork.
        unsafe { command.pre_exec(pass) };
        command
    }
}

impl Drop for Manager {
    fn drop(&mut self) {
        // Ends the thread.
        let (_, marks) = channel();
        drop(std::mem::replace(&mut self.marks, marks));
        let _ = UnixDatagram::unbound().and_then(|socket| socket.send_to(b"MARK=1", &self.socket));
    }
}
