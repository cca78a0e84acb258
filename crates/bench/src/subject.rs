//! What a single thread measures.
use crate::error::BenchError;

/// Name of our own subject.
pub(crate) const PARAVANE: &str = "paravane";

/// A queue with a scripted other side, ready to move chains.
pub(crate) trait Subject {
    /// Moves `batches` batches through the queue and returns a sum over what it saw, which keeps the work
    /// from being optimised away and is the same for every subject of a case in the same number of batches
    /// (see [`super`] on what is summed).
    ///
    /// # Errors
    /// The subject refused, or moved another number of chains than it was offered.
    fn run(&mut self, batches: u32) -> Result<u64, BenchError>;

    /// Does beforehand what is not to be measured.
    ///
    /// # Errors
    /// As [`Subject::run`].
    fn ready(&mut self) -> Result<(), BenchError> {
        Ok(())
    }

    /// The ring index, in shared memory, up to which the subject has worked; 0 if it has no ring.
    fn position(&self) -> u16 {
        0
    }
}
