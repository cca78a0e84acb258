//! Clients with an IOMMU.
//!
//! With ACCESS_PLATFORM all addresses of rings and buffers are IOVAs.
//!
//! ```text
//!   ring set up: its areas looked up --all translated--> live
//!                  |     ^                                 |  a chain misses: reported, the queue waits
//!               reported '----- IOTLB_MSG update --------->'  looks again
//!                                                          |
//!   IOTLB_MSG invalidate: stop the queues whose rings are in the range, wait for what is in flight there,
//!                         acknowledge, look the rings up again
//! ```
//! Translations are dropped when a driver starts over (SET_FEATURES while no queue is in use, or
//! the last GET_VRING_BASE), and when the table is full. Those that are still needed are requested
//! again.
use super::{SessionError, VhostSession};
use crate::iotlb::{Piece, Refused, Translations, touched_pages};
use crate::message::Handled;
use crate::vring::Vring;
use paravane_device::{ServeError, StartError};
use paravane_dma::{Access, Busy};
use paravane_ring::QueueAddresses;
use paravane_ring::device::QueueConfig;
use paravane_spec::feature;
use paravane_spec::vhost_user::{Iotlb, VringAddr, iotlb};
use std::sync::Arc;

impl VhostSession {
    pub(super) fn iotlb(&mut self, msg: &Iotlb) -> Result<Handled, SessionError> {
        if self.translations.is_none() {
            return Err(SessionError::NotAccepted { request: "IOTLB_MSG" });
        }
        match msg.kind {
            iotlb::UPDATE => self.update(msg),
            iotlb::INVALIDATE => {
                let (first, last) = touched_pages(msg);
                self.invalidate(first, last)?;
                self.start_all()?;
                Ok(Handled::Done)
            }
            kind => Err(SessionError::Iotlb(kind)),
        }
    }

    fn update(&mut self, msg: &Iotlb) -> Result<Handled, SessionError> {
        let Some(piece) = Piece::new(msg) else { return Ok(self.refuse(msg)) };
        if self.translations.as_ref().is_some_and(|translations| translations.contradicts(piece)) {
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
            return Ok(self.refuse(msg));
        }
        if self.back_channel.answered(piece.first, piece.last) {
            self.look_again();
        }
        self.start_all()?;
        Ok(Handled::Done)
    }

    fn insert(&mut self, piece: Piece) -> Result<(), Refused> {
        self.translations
            .as_mut()
            .map_or(Ok(()), |translations| translations.insert(piece, self.memory.regions()))
    }

    /// Refuses an update; the queue that misses the translation waits for a better one.
    ///
    /// A guest can cause this with an IOVA that maps to no memory, so the session continues.
    fn refuse(&self, msg: &Iotlb) -> Handled {
        let refused = {
            let mut status = self.shared_status.write();
            status.refused_translations += 1;
            status.refused_translations
        };
        if refused == 1 {
            tracing::warn!(?msg, "translation refused: it does not map whole pages of the client's memory");
        }
        Handled::Refused
    }

    /// Drops translations. Queues whose rings are in the range are stopped.
    fn invalidate(&mut self, first: u64, last: u64) -> Result<(), SessionError> {
        for queue in 0..self.vrings.len() as u16 {
            let overlaps = |(start, end): (u64, u64)| start <= last && first <= end;
            if self.queues.is_live(queue) && self.areas(queue).into_iter().any(overlaps) {
                self.stop(queue);
            }
        }
        let notifiers = Arc::clone(&self.shared_status.notifiers);
        let mut waited = 0_u64;
        let mut waiting = |busy: &Busy| {
            waited += 1;
            // The thread may be blocked by a client that does not read.
            notifiers.unblock();
            if waited.is_multiple_of(50) {
                tracing::warn!("still waiting to drop a translation: {busy}");
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

    /// First and last address of each area of a live ring.
    fn areas(&self, queue: u16) -> Vec<(u64, u64)> {
        let Vring { size, addr: Some(VringAddr { desc, driver, device, .. }), .. } =
            self.vrings[usize::from(queue)]
        else {
            return Vec::new();
        };
        let addresses = QueueAddresses { size, desc, driver, device };
        let max = self.device.queue_sizes()[usize::from(queue)];
        let config = QueueConfig::new(addresses, max, self.features.of_driver());
        // The queue is live, so its configuration is valid, and no area is empty or wraps.
        config.map_or(Vec::new(), |config| {
            config.areas().iter().map(|area| (area.addr, area.addr + (area.len as u64 - 1))).collect()
        })
    }

    /// Whether all areas of a ring are translated. Reports the misses.
    pub(super) fn translates_ring(&self, addresses: QueueAddresses, max: u16, features: u64) -> bool {
        // Invalid addresses are refused when the queue starts.
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

    /// Fails a queue whose translated ring cannot be used.
    ///
    /// The guest caused it, so the session continues.
    pub(super) fn refuse_ring(&self, queue: u16, error: &StartError) {
        self.relay(queue).failed(queue, &ServeError::Host(std::io::Error::other(error.to_string())));
    }

    /// Drops the translations that a change of the client's memory would alter.
    pub(super) fn keep_translations(&mut self, new: &crate::memory::ClientRegions) {
        if self
            .translations
            .as_ref()
            .is_some_and(|translations| !translations.survives(self.memory.regions(), new))
        {
            self.stop_all();
            self.forget_translations();
        }
    }

    /// Starts over without translations, or turns them off. No queue may be live.
    pub(super) fn forget_translations(&mut self) {
        let translated = self.features.has(feature::ACCESS_PLATFORM);
        let channel = Arc::clone(&self.back_channel);
        let max_tables = self.memory.quota().max_tables();
        self.translations = translated
            .then(|| Translations::new(self.memory.memory(), max_tables, move |miss| channel.miss(miss)));
        self.back_channel.forget();
    }

    /// Whether the driver may start over: no queue is live or ready to start.
    pub(super) fn is_idle(&self) -> bool {
        let needs_enable = self.needs_enable();
        self.queues.first_live().is_none() && !self.vrings.iter().any(|vring| vring.is_complete(needs_enable))
    }

    fn stop_all(&mut self) {
        for queue in self.queues.all().filter(|&queue| self.queues.is_live(queue)).collect::<Vec<_>>() {
            self.stop(queue);
        }
    }

    /// Starts all queues that are completely configured and whose rings are translated.
    pub(super) fn start_all(&mut self) -> Result<(), SessionError> {
        (0..self.vrings.len() as u16).try_for_each(|queue| self.start_if_complete(queue))
    }

    /// Has the threads serve queues again that wait for translations or hold memory.
    pub(super) fn look_again(&self) {
        self.queues.threads().look_again(self.queues.all());
    }

    /// Has queues miss again what could not be reported.
    pub(super) fn report_again(&mut self) -> Result<(), SessionError> {
        if self.translations.is_some() && self.back_channel.take_unreported() {
            self.look_again();
            self.start_all()?;
        }
        Ok(())
    }
}
