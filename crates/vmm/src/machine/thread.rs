//! The thread machine: the guest program on threads, one for each processor, against the same devices.
//!
//! A panic in it is the guest's crash. A guest that makes no more calls cannot be stopped: its
//! thread is abandoned, together with the RAM mapping and the bus that it holds, until the process
//! ends.
mod lines;
mod panics;
mod platform;
mod processors;

use crate::error::RunError;
use crate::machine::accel::{Accelerator, Ended, Running};
use crate::machine::bus::Bus;
use crate::machine::dirty::VcpuLog;
use crate::report::GuestFailure;
use lines::Lines;
use paravane_attach::LocalIoEventFds;
use paravane_dma::Region;
use paravane_notify::msi::MsiController;
use paravane_notify::{InterruptSink, IoEventFds, NotifyError};
use platform::{HostThread, Stopped};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::thread::JoinHandle;

/// Stack of the guest's thread, about that of the flat image.
const STACK: usize = 1 << 20;

/// The machine before its start.
pub(crate) struct ThreadMachine {
    region: Arc<Region>,
    lines: Arc<Lines>,
    fds: Arc<LocalIoEventFds>,
}

impl ThreadMachine {
    /// With `region` as RAM and this number of processors.
    pub(crate) fn new(region: Arc<Region>, cpus: u16) -> Self {
        Self { region, lines: Arc::new(Lines::new(cpus)), fds: Arc::default() }
    }
}

impl Accelerator for ThreadMachine {
    fn name(&self) -> &'static str {
        "thread"
    }

    fn sink(&self, gsi: u32) -> Result<Arc<dyn InterruptSink>, NotifyError> {
        Ok(Lines::line(&self.lines, gsi))
    }

    fn msi(&self) -> Arc<dyn MsiController> {
        Lines::messages(&self.lines)
    }

    fn ioeventfds(&self) -> Arc<dyn IoEventFds> {
        Arc::clone(&self.fds) as Arc<dyn IoEventFds>
    }

    fn cpus(&self) -> u16 {
        self.lines.cpus()
    }

    fn clock_khz(&self) -> u64 {
        0
    }

    fn prepare(&mut self) -> Result<(), RunError> {
        Ok(())
    }

    fn vcpu_log(&self) -> Option<Box<dyn VcpuLog>> {
        None
    }

    fn start(self: Box<Self>, bus: Arc<Bus>, ended: Sender<Ended>) -> Result<Box<dyn Running>, RunError> {
        let lines = Arc::clone(&self.lines);
        let thread = std::thread::Builder::new()
            .name("guest".into())
            .stack_size(STACK)
            .spawn(move || {
                self.lines.attach(0);
                let platform = HostThread::new(self.region, self.lines, self.fds, Arc::clone(&bus));
                let end = run(&platform);
                bus.console().counters().ends(0);
                // The receiver waits for this message for as long as it lives.
                let _ = ended.send(end);
            })
            .map_err(|source| RunError::Os { what: "start the guest's thread", source })?;
        Ok(Box::new(RunningThread { lines, thread }))
    }
}

fn run(platform: &HostThread) -> Ended {
    match panics::catch(|| paravane_guest::run(platform)) {
        Ok(code) => Ended::Exit(code, Vec::new()),
        Err(panic) if panic.is::<Stopped>() => Ended::Stopped(Vec::new()),
        Err(panic) => Ended::Failed(GuestFailure { reason: panic.message, registers: Vec::new() }),
    }
}

struct RunningThread {
    lines: Arc<Lines>,
    thread: JoinHandle<()>,
}

impl Running for RunningThread {
    fn stop(&self) {
        self.lines.stop();
    }

    fn join(self: Box<Self>) {
        if self.thread.join().is_err() {
            tracing::error!("the guest's thread panicked outside the guest");
        }
    }
}
