//! What the guest says of itself while it runs. None of it is trusted: each value is fetched once and
//! checked or clamped where it is used.
use crate::Progress;
use paravane_dma::{Access, Handle, Memory};
use paravane_spec::builtin::{
    DISK_REPORTS, DiskReport, MAX_DEVICES, REPORT_BASE, REPORT_MAGIC, ReportHeader, state,
};
use std::sync::atomic::Ordering;

/// The report area of one machine.
pub(crate) struct ReportArea {
    memory: Handle,
    disks: usize,
}

impl ReportArea {
    /// With the reports of `disks` disks.
    pub(crate) fn new(memory: &Memory, disks: usize) -> Self {
        Self { memory: memory.handle(), disks: disks.min(MAX_DEVICES) }
    }

    /// The head; `None` before the guest has started.
    pub(crate) fn header(&self) -> Option<ReportHeader> {
        let header: ReportHeader = self.memory.read_obj(REPORT_BASE, Access::READ).ok()?;
        (header.magic == REPORT_MAGIC).then_some(header)
    }

    /// One disk's report.
    pub(crate) fn disk(&self, number: usize) -> Option<DiskReport> {
        let offset = DISK_REPORTS + (number as u64) * size_of::<DiskReport>() as u64;
        self.memory.read_obj(REPORT_BASE + offset, Access::READ).ok()
    }

    /// Copies the sums into `progress` and returns the heartbeat.
    pub(crate) fn show(&self, progress: &Progress) -> u64 {
        let Some(header) = self.header() else { return 0 };
        let (mut done, mut total, mut phase) = (0_u64, 0_u64, state::DONE);
        for report in (0..self.disks).filter_map(|number| self.disk(number)) {
            done = done.saturating_add(report.bytes_done.min(report.bytes_total));
            total = total.saturating_add(report.bytes_total);
            phase = phase.min(report.state);
        }
        // Relaxed: figures for the eye.
        progress.bytes_total.store(total, Ordering::Relaxed);
        progress.bytes_done.store(done, Ordering::Relaxed);
        progress.phase.store(u64::from(phase), Ordering::Relaxed);
        header.heartbeat
    }

    /// Reads `entries` of the guest's pass map from entry `first` on. `None` where there is no memory.
    pub(crate) fn passes(&self, map: u64, first: u64, entries: &mut [u32]) -> Option<()> {
        let addr = map.checked_add(first.checked_mul(4)?)?;
        let mut bytes = vec![0; entries.len() * 4];
        self.memory.read(addr, &mut bytes, Access::READ).ok()?;
        for (entry, bytes) in entries.iter_mut().zip(bytes.chunks_exact(4)) {
            *entry = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        }
        Some(())
    }
}
