//! USDT probes: bpftrace, perf and gdb see requests as they pass.
//!
//! ```text
//!   no tracer:   semaphore == 0: a compare and a branch; no argument is computed
//!   a tracer:    attaches: the kernel raises the semaphore, and puts a breakpoint on the nop
//!                semaphore > 0: compute the arguments, fire: nop
//! ```
//! Probes fire for queues whose latencies are recorded. [`PROBES`] lists them; their names and
//! arguments are stable. No probe has more than six arguments: bpftrace reads no more on x86_64.
mod points;

pub use points::PROBES;

use super::operation::Operation;
use super::request::{Request, RequestRecord, total};
use super::stage::Stage;
use std::ffi::{CStr, CString};

/// Arguments of probes, and what they mean. All have 64 bits.
pub const PROBE_ARGUMENTS: &[(&str, &str)] = &[
    ("device", "Name of the device; its number in a microVM. Pointer to a string."),
    ("queue", "Index of the queue."),
    ("head", "Index of the first descriptor. No two requests in flight in a queue have the same."),
    ("operation", "Operation, by its name in the status report. Pointer to a string."),
    ("sector", "First sector of 512 bytes; -1 if the request has none."),
    ("bytes", "Bytes of data, or the length of the ranges to discard or zero."),
    ("status", "Status byte: 0 success, 1 I/O error, 2 unsupported."),
    ("count", "Number of chains, requests or frames."),
    ("depth", "Requests in flight in the queue."),
    ("stage", "Stage, by its name in the status report. Pointer to a string."),
    (
        "time",
        "Nanoseconds: for which the limit held the queue (`throttle__end`), since the request was taken \
         (`request__done`), of the whole request (`request__ended`, `batch__ended`), or in the stage (`request__stage`, \
         `batch__stage`).",
    ),
];

/// Sector of a request that has none.
const NO_SECTOR: u64 = u64::MAX;

/// The queue that probes report, and their arguments made from ours.
#[derive(Debug, Default)]
pub(crate) struct ProbedQueue {
    device: CString,
    queue: u16,
}

impl ProbedQueue {
    /// A name ends before its first NUL.
    pub(crate) fn new(device: &str, queue: u16) -> Self {
        let bytes: Vec<u8> = device.bytes().take_while(|&byte| byte != 0).collect();
        Self { device: CString::new(bytes).unwrap_or_default(), queue }
    }

    /// Arguments of all probes.
    fn id(&self) -> (u64, u64) {
        (pointer(&self.device), self.queue.into())
    }

    /// Calls `fire` with the arguments of all probes, if a tracer is attached.
    #[inline]
    fn fire(&self, is_enabled: bool, fire: impl FnOnce(u64, u64)) {
        if is_enabled {
            let (device, queue) = self.id();
            fire(device, queue);
        }
    }

    #[inline]
    pub(super) fn kick(&self) {
        self.fire(points::kick::is_enabled(), points::kick::fire);
    }

    #[inline]
    pub(super) fn interrupt(&self) {
        self.fire(points::interrupt::is_enabled(), points::interrupt::fire);
    }

    #[inline]
    pub(super) fn throttle_begin(&self) {
        self.fire(points::throttle_begin::is_enabled(), points::throttle_begin::fire);
    }

    #[inline]
    pub(super) fn throttle_end(&self, nanos: impl FnOnce() -> u64) {
        self.fire(points::throttle_end::is_enabled(), |device, queue| {
            points::throttle_end::fire(device, queue, nanos());
        });
    }

    #[inline]
    pub(super) fn batch_taken(&self, count: usize, depth: usize) {
        self.fire(points::batch_taken::is_enabled(), |device, queue| {
            points::batch_taken::fire(device, queue, count as u64, depth as u64);
        });
    }

    /// Calls `fire` with the arguments of a request that has not ended, if a tracer is attached.
    #[inline]
    fn fire_request(
        &self,
        is_enabled: bool,
        fire: fn(u64, u64, u64, u64, u64, u64),
        request: impl FnOnce() -> (&'static Operation, Request),
    ) {
        self.fire(is_enabled, |device, queue| {
            let (operation, Request { head, sector, bytes, .. }) = request();
            let (operation, sector) = (pointer(operation.name), sector.unwrap_or(NO_SECTOR));
            fire(device, queue, head.into(), operation, sector, bytes);
        });
    }

    #[inline]
    pub(super) fn request_taken(&self, request: impl FnOnce() -> (&'static Operation, Request)) {
        use points::request_taken::{fire, is_enabled};
        self.fire_request(is_enabled(), fire, request);
    }

    #[inline]
    pub(super) fn request_started(&self, request: impl FnOnce() -> (&'static Operation, Request)) {
        use points::request_started::{fire, is_enabled};
        self.fire_request(is_enabled(), fire, request);
    }

    /// Whether completed requests are to be kept and reported.
    #[inline]
    pub(super) fn wants_requests(&self) -> bool {
        points::request_done::is_enabled()
            || points::request_ended::is_enabled()
            || points::request_stage::is_enabled()
    }

    #[cold]
    pub(super) fn request_done(&self, operation: &'static Operation, request: &Request, nanos: u64) {
        if points::request_done::is_enabled() {
            let (device, queue) = self.id();
            let (head, status) = (request.head.into(), request.status.into());
            points::request_done::fire(device, queue, head, pointer(operation.name), status, nanos);
        }
    }

    #[cold]
    pub(super) fn request_ended(&self, record: &RequestRecord) {
        let (device, queue) = self.id();
        let RequestRecord { operation, request, .. } = record;
        let (head, operation) = (request.head.into(), pointer(operation.name));
        if points::request_ended::is_enabled() {
            let status = request.status.into();
            points::request_ended::fire(device, queue, head, operation, status, record.total());
        }
        if points::request_stage::is_enabled() {
            for (stage, nanos) in spent(record.stages) {
                points::request_stage::fire(device, queue, head, operation, pointer(stage.c_name()), nanos);
            }
        }
    }

    /// Whether batches are to be reported.
    #[inline]
    pub(super) fn wants_batches(&self) -> bool {
        points::batch_ended::is_enabled() || points::batch_stage::is_enabled()
    }

    #[cold]
    pub(super) fn batch_ended(
        &self,
        operation: &'static Operation,
        count: u64,
        stages: [u64; Stage::ALL.len()],
    ) {
        let ((device, queue), operation) = (self.id(), pointer(operation.name));
        if points::batch_ended::is_enabled() {
            points::batch_ended::fire(device, queue, operation, count, total(stages));
        }
        if points::batch_stage::is_enabled() {
            for (stage, nanos) in spent(stages) {
                points::batch_stage::fire(device, queue, operation, count, pointer(stage.c_name()), nanos);
            }
        }
    }
}

/// Stages with their times; [`Stage::Throttled`] only if a limit held the request, as in reports.
fn spent(stages: [u64; Stage::ALL.len()]) -> impl Iterator<Item = (Stage, u64)> {
    let stages = Stage::ALL.into_iter().zip(stages);
    stages.filter(|(stage, nanos)| *stage != Stage::Throttled || *nanos > 0)
}

/// A string as an argument.
///
/// It is looked at, so that it is in memory: a tracer does not wait for what is not, and sees an empty
/// string.
fn pointer(text: &CStr) -> u64 {
    std::hint::black_box(text.to_bytes_with_nul().first().copied());
    text.as_ptr() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_ends_before_its_first_nul() {
        assert_eq!(ProbedQueue::new("vm0\0x", 1).device.as_c_str(), c"vm0");
    }

    #[test]
    fn arguments_are_explained_and_few() {
        for probe in PROBES {
            assert!(probe.arguments.len() <= 6, "{}: bpftrace reads six on x86_64", probe.name);
            assert_eq!(probe.arguments[..2], ["device", "queue"]);
            for argument in probe.arguments {
                assert!(PROBE_ARGUMENTS.iter().any(|(name, _)| name == argument), "{argument}");
            }
        }
        let used = |name: &str| PROBES.iter().any(|probe| probe.arguments.contains(&name));
        assert!(PROBE_ARGUMENTS.iter().all(|(name, _)| used(name)));
    }
}
