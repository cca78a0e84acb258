//! Back channel: the socket for requests to the client.
//!
//! It reports configuration changes and missing translations.
//!
//! No request waits for an answer. A client that does not read loses what does not fit in its
//! socket; a lost miss is reported again.
//!
//! ```text
//!   I/O thread: a chain misses --miss--> reported recently? nothing : send IOTLB_MSG, and record the miss
//!   session:    a translation arrives --answered--> delete the record; waiting queues look again
//! ```
//! A miss is recorded before its queue looks the translation up again
//! (`AccessGuard::is_translated`), and the record is deleted after the translation is in place: so
//! one of the two sides sees the other.
use crate::iotlb::perm;
use crate::message::message;
use paravane_dma::{Access, Miss};
use paravane_export::socket::{SocketError, send};
use paravane_spec::vhost_user::{Iotlb, back_end_request, flags, iotlb};
use parking_lot::Mutex;
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

/// Most misses on record; the oldest makes room.
///
/// All of them fit in the buffer of a socket.
const MAX_RECORDS: usize = 64;
/// A miss that is met again is reported again after this time without an answer.
const REPORT_INTERVAL: Duration = Duration::from_millis(100);
/// Most reads of unexpected data before the socket is closed.
const MAX_DISCARDS: usize = 64;
/// Granularity of misses in bytes.
const PAGE: u64 = 4096;

/// Our end of the back channel, shared by the session and its queues.
#[derive(Debug, Default)]
pub(crate) struct BackChannel(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    socket: Option<Arc<OwnedFd>>,
    reported: VecDeque<ReportedMiss>,
    /// A miss could not be sent.
    unreported: bool,
    /// A reported miss is no longer on record.
    lost_records: bool,
}

#[derive(Clone, Copy, Debug)]
struct ReportedMiss {
    page: u64,
    access: Access,
    when: Instant,
}

impl BackChannel {
    /// Takes the client's socket. Earlier misses are to be reported again.
    pub(crate) fn connect(&self, socket: OwnedFd) {
        let mut inner = self.0.lock();
        inner.socket = Some(Arc::new(socket));
        inner.forget();
        inner.unreported = true;
    }

    /// The client's socket.
    ///
    /// Call [`BackChannel::discard`] when it is readable or broken.
    pub(crate) fn socket(&self) -> Option<Arc<OwnedFd>> {
        self.0.lock().socket.clone()
    }

    /// Discards all received data, because no request asks for an answer.
    ///
    /// Drops a closed socket; returns whether it did.
    ///
    /// Unread descriptors would stay open, the client's end of our connection perhaps.
    pub(crate) fn discard(&self) -> bool {
        let mut inner = self.0.lock();
        let Some(socket) = &inner.socket else { return false };
        let mut bytes = [0; 4096];
        // The rest waits for the next call.
        for _ in 0..MAX_DISCARDS {
            match recv(socket, &mut bytes[..], RecvFlags::DONTWAIT) {
                Ok((0, _)) => break,
                Ok(_) | Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => return false,
                Err(_) => break,
            }
        }
        inner.socket = None;
        true
    }

    /// Reports a change of the configuration space.
    pub(crate) fn config_changed(&self) {
        self.0.lock().send(&message(back_end_request::CONFIG_CHANGE_MSG, flags::VERSION, &[]));
    }

    /// Reports an access that found no translation, or one that forbids it.
    ///
    /// Never waits.
    pub(crate) fn miss(&self, miss: Miss) {
        self.miss_at(miss, Instant::now());
    }

    fn miss_at(&self, miss: Miss, now: Instant) {
        let Miss { addr, access, denied } = miss;
        let page = addr & !(PAGE - 1);
        let mut inner = self.0.lock();
        if denied {
            inner.send(&iotlb_message(addr, access, iotlb::ACCESS_FAIL));
            return;
        }
        let same = |reported: &ReportedMiss| reported.page == page && reported.access == access;
        match inner.reported.iter().position(same) {
            Some(at) if now.duration_since(inner.reported[at].when) < REPORT_INTERVAL => return,
            Some(at) => drop(inner.reported.remove(at)),
            None => {}
        }
        if !inner.send(&iotlb_message(page, access, iotlb::MISS)) {
            inner.unreported = true;
            return;
        }
        if inner.reported.len() == MAX_RECORDS {
            inner.reported.pop_front();
            inner.lost_records = true;
        }
        inner.reported.push_back(ReportedMiss { page, access, when: now });
    }

    /// Deletes the records of `first..=last`.
    ///
    /// Returns whether a queue may wait for this translation.
    pub(crate) fn answered(&self, first: u64, last: u64) -> bool {
        let mut inner = self.0.lock();
        let before = inner.reported.len();
        inner.reported.retain(|reported| !(first..=last).contains(&reported.page));
        std::mem::take(&mut inner.lost_records) | (inner.reported.len() < before)
    }

    /// Deletes all records, so that a miss that is met again is reported again.
    pub(crate) fn forget(&self) {
        self.0.lock().forget();
    }

    /// Whether a miss could not be reported and the client may read it later.
    pub(crate) fn has_unreported(&self) -> bool {
        let inner = self.0.lock();
        inner.unreported && inner.socket.is_some()
    }

    /// Whether waiting queues must look again; clears the mark.
    pub(crate) fn take_unreported(&self) -> bool {
        std::mem::take(&mut self.0.lock().unreported)
    }
}

impl Inner {
    fn forget(&mut self) {
        self.lost_records |= !self.reported.is_empty();
        self.reported.clear();
    }

    /// Returns whether the message was sent.
    fn send(&mut self, bytes: &[u8]) -> bool {
        let Some(socket) = &self.socket else { return false };
        match send(socket.as_fd(), bytes, None) {
            Ok(()) => true,
            Err(SocketError::NotReading) => false,
            Err(error) => {
                tracing::warn!("dropping the back channel: {error}");
                self.socket = None;
                false
            }
        }
    }
}

fn iotlb_message(iova: u64, access: Access, kind: u8) -> Vec<u8> {
    let payload = Iotlb { iova, perm: perm(access), kind, ..Iotlb::default() };
    message(back_end_request::IOTLB_MSG, flags::VERSION, payload.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use paravane_spec::vhost_user::Header;
    use std::io::Read;
    use std::os::unix::net::UnixStream;
    use zerocopy::FromBytes;

    const MISS: Miss = Miss { addr: 0x5008, access: Access::READ, denied: false };

    fn connected() -> (BackChannel, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        theirs.set_nonblocking(true).unwrap();
        let channel = BackChannel::default();
        channel.connect(ours.into());
        assert!(channel.take_unreported(), "earlier misses are reported now");
        (channel, theirs)
    }

    /// Address, direction and type of the next message.
    fn next(socket: &UnixStream) -> Option<(u64, u8, u8)> {
        let mut bytes = [0; size_of::<Header>() + size_of::<Iotlb>()];
        (&mut &*socket).read_exact(&mut bytes).ok()?;
        let (header, payload) = bytes.split_at(size_of::<Header>());
        let header = Header::read_from_bytes(header).unwrap();
        assert_eq!((header.request, header.flags), (back_end_request::IOTLB_MSG, flags::VERSION));
        let payload = Iotlb::read_from_bytes(payload).unwrap();
        assert_eq!((payload.size, payload.user), (0, 0));
        Some((payload.iova, payload.perm, payload.kind))
    }

    #[test]
    fn a_miss_is_reported_once_until_it_is_answered() {
        let (channel, socket) = connected();
        let mut now = Instant::now();
        channel.miss_at(MISS, now);
        channel.miss_at(Miss { addr: 0x5ff0, ..MISS }, now + REPORT_INTERVAL / 2);
        assert_eq!(next(&socket), Some((0x5000, iotlb::READ, iotlb::MISS)));
        assert_eq!(next(&socket), None);
        assert!(!channel.answered(0x6000, 0x6fff) && channel.answered(0x5000, 0x5fff));
        channel.miss_at(MISS, now);
        assert!(next(&socket).is_some());
        // The client does not answer.
        now += REPORT_INTERVAL;
        channel.miss_at(MISS, now);
        assert!(next(&socket).is_some());
        channel.miss(Miss { addr: 0x5001, access: Access::READ | Access::WRITE, denied: true });
        assert_eq!(next(&socket), Some((0x5001, 3, iotlb::ACCESS_FAIL)), "the refused byte, not its page");
    }

    #[test]
    fn lost_records_and_unsent_misses_are_reported_again() {
        let (channel, socket) = connected();
        for page in 0..=MAX_RECORDS as u64 {
            channel.miss(Miss { addr: page * PAGE, ..MISS });
        }
        assert!(channel.answered(0x1000_0000, 0x1000_0fff), "a reported miss is off the record");
        assert!(!channel.answered(0x1000_0000, 0x1000_0fff));
        // The client does not read.
        let pages = (1_u64 << 20..).take(1 << 16).find(|page| {
            channel.miss(Miss { addr: page * PAGE, ..MISS });
            channel.has_unreported()
        });
        let unreported = pages.expect("the socket's buffer is finite");
        while next(&socket).is_some() {}
        assert!(channel.take_unreported() && !channel.has_unreported());
        channel.miss(Miss { addr: unreported * PAGE, ..MISS });
        assert_eq!(next(&socket), Some((unreported * PAGE, iotlb::READ, iotlb::MISS)));
        drop(socket);
        channel.miss(MISS);
        assert!(!channel.has_unreported(), "no client is connected");
    }
}
