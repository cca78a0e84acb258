//! The report area, kept up to date while the guest runs.
//!
//! Every field is written by this program only; the VMM reads it at any time and trusts none of it,
//! so relaxed stores do. The write to the EXIT register comes last and orders all of them for the
//! final reading.
use crate::histogram;
use core::mem::offset_of;
use paravane_driver::Area;
use paravane_spec::builtin::{
    CPU_REPORTS, CpuReport, DISK_REPORTS, DiskReport, HIST_BUCKETS, KICK_REPORT, KickReport, REPORT_MAGIC,
    ReportHeader, state,
};

/// Totals over the devices of one processor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Totals {
    pub(crate) heartbeat: u64,
    pub(crate) interrupts: u64,
    pub(crate) measured_interrupts: u64,
    pub(crate) kicks: u64,
    pub(crate) entropy_bytes: u64,
    pub(crate) moves: u64,
}

/// The head of the area.
#[derive(Debug)]
pub(crate) struct Header {
    area: Area,
}

impl Header {
    /// Clears all reports, then writes the magic number.
    pub(crate) fn new(area: Area, count: usize) -> Self {
        let end = DISK_REPORTS as usize + count * size_of::<DiskReport>();
        let zeroes = [0; 512];
        for at in (0..end).step_by(zeroes.len()) {
            put(area, at, &zeroes[..zeroes.len().min(end - at)]);
        }
        put(area, offset_of!(ReportHeader, count), &(count as u32).to_le_bytes());
        put_u64(area, offset_of!(ReportHeader, magic), REPORT_MAGIC);
        Self { area }
    }

    /// The report of one queue; `None` if it would lie outside.
    pub(crate) fn disk(&self, index: usize) -> Option<DiskPage> {
        let offset = DISK_REPORTS as usize + index * size_of::<DiskReport>();
        Some(DiskPage { area: self.area.slice(offset, size_of::<DiskReport>())? })
    }

    /// The report of the kicks; `None` if it would lie outside.
    pub(crate) fn kicks(&self) -> Option<KickPage> {
        Some(KickPage { area: self.area.slice(KICK_REPORT as usize, size_of::<KickReport>())? })
    }

    /// The report of one processor; `None` if it would lie outside.
    pub(crate) fn cpu(&self, cpu: usize) -> Option<CpuPage> {
        let offset = CPU_REPORTS as usize + cpu * size_of::<CpuReport>();
        let area = self.area.slice(offset, size_of::<CpuReport>())?;
        Some(CpuPage { area, shown: Totals::default() })
    }
}

/// One processor's report.
#[derive(Debug)]
pub(crate) struct CpuPage {
    area: Area,
    shown: Totals,
}

impl CpuPage {
    /// Shows the totals, as far as they have changed.
    pub(crate) fn show(&mut self, totals: Totals) {
        let shown = self.shown;
        for (offset, old, new) in [
            (offset_of!(CpuReport, interrupts), shown.interrupts, totals.interrupts),
            (
                offset_of!(CpuReport, measured_interrupts),
                shown.measured_interrupts,
                totals.measured_interrupts,
            ),
            (offset_of!(CpuReport, kicks), shown.kicks, totals.kicks),
            (offset_of!(CpuReport, entropy_bytes), shown.entropy_bytes, totals.entropy_bytes),
            (offset_of!(CpuReport, moves), shown.moves, totals.moves),
            (offset_of!(CpuReport, heartbeat), shown.heartbeat, totals.heartbeat),
        ] {
            if old != new {
                put_u64(self.area, offset, new);
            }
        }
        self.shown = totals;
    }
}

/// Failure of a device's job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    /// One of the `error` codes.
    pub(crate) error: u32,
    /// Status byte or driver's code.
    pub(crate) detail: u64,
    /// First sector concerned.
    pub(crate) sector: u64,
    /// Reason, for the console.
    pub(crate) reason: &'static str,
}

/// The measured phase so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Measured {
    pub(crate) ops: u64,
    pub(crate) bytes: u64,
    pub(crate) elapsed_ns: u64,
}

/// One queue's report.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DiskPage {
    area: Area,
}

impl DiskPage {
    pub(crate) fn state(&self, state: u32) {
        put(self.area, offset_of!(DiskReport, state), &state.to_le_bytes());
    }

    pub(crate) fn capacity(&self, sectors: u64) {
        put_u64(self.area, offset_of!(DiskReport, capacity), sectors);
    }

    pub(crate) fn moved(&self, done: u64, total: u64) {
        put_u64(self.area, offset_of!(DiskReport, bytes_total), total);
        put_u64(self.area, offset_of!(DiskReport, bytes_done), done);
    }

    pub(crate) fn measured(&self, measured: Measured) {
        put_u64(self.area, offset_of!(DiskReport, ops), measured.ops);
        put_u64(self.area, offset_of!(DiskReport, bytes), measured.bytes);
        put_u64(self.area, offset_of!(DiskReport, elapsed_ns), measured.elapsed_ns);
    }

    pub(crate) fn verified(&self, bytes: u64) {
        put_u64(self.area, offset_of!(DiskReport, bytes_verified), bytes);
    }

    pub(crate) fn pass_map(&self, addr: u64, blocks: u64) {
        put_u64(self.area, offset_of!(DiskReport, pass_map), addr);
        put_u64(self.area, offset_of!(DiskReport, pass_map_blocks), blocks);
    }

    pub(crate) fn sha256(&self, digest: &[u8; 32]) {
        put(self.area, offset_of!(DiskReport, sha256), digest);
    }

    /// Counts one latency in the bucket with this number.
    pub(crate) fn count_latency(&self, bucket: usize) {
        count(self.area, offset_of!(DiskReport, histogram), bucket);
    }

    pub(crate) fn fail(&self, failure: &Failure) {
        put_u64(self.area, offset_of!(DiskReport, error_detail), failure.detail);
        put_u64(self.area, offset_of!(DiskReport, error_sector), failure.sector);
        put(self.area, offset_of!(DiskReport, error), &failure.error.to_le_bytes());
        self.state(state::FAILED);
    }
}

/// The report of the kicks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KickPage {
    area: Area,
}

impl KickPage {
    /// Counts a kick that took `ns` nanoseconds.
    pub(crate) fn count(&self, ns: u64) {
        let at = offset_of!(KickReport, ns);
        let mut sum = [0; 8];
        // As in `count`.
        let _ = self.area.read(at, &mut sum);
        put_u64(self.area, at, u64::from_le_bytes(sum).wrapping_add(ns));
        count(self.area, offset_of!(KickReport, histogram), histogram::bucket(ns));
    }
}

/// Adds one to a bucket of the histogram at `offset`.
fn count(area: Area, offset: usize, bucket: usize) {
    let offset = offset + bucket.min(HIST_BUCKETS - 1) * 4;
    let mut count = [0; 4];
    // Only this program writes here; a VMM that did would spoil its own report.
    let _ = area.read(offset, &mut count);
    put(area, offset, &u32::from_le_bytes(count).saturating_add(1).to_le_bytes());
}

/// Writes a field. The area was sliced to the size of the structure, so it fits.
fn put(area: Area, offset: usize, bytes: &[u8]) {
    let fits = area.write(offset, bytes);
    debug_assert!(fits, "a report field lies inside the report");
}

/// Writes a 64-bit field with one store, so that the VMM never sees half of it.
fn put_u64(area: Area, offset: usize, value: u64) {
    let fits = area.store_u64(offset, value);
    debug_assert!(fits, "a report field lies inside the report");
}
