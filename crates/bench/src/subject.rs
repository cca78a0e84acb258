//! What a thread measures.
use crate::error::BenchError;

/// Name of the subject that the others are compared with.
pub(crate) const PARAVANE: &str = "paravane";
/// Name of another build of it in results.
pub(crate) const OTHER_BUILD: &str = "paravane/other";

/// A subject that one thread measures in batches.
pub(crate) trait Subject {
    /// Does `batches` batches of work and returns a sum over the values that it saw.
    ///
    /// The sum keeps the work from being optimised away. All subjects of a case return the same
    /// sum.
    ///
    /// # Errors
    /// The subject refused, or did not complete its work.
    fn run(&mut self, batches: u32) -> Result<u64, BenchError>;

    /// Prepares the next batch, outside the measured time.
    ///
    /// # Errors
    /// As [`Subject::run`].
    fn ready(&mut self) -> Result<(), BenchError> {
        Ok(())
    }

    /// Ring index in shared memory up to which it has worked; 0: no ring.
    fn position(&self) -> u16 {
        0
    }
}
