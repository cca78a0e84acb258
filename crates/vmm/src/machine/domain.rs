//! The domains of a machine with an IOMMU.
use crate::config::RunConfig;
use crate::error::RunError;
use paravane_dma::{Access, Domain, Memory};
use paravane_spec::builtin::HEAP_BASE;

/// Domain of device `number`, if devices have one.
///
/// It has the guest's heap and nothing else, moved up.
pub(crate) fn domain(config: &RunConfig, memory: &Memory, number: u32) -> Result<Option<Domain>, RunError> {
    if !config.iommu {
        return Ok(None);
    }
    let domain = Domain::new(memory);
    let iova = HEAP_BASE + iova_offset(config, number);
    domain.map(iova, HEAP_BASE, config.memory - HEAP_BASE, Access::READ | Access::WRITE)?;
    Ok(Some(domain))
}

/// How much further up device `number` sees the heap.
///
/// Each another, and no multiple of a large page, so that an address that was not translated, or by
/// another's domain, hits nothing.
pub(crate) fn iova_offset(config: &RunConfig, number: u32) -> u64 {
    if config.iommu { (u64::from(number) + 1) * ((1 << 36) + 3 * 4096) } else { 0 }
}
