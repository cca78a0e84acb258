//! The thread machine: the guest program on a thread, against the same devices.
//!
//! A panic in it is the guest's crash. A guest that makes no more calls cannot be stopped: its
//! thread is abandoned, together with the RAM mapping and the bus that it holds, until the process
//! ends.
mod lines;
mod platform;

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
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Once};
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
    /// With `region` as RAM.
    pub(crate) fn new(region: Arc<Region>) -> Self {
        Self { region, lines: Arc::default(), fds: Arc::default() }
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
                self.lines.attach();
                let platform = HostThread::new(self.region, self.lines, self.fds, bus);
                // The receiver waits for this message for as long as it lives.
                let _ = ended.send(run(&platform));
            })
            .map_err(|source| RunError::Os { what: "start the guest's thread", source })?;
        Ok(Box::new(RunningThread { lines, thread }))
    }
}

thread_local! {
    /// Panic message of this thread's guest; `None` in threads without a guest.
    static PANIC: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Keeps the message of a guest's panic for the report.
///
/// Panics of other threads go on to the old hook.
fn catch_messages() {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let others = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            let ours = PANIC.try_with(|message| match message.try_borrow_mut() {
                Ok(mut message) => message.as_mut().map(|message| *message = info.to_string()).is_some(),
                Err(_) => false,
            });
            if ours != Ok(true) {
                others(info);
            }
        }));
    });
}

fn run(platform: &HostThread) -> Ended {
    catch_messages();
    PANIC.with(|message| *message.borrow_mut() = Some(String::new()));
    let result = catch_unwind(AssertUnwindSafe(|| paravane_guest::run(platform)));
    let message = PANIC.with(|message| message.borrow_mut().take()).unwrap_or_default();
    match result {
        Ok(code) => Ended::Exit(code, Vec::new()),
        Err(payload) if payload.is::<Stopped>() => Ended::Stopped(Vec::new()),
        Err(_) => Ended::Failed(GuestFailure {
            reason: message.split_whitespace().collect::<Vec<_>>().join(" "),
            registers: Vec::new(),
        }),
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
