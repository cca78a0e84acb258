//! `paravane bench barrier`: the cost of memory ordering in DMA accesses.
//!
//! "Add a memory barrier to DMA functions" (Benjamin Herrenschmidt, QEMU, 2012) puts a full barrier
//! before each access. This benchmark measures that cost, for single accesses and for traffic.
//!
//! | subject | order |
//! |---|---|
//! | `relaxed` | none |
//! | `by-direction` | a read acquires, a write releases (the default) |
//! | `full` | a full barrier before each access, as in the series |
//!
//! * `alone/DIRECTION/SIZE`: one thread accesses sixteen ranges in turn.
//! * `contended/DIRECTION/SIZE`: one range; another CPU keeps writing its first cache line.
//! * `ring/DIRECTION/PAYLOAD`: a driver and a device on two CPUs; one access moves each buffer's
//!   payload ([`payload`]).
use crate::dma::ops::{Ops, PAGE, Work};
use crate::dma::paravane::{BY_DIRECTION, FULL, Paravane, RELAXED};
use crate::dma::timing::{self, EmptyTarget, Loop, Origin, SLICE, Timed, overhead};
use crate::error::broken;
use crate::instructions::Counter;
use crate::machine::ThreadPlacement;
use crate::machine::{Pinned, RealTime, load_average};
use crate::options::MIN_ROUNDS;
use crate::subject::{PARAVANE, Subject};
use crate::{BenchError, Options, Row, published};
use order::{ORDERS, memory};
use paravane_dma::{Memory, Region};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

mod order;
mod payload;

/// The name of this benchmark.
pub(crate) const NAME: &str = "barrier";
/// The notes below its table.
pub(crate) const NOTES: &[&str] = &[
    "relaxed: no order. by-direction: a read acquires, a write releases (the default). full: a full barrier before each access.",
    "alone: one thread, sixteen ranges in turn. contended: one range; another CPU keeps writing its first cache line.",
    "ring: driver and device spin on two CPUs; a split ring of 256, batches of 32. tx: the device reads each payload in one access. rx: it writes it. rate counts payload.",
    "cycles: time stamp counter. The time of the empty loop is subtracted.",
    "published: netperf over an emulated e1000 on gigabit Ethernet. rw: a barrier in dma_memory_rw. rw+map: in dma_memory_map too. host: no guest. The network is the limit: do not compare.",
];

/// The sizes of single accesses, in bytes.
const SIZES: [u32; 4] = [8, 64, 512, 4096];
/// The empty loop, which is subtracted.
const LOOP: &str = "loop";
/// Bytes of guest memory.
const SPAN: u64 = 16 * PAGE;

/// A case with one thread that accesses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Case {
    contended: bool,
    work: Work,
}

impl Case {
    fn all() -> Vec<Self> {
        let works = SIZES.into_iter().flat_map(|len| [Work::Read(len), Work::Write(len)]);
        let works: Vec<Work> = works.collect();
        [false, true]
            .into_iter()
            .flat_map(|contended| works.iter().map(move |&work| Self { contended, work }))
            .collect()
    }

    fn path(self) -> String {
        format!("{}/{}", if self.contended { "contended" } else { "alone" }, self.work)
    }

    fn ops(self) -> Ops {
        Ops::new(self.work, false, 0, if self.contended { PAGE } else { SPAN })
    }
}

/// Whether this is the path of a case with one thread.
pub(crate) fn is_single(path: &str) -> bool {
    Case::all().iter().any(|case| case.path() == path)
}

/// Makes a subject of a case with one thread.
///
/// # Errors
/// No such case or order exists, or the subject cannot be set up.
pub(crate) fn make(path: &str, order: &str) -> Result<Box<dyn Subject>, BenchError> {
    let case = Case::all().into_iter().find(|case| case.path() == path);
    let case = case.ok_or_else(|| BenchError::NoCase(path.to_owned()))?;
    subject(case, order, &memory(SPAN)?.0)
}

fn subject(case: Case, order: &str, memory: &Memory) -> Result<Box<dyn Subject>, BenchError> {
    if order == LOOP {
        return Ok(Box::new(Loop::new(EmptyTarget, case.ops(), case.work.longest())));
    }
    let (ops, longest) = (case.ops(), case.work.longest());
    Ok(match order {
        "relaxed" => Box::new(Loop::new(Paravane::<RELAXED>::direct(memory), ops, longest)),
        "by-direction" => Box::new(Loop::new(Paravane::<BY_DIRECTION>::direct(memory), ops, longest)),
        "full" => Box::new(Loop::new(Paravane::<FULL>::direct(memory), ops, longest)),
        _ => return Err(unknown(order)),
    })
}

/// No such order exists.
#[cold]
fn unknown(order: &str) -> BenchError {
    broken(PARAVANE, format_args!("no order {order}"))
}

/// Another CPU that keeps writing one cache line until dropped.
struct LineWriter {
    over: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl LineWriter {
    /// Writes the first line of `region` from `cpu`.
    fn start(region: Arc<Region>, cpu: usize, real_time: bool) -> Self {
        let over = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&over);
        let thread = std::thread::spawn(move || {
            let _pinned = Pinned::to(cpu);
            let _held = if real_time { RealTime::enter() } else { None };
            let line: NonNull<u64> = region.host().cast();
            // SAFETY: the first eight bytes of a region that this thread keeps mapped; all accesses
            // are atomic or through an access guard.
            let line = unsafe { AtomicU64::from_ptr(line.as_ptr()) };
            let mut number = 0_u64;
            // Relaxed: nothing else is read because of it.
            while !seen.load(Ordering::Relaxed) {
                number += 1;
                line.store(number, Ordering::Relaxed);
            }
        });
        Self { over, thread: Some(thread) }
    }
}

impl Drop for LineWriter {
    fn drop(&mut self) {
        // Relaxed: as above.
        self.over.store(true, Ordering::Relaxed);
        // The thread cannot panic.
        let _ = self.thread.take().map(std::thread::JoinHandle::join);
    }
}

/// Runs the cases that `options` select.
pub(crate) fn run(options: &Options, progress: &mut dyn FnMut(&str)) -> Result<Vec<Row>, BenchError> {
    let filter = options.filter.as_deref().unwrap_or("");
    let singles: Vec<Case> = Case::all().into_iter().filter(|case| case.path().contains(filter)).collect();
    let payloads: Vec<payload::Case> =
        payload::Case::all().into_iter().filter(|case| case.to_string().contains(filter)).collect();
    let mut published = published::dma_barrier::rows();
    published.retain(|row| row.case.contains(filter));
    if singles.is_empty() && payloads.is_empty() && published.is_empty() {
        return Err(BenchError::NoCase(filter.to_owned()));
    }
    let rounds = options.rounds.max(MIN_ROUNDS);
    let mut rows = measure(&singles, &payloads, rounds, SLICE, payload::RUN_TIME, progress)?;
    rows.extend(published);
    Ok(rows)
}

/// Measures all cases and orders, interleaved.
fn measure(
    singles: &[Case],
    payloads: &[payload::Case],
    rounds: u32,
    slice: Duration,
    run: Duration,
    progress: &mut dyn FnMut(&str),
) -> Result<Vec<Row>, BenchError> {
    let load_start = load_average();
    // Must precede pinning this thread to one CPU.
    let placement = ThreadPlacement::choose();
    let mut workloads = Vec::new();
    for &case in payloads {
        progress(&format!("{case}: calibrating"));
        workloads.push(payload::Workload::new(case, &placement, run)?);
    }
    let pinned = placement.cpus.map_or_else(Pinned::here, |cpus| Pinned::to(cpus[0]));
    let mut counter = Counter::choose(progress);
    let (memory, region) = memory(SPAN)?;
    let mut timed = Vec::new();
    for &case in singles {
        if case.contended && placement.cpus.is_none() {
            progress("one CPU: contended cases are omitted");
            continue;
        }
        let of_case: Result<Vec<Timed>, _> = std::iter::once(LOOP)
            .chain(ORDERS)
            .map(|order| Timed::new(case.path(), order, subject(case, order, &memory)?, slice))
            .collect();
        timed.push((case, of_case?));
    }
    for number in 0..rounds as usize {
        for (case, of_case) in &mut timed {
            progress(&format!("round {} of {rounds}: {}", number + 1, case.path()));
            let other = placement.cpus.filter(|_| case.contended);
            let writer =
                other.map(|cpus| LineWriter::start(Arc::clone(&region), cpus[1], placement.real_time));
            // Contention is not a property of the code.
            timing::sample(of_case, number, (!case.contended).then_some(&mut counter))?;
            drop(writer);
        }
        for workload in &mut workloads {
            progress(&format!("round {} of {rounds}: {}", number + 1, workload.case));
            workload.sample(&placement, number)?;
        }
    }
    let origin = Origin {
        bench: NAME,
        counter: counter.method(),
        pinned_cpu: pinned.as_ref().map(Pinned::cpu),
        load: [load_start, load_average()],
    };
    let mut rows = Vec::new();
    for (_, of_case) in &timed {
        if let [alone, orders @ ..] = of_case.as_slice() {
            rows.extend(orders.iter().flat_map(|entry| entry.rows(Some(alone), &origin)));
        }
    }
    rows.extend(workloads.iter().flat_map(|workload| workload.rows(&placement, &origin)));
    if !timed.is_empty() {
        rows.extend(overhead(&origin, rounds));
    }
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_order_of_every_case_runs() {
        for case in Case::all() {
            assert!(is_single(&case.path()));
            for order in ORDERS.into_iter().chain([LOOP]) {
                make(&case.path(), order).unwrap().run(3).unwrap();
            }
        }
        assert!(make("alone/read/8B", "none").is_err());
        assert!(make("alone/read/9B", "full").is_err());
        assert!(!is_single("ring/tx/1500B"));
    }

    #[test]
    fn a_measurement_has_its_rows() {
        let singles = [Case { contended: false, work: Work::Write(8) }];
        let payloads = [payload::Case::all()[0]];
        let tiny = Duration::from_micros(20);
        let rows = measure(&singles, &payloads, 2, tiny, tiny, &mut |_| {}).unwrap();
        for (case, metric) in
            [("alone/write/8B", "time"), ("ring/tx/1500B", "rate"), ("ring/tx/1500B", "cpu")]
        {
            let orders: Vec<&str> = rows
                .iter()
                .filter(|row| row.case == case && row.metric == metric)
                .map(|row| row.subject.as_str())
                .collect();
            assert_eq!(orders, ORDERS, "{case} {metric}");
        }
    }
}
