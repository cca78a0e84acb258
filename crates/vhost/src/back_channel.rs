//! The socket for requests of ours: the configuration has changed, a translation is missing. Nothing waits for its answers,
//! and a client that does not read loses what does not fit; what was missed is told again.
//!
//! ```text
//!   I/O thread: a chain misses --miss--> told not long ago? nothing : IOTLB_MSG, and remembered
//!   session:    a translation comes --answered--> forgotten, and those who wait look again
//! ```
//! A miss is remembered before anybody looks again for what it is about (`AccessGuard::is_translated`), and forgotten after that has
//! come: one of the two sides sees the other.
use crate::message::message;
use crate::socket::{SocketError, send};
use paravane_dma::{Access, Miss};
use paravane_spec::vhost_user::{Iotlb, back_end_request, flags, iotlb};
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

/// Most misses that are remembered; the oldest is forgotten for the next. What is sent of them fits in any socket.
const MOST: usize = 64;
/// A miss that was not answered for so long is told again, when it is met again.
const AGAIN: Duration = Duration::from_millis(100);
/// Most reads of what nobody has asked for, before the socket is given up.
const DISCARDS: usize = 64;
/// Misses are of pages of so many bytes.
const PAGE: u64 = 4096;

/// Our end, shared by the session and its queues.
#[derive(Debug, Default)]
pub(crate) struct BackChannel(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    socket: Option<Arc<OwnedFd>>,
    told: VecDeque<Told>,
    /// A miss could not be told.
    untold: bool,
    /// A miss was told and is not remembered.
    forgotten: bool,
}

#[derive(Clone, Copy, Debug)]
struct Told {
    page: u64,
    access: Access,
    when: Instant,
}

impl BackChannel {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Each change leaves it in order.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The client's socket has come. What was missed before is to be told.
    pub(crate) fn connect(&self, socket: OwnedFd) {
        let mut inner = self.lock();
        inner.socket = Some(Arc::new(socket));
        inner.forget();
        inner.untold = true;
    }

    /// The client's socket. When it is readable or broken, [`BackChannel::discard`].
    pub(crate) fn socket(&self) -> Option<Arc<OwnedFd>> {
        self.lock().socket.clone()
    }

    /// Throws away what has come: no request of ours asks for an answer. Descriptors in it would be held open for as long as it
    /// lies there, the client's end of our connection perhaps. Gives up a socket that is closed.
    pub(crate) fn discard(&self) {
        let mut inner = self.lock();
        let Some(socket) = &inner.socket else { return };
        let mut bytes = [0; 4096];
        // What is more waits for the next time.
        for _ in 0..DISCARDS {
            match recv(socket, &mut bytes[..], RecvFlags::DONTWAIT) {
                Ok((0, _)) => break,
                Ok(_) | Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => return,
                Err(_) => break,
            }
        }
        tracing::debug!("the client's socket for our requests is closed, or flooded");
        inner.socket = None;
    }

    /// The configuration space has changed.
    pub(crate) fn config_changed(&self) {
        self.lock().send(&message(back_end_request::CONFIG_CHANGE_MSG, flags::VERSION, &[]));
    }

    /// An access found no translation, or one that forbids it. Never waits.
    pub(crate) fn miss(&self, miss: Miss) {
        let Miss { addr, access, denied } = miss;
        let page = addr & !(PAGE - 1);
        let mut inner = self.lock();
        if denied {
            inner.send(&iotlb_message(addr, access, iotlb::ACCESS_FAIL));
            return;
        }
        let now = Instant::now();
        let same = |told: &Told| told.page == page && told.access == access;
        match inner.told.iter().position(same) {
            Some(at) if now.duration_since(inner.told[at].when) < AGAIN => return,
            Some(at) => drop(inner.told.remove(at)),
            None => {}
        }
        if !inner.send(&iotlb_message(page, access, iotlb::MISS)) {
            inner.untold = true;
            return;
        }
        if inner.told.len() == MOST {
            inner.told.pop_front();
            inner.forgotten = true;
        }
        inner.told.push_back(Told { page, access, when: now });
    }

    /// A translation of `first..=last` has come: whether somebody may have waited for it.
    pub(crate) fn answered(&self, first: u64, last: u64) -> bool {
        let mut inner = self.lock();
        let before = inner.told.len();
        inner.told.retain(|told| !(first..=last).contains(&told.page));
        std::mem::take(&mut inner.forgotten) | (inner.told.len() < before)
    }

    /// What was told is told again, when it is met again.
    pub(crate) fn forget(&self) {
        self.lock().forget();
    }

    /// Whether a miss could not be told: those who wait are to look again in a while.
    pub(crate) fn has_untold(&self) -> bool {
        let inner = self.lock();
        inner.untold && inner.socket.is_some()
    }

    /// Those who wait look again now.
    pub(crate) fn take_untold(&self) -> bool {
        std::mem::take(&mut self.lock().untold)
    }
}

impl Inner {
    fn forget(&mut self) {
        self.forgotten |= !self.told.is_empty();
        self.told.clear();
    }

    /// Whether it was sent.
    fn send(&mut self, bytes: &[u8]) -> bool {
        let Some(socket) = &self.socket else { return false };
        match send(socket.as_fd(), bytes, None) {
            Ok(()) => true,
            Err(SocketError::NotReading) => false,
            Err(error) => {
                tracing::warn!("the client's socket for our requests is given up: {error}");
                self.socket = None;
                false
            }
        }
    }
}

fn iotlb_message(iova: u64, access: Access, kind: u8) -> Vec<u8> {
    let mut perm = 0;
    for (direction, bit) in [(Access::READ, iotlb::READ), (Access::WRITE, iotlb::WRITE)] {
        if access.contains(direction) {
            perm |= bit;
        }
    }
    let said = Iotlb { iova, perm, kind, ..Iotlb::default() };
    message(back_end_request::IOTLB_MSG, flags::VERSION, said.as_bytes())
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
        assert!(channel.take_untold(), "what was missed before is told now");
        (channel, theirs)
    }

    /// Address, direction and kind of the next message.
    fn next(socket: &UnixStream) -> Option<(u64, u8, u8)> {
        let mut bytes = [0; size_of::<Header>() + size_of::<Iotlb>()];
        (&mut &*socket).read_exact(&mut bytes).ok()?;
        let (header, said) = bytes.split_at(size_of::<Header>());
        let header = Header::read_from_bytes(header).unwrap();
        assert_eq!((header.request, header.flags), (back_end_request::IOTLB_MSG, flags::VERSION));
        let said = Iotlb::read_from_bytes(said).unwrap();
        assert_eq!((said.size, said.user), (0, 0));
        Some((said.iova, said.perm, said.kind))
    }

    #[test]
    fn a_miss_is_told_once_until_it_is_answered() {
        let (channel, socket) = connected();
        channel.miss(MISS);
        channel.miss(Miss { addr: 0x5ff0, ..MISS });
        assert_eq!(next(&socket), Some((0x5000, iotlb::READ, iotlb::MISS)));
        assert_eq!(next(&socket), None);
        assert!(!channel.answered(0x6000, 0x6fff) && channel.answered(0x5000, 0x5fff));
        channel.miss(MISS);
        assert!(next(&socket).is_some());
        // Somebody does not answer.
        std::thread::sleep(AGAIN);
        channel.miss(MISS);
        assert!(next(&socket).is_some());
        channel.miss(Miss { addr: 0x5001, access: Access::READ | Access::WRITE, denied: true });
        assert_eq!(next(&socket), Some((0x5001, 3, iotlb::ACCESS_FAIL)), "of the byte that was refused");
    }

    #[test]
    fn what_is_forgotten_and_what_is_not_told_is_made_up_for() {
        let (channel, socket) = connected();
        for page in 0..=MOST as u64 {
            channel.miss(Miss { addr: page * PAGE, ..MISS });
        }
        assert!(channel.answered(0x1000_0000, 0x1000_0fff), "one was told that is not remembered");
        assert!(!channel.answered(0x1000_0000, 0x1000_0fff));
        // Nobody reads.
        let pages = (1_u64 << 20..).take(1 << 16).find(|page| {
            channel.miss(Miss { addr: page * PAGE, ..MISS });
            channel.has_untold()
        });
        let untold = pages.expect("a socket has an end");
        while next(&socket).is_some() {}
        assert!(channel.take_untold() && !channel.has_untold());
        channel.miss(Miss { addr: untold * PAGE, ..MISS });
        assert_eq!(next(&socket), Some((untold * PAGE, iotlb::READ, iotlb::MISS)));
        drop(socket);
        channel.miss(MISS);
        assert!(!channel.has_untold(), "nobody is there to be told");
    }
}
