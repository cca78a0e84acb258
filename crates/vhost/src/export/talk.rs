//! Conversation of an export with its client.
//!
//! ```text
//!  begin: settle what a dead process has left, keep the session --> run: messages, until
//!     the client disconnects, an error, a handover, or the export's end
//! ```
use super::{SessionEnd, Shared, log_refresh, wait_for};
use crate::handover::record::{Pending, PendingAnswer};
use crate::keeper::{Client, Keeping, State};
use crate::session::Session;
use crate::socket::{Connection, Received};
use paravane_spec::vhost_user::Header;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;

/// One client with its session.
pub(super) struct Talk<'a, 'b> {
    pub(super) session: Session<'b>,
    pub(super) connection: Connection,
    pub(super) shared: &'a Shared,
    pub(super) keeping: Option<&'a mut Keeping>,
    /// Name of the device.
    pub(super) device: &'a str,
}

impl<'s> Talk<'_, 's> {
    /// Settles what a dead process has left.
    pub(super) fn begin(&mut self, pending: Option<Pending>) -> Result<(), SessionEnd> {
        let Some(pending) = pending else { return Ok(()) };
        match (self.connection.recover(&pending)?, pending) {
            (true, Pending::Done { answer: PendingAnswer::Bytes(bytes), .. }) => {
                self.connection.settle(Some((&bytes, None)))?;
            }
            (true, _) => self.connection.settle(None)?,
            (false, Pending::Begun) => {
                match self.connection.receive()? {
                    Received::Message(header, fds) => self.handle(header, fds)?,
                    Received::Closed | Received::Nothing => {}
                }
                self.session.release()?;
            }
            (false, Pending::Done { .. }) => {}
        }
        Ok(())
    }

    /// Keeps the session, if there is a keeper for it.
    fn keep(&mut self) -> Result<(), SessionEnd> {
        // Relaxed: the signal orders.
        let is_new = self.shared.keep.swap(false, Ordering::Relaxed);
        let Some(keeping) = self.keeping.as_deref_mut() else { return Ok(()) };
        if is_new {
            keeping.begin();
        }
        if keeping.is_active() && self.connection.is_at_boundary() && !self.connection.is_kept() {
            self.session.track_itself()?;
            self.connection.keep()?;
        }
        Ok(())
    }

    /// The keeping of this client, and what to record; `None`: it is not kept.
    fn kept(&mut self, pending: Option<Pending>) -> Option<(&mut Keeping, State<'_, 's>)> {
        let keeping = self.keeping.as_deref_mut().filter(|keeping| keeping.is_active())?;
        let client = Client { socket: self.connection.as_fd(), session: &mut self.session, pending };
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
    fn handle(&mut self, header: Header, fds: Vec<OwnedFd>) -> Result<(), SessionEnd> {
        if let Some(keeping) = self.keeping.as_deref_mut() {
            keeping.received(&fds);
        }
        let may_start = self.session.prepare(header)?;
        let is_begun = may_start && self.record(Some(Pending::Begun));
        let (answer, result) = self.session.answer(header, self.connection.payload(), fds);
        let answer = answer.as_ref().map(|(bytes, fd)| (&**bytes, fd.as_ref().map(AsFd::as_fd)));
        let at_once = self.connection.settles_at_once();
        let is_recorded = result.is_ok()
            && (is_begun
                || !at_once
                || self.kept(None).is_some_and(|(keeping, state)| keeping.differs(state)))
            && self.record(Some(Pending::Done {
                len: self.connection.message_len(),
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

    /// Handles messages until the client disconnects, an error, a handover, or the export's end.
    pub(super) fn run(&mut self) -> Result<(), SessionEnd> {
        self.keep()?;
        self.record(None);
        loop {
            match self.connection.receive()? {
                Received::Closed => return Ok(()),
                Received::Message(header, fds) => self.handle(header, fds)?,
                Received::Nothing => self.wait()?,
            }
            let _ = self.shared.control.take();
            // Relaxed, both: the signal orders.
            if self.shared.stop.load(Ordering::Relaxed) {
                return Ok(());
            }
            if self.shared.has_failed() {
                return Err(SessionEnd::Failed);
            }
            if self.shared.refresh.swap(false, Ordering::Relaxed) {
                log_refresh(self.device, self.session.refresh());
                self.record(None);
            }
            // Relaxed: as above.
            if self.shared.config_changed.swap(false, Ordering::Relaxed) {
                self.session.config_changed();
                self.record(None);
            }
            // Relaxed: as above.
            if self.shared.commanded.swap(false, Ordering::Relaxed) {
                self.record(None);
            }
            // Last, so that nothing of the above is pending.
            if self.shared.is_handing_over() {
                return Ok(());
            }
            // Relaxed: as above.
            if self.shared.keep.load(Ordering::Relaxed) {
                self.keep()?;
                self.record(None);
            }
        }
    }

    /// Waits for messages and events.
    fn wait(&mut self) -> Result<(), SessionEnd> {
        let ticks = self.session.next_tick();
        let time = [ticks, self.connection.next_look()].into_iter().flatten().min();
        let back_channel = self.session.back_channel();
        let control = self.shared.control.as_fd();
        // The part of a message that stays on the socket makes it readable.
        let socket = if self.connection.has_part() { control } else { self.connection.as_fd() };
        let mut fds = vec![socket, self.session.alarm(), control];
        fds.extend(back_channel.as_ref().map(AsFd::as_fd));
        let ready = wait_for(&fds, time)?;
        if ready[1] {
            self.session.check_memory()?;
        }
        if ready.get(3) == Some(&true) && self.session.hear() {
            tracing::info!(
                device = self.device,
                "client closed its back channel; it gets no more reports of sizes and missing translations"
            );
            self.record(None);
        }
        if ticks.is_some() {
            self.session.tick()?;
        }
        Ok(())
    }
}
