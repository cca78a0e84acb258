//! Block device driver.
//!
//! ```text
//! free slot --submit--> added --kick--> with the device --complete--> free slot
//!                                                       \-> the device lies: the driver latches the error
//! ```
//! A slot is 64 bytes of shared memory: request header, discard range, status byte. The record of a
//! request in flight lies in private memory, where the device cannot change it.
use crate::channel::{Channel, QUEUE};
use crate::slots::SlotTable;
use crate::{DmaArea, DriverError, Pool, Transport, Virtio};
use alloc::vec::Vec;
use core::mem::offset_of;
use paravane_ring::Segment;
use paravane_ring::driver::Queue;
use paravane_spec::blk::{
    Config, DiscardRange, F_BLK_SIZE, F_DISCARD, F_FLUSH, F_RO, F_SEG_MAX, F_TOPOLOGY, F_WRITE_ZEROES,
    ID_LEN, RequestHeader, S_OK, SECTOR, T_DISCARD, T_FLUSH, T_GET_ID, T_IN, T_OUT, T_WRITE_ZEROES,
    WRITE_ZEROES_F_UNMAP,
};
use paravane_spec::{device_id, feature, mmio, queue};
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

/// A request.
#[derive(Clone, Copy, Debug)]
pub enum Request {
    /// Read into the buffer from this sector.
    Read {
        /// First sector.
        sector: u64,
        /// Destination, a multiple of 512 bytes.
        buffer: DmaArea,
    },
    /// Write the buffer from this sector on.
    Write {
        /// First sector.
        sector: u64,
        /// Source, a multiple of 512 bytes.
        buffer: DmaArea,
    },
    /// Flush the write cache.
    Flush,
    /// Discard sectors.
    Discard {
        /// First sector.
        sector: u64,
        /// Number of sectors.
        sectors: u32,
    },
    /// Write zeroes.
    WriteZeroes {
        /// First sector.
        sector: u64,
        /// Number of sectors.
        sectors: u32,
        /// Whether the range may be unmapped.
        unmap: bool,
    },
    /// Read the identifier into the buffer (20 bytes).
    GetId {
        /// Destination.
        buffer: DmaArea,
    },
}

/// A completed request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Done {
    /// The tag given at submission.
    pub tag: u64,
    /// Status byte: [`paravane_spec::blk::S_OK`] or an error.
    ///
    /// A device that writes none leaves 0xff here.
    pub status: u8,
}

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

/// Fields of the configuration space, read at set-up and after each change.
#[derive(Clone, Copy, Debug, Default)]
struct Limits {
    capacity: u64,
    blk_size: u32,
    discard_sectors: u32,
    write_zeroes_sectors: u32,
    may_unmap: bool,
}

/// A disk. Requests are asynchronous; up to [`Blk::slots`] are in flight.
#[derive(Debug)]
pub struct Blk<T> {
    channel: Channel<T>,
    features: u64,
    limits: Limits,
    slots: Vec<RequestSlot>,
    /// Slots that no request occupies.
    free: Vec<u16>,
    in_flight: SlotTable,
}

impl<T: Transport> Blk<T> {
    /// Sets the device up with one queue and `slots` requests, and sets DRIVER_OK.
    ///
    /// # Errors
    /// No such device, or too little memory. The device is then told FAILED.
    pub fn new(transport: T, slots: u16, pool: &mut Pool) -> Result<Self, DriverError> {
        let wanted = feature::INDIRECT_DESC
            | F_FLUSH
            | F_RO
            | F_SEG_MAX
            | F_BLK_SIZE
            | F_TOPOLOGY
            | F_DISCARD
            | F_WRITE_ZEROES;
        let (device, (limits, queue, slots)) = Virtio::set_up(transport, device_id::BLK, wanted, |device| {
            let limits = Limits::read(device, device.features())?;
            let (queue, slots) = start(device, slots.max(1), pool)?;
            Ok((limits, queue, slots))
        })?;
        Ok(Self {
            free: (0..slots.len() as u16).rev().collect(),
            in_flight: SlotTable::new(queue.size()),
            features: device.features(),
            channel: Channel::new(device, [queue]),
            limits,
            slots,
        })
    }

    /// Capacity in sectors. Changes only in [`Blk::interrupt`].
    pub fn capacity(&self) -> u64 {
        self.limits.capacity
    }

    /// Block size of the device in bytes \[512\]. A hint: it may be any number.
    pub fn block_size(&self) -> u32 {
        self.limits.blk_size
    }

    /// Whether the device is read-only.
    pub fn read_only(&self) -> bool {
        self.features & F_RO != 0
    }

    /// Negotiated features.
    pub fn features(&self) -> u64 {
        self.features
    }

    /// Requests that fit in flight.
    pub fn slots(&self) -> usize {
        self.slots.len()
    }

    /// Adds a request; the device sees it after [`Blk::kick`].
    ///
    /// `false` if no slot is free. `tag` comes back in [`Done`].
    ///
    /// # Errors
    /// The driver has failed, or the request can be refused without the device: data that is no
    /// multiple of 512 bytes, a feature that was not negotiated, a write to a read-only disk, a
    /// range beyond the device's limits. Whether the sectors exist is for the device to say.
    pub fn submit(&mut self, request: Request, tag: u64) -> Result<bool, DriverError> {
        self.channel.check_failed()?;
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
        let Some(id) = self.channel.add(QUEUE, &readable[..readable_count], writable)? else {
            return Ok(false);
        };
        slot.tag = tag;
        slot.writable = expected;
        self.free.pop();
        self.in_flight.insert(id, number).map_err(|error| self.channel.fail(error))?;
        Ok(true)
    }

    /// Publishes what was added and kicks if the device wants it.
    ///
    /// Returns whether it kicked.
    pub fn kick(&mut self) -> bool {
        self.channel.kick(QUEUE)
    }

    /// The next completed request.
    ///
    /// # Errors
    /// The device broke the protocol. The driver has latched: every later call returns the same
    /// error.
    pub fn complete(&mut self) -> Result<Option<Done>, DriverError> {
        let Some(used) = self.channel.pop(QUEUE)? else { return Ok(None) };
        let number = self.in_flight.remove(used.id).map_err(|error| self.channel.fail(error))?;
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
            return Err(self.channel.fail(lie));
        }
        Ok(Some(Done { tag: slot.tag, status: status[0] }))
    }

    /// Arms interrupts; `true`: something is there, and the caller must not sleep.
    #[must_use = "`true` means that no interrupt comes for what is there"]
    pub fn enable_interrupts(&mut self) -> bool {
        self.channel.enable_interrupts()
    }

    /// Suppresses interrupts.
    pub fn disable_interrupts(&mut self) {
        self.channel.disable_interrupts();
    }

    /// The device, for what is the same with every driver.
    pub fn device(&self) -> &Virtio<T> {
        self.channel.device()
    }

    /// Reads and acknowledges the causes of an interrupt of this device.
    ///
    /// Call it after an interrupt, before you look for completed requests.
    ///
    /// # Errors
    /// The device needs a reset, or its configuration keeps changing. The driver has latched.
    pub fn interrupt(&mut self) -> Result<u32, DriverError> {
        let causes = self.channel.interrupt()?;
        if causes & mmio::INT_CONFIG_CHANGE != 0 {
            let limits = Limits::read(self.channel.device(), self.features);
            self.limits = limits.map_err(|error| self.channel.fail(error))?;
        }
        Ok(causes)
    }

    /// Requests in flight.
    pub fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Checks a request and puts it into the device's terms.
    fn prepare(&self, request: Request) -> Result<Prepared, DriverError> {
        let plain = |kind, sector| Prepared {
            header: RequestHeader { kind, reserved: 0, sector },
            source: None,
            destination: None,
            range: None,
        };
        if self.read_only() && request.changes_the_disk() {
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

impl Limits {
    /// Reads the fields that the negotiated features make valid, consistently.
    fn read<T: Transport>(device: &Virtio<T>, features: u64) -> Result<Self, DriverError> {
        let has = |bit: u64| features & bit != 0;
        device.consistently(|config| {
            let word = |offset: usize, bit: u64| if has(bit) { config.word(offset as u64) } else { 0 };
            let mut limits = Self {
                capacity: config.long(offset_of!(Config, capacity) as u64),
                blk_size: word(offset_of!(Config, blk_size), F_BLK_SIZE),
                discard_sectors: word(offset_of!(Config, max_discard_sectors), F_DISCARD),
                write_zeroes_sectors: word(offset_of!(Config, max_write_zeroes_sectors), F_WRITE_ZEROES),
                may_unmap: false,
            };
            if has(F_WRITE_ZEROES) {
                limits.may_unmap = config.byte(offset_of!(Config, write_zeroes_may_unmap) as u64) != 0;
            }
            if !has(F_BLK_SIZE) {
                limits.blk_size = SECTOR as u32;
            }
            limits
        })
    }
}

/// Starts the queue, with room for up to `slots` requests, and takes their memory.
fn start<T: Transport>(
    device: &mut Virtio<T>,
    slots: u16,
    pool: &mut Pool,
) -> Result<(Queue, Vec<RequestSlot>), DriverError> {
    // With an indirect table a request takes one descriptor of the ring, else one a segment.
    let each = if device.features() & feature::INDIRECT_DESC != 0 { 1 } else { SEGMENTS };
    // No chain may be longer than the queue (section 2.7.5.3.1), in a table or not.
    let size = slots.saturating_mul(each).clamp(SEGMENTS, queue::MAX_SIZE).next_power_of_two();
    let queue = device.start_queue(QUEUE, size, SEGMENTS, pool)?;
    if queue.size() < SEGMENTS {
        return Err(DriverError::Queue(QUEUE));
    }
    let slots = usize::from(slots.min(queue.size() / each));
    let memory = pool.take(slots * SLOT, SLOT)?;
    let slots = (0..slots).filter_map(|n| memory.slice(n * SLOT, SLOT));
    Ok((queue, slots.map(|memory| RequestSlot { memory, tag: 0, writable: 0 }).collect()))
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
