//! The dirty log of a run: pages written, their rate, and missing marks.
//!
//! ```text
//! start: log on [, copy of all RAM] -- every PERIOD: harvest [, bring the copy up to date from it] --
//!   guest stopped, queues drained: last harvest [, the copy must now equal RAM]
//! ```
//! A live migration does the same, and sends the pages. Devices' writes are in our log, the vCPU's
//! in KVM's. A guest on a host thread writes without a log: only devices are counted then, and no
//! copy can be kept.
use crate::error::RunError;
use crate::report::DirtyFigures;
use paravane_dma::{Access, AccessGuard, DirtyLog, DirtyPages, Handle, Memory, Region};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Interval between harvests.
const PERIOD: Duration = Duration::from_millis(100);
/// Longest wait for batches when the log is turned on: there are none yet.
const PATIENCE: Duration = Duration::from_secs(1);
/// Page size of the log in bytes, as in KVM.
const PAGE: u64 = 4096;

/// Log of the vCPU's writes.
pub(crate) trait VcpuLog: Send {
    /// Takes and clears the dirty pages of RAM: a bit for each 4 KiB from its start.
    ///
    /// # Errors
    /// The host refuses; writes may be missing then.
    fn take(&self) -> std::io::Result<Vec<u64>>;
}

/// Harvests the log while a run goes on.
pub(crate) struct DirtyWatch {
    stop: Sender<()>,
    thread: JoinHandle<Harvest>,
}

impl DirtyWatch {
    /// Turns on the log of `region`, which is all RAM, and harvests it from now on.
    ///
    /// With `verify`, updates a copy of RAM from the log alone. Call it when only devices and vCPUs
    /// write to RAM any more.
    ///
    /// # Errors
    /// The host has no memory for the log or no thread; there is no log of what the guest writes,
    /// and it was to be verified.
    pub(crate) fn start(
        memory: &Memory,
        region: &Arc<Region>,
        vcpu: Option<Box<dyn VcpuLog>>,
        verify: bool,
    ) -> Result<Self, RunError> {
        let log = DirtyLog::new(memory.end(), PAGE)?;
        memory.start_log(Arc::clone(&log), PATIENCE)?;
        if verify && vcpu.is_none() {
            return Err(RunError::Config(
                "--dirty-log=verify needs a log of the guest's writes: none exists for a host thread, and \
                 --accel kvm has one"
                    .into(),
            ));
        }
        let pages = || DirtyPages::new(region.gpa(), region.size(), PAGE);
        let mut harvest = Harvest {
            log,
            memory: memory.handle().named("the dirty log's copy"),
            vcpu,
            devices: pages()?,
            all: pages()?,
            mirror: None,
            started: Instant::now(),
            figures: DirtyFigures::default(),
            failure: None,
        };
        if verify {
            harvest.mirror = Some(Mirror::new(&harvest.memory.enter(), region));
        }
        let (stop, stopped) = channel();
        let thread = std::thread::Builder::new()
            .name("dirty".into())
            .spawn(move || {
                while let Err(RecvTimeoutError::Timeout) = stopped.recv_timeout(PERIOD) {
                    harvest.take();
                }
                harvest
            })
            .map_err(|source| RunError::Os { what: "start the dirty log's thread", source })?;
        Ok(Self { stop, thread })
    }

    /// Harvests for the last time, when neither guest nor devices write any more.
    ///
    /// Returns a problem, if there is one.
    pub(crate) fn finish(self) -> (DirtyFigures, Option<String>) {
        drop(self.stop);
        match self.thread.join() {
            Ok(harvest) => harvest.finish(),
            Err(_) => (DirtyFigures::default(), Some("the dirty log's thread panicked".into())),
        }
    }
}

/// State of the harvest.
struct Harvest {
    log: Arc<DirtyLog>,
    memory: Handle,
    vcpu: Option<Box<dyn VcpuLog>>,
    /// Pages of one harvest: those that devices wrote, and all.
    devices: DirtyPages,
    all: DirtyPages,
    mirror: Option<Mirror>,
    started: Instant,
    figures: DirtyFigures,
    failure: Option<String>,
}

impl Harvest {
    fn take(&mut self) {
        self.devices.clear();
        self.log.harvest(&mut self.devices);
        self.all.clone_from(&self.devices);
        self.figures.device_pages += self.devices.count();
        if let Some(vcpu) = &self.vcpu {
            match vcpu.take() {
                Ok(pages) => {
                    let count: u64 = pages.iter().map(|word| u64::from(word.count_ones())).sum();
                    *self.figures.vcpu_pages.get_or_insert(0) += count;
                    if let Err(error) = self.all.merge(&pages, PAGE) {
                        self.failure.get_or_insert(error.to_string());
                    }
                }
                Err(error) => {
                    self.failure.get_or_insert(format!("KVM's dirty log: {error}"));
                }
            }
        }
        self.figures.pages += self.all.count();
        self.figures.harvests += 1;
        if let Some(mirror) = &mut self.mirror {
            mirror.update(&self.memory.enter(), &self.all);
        }
    }

    fn finish(mut self) -> (DirtyFigures, Option<String>) {
        self.take();
        let seconds = self.started.elapsed().as_secs_f64();
        self.figures.pages_per_s = self.figures.pages as f64 / seconds.max(1e-6);
        let mut problem = self.failure.take();
        if let Some(mirror) = &mut self.mirror {
            let missed = mirror.missed(&self.memory.enter());
            self.figures.verified = Some(missed.is_empty());
            if let Some(first) = missed.first() {
                let count = missed.len();
                problem.get_or_insert(format!(
                    "the dirty log has missed {count} pages; the first is at {first:#x}"
                ));
            }
        }
        (self.figures, problem)
    }
}

/// A copy of RAM that is updated from the log alone.
struct Mirror {
    gpa: u64,
    bytes: Vec<u8>,
}

impl Mirror {
    /// A page of RAM as it is now.
    ///
    /// It may change while it is read: then it is in the next harvest.
    fn page(guard: &AccessGuard<'_>, addr: u64, out: &mut [u8]) {
        // RAM is there; a page that could not be read would show as one that was missed.
        let _ = guard.read(addr, out, Access::RELAXED);
    }

    fn new(guard: &AccessGuard<'_>, region: &Region) -> Self {
        let mut bytes = vec![0; usize::try_from(region.size()).unwrap_or(0)];
        Self::page(guard, region.gpa(), &mut bytes);
        Self { gpa: region.gpa(), bytes }
    }

    /// The pages with their addresses.
    fn pages(&mut self) -> impl Iterator<Item = (u64, &mut [u8])> {
        (self.gpa..).step_by(PAGE as usize).zip(self.bytes.chunks_mut(PAGE as usize))
    }

    fn update(&mut self, guard: &AccessGuard<'_>, pages: &DirtyPages) {
        for (addr, bytes) in self.pages().filter(|(addr, _)| pages.contains(*addr)) {
            Self::page(guard, addr, bytes);
        }
    }

    /// Addresses of the pages that differ from RAM.
    fn missed(&mut self, guard: &AccessGuard<'_>) -> Vec<u64> {
        let mut now = vec![0; PAGE as usize];
        self.pages()
            .filter_map(|(addr, bytes)| {
                Self::page(guard, addr, &mut now);
                (now != bytes).then_some(addr)
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use paravane_dma::{Backing, RegionConfig};

    /// A vCPU's log with given pages.
    struct Given(Vec<u64>);

    impl VcpuLog for Given {
        fn take(&self) -> std::io::Result<Vec<u64>> {
            Ok(self.0.clone())
        }
    }

    fn machine() -> (Memory, Arc<Region>) {
        let config = RegionConfig { gpa: 0, size: 100 * PAGE, backing: Backing::Pages, writable: true };
        let region = Region::new(config).unwrap();
        (Memory::new(vec![Arc::clone(&region)]).unwrap(), region)
    }

    fn write(memory: &Memory, page: u64) {
        memory.handle().enter().write_obj(page * PAGE + 100, &page, Access::WRITE).unwrap();
    }

    #[test]
    fn what_both_logs_have_is_in_the_copy() {
        let (memory, region) = machine();
        let beside = Memory::new(vec![Arc::clone(&region)]).unwrap();
        let watch =
            DirtyWatch::start(&memory, &region, Some(Box::new(Given(vec![1 << 7, 1]))), true).unwrap();
        write(&memory, 3);
        // Past the log, as a vCPU would, but the vCPU's log has it.
        write(&beside, 64);
        let (figures, problem) = watch.finish();
        assert_eq!(problem, None);
        assert_eq!(figures.verified, Some(true));
        assert_eq!(figures.device_pages, 1);
        assert_eq!(figures.vcpu_pages, Some(2 * figures.harvests));
        assert_eq!(figures.pages, 1 + 2 * figures.harvests);
    }

    #[test]
    fn what_no_log_has_is_found_out() {
        let (memory, region) = machine();
        let beside = Memory::new(vec![Arc::clone(&region)]).unwrap();
        let watch = DirtyWatch::start(&memory, &region, Some(Box::new(Given(Vec::new()))), true).unwrap();
        write(&memory, 3);
        write(&beside, 9);
        write(&beside, 99);
        let (figures, problem) = watch.finish();
        assert_eq!(figures.verified, Some(false));
        assert_eq!(problem.unwrap(), "the dirty log has missed 2 pages; the first is at 0x9000");
    }

    #[test]
    fn without_a_log_of_the_guests_there_is_nothing_to_verify() {
        let (memory, region) = machine();
        assert!(DirtyWatch::start(&memory, &region, None, true).is_err());
        let watch = DirtyWatch::start(&memory, &region, None, false).unwrap();
        write(&memory, 3);
        let (figures, problem) = watch.finish();
        assert_eq!((figures.device_pages, figures.vcpu_pages, figures.verified), (1, None, None));
        assert_eq!(problem, None);
    }
}
