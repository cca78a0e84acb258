//! A queue under a peer that rewrites the shared memory *while* the queue works on it.
//!
//! ```text
//!   victim's thread                        the peer's thread
//!     one of our sides, each answer          our other side (so that there is work),
//!     checked against what it promises       and bytes flipped, words copied, in between
//! ```
//! A round ends when the victim has latched, or has had enough. Not reproducible by its seed alone: where the
//! threads meet is up to the machine. A fault names the seed and the round's parameters all the same.
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
/// Steps of the victim in a round that no error ends.
const STEPS: usize = 20_000;
/// Steps of the victim after its first error, which must stay.
const STEPS_AFTER: usize = 24;
/// Longer than any round takes; a whole one of these without the end of a round is a hang.
const LONGEST_ROUND: Duration = Duration::from_secs(60);
/// Enough of a chain for the work of the driver.
const MOST_SEGMENTS: usize = 6;

/// Which side of ours is the victim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The device side: a hostile driver.
    Device,
    /// The driver side: a hostile device.
    Driver,
}

/// What to run.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// How long at most.
    pub time: Duration,
    /// Until there were so many hostile writes, if that is earlier.
    pub writes: Option<u64>,
    /// One side, or both in turn.
    pub side: Option<Side>,
    /// One layout (packed or not), or both in turn.
    pub packed: Option<bool>,
    /// Where the random numbers start.
    pub seed: u64,
}

/// What happened.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Queues that lived and died.
    pub rounds: u64,
    /// Buffers that victims took.
    pub buffers: u64,
    /// Bytes that were flipped, words that were copied.
    pub writes: u64,
    /// Rounds that ended without an error.
    pub unharmed: u64,
    /// Errors that latched, by their kind.
    pub errors: BTreeMap<String, u64>,
    /// Rounds by what the victim was.
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

/// Why it could not run.
#[derive(Debug)]
pub enum Refused {
    /// The queue does not have that layout.
    Config(ConfigError),
    /// No memory.
    Memory(rustix::io::Errno),
}

/// Runs until the time is over, or enough was written. A broken promise is a panic; so is a round that does not come to its end.
///
/// # Errors
/// No queue of the wanted layout, or no memory.
pub fn run(options: Options) -> Result<Report, Refused> {
    let mut report = Report::default();
    let mut random = Random::new(options.seed);
    let end = Instant::now() + options.time;
    let rounds = AtomicU64::new(0);
    let (over, watched) = mpsc::channel::<()>();
    std::thread::scope(|scope| {
        scope.spawn(|| watch(&rounds, watched));
        // Dropped at the end, whatever the end is: then the watch is over too.
        let _over = over;
        let enough = options.writes.unwrap_or(u64::MAX);
        while Instant::now() < end && report.writes < enough {
            Round::new(&options, &mut random).run(&mut report)?;
            rounds.store(report.rounds, Relaxed);
        }
        Ok(report)
    })
}

/// Kills the process if a round does not come to its end.
fn watch(rounds: &AtomicU64, watched: mpsc::Receiver<()>) {
    let mut last = u64::MAX;
    while watched.recv_timeout(LONGEST_ROUND) == Err(mpsc::RecvTimeoutError::Timeout) {
        let now = rounds.load(Relaxed);
        if now == last {
            eprintln!("round {now} does not end");
            std::process::abort();
        }
        last = now;
    }
}

/// Feature bits that both sides have.
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
    /// A hostile write once in so many of the peer's steps; 0: none.
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

    fn run(&self, report: &mut Report) -> Result<(), Refused> {
        let layout = DriverConfig::new(self.size, self.indirect, self.features).map_err(Refused::Config)?;
        let memory = Guarded::new(layout.memory()).map_err(Refused::Memory)?;
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

    fn played(&self, layout: DriverConfig, memory: &Guarded) -> Result<Outcome, Refused> {
        // Flush with the end: what reads beyond it is killed.
        let all = memory.area();
        let start = all.len() - layout.memory().next_multiple_of(16);
        let part = |area: Area| area.slice(start, all.len() - start).expect("the queue's part");
        let (open, sealed) = (part(all), part(memory.sealed()));
        let (driver, addresses) =
            driver::Queue::new(layout, DmaArea { area: open, addr: BASE }).map_err(Refused::Config)?;
        let config = QueueConfig::new(addresses, self.size, self.features).map_err(Refused::Config)?;
        let [desc, avail, used] = config.areas().map(|wanted| {
            // What the device must not write to, it can not.
            let area = if wanted.writable { open } else { sealed };
            area.slice((wanted.addr - BASE) as usize, wanted.len).expect("the memory holds the queue")
        });
        // SAFETY: these are the areas asked for, and `memory` outlives the queue. They are mapped for reading
        // only where the queue has no business to write.
        let device = unsafe { config.activate(desc, avail, used) }.map_err(Refused::Config)?;
        let stop = AtomicBool::new(false);
        // The work begins when both are there.
        let both = Barrier::new(2);
        let peer = Peer { area: open, random: Random::new(!self.seed), hostility: self.hostility, writes: 0 };
        let mut device = DeviceSide::new(device, sealed, self.slots, self.seed);
        let mut driver = DriverSide::new(driver, self.seed);
        Ok(std::thread::scope(|scope| match self.side {
            Side::Device => {
                let peer = scope.spawn(|| peer.run(&both, &stop, || driver.step()));
                both.wait();
                let error = live(&mut device, DeviceSide::step, DeviceSide::error, self);
                stop.store(true, Relaxed);
                let writes = peer.join().expect("the peer's side of the queue");
                Outcome { buffers: device.buffers, writes, error }
            }
            Side::Driver => {
                let peer = scope.spawn(|| peer.run(&both, &stop, || device.step()));
                both.wait();
                let error = live(&mut driver, DriverSide::step, DriverSide::error, self);
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

/// The victim's life; on a panic, tells which round it was.
fn live<V>(
    victim: &mut V,
    mut step: impl FnMut(&mut V),
    error: impl Fn(&V) -> Option<QueueError>,
    round: &Round,
) -> Option<QueueError> {
    /// Speaks only while a panic unwinds.
    struct Epitaph<'a>(&'a Round);
    impl Drop for Epitaph<'_> {
        fn drop(&mut self) {
            if std::thread::panicking() {
                eprintln!("in {:?}", self.0);
            }
        }
    }
    let _epitaph = Epitaph(round);
    let mut after = 0;
    for number in 0..STEPS {
        // Where the two share a CPU, each must have its turn.
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

/// Whoever rewrites the memory.
struct Peer {
    area: Area,
    random: Random,
    hostility: u32,
    writes: u64,
}

impl Peer {
    /// Works as the other side, and writes where it likes. Returns the number of such writes.
    fn run(mut self, both: &Barrier, stop: &AtomicBool, mut work: impl FnMut()) -> u64 {
        both.wait();
        while !stop.load(Relaxed) {
            if self.random.once_in(self.hostility) {
                self.write();
            }
            // Sometimes hostile writes come without work between them.
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
            // A bit, so that what was right becomes almost right.
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
            // A descriptor, or so, goes elsewhere.
            6 => {
                let (from, to) = (self.random.below(len / 16) * 16, self.random.below(len / 16) * 16);
                let mut bytes = [0; 16];
                assert!(self.area.read(from, &mut bytes));
                assert!(self.area.write(to, &bytes));
            }
            // An index or a flag word goes up or down a little.
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

/// Our device side, with all that it promises.
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

    /// An answer must be the latched error for ever, or not an error.
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
        let popped = queue.pop(batch, |addr, out| {
            if random.once_in(64) {
                std::thread::yield_now();
            }
            let at = addr.checked_sub(BASE).and_then(|at| usize::try_from(at).ok());
            at.is_some_and(|at| memory.read(at, out))
        });
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

    /// Some of those in flight, in their order or in another.
    fn complete(&mut self) {
        let ordered = self.random.once_in(2);
        // None at all is completed in a latched queue too.
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

/// Our driver side, with all that it promises.
struct DriverSide {
    queue: driver::Queue,
    random: Random,
    /// Identifier, writable bytes, and whether the device may know of it.
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

    /// The device has used a buffer.
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
                // What comes before an error is returned first.
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

    /// A few seconds of what the program does for hours; more of them where the two threads seldom run at once.
    #[test]
    fn nothing_breaks_in_a_short_while() {
        let (time, writes) = (Duration::from_secs(120), Some(300_000));
        let options = Options { time, writes, side: None, packed: None, seed: 1 };
        let report = run(options).expect("both layouts and some memory");
        assert!(report.rounds > 0 && report.writes > 0 && report.buffers > 0, "{report}");
        println!("{report}");
    }
}
