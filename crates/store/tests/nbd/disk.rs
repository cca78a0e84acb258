//! Jobs with memory of their own.
use paravane_dma::HostSlice;
use paravane_store::{Job, Pieces, StoreQueue};
use std::collections::VecDeque;
use std::ptr::NonNull;

/// Memory of a transfer in uneven pieces.
pub(crate) struct Buffer {
    data: Box<[u8]>,
    pieces: Box<[HostSlice]>,
}

impl Buffer {
    pub(crate) fn new(data: Vec<u8>) -> Self {
        Self::in_pieces(data, &[512, 1, 4096, 37, 100_000])
    }

    /// Pieces of these lengths, again and again.
    pub(crate) fn in_pieces(data: Vec<u8>, lens: &[usize]) -> Self {
        let mut data = data.into_boxed_slice();
        let mut pieces = Vec::new();
        let mut rest = &mut data[..];
        for len in lens.iter().cycle() {
            if rest.is_empty() {
                break;
            }
            let (piece, behind) = rest.split_at_mut((*len).min(rest.len()));
            pieces.push(HostSlice { ptr: piece.as_mut_ptr(), len: piece.len() });
            rest = behind;
        }
        Self { data, pieces: pieces.into() }
    }

    pub(crate) fn pieces(&mut self) -> Pieces {
        Pieces {
            first: NonNull::new(self.pieces.as_mut_ptr()).unwrap_or(NonNull::dangling()),
            count: self.pieces.len() as u32,
        }
    }

    pub(crate) fn data(&self) -> &[u8] {
        &self.data
    }
}

/// Does one job and waits for it.
pub(crate) fn perform(queue: &mut dyn StoreQueue, job: Job) -> i32 {
    // SAFETY: the caller's buffer lives until the outcome.
    unsafe { queue.push(7, job) }.unwrap();
    let mut outcomes = VecDeque::new();
    while outcomes.is_empty() {
        queue.wait().unwrap();
        queue.reap(&mut outcomes);
    }
    assert_eq!((outcomes.len(), outcomes[0].head()), (1, 7));
    outcomes[0].result()
}

/// Reads and returns the data.
pub(crate) fn read(queue: &mut dyn StoreQueue, offset: u64, len: usize) -> Result<Vec<u8>, i32> {
    let mut buffer = Buffer::new(vec![0xee; len]);
    match perform(queue, Job::Read { pieces: buffer.pieces(), offset }) {
        result if result as usize == len => Ok(buffer.data().to_vec()),
        result => Err(result),
    }
}

pub(crate) fn write(queue: &mut dyn StoreQueue, offset: u64, data: &[u8], durable: bool) -> i32 {
    let mut buffer = Buffer::new(data.to_vec());
    perform(queue, Job::Write { pieces: buffer.pieces(), offset, durable })
}
