//! The guest's reports while it runs.
//!
//! None is trusted: each value is fetched once, and checked or clamped where it is used.
use crate::report::KickFigures;
use crate::run::{Progress, latency};
use paravane_dma::{Access, Memory};
use paravane_spec::builtin::{
    CPU_REPORTS, CpuReport, DISK_REPORTS, DiskReport, KICK_REPORT, KickReport, REPORT_BASE, REPORT_MAGIC,
    ReportHeader, state,
};
use std::sync::atomic::Ordering;

/// The report area of one machine.
pub(crate) struct ReportArea {
    memory: Memory,
    /// Numbers of the reports on queues of disks.
    disks: Vec<usize>,
    /// Number of processors.
    cpus: u16,
}

impl ReportArea {
    /// `disks` are the numbers of the reports on queues of disks.
    pub(crate) fn new(memory: &Memory, disks: impl IntoIterator<Item = usize>, cpus: u16) -> Self {
        Self { memory: memory.clone(), disks: disks.into_iter().collect(), cpus }
    }

    /// Number of processors.
    pub(crate) fn cpus(&self) -> u16 {
        self.cpus
    }

    /// The counters of all processors; `None` before the guest has started.
    pub(crate) fn totals(&self) -> Option<CpuReport> {
        let mut memory = self.memory.handle();
        let memory = memory.enter();
        let header: ReportHeader = memory.read_obj(REPORT_BASE, Access::READ).ok()?;
        if header.magic != REPORT_MAGIC {
            return None;
        }
        let mut sum = CpuReport::default();
        for cpu in 0..u64::from(self.cpus) {
            let at = REPORT_BASE + CPU_REPORTS + cpu * size_of::<CpuReport>() as u64;
            let one: CpuReport = memory.read_obj(at, Access::READ).ok()?;
            for (sum, one) in [
                (&mut sum.heartbeat, one.heartbeat),
                (&mut sum.interrupts, one.interrupts),
                (&mut sum.kicks, one.kicks),
                (&mut sum.entropy_bytes, one.entropy_bytes),
                (&mut sum.moves, one.moves),
            ] {
                *sum = sum.saturating_add(one);
            }
            sum.measured_interrupts = sum.measured_interrupts.max(one.measured_interrupts);
        }
        Some(sum)
    }

    /// Report on one queue.
    pub(crate) fn queue(&self, number: usize) -> Option<DiskReport> {
        let offset = DISK_REPORTS + (number as u64) * size_of::<DiskReport>() as u64;
        self.memory.handle().enter().read_obj(REPORT_BASE + offset, Access::READ).ok()
    }

    /// Time that the guest spends in kicks; `None`: it timed none.
    pub(crate) fn kick_stops(&self) -> Option<KickFigures> {
        let report: KickReport =
            self.memory.handle().enter().read_obj(REPORT_BASE + KICK_REPORT, Access::READ).ok()?;
        let count = report.histogram.iter().map(|&count| u64::from(count)).sum::<u64>();
        let [median_us] = latency::percentiles(&report.histogram, [50.0]);
        (count > 0).then(|| KickFigures {
            count,
            mean_ns: report.ns as f64 / count as f64,
            median_ns: median_us * 1000.0,
        })
    }

    /// Copies the sums into `progress` and returns the heartbeat.
    pub(crate) fn show(&self, progress: &Progress) -> u64 {
        let Some(totals) = self.totals() else { return 0 };
        let (mut done, mut total, mut phase) = (0_u64, 0_u64, state::DONE);
        for report in self.disks.iter().filter_map(|&number| self.queue(number)) {
            done = done.saturating_add(report.bytes_done.min(report.bytes_total));
            total = total.saturating_add(report.bytes_total);
            phase = phase.min(report.state);
        }
        // Relaxed: for display only.
        progress.bytes_total.store(total, Ordering::Relaxed);
        progress.bytes_done.store(done, Ordering::Relaxed);
        progress.phase.store(u64::from(phase), Ordering::Relaxed);
        totals.heartbeat
    }

    /// Reads `entries` of the guest's pass map from entry `first` on.
    ///
    /// `None` where there is no memory.
    pub(crate) fn passes(&self, map: u64, first: u64, entries: &mut [u32]) -> Option<()> {
        let addr = map.checked_add(first.checked_mul(4)?)?;
        let mut bytes = vec![0; entries.len() * 4];
        self.memory.handle().enter().read(addr, &mut bytes, Access::READ).ok()?;
        for (entry, bytes) in entries.iter_mut().zip(bytes.chunks_exact(4)) {
            *entry = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        }
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use paravane_dma::{Backing, Region, RegionConfig};

    fn memory(size: u64) -> Memory {
        let config = RegionConfig { gpa: 0, size, backing: Backing::Pages, writable: true };
        Memory::new(vec![Region::new(config).unwrap()]).unwrap()
    }

    #[test]
    fn before_the_guest_has_started_there_is_nothing() {
        let memory = memory(16 << 20);
        let area = ReportArea::new(&memory, 0..3, 1);
        assert!(area.totals().is_none());
        assert_eq!(area.show(&Progress::default()), 0);
    }

    #[test]
    fn no_value_from_the_guest_overflows() {
        let memory = memory(16 << 20);
        memory.handle().enter().fill(REPORT_BASE, 0xff, 1 << 20, Access::WRITE).unwrap();
        memory.handle().enter().write_obj(REPORT_BASE, &REPORT_MAGIC, Access::WRITE).unwrap();
        let (area, progress) = (ReportArea::new(&memory, 0..32, 64), Progress::default());
        assert_eq!(area.show(&progress), u64::MAX);
        assert_eq!(progress.bytes_done.load(Ordering::Relaxed), u64::MAX);
        assert_eq!(progress.bytes_total.load(Ordering::Relaxed), u64::MAX);
        assert!(area.passes(u64::MAX, u64::MAX, &mut [0; 4]).is_none());
        assert!(area.passes(REPORT_BASE, u64::MAX / 4, &mut [0; 4]).is_none());
    }

    #[test]
    fn a_memory_without_a_report_area_has_no_report() {
        let memory = memory(1 << 20);
        let area = ReportArea::new(&memory, [0], 1);
        assert!(area.totals().is_none() && area.queue(0).is_none());
    }
}
