//! The two streams of bytes between the queues of a console and its host's side.
//!
//! ```text
//!   transmit queue ---> output ---> host's side      full: the queue waits for `room`; while nobody
//!                                                    reads, the oldest bytes are dropped instead
//!   receive queue <---- input <---- host's side      full: the host's side is not read
//! ```
//! A sleeper arms its [`Wakeup`] and looks once more; whoever changes what it looks at wakes it.
use crate::lock;
use crate::wakeup::Wakeup;
use std::collections::VecDeque;
use std::io;
use std::sync::Mutex;

/// Bytes that wait for the guest.
const INPUT: usize = 64 << 10;

/// What a console has carried.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Carried {
    /// Bytes from the guest that the host's side has taken.
    pub output: u64,
    /// Bytes that the guest has taken.
    pub input: u64,
    /// Bytes from the guest that were dropped, because nobody read them.
    pub dropped: u64,
    /// Bytes from the guest that wait.
    pub waiting: u64,
    /// Whether somebody reads on the host's side.
    pub attached: bool,
}

#[derive(Debug)]
pub(super) struct Port {
    state: Mutex<State>,
    /// Wakes the thread of the host's side.
    pub(super) host: Wakeup,
    /// Wakes the transmit queue.
    pub(super) room: Wakeup,
    /// Wakes the receive queue.
    pub(super) arrived: Wakeup,
}

#[derive(Debug)]
struct State {
    output: VecDeque<u8>,
    /// Most bytes of output.
    most: usize,
    input: VecDeque<u8>,
    carried: Carried,
}

impl State {
    /// Bytes of output that are taken now.
    fn room(&self) -> usize {
        if self.carried.attached { self.most.saturating_sub(self.output.len()) } else { self.most }
    }

    /// Appends output, and drops the oldest beyond the bound.
    fn append(&mut self, bytes: &[u8]) {
        self.output.extend(bytes);
        if !self.carried.attached {
            let over = self.output.len().saturating_sub(self.most);
            self.output.drain(..over);
            self.carried.dropped += over as u64;
        }
    }
}

impl Port {
    /// With room for `most` bytes of output.
    pub(super) fn new(most: usize) -> io::Result<Self> {
        let (output, input) = (VecDeque::with_capacity(most), VecDeque::with_capacity(INPUT));
        Ok(Self {
            state: Mutex::new(State { output, most, input, carried: Carried::default() }),
            host: Wakeup::new()?,
            room: Wakeup::new()?,
            arrived: Wakeup::new()?,
        })
    }

    pub(super) fn carried(&self) -> Carried {
        let state = lock(&self.state);
        Carried { waiting: state.output.len() as u64, ..state.carried }
    }

    /// Whether output is taken now.
    pub(super) fn has_room(&self) -> bool {
        lock(&self.state).room() > 0
    }

    /// Most bytes of output that wait.
    pub(super) fn most(&self) -> usize {
        lock(&self.state).most
    }

    /// Takes output of the guest: as much as there is room for.
    ///
    /// While nobody reads, there is room for all that fits at once, and the oldest output goes.
    pub(super) fn put_output(&self, bytes: &[u8]) -> usize {
        let mut state = lock(&self.state);
        let taken = bytes.len().min(state.room());
        state.append(&bytes[..taken]);
        drop(state);
        self.host.wake();
        taken
    }

    /// Takes output of a guest that does not wait: the last of it waits longer than others.
    ///
    /// At most [`Port::most`] bytes beyond the bound, which the next output restores.
    pub(super) fn force_output(&self, bytes: &[u8]) {
        let mut state = lock(&self.state);
        state.output.extend(bytes);
        drop(state);
        self.host.wake();
    }

    pub(super) fn has_output(&self) -> bool {
        !lock(&self.state).output.is_empty()
    }

    /// Copies the oldest output, and returns its length.
    pub(super) fn peek_output(&self, out: &mut [u8]) -> usize {
        copy_front(&lock(&self.state).output, out)
    }

    /// Removes output that the host's side has taken.
    pub(super) fn remove_output(&self, len: usize) {
        let mut state = lock(&self.state);
        state.output.drain(..len);
        state.carried.output += len as u64;
        drop(state);
        self.room.wake();
    }

    /// Says whether somebody reads on the host's side.
    ///
    /// Only the thread of the host's side says so: between its [`Port::peek_output`] and
    /// [`Port::remove_output`] nothing is dropped.
    pub(super) fn set_attached(&self, attached: bool) {
        lock(&self.state).carried.attached = attached;
        // Without a reader, output is taken again.
        self.room.wake();
    }

    /// Bytes of input that are taken now.
    pub(super) fn input_room(&self) -> usize {
        INPUT - lock(&self.state).input.len()
    }

    /// Takes input, at most [`Port::input_room`] bytes.
    pub(super) fn put_input(&self, bytes: &[u8]) {
        lock(&self.state).input.extend(bytes);
        self.arrived.wake();
    }

    pub(super) fn has_input(&self) -> bool {
        !lock(&self.state).input.is_empty()
    }

    /// Copies the oldest input, and returns its length.
    pub(super) fn peek_input(&self, out: &mut [u8]) -> usize {
        copy_front(&lock(&self.state).input, out)
    }

    /// Removes input that the guest has taken.
    pub(super) fn remove_input(&self, len: usize) {
        let mut state = lock(&self.state);
        state.input.drain(..len);
        state.carried.input += len as u64;
        drop(state);
        self.host.wake();
    }
}

fn copy_front(bytes: &VecDeque<u8>, out: &mut [u8]) -> usize {
    let len = bytes.len().min(out.len());
    let (first, second) = bytes.as_slices();
    let split = first.len().min(len);
    out[..split].copy_from_slice(&first[..split]);
    out[split..len].copy_from_slice(&second[..len - split]);
    len
}
