//! A device side against a hostile driver, with checks for both layouts.
//!
//! ```text
//!   step: the driver writes | pop | complete | publish | arm_kicks | fail, disable_kicks
//!         each result is compared, and nothing is written outside the device's areas
//! ```
use crate::arena::Arena;
use crate::hostile::BASE;
use arbitrary::{Error, Result, Unstructured};
use paravane_ring::device::{Batch, Chain, MAX_CHAIN, Queue, QueueConfig, TableMemory};
use paravane_ring::{Area, QueueAddresses, QueueError, Segment};
use paravane_spec::split::DESC_SIZE;
use std::ops::Range;

/// A chain that is popped and not completed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Flight {
    /// Head or identifier.
    pub(crate) id: u16,
    /// Descriptors in the ring.
    pub(crate) descriptors: usize,
}

/// A completion that is not published.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Staged {
    pub(crate) id: u16,
    pub(crate) descriptors: usize,
    pub(crate) written: u32,
}

/// The parts that differ by layout: driver's writes, device's expectations.
pub(crate) trait Layout {
    /// The range that the device may write.
    fn writable(&self) -> Vec<Range<usize>>;

    /// A step of the driver, one of 7.
    fn drive(&mut self, what: u8, arena: &mut Arena, u: &mut Unstructured<'_>) -> Result<()>;

    /// One write of the driver: offset and data.
    fn poke(&self, arena: &Arena, u: &mut Unstructured<'_>) -> Result<(usize, Vec<u8>)>;

    /// Called before a pop.
    fn looks(&mut self, arena: &Arena);

    /// Called for a popped chain.
    ///
    /// `memory` is set if the driver did not write meanwhile.
    ///
    /// Returns its number of ring descriptors; `None` if unknown.
    fn popped(&mut self, id: u16, segments: &[Segment], memory: Option<&[u8]>) -> Option<usize>;

    /// Called after a pop of `count` chains.
    fn looked(&self, count: usize, in_flight: &[Flight], staged: &[Staged]);

    /// Called after a publication, empty or not.
    fn published(&mut self, staged: &[Staged], interrupt: bool, arena: &Arena);

    /// Called after kicks are armed; `more` says that a chain is available.
    fn armed(&self, more: bool, arena: &Arena);
}

/// Indirect tables, that the driver writes to while the device reads one.
struct Tables<'a> {
    arena: &'a mut Arena,
    pokes: Vec<(usize, Vec<u8>)>,
    in_place: bool,
    tampered: bool,
}

impl Tables<'_> {
    fn tamper(&mut self) {
        for (at, data) in self.pokes.drain(..) {
            self.tampered = true;
            self.arena.poke(at, &data);
        }
    }
}

impl TableMemory for Tables<'_> {
    fn in_place(&mut self, addr: u64, len: u32) -> Option<Area> {
        let offset = usize::try_from(addr.checked_sub(BASE)?).ok()?;
        let table = self.arena.area().slice(offset, len as usize).filter(|_| self.in_place)?;
        self.tamper();
        Some(table)
    }

    fn copy(&mut self, addr: u64, out: &mut [u8]) -> bool {
        assert!(out.len() <= MAX_CHAIN * DESC_SIZE && out.len().is_multiple_of(DESC_SIZE));
        let offset = usize::try_from(addr.wrapping_sub(BASE)).unwrap_or(usize::MAX);
        let there = self.arena.area().read(offset, out);
        self.tamper();
        there
    }
}

pub(crate) struct Rig<L> {
    // Dropped before the arena.
    pub(crate) queue: Queue,
    pub(crate) arena: Arena,
    pub(crate) layout: L,
    pub(crate) batch: Batch,
    pub(crate) slots: usize,
    size: u16,
    in_flight: Vec<Flight>,
    /// Completions since the last publication.
    staged: Vec<Staged>,
    latched: Option<QueueError>,
}

impl<L: Layout> Rig<L> {
    /// A rig with a queue at `addresses` in `arena`, which starts at [`BASE`].
    pub(crate) fn new(
        arena: Arena,
        addresses: QueueAddresses,
        features: u64,
        slots: usize,
        layout: L,
    ) -> Self {
        let size = addresses.size;
        let config = QueueConfig::new(addresses, size, features).expect("a correct configuration");
        let [desc, driver, device] = config.areas().map(|part| {
            let offset = (part.addr - BASE) as usize;
            arena.area().slice(offset, part.len).expect("the arena holds the queue")
        });
        // SAFETY: the areas are those that `areas` requests, and the arena outlives the queue.
        let queue = unsafe { config.activate(desc, driver, device) }.expect("areas as asked for");
        let (in_flight, staged) = (vec![], vec![]);
        Self { queue, arena, layout, batch: Batch::new(slots), slots, size, in_flight, staged, latched: None }
    }

    /// Runs steps until the bytes are used up, or the expected state is unknown.
    pub(crate) fn run(mut self, u: &mut Unstructured<'_>) {
        while !u.is_empty() {
            if self.step(u).is_err() {
                return;
            }
        }
    }

    fn step(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        match u.arbitrary::<u8>()? % 16 {
            what @ 0..7 => self.layout.drive(what, &mut self.arena, u)?,
            7..10 => self.pop(u)?,
            10 | 11 => {
                let (which, written) = (usize::from(u.arbitrary::<u8>()?), u.arbitrary()?);
                if !self.in_flight.is_empty() {
                    self.complete(self.in_flight[which % self.in_flight.len()].id, written);
                }
            }
            12 => self.publish(),
            13 => self.arm(),
            14 => match u.arbitrary::<u8>()? % 8 {
                0 => self.complete(u.arbitrary()?, u.arbitrary()?),
                1 => {
                    let what = "the device says so";
                    let now = self.queue.fail(QueueError::Request { head: u.arbitrary()?, what });
                    self.latch(now);
                }
                _ => self.queue.disable_kicks(),
            },
            _ => {
                while let Some(&Flight { id, .. }) = self.in_flight.first() {
                    self.complete(id, 0);
                }
                self.publish();
            }
        }
        self.arena.adopt(&self.layout.writable());
        assert_eq!(self.queue.error(), self.latched);
        if self.latched.is_none() {
            assert_eq!(usize::from(self.queue.in_flight()), self.in_flight.len());
        }
        Ok(())
    }

    /// Checks that a latched queue keeps its first error.
    fn latch(&mut self, error: QueueError) {
        let first = *self.latched.get_or_insert(error);
        assert_eq!(error, first, "another error than the one that latched");
        self.in_flight.clear();
        self.staged.clear();
    }

    fn pop(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        let before = self.arena.expected().to_vec();
        // Writes of the driver while the device reads an indirect table.
        let mut pokes = vec![];
        let how = u.arbitrary::<u8>()?;
        for _ in 0..how % 3 {
            pokes.push(self.layout.poke(&self.arena, u)?);
        }
        self.layout.looks(&self.arena);
        let (queue, batch, arena) = (&mut self.queue, &mut self.batch, &mut self.arena);
        let mut tables = Tables { arena, pokes, in_place: how.is_multiple_of(2), tampered: false };
        let popped = queue.pop_in_place(batch, &mut tables);
        let tampered = tables.tampered;
        let count = match popped {
            Ok(count) => count,
            Err(error) => {
                assert!(batch.chains().is_empty());
                self.latch(error);
                return Ok(());
            }
        };
        assert_eq!(self.latched, None, "a latched queue gave chains");
        assert!(count <= self.slots && count == self.batch.chains().len());
        for chain in self.batch.chains() {
            let (readable, writable) = (self.batch.readable(chain), self.batch.writable(chain));
            check_chain(chain, readable, writable);
            let id = chain.head;
            assert!(id < self.size);
            assert!(self.in_flight.iter().all(|flight| flight.id != id), "{id} twice");
            let memory = if tampered { None } else { Some(&*before) };
            let Some(descriptors) = self.layout.popped(id, &[readable, writable].concat(), memory) else {
                return Err(Error::NotEnoughData);
            };
            self.in_flight.push(Flight { id, descriptors });
        }
        self.layout.looked(count, &self.in_flight, &self.staged);
        Ok(())
    }

    fn complete(&mut self, id: u16, written: u32) {
        let known = self.in_flight.iter().position(|flight| flight.id == id);
        match self.queue.complete(id, written) {
            Ok(()) => {
                let known = known.expect("only what is in flight is completed");
                let Flight { id, descriptors } = self.in_flight.remove(known);
                self.staged.push(Staged { id, descriptors, written });
            }
            Err(error) => {
                assert!(known.is_none(), "{id} is in flight, and {error}");
                if self.latched.is_none() {
                    assert_eq!(error, QueueError::NotInFlight { id: id.into() });
                }
                self.latch(error);
            }
        }
    }

    fn publish(&mut self) {
        self.arena.adopt(&self.layout.writable());
        match self.queue.publish() {
            Ok(interrupt) => {
                assert_eq!(self.latched, None);
                if self.staged.is_empty() {
                    assert!(!interrupt);
                }
                self.arena.adopt(&self.layout.writable());
                self.layout.published(&self.staged, interrupt, &self.arena);
                self.staged.clear();
            }
            Err(error) => {
                // A latched queue publishes nothing.
                self.arena.adopt(&[]);
                self.latch(error);
            }
        }
    }

    fn arm(&mut self) {
        match self.queue.arm_kicks() {
            Ok(more) => {
                assert_eq!(self.latched, None);
                self.arena.adopt(&self.layout.writable());
                self.layout.armed(more, &self.arena);
            }
            Err(error) => self.latch(error),
        }
    }
}

/// Checks the bounds of a chain, which hold for all writes of the driver.
pub(crate) fn check_chain(chain: &Chain, readable: &[Segment], writable: &[Segment]) {
    let count = readable.len() + writable.len();
    assert!((1..=MAX_CHAIN).contains(&count), "{count} segments");
    let total = |part: &[Segment]| part.iter().map(|segment| u64::from(segment.len)).sum::<u64>();
    assert_eq!(total(readable), u64::from(chain.readable_len()));
    assert_eq!(total(writable), u64::from(chain.writable_len()));
    assert!(total(readable) + total(writable) <= u32::MAX.into());
    for segment in readable.iter().chain(writable) {
        assert_ne!(segment.len, 0);
        assert!(segment.addr.checked_add(segment.len.into()).is_some());
    }
}
