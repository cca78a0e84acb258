//! A queue with a peer that rewrites shared memory *while* the queue works on it.
//!
//! ```text
//!   thread of the victim                   thread of the peer
//!     one side of a queue; each result       the other side (so that there is work),
//!     is checked                             and flipped bits, copied words in between
//! ```
//! A round ends when the victim has latched, or after a number of steps. A seed does not reproduce
//! the interleaving of the threads. A finding names the seed and the parameters of its round.
use crate::device_rig::check_chain;
use crate::guarded::Guarded;
use paravane_ring::device::{self, Batch, QueueConfig};
use paravane_ring::driver::{self, BufferId, DriverConfig, Used};
use paravane_ring::{Area, ConfigError, DmaArea, QueueError, Segment};
use paravane_spec::feature::{EVENT_IDX, IN_ORDER, INDIRECT_DESC, RING_PACKED};
use paravane_test_support::Random;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Barrier, mpsc};
use std::time::{Duration, Instant};

/// Device address of the first byte.
const BASE: u64 = 0x7_0000_0000;
/// Steps of the victim in a round without error.
const STEPS: usize = 20_000;
/// Steps of the victim after its first error, which must not change.
const STEPS_AFTER: usize = 24;
/// Time limit for a round; exceeding it is a hang.
const LONGEST_ROUND: Duration = Duration::from_secs(60);
/// Most segments of a chain of the driver.
const MOST_SEGMENTS: usize = 6;

/// The side that is the victim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The device side: a hostile driver.
    Device,
    /// The driver side: a hostile device.
    Driver,
}

/// Options of a run.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Time limit.
    pub time: Duration,
    /// Limit of hostile writes, if any.
    pub writes: Option<u64>,
    /// The side; `None` for both in turn.
    pub side: Option<Side>,
    /// Whether packed; `None` for both layouts in turn.
    pub packed: Option<bool>,
    /// Seed of the random numbers.
    pub seed: u64,
}

/// Counts of a run.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Rounds, each with a new queue.
    pub rounds: u64,
    /// Buffers that victims processed.
    pub buffers: u64,
    /// Hostile writes.
    pub writes: u64,
    /// Rounds without an error.
    pub unharmed: u64,
    /// Latched errors by kind.
    pub errors: BTreeMap<String, u64>,
    /// Rounds by side and layout of the victim.
    pub victims: BTreeMap<String, u64>,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} queues, {} buffers, {} hostile writes", self.rounds, self.buffers, self.writes)?;
        for (victim, rounds) in &self.victims {
            writeln!(f, "{rounds:>12}  {victim}")?;
        }
        writeln!(f, "{:>12}  ended without an error", self.unharmed)?;
        for (error, count) in &self.errors {
            writeln!(f, "{count:>12}  {error}")?;
        }
        Ok(())
    }
}

/// Why a run failed to start.
#[derive(Debug)]
pub enum RunError {
    /// The queue does not support the layout.
    Config(ConfigError),
    /// Shared memory cannot be mapped.
    Memory(rustix::io::Errno),
}

impl fmt::Display for RunError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Config(error) => write!(f, "cannot make a queue: {error}"),
            Self::Memory(error) => write!(f, "cannot map shared memory: {error}"),
        }
    }
}

impl std::error::Error for RunError {}

/// Runs rounds until the time or the limit of writes is reached.
///
/// Aborts the process if a round hangs.
///
/// # Errors
/// The layout is not supported, or memory cannot be mapped.
///
/// # Panics
/// The victim broke a promise.
pub fn run(options: Options) -> Result<Report, RunError> {
    let mut report = Report::default();
    let mut random = Random::new(options.seed);
    let end = Instant::now() + options.time;
    let rounds = AtomicU64::new(0);
    let (over, watched) = mpsc::channel::<()>();
    std::thread::scope(|scope| {
        scope.spawn(|| watch(&rounds, watched));
        // Dropped at the end, also by a panic: ends the watch.
        let _over = over;
        let enough = options.writes.unwrap_or(u64::MAX);
        while Instant::now() < end && report.writes < enough {
            Round::new(&options, &mut random).run(&mut report)?;
            rounds.store(report.rounds, Relaxed);
        }
        Ok(report)
    })
}

/// Aborts the process if a round hangs.
fn watch(rounds: &AtomicU64, watched: mpsc::Receiver<()>) {
    let mut last = u64::MAX;
    while watched.recv_timeout(LONGEST_ROUND) == Err(mpsc::RecvTimeoutError::Timeout) {
        let now = rounds.load(Relaxed);
        if now == last {
            eprintln!("round {now} did not end within {LONGEST_ROUND:?}");
            std::process::abort();
        }
        last = now;
    }
}

/// Feature bits of both sides.
fn supported() -> u64 {
    match DriverConfig::new(1, 0, QueueConfig::FEATURES) {
        Err(ConfigError::Features(refused)) => QueueConfig::FEATURES & !refused,
        _ => QueueConfig::FEATURES,
    }
}

/// The parameters of one round.
#[derive(Clone, Copy, Debug)]
struct Round {
    side: Side,
    size: u16,
    indirect: u16,
    features: u64,
    slots: usize,
    /// Steps of the peer per hostile write; 0 for none.
    hostility: u32,
    seed: u64,
}

impl Round {
    fn new(options: &Options, random: &mut Random) -> Self {
        let coin = |random: &mut Random| random.once_in(2);
        let side = match options.side {
            Some(side) => side,
            None if coin(random) => Side::Device,
            None => Side::Driver,
        };
        let packed = options.packed.unwrap_or_else(|| coin(random) && supported() & RING_PACKED != 0);
        let mut features = random.u64() & supported() & (INDIRECT_DESC | EVENT_IDX | IN_ORDER);
        features |= if packed { RING_PACKED } else { 0 };
        Self {
            side,
            size: 1 << random.below(9),
            indirect: random.below(12) as u16,
            features,
            slots: 1 + random.below(40),
            hostility: [0, 1000, 200, 50, 10, 2, 1][random.below(7)],
            seed: random.u64(),
        }
    }

    fn run(&self, report: &mut Report) -> Result<(), RunError> {
        let layout = DriverConfig::new(self.size, self.indirect, self.features).map_err(RunError::Config)?;
        let memory = Guarded::new(layout.memory()).map_err(RunError::Memory)?;
        let outcome = self.played(layout, &memory)?;
        report.rounds += 1;
        report.buffers += outcome.buffers;
        report.writes += outcome.writes;
        let packed = if self.features & RING_PACKED != 0 { "packed" } else { "split" };
        *report.victims.entry(format!("{:?} {packed}", self.side).to_lowercase()).or_default() += 1;
        match outcome.error {
            None => report.unharmed += 1,
            Some(error) => {
                let text = format!("{error:?}");
                let kind = text.split([' ', '(']).next().unwrap_or_default();
                *report.errors.entry(kind.to_owned()).or_default() += 1;
            }
        }
        Ok(())
    }

    fn played(&self, layout: DriverConfig, memory: &Guarded) -> Result<Outcome, RunError> {
        // Placed at the end of the memory: a read beyond faults.
        let all = memory.area();
        let start = all.len() - layout.memory().next_multiple_of(16);
        let part = |area: Area| area.slice(start, all.len() - start).expect("the queue's part");
        let (open, sealed) = (part(all), part(memory.sealed()));
        let (driver, addresses) =
            driver::Queue::new(layout, DmaArea { area: open, addr: BASE }).map_err(RunError::Config)?;
        let config = QueueConfig::new(addresses, self.size, self.features).map_err(RunError::Config)?;
        let [desc, avail, used] = config.areas().map(|wanted| {
            // The device cannot write areas that it must not write.
            let area = if wanted.writable { open } else { sealed };
            area.slice((wanted.addr - BASE) as usize, wanted.len).expect("the memory holds the queue")
        });
        // SAFETY: the areas are those that `areas` requests, and `memory` outlives the queue. Areas
        // that the queue must not write are mapped read-only.
        let device = unsafe { config.activate(desc, avail, used) }.map_err(RunError::Config)?;
        let stop = AtomicBool::new(false);
        // Both threads start together.
        let both = Barrier::new(2);
        let peer = Peer { area: open, random: Random::new(!self.seed), hostility: self.hostility, writes: 0 };
        let mut device = DeviceSide::new(device, sealed, self.slots, self.seed);
        let mut driver = DriverSide::new(driver, self.seed);
        Ok(std::thread::scope(|scope| match self.side {
            Side::Device => {
                let peer = scope.spawn(|| peer.run(&both, &stop, || driver.step()));
                both.wait();
                let error = drive(&mut device, DeviceSide::step, DeviceSide::error, self);
                stop.store(true, Relaxed);
                let writes = peer.join().expect("the peer's side of the queue");
                Outcome { buffers: device.buffers, writes, error }
            }
            Side::Driver => {
                let peer = scope.spawn(|| peer.run(&both, &stop, || device.step()));
                both.wait();
                let error = drive(&mut driver, DriverSide::step, DriverSide::error, self);
                stop.store(true, Relaxed);
                let writes = peer.join().expect("the peer's side of the queue");
                Outcome { buffers: driver.buffers, writes, error }
            }
        }))
    }
}

struct Outcome {
    buffers: u64,
    writes: u64,
    error: Option<QueueError>,
}

/// Runs the victim; on a panic, prints the round.
fn drive<V>(
    victim: &mut V,
    mut step: impl FnMut(&mut V),
    error: impl Fn(&V) -> Option<QueueError>,
    round: &Round,
) -> Option<QueueError> {
    /// Prints the round while a panic unwinds.
    struct RoundOnPanic<'a>(&'a Round);
    impl Drop for RoundOnPanic<'_> {
        fn drop(&mut self) {
            if std::thread::panicking() {
                eprintln!("in {:?}", self.0);
            }
        }
    }
    let _on_panic = RoundOnPanic(round);
    let mut after = 0;
    for number in 0..STEPS {
        // On one CPU, each thread must have its turn.
        if number % 128 == 0 {
            std::thread::yield_now();
        }
        step(victim);
        after += usize::from(error(victim).is_some());
        if after > STEPS_AFTER {
            break;
        }
    }
    error(victim)
}

/// The peer that rewrites the memory.
struct Peer {
    area: Area,
    random: Random,
    hostility: u32,
    writes: u64,
}

impl Peer {
    /// Works as the other side and makes hostile writes; returns their number.
    fn run(mut self, both: &Barrier, stop: &AtomicBool, mut work: impl FnMut()) -> u64 {
        both.wait();
        while !stop.load(Relaxed) {
            if self.random.once_in(self.hostility) {
                self.write();
            }
            // Sometimes several hostile writes without work between them.
            if !self.random.once_in(4) {
                work();
            }
        }
        self.writes
    }

    fn write(&mut self) {
        self.writes += 1;
        let len = self.area.len();
        match self.random.below(8) {
            // Flip a bit: a correct value becomes almost correct.
            0..4 => {
                let (at, bit) = (self.random.below(len), 1 << self.random.below(8));
                let mut byte = [0];
                assert!(self.area.read(at, &mut byte));
                assert!(self.area.write(at, &[byte[0] ^ bit]));
            }
            4 | 5 => {
                let (at, byte) = (self.random.below(len), self.random.u64() as u8);
                assert!(self.area.write(at, &[byte]));
            }
            // Copy a descriptor or so to another place.
            6 => {
                let (from, to) = (self.random.below(len / 16) * 16, self.random.below(len / 16) * 16);
                let mut bytes = [0; 16];
                assert!(self.area.read(from, &mut bytes));
                assert!(self.area.write(to, &bytes));
            }
            // Change an index or a flags word a little.
            _ => {
                let at = self.random.below(len / 2) * 2;
                let mut bytes = [0; 2];
                assert!(self.area.read(at, &mut bytes));
                let near =
                    u16::from_le_bytes(bytes).wrapping_add(self.random.below(7) as u16).wrapping_sub(3);
                assert!(self.area.write(at, &near.to_le_bytes()));
            }
        }
    }
}

/// The device side, with checks of all its promises.
struct DeviceSide {
    queue: device::Queue,
    memory: Area,
    batch: Batch,
    slots: usize,
    random: Random,
    in_flight: Vec<u16>,
    latched: Option<QueueError>,
    buffers: u64,
}

impl DeviceSide {
    fn new(queue: device::Queue, memory: Area, slots: usize, seed: u64) -> Self {
        Self {
            queue,
            memory,
            batch: Batch::new(slots),
            slots,
            random: Random::new(seed),
            in_flight: vec![],
            latched: None,
            buffers: 0,
        }
    }

    fn error(&self) -> Option<QueueError> {
        self.latched
    }

    fn step(&mut self) {
        match self.random.below(8) {
            0..3 => self.pop(),
            3..6 => self.complete(),
            6 => {
                let published = self.queue.publish();
                self.check(published.map(drop));
            }
            _ if self.random.once_in(3) => self.queue.disable_kicks(),
            _ => {
                let armed = self.queue.arm_kicks();
                self.check(armed.map(drop));
            }
        }
        assert_eq!(self.queue.error(), self.latched);
        if self.latched.is_none() {
            assert_eq!(usize::from(self.queue.in_flight()), self.in_flight.len());
        }
    }

    /// Checks that a result is the latched error, or no error before it.
    fn check(&mut self, answer: Result<(), QueueError>) {
        match (answer, self.latched) {
            (Ok(()), None) => {}
            (Ok(()), Some(error)) => panic!("the queue has forgotten: {error}"),
            (Err(error), None) => self.latched = Some(error),
            (Err(error), Some(first)) => assert_eq!(error, first, "another error than the first"),
        }
    }

    fn pop(&mut self) {
        let Self { queue, memory, batch, random, .. } = self;
        let popped = if random.once_in(2) {
            queue.pop_in_place(batch, DmaArea { area: *memory, addr: BASE })
        } else {
            queue.pop(batch, |addr, out| {
                if random.once_in(64) {
                    std::thread::yield_now();
                }
                let at = addr.checked_sub(BASE).and_then(|at| usize::try_from(at).ok());
                at.is_some_and(|at| memory.read(at, out))
            })
        };
        self.check(popped.map(drop));
        let Ok(count) = popped else {
            assert!(self.batch.chains().is_empty());
            return;
        };
        assert!(count <= self.slots && count == self.batch.chains().len());
        for chain in self.batch.chains() {
            assert!(chain.head < self.queue.size());
            assert!(!self.in_flight.contains(&chain.head), "{} is in flight twice", chain.head);
            self.in_flight.push(chain.head);
            check_chain(chain, self.batch.readable(chain), self.batch.writable(chain));
        }
        assert!(self.in_flight.len() <= self.queue.size().into());
        self.buffers += count as u64;
    }

    /// Some of the chains in flight, in order or not.
    fn complete(&mut self) {
        let ordered = self.random.once_in(2);
        // Completing no chain succeeds in a latched queue too.
        if ordered && self.random.once_in(2) && !self.in_flight.is_empty() {
            let all = self.queue.complete_all(self.in_flight.drain(..).map(|head| (head, 1)));
            self.check(all);
            return;
        }
        for _ in 0..self.random.below(8) {
            if self.in_flight.is_empty() {
                return;
            }
            let which = if ordered { 0 } else { self.random.below(self.in_flight.len()) };
            let head = self.in_flight.remove(which);
            let written = self.random.u64() as u32 >> self.random.below(32);
            let completed = self.queue.complete(head, written);
            self.check(completed);
        }
    }
}

/// The driver side, with checks of all its promises.
struct DriverSide {
    queue: driver::Queue,
    random: Random,
    /// Identifier, writable bytes, and whether published.
    in_flight: Vec<(u16, u32, bool)>,
    token: Option<driver::PollToken>,
    latched: Option<QueueError>,
    buffers: u64,
}

impl DriverSide {
    fn new(queue: driver::Queue, seed: u64) -> Self {
        Self { queue, random: Random::new(seed), in_flight: vec![], token: None, latched: None, buffers: 0 }
    }

    fn error(&self) -> Option<QueueError> {
        self.latched
    }

    fn step(&mut self) {
        match self.random.below(12) {
            0..4 => self.add(),
            4 | 5 => {
                self.queue.publish();
                if self.latched.is_none() {
                    self.in_flight.iter_mut().for_each(|buffer| buffer.2 = true);
                }
            }
            6..8 => (0..self.random.below(8)).for_each(|_| self.take_back()),
            8 | 9 => self.take_many(),
            10 if self.random.once_in(2) => self.token = Some(self.queue.enable_interrupts()),
            10 => self.queue.disable_interrupts(),
            _ => {
                if let Some(token) = self.token {
                    let _ = self.queue.poll(token);
                }
            }
        }
        assert_eq!(self.queue.error(), self.latched);
        if self.latched.is_none() {
            assert_eq!(usize::from(self.queue.in_flight()), self.in_flight.len());
        } else {
            assert_eq!(self.queue.room(), 0);
        }
    }

    fn add(&mut self) {
        let count = 1 + self.random.below(MOST_SEGMENTS);
        let segments: Vec<_> = (0..count)
            .map(|_| Segment { addr: self.random.u64() >> 1, len: 1 + self.random.below(9000) as u32 })
            .collect();
        let (readable, writable) = segments.split_at(self.random.below(count + 1));
        let room = self.queue.room();
        match self.queue.add(readable, writable) {
            Ok(id) => {
                assert!(self.latched.is_none() && count <= room);
                assert!(id.0 < self.queue.size());
                assert!(self.in_flight.iter().all(|buffer| buffer.0 != id.0), "{} twice", id.0);
                let writable = writable.iter().map(|segment| segment.len).sum();
                self.in_flight.push((id.0, writable, false));
            }
            Err(full) => assert!(full.needed > full.free && count > room),
        }
    }

    /// Checks a used buffer.
    fn returned(&mut self, used: Used) {
        let at = self.in_flight.iter().position(|buffer| buffer.0 == used.id.0).expect("in flight");
        let (_, writable, published) = self.in_flight.swap_remove(at);
        assert!(published, "returned before the device could know of it");
        assert!(used.len <= writable, "{} bytes written to {writable}", used.len);
        self.buffers += 1;
    }

    fn take_many(&mut self) {
        let mut out = [Used { id: BufferId(0), len: 0 }; 8];
        match self.queue.take_used(&mut out) {
            Ok(count) => {
                assert_eq!(self.latched, None, "the queue has forgotten");
                out[..count].iter().for_each(|used| self.returned(*used));
                // Buffers before an error are returned first.
                self.latched = self.queue.error();
                assert!(self.latched.is_none() || count > 0, "an error that was not told");
            }
            Err(error) => {
                let first = *self.latched.get_or_insert(error);
                assert_eq!(error, first, "another error than the first");
            }
        }
    }

    fn take_back(&mut self) {
        match self.queue.pop_used() {
            Ok(used) => {
                assert_eq!(self.latched, None, "the queue has forgotten");
                used.into_iter().for_each(|used| self.returned(used));
            }
            Err(error) => {
                let first = *self.latched.get_or_insert(error);
                assert_eq!(error, first, "another error than the first");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Options, run};
    use std::time::Duration;

    /// A few seconds of the program; more if the two threads seldom run at once.
    #[test]
    fn nothing_breaks_in_a_short_while() {
        let (time, writes) = (Duration::from_secs(120), Some(300_000));
        let options = Options { time, writes, side: None, packed: None, seed: 1 };
        let report = run(options).expect("both layouts and some memory");
        assert!(report.rounds > 0 && report.writes > 0 && report.buffers > 0, "{report}");
        println!("{report}");
    }
}
