//! The engine for an image: how the jobs of its queues are done.
//!
//! ```text
//!   Engine::choose --> Engine::queue, for each virtqueue: a ring, threads, or a queue of a store
//!     raw image, 512 bytes smaller than its blocks: a ring, beside threads (whole_blocks)
//!     qcow2 image: the queue of its file or store, beside threads (clusters)
//! ```
mod clusters;
mod whole_blocks;

use super::image::Image;
use super::{BlkConfig, EngineChoice, OpenError, OpenReason};
use paravane_store::file::{self, Beside, Immediate, Mapped, Perform, Pool, PresentPages, Uring};
use paravane_store::{Job, StoreQueue};
use std::fmt;
use std::io;
use std::sync::Arc;

/// Makes the queue of a virtqueue, with room for so many jobs in flight.
type MakeQueue = Arc<dyn Fn(u16) -> io::Result<Box<dyn StoreQueue>> + Send + Sync>;

/// The engine of a disk, chosen when it is opened.
#[derive(Clone)]
pub(super) struct Engine {
    /// See [`Blk::engine`](super::Blk::engine).
    pub(super) name: String,
    queue: MakeQueue,
    /// Transfers are io_uring's.
    ///
    /// The rings hold the image's lock, too: requests outlive a killed process, and nothing else
    /// may write to the image before they are done.
    pub(super) is_ring: bool,
    /// Jobs are done in the queue's thread.
    pub(super) copies: bool,
    /// Jobs are done in the queue's thread, and may wait for a disk.
    pub(super) blocks: bool,
    /// The image's file, if it is mapped.
    pub(super) mapped: Option<Arc<Mapped>>,
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Engine").field(&self.name).finish_non_exhaustive()
    }
}

impl Engine {
    fn new(
        name: impl Into<String>,
        queue: impl Fn(u16) -> io::Result<Box<dyn StoreQueue>> + Send + Sync + 'static,
    ) -> Self {
        let (name, queue) = (name.into(), Arc::new(queue));
        Self { name, queue, is_ring: false, copies: false, blocks: false, mapped: None }
    }

    /// Makes the queue of a virtqueue, with room for `jobs` jobs in flight.
    pub(super) fn queue(&self, jobs: u16) -> io::Result<Box<dyn StoreQueue>> {
        (self.queue)(jobs)
    }

    /// The engine for an image. `present`: the pages of an image in memory, if they are known.
    pub(super) fn choose(
        image: &Arc<Image>,
        config: &BlkConfig,
        present: Option<PresentPages>,
    ) -> Result<Self, OpenError> {
        let is_qcow2 = image.qcow2.is_some();
        let mut engine = match (config.engine, file::probe()) {
            _ if image.file.source.file().is_none() => over(image, of_source(image, "queues of the store")),
            (EngineChoice::Threads, _) => threads("threads", image.clone()),
            (EngineChoice::Immediate, _) => immediate(image, present),
            (EngineChoice::Auto, _) if image.file.in_memory && is_qcow2 => in_memory(image),
            (EngineChoice::Auto, _) if image.file.in_memory => immediate(image, present),
            (_, Ok(_)) => over(image, rings(image, config.registered_buffers)),
            (EngineChoice::IoUring, Err(source)) => {
                return Err(OpenReason::Engine { source }.at(&config.path));
            }
            (EngineChoice::Auto, Err(error)) => {
                threads(format!("threads (io_uring: {error})"), image.clone())
            }
        };
        if image.file.direct.is_some() {
            engine.name += ", direct";
        }
        Ok(engine)
    }
}

/// A ring for each queue, with the image, and with guest memory if `registers`.
fn rings(image: &Arc<Image>, registers: bool) -> Engine {
    let engine = match registers {
        false => of_source(image, "io_uring"),
        true => {
            let image = image.clone();
            Engine::new("io_uring with registered buffers", move |jobs| {
                Ok(Box::new(Uring::new(image.file()?, true, jobs)?))
            })
        }
    };
    Engine { is_ring: true, ..engine }
}

/// The queues of the image's file or store.
fn of_source(image: &Arc<Image>, name: &str) -> Engine {
    let source = image.file.source.clone();
    Engine::new(name, move |jobs| source.queue(jobs))
}

/// One pool for all queues.
fn threads(name: impl Into<String>, work: Arc<dyn Perform>) -> Engine {
    let pool = Pool::new(work);
    Engine::new(name, move |jobs| Ok(Box::new(pool.queue(jobs)?)))
}

/// The queue's own thread. An image in memory is mapped where possible.
fn immediate(image: &Arc<Image>, present: Option<PresentPages>) -> Engine {
    let may_map = image.file.in_memory && image.qcow2.is_none() && image.file.direct.is_none();
    let mapped = may_map.then(|| map(image, present)).flatten();
    let name = if mapped.is_some() { "immediate, mapped" } else { "immediate" };
    // A backing file that a qcow2 image may have is not in memory.
    let blocks = !(image.file.in_memory && image.qcow2.is_none());
    let work = Arc::new(InMemory { image: image.clone(), mapped: mapped.clone() });
    let queue = move |_| Ok(Box::new(Immediate::new(work.clone())) as _);
    Engine { copies: true, blocks, mapped, ..Engine::new(name, queue) }
}

/// Threads for a qcow2 image in memory: what they do at once is done in the queue's thread.
fn in_memory(image: &Arc<Image>) -> Engine {
    let mapped = map(image, None);
    if let (Some(qcow2), Some(mapped)) = (&image.qcow2, &mapped) {
        let mapped = Arc::downgrade(mapped);
        qcow2.on_free(move |range| {
            if let Some(mapped) = mapped.upgrade() {
                mapped.forget(range);
            }
        });
    }
    let name = if mapped.is_some() { "threads, mapped" } else { "threads" };
    let work = Arc::new(InMemory { image: image.clone(), mapped: mapped.clone() });
    Engine { copies: true, mapped, ..threads(name, work) }
}

/// The engine of an image over that of its file or store: a format has workers, too.
fn over(image: &Arc<Image>, below: Engine) -> Engine {
    let is_format = image.qcow2.is_some();
    if !is_format && image.larger_block().is_none() {
        return below;
    }
    let Engine { name, queue: make, is_ring, .. } = below;
    let (image, pool) = (image.clone(), Pool::new(image.clone()));
    let queue = move |jobs| -> io::Result<Box<dyn StoreQueue>> {
        let (below, workers) = (make(jobs)?, pool.queue(jobs)?);
        Ok(match is_format {
            true => Box::new(Beside::new(clusters::Clusters::new(&image)?, below, workers)),
            false => Box::new(Beside::new(whole_blocks::WholeBlocks, below, workers)),
        })
    };
    let name = if is_format { name + ", threads" } else { name };
    Engine { is_ring, ..Engine::new(name, queue) }
}

/// Maps the file of an image in memory.
///
/// Of a qcow2 image, it is the file with its tables and clusters, as long as it is now.
fn map(image: &Image, present: Option<PresentPages>) -> Option<Arc<Mapped>> {
    let map = || {
        let (file, len) = (image.file()?, image.mapped_len()?);
        Mapped::new(file, image.file.guards.file_to_map(file), len, !image.file.read_only, present)
    };
    let say = |error: &io::Error| tracing::debug!(path = %image.file.path.display(), %error, "the image is not mapped; using system calls");
    map().inspect_err(say).ok().map(Arc::new)
}

/// Stack of a worker in bytes that runs the code of a format.
const FORMAT_STACK: usize = 1 << 20;

impl Perform for Image {
    unsafe fn perform(&self, job: Job) -> i32 {
        // SAFETY: the caller's promise.
        unsafe { Self::perform(self, job) }
    }

    fn stack(&self) -> usize {
        // The default is for system calls and log lines.
        if self.qcow2.is_some() { FORMAT_STACK } else { 256 << 10 }
    }
}

/// An image in memory, whose file may be mapped.
#[derive(Debug)]
struct InMemory {
    image: Arc<Image>,
    mapped: Option<Arc<Mapped>>,
}

impl Perform for InMemory {
    unsafe fn perform(&self, job: Job) -> i32 {
        // SAFETY: the caller's promise.
        let call = |job| unsafe { self.image.perform(job) };
        match &self.mapped {
            // SAFETY: the caller's promise.
            Some(mapped) if self.image.qcow2.is_none() => unsafe { mapped.perform_or(job, call) },
            _ => call(job),
        }
    }

    unsafe fn at_once(&self, job: Job) -> Option<i32> {
        // SAFETY: the caller's promise.
        let file = |job| unsafe { self.image.file.source.perform(job) };
        self.image.qcow2.as_ref()?.in_place(job, |job| match &self.mapped {
            // SAFETY: the caller's promise.
            Some(mapped) => unsafe { mapped.perform_or(job, file) },
            None => file(job),
        })
    }

    fn stack(&self) -> usize {
        Perform::stack(&*self.image)
    }
}
