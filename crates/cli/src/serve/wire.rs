//! Messages between two processes of this program, with records and descriptors.
//!
//! ```text
//!   header: magic, length of the message, length of the record, number of descriptors (u32 each)
//!   one byte with up to 253 descriptors (SCM_RIGHTS), repeated until all are sent
//!   message (JSON)
//!   record
//! ```
//! Numbers are little-endian. Descriptors come first, so that no other byte carries any.
use rustix::io::{Errno, IoSlice, IoSliceMut};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io::{self, ErrorKind, Read, Write};
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// First bytes of each message. No JSON begins so.
const MAGIC: u32 = u32::from_le_bytes(*b"PVHO");
const HEADER: usize = 16;
/// Most descriptors that the kernel takes at once (SCM_MAX_FD).
const MAX_FDS_AT_ONCE: usize = 253;
/// Most descriptors of a message: more than those of 256 queues and 64 memory regions.
const MAX_FDS: usize = 4096;
/// Maximum length of a message or a record in bytes.
const MAX_LEN: usize = 64 << 20;
/// Time that the kernel may refuse to have more descriptors under way.
const TOO_MANY_REFS: Duration = Duration::from_secs(10);

/// A connection between two processes, for messages `M`.
#[derive(Debug)]
pub(crate) struct Wire<M> {
    stream: UnixStream,
    sending: Mutex<()>,
    messages: PhantomData<fn(M)>,
}

/// A message with what it carries.
#[derive(Debug)]
pub(crate) struct Parcel<M> {
    pub(crate) message: M,
    pub(crate) record: Vec<u8>,
    pub(crate) fds: Vec<OwnedFd>,
}

impl<M: Serialize + DeserializeOwned> Wire<M> {
    /// Uses a stream; either direction waits for `patience` at most.
    pub(crate) fn new(stream: UnixStream, patience: Duration) -> io::Result<Self> {
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(patience))?;
        stream.set_write_timeout(Some(patience))?;
        Ok(Self { stream, sending: Mutex::new(()), messages: PhantomData })
    }

    /// Changes the longest wait for a message; `None`: no limit.
    pub(crate) fn wait_at_most(&self, patience: Option<Duration>) -> io::Result<()> {
        self.stream.set_read_timeout(patience)
    }

    /// Sends a message without record and descriptors.
    pub(crate) fn say(&self, message: &M) -> io::Result<()> {
        self.send(message, &[], &[])
    }

    /// Sends a message.
    pub(crate) fn send(&self, message: &M, record: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let _alone = self.sending.lock().unwrap_or_else(PoisonError::into_inner);
        let text = serde_json::to_vec(message)?;
        if text.len() > MAX_LEN || record.len() > MAX_LEN || fds.len() > MAX_FDS {
            return Err(io::Error::new(ErrorKind::InvalidInput, "more than a message can carry"));
        }
        let mut header = Vec::with_capacity(HEADER);
        for number in [MAGIC, text.len() as u32, record.len() as u32, fds.len() as u32] {
            header.extend_from_slice(&number.to_le_bytes());
        }
        let mut stream = &self.stream;
        stream.write_all(&header)?;
        for fds in fds.chunks(MAX_FDS_AT_ONCE) {
            self.send_fds(fds)?;
        }
        stream.write_all(&text)?;
        stream.write_all(record)
    }

    fn send_fds(&self, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS_AT_ONCE))];
        let deadline = Instant::now() + TOO_MANY_REFS;
        loop {
            let mut control = SendAncillaryBuffer::new(&mut space);
            control.push(SendAncillaryMessage::ScmRights(fds));
            match sendmsg(&self.stream, &[IoSlice::new(&[0])], &mut control, SendFlags::NOSIGNAL) {
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => {}
                // The other daemon has to receive some first.
                Err(Errno::TOOMANYREFS) if Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Receives a message. `None`: the other daemon has closed the connection.
    pub(crate) fn receive(&self) -> io::Result<Option<Parcel<M>>> {
        let invalid = |what: &'static str| io::Error::new(ErrorKind::InvalidData, what);
        let mut header = [0; HEADER];
        let mut stream = &self.stream;
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
        let [magic, text, record, count] = std::array::from_fn(|index| {
            let at = index * 4;
            u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]])
        });
        let [text, record, count] = [text, record, count].map(|number| number as usize);
        if magic != MAGIC {
            return Err(invalid("it does not answer as a daemon of this version"));
        }
        if text > MAX_LEN || record > MAX_LEN || count > MAX_FDS {
            return Err(invalid("a message is too large"));
        }
        let mut fds = Vec::with_capacity(count);
        while fds.len() < count {
            let before = fds.len();
            self.receive_fds(&mut fds)?;
            if fds.len() == before || fds.len() > count {
                return Err(invalid("a message has another number of descriptors than it says"));
            }
        }
        let text = self.receive_bytes(text)?;
        let record = self.receive_bytes(record)?;
        let message =
            serde_json::from_slice(&text).map_err(|error| io::Error::new(ErrorKind::InvalidData, error))?;
        Ok(Some(Parcel { message, record, fds }))
    }

    /// Allocates for what has arrived only.
    fn receive_bytes(&self, count: usize) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        (&self.stream).take(count as u64).read_to_end(&mut bytes)?;
        if bytes.len() < count {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        Ok(bytes)
    }

    fn receive_fds(&self, fds: &mut Vec<OwnedFd>) -> io::Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS_AT_ONCE))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut byte = [0];
        let received = loop {
            let mut slices = [IoSliceMut::new(&mut byte)];
            match recvmsg(self.stream.as_fd(), &mut slices, &mut control, RecvFlags::CMSG_CLOEXEC) {
                Err(Errno::INTR) => {}
                result => break result?,
            }
        };
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(received) = message {
                fds.extend(received);
            }
        }
        if received.flags.contains(ReturnFlags::CTRUNC) {
            // RLIMIT_NOFILE: the kernel has closed the others.
            return Err(io::Error::other("too few free descriptors: raise LimitNOFILE="));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
