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
    /// The pieces of each transfer below that is a part of its job, by head; as long as the greatest head
    /// so far needs.
    parts: Vec<Vec<HostSlice>>,
    /// Number of transfers below.
    in_flight: usize,
}

impl Clusters {
    /// The clusters of an image for one queue.
    pub(super) fn new(image: &Arc<Image>) -> io::Result<Self> {
        let qcow2 = image.qcow2.as_ref().ok_or_else(|| io::Error::other("the image has no clusters"))?;
        Ok(Self { image: image.clone(), ranges: qcow2.ranges(), parts: Vec::new(), in_flight: 0 })
    }
}

// SAFETY: a transfer in the file has the pieces of the job, or a part of them, which is listed in `parts`
// until the head has another job.
unsafe impl Rule for Clusters {
    fn place(&mut self, head: u16, job: Job) -> Option<Job> {
        if self.parts.len() <= usize::from(head) {
            self.parts.resize_with(usize::from(head) + 1, Vec::new);
        }
        let qcow2 = self.image.qcow2.as_ref()?;
        let transfer = qcow2.place(job, head, &self.ranges, &mut self.parts[usize::from(head)])?;
        self.in_flight += 1;
        Some(transfer)
    }

    fn done(&mut self, head: u16, _: Job, result: Option<i32>) -> bool {
        self.ranges.leave(head);
        self.in_flight -= 1;
        // The file ends within a cluster, which reads as zeroes there.
        result == Some(0)
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
