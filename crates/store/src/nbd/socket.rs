//! Calls on the socket of a connection: with a time-out at first, then without blocking.
use paravane_dma::HostSlice;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvFlags, SendFlags, recv};
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};

/// Most pieces of a system call.
pub(super) const IOV_MAX: usize = 1024;

/// A socket that blocks until a moment at the latest. The socket itself does not block.
#[derive(Debug)]
pub(super) struct Timed<'a> {
    pub(super) socket: BorrowedFd<'a>,
    pub(super) end: Instant,
}

impl Timed<'_> {
    fn wait(&self, flags: PollFlags) -> io::Result<()> {
        loop {
            let left = self.end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::Error::new(io::ErrorKind::TimedOut, "the server does not answer in time"));
            }
            let mut fds = [PollFd::new(&self.socket, flags)];
            match poll(&mut fds, Some(&timespec(left))) {
                Ok(0) | Err(rustix::io::Errno::INTR) => {}
                Ok(_) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn try_until<T>(&self, flags: PollFlags, mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
        loop {
            match call() {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.wait(flags)?,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                other => return other,
            }
        }
    }
}

pub(super) fn timespec(time: Duration) -> Timespec {
    Timespec { tv_sec: time.as_secs().min(i32::MAX as u64) as i64, tv_nsec: time.subsec_nanos().into() }
}

impl Read for Timed<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        self.try_until(PollFlags::IN, || Bare(self.socket).read(out))
    }
}

impl Write for Timed<'_> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        self.try_until(PollFlags::OUT, || Bare(self.socket).write(data))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A socket that does not wait.
pub(super) struct Bare<'a>(pub(super) BorrowedFd<'a>);

impl Read for Bare<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let (len, _) = recv(self.0, out, RecvFlags::DONTWAIT)?;
        Ok(len)
    }
}

impl Write for Bare<'_> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        Ok(rustix::net::send(self.0, data, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Sends from pieces, as much as goes at once.
///
/// # Safety
/// The pieces name memory that can be read during the call.
pub(super) unsafe fn send(socket: BorrowedFd<'_>, pieces: &[HostSlice]) -> io::Result<usize> {
    let message = message(pieces);
    let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
    // SAFETY: the message names the pieces, which have the layout of `struct iovec`.
    result(unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, flags) })
}

/// Receives into pieces what has come. 0: the peer has closed.
///
/// # Safety
/// The pieces name memory that can be written during the call.
pub(super) unsafe fn receive(socket: BorrowedFd<'_>, pieces: &[HostSlice]) -> io::Result<usize> {
    let mut message = message(pieces);
    // SAFETY: as above; there is no address and no control data to write.
    result(unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT) })
}

fn message(pieces: &[HostSlice]) -> libc::msghdr {
    // SAFETY: zeroes are a valid message: no address, no pieces, no control data.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = pieces.as_ptr().cast_mut().cast();
    message.msg_iovlen = pieces.len().min(IOV_MAX) as _;
    message
}

fn result(moved: isize) -> io::Result<usize> {
    usize::try_from(moved).map_err(|_| io::Error::last_os_error())
}
