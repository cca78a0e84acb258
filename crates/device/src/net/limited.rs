//! A back end behind a rate limit.
//!
//! ```text
//!   Sender:    held -> Full; room when the time has come
//!   Receiver:  held -> no frame; frames wait, or are dropped, in the inner back end until then
//! ```
//! To the queue handlers it is a busy network.
use super::back_end::{BackEnd, Incoming, Outgoing, Receiver, Sender, Sent};
use crate::rate::{self, Brake};
use crate::{HostSide, Limiter, ServeError};
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// A back end with a rate limit for each direction, shared by all queue pairs.
///
/// Counts the bytes of frames, without the headers.
#[derive(Debug)]
pub struct Limited<B> {
    inner: B,
    transmit: Arc<Limiter>,
    receive: Arc<Limiter>,
}

impl<B> Limited<B> {
    /// Limits `inner`. The same limiter may serve both directions.
    pub fn new(inner: B, transmit: Arc<Limiter>, receive: Arc<Limiter>) -> Self {
        Self { inner, transmit, receive }
    }
}

impl<B: BackEnd> BackEnd for Limited<B> {
    type Sender = LimitedSender<B::Sender>;
    type Receiver = LimitedReceiver<B::Receiver>;

    fn pairs(&self) -> u16 {
        self.inner.pairs()
    }

    fn offloads(&self) -> u64 {
        self.inner.offloads()
    }

    fn fds(&self) -> Vec<BorrowedFd<'_>> {
        self.inner.fds()
    }

    fn mtu(&self) -> Option<u32> {
        self.inner.mtu()
    }

    fn accept(&self, features: u64) -> io::Result<()> {
        self.inner.accept(features)
    }

    fn use_pairs(&self, pairs: u16) -> io::Result<()> {
        self.inner.use_pairs(pairs)
    }

    fn look(&self) -> HostSide {
        self.inner.look()
    }

    fn tell_change(&self, told: Box<dyn Fn() + Send + Sync>) {
        self.inner.tell_change(told);
    }

    fn is_up(&self) -> bool {
        self.inner.is_up()
    }

    fn has_carrier(&self) -> bool {
        self.inner.has_carrier()
    }

    fn inject(&self, frame: &[u8]) -> io::Result<()> {
        self.inner.inject(frame)
    }

    fn sender(&self, pair: u16) -> io::Result<Self::Sender> {
        let inner = self.inner.sender(pair)?;
        let brake = Brake::new(self.transmit.clone(), inner.fd())?;
        Ok(LimitedSender { inner, brake, full: false })
    }

    fn receiver(&self, pair: u16) -> io::Result<Self::Receiver> {
        let inner = self.inner.receiver(pair)?;
        let brake = Brake::new(self.receive.clone(), Some(inner.fd()))?;
        Ok(LimitedReceiver { inner, brake, at_hand: 0, deaf: false })
    }
}

/// See [`Limited`].
#[derive(Debug)]
pub struct LimitedSender<S> {
    inner: S,
    brake: Brake,
    /// The inner back end has no room.
    full: bool,
}

impl<S: Sender> Sender for LimitedSender<S> {
    fn send(&mut self, frame: &Outgoing<'_>) -> Result<Sent, ServeError> {
        let now = rate::now();
        self.full = false;
        if !self.brake.lets_go(now) {
            return Ok(Sent::Full);
        }
        let sent = self.inner.send(frame)?;
        match sent {
            // A frame that is dropped costs the host as much.
            Sent::Sent | Sent::Refused => self.brake.charge(now, frame.len as u64),
            Sent::Full => self.full = true,
        }
        Ok(sent)
    }

    fn flush(&mut self) {
        self.inner.flush();
    }

    fn listen(&mut self) -> bool {
        // Always: it also clears a timer that has expired.
        let over = self.brake.listen();
        if self.full { self.inner.listen() } else { over }
    }

    fn has_room(&self) -> Option<bool> {
        if self.full { self.inner.has_room() } else { Some(self.brake.is_over()) }
    }

    fn is_held(&self) -> bool {
        !self.full && self.brake.holds()
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.brake.fd())
    }
    // No `tap`: vhost-net would bypass the limit.
}

/// See [`Limited`].
#[derive(Debug)]
pub struct LimitedReceiver<R> {
    inner: R,
    brake: Brake,
    /// Bytes of the frame at hand; 0 if there is none.
    at_hand: u64,
    /// Frames do not signal the descriptor.
    deaf: bool,
}

impl<R: Receiver> Receiver for LimitedReceiver<R> {
    fn fetch(&mut self, _most: usize) -> io::Result<usize> {
        // A frame that waits for buffers has passed the limit. One at a time: the next one may have
        // to wait.
        if self.at_hand == 0 && !self.brake.lets_go(rate::now()) {
            return Ok(0);
        }
        let count = self.inner.fetch(1)?;
        self.at_hand = self.inner.frame(0).map_or(0, |frame| frame.bytes.len() as u64);
        Ok(count)
    }

    fn frame(&self, number: usize) -> Option<Incoming<'_>> {
        self.inner.frame(number)
    }

    fn done(&mut self, count: usize) {
        if count > 0 {
            self.brake.charge(rate::now(), std::mem::take(&mut self.at_hand));
            self.inner.done(count);
        }
    }

    fn flush(&mut self) {
        self.inner.flush();
    }

    fn listen(&mut self) -> bool {
        // Frames that the limit holds must not wake the thread.
        let deaf = self.brake.holds();
        if deaf != self.deaf {
            match self.brake.hear(self.inner.fd(), !deaf) {
                Ok(()) => self.deaf = deaf,
                Err(error) => tracing::debug!(%error, "cannot change the wait set of a rate-limited queue"),
            }
        }
        // Always: it also clears a timer that has expired.
        let over = self.brake.listen();
        if deaf { over } else { self.inner.listen() }
    }

    fn has_frame(&self) -> Option<bool> {
        if self.brake.holds() { Some(self.brake.is_over()) } else { self.inner.has_frame() }
    }

    fn is_held(&self) -> bool {
        self.brake.holds()
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.brake.fd()
    }
}
