//! Operations of disks.
use crate::latency::Operation;

/// Operations of disks; storage can fail all but the last.
pub static OPERATIONS: [Operation; 6] = [
    Operation::new(0, c"read", "Reads"),
    Operation::new(1, c"write", "Writes"),
    Operation::new(2, c"flush", "Flushes"),
    Operation::new(3, c"discard", "Discards"),
    Operation::new(4, c"write_zeroes", "Writes of zeroes"),
    Operation::new(5, c"other", "Requests answered without storage, for example invalid ones"),
];

/// Number of operations that storage can fail.
pub(super) const FALLIBLE: usize = OTHER.index();

/// VIRTIO_BLK_T_IN.
pub const READ: &Operation = &OPERATIONS[0];
/// VIRTIO_BLK_T_OUT.
pub const WRITE: &Operation = &OPERATIONS[1];
/// VIRTIO_BLK_T_FLUSH.
pub const FLUSH: &Operation = &OPERATIONS[2];
/// VIRTIO_BLK_T_DISCARD.
pub const DISCARD: &Operation = &OPERATIONS[3];
/// VIRTIO_BLK_T_WRITE_ZEROES.
pub const WRITE_ZEROES: &Operation = &OPERATIONS[4];
/// Answered without storage.
pub const OTHER: &Operation = &OPERATIONS[5];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_has_a_place_and_a_name() {
        assert!(OPERATIONS.iter().enumerate().all(|(at, operation)| operation.index() == at));
        let mut names: Vec<_> = OPERATIONS.iter().map(Operation::name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), OPERATIONS.len());
    }
}
