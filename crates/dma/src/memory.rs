//! The memory map: a published snapshot that holders pin and that can be swapped under them.
use crate::{Handle, MemoryError, Region};
use std::sync::Arc;

/// A machine's memory as its devices see it. Cheap to clone; clones are the same memory.
#[derive(Clone, Debug)]
pub struct Memory {}

impl Memory {
    /// Publishes the first map.
    ///
    /// # Errors
    /// Two regions overlap, or one wraps around.
    pub fn new(regions: Vec<Arc<Region>>) -> Result<Self, MemoryError> {
        let _ = regions;
        todo!()
    }

    /// Publishes a new map. Handles notice at their next [`Handle::refresh`]; a region that is no longer
    /// named stays mapped until the last holder of an old snapshot has let go.
    ///
    /// # Errors
    /// As [`Memory::new`]; the old map then stays.
    pub fn replace(&self, regions: Vec<Arc<Region>>) -> Result<(), MemoryError> {
        let _ = regions;
        todo!()
    }

    /// The regions of the present map, by address.
    #[must_use]
    pub fn regions(&self) -> Vec<Arc<Region>> {
        todo!()
    }

    /// A door for one holder, with the present map pinned.
    #[must_use]
    pub fn handle(&self) -> Handle {
        todo!()
    }
}
