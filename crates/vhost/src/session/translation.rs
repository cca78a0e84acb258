//! A client with an IOMMU: with ACCESS_PLATFORM all addresses of rings and buffers are the device's (IOVAs).
//!
//! ```text
//!   ring set up: its areas looked for --all translated--> live
//!                 |     ^                                  |  a chain is not translated: told, the queue waits
//!                told   '---- IOTLB_MSG update ----------->'  looks again
//!                                                          |
//!   IOTLB_MSG invalidate: queues whose rings lie there are stopped, what is in flight there is waited for,
//!                         acknowledged; the queues' rings are looked for again
//! ```
//! Translations are forgotten when a driver begins anew (SET_FEATURES while no queue is in use, or the last GET_VRING_BASE), and
//! when there are too many of them: whatever is needed is asked for again.
use super::{Session, SessionError};
use crate::iotlb::{Piece, Refused, Translations, touched};
use crate::vring::Stage;
use paravane_device::{ServeError, StartError};
use paravane_dma::{Access, Busy};
use paravane_ring::QueueAddresses;
use paravane_ring::device::QueueConfig;
use paravane_spec::feature;
use paravane_spec::vhost_user::{Iotlb, iotlb};
use std::sync::Arc;

/// What became of a message that may be refused without harm to the session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Handled {
    Done,
    Refused,
}

impl Session<'_> {
    pub(super) fn iotlb(&mut self, said: &Iotlb) -> Result<Handled, SessionError> {
        if self.translations.is_none() {
            return Err(SessionError::NotAccepted { request: "IOTLB_MSG" });
        }
        match said.kind {
            iotlb::UPDATE => self.update(said),
            iotlb::INVALIDATE => {
                let (first, last) = touched(said);
                self.invalidate(first, last)?;
                self.start_all()?;
                Ok(Handled::Done)
            }
            kind => Err(SessionError::Iotlb(kind)),
        }
    }

    fn update(&mut self, said: &Iotlb) -> Result<Handled, SessionError> {
        let Some(piece) = Piece::new(said) else { return Ok(self.refuse(said)) };
        if self.translations.as_ref().is_some_and(|known| known.contradicts(piece)) {
            self.invalidate(piece.first, piece.last)?;
        }
        let mut inserted = self.insert(piece);
        if inserted == Err(Refused::Full) {
            self.stop_all();
            self.forget_translations();
            inserted = self.insert(piece);
        }
        if inserted.is_err() {
            self.start_all()?;
            return Ok(self.refuse(said));
        }
        if self.back_channel.answered(piece.first, piece.last) {
            self.look_again();
        }
        self.start_all()?;
        Ok(Handled::Done)
    }

    fn insert(&mut self, piece: Piece) -> Result<(), Refused> {
        self.translations.as_mut().map_or(Ok(()), |known| known.insert(piece, self.memory.regions()))
    }

    /// What it says is not taken; who misses it waits for something better. A guest can bring that about (an IOVA that means
    /// no memory), so the session goes on.
    fn refuse(&self, said: &Iotlb) -> Handled {
        let refused = {
            let mut status = self.shared_status.write();
            status.refused_translations += 1;
            status.refused_translations
        };
        if refused == 1 {
            tracing::warn!(
                ?said,
                "a translation is not taken: it is not of whole pages of the client's memory"
            );
        }
        Handled::Refused
    }

    /// Forgets translations. Queues whose rings lie there are stopped.
    fn invalidate(&mut self, first: u64, last: u64) -> Result<(), SessionError> {
        for queue in 0..self.vrings.len() as u16 {
            let Stage::Live(addresses) = self.vrings[usize::from(queue)].stage else { continue };
            let overlaps = |(start, end): (u64, u64)| start <= last && first <= end;
            if self.areas(queue, addresses).into_iter().any(overlaps) {
                self.stop(queue);
            }
        }
        let notifiers = Arc::clone(&self.shared_status.notifiers);
        let mut waited = 0_u64;
        let mut waiting = |busy: &Busy| {
            waited += 1;
            // Its thread may be waiting for a client that does not read.
            notifiers.unblock();
            if waited.is_multiple_of(50) {
                tracing::warn!("a translation is still in use: {busy}");
            }
        };
        if let Some(translations) = &mut self.translations
            && !translations.remove(first, last, &mut waiting)
        {
            self.stop_all();
            self.forget_translations();
        }
        Ok(())
    }

    /// The first and the last address of each area of a queue.
    fn areas(&self, queue: u16, addresses: QueueAddresses) -> Vec<(u64, u64)> {
        let max = self.device.queue_sizes()[usize::from(queue)];
        let config = QueueConfig::new(addresses, max, self.features.of_driver());
        // It is live, so that cannot fail, and no area is empty or wraps.
        config.map_or(Vec::new(), |config| {
            config.areas().iter().map(|area| (area.addr, area.addr + (area.len as u64 - 1))).collect()
        })
    }

    /// Whether the areas of a ring are translated. What is not, is told.
    pub(super) fn reaches_ring(&self, addresses: QueueAddresses, max: u16, features: u64) -> bool {
        // What is wrong with the addresses is found when the queue is started.
        let (Some(translations), Ok(config)) =
            (&self.translations, QueueConfig::new(addresses, max, features))
        else {
            return true;
        };
        let mut handle = translations.handle();
        let guard = handle.enter();
        let missed = config.areas().into_iter().filter(|area| {
            let mut access = Access::READ;
            access.set(Access::WRITE, area.writable);
            !guard.translates(area.addr, area.len, access)
        });
        missed.count() == 0
    }

    /// A ring whose memory is translated and cannot be used all the same: the guest's doing, which ends its queue alone.
    pub(super) fn refuse_ring(&self, queue: u16, error: &StartError) {
        self.relay(queue).failed(queue, &ServeError::Host(std::io::Error::other(error.to_string())));
    }

    /// Before the client's memory changes: what is known is given up if it would mean something else.
    pub(super) fn keep_translations(&mut self, new: &crate::memory::ClientRegions) {
        if self.translations.as_ref().is_some_and(|known| !known.survives(self.memory.regions(), new)) {
            self.stop_all();
            self.forget_translations();
        }
    }

    /// Begins with no translations, or has no use for any. No queue may be live.
    pub(super) fn forget_translations(&mut self) {
        let translated = self.features.has(feature::ACCESS_PLATFORM);
        let channel = Arc::clone(&self.back_channel);
        let max_tables = self.memory.quota().max_tables();
        self.translations = translated
            .then(|| Translations::new(self.memory.memory(), max_tables, move |miss| channel.miss(miss)));
        self.back_channel.forget();
    }

    /// The driver may begin anew: no queue is live, nor about to be.
    pub(super) fn is_idle(&self) -> bool {
        let needs_enable = self.needs_enable();
        !self.vrings.iter().any(|vring| vring.is_live() || vring.is_complete(needs_enable))
    }

    fn stop_all(&mut self) {
        for queue in 0..self.vrings.len() as u16 {
            if self.vrings[usize::from(queue)].is_live() {
                self.stop(queue);
            }
        }
    }

    /// Starts all queues of which everything is known, rings translated.
    fn start_all(&mut self) -> Result<(), SessionError> {
        (0..self.vrings.len() as u16).try_for_each(|queue| self.start_if_complete(queue))
    }

    /// Queues that wait for translations, or keep memory, are served once more.
    pub(super) fn look_again(&self) {
        let count = self.vrings.len().min(self.workers.threads.len());
        self.workers.threads[..count].iter().for_each(|thread| thread.look_again(self.workers.device));
    }

    /// What could not be told of is met again.
    pub(super) fn tell_again(&mut self) -> Result<(), SessionError> {
        if self.translations.is_some() && self.back_channel.take_untold() {
            self.look_again();
            self.start_all()?;
        }
        Ok(())
    }
}
