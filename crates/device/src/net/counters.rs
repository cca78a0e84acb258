//! Counters of a card: transferred and dropped frames.
use std::sync::atomic::{AtomicU64, Ordering};

/// Counts since the card was created. Each frame is counted in one field.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Frames sent for the driver.
    pub transmitted: u64,
    /// Bytes of sent frames, without headers.
    pub transmitted_bytes: u64,
    /// Frames delivered to the driver.
    pub received: u64,
    /// Bytes of delivered frames, without headers.
    pub received_bytes: u64,
    /// Frames of the driver with an invalid length or header, dropped.
    pub malformed: u64,
    /// Frames of the driver that the back end refused, dropped.
    pub refused: u64,
    /// Frames for the driver that do not fit its buffers, dropped.
    pub no_room: u64,
    /// Buffers of the driver that no frame can fit, returned empty.
    pub unusable: u64,
}

/// Live counters of a card, shared by its queues.
#[derive(Debug, Default)]
pub struct Counters {
    transmitted: AtomicU64,
    transmitted_bytes: AtomicU64,
    received: AtomicU64,
    received_bytes: AtomicU64,
    malformed: AtomicU64,
    refused: AtomicU64,
    no_room: AtomicU64,
    unusable: AtomicU64,
}

impl Counters {
    /// Current values.
    #[must_use]
    pub fn totals(&self) -> Totals {
        // Relaxed: they order nothing.
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Totals {
            transmitted: load(&self.transmitted),
            transmitted_bytes: load(&self.transmitted_bytes),
            received: load(&self.received),
            received_bytes: load(&self.received_bytes),
            malformed: load(&self.malformed),
            refused: load(&self.refused),
            no_room: load(&self.no_room),
            unusable: load(&self.unusable),
        }
    }

    /// Adds the counts of one batch of one queue, and sets them to 0.
    pub(super) fn add(&self, batch: &mut Totals) {
        for (counter, more) in [
            (&self.transmitted, batch.transmitted),
            (&self.transmitted_bytes, batch.transmitted_bytes),
            (&self.received, batch.received),
            (&self.received_bytes, batch.received_bytes),
            (&self.malformed, batch.malformed),
            (&self.refused, batch.refused),
            (&self.no_room, batch.no_room),
            (&self.unusable, batch.unusable),
        ] {
            if more > 0 {
                // Relaxed: as above.
                counter.fetch_add(more, Ordering::Relaxed);
            }
        }
        *batch = Totals::default();
    }
}
