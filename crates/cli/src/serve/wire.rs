//! Messages between two processes of this program, with records and descriptors.
//!
//! ```text
//!   header: magic, length of the message, length of the record, number of descriptors (u32 each)
//!   one byte with up to 253 descriptors (SCM_RIGHTS), repeated until all are sent
//!   message (JSON)
//!   record
//! ```
//! Numbers are little-endian. Descriptors come first, so that no other byte carries any.
use super::deadline::{Until, named};
use crate::fds;
use crate::printable::printable_json;
use parking_lot::Mutex;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io::{self, ErrorKind, Read, Write};
use std::marker::PhantomData;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// First bytes of each message. No JSON begins so.
const MAGIC: u32 = u32::from_le_bytes(*b"PVHO");
const HEADER: usize = 16;
/// Most descriptors of a message: more than those of 256 queues and 64 memory regions.
const MAX_FDS: usize = 4096;
/// Maximum length of a message or a record in bytes.
const MAX_LEN: usize = 64 << 20;
/// The same for messages of a client of the control socket, record included.
const MAX_LEN_OF_CLIENT: usize = 64 << 10;
/// Those of an overlay, and some to spare.
const MAX_FDS_OF_CLIENT: usize = 8;
/// Time that the kernel may refuse to have more descriptors under way.
const TOO_MANY_REFS: Duration = Duration::from_secs(10);

/// A connection between two processes, for messages `M`.
#[derive(Debug)]
pub(crate) struct Wire<M> {
    stream: UnixStream,
    /// The other side is a client of the control socket, not a daemon.
    is_client: bool,
    /// What it says is printed.
    prints: bool,
    times: Mutex<Times>,
    sending: Mutex<()>,
    messages: PhantomData<fn(M)>,
}

/// How long the other side is waited for.
#[derive(Clone, Copy, Debug)]
struct Times {
    /// For each message; `None`: no limit.
    patience: Option<Duration>,
    /// For all of them.
    end: Option<Instant>,
}

/// A message with what it carries.
#[derive(Debug)]
pub(crate) struct Parcel<M> {
    pub(crate) message: M,
    pub(crate) record: Vec<u8>,
    pub(crate) fds: Vec<OwnedFd>,
}

impl<M: Serialize + DeserializeOwned> Wire<M> {
    /// Uses a stream; each message takes `patience` at most, in either direction.
    pub(crate) fn new(stream: UnixStream, patience: Duration) -> io::Result<Self> {
        stream.set_nonblocking(false)?;
        let times = Mutex::new(Times { patience: Some(patience), end: None });
        let (sending, messages) = (Mutex::new(()), PhantomData);
        Ok(Self { stream, is_client: false, prints: false, times, sending, messages })
    }

    /// The other side is a client: all of its messages together take `time` at most, and each of them
    /// has few bytes and descriptors.
    pub(crate) fn of_a_client(mut self, time: Duration) -> Self {
        self.is_client = true;
        self.end_within(time);
        self
    }

    /// Makes strings of the other side printable.
    pub(crate) fn printable(mut self) -> Self {
        self.prints = true;
        self
    }

    /// Changes the longest wait for a message; `None`: no limit.
    pub(crate) fn wait_at_most(&self, patience: Option<Duration>) {
        self.times.lock().patience = patience;
    }

    /// Changes the longest time for all messages from now on.
    pub(crate) fn end_within(&self, time: Duration) {
        self.times.lock().end = Instant::now().checked_add(time);
    }

    /// The stream, for one message that begins now.
    fn message(&self) -> Until<'_> {
        let Times { patience, end } = *self.times.lock();
        let own = patience.and_then(|patience| Instant::now().checked_add(patience));
        let end = [own, end].into_iter().flatten().min();
        Until { stream: &self.stream, end }
    }

    /// Sends a message without record and descriptors.
    pub(crate) fn say(&self, message: &M) -> io::Result<()> {
        self.send(message, &[], &[])
    }

    /// Sends a message.
    pub(crate) fn send(&self, message: &M, record: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let _alone = self.sending.lock();
        let text = serde_json::to_vec(message)?;
        if text.len() > MAX_LEN || record.len() > MAX_LEN || fds.len() > MAX_FDS {
            return Err(io::Error::new(ErrorKind::InvalidInput, "more than a message can carry"));
        }
        let mut header = Vec::with_capacity(HEADER);
        for number in [MAGIC, text.len() as u32, record.len() as u32, fds.len() as u32] {
            header.extend_from_slice(&number.to_le_bytes());
        }
        let mut stream = self.message();
        stream.write_all(&header)?;
        for fds in fds.chunks(fds::MOST) {
            stream.before_write()?;
            self.send_fds(fds).map_err(named)?;
        }
        stream.write_all(&text)?;
        stream.write_all(record)
    }

    fn send_fds(&self, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let deadline = Instant::now() + TOO_MANY_REFS;
        loop {
            match fds::send(&self.stream, &[0], fds, SendFlags::empty()) {
                // The other daemon has to receive some first.
                Err(Errno::TOOMANYREFS) if Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                sent => return Ok(sent?),
            }
        }
    }

    /// Receives a message. `None`: the other daemon has closed the connection.
    pub(crate) fn receive(&self) -> io::Result<Option<Parcel<M>>> {
        let invalid = |what: &'static str| io::Error::new(ErrorKind::InvalidData, what);
        let mut header = [0; HEADER];
        let mut stream = self.message();
        let first = loop {
            match stream.read(&mut header) {
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::ConnectionReset => return Ok(None),
                result => break result?,
            }
        };
        if first == 0 {
            return Ok(None);
        }
        stream.read_exact(&mut header[first..])?;
        let (numbers, _) = header.as_chunks();
        let [magic, text, record, count] = std::array::from_fn(|at| u32::from_le_bytes(numbers[at]));
        let [text, record, count] = [text, record, count].map(|number| number as usize);
        if magic != MAGIC {
            return Err(invalid("it does not answer as a daemon of this version"));
        }
        let is_too_large = match self.is_client {
            true => text.saturating_add(record) > MAX_LEN_OF_CLIENT || count > MAX_FDS_OF_CLIENT,
            false => text > MAX_LEN || record > MAX_LEN || count > MAX_FDS,
        };
        if is_too_large {
            return Err(invalid("a message is too large"));
        }
        let mut fds = Vec::with_capacity(count);
        while fds.len() < count {
            let before = fds.len();
            stream.before_read()?;
            self.receive_fds(&mut fds, count - before).map_err(named)?;
            if fds.len() == before || fds.len() > count {
                return Err(invalid("a message has another number of descriptors than it says"));
            }
        }
        let text = receive_bytes(&mut stream, text)?;
        let record = receive_bytes(&mut stream, record)?;
        let text = if self.prints { printable_json(&text) } else { text.into() };
        let message =
            serde_json::from_slice(&text).map_err(|error| io::Error::new(ErrorKind::InvalidData, error))?;
        Ok(Some(Parcel { message, record, fds }))
    }

    /// Receives at most about `wanted` descriptors. The kernel closes others.
    fn receive_fds(&self, fds: &mut Vec<OwnedFd>, wanted: usize) -> io::Result<()> {
        let wanted = wanted.min(fds::MOST);
        let received = fds::receive(&self.stream, &mut [0], wanted, RecvFlags::empty())?;
        let is_cut = received.fds_cut && received.fds.len() < wanted;
        fds.extend(received.fds);
        if is_cut {
            // RLIMIT_NOFILE: the kernel has closed the others.
            return Err(io::Error::other("too few free descriptors: raise LimitNOFILE="));
        }
        Ok(())
    }
}

/// Allocates for what has arrived only.
fn receive_bytes(stream: &mut Until<'_>, count: usize) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    stream.take(count as u64).read_to_end(&mut bytes)?;
    if bytes.len() < count {
        return Err(ErrorKind::UnexpectedEof.into());
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    type Message = String;

    fn pair() -> (Wire<Message>, UnixStream) {
        let (near, far) = UnixStream::pair().unwrap();
        (Wire::new(near, Duration::from_secs(20)).unwrap(), far)
    }

    #[test]
    fn records_and_descriptors_arrive_in_order() {
        let (near, far) = pair();
        let far = Wire::<Message>::new(far, Duration::from_secs(20)).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let files: Vec<_> = (0..600_u64)
            .map(|index| {
                let file = std::fs::File::create(folder.path().join(index.to_string())).unwrap();
                file.set_len(index).unwrap();
                file
            })
            .collect();
        let record: Vec<u8> = (0..1_000_000).map(|index| index as u8).collect();
        let sent = record.clone();
        let sender = std::thread::spawn(move || {
            let fds: Vec<_> = files.iter().map(AsFd::as_fd).collect();
            near.send(&"device".to_owned(), &sent, &fds).unwrap();
            near.say(&"end".to_owned()).unwrap();
        });
        let Parcel { message, record: received, fds } = far.receive().unwrap().unwrap();
        assert_eq!(message, "device");
        assert!(received == record);
        let sizes: Vec<u64> =
            fds.into_iter().map(|fd| std::fs::File::from(fd).metadata().unwrap().len()).collect();
        assert!(sizes.iter().copied().eq(0..600));
        let end = far.receive().unwrap().unwrap();
        assert!(end.message == "end" && end.record.is_empty() && end.fds.is_empty());
        sender.join().unwrap();
        assert!(far.receive().unwrap().is_none());
    }

    #[test]
    fn a_client_has_few_bytes_descriptors_and_little_time() {
        let client = |header: [u32; 3], fds: usize, time| {
            let (near, far) = UnixStream::pair().unwrap();
            let near = Wire::<Message>::new(near, Duration::from_secs(20)).unwrap();
            let near = near.of_a_client(Duration::from_millis(time));
            let numbers = [MAGIC].into_iter().chain(header);
            (&far).write_all(&numbers.flat_map(u32::to_le_bytes).collect::<Vec<_>>()).unwrap();
            let far = Wire::<Message>::new(far, Duration::from_secs(20)).unwrap();
            let file = std::fs::File::open("/dev/null").unwrap();
            if fds > 0 {
                far.send_fds(&vec![file.as_fd(); fds]).unwrap();
            }
            let error = near.receive().unwrap_err();
            (near, far, error)
        };
        for header in [[64 << 10, 1, 0], [0, 64 << 10 | 1, 0], [2, 0, 9]] {
            let (.., error) = client(header, 0, 60_000);
            assert!(error.to_string().contains("too large"), "{error}");
        }
        // The kernel closes what is more than was said.
        let (.., error) = client([2, 0, 2], 253, 60_000);
        assert!(error.to_string().contains("another number of descriptors"), "{error}");
        // Silence, or a byte now and then, does not prolong it, nor does another message.
        let (near, far, error) = client([64 << 10, 0, 0], 0, 100);
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        far.say(&"late".to_owned()).unwrap();
        assert_eq!(near.receive().unwrap_err().kind(), ErrorKind::TimedOut);
        near.end_within(Duration::from_secs(20));
        near.receive().unwrap();
    }

    #[test]
    fn other_answers_and_cut_messages_are_errors() {
        let refused = |bytes: &[u8]| {
            let (near, mut far) = pair();
            far.write_all(bytes).unwrap();
            drop(far);
            near.receive().unwrap_err().to_string()
        };
        assert!(refused(b"{\"error\": \"invalid request\"}\n").contains("of this version"));
        let header = |numbers: [u32; 3]| {
            let numbers = [MAGIC].into_iter().chain(numbers);
            numbers.flat_map(u32::to_le_bytes).collect::<Vec<u8>>()
        };
        refused(&header([3, 0, 0])[..7]);
        refused(&header([3, 0, 0]));
        assert!(refused(&header([u32::MAX, 0, 0])).contains("too large"));
        assert!(refused(&header([0, 0, u32::MAX])).contains("too large"));
        let mut without = header([5, 0, 1]);
        without.extend_from_slice(b"x\"end\"");
        assert!(refused(&without).contains("another number of descriptors"));
    }
}
