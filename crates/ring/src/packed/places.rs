//! Where a packed queue's used descriptors go, and what their second word is.
//!
//! ```text
//!   lap   0 ... at ---- next ----> at ... | 0 ...     next lap: the flags turn over
//!               a place for each descriptor of the chain that is used, and a word in the first
//! ```
//! Nearly every chain has one descriptor and something written to it, and does not end the ring. The code is laid
//! out for it: what does not apply costs a comparison that is never taken.
use super::{Position, SWAP, meta, used_flags};
use core::hint::cold_path;
use paravane_spec::packed::{DESC_F_WRITE, DESC_SIZE};

/// Says in a used descriptor that the length counts, as something was written (section 2.8.5).
const WRITTEN: u64 = meta(0, 0, DESC_F_WRITE);

/// The second word of a used descriptor in a lap with wrap counter 1, without identifier and length.
const FIRST_LAP: u64 = meta(0, 0, used_flags(true)) | WRITTEN;

/// What changes in that word at the end of the ring.
const TURN: u64 = meta(0, 0, SWAP);

/// Goes along the ring.
pub(super) struct Places {
    size: u16,
    /// Bytes from the ring's end to the next used descriptor: below 0, so that the sign tells when it is reached.
    at: isize,
    /// The second word in this lap, without identifier and length.
    lap: u64,
    /// Descriptors that chains took beyond the first of each.
    more: u16,
}

impl Places {
    /// Starts at `next`.
    #[inline(always)]
    pub(super) fn new(next: Position, size: u16) -> Self {
        let lap = if next.wrap(size) { FIRST_LAP } else { FIRST_LAP ^ TURN };
        let at = bytes(next.index(size)) - bytes(size);
        Self { size, at, lap, more: 0 }
    }

    /// The offset of the next used descriptor from the ring's end, and its second word. It stands for `id`, whose chain takes `places`
    /// in the ring, no more than the ring has. `None`, and nothing moves, if it takes none: it is not in flight.
    #[inline(always)]
    pub(super) fn next(&mut self, id: u16, written: u32, places: u16) -> Option<(isize, u64)> {
        let (at, mut word) = (self.at, self.lap | meta(written, id, 0));
        if written == 0 {
            cold_path();
            word ^= WRITTEN;
        }
        let mut next = at + bytes(1);
        if places != 1 {
            cold_path();
            let more = places.checked_sub(1)?;
            self.more += more;
            next += bytes(more);
        }
        self.at = next;
        if self.at >= 0 {
            cold_path();
            self.at -= bytes(self.size);
            self.lap ^= TURN;
        }
        Some((at, word))
    }

    /// Where the next one goes.
    #[inline(always)]
    pub(super) fn position(&self) -> Position {
        Position::new(((self.at + bytes(self.size)) / bytes(1)) as u16, self.lap == FIRST_LAP, self.size)
    }

    /// Descriptors that chains took beyond the first of each, since the start.
    #[inline(always)]
    pub(super) fn more(&self) -> u16 {
        self.more
    }
}

/// Bytes that so many descriptors take.
#[inline(always)]
fn bytes(count: u16) -> isize {
    count as isize * DESC_SIZE as isize
}
