//! Looks at the descriptors of clients in another process, which may be lost.
//!
//! ```text
//!  daemon: a message with descriptors is on the connection --connection, a socket for the answer--> inspector
//!                                                                          | a child of its own
//!             takes the message, or ends the session <--"good", or why not-- peeks, judges
//!                                                                          '-- closes what it has peeked, and ends
//! ```
//! To close a descriptor can take for ever: the owner of a FUSE file system answers when it likes,
//! and no signal ends the wait. So the daemon receives a message with descriptors only when all of
//! them are of kinds that the kernel alone serves. What is refused stays in the connection, which
//! the daemon closes.
mod process;

pub(crate) use process::main;

use super::helper::Helper;
use crate::fds;
use paravane_export::Inspector;
use parking_lot::Mutex;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, sockopt};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

const INSPECTOR: Helper = Helper { name: "inspector", does: "looks at clients' descriptors" };
/// Answer: all descriptors may be taken. Any other answer says why not.
const GOOD: &[u8] = b"good";
/// Most bytes of an answer.
const ANSWER: usize = 1024;
/// Longest wait for an answer. Nothing that the inspector does before it can be delayed by a client.
const PATIENCE: Duration = Duration::from_secs(10);

/// The daemon's end.
#[derive(Debug)]
pub(crate) struct InspectorProcess {
    socket: OwnedFd,
}

/// The inspector as one device uses it.
#[derive(Debug)]
struct DeviceInspector {
    process: Arc<InspectorProcess>,
    /// Answer of a process that may still close what was refused.
    busy: Mutex<Option<OwnedFd>>,
}

impl InspectorProcess {
    /// Starts the process. Call it before the sandbox closes.
    ///
    /// # Errors
    /// The host refuses a process.
    pub(crate) fn start(sandbox: bool) -> Result<Arc<Self>, anyhow::Error> {
        let near = INSPECTOR.start(&[])?;
        rustix::net::send(&near, &[u8::from(sandbox)], SendFlags::NOSIGNAL)?;
        Ok(Arc::new(Self { socket: near }))
    }

    /// The inspector of a device.
    pub(crate) fn device(self: &Arc<Self>) -> Arc<dyn Inspector> {
        Arc::new(DeviceInspector { process: Arc::clone(self), busy: Mutex::default() })
    }

    /// Asks for a look at `len` bytes of a connection. Returns where the answer comes.
    fn ask(&self, connection: BorrowedFd<'_>, len: usize) -> io::Result<OwnedFd> {
        let (near, far) = fds::pair()?;
        sockopt::set_socket_timeout(&near, sockopt::Timeout::Recv, Some(PATIENCE))?;
        let len = u32::try_from(len).unwrap_or(u32::MAX).to_ne_bytes();
        match fds::send(&self.socket, &len, &[connection, far.as_fd()], SendFlags::empty()) {
            Err(Errno::PIPE | Errno::CONNRESET) => Err(gone()),
            sent => {
                sent?;
                Ok(near)
            }
        }
    }
}

fn gone() -> io::Error {
    io::Error::other(INSPECTOR.has_ended())
}

fn receive(answer: &OwnedFd, text: &mut [u8], flags: RecvFlags) -> Result<usize, Errno> {
    loop {
        match recv(answer, &mut *text, flags) {
            Err(Errno::INTR) => {}
            Err(Errno::CONNRESET) => return Ok(0),
            received => return received.map(|(count, _)| count),
        }
    }
}

impl Inspector for DeviceInspector {
    fn inspect(&self, connection: BorrowedFd<'_>, len: usize) -> io::Result<()> {
        let mut busy = self.busy.lock();
        let mut text = [0; ANSWER];
        if let Some(earlier) = busy.take()
            && receive(&earlier, &mut text, RecvFlags::DONTWAIT) != Ok(0)
        {
            *busy = Some(earlier);
            return Err(io::Error::other(
                "a file system has not let go of a descriptor that an earlier client sent: end whoever serves it",
            ));
        }
        let answer = self.process.ask(connection, len)?;
        let refused = match receive(&answer, &mut text, RecvFlags::empty()) {
            Ok(0) => return Err(gone()),
            Ok(count) if &text[..count] == GOOD => return Ok(()),
            Ok(count) => io::Error::other(String::from_utf8_lossy(&text[..count]).into_owned()),
            Err(error) => error.into(),
        };
        *busy = Some(answer);
        Err(refused)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};
    use rustix::fs::{MemfdFlags, memfd_create};
    use std::os::unix::net::UnixStream;

    /// What the inspector says of a message with these descriptors.
    fn judge(fds: &[BorrowedFd<'_>]) -> Result<(), String> {
        let (near, far) = UnixStream::pair().unwrap();
        fds::send(&near, &[7; 20], fds, SendFlags::empty()).unwrap();
        let judged = process::look(far.as_fd(), 20);
        // The message is still there.
        let mut bytes = [0; 32];
        assert_eq!(std::io::Read::read(&mut &far, &mut bytes).unwrap(), 20);
        judged
    }

    #[test]
    fn only_what_the_kernel_alone_serves_may_be_taken() {
        let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let (reader, writer) = std::io::pipe().unwrap();
        let (one, _other) = UnixStream::pair().unwrap();
        let memory = memfd_create("m", MemfdFlags::CLOEXEC).unwrap();
        let good = [event.as_fd(), reader.as_fd(), writer.as_fd(), one.as_fd(), memory.as_fd()];
        assert_eq!(judge(&good), Ok(()));
        let inet = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let program = std::fs::File::open(std::env::current_exe().unwrap()).unwrap();
        let null = std::fs::File::open("/dev/null").unwrap();
        let folder = std::fs::File::open("/").unwrap();
        for bad in [inet.as_fd(), program.as_fd(), null.as_fd(), folder.as_fd()] {
            let why = judge(&[event.as_fd(), bad]).unwrap_err();
            assert!(why.contains("need memory (a memfd, or a file on tmpfs or hugetlbfs)"), "{why}");
        }
    }

    #[test]
    fn one_look_a_device_may_be_stuck() {
        let (near, far) = fds::pair().unwrap();
        let process = Arc::new(InspectorProcess { socket: near });
        let inspector = process.device();
        // Its answers are kept open, as by a process that cannot close what it has peeked.
        let (sender, stuck) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            while let Some((_, _, answer)) = process::receive(&far).unwrap() {
                rustix::net::send(&answer, b"no", SendFlags::NOSIGNAL).unwrap();
                sender.send(answer).unwrap();
            }
        });
        let (connection, _client) = UnixStream::pair().unwrap();
        let look = || inspector.inspect(connection.as_fd(), 12).unwrap_err().to_string();
        assert_eq!(look(), "no");
        let answer = stuck.recv().unwrap();
        assert!(look().contains("has not let go"));
        assert!(stuck.try_recv().is_err(), "no other look was begun");
        drop(answer);
        assert_eq!(look(), "no");
        assert_eq!(process.device().inspect(connection.as_fd(), 12).unwrap_err().to_string(), "no");
    }

    #[test]
    fn an_inspector_that_has_ended_is_named() {
        let (near, far) = fds::pair().unwrap();
        drop(far);
        let inspector = Arc::new(InspectorProcess { socket: near }).device();
        let (connection, _client) = UnixStream::pair().unwrap();
        let error = inspector.inspect(connection.as_fd(), 12).unwrap_err();
        assert!(error.to_string().contains("restart the daemon"), "{error}");
    }
}
