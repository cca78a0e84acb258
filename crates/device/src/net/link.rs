//! A link in this process, between two cards, or from a card to an echo.
//!
//! ```text
//!  Sender --- free buffer -> copy in -> lane ---> Receiver -> copy out -> buffer free again ---.
//!    ^  none is free: Full, asleep on `room`          | lane is empty: asleep on `arrived`      |
//!    '------------------------------------------------------------------------------------------'
//! ```
//! An echo returns each frame at once, in the sender's thread, or by a thread of the host
//! ([`super::echo_peer`]).
//!
//! When a [lane](super::lane) is full, the transmit queue waits, so no frame is lost between two
//! drivers with running queues. Without a receiver, frames are dropped; while its end is held
//! ([`LinkEnd::hold`]), they wait.
//!
//! A link offers no segmentation: a large MTU has the same effect. Checksums stay partial between
//! drivers that both accepted that; for others the link completes them.
use super::back_end::{BackEnd, Incoming, Outgoing, Receiver, Sender, Sent};
use super::echo_peer::EchoPeer;
use super::header::{EncodedHeader, complete_checksum};
use super::lane::{Buffer, LANE, Lane, Port};
use crate::{Rest, ServeError, WakeSet, WakeSource};
use paravane_spec::net::{ETH_HEADER, F_CSUM, F_GUEST_CSUM, MAX_FRAME};
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// One end of a link: a [`BackEnd`] without a host network.
#[derive(Debug)]
pub struct LinkEnd {
    near: Arc<Port>,
    far: Arc<Port>,
    /// The far side is the near side: each frame returns.
    echo: Option<Echo>,
    /// The thread at the far side, if that is not a card.
    echo_peer: Option<EchoPeer>,
}

/// Configuration of an echo.
#[derive(Clone, Copy, Debug)]
struct Echo {
    /// Length of each answer in bytes; that of the frame if `None`.
    len: Option<usize>,
}

impl LinkEnd {
    /// Creates both ends of a link, with up to `pairs` pairs of queues each.
    ///
    /// # Errors
    /// The process has no file descriptors left.
    pub fn pair(pairs: u16) -> io::Result<(Self, Self)> {
        let (a, b) = (Port::new(pairs)?, Port::new(pairs)?);
        let one = Self { near: Arc::clone(&a), far: Arc::clone(&b), echo: None, echo_peer: None };
        Ok((one, Self { near: b, far: a, echo: None, echo_peer: None }))
    }

    /// Creates a link to an echo, which returns each frame with its addresses swapped.
    ///
    /// # Errors
    /// As [`LinkEnd::pair`].
    pub fn echo(pairs: u16) -> io::Result<Self> {
        Self::echoing(pairs, Echo { len: None })
    }

    /// As [`LinkEnd::echo`], with answers of `len` bytes: cut, or padded with 0.
    ///
    /// Checksums are completed.
    ///
    /// # Errors
    /// As [`LinkEnd::pair`]; or `len` is not from 14 to 65549.
    pub fn echo_of_len(pairs: u16, len: usize) -> io::Result<Self> {
        Self::echoing(pairs, Echo { len: Some(checked(len)?) })
    }

    /// As [`LinkEnd::echo_of_len`], but a separate thread answers.
    ///
    /// # Errors
    /// As [`LinkEnd::echo_of_len`]; or the host refuses a thread.
    pub fn to_echo_peer(pairs: u16, len: usize) -> io::Result<Self> {
        let (near, far) = (Port::new(pairs)?, Port::new(pairs)?);
        let echo_peer = EchoPeer::start(Arc::clone(&far), Arc::clone(&near), checked(len)?)?;
        Ok(Self { near, far, echo: None, echo_peer: Some(echo_peer) })
    }

    /// Makes frames for this end wait for a receiver until the hold is dropped.
    ///
    /// For a host that starts both cards again, one after the other, for drivers that run.
    #[must_use]
    pub fn hold(&self) -> LinkHold {
        // Relaxed: the far side's sender is created later.
        self.near.held.store(true, Ordering::Relaxed);
        LinkHold { held: Arc::clone(&self.near), far: Arc::clone(&self.far) }
    }

    /// Counts the buffers at the far side.
    #[cfg(test)]
    pub(super) fn buffers(&self) -> impl Fn() -> usize + 'static {
        let far = Arc::clone(&self.far);
        // Relaxed: one thread.
        move || far.lanes.iter().map(|lane| lane.made.load(Ordering::Relaxed)).sum()
    }

    fn echoing(pairs: u16, echo: Echo) -> io::Result<Self> {
        let port = Port::new(pairs)?;
        Ok(Self { near: Arc::clone(&port), far: port, echo: Some(echo), echo_peer: None })
    }
}

/// See [`LinkEnd::hold`].
#[derive(Debug)]
pub struct LinkHold {
    held: Arc<Port>,
    far: Arc<Port>,
}

impl Drop for LinkHold {
    fn drop(&mut self) {
        // Relaxed: the wakeup orders it.
        self.held.held.store(false, Ordering::Relaxed);
        self.held.wake_for_room();
        self.far.tell_carrier_change();
    }
}

/// `len`, if it is the length of a frame.
fn checked(len: usize) -> io::Result<usize> {
    if (ETH_HEADER..=MAX_FRAME).contains(&len) {
        return Ok(len);
    }
    let what = format!("invalid answer length of {len} bytes: the range is {ETH_HEADER} to {MAX_FRAME}");
    Err(io::Error::new(io::ErrorKind::InvalidInput, what))
}

impl BackEnd for LinkEnd {
    type Sender = LinkSender;
    type Receiver = LinkReceiver;

    fn pairs(&self) -> u16 {
        self.near.lanes.len() as u16
    }

    fn offloads(&self) -> u64 {
        F_CSUM | F_GUEST_CSUM
    }

    fn accept(&self, features: u64) -> io::Result<()> {
        // Relaxed: the driver learns through other, ordered, ways that it may receive.
        self.near.features.store(features, Ordering::Relaxed);
        Ok(())
    }

    fn use_pairs(&self, pairs: u16) -> io::Result<()> {
        // Relaxed: see `Port::lane`.
        self.near.pairs.store(pairs, Ordering::Relaxed);
        self.near.wake_for_room();
        Ok(())
    }

    fn tell_change(&self, told: Box<dyn Fn() + Send + Sync>) {
        // Fails if it was called before.
        self.near.carrier_change.set(told);
    }

    fn has_carrier(&self) -> bool {
        // An echo is always there.
        self.echo.is_some() || self.echo_peer.is_some() || self.far.is_open() || self.far.is_held()
    }

    fn inject(&self, frame: &[u8]) -> io::Result<()> {
        let lane = &self.far.lanes[0];
        // Relaxed: see where it is set.
        if self.echo.is_none()
            && lane.open.load(Ordering::Relaxed)
            && let Ok(Some(mut buffer)) = lane.one_buffer(frame.len())
        {
            (buffer.header, buffer.len) = (EncodedHeader::default(), frame.len());
            buffer.bytes[..frame.len()].copy_from_slice(frame);
            lane.frames.push(buffer);
            lane.arrived.wake();
        }
        Ok(())
    }

    fn sender(&self, pair: u16) -> io::Result<LinkSender> {
        let (far, buffers) = (Arc::clone(&self.far), Vec::with_capacity(LANE));
        let (echo, finish) = (self.echo, Finish::Nothing);
        Ok(LinkSender { far, pair, echo, lane: None, finish, buffers, filled: 0, wakes: None })
    }

    fn receiver(&self, pair: u16) -> io::Result<LinkReceiver> {
        let (port, lane) = (Arc::clone(&self.near), usize::from(pair));
        // Frames that arrived before the queue was started.
        port.lanes[lane].clear();
        // Relaxed: frames of senders that do not see it yet are lost, as on any link.
        port.lanes[lane].open.store(true, Ordering::Relaxed);
        // Those that a hold keeps.
        port.wake_for_room();
        self.far.tell_carrier_change();
        let far = Arc::clone(&self.far);
        Ok(LinkReceiver { port, far, lane, buffers: Vec::with_capacity(LANE), done: 0, wakes: None })
    }
}

/// What is done to a frame after it was copied.
#[derive(Clone, Copy, Debug)]
enum Finish {
    Nothing,
    /// Its checksum is completed.
    Checksum,
    /// Its addresses are swapped.
    Swap,
    /// Both.
    ChecksumAndSwap,
    /// It becomes an answer of that many bytes.
    Answer(usize),
}

/// See [`LinkEnd`].
#[derive(Debug)]
pub struct LinkSender {
    far: Arc<Port>,
    pair: u16,
    echo: Option<Echo>,
    /// The lane of this batch and of the buffers below.
    lane: Option<usize>,
    /// What is done to the frames of this batch.
    finish: Finish,
    /// Frames of this batch, which the receiver sees at its end; then free buffers.
    buffers: Vec<Buffer>,
    /// Number of frames in it.
    filled: usize,
    wakes: Option<WakeSource>,
}

impl LinkSender {
    /// Begins a batch. Returns its lane; `None`: it has no receiver.
    #[inline(never)]
    fn begin(&mut self) -> Option<usize> {
        let number = self.far.lane(self.pair);
        // Relaxed: see where it is set.
        if !self.far.lanes[number].open.load(Ordering::Relaxed) {
            return None;
        }
        // Relaxed: see `accept`.
        let partial = self.far.features.load(Ordering::Relaxed) & F_GUEST_CSUM != 0;
        self.finish = match self.echo {
            Some(Echo { len: Some(len) }) => Finish::Answer(len),
            Some(_) if partial => Finish::Swap,
            Some(_) => Finish::ChecksumAndSwap,
            None if partial => Finish::Nothing,
            None => Finish::Checksum,
        };
        self.lane = Some(number);
        Some(number)
    }

    /// Whether a frame would be sent or refused, not held up.
    fn room(&self) -> bool {
        let lane = &self.far.lanes[self.far.lane(self.pair)];
        // Relaxed: before a sleep the wakeup orders it; otherwise it is only a hint that sending
        // may work.
        if lane.open.load(Ordering::Relaxed) { lane.has_room() } else { !self.far.is_held() }
    }
}

impl Sender for LinkSender {
    // Always: built in memory for a call, the frame's description costs as much as its look-up.
    #[inline(always)]
    fn send(&mut self, frame: &Outgoing<'_>) -> Result<Sent, ServeError> {
        let Some(number) = self.lane.or_else(|| self.begin()) else {
            return Ok(if self.far.is_held() { Sent::Full } else { Sent::Refused });
        };
        // An answer may be longer.
        let most = if let Finish::Answer(len) = self.finish { len.max(frame.len) } else { frame.len };
        if self.buffers.get(self.filled).is_none_or(|buffer| buffer.bytes.len() < most) {
            match self.far.lanes[number].make_room(&mut self.buffers, self.filled, most) {
                Ok(true) => {}
                Ok(false) => return Ok(Sent::Full),
                Err(_) => return Ok(Sent::Refused),
            }
        }
        let Some(buffer) = self.buffers.get_mut(self.filled) else { return Ok(Sent::Full) };
        let Some(bytes) = buffer.bytes.get_mut(..frame.len) else { return Ok(Sent::Full) };
        frame.copy_to(bytes)?;
        (buffer.header, buffer.len) = (frame.header, frame.len);
        match self.finish {
            Finish::Nothing => {}
            Finish::Swap => buffer.swap_addresses(),
            Finish::Checksum => complete_checksum(&mut buffer.header, bytes),
            Finish::ChecksumAndSwap => {
                complete_checksum(&mut buffer.header, bytes);
                buffer.swap_addresses();
            }
            Finish::Answer(len) => buffer.answer(len),
        }
        self.filled += 1;
        Ok(Sent::Sent)
    }

    fn flush(&mut self) {
        let Some(lane) = self.lane.take() else { return };
        let lane = &self.far.lanes[lane];
        let filled = std::mem::take(&mut self.filled);
        if filled > 0 {
            if filled == self.buffers.len() {
                lane.frames.push_all(&mut self.buffers);
            } else {
                lane.frames.push_some(self.buffers.drain(..filled));
            }
            lane.arrived.wake();
        }
        lane.free.push_all(&mut self.buffers);
    }

    fn register(&mut self, wakes: Option<&WakeSet>) -> io::Result<()> {
        WakeSource::register(&mut self.wakes, &self.far.room[usize::from(self.pair)].event, wakes)
    }

    fn rest(&mut self, arm: bool) -> Rest {
        if arm {
            self.far.room[usize::from(self.pair)].arm();
        }
        Rest::serve_if(self.room())
    }
}

impl Drop for LinkSender {
    fn drop(&mut self) {
        self.flush();
    }
}

/// See [`LinkEnd`].
#[derive(Debug)]
pub struct LinkReceiver {
    port: Arc<Port>,
    /// The end that is told when this receiver goes.
    far: Arc<Port>,
    lane: usize,
    /// Frames that are done, then those at hand, in order.
    buffers: Vec<Buffer>,
    /// Number of frames that are done. The senders get their buffers at the end of a batch.
    done: usize,
    wakes: Option<WakeSource>,
}

impl LinkReceiver {
    fn lane(&self) -> &Lane {
        &self.port.lanes[self.lane]
    }

    fn at_hand(&self) -> usize {
        self.buffers.len() - self.done
    }

    fn has_some(&self) -> bool {
        self.at_hand() > 0 || self.lane().frames.count() > 0
    }
}

impl Receiver for LinkReceiver {
    fn fetch(&mut self, most: usize) -> io::Result<usize> {
        if self.at_hand() < most {
            self.port.lanes[self.lane].frames.take_all(&mut self.buffers);
        }
        Ok(self.at_hand().min(most))
    }

    fn frame(&self, number: usize) -> Option<Incoming<'_>> {
        let buffer = self.buffers.get(self.done + number)?;
        Some(Incoming { header: buffer.header, bytes: &buffer.bytes[..buffer.len] })
    }

    fn done(&mut self, count: usize) {
        self.done += count.min(self.at_hand());
    }

    fn flush(&mut self) {
        if self.done > 0 {
            let done = std::mem::take(&mut self.done);
            let free = &self.port.lanes[self.lane].free;
            if done == self.buffers.len() {
                free.push_all(&mut self.buffers);
            } else {
                free.push_some(self.buffers.drain(..done));
            }
            self.port.wake_for_room();
        }
    }

    fn register(&mut self, wakes: Option<&WakeSet>) -> io::Result<()> {
        WakeSource::register(&mut self.wakes, &self.port.lanes[self.lane].arrived.event, wakes)
    }

    fn rest(&mut self, arm: bool) -> Rest {
        if arm {
            self.lane().arrived.arm();
        }
        Rest::serve_if(self.has_some())
    }
}

impl Drop for LinkReceiver {
    fn drop(&mut self) {
        self.done(self.at_hand());
        self.flush();
        // Relaxed: the wakeup orders it; and see where it is set.
        self.lane().open.store(false, Ordering::Relaxed);
        // A frame that a sender adds a moment later stays until the next receiver: at most one
        // batch of each sender.
        self.lane().clear();
        self.port.wake_for_room();
        self.far.tell_carrier_change();
    }
}
