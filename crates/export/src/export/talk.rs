//! Conversation of an export with its client.
//!
//! ```text
//!  begin: settle what a dead process has left, keep the session --> step: messages, until there is none
//!     step ... step, until the client disconnects, an error, a handover, or the export's end
//! ```
use super::error::EndCause;
use super::host_watch::log_refresh;
use super::orders::Order;
use super::shared::Shared;
use super::unseen::Unseen;
use crate::handover::record::{Pending, PendingAnswer};
use crate::keeper::{Client, Keeping, State};
use crate::protocol::Session;
use crate::protocol_threads::Ready;
use crate::socket::{Connection, Received};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Numbers of descriptors to wait for: the connection, and behind it those of the session.
const SOCKET: u8 = 0;
const OF_SESSION: u8 = 1;

/// One client with its session.
pub(super) struct Talk {
    pub(super) session: Box<dyn Session>,
    pub(super) connection: Connection,
    pub(super) shared: Arc<Shared>,
    pub(super) keeping: Option<Keeping>,
    /// Name of the device.
    pub(super) device: Arc<str>,
    /// Number of the session.
    pub(super) number: u64,
    /// When it began.
    pub(super) start: Instant,
    /// Number of buffers returned to clients before.
    pub(super) completed: u64,
    /// That the client has connected is not reported yet: its earlier sessions ended by errors.
    pub(super) is_quiet: bool,
    /// Whether the client shares the memory of its rings.
    pub(super) unseen: Unseen,
}

/// Result of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Talked {
    /// It waits for its descriptors, and for this time at most.
    Waits(Option<Duration>),
    /// The client disconnected, or the export ends.
    Over,
}

impl Talk {
    /// Settles what a dead process has left.
    fn settle_pending(&mut self, pending: Option<Pending>) -> Result<(), EndCause> {
        let Some(pending) = pending else { return Ok(()) };
        match (self.connection.recover(&pending)?, pending) {
            (true, Pending::Done { answer: PendingAnswer::Bytes(bytes), .. }) => {
                self.connection.settle(Some((&bytes, None)))?;
            }
            (true, _) => self.connection.settle(None)?,
            (false, Pending::Begun) => {
                match self.connection.receive()? {
                    Received::Message(fds) => self.handle(fds)?,
                    Received::Closed | Received::Nothing => {}
                }
                self.session.release()?;
            }
            (false, Pending::Done { .. }) => {}
        }
        Ok(())
    }

    /// Keeps the session, if there is a keeper for it.
    fn keep(&mut self) -> Result<(), EndCause> {
        let is_new = self.shared.orders.take(Order::Keep);
        let Some(keeping) = self.keeping.as_mut() else { return Ok(()) };
        if is_new {
            keeping.begin();
        }
        if keeping.is_active() && self.connection.is_at_boundary() && !self.connection.is_kept() {
            self.session.track()?;
            self.connection.keep()?;
        }
        Ok(())
    }

    /// The keeping of this client, and what to record; `None`: it is not kept.
    fn kept(&mut self, pending: Option<Pending>) -> Option<(&mut Keeping, State<'_>)> {
        let keeping = self.keeping.as_mut().filter(|keeping| keeping.is_active())?;
        let client = Client { socket: self.connection.as_fd(), session: &mut *self.session, pending };
        let sessions = self.shared.shared_status.sessions();
        self.connection.is_kept().then_some((keeping, State { sessions, client: Some(client) }))
    }

    /// Records the state, if it is kept and has changed. Returns whether it was recorded.
    fn record(&mut self, pending: Option<Pending>) -> bool {
        let Some((keeping, state)) = self.kept(pending) else { return false };
        let (recorded, is_active) = (keeping.record(state), keeping.is_active());
        self.shared.shared_status.write().kept = is_active;
        recorded
    }

    /// Handles a message and answers it.
    fn handle(&mut self, fds: Vec<OwnedFd>) -> Result<(), EndCause> {
        if let Some(keeping) = self.keeping.as_mut() {
            keeping.received(&fds);
        }
        let may_start = self.session.prepare(self.connection.message())?;
        let is_begun = may_start && self.record(Some(Pending::Begun));
        let (answer, result) = self.session.answer(self.connection.message(), fds);
        let answer = answer.as_ref().map(|(bytes, fd)| (&**bytes, fd.as_ref().map(AsFd::as_fd)));
        let at_once = self.connection.settles_at_once();
        let is_recorded = result.is_ok()
            && (is_begun
                || !at_once
                || self.kept(None).is_some_and(|(keeping, state)| keeping.differs(state)))
            && self.record(Some(Pending::Done {
                len: self.connection.message().len(),
                answer: match answer {
                    None => PendingAnswer::None,
                    Some((bytes, None)) => PendingAnswer::Bytes(bytes.to_vec()),
                    Some((_, Some(_))) => PendingAnswer::Again,
                },
                at_once,
            }));
        let settled = self.connection.settle(answer);
        result?;
        settled?;
        if is_begun || is_recorded {
            self.record(None);
        }
        Ok(())
    }

    /// Begins: settles what a dead process has left, and keeps the session.
    pub(super) fn begin(&mut self, pending: Option<Pending>) -> Result<(), EndCause> {
        self.settle_pending(pending)?;
        self.keep()?;
        self.record(None);
        Ok(())
    }

    /// Descriptors to wait for.
    pub(super) fn fds(&self) -> Vec<(u8, BorrowedFd<'_>)> {
        let own = self.session.descriptors().into_iter();
        let mut fds: Vec<_> = own.map(|(number, fd)| (OF_SESSION + number, fd)).collect();
        // The part of a message that stays on the socket makes it readable.
        if !self.connection.has_part() {
            fds.push((SOCKET, self.connection.as_fd()));
        }
        fds
    }

    /// Handles messages and events until there is none.
    ///
    /// `is_first`: nothing was waited for.
    pub(super) fn step(&mut self, ready: Ready, is_first: bool) -> Result<Talked, EndCause> {
        if !is_first {
            self.woken(ready)?;
        }
        loop {
            if self.obey()? {
                return Ok(Talked::Over);
            }
            match self.connection.receive()? {
                Received::Closed => return Ok(Talked::Over),
                Received::Message(fds) => self.handle(fds)?,
                Received::Nothing => break,
            }
        }
        if self.is_quiet && self.shared.completed() != self.completed {
            self.is_quiet = false;
            tracing::info!(device = &*self.device, session = self.number, "client connected");
        }
        let look = self.shared.look(&self.device, self.session.device());
        if look.changed {
            self.session.config_changed();
        }
        self.look_for_unseen();
        let times = [self.session.rest(), self.connection.next_look(), look.again, self.unseen.next()];
        Ok(Talked::Waits(times.into_iter().flatten().min()))
    }

    /// Reports a guest whose rings are in other memory than the client's.
    fn look_for_unseen(&mut self) {
        // Behind an IOMMU, a missing translation looks the same.
        if self.session.translates() {
            return;
        }
        let device = self.session.device();
        let status = || self.shared.shared_status.read();
        // A driver kicks for receive buffers long before frames arrive.
        if let Some(found) = self.unseen.look(status, |queue| !device.waits_for_host(queue)) {
            tracing::warn!(device = &*self.device, session = self.number, "{found}");
            self.shared.shared_status.write().last_error = Some(found);
        }
    }

    /// Does what the owner of the export wants. Returns whether the session is over.
    fn obey(&mut self) -> Result<bool, EndCause> {
        let shared = Arc::clone(&self.shared);
        let orders = &shared.orders;
        if orders.has(Order::Stop) {
            return Ok(true);
        }
        if self.shared.has_failed() {
            return Err(EndCause::Failed);
        }
        if orders.take(Order::Disconnect) {
            return Err(EndCause::Floods);
        }
        if orders.take(Order::Refresh) {
            let changed = self.session.device().refresh();
            if let Ok(true) = changed {
                self.session.config_changed();
            }
            log_refresh(&self.device, changed);
            self.record(None);
        }
        if orders.take(Order::TellConfig) {
            self.session.config_changed();
            self.record(None);
        }
        if orders.take(Order::Record) {
            self.record(None);
        }
        if let Some(change) = self.shared.note.pending() {
            self.record(None);
            self.shared.note.recorded(change);
        }
        // Last, so that nothing of the above is pending.
        if self.shared.is_handing_over() {
            return Ok(true);
        }
        if orders.has(Order::Keep) {
            self.keep()?;
            self.record(None);
        }
        Ok(false)
    }

    /// Handles events other than messages.
    fn woken(&mut self, ready: Ready) -> Result<(), EndCause> {
        for number in (0..3).filter(|number| ready.has(OF_SESSION + number)) {
            if self.session.woken(number)? {
                self.record(None);
            }
        }
        self.session.tick()?;
        Ok(())
    }
}
