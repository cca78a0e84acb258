//! Timing of accesses: slices of a loop, less the time of the empty loop.
use super::ops::{Op, Ops};
use crate::error::broken;
use crate::instructions::Counter;
use crate::spread::Spread;
use crate::subject::{PARAVANE, Subject};
use crate::{BenchError, Row};
use std::hint::black_box;
use std::time::{Duration, Instant};

/// Accesses per access guard, as in a batch of a queue.
pub(crate) const BATCH: u16 = 32;
/// Slices in one round of one subject; the median slice stands for the round.
const SLICES: usize = 21;
/// Length of a slice.
///
/// Long beside reading the clock, short beside a time slice of the scheduler.
pub(crate) const SLICE: Duration = Duration::from_micros(400);

/// A way to access guest memory.
pub(crate) trait Target {
    /// Access for a batch.
    type AccessGuard<'a>: MemoryAccess
    where
        Self: 'a;

    /// Starts a batch.
    fn enter(&mut self) -> Self::AccessGuard<'_>;
}

/// The accesses of a batch.
pub(crate) trait MemoryAccess {
    /// Reads bytes.
    fn read(&self, addr: u64, out: &mut [u8]) -> Result<(), BenchError>;
    /// Writes bytes.
    fn write(&self, addr: u64, data: &[u8]) -> Result<(), BenchError>;
    /// Reads an object of four bytes.
    fn read4(&self, addr: u64) -> Result<u32, BenchError>;
    /// Writes an object of four bytes.
    fn write4(&self, addr: u64, value: u32) -> Result<(), BenchError>;
}

/// A target without memory: the empty loop.
pub(crate) struct EmptyTarget;

impl Target for EmptyTarget {
    type AccessGuard<'a> = Self;

    fn enter(&mut self) -> Self {
        Self
    }
}

impl MemoryAccess for EmptyTarget {
    #[inline(always)]
    fn read(&self, addr: u64, out: &mut [u8]) -> Result<(), BenchError> {
        black_box((addr, out.len()));
        Ok(())
    }

    #[inline(always)]
    fn write(&self, addr: u64, data: &[u8]) -> Result<(), BenchError> {
        black_box((addr, data.len()));
        Ok(())
    }

    #[inline(always)]
    fn read4(&self, addr: u64) -> Result<u32, BenchError> {
        Ok(black_box(addr) as u32)
    }

    #[inline(always)]
    fn write4(&self, addr: u64, value: u32) -> Result<(), BenchError> {
        black_box((addr, value));
        Ok(())
    }
}

/// The local buffer of an access.
///
/// It has the same offset in a page for every subject: the speed of a copy depends on the offsets
/// of source and target.
pub(crate) struct LocalBuffer(Vec<BufferPage>);

#[derive(Clone, zerocopy::FromBytes, zerocopy::IntoBytes)]
#[repr(C, align(4096))]
struct BufferPage([u8; 4096]);

impl LocalBuffer {
    /// Offset in the first page, different from those of the ranges in guest memory.
    const OFFSET: usize = 1024 + 64;

    /// At least `len` bytes.
    pub(crate) fn new(len: usize) -> Self {
        Self(vec![BufferPage([0x5a; 4096]); (len + Self::OFFSET).div_ceil(4096)])
    }

    /// The bytes.
    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        &mut zerocopy::IntoBytes::as_mut_bytes(self.0.as_mut_slice())[Self::OFFSET..]
    }
}

/// A sequence of accesses to a target, alone on its cache lines.
#[repr(align(128))]
pub(crate) struct Loop<T> {
    target: T,
    ops: Ops,
    own: LocalBuffer,
}

impl<T> Loop<T> {
    /// `longest` is the length of the longest access in bytes.
    pub(crate) fn new(target: T, ops: Ops, longest: usize) -> Self {
        Self { target, ops, own: LocalBuffer::new(longest) }
    }
}

impl<T: Target> Subject for Loop<T> {
    fn run(&mut self, batches: u32) -> Result<u64, BenchError> {
        let mut batch = [Op::default(); BATCH as usize];
        let own = self.own.bytes();
        let mut sum = 0u64;
        for _ in 0..batches {
            self.ops.fill(&mut batch);
            let guard = self.target.enter();
            for op in &batch {
                let len = op.len as usize;
                match (op.write, len) {
                    (false, 4) => sum = sum.wrapping_add(guard.read4(op.addr)?.into()),
                    (true, 4) => guard.write4(op.addr, sum as u32)?,
                    (false, _) => {
                        guard.read(op.addr, &mut own[..len])?;
                        sum = sum.wrapping_add(black_box(&own)[0].into());
                    }
                    (true, _) => guard.write(op.addr, &own[..len])?,
                }
            }
        }
        Ok(sum)
    }
}

/// The time stamp counter; 0 on processors without a known one.
#[inline(always)]
pub(crate) fn cycles() -> u64 {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 processor has the instruction. If the system forbids it, the process
    // ends.
    unsafe {
        std::arch::x86_64::_rdtsc()
    }
    #[cfg(not(target_arch = "x86_64"))]
    0
}

/// One round of one subject, per access, loop included.
#[derive(Clone, Copy, Debug, Default)]
struct Sample {
    time: f64,
    cycles: f64,
    instructions: Option<f64>,
}

/// A subject of a case with its samples.
pub(crate) struct Timed {
    pub(crate) case: String,
    pub(crate) name: &'static str,
    subject: Box<dyn Subject>,
    batches: u32,
    samples: Vec<Sample>,
}

impl Timed {
    /// Finds the number of batches that fill a slice.
    pub(crate) fn new(
        case: String,
        name: &'static str,
        mut subject: Box<dyn Subject>,
        slice: Duration,
    ) -> Result<Self, BenchError> {
        let mut batches = 4u32;
        loop {
            // The least of three: an interrupted one would make slices too short.
            let mut took = Duration::MAX;
            for _ in 0..3 {
                let start = Instant::now();
                black_box(subject.run(black_box(batches))?);
                took = took.min(start.elapsed());
            }
            if took >= slice / 8 || batches >= 1 << 24 {
                let scale = slice.as_secs_f64() / took.as_secs_f64().max(1e-9);
                let batches = ((f64::from(batches) * scale) as u32).max(1);
                return Ok(Self { case, name, subject, batches, samples: Vec::new() });
            }
            batches *= 2;
        }
    }

    /// Measures one slice: nanoseconds and cycles per access.
    fn slice(&mut self) -> Result<[f64; 2], BenchError> {
        let (start, first) = (Instant::now(), cycles());
        black_box(self.subject.run(black_box(self.batches))?);
        let (last, took) = (cycles(), start.elapsed());
        let accesses = f64::from(self.batches) * f64::from(BATCH);
        Ok([took.as_nanos() as f64 / accesses, last.wrapping_sub(first) as f64 / accesses])
    }

    /// Instructions per access.
    ///
    /// Single steps repeat exactly, so only the first round counts them.
    fn instructions(&mut self, counter: &mut Counter) -> Result<Option<f64>, BenchError> {
        if let (Counter::SingleStep, Some(first)) = (&*counter, self.samples.first()) {
            return Ok(first.instructions);
        }
        match counter.around(|| self.subject.run(black_box(self.batches)))? {
            (_, Some(count)) => Ok(Some(count as f64 / (f64::from(self.batches) * f64::from(BATCH)))),
            (_, None) => counter.stepped(&self.case, BATCH, self.name),
        }
    }

    /// The rows of all rounds, less the time of the empty loop.
    pub(crate) fn rows(&self, alone: Option<&Self>, origin: &Origin<'_>) -> Vec<Row> {
        let row = |metric: &str, unit: &str, method: &str, of: fn(&Sample) -> Option<f64>| {
            let values: Option<Vec<f64>> = (self.samples.iter().enumerate())
                .map(|(i, sample)| {
                    let alone = alone.and_then(|alone| alone.samples.get(i));
                    Some(of(sample)? - alone.map_or(Some(0.0), of)?)
                })
                .collect();
            origin.row(&self.case, self.name, (metric, unit, method), &values?)
        };
        let cycles = |sample: &Sample| (sample.cycles > 0.0).then_some(sample.cycles);
        [
            row("time", "ns/access", "clock", |sample| Some(sample.time)),
            row("cycles", "cycles/access", "tsc", cycles),
            row("instructions", "instr/access", origin.counter, |sample| sample.instructions),
        ]
        .into_iter()
        .flatten()
        .collect()
    }
}

/// Measures one round of the subjects of a case: the median slice of each.
///
/// Slices are interleaved, so that a disturbance falls on all subjects alike.
pub(crate) fn sample(
    of_case: &mut [Timed],
    number: usize,
    mut counter: Option<&mut Counter>,
) -> Result<(), BenchError> {
    let subjects = of_case.len();
    let mut slices = vec![[const { Vec::new() }; 2]; subjects];
    for slice in 0..SLICES {
        for turn in 0..subjects {
            // The first subject rotates.
            let at = (turn + slice + number) % subjects;
            for (values, value) in slices[at].iter_mut().zip(of_case[at].slice()?) {
                values.push(value);
            }
        }
    }
    for (entry, slices) in of_case.iter_mut().zip(&slices) {
        let middle = |values: &[f64]| Spread::of(values).map_or(0.0, |spread| spread.median);
        let [time, cycles] = [middle(&slices[0]), middle(&slices[1])];
        let instructions = match &mut counter {
            Some(counter) => entry.instructions(counter)?,
            None => None,
        };
        entry.samples.push(Sample { time, cycles, instructions });
    }
    Ok(())
}

/// The fields that all rows of a run share.
pub(crate) struct Origin<'a> {
    /// Name of the benchmark.
    pub(crate) bench: &'a str,
    /// Method of counting instructions.
    pub(crate) counter: &'a str,
    /// CPU of the measuring thread.
    pub(crate) pinned_cpu: Option<usize>,
    /// Load average at the start and at the end.
    pub(crate) load: [Option<f64>; 2],
}

impl Origin<'_> {
    /// A row of the values of all rounds; `None` without values.
    pub(crate) fn row(
        &self,
        case: &str,
        subject: &str,
        (metric, unit, method): (&str, &str, &str),
        values: &[f64],
    ) -> Option<Row> {
        let spread = Spread::of(values)?;
        Some(Row {
            bench: self.bench.to_owned(),
            case: case.to_owned(),
            subject: subject.to_owned(),
            metric: metric.to_owned(),
            unit: unit.to_owned(),
            median: spread.median,
            min: spread.min,
            max: spread.max,
            rounds: values.len() as u32,
            values: values.to_vec(),
            method: method.to_owned(),
            pinned_cpu: self.pinned_cpu,
            load: self.load,
        })
    }
}

/// The cost of reading the clocks, which each slice does once.
pub(crate) fn overhead(origin: &Origin<'_>, rounds: u32) -> Vec<Row> {
    let mut readings = [Vec::new(), Vec::new()];
    for _ in 0..rounds {
        let (mut times, mut ticks) = (Vec::new(), Vec::new());
        for _ in 0..1001 {
            let (start, first) = (Instant::now(), cycles());
            let (last, took) = (cycles(), start.elapsed());
            times.push(took.as_nanos() as f64);
            ticks.push(last.wrapping_sub(first) as f64);
        }
        for (reading, values) in readings.iter_mut().zip([times, ticks]) {
            reading.extend(Spread::of(&values).map(|spread| spread.median));
        }
    }
    [
        origin.row("overhead/timer", "clock", ("time", "ns/reading", "clock"), &readings[0]),
        origin.row("overhead/timer", "clock", ("cycles", "cycles/reading", "tsc"), &readings[1]),
    ]
    .into_iter()
    .flatten()
    .filter(|row| row.metric == "time" || row.median > 0.0)
    .collect()
}

/// An access was refused.
#[cold]
pub(crate) fn refused(error: impl std::fmt::Display) -> BenchError {
    broken(PARAVANE, error)
}
