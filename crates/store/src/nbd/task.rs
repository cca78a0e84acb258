//! Jobs of a connection, and the request of each that is in flight.
//!
//! ```text
//!   add -> waiting --plan--> request --sent--> in flight --answered--> [all done] result
//!             ^                 |                 |           '--more of it, or a flush--> waiting
//!             '---- not sent ---'                 '--connection lost--> waiting, in the same place
//! ```
//! A job has one request in flight at a time. A job that is larger than the server's largest payload
//! is done in several, one after the other. If the connection is lost in between, a write whose
//! parts had no FUA begins again: the server may have lost those that it acknowledged.
use super::export::Export;
use super::flag;
use super::proto::*;
use super::reply::{Asked, Expected, Owed};
use super::zeroes::{self, HOLE};
use crate::Job;
use crate::pieces::{parts, total};
use paravane_dma::HostSlice;
use std::collections::VecDeque;

/// Most bytes of a request that has no payload: each one makes visible progress.
const EFFECT: u64 = 1 << 30;

const _: () = assert!(EFFECT.is_multiple_of(HOLE));

/// What a task does.
#[derive(Clone, Copy, Debug)]
pub(super) enum Work {
    Job(Job),
    /// Asks for holes and zeroes.
    Extents {
        offset: u64,
        len: u64,
    },
    /// Hints that a range is read soon.
    Cache {
        offset: u64,
        len: u64,
    },
}

impl Work {
    /// The range of the export, if there is one.
    fn range(&self) -> Option<(u64, u64)> {
        match *self {
            Self::Job(Job::Flush) => None,
            Self::Job(Job::Read { pieces, offset } | Job::Write { pieces, offset, .. }) => {
                // SAFETY: the memory of a job in flight, as `StoreQueue::push` demands.
                let len = unsafe { pieces.bytes() };
                Some((offset, len))
            }
            Self::Job(Job::Discard { offset, len } | Job::Zeroes { offset, len, .. })
            | Self::Extents { offset, len }
            | Self::Cache { offset, len } => Some((offset, len)),
        }
    }

    /// Bytes that its outcome counts.
    fn moved(&self, len: u64) -> i32 {
        match self {
            Self::Job(Job::Read { .. } | Job::Write { .. }) => i32::try_from(len).unwrap_or(i32::MAX),
            _ => 0,
        }
    }
}

impl Default for Work {
    fn default() -> Self {
        Self::Job(Job::Flush)
    }
}

/// A job until its outcome.
#[derive(Debug, Default)]
pub(super) struct NbdTask {
    pub(super) work: Work,
    pub(super) member: u16,
    pub(super) head: u16,
    /// Place in the order in which requests were sent first. 0: never sent.
    pub(super) sequence: u64,
    /// Its request, if `is_planned`.
    pub(super) request: NbdRequest,
    /// The request is on its way as a whole, and is owed a reply.
    is_sent: bool,
    /// Nobody waits for it, and its memory is gone.
    pub(super) is_orphan: bool,
    is_used: bool,
    /// The present request is the flush behind a durable write.
    flushes: bool,
    /// Its memory cannot be accessed.
    is_faulty: bool,
    /// Connections that were lost while it was in flight, and those that broke the protocol.
    pub(super) losses: u8,
    pub(super) strikes: u8,
    offset: u64,
    len: u64,
    /// Bytes that earlier requests have done.
    done: u64,
    expected: Expected,
    pub(super) extents: Vec<(u64, u32)>,
}

impl NbdTask {
    /// Whether no server has seen any of it.
    pub(super) fn is_untouched(&self) -> bool {
        self.sequence == 0 && self.done == 0 && !self.flushes
    }

    fn is_write(&self) -> bool {
        matches!(self.work, Work::Job(Job::Write { .. } | Job::Zeroes { .. }))
    }

    /// Whether parts of a write are acknowledged that need not outlive the server.
    fn has_volatile_parts(&self) -> bool {
        self.is_write() && self.done > 0 && (self.flushes || self.request.flags & CMD_FUA == 0)
    }
}

/// What comes next of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NextOfTask {
    /// A request, which is in the task.
    Send,
    /// Nothing: the job has ended.
    Ended(i32),
}

/// The tasks of a connection.
#[derive(Debug, Default)]
pub(super) struct Tasks {
    slots: Vec<NbdTask>,
    free: Vec<u32>,
    /// Requests ever planned; numbers cookies.
    planned: u32,
    sequence: u64,
    /// Number of requests that are owed a reply.
    pub(super) in_flight: usize,
}

impl Tasks {
    /// Makes room for more.
    pub(super) fn reserve(&mut self, jobs: usize) {
        let first = self.slots.len() as u32;
        self.slots.resize_with(self.slots.len() + jobs, NbdTask::default);
        self.free.extend((first..self.slots.len() as u32).rev());
    }

    /// Room for tasks.
    pub(super) fn capacity(&self) -> usize {
        self.slots.len()
    }

    /// Number of tasks.
    pub(super) fn count(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Adds a job. Its room was reserved.
    pub(super) fn add(&mut self, member: u16, head: u16, work: Work) -> u32 {
        if self.free.is_empty() {
            self.reserve(16);
        }
        let index = self.free.pop().unwrap_or_default();
        let task = &mut self.slots[index as usize];
        let (offset, len) = work.range().unwrap_or_default();
        (task.work, task.member, task.head, task.offset, task.len) = (work, member, head, offset, len);
        (task.sequence, task.done, task.losses, task.strikes) = (0, 0, 0, 0);
        (task.is_sent, task.is_orphan, task.is_used) = (false, false, true);
        (task.flushes, task.is_faulty) = (false, false);
        task.extents.clear();
        index
    }

    /// Takes a task out, which has ended or is given up.
    pub(super) fn remove(&mut self, index: u32) -> &mut NbdTask {
        let task = &mut self.slots[index as usize];
        debug_assert!(task.is_used);
        if task.is_sent {
            task.is_sent = false;
            self.in_flight -= 1;
        }
        task.is_used = false;
        self.free.push(index);
        task
    }

    pub(super) fn get(&mut self, index: u32) -> &mut NbdTask {
        &mut self.slots[index as usize]
    }

    /// Numbers of all tasks that a test holds for.
    pub(super) fn find(&self, test: impl Fn(&NbdTask) -> bool) -> Vec<u32> {
        let used = self.slots.iter().enumerate().filter(|(_, task)| task.is_used && test(task));
        used.map(|(index, _)| index as u32).collect()
    }

    /// Plans the next request of a task for this export.
    pub(super) fn plan(&mut self, index: u32, export: &Export, write_through: bool) -> NextOfTask {
        let task = &mut self.slots[index as usize];
        let left = task.len - task.done;
        let ends_inside = task.offset.checked_add(task.len).is_some_and(|end| end <= export.size);
        let block = u64::from(export.block) - 1;
        if !matches!(task.work, Work::Job(Job::Flush)) {
            if !ends_inside {
                return NextOfTask::Ended(if task.is_write() { -libc::ENOSPC } else { -libc::EINVAL });
            }
            if (task.offset | task.len) & block != 0 {
                return NextOfTask::Ended(-libc::EINVAL);
            }
            if left == 0 && !task.flushes {
                return NextOfTask::Ended(0);
            }
        }
        let durable = if export.has(flag::FUA) { CMD_FUA } else { 0 };
        let payload = left.min(export.payload.into());
        let effect = left.min(EFFECT);
        let mut asked = Asked::Done;
        let (command, flags, len) = match task.work {
            _ if task.flushes => (CMD_FLUSH, 0, 0),
            Work::Job(Job::Read { .. }) => {
                asked = Asked::Bytes;
                (CMD_READ, 0, payload)
            }
            Work::Job(Job::Write { durable: wanted, .. }) => {
                (CMD_WRITE, if wanted || write_through { durable } else { 0 }, payload)
            }
            Work::Job(Job::Flush) if export.has(flag::FLUSH) => (CMD_FLUSH, 0, 0),
            Work::Job(Job::Discard { .. }) if export.has(flag::TRIM) => (CMD_TRIM, 0, effect),
            Work::Cache { .. } if export.has(flag::CACHE) => (CMD_CACHE, 0, payload),
            // All of these are hints, or have no effect on what is durable already.
            Work::Job(Job::Flush | Job::Discard { .. }) | Work::Cache { .. } => return NextOfTask::Ended(0),
            Work::Job(Job::Zeroes { unmap, .. }) if export.has(flag::WRITE_ZEROES) => {
                let whole = (effect, false);
                let (len, is_hole) =
                    if unmap { zeroes::first(task.offset + task.done, effect) } else { whole };
                let flags = if is_hole { 0 } else { CMD_NO_HOLE };
                (CMD_WRITE_ZEROES, flags | if write_through { durable } else { 0 }, len)
            }
            Work::Extents { .. } if export.allocation.is_some() => {
                let context = export.allocation.unwrap_or_default();
                asked = Asked::Extents { context };
                (CMD_BLOCK_STATUS, 0, effect)
            }
            Work::Job(Job::Zeroes { .. }) | Work::Extents { .. } => {
                return NextOfTask::Ended(-libc::EOPNOTSUPP);
            }
        };
        self.planned = self.planned.wrapping_add(1);
        let cookie = u64::from(self.planned) << 32 | u64::from(index);
        let offset = if command == CMD_FLUSH { 0 } else { task.offset + task.done };
        task.request = NbdRequest { command, flags, cookie, offset, len };
        task.expected.renew(asked, offset, len);
        NextOfTask::Send
    }

    /// The server has begun to get the planned request.
    pub(super) fn began(&mut self, index: u32) {
        let task = &mut self.slots[index as usize];
        if task.sequence == 0 {
            self.sequence += 1;
            task.sequence = self.sequence;
        }
    }

    /// The planned request is on its way as a whole.
    pub(super) fn sent(&mut self, index: u32) {
        self.began(index);
        let task = &mut self.slots[index as usize];
        task.is_sent = true;
        self.in_flight += 1;
    }

    /// The reply is complete. What comes next.
    pub(super) fn answered(
        &mut self,
        index: u32,
        error: u32,
        export: &Export,
        write_through: bool,
    ) -> NextOfTask {
        let task = &mut self.slots[index as usize];
        task.is_sent = false;
        self.in_flight -= 1;
        if error != 0 {
            return NextOfTask::Ended(errno(error));
        }
        if task.is_faulty {
            return NextOfTask::Ended(-libc::EFAULT);
        }
        if task.is_orphan || matches!(task.work, Work::Extents { .. }) || task.flushes {
            return NextOfTask::Ended(task.work.moved(task.len));
        }
        task.done += task.request.len;
        if task.done == task.len {
            let wanted = write_through || matches!(task.work, Work::Job(Job::Write { durable: true, .. }));
            if task.is_write() && wanted && !export.has(flag::FUA) && export.has(flag::FLUSH) {
                task.flushes = true;
            } else {
                return NextOfTask::Ended(task.work.moved(task.len));
            }
        }
        // The next part is a new request behind those that were sent meanwhile.
        task.sequence = 0;
        NextOfTask::Send
    }

    /// The connection is lost: all requests that it got are waiting again, in the order in which
    /// they were sent first. Writes with volatile parts begin again.
    pub(super) fn unsend(&mut self, to_send: &mut VecDeque<u32>) {
        for index in self.find(NbdTask::has_volatile_parts) {
            // The server has seen it, even if its next request was not sent yet.
            self.began(index);
            let task = &mut self.slots[index as usize];
            (task.done, task.flushes) = (0, false);
        }
        let mut again = self.find(|task| task.sequence != 0);
        again.sort_unstable_by_key(|index| self.slots[*index as usize].sequence);
        to_send.retain(|index| self.slots[*index as usize].sequence == 0);
        for &index in again.iter().rev() {
            to_send.push_front(index);
            let task = &mut self.slots[index as usize];
            task.is_sent = false;
            task.extents.clear();
        }
        self.in_flight = 0;
    }

    /// Its memory cannot be read or written; what it still gets is dropped.
    pub(super) fn fail_memory(&mut self, cookie: u64) {
        self.slots[cookie as u32 as usize].is_faulty = true;
    }

    /// Appends the pieces of the present request that begin at its byte `at`, up to `len` bytes.
    ///
    /// Returns how many bytes they have; 0 if there is no memory.
    pub(super) fn pieces(&self, index: u32, at: u64, len: u64, out: &mut Vec<HostSlice>, most: usize) -> u64 {
        let task = &self.slots[index as usize];
        let (Work::Job(Job::Read { pieces, .. } | Job::Write { pieces, .. }), false) =
            (task.work, task.is_orphan || task.is_faulty || task.flushes)
        else {
            return 0;
        };
        // SAFETY: the list of a job in flight, as `StoreQueue::push` demands.
        let pieces = unsafe { pieces.slices() };
        let before = out.len();
        out.extend(parts(pieces, task.done + at, len).take(most.saturating_sub(before)));
        total(&out[before..])
    }

    /// Whether the request has a payload to send.
    pub(super) fn payload(&self, index: u32) -> u64 {
        let request = &self.slots[index as usize].request;
        if request.command == CMD_WRITE { request.len } else { 0 }
    }

    /// Copies data of a reply to the memory of its request.
    pub(super) fn scatter(&self, cookie: u64, at: u64, data: &[u8], room: &mut Vec<HostSlice>) {
        let mut rest = data;
        while !rest.is_empty() {
            room.clear();
            let done = (data.len() - rest.len()) as u64;
            if self.pieces(cookie as u32, at + done, rest.len() as u64, room, 64) == 0 {
                return;
            }
            for piece in &*room {
                let (part, behind) = rest.split_at(piece.len);
                // SAFETY: memory of a job in flight that reads, valid until its outcome is made.
                unsafe { piece.write(part) };
                rest = behind;
            }
        }
    }

    /// Fills a part of the memory of a request with zeroes.
    pub(super) fn zero(&self, cookie: u64, mut at: u64, mut len: u64, room: &mut Vec<HostSlice>) {
        const ZEROES: [u8; 4096] = [0; 4096];
        while len > 0 {
            let part = len.min(ZEROES.len() as u64);
            self.scatter(cookie, at, &ZEROES[..part as usize], room);
            (at, len) = (at + part, len - part);
        }
    }
}

impl Owed for Tasks {
    fn owed(&mut self, cookie: u64) -> Option<&mut Expected> {
        let task = self.slots.get_mut(cookie as u32 as usize)?;
        (task.is_sent && task.request.cookie == cookie).then_some(&mut task.expected)
    }
}

#[cfg(test)]
mod tests;
