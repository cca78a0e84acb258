//! One queue of a qcow2 image: an engine for the image's file or store, and workers.
//!
//! ```text
//!   push --its clusters are known--> the engine below, at the offset in the file --> reap
//!    |                                  | nothing there: the end of the file         ^
//!    '----------- else -----------------'--> a worker of the pool -> the format -----'
//! ```
//! So most transfers of an image that is in use cost what they cost without a format, and as many are
//! in flight; allocations, zeroes, flushes, backing files and tables are the workers'. A worker enters
//! the clusters that it has come across into the map. A transfer that the map knows only in part is
//! done in parts.
use super::Image;
use crate::blk::qcow2::QueueRanges;
use paravane_dma::HostSlice;
use paravane_store::Job;
use paravane_store::file::Rule;
use std::io;
use std::sync::Arc;

/// See the module.
#[derive(Debug)]
pub(super) struct Clusters {
    image: Arc<Image>,
    /// What the transfers below use.
    ranges: Arc<QueueRanges>,
    /// Jobs whose transfers are below, by head; as long as the greatest head so far needs.
    placed: Vec<Placed>,
    /// Number of them.
    in_flight: usize,
}

/// A transfer below.
#[derive(Debug, Default)]
struct Placed {
    job: Option<Job>,
    /// Its pieces, if it is a part of the job.
    part: Vec<HostSlice>,
}

impl Clusters {
    /// The clusters of an image for one queue.
    pub(super) fn new(image: &Arc<Image>) -> io::Result<Self> {
        let qcow2 = image.qcow2.as_ref().ok_or_else(|| io::Error::other("the image has no clusters"))?;
        Ok(Self { image: image.clone(), ranges: qcow2.ranges(), placed: Vec::new(), in_flight: 0 })
    }

    /// A transfer is below no more.
    fn leave(&mut self, head: u16) -> Option<Job> {
        self.ranges.leave(head);
        let job = self.placed.get_mut(usize::from(head)).and_then(|placed| placed.job.take());
        self.in_flight -= usize::from(job.is_some());
        job
    }
}

// SAFETY: a transfer in the file has the pieces of the job, or a part of them, which is listed in `part`
// until the head has another job.
unsafe impl Rule for Clusters {
    fn place(&mut self, head: u16, job: Job) -> Option<Job> {
        if self.placed.len() <= usize::from(head) {
            self.placed.resize_with(usize::from(head) + 1, Placed::default);
        }
        let placed = &mut self.placed[usize::from(head)];
        let qcow2 = self.image.qcow2.as_ref()?;
        let transfer = qcow2.place(job, (head, &self.ranges), &mut placed.part)?;
        placed.job = Some(job);
        self.in_flight += 1;
        Some(transfer)
    }

    fn done(&mut self, head: u16, result: i32) -> Option<Job> {
        // The file ends within a cluster, which reads as zeroes there.
        self.leave(head).filter(|_| result == 0)
    }

    fn refused(&mut self, head: u16) {
        let _ = self.leave(head);
    }
}

impl Drop for Clusters {
    fn drop(&mut self) {
        if self.in_flight > 0 {
            // Nobody knows when these transfers end: their clusters stay in use.
            std::mem::forget(self.ranges.clone());
        }
    }
}
