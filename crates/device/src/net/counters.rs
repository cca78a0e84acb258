//! Counters of a card: transferred and dropped frames.
use std::sync::atomic::{AtomicU64, Ordering};
use zerocopy::{FromBytes, IntoBytes};

/// Counts since the card was created. Each frame is counted in one field.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes)]
#[repr(C)]
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

const FIELDS: usize = size_of::<Totals>() / size_of::<u64>();

/// Live counters of a card, shared by its queues: one for each field of [`Totals`].
#[derive(Debug, Default)]
pub struct Counters([AtomicU64; FIELDS]);

impl Counters {
    /// Current values.
    #[must_use]
    pub fn totals(&self) -> Totals {
        // Relaxed: they order nothing.
        zerocopy::transmute!(self.0.each_ref().map(|counter| counter.load(Ordering::Relaxed)))
    }

    /// Adds the counts of one batch of one queue, and sets them to 0.
    pub(super) fn add(&self, batch: &mut Totals) {
        let batch: [u64; FIELDS] = zerocopy::transmute!(std::mem::take(batch));
        for (counter, more) in self.0.iter().zip(batch) {
            if more > 0 {
                // Relaxed: as above.
                counter.fetch_add(more, Ordering::Relaxed);
            }
        }
    }
}
