//! A back end that takes and gives no more than a limit allows.
//!
//! ```text
//!   Sender:    held -> Full, and room when the time has come
//!   Receiver:  held -> no frame, and one again when the time has come; meanwhile frames wait, or are dropped, behind it
//! ```
//! The handlers know nothing of it: to them it is a network that is busy.
use super::back_end::{BackEnd, Incoming, Outgoing, Receiver, Sender, Sent};
use crate::rate::{self, Brake};
use crate::{Limiter, ServeError};
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// A back end with limits, all pairs of queues together. What counts of a frame is its bytes, without the header.
#[derive(Debug)]
pub struct Limited<B> {
    inner: B,
    transmit: Arc<Limiter>,
    receive: Arc<Limiter>,
}

impl<B> Limited<B> {
    /// `inner`, with one limit for what the driver sends and one for what it receives. They may be the same.
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

    fn mtu(&self) -> Option<u32> {
        self.inner.mtu()
    }

    fn accept(&self, features: u64) -> io::Result<()> {
        self.inner.accept(features)
    }

    fn use_pairs(&self, pairs: u16) -> io::Result<()> {
        self.inner.use_pairs(pairs)
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
    /// It is the back end that has no room.
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
            Sent::Sent => self.brake.charge(now, frame.len as u64),
            Sent::Full => self.full = true,
            Sent::Refused => {}
        }
        Ok(sent)
    }

    fn flush(&mut self) {
        self.inner.flush();
    }

    fn listen(&mut self) -> bool {
        // Both: the brake, if it does not hold, is not readable then.
        let over = self.brake.listen();
        if self.full { self.inner.listen() } else { over }
    }

    fn has_room(&self) -> Option<bool> {
        if self.full { self.inner.has_room() } else { Some(self.brake.is_over()) }
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.brake.fd())
    }
    // No `tap`: who is given that goes past the limit.
}

/// See [`Limited`].
#[derive(Debug)]
pub struct LimitedReceiver<R> {
    inner: R,
    brake: Brake,
    /// Bytes of the frame at hand; 0 if there is none.
    at_hand: u64,
    /// Frames do not wake us.
    deaf: bool,
}

impl<R: Receiver> Receiver for LimitedReceiver<R> {
    fn fetch(&mut self, _most: usize) -> io::Result<usize> {
        // A frame that waits for buffers has been let in. One at a time: the next one may have to wait.
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
        // Frames that may not come in yet are no reason to wake up, and there may be many.
        let deaf = self.brake.holds();
        if deaf != self.deaf {
            match self.brake.hear(self.inner.fd(), !deaf) {
                Ok(()) => self.deaf = deaf,
                Err(error) => tracing::debug!(%error, "a limited queue cannot choose what it hears"),
            }
        }
        // Both: the brake, if it does not hold, is not readable then.
        let over = self.brake.listen();
        if deaf { over } else { self.inner.listen() }
    }

    fn has_frame(&self) -> Option<bool> {
        if self.brake.holds() { Some(self.brake.is_over()) } else { self.inner.has_frame() }
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.brake.fd()
    }
}
