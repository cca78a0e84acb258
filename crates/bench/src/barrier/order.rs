//! The orders that are compared, and the memory that they access.
use crate::BenchError;
use crate::dma::paravane::touch;
use crate::error::broken;
use crate::subject::PARAVANE;
use paravane_dma::{Backing, Memory, Region, RegionConfig};
use std::sync::Arc;

/// The orders, weakest first.
pub(super) const ORDERS: [&str; 3] = ["relaxed", "by-direction", "full"];
/// Guest memory of `size` bytes, mapped and touched.
pub(super) fn memory(size: u64) -> Result<(Memory, Arc<Region>), BenchError> {
    let config = RegionConfig { gpa: 0, size, backing: Backing::Pages, writable: true };
    let region = Region::new(config).map_err(|error| broken(PARAVANE, error))?;
    let memory = Memory::new(vec![Arc::clone(&region)]).map_err(|error| broken(PARAVANE, error))?;
    touch(&memory, 0, size)?;
    Ok((memory, region))
}
