//! What was done to a recorded store, in order.
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Content of a range that was discarded, unless the store zeroes it.
const GARBAGE: u8 = 0xd5;

/// A clock that guest and store share. Each reading is a new tick.
#[derive(Clone, Debug, Default)]
pub(super) struct Clock(Arc<AtomicU64>);

impl Clock {
    /// The next tick.
    pub(super) fn tick(&self) -> u64 {
        // SeqCst: ticks of all threads are one order.
        self.0.fetch_add(1, Ordering::SeqCst)
    }
}

/// A change of a store's bytes.
#[derive(Clone, Debug)]
pub(super) enum Change {
    Write {
        offset: u64,
        data: Arc<[u8]>,
    },
    Zeroes {
        offset: u64,
        len: u64,
    },
    /// The range is undefined afterwards.
    Discard {
        offset: u64,
        len: u64,
        garbage: bool,
    },
    Size(u64),
}

/// The part of a change that has reached the storage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Kept {
    All,
    None,
    /// The blocks of `block` bytes whose bit is set; those beyond bit 63 as bit 63.
    Blocks {
        block: usize,
        bits: u64,
    },
}

/// An entry of the log.
#[derive(Clone, Debug)]
pub(super) struct Event {
    /// Tick at which it was done.
    pub(super) at: u64,
    /// Tick at which the caller was told, or `u64::MAX`.
    pub(super) told: u64,
    pub(super) action: Action,
}

/// What was done.
#[derive(Clone, Debug)]
pub(super) enum Action {
    Change {
        change: Change,
        /// It is durable when it is done.
        durable: bool,
    },
    /// A flush, which was asked for at tick `begun`.
    Flush { begun: u64 },
}

impl Change {
    /// Applies the kept part to the bytes of a store.
    pub(super) fn apply(&self, bytes: &mut Vec<u8>, kept: &Kept) {
        match (self, kept) {
            (_, Kept::None) => {}
            (Self::Write { offset, data }, Kept::All) => write(bytes, *offset as usize, data),
            (Self::Write { offset, data }, Kept::Blocks { block, bits }) => {
                for (number, part) in data.chunks(*block).enumerate() {
                    if bits >> number.min(63) & 1 == 1 {
                        write(bytes, *offset as usize + number * block, part);
                    }
                }
            }
            (Self::Zeroes { offset, len }, _) => fill(bytes, *offset, *len, 0),
            (Self::Discard { offset, len, garbage }, _) => {
                fill(bytes, *offset, *len, if *garbage { GARBAGE } else { 0 });
            }
            (Self::Size(size), _) => resize(bytes, *size as usize),
        }
    }

    /// Bytes of a write; 0 for other changes.
    pub(super) fn written(&self) -> usize {
        match self {
            Self::Write { data, .. } => data.len(),
            _ => 0,
        }
    }
}

impl std::fmt::Display for Change {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Write { offset, data } => write!(f, "write {offset:#x}+{:#x}", data.len()),
            Self::Zeroes { offset, len } => write!(f, "zeroes {offset:#x}+{len:#x}"),
            Self::Discard { offset, len, .. } => write!(f, "discard {offset:#x}+{len:#x}"),
            Self::Size(size) => write!(f, "size {size:#x}"),
        }
    }
}

/// What lies beyond the end is lost with the change of the size that it needed.
fn write(bytes: &mut [u8], offset: usize, data: &[u8]) {
    let (start, end) = (offset.min(bytes.len()), (offset + data.len()).min(bytes.len()));
    bytes[start..end].copy_from_slice(&data[..end - start]);
}

/// Sets the length. What is new is zero.
pub(super) fn resize(bytes: &mut Vec<u8>, len: usize) {
    // Vec::resize goes byte by byte without optimization.
    match len.checked_sub(bytes.len()) {
        Some(more) => bytes.extend_from_slice(&vec![0; more]),
        None => bytes.truncate(len),
    }
}

fn fill(bytes: &mut [u8], offset: u64, len: u64, byte: u8) {
    let (start, end) = ((offset as usize).min(bytes.len()), ((offset + len) as usize).min(bytes.len()));
    bytes[start..end].fill(byte);
}

/// The log, for a reader.
pub(super) fn text(events: &[Event]) -> String {
    let mut text = String::new();
    for (number, event) in events.iter().enumerate() {
        let what = match &event.action {
            Action::Change { change, durable: true } => format!("{change}, durable"),
            Action::Change { change, .. } => change.to_string(),
            Action::Flush { begun } => format!("flush, asked for at {begun}"),
        };
        text += &format!("{number}: tick {}: {what}\n", event.at);
    }
    text
}
