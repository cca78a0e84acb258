//! What images have of a disk.

/// What is at an offset of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// Data.
    Data,
    /// Zeroes, by a mark in the image.
    Zeroes,
    /// Nothing in the image: reads as zeroes, or as the backing file that was left out.
    Hole,
}
