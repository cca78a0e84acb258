//! A stream with one deadline for several reads and writes.
//!
//! The timeout of a socket begins anew with each read: a peer that sends a byte now and then would
//! never meet it.
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// A stream until a point in time; `None`: for ever.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Until<'a> {
    pub(crate) stream: &'a UnixStream,
    pub(crate) end: Option<Instant>,
}

impl Until<'_> {
    /// Time that is left; `None`: no limit.
    fn left(&self) -> io::Result<Option<Duration>> {
        let Some(end) = self.end else { return Ok(None) };
        match end.saturating_duration_since(Instant::now()) {
            Duration::ZERO => Err(late()),
            left => Ok(Some(left)),
        }
    }

    /// Makes the next read of the stream end in time.
    ///
    /// # Errors
    /// There is no time left.
    pub(crate) fn before_read(&self) -> io::Result<()> {
        self.stream.set_read_timeout(self.left()?)
    }

    /// Makes the next write of the stream end in time.
    ///
    /// # Errors
    /// There is no time left.
    pub(crate) fn before_write(&self) -> io::Result<()> {
        self.stream.set_write_timeout(self.left()?)
    }
}

impl Read for Until<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.before_read()?;
        let mut stream = self.stream;
        stream.read(buffer).map_err(named)
    }
}

impl Write for Until<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.before_write()?;
        let mut stream = self.stream;
        stream.write(bytes).map_err(named)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn late() -> io::Error {
    io::Error::new(ErrorKind::TimedOut, "the other side is too slow")
}

/// The error of a socket whose time is over, in words.
pub(crate) fn named(error: io::Error) -> io::Error {
    if error.kind() == ErrorKind::WouldBlock { late() } else { error }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_that_sends_now_and_then_meets_the_deadline() {
        let (near, mut far) = UnixStream::pair().unwrap();
        let drip = std::thread::spawn(move || {
            // Until the other end is closed.
            while far.write_all(b"x").is_ok() {
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        let end = Some(Instant::now() + Duration::from_millis(100));
        let error = Until { stream: &near, end }.read_to_end(&mut Vec::new()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        assert!(Until { stream: &near, end }.write(b"x").is_err(), "writes have the same deadline");
        drop(near);
        drip.join().unwrap();
    }
}
