//! One request queue of a disk, with its slots.
use super::limits::Limits;
use super::{Done, Request};
use crate::channel::add;
use crate::latch::Latch;
use crate::shared::SharedDevice;
use crate::slots::SlotTable;
use crate::{DmaArea, DriverError, Pool, Transport, Virtio};
use alloc::sync::Arc;
use alloc::vec::Vec;
use paravane_ring::Segment;
use paravane_ring::driver::Queue;
use paravane_spec::blk::{
    DiscardRange, F_DISCARD, F_FLUSH, F_RO, F_WRITE_ZEROES, ID_LEN, RequestHeader, S_OK, SECTOR, T_DISCARD,
    T_FLUSH, T_GET_ID, T_IN, T_OUT, T_WRITE_ZEROES, WRITE_ZEROES_F_UNMAP,
};
use paravane_spec::{feature, queue};
use zerocopy::IntoBytes;

/// Segments of the longest request: header, data, status.
const SEGMENTS: u16 = 3;
/// Shared memory for each slot in bytes: a cache line, against false sharing.
const SLOT: usize = 64;
/// Where the discard range lies in a slot.
const RANGE_AT: usize = size_of::<RequestHeader>();
/// Where the status byte lies in a slot.
const STATUS_AT: usize = RANGE_AT + size_of::<DiscardRange>();
/// Status byte before the device has written it: not a status of the specification.
const NO_STATUS: u8 = 0xff;

/// One slot: its shared memory, and the private record of its request.
#[derive(Clone, Copy, Debug)]
struct RequestSlot {
    /// Header, range and status.
    memory: DmaArea,
    /// The caller's name for the request.
    tag: u64,
    /// Bytes that the device must have written if it says OK.
    writable: u32,
}

/// A request in the driver's terms, checked.
struct Prepared {
    header: RequestHeader,
    /// Data that the device reads.
    source: Option<Segment>,
    /// Data that the device writes.
    destination: Option<Segment>,
    range: Option<DiscardRange>,
}

/// One request queue of a disk.
///
/// It has its own ring, slots and interrupt, so each queue of a disk can be used on another processor,
/// without a lock. Requests are asynchronous; up to [`RequestQueue::slots`] are in flight.
///
/// An error of the queue latches it alone; [`BlkDevice::interrupt`](super::BlkDevice::interrupt) latches
/// errors of the device for all queues.
#[derive(Debug)]
pub struct RequestQueue<T> {
    shared: Arc<SharedDevice<T>>,
    index: u16,
    queue: Queue,
    failed: Latch,
    features: u64,
    limits: Limits,
    slots: Vec<RequestSlot>,
    /// Slots that no request occupies.
    free: Vec<u16>,
    in_flight: SlotTable,
}

/// A queue that was started, and its slots, before the device is in use.
pub(super) struct Started {
    index: u16,
    queue: Queue,
    slots: Vec<RequestSlot>,
}

impl<T: Transport> RequestQueue<T> {
    pub(super) fn new(shared: &Arc<SharedDevice<T>>, limits: Limits, started: Started) -> Self {
        let Started { index, queue, slots } = started;
        Self {
            features: shared.virtio().features(),
            shared: Arc::clone(shared),
            index,
            failed: Latch::default(),
            limits,
            free: (0..slots.len() as u16).rev().collect(),
            in_flight: SlotTable::new(queue.size()),
            queue,
            slots,
        }
    }

    /// Index of the queue in the device.
    pub fn index(&self) -> u16 {
        self.index
    }

    /// Number of the queue's message, for [`Virtio::set_message`].
    pub fn message(&self) -> u16 {
        self.index + 1
    }

    /// The device, which all queues share.
    pub fn device(&self) -> &Virtio<T> {
        self.shared.virtio()
    }

    /// Requests that fit in flight.
    pub fn slots(&self) -> usize {
        self.slots.len()
    }

    /// Requests in flight.
    pub fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    pub(super) fn check_failed(&self) -> Result<(), DriverError> {
        self.failed.check()?;
        self.shared.check()
    }

    fn fail(&mut self, error: impl Into<DriverError>) -> DriverError {
        self.failed.set(error)
    }

    /// Adds a request; the device sees it after [`RequestQueue::kick`].
    ///
    /// `false` if no slot is free. `tag` comes back in [`Done`].
    ///
    /// # Errors
    /// The driver has failed, or the request can be refused without the device: data that is no
    /// multiple of 512 bytes, a feature that was not negotiated, a write to a read-only disk, a
    /// range beyond the device's limits. Whether the sectors exist is for the device to say.
    pub fn submit(&mut self, request: Request, tag: u64) -> Result<bool, DriverError> {
        self.check_failed()?;
        let prepared = self.prepare(request)?;
        let Some(&number) = self.free.last() else {
            return Ok(false);
        };
        let slot = &mut self.slots[usize::from(number)];
        let memory = slot.memory;
        // A slot is SLOT bytes, so all three fit.
        let mut written = memory.area.write(0, prepared.header.as_bytes());
        written &= memory.area.write(STATUS_AT, &[NO_STATUS]);
        let mut readable = [Segment { addr: memory.addr, len: RANGE_AT as u32 }, Segment::default()];
        let mut readable_count = 1;
        if let Some(range) = prepared.range {
            // The range lies right behind the header, but the device may want header and data
            // apart.
            written &= memory.area.write(RANGE_AT, range.as_bytes());
            readable[1] =
                Segment { addr: memory.addr + RANGE_AT as u64, len: size_of::<DiscardRange>() as u32 };
            readable_count = 2;
        } else if let Some(source) = prepared.source {
            readable[1] = source;
            readable_count = 2;
        }
        debug_assert!(written, "a slot holds header, range and status");

        let status = Segment { addr: memory.addr + STATUS_AT as u64, len: 1 };
        let writable = [prepared.destination.unwrap_or(status), status];
        let writable = if prepared.destination.is_some() { &writable[..] } else { &writable[1..] };
        let expected = writable.iter().fold(0u32, |sum, segment| sum.saturating_add(segment.len));
        let added = add(&mut self.queue, &readable[..readable_count], writable);
        let Some(id) = added.map_err(|error| self.failed.set(error))? else {
            return Ok(false);
        };
        slot.tag = tag;
        slot.writable = expected;
        self.free.pop();
        self.in_flight.insert(id, number).map_err(|error| self.failed.set(error))?;
        Ok(true)
    }

    /// Publishes what was added and kicks if the device wants it.
    ///
    /// Returns whether it kicked.
    pub fn kick(&mut self) -> bool {
        let kick = self.check_failed().is_ok() && self.queue.publish();
        if kick {
            self.shared.virtio().notify(self.index, &self.queue);
        }
        kick
    }

    /// The next completed request.
    ///
    /// # Errors
    /// The device broke the protocol. The queue has latched: every later call returns the same
    /// error.
    pub fn complete(&mut self) -> Result<Option<Done>, DriverError> {
        self.check_failed()?;
        let popped = self.queue.pop_used().map_err(|error| self.fail(error))?;
        let Some(used) = popped else { return Ok(None) };
        let number = self.in_flight.remove(used.id).map_err(|error| self.fail(error))?;
        let slot = self.slots[usize::from(number)];
        self.free.push(number);
        let mut status = [NO_STATUS];
        // The slot holds the status byte, so the read cannot fail; if it did, the status would be
        // none.
        let _ = slot.memory.area.read(STATUS_AT, &mut status);
        // The driver must not assume anything about bytes beyond the used length (section 2.7.8.2),
        // and the status is the last byte of the buffer: an OK with less is a contradiction. An
        // error may be short.
        if status[0] == S_OK && used.len < slot.writable {
            let lie = DriverError::ShortAnswer { expected: slot.writable, len: used.len };
            return Err(self.fail(lie));
        }
        Ok(Some(Done { tag: slot.tag, status: status[0] }))
    }

    /// Arms the queue's interrupt; `true`: something is there, and the caller must not sleep.
    #[must_use = "`true` means that no interrupt comes for what is there"]
    pub fn enable_interrupts(&mut self) -> bool {
        if self.check_failed().is_err() {
            return true;
        }
        let token = self.queue.enable_interrupts();
        self.queue.poll(token)
    }

    /// Suppresses the queue's interrupt.
    pub fn disable_interrupts(&mut self) {
        self.queue.disable_interrupts();
    }

    /// Checks a request and puts it into the device's terms.
    fn prepare(&self, request: Request) -> Result<Prepared, DriverError> {
        let plain = |kind, sector| Prepared {
            header: RequestHeader { kind, reserved: 0, sector },
            source: None,
            destination: None,
            range: None,
        };
        if self.features & F_RO != 0 && request.changes_the_disk() {
            return Err(DriverError::Request("the disk is read-only"));
        }
        Ok(match request {
            Request::Read { sector, buffer } => {
                Prepared { destination: Some(sectors_of(buffer)?), ..plain(T_IN, sector) }
            }
            Request::Write { sector, buffer } => {
                Prepared { source: Some(sectors_of(buffer)?), ..plain(T_OUT, sector) }
            }
            Request::Flush => {
                self.needs(F_FLUSH, "the device has no flush command")?;
                plain(T_FLUSH, 0)
            }
            Request::Discard { sector, sectors } => {
                self.needs(F_DISCARD, "the device has no discard command")?;
                let range = range_within(sector, sectors, self.limits.discard_sectors, 0)?;
                Prepared { range: Some(range), ..plain(T_DISCARD, 0) }
            }
            Request::WriteZeroes { sector, sectors, unmap } => {
                self.needs(F_WRITE_ZEROES, "the device has no write-zeroes command")?;
                // The driver must not ask for unmapping where the device does not allow it (section
                // 5.2.6.1).
                let flags = if unmap && self.limits.may_unmap { WRITE_ZEROES_F_UNMAP } else { 0 };
                let range = range_within(sector, sectors, self.limits.write_zeroes_sectors, flags)?;
                Prepared { range: Some(range), ..plain(T_WRITE_ZEROES, 0) }
            }
            Request::GetId { buffer } => {
                let id = buffer
                    .slice(0, ID_LEN)
                    .ok_or(DriverError::Request("the identifier needs a buffer of 20 bytes"))?;
                let segment = Segment { addr: id.addr, len: ID_LEN as u32 };
                Prepared { destination: Some(segment), ..plain(T_GET_ID, 0) }
            }
        })
    }

    fn needs(&self, bit: u64, refusal: &'static str) -> Result<(), DriverError> {
        if self.features & bit == 0 { Err(DriverError::Request(refusal)) } else { Ok(()) }
    }
}

impl Request {
    fn changes_the_disk(&self) -> bool {
        match self {
            Self::Write { .. } | Self::Discard { .. } | Self::WriteZeroes { .. } => true,
            Self::Read { .. } | Self::Flush | Self::GetId { .. } => false,
        }
    }
}

/// Starts queue `index`, with room for up to `slots` requests, and takes their memory.
pub(super) fn start<T: Transport>(
    device: &mut Virtio<T>,
    index: u16,
    slots: u16,
    pool: &mut Pool,
) -> Result<Started, DriverError> {
    // With an indirect table a request takes one descriptor of the ring, else one a segment.
    let each = if device.features() & feature::INDIRECT_DESC != 0 { 1 } else { SEGMENTS };
    // No chain may be longer than the queue (section 2.7.5.3.1), in a table or not.
    let size = slots.saturating_mul(each).clamp(SEGMENTS, queue::MAX_SIZE).next_power_of_two();
    let queue = device.start_queue(index, size, SEGMENTS, pool)?;
    if queue.size() < SEGMENTS {
        return Err(DriverError::Queue(index));
    }
    let slots = usize::from(slots.min(queue.size() / each));
    let memory = pool.take(slots * SLOT, SLOT)?;
    let slots = (0..slots).filter_map(|n| memory.slice(n * SLOT, SLOT));
    let slots = slots.map(|memory| RequestSlot { memory, tag: 0, writable: 0 }).collect();
    Ok(Started { index, queue, slots })
}

/// The buffer as a segment, if it holds whole sectors.
fn sectors_of(buffer: DmaArea) -> Result<Segment, DriverError> {
    let len = u32::try_from(buffer.area.len()).ok().filter(|&len| len < u32::MAX);
    match len {
        Some(len) if len > 0 && u64::from(len).is_multiple_of(SECTOR) => {
            Ok(Segment { addr: buffer.addr, len })
        }
        _ => Err(DriverError::Request("the data is not a multiple of 512 bytes below 4 GiB")),
    }
}

fn range_within(sector: u64, sectors: u32, most: u32, flags: u32) -> Result<DiscardRange, DriverError> {
    if sectors == 0 || sectors > most {
        return Err(DriverError::Request("the range is empty or exceeds the device's limit"));
    }
    Ok(DiscardRange { sector, num_sectors: sectors, flags })
}
