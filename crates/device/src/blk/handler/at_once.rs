//! Transfers that are done in the batch that takes them, as copies.
//!
//! ```text
//!   Request --find--> Transfer --copy, while the next one is prefetched--> completed
//!      |                  '-- not possible --.
//!      '-- not in one piece, no transfer ----'--> an entry of the RequestTable, and the engine
//! ```
//! A request that is never in flight in the host needs no entry, and its memory no mapping that
//! outlives the batch. So most requests for an image in memory take half the instructions.
use super::super::measured::Measured;
use super::super::operation::{READ, WRITE};
use super::super::request::{Command, HEADER, Request};
use super::Handler;
use super::chain_parts::ChainParts;
use crate::ahead::ahead;
use crate::latency::{LatencyRecorder, Operation, Taken};
use crate::{ServeError, Served};
use arrayvec::ArrayVec;
use paravane_dma::{AccessGuard, ReadSpan, WriteSpan};
use paravane_ring::device::{Batch, Queue};
use paravane_spec::blk;
use paravane_store::file::Mapped;
use std::sync::atomic::{Ordering, fence};

/// Bytes of a transfer that are prefetched at each side.
///
/// The processor itself prefetches what follows in a page.
const EXPECTED: usize = 512;

/// Requests whose header and status are prefetched.
///
/// A processor drops requests beyond about twenty cache lines.
const AHEAD: usize = 8;

/// Transfers that are found before they are copied, one while the next one is prefetched.
const TRANSFERS: usize = 32;

/// A read or write, each end of which is one piece of memory.
#[derive(Clone, Copy, Debug)]
struct Transfer<'a> {
    chain: ChainParts<'a>,
    request: Request,
    /// Where on the disk, in bytes.
    offset: u64,
    data: Data<'a>,
    status: WriteSpan<'a>,
}

#[derive(Clone, Copy, Debug)]
enum Data<'a> {
    Read { len: u32, into: WriteSpan<'a> },
    Write { len: u32, from: ReadSpan<'a> },
}

impl<'a> Transfer<'a> {
    /// Finds the memory of a request. `None`: it is none, or in several pieces.
    #[inline]
    fn find(memory: &'a AccessGuard<'_>, chain: ChainParts<'a>, request: Request) -> Option<Self> {
        let (_, readable, writable) = chain;
        let (offset, data) = match request.command {
            Command::Read { offset, len } => {
                let into = memory.write_span_of(writable, 0, len as usize)?;
                (offset, Data::Read { len, into })
            }
            Command::Write { offset, len } => {
                let from = memory.read_span_of(readable, HEADER.into(), len as usize)?;
                (offset, Data::Write { len, from })
            }
            _ => return None,
        };
        Some(Self { chain, request, offset, data, status: memory.write_span(request.status, 1)? })
    }

    fn head(&self) -> u16 {
        self.chain.0.head
    }

    fn measured(&self, taken: Taken) -> Measured {
        Measured::new(self.request.command, &[], taken)
    }

    /// Bytes of data.
    fn len(&self) -> u32 {
        match self.data {
            Data::Read { len, .. } | Data::Write { len, .. } => len,
        }
    }

    fn operation(&self) -> &'static Operation {
        match self.data {
            Data::Read { .. } => READ,
            Data::Write { .. } => WRITE,
        }
    }

    /// Bytes of data put into guest memory.
    fn read(&self) -> u32 {
        match self.data {
            Data::Read { len, .. } => len,
            Data::Write { .. } => 0,
        }
    }

    /// Prefetches the first bytes at each side.
    #[inline]
    fn expect(&self, mapped: &Mapped) {
        match &self.data {
            Data::Read { len, into } => {
                mapped.view().expect_first::<false, EXPECTED>(self.offset, *len as usize);
                into.expect_first::<EXPECTED>();
            }
            Data::Write { len, from } => {
                from.expect_first::<EXPECTED>();
                mapped.view().expect_first::<true, EXPECTED>(self.offset, *len as usize);
            }
        }
    }

    /// Whether all of it is present in the image.
    #[inline]
    fn is_possible(&self, mapped: &Mapped) -> bool {
        mapped.has(self.offset, self.len().into())
    }

    /// Copies the data. `false`: by other means, then.
    #[inline]
    fn copy(&self, mapped: &Mapped) -> bool {
        let view = mapped.view();
        let copied = match &self.data {
            Data::Read { into, .. } => view.read_span(self.offset, into),
            Data::Write { from, .. } => view.write_span(self.offset, from).is_ok(),
        };
        // If the file has shrunk, zeroes may have been read, or written data is lost.
        copied && !view.lost()
    }
}

impl Handler {
    /// Starts a batch of requests, and does those that are to be done at once. Returns bytes of data.
    pub(super) fn take_batch(
        &mut self,
        queue: &mut Queue,
        (memory, chains): (&AccessGuard<'_>, &Batch),
        served: &mut Served,
        (latency, taken): (&mut LatencyRecorder, Taken),
    ) -> Result<u64, ServeError> {
        let mut transfers = ArrayVec::new();
        let batch = (memory, chains);
        let started = self.start_batch(queue, batch, &mut transfers, served, (&mut *latency, taken));
        self.copy(queue, memory, &mut transfers, served, (latency, taken))?;
        started
    }

    /// Starts a batch of requests, but leaves in `transfers` what is to be done at once.
    ///
    /// Returns bytes of data.
    fn start_batch<'a>(
        &mut self,
        queue: &mut Queue,
        (memory, chains): (&'a AccessGuard<'_>, &'a Batch),
        transfers: &mut ArrayVec<Transfer<'a>, TRANSFERS>,
        served: &mut Served,
        (latency, taken): (&mut LatencyRecorder, Taken),
    ) -> Result<u64, ServeError> {
        // A write may have to wait behind others.
        let at_once = self.mapped.as_deref().is_some() && self.waiting.is_empty();
        let mut bytes = 0;
        for chain in ahead(chains.iter(), AHEAD, |chain| expect(memory, chain)) {
            let request = self.parse(memory, chain, (&*latency, taken))?;
            match at_once.then(|| Transfer::find(memory, chain, request)).flatten() {
                Some(transfer) => {
                    if transfers.is_full() {
                        self.copy(queue, memory, transfers, served, (&mut *latency, taken))?;
                    }
                    bytes += u64::from(transfer.len());
                    transfers.push(transfer);
                }
                None => {
                    bytes += self.start(queue, memory, (chain, request), served, (&mut *latency, taken))?;
                }
            }
        }
        Ok(bytes)
    }

    /// Does transfers and completes them; starts those that are not to be done at once.
    fn copy(
        &mut self,
        queue: &mut Queue,
        memory: &AccessGuard<'_>,
        transfers: &mut ArrayVec<Transfer<'_>, TRANSFERS>,
        served: &mut Served,
        (latency, taken): (&mut LatencyRecorder, Taken),
    ) -> Result<(), ServeError> {
        let mut copied = [false; TRANSFERS];
        if let Some(mapped) = self.mapped.as_deref() {
            let transfers = ahead(transfers.iter(), 1, |transfer| transfer.expect(mapped));
            for (transfer, copied) in transfers.zip(&mut copied) {
                if transfer.is_possible(mapped) {
                    latency.request_started(|| transfer.measured(taken).probed(transfer.head()));
                    *copied = transfer.copy(mapped);
                }
            }
        }
        latency.reap();
        // Release: pairs with the acquire of a driver that looks at the status before the used ring.
        // What it finds there comes after the data, which was copied above.
        fence(Ordering::Release);
        for (transfer, copied) in transfers.drain(..).zip(copied) {
            if !copied {
                let request = (transfer.chain, transfer.request);
                self.start(queue, memory, request, served, (&mut *latency, taken))?;
                continue;
            }
            transfer.status.write_obj(0, &blk::S_OK);
            queue.complete(transfer.head(), transfer.read().saturating_add(1))?;
            served.completed += 1;
            let request = || transfer.measured(taken).observed(transfer.head(), blk::S_OK);
            latency.complete_request(transfer.operation(), taken, request);
        }
        Ok(())
    }
}

/// Prefetches what the driver's processor has of a request: its header, and the byte for its status.
fn expect(memory: &AccessGuard<'_>, (_, readable, writable): ChainParts<'_>) {
    if let Some(header) = readable.first() {
        memory.expect_read(header.addr, HEADER.min(header.len) as usize);
    }
    if let Some(last) = writable.last() {
        memory.expect_write(last.addr.wrapping_add(u64::from(last.len)).wrapping_sub(1), 1);
    }
}
