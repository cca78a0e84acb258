//! Model of a queue without a ring.
//!
//! Buffers wait, are being served, or have come back.
use crate::peer::{Peer, pattern};
use paravane_ring::{DmaArea, Segment};
use paravane_spec::feature::{INDIRECT_DESC, RING_PACKED};
use proptest::prelude::*;
use std::collections::VecDeque;

/// Bytes set aside for a buffer's segments.
const SLOT: usize = 4096;
/// Most segments of a buffer here.
pub(crate) const MAX_SEGMENTS: u16 = 8;

/// A step. Numbers are taken modulo what there is.
#[derive(Clone, Debug)]
pub(crate) enum Op {
    /// The driver adds a buffer with these numbers of segments.
    ///
    /// Their lengths follow from `len`.
    Add { readable: u16, writable: u16, len: u32 },
    /// The driver asks whether to kick.
    Kick,
    /// The device takes what is available.
    Pop,
    /// The device completes one of the chains that it has.
    Complete { which: usize, len: u32 },
    /// The device publishes and asks whether to interrupt.
    Publish,
    /// The device asks for kicks.
    ArmKicks,
    /// The device asks for none.
    DisableKicks,
    /// The driver takes back one buffer.
    Used,
    /// The driver asks for interrupts.
    Enable,
    /// The driver asks for an interrupt when most are used (Linux's has that).
    EnableDelayed,
    /// The driver asks for none.
    Disable,
    /// All in flight is finished, then `count` buffers of one segment go through.
    Bulk { count: u16 },
}

/// Sequences of steps.
pub(crate) fn ops() -> impl Strategy<Value = Vec<Op>> {
    let add = (0..=MAX_SEGMENTS, 0..=MAX_SEGMENTS, 1..300u32);
    let op = prop_oneof![
        8 => add.prop_map(|(readable, writable, len)| Op::Add { readable, writable, len }),
        4 => Just(Op::Kick),
        4 => Just(Op::Pop),
        7 => (any::<usize>(), 0..2000u32).prop_map(|(which, len)| Op::Complete { which, len }),
        4 => Just(Op::Publish),
        2 => Just(Op::ArmKicks),
        1 => Just(Op::DisableKicks),
        7 => Just(Op::Used),
        2 => Just(Op::Enable),
        1 => Just(Op::EnableDelayed),
        1 => Just(Op::Disable),
    ];
    prop::collection::vec(op, 1..250)
}

/// A buffer somewhere on its way.
#[derive(Clone, Debug)]
pub(crate) struct Buffer {
    /// Its place in the data memory.
    pub(crate) slot: u16,
    pub(crate) readable: Vec<Segment>,
    pub(crate) writable: Vec<Segment>,
    /// Descriptors of the queue that it takes.
    pub(crate) descriptors: u16,
}

impl Buffer {
    pub(crate) fn writable_len(&self) -> u32 {
        self.writable.iter().map(|segment| segment.len).sum()
    }
}

/// A range of ring positions about which the other side has not been notified.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Unnotified {
    pub(crate) old: u64,
    pub(crate) new: u64,
}

/// The queue.
pub(crate) struct Model {
    size: u16,
    features: u64,
    data: DmaArea,
    slots: Vec<u16>,
    free: u16,
    /// Available, not popped.
    pub(crate) waiting: VecDeque<Buffer>,
    /// Popped, with the name that the device side knows them by.
    pub(crate) serving: Vec<(u16, Buffer)>,
    /// Completed, not published: with the length and the seed of what was written.
    pub(crate) staged: Vec<(Buffer, u32, u64)>,
    /// Published, not taken back.
    pub(crate) used: VecDeque<(Buffer, u32, u64)>,
    pub(crate) kicks: Unnotified,
    pub(crate) interrupts: Unnotified,
    /// Position at which kicks were armed, with nothing available.
    ///
    /// The first buffer from there must bring a kick.
    pub(crate) kick_due: Option<u64>,
    /// Interrupts were enabled with nothing used: the first buffer used must bring one.
    pub(crate) interrupt_due: bool,
}

impl Model {
    /// A queue whose buffers lie in `data`.
    pub(crate) fn new(size: u16, features: u64, data: DmaArea) -> Self {
        assert!(data.area.len() >= usize::from(size) * SLOT);
        Self {
            size,
            features,
            data,
            slots: (0..size).rev().collect(),
            free: size,
            waiting: VecDeque::new(),
            serving: Vec::new(),
            staged: Vec::new(),
            used: VecDeque::new(),
            kicks: Unnotified::default(),
            interrupts: Unnotified::default(),
            kick_due: None,
            interrupt_due: false,
        }
    }

    /// A buffer to try and add; no longer than the queue, and never empty.
    ///
    /// `None` while every slot is on its way.
    pub(crate) fn make(&self, readable: u16, writable: u16, len: u32) -> Option<Buffer> {
        let slot = *self.slots.last()?;
        let readable = readable.min(self.size);
        let writable = writable.min(self.size - readable);
        let (readable, writable) = if readable + writable == 0 { (1, 0) } else { (readable, writable) };
        let mut at = usize::from(slot) * SLOT;
        let mut segments = (0..u32::from(readable + writable)).map(|i| {
            let len = (len + 37 * i) % 250 + 1;
            let segment = Segment { addr: self.data.addr + at as u64, len };
            at += len as usize + 5;
            segment
        });
        let readable: Vec<_> = segments.by_ref().take(readable.into()).collect();
        let writable: Vec<_> = segments.collect();
        let count = (readable.len() + writable.len()) as u16;
        let descriptors = if self.features & INDIRECT_DESC != 0 { 1 } else { count };
        Some(Buffer { slot, readable, writable, descriptors })
    }

    /// Whether the queue has room for it.
    pub(crate) fn fits(&self, buffer: &Buffer) -> bool {
        buffer.descriptors <= self.free
    }

    /// Steps of the ring's position for a buffer: 1 (split), or its descriptors.
    fn step(&self, buffer: &Buffer) -> u64 {
        if self.features & RING_PACKED == 0 { 1 } else { buffer.descriptors.into() }
    }

    /// The driver has added it, and the device may see it.
    pub(crate) fn add(&mut self, buffer: Buffer) {
        assert_eq!(self.slots.pop(), Some(buffer.slot));
        self.free -= buffer.descriptors;
        self.kicks.new += self.step(&buffer);
        self.waiting.push_back(buffer);
    }

    /// The driver has asked whether to kick; the device's wish was `expected`.
    pub(crate) fn kicked(&mut self, expected: Option<bool>, kick: bool) {
        assert_eq!(kick, expected.unwrap_or(kick), "kick for {:?}", self.kicks);
        if let Some(armed) = self.kick_due {
            assert!(kick || self.kicks.new == armed, "a kick is lost");
            self.kick_due = (self.kicks.new == armed).then_some(armed);
        }
        self.kicks.old = self.kicks.new;
    }

    /// The device has popped a chain.
    pub(crate) fn pop(&mut self, head: u16, readable: &[Segment], writable: &[Segment]) {
        let buffer = self.waiting.pop_front().expect("a chain that was added");
        assert_eq!((readable, writable), (&buffer.readable[..], &buffer.writable[..]));
        assert!(self.serving.iter().all(|(other, _)| *other != head), "{head} is in flight");
        self.serving.push((head, buffer));
        // It is awake: before it sleeps, it asks for kicks anew.
        self.kick_due = None;
    }

    /// Takes out a chain for completion, with how much of it to write.
    pub(crate) fn choose(&mut self, which: usize, len: u32) -> Option<(u16, Buffer, u32)> {
        if self.serving.is_empty() {
            return None;
        }
        let (head, buffer) = self.serving.swap_remove(which % self.serving.len());
        let len = len.min(buffer.writable_len());
        Some((head, buffer, len))
    }

    /// The driver can see everything that was staged.
    pub(crate) fn publish(&mut self) {
        let moved: u64 = self.staged.iter().map(|(buffer, ..)| self.step(buffer)).sum();
        self.interrupts.new += moved;
        self.used.extend(self.staged.drain(..));
    }

    /// The device has asked whether to interrupt; the driver's wish was `expected`.
    pub(crate) fn interrupted(&mut self, expected: Option<bool>, interrupt: bool) {
        assert_eq!(interrupt, expected.unwrap_or(interrupt), "interrupt for {:?}", self.interrupts);
        if self.interrupts.new > self.interrupts.old {
            assert!(interrupt || !self.interrupt_due, "an interrupt is lost");
            self.interrupt_due = false;
        }
        self.interrupts.old = self.interrupts.new;
    }

    /// The buffer that the driver must take back next, with its bytes.
    pub(crate) fn take_back(&mut self) -> Option<(Buffer, Vec<u8>)> {
        let (buffer, len, seed) = self.used.pop_front()?;
        self.free += buffer.descriptors;
        self.slots.push(buffer.slot);
        Some((buffer, (0..len as usize).map(|at| pattern(seed, at)).collect()))
    }
}

/// The bytes of `segments`, up to `len`.
pub(crate) fn gather(peer: &Peer, segments: &[Segment], len: usize) -> Vec<u8> {
    let mut all = Vec::new();
    for segment in segments {
        let mut bytes = vec![0; segment.len as usize];
        assert!(peer.fetch(segment.addr, &mut bytes));
        all.extend(bytes);
    }
    all.truncate(len);
    all
}

/// Writes a pattern of `len` bytes into `segments`.
pub(crate) fn scatter(peer: &Peer, segments: &[Segment], len: usize, seed: u64) {
    let mut done = 0;
    for segment in segments {
        let count = (segment.len as usize).min(len - done);
        let bytes: Vec<u8> = (done..done + count).map(|at| pattern(seed, at)).collect();
        assert!(peer.at(segment.addr, count).unwrap().write(0, &bytes));
        done += count;
    }
}
