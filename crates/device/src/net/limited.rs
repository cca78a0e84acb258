//! A back end behind a rate limit.
//!
//! ```text
//!   Sender:    held -> Full; room when the time has come
//!   Receiver:  held -> no frame; frames wait, or are dropped, in the inner back end until then
//! ```
//! To the queue handlers it is a busy network. A direction whose limiter has no limit is the inner back
//! end alone: no clock is read. A limit that is set later applies from [`Sender::renew`] and
//! [`Receiver::renew`] on.
use super::back_end::{BackEnd, Incoming, Outgoing, Receiver, Sender, Sent};
use crate::rate::{self, Brake};
use crate::{HostSide, Limiter, Rest, ServeError, WakeSet, WakeSource};
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
        let (inner, limiter) = (self.inner.sender(pair)?, self.transmit.clone());
        let mut sender = LimitedSender { inner, limiter, brake: None, timer: None, full: false };
        sender.renew()?;
        Ok(sender)
    }

    fn receiver(&self, pair: u16) -> io::Result<Self::Receiver> {
        let (inner, limiter) = (self.inner.receiver(pair)?, self.receive.clone());
        let (at_hand, deaf) = (false, false);
        let mut receiver =
            LimitedReceiver { inner, limiter, brake: None, wakes: None, timer: None, at_hand, deaf };
        receiver.renew()?;
        Ok(receiver)
    }
}

/// The brake of a queue whose limit may have changed; `None`: there is no limit.
fn renewed(brake: Option<Brake>, limiter: &Arc<Limiter>) -> io::Result<Option<Brake>> {
    Ok(match brake {
        _ if !limiter.is_on() => None,
        None => Some(Brake::new(limiter.clone())?),
        Some(mut brake) => {
            brake.release();
            Some(brake)
        }
    })
}

/// Adds the timer of a limit, if there is one.
fn timer(brake: &Option<Brake>, wakes: Option<&WakeSet>) -> io::Result<Option<WakeSource>> {
    brake.as_ref().zip(wakes).map(|(brake, wakes)| wakes.add(&brake.timer)).transpose()
}

/// See [`Limited`].
#[derive(Debug)]
pub struct LimitedSender<S> {
    inner: S,
    limiter: Arc<Limiter>,
    /// `None`: no limit.
    brake: Option<Brake>,
    timer: Option<WakeSource>,
    /// The inner back end has no room.
    full: bool,
}

impl<S: Sender> LimitedSender<S> {
    #[inline(never)]
    fn send_limited(&mut self, frame: &Outgoing<'_>) -> Result<Sent, ServeError> {
        let Some(brake) = &mut self.brake else { return self.inner.send(frame) };
        let now = rate::now();
        self.full = false;
        if !brake.lets_go(now) {
            return Ok(Sent::Full);
        }
        let sent = self.inner.send(frame)?;
        match sent {
            // A frame that is dropped costs the host as much.
            Sent::Sent | Sent::Refused => brake.charge(now, frame.len as u64),
            Sent::Full => self.full = true,
        }
        Ok(sent)
    }
}

impl<S: Sender> Sender for LimitedSender<S> {
    #[inline]
    fn send(&mut self, frame: &Outgoing<'_>) -> Result<Sent, ServeError> {
        match self.brake {
            None => self.inner.send(frame),
            Some(_) => self.send_limited(frame),
        }
    }

    fn flush(&mut self) {
        self.inner.flush();
    }

    fn register(&mut self, wakes: Option<&WakeSet>) -> io::Result<()> {
        self.timer = None;
        self.timer = timer(&self.brake, wakes)?;
        self.inner.register(wakes)
    }

    fn rest(&mut self, arm: bool) -> Rest {
        let Some(brake) = &mut self.brake else { return self.inner.rest(arm) };
        // Always: it also clears a timer that has expired.
        let over = brake.rest(arm);
        if self.full { self.inner.rest(arm) } else { over }
    }

    fn is_held(&self) -> bool {
        !self.full && self.brake.as_ref().is_some_and(Brake::holds)
    }

    fn renew(&mut self) -> io::Result<()> {
        self.brake = renewed(self.brake.take(), &self.limiter)?;
        Ok(())
    }

    fn tap(&self) -> Option<BorrowedFd<'_>> {
        // vhost-net would bypass the limit.
        self.brake.is_none().then(|| self.inner.tap())?
    }
}

/// See [`Limited`].
#[derive(Debug)]
pub struct LimitedReceiver<R> {
    inner: R,
    limiter: Arc<Limiter>,
    /// `None`: no limit.
    brake: Option<Brake>,
    wakes: Option<WakeSet>,
    timer: Option<WakeSource>,
    /// There is a frame that has passed the limit.
    at_hand: bool,
    /// Frames do not wake the thread.
    deaf: bool,
}

impl<R: Receiver> Receiver for LimitedReceiver<R> {
    fn fetch(&mut self, most: usize) -> io::Result<usize> {
        let Some(brake) = &mut self.brake else { return self.inner.fetch(most) };
        // A frame that waits for buffers has passed the limit. One at a time: the next one may have
        // to wait.
        if !self.at_hand && !brake.lets_go(rate::now()) {
            return Ok(0);
        }
        let count = self.inner.fetch(1)?;
        self.at_hand = count > 0;
        Ok(count)
    }

    fn frame(&self, number: usize) -> Option<Incoming<'_>> {
        self.inner.frame(number)
    }

    fn done(&mut self, count: usize) {
        if let Some(brake) = &self.brake
            && count > 0
        {
            // More than one only of those that were there before the limit.
            let len = |number| self.inner.frame(number).map_or(0, |frame| frame.bytes.len() as u64);
            let now = rate::now();
            (0..count).for_each(|number| brake.charge(now, len(number)));
            self.at_hand = false;
        }
        self.inner.done(count);
    }

    fn flush(&mut self) {
        self.inner.flush();
    }

    fn register(&mut self, wakes: Option<&WakeSet>) -> io::Result<()> {
        (self.wakes, self.timer, self.deaf) = (wakes.cloned(), None, false);
        self.timer = timer(&self.brake, wakes)?;
        self.inner.register(wakes)
    }

    fn rest(&mut self, arm: bool) -> Rest {
        let Some(brake) = &mut self.brake else { return self.inner.rest(arm) };
        let deaf = brake.holds();
        if arm && deaf != self.deaf {
            // Frames that the limit holds must not wake the thread.
            match self.inner.register(self.wakes.as_ref().filter(|_| !deaf)) {
                Ok(()) => self.deaf = deaf,
                Err(error) => tracing::debug!(%error, "cannot change the wait set of a rate-limited queue"),
            }
        }
        // Always: it also clears a timer that has expired.
        let over = brake.rest(arm);
        if deaf { over } else { self.inner.rest(arm) }
    }

    fn is_held(&self) -> bool {
        self.brake.as_ref().is_some_and(Brake::holds)
    }

    fn renew(&mut self) -> io::Result<()> {
        let is_new = self.brake.is_none();
        self.brake = renewed(self.brake.take(), &self.limiter)?;
        self.at_hand &= !is_new;
        Ok(())
    }

    fn tap(&self) -> Option<BorrowedFd<'_>> {
        self.brake.is_none().then(|| self.inner.tap())?
    }
}
