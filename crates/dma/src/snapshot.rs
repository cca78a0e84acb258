//! Snapshot: one immutable state of the memory map.
use crate::window::Window;
use crate::{DirtyLog, LogError, MemoryError, Region};
use std::sync::Arc;

/// Regions by address, none overlapping, and the log that covers them.
///
/// Keeps the regions mapped.
#[derive(Debug)]
pub(crate) struct Snapshot {
    windows: Box<[Window]>,
    regions: Vec<Arc<Region>>,
    log: Option<Arc<DirtyLog>>,
}

impl Snapshot {
    /// Most regions for which a linear search is faster than a binary one.
    const FEW: usize = 4;

    pub(crate) fn new(mut regions: Vec<Arc<Region>>) -> Result<Self, MemoryError> {
        regions.sort_by_key(|region| region.gpa());
        for pair in regions.windows(2) {
            let (first, second) = (pair[0].gpa(), pair[1].gpa());
            // Written so that nothing overflows when a region ends at the end of the address space.
            if second - first < pair[0].size() {
                return Err(MemoryError::Overlap { first, second });
            }
        }
        let windows = (0..).zip(&regions).map(|(number, region)| Window::of(region, number)).collect();
        Ok(Self { windows, regions, log: None })
    }

    /// Same regions with this log.
    pub(crate) fn logged(&self, log: Option<Arc<DirtyLog>>) -> Result<Self, LogError> {
        if let Some(log) = &log
            && let Some(last) = self.last()
            && last >= log.end()
        {
            return Err(LogError::TooShort { memory: last.saturating_add(1), log: log.end() });
        }
        Ok(Self { windows: self.windows.clone(), regions: self.regions.clone(), log })
    }

    /// Address of the last byte of the last region.
    pub(crate) fn last(&self) -> Option<u64> {
        self.regions.last().map(|region| region.gpa() + (region.size() - 1))
    }

    pub(crate) fn regions(&self) -> &[Arc<Region>] {
        &self.regions
    }

    #[inline(always)]
    pub(crate) fn log(&self) -> Option<&Arc<DirtyLog>> {
        self.log.as_ref()
    }

    /// The region, if there is only one.
    pub(crate) fn only(&self) -> Option<Window> {
        match *self.windows {
            [window] => Some(window),
            _ => None,
        }
    }

    /// The largest region; an empty window if there is none.
    pub(crate) fn largest(&self) -> Window {
        self.windows.iter().copied().max_by_key(|window| window.size()).unwrap_or(Window::EMPTY)
    }

    /// Region that holds guest-physical `addr`.
    #[inline]
    pub(crate) fn find(&self, addr: u64) -> Option<&Window> {
        if self.windows.len() <= Self::FEW {
            return self.windows.iter().find(|window| window.offset(addr).is_some());
        }
        let above = self.windows.partition_point(|window| window.start() <= addr);
        let window = self.windows.get(above.checked_sub(1)?)?;
        window.offset(addr).is_some().then_some(window)
    }
}
