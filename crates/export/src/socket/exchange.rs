//! Takes a message off a connection and answers it, in one system call.
//!
//! ```text
//!   io_uring_enter: receive piece ... receive piece, send answer     all without waiting
//! ```
//! The kernel does such requests one after the other while it submits them, and looks at signals
//! before and after. So a process that is killed has done all of them or none: no client waits for
//! an answer to a message that is gone, and none gets two.
use io_uring::{IoUring, opcode, types};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};

use crate::framing::Framing;

const FLAGS: i32 = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;

/// A ring for exchanges.
pub(crate) struct Exchange {
    // First, so that it is dropped before the memory of its requests.
    ring: IoUring,
    /// What is taken off the connection was read before, and is not looked at again.
    taken: Box<[u8]>,
}

impl std::fmt::Debug for Exchange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Exchange").finish_non_exhaustive()
    }
}

impl Exchange {
    /// Makes a ring for messages of a protocol.
    ///
    /// # Errors
    /// The host has no io_uring for this process.
    pub(crate) fn new(framing: &Framing) -> io::Result<Self> {
        // One for each piece, each with a descriptor but one, and the answer.
        let entries = (framing.max_fds as u32 + 2).next_power_of_two();
        Ok(Self { ring: IoUring::new(entries)?, taken: vec![0; framing.max_message].into() })
    }

    /// Takes bytes off a socket, in pieces of these lengths, and sends the answer.
    ///
    /// # Errors
    /// The client does not read, or has disconnected. [`io::ErrorKind::WouldBlock`]: the answer does
    /// not fit.
    pub(crate) fn run(
        &mut self,
        socket: BorrowedFd<'_>,
        pieces: &[usize],
        answer: Option<(&[u8], Option<BorrowedFd<'_>>)>,
    ) -> io::Result<()> {
        let fd = types::Fd(socket.as_raw_fd());
        let message = answer.map(|(bytes, fd)| Answer::new(bytes, fd));
        let mut expected = Vec::new();
        let mut entries = Vec::new();
        for &piece in pieces {
            if piece > self.taken.len() || piece == 0 {
                return Err(io::ErrorKind::InvalidInput.into());
            }
            let recv = opcode::Recv::new(fd, self.taken.as_mut_ptr(), piece as u32).flags(FLAGS);
            entries.push(recv.build().user_data(expected.len() as u64));
            expected.push(piece);
        }
        if let (Some(message), Some((bytes, _))) = (&message, answer) {
            let send = opcode::SendMsg::new(fd, &raw const message.header).flags(FLAGS as u32);
            entries.push(send.build().user_data(expected.len() as u64));
            expected.push(bytes.len());
        }
        // SAFETY: the requests use `self.taken`, at most its length, and `message`, with what that
        // points to. None waits (MSG_DONTWAIT), so each has ended when the kernel has taken it, and
        // `submit_and_wait` returns after that. If it fails, no request was taken.
        unsafe { self.ring.submission().push_multiple(&entries) }.map_err(|_| io::ErrorKind::OutOfMemory)?;
        let count = entries.len();
        let mut done = 0;
        let mut result = Ok(());
        while done < count {
            match self.ring.submit_and_wait(count - done) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                submitted => drop(submitted?),
            }
            for entry in self.ring.completion() {
                done += 1;
                let wanted = expected.get(entry.user_data() as usize).copied();
                let error = match entry.result() {
                    number if number < 0 => io::Error::from_raw_os_error(-number),
                    number if Some(number as usize) == wanted => continue,
                    _ => io::ErrorKind::UnexpectedEof.into(),
                };
                if result.is_ok() {
                    result = Err(error);
                }
            }
        }
        result
    }
}

/// A message header with what it points to.
struct Answer<'a> {
    header: libc::msghdr,
    _slice: Box<libc::iovec>,
    _control: Option<Box<Control>>,
    _bytes: std::marker::PhantomData<&'a [u8]>,
}

/// Control message with one descriptor, as CMSG_LEN and CMSG_DATA lay it out on 64-bit Linux.
#[repr(C)]
struct Control {
    header: libc::cmsghdr,
    fd: RawFd,
    padding: u32,
}

impl<'a> Answer<'a> {
    fn new(bytes: &'a [u8], fd: Option<BorrowedFd<'a>>) -> Self {
        let mut slice =
            Box::new(libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() });
        let mut control = fd.map(|fd| {
            // SAFETY: a C structure of numbers, for which zero is valid.
            let mut header: libc::cmsghdr = unsafe { std::mem::zeroed() };
            header.cmsg_len = (size_of::<libc::cmsghdr>() + size_of::<RawFd>()) as _;
            (header.cmsg_level, header.cmsg_type) = (libc::SOL_SOCKET, libc::SCM_RIGHTS);
            Box::new(Control { header, fd: fd.as_raw_fd(), padding: 0 })
        });
        // SAFETY: a C structure of numbers and pointers, for which zero is valid.
        let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
        (header.msg_iov, header.msg_iovlen) = (&raw mut *slice, 1);
        if let Some(control) = &mut control {
            header.msg_control = (&raw mut **control).cast();
            header.msg_controllen = size_of::<Control>() as _;
        }
        Self { header, _slice: slice, _control: control, _bytes: std::marker::PhantomData }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::tests::FRAMING;
    use std::io::{Read, Write};
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    fn exchange() -> Option<Exchange> {
        match Exchange::new(&FRAMING) {
            Ok(exchange) => Some(exchange),
            Err(error) => {
                paravane_test_support::skip("exchange", format!("io_uring: {error}"));
                None
            }
        }
    }

    #[test]
    fn a_message_goes_and_its_answer_comes() {
        let Some(mut exchange) = exchange() else { return };
        let (near, mut far) = UnixStream::pair().unwrap();
        for round in 0..100_u8 {
            far.write_all(&[round; 20]).unwrap();
            far.write_all(&[round; 7]).unwrap();
            exchange.run(near.as_fd(), &[12, 8], Some((&[round; 9], None))).unwrap();
            let mut answer = [0; 9];
            far.read_exact(&mut answer).unwrap();
            assert_eq!(answer, [round; 9]);
            exchange.run(near.as_fd(), &[7], None).unwrap();
        }
        near.set_nonblocking(true).unwrap();
        assert_eq!((&near).read(&mut [0]).unwrap_err().kind(), io::ErrorKind::WouldBlock);
    }

    #[test]
    fn a_descriptor_goes_along() {
        let Some(mut exchange) = exchange() else { return };
        let (near, mut far) = UnixStream::pair().unwrap();
        let (mut reader, writer) = std::io::pipe().unwrap();
        far.write_all(&[1; 12]).unwrap();
        exchange.run(near.as_fd(), &[12], Some((b"answer", Some(writer.as_fd())))).unwrap();
        drop(writer);
        let mut connection = crate::socket::Connection::new(far.into(), &FRAMING);
        // It is no message, but its descriptor has arrived.
        let _ = connection.receive();
        let (.., mut fds) = connection.into_parts();
        std::fs::File::from(fds.pop().unwrap()).write_all(b"x").unwrap();
        let mut byte = [0];
        reader.read_exact(&mut byte).unwrap();
        assert_eq!((&byte, fds.len()), (b"x", 0));
    }

    #[test]
    fn nothing_to_take_and_a_full_client_are_errors() {
        let Some(mut exchange) = exchange() else { return };
        let (near, far) = UnixStream::pair().unwrap();
        let error = exchange.run(near.as_fd(), &[12], None).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        let error = loop {
            if let Err(error) = exchange.run(near.as_fd(), &[], Some((&[0; 4096], None))) {
                break error;
            }
        };
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        drop(far);
        let error = exchange.run(near.as_fd(), &[], Some((&[0; 4096], None))).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
    }
}
