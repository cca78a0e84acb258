//! The vCPUs' threads: each runs guest code and serves its exits.
//!
//! A stop takes the thread out of the guest without a race. It first sets `immediate_exit` in the
//! shared run structure, which makes the next entry fail. Then it sends a signal, which ends the
//! current one.
use super::stats::VcpuStats;
use crate::arch::{self, ArchExit};
use crate::error::RunError;
use crate::machine::accel::{Ended, Running, lost};
use crate::machine::bus::Bus;
use crate::machine::console::GuestEnd;
use crate::report::GuestFailure;
use kvm_ioctls::{VcpuExit, VcpuFd, VmFd};
use paravane_device::lock;
use paravane_dma::Region;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, Once};
use std::thread::JoinHandle;
use vmm_sys_util::signal::{Killable, SIGRTMIN, register_signal_handler};

/// Stack of a vCPU's thread in bytes, for exits and for device start and stop.
const STACK: usize = 512 << 10;

/// Result of an exit: the guest continues, or has ended.
enum Step {
    On,
    End(Ended),
}

/// Address of `immediate_exit`, while the vCPU exists.
struct ImmediateExit(NonNull<AtomicU8>);

// SAFETY: it points to a byte of a shared mapping that is only accessed atomically from other
// threads, and the mutex around it is emptied before the mapping goes.
unsafe impl Send for ImmediateExit {}

struct Kickout {
    requested: AtomicBool,
    target: Mutex<Option<ImmediateExit>>,
}

impl Kickout {
    fn request(&self) {
        // Release, pairs with the acquire in the vCPU's loop.
        self.requested.store(true, Ordering::Release);
        if let Some(target) = &*lock(&self.target) {
            // SAFETY: the vCPU's thread empties `target` before it drops the vCPU and with it the
            // mapping. The kernel reads the byte at the entry; the order with the signal that
            // follows is the system call's.
            unsafe { target.0.as_ref() }.store(1, Ordering::SeqCst);
        }
    }
}

/// What the vCPUs' threads share.
struct Shared {
    region: Arc<Region>,
    bus: Arc<Bus>,
    kickouts: Vec<Kickout>,
    ends: Mutex<Ends>,
}

/// Ends of the vCPUs until now.
struct Ends {
    /// Number of vCPUs that still run.
    left: usize,
    /// Registers of those that were stopped.
    stopped: Vec<(usize, Vec<String>)>,
    /// `None`: the guest's end was sent.
    sender: Option<Sender<Ended>>,
}

impl Shared {
    /// A vCPU has ended.
    ///
    /// The first end that is no stop is the guest's. Without one, the guest is stopped when all
    /// vCPUs are.
    fn ended(&self, cpu: usize, end: Ended) {
        let mut ends = lock(&self.ends);
        ends.left = ends.left.saturating_sub(1);
        let end = match end {
            Ended::Stopped(registers) => {
                ends.stopped.push((cpu, registers));
                if ends.left > 0 {
                    return;
                }
                Ended::Stopped(self.registers(std::mem::take(&mut ends.stopped)))
            }
            other => other,
        };
        if let Some(sender) = ends.sender.take() {
            // The receiver waits for this message for as long as it lives.
            let _ = sender.send(end);
        }
    }

    /// The registers of all vCPUs, by number.
    fn registers(&self, mut stopped: Vec<(usize, Vec<String>)>) -> Vec<String> {
        stopped.sort_unstable_by_key(|(cpu, _)| *cpu);
        let several = self.kickouts.len() > 1;
        let lines = stopped
            .into_iter()
            .flat_map(|(cpu, registers)| several.then(|| format!("CPU {cpu}:")).into_iter().chain(registers));
        lines.collect()
    }
}

/// Clears the stop target when a vCPU's thread ends, counts it, and reports its end if it panics.
struct Disarm<'a>(&'a Shared, usize);

impl Drop for Disarm<'_> {
    fn drop(&mut self) {
        let Self(shared, cpu) = *self;
        *lock(&shared.kickouts[cpu].target) = None;
        shared.bus.console().counters().ends(cpu);
        if std::thread::panicking() {
            shared.ended(cpu, Ended::Host(lost()));
        }
    }
}

/// The running vCPUs.
pub(super) struct RunningVcpus {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

extern "C" fn nothing(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}

/// Installs a handler for the signal that ends KVM_RUN.
///
/// Without one, the signal would end the process.
fn register_signal() -> Result<(), RunError> {
    static ONCE: Once = Once::new();
    let mut result = Ok(());
    ONCE.call_once(|| {
        result = register_signal_handler(SIGRTMIN(), nothing).map_err(|error| RunError::Os {
            what: "handle the vCPU's signal",
            source: std::io::Error::from_raw_os_error(error.errno()),
        });
    });
    result
}

impl RunningVcpus {
    /// Starts a thread for each vCPU. They keep `vm` open.
    ///
    /// The kernel drops a VM's irqfds when its descriptor is closed.
    pub(super) fn spawn(
        vm: &Arc<VmFd>,
        mut vcpus: Vec<VcpuFd>,
        region: Arc<Region>,
        bus: Arc<Bus>,
        ended: Sender<Ended>,
    ) -> Result<Self, RunError> {
        register_signal()?;
        let kickout = |vcpu: &mut VcpuFd| {
            let run = NonNull::from(&mut vcpu.get_kvm_run().immediate_exit);
            Kickout { requested: AtomicBool::new(false), target: Mutex::new(Some(ImmediateExit(run.cast()))) }
        };
        let kickouts = vcpus.iter_mut().map(kickout).collect();
        let ends = Mutex::new(Ends { left: vcpus.len(), stopped: Vec::new(), sender: Some(ended) });
        let shared = Arc::new(Shared { region, bus, kickouts, ends });
        let mut running = Self { shared, threads: Vec::with_capacity(vcpus.len()) };
        for (cpu, vcpu) in vcpus.into_iter().enumerate() {
            match thread(Arc::clone(vm), vcpu, cpu, Arc::clone(&running.shared)) {
                Ok(thread) => running.threads.push(thread),
                Err(source) => {
                    Box::new(running).join();
                    return Err(RunError::Os { what: "start a vCPU's thread", source });
                }
            }
        }
        Ok(running)
    }
}

/// Starts the thread of one vCPU.
fn thread(
    vm: Arc<VmFd>,
    mut vcpu: VcpuFd,
    cpu: usize,
    shared: Arc<Shared>,
) -> std::io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name(format!("vcpu{cpu}")).stack_size(STACK).spawn(move || {
        // Dropped in the opposite order: target, vCPU, VM, and the region with what is shared.
        let shared = shared;
        let _vm = vm;
        let vcpu = &mut vcpu;
        let _disarm = Disarm(&shared, cpu);
        match VcpuStats::open(vcpu) {
            Ok(stats) => shared.bus.console().counters().counts(cpu, stats),
            Err(error) => tracing::debug!("KVM's counters of CPU {cpu} cannot be read: {error}"),
        }
        let end = Guest { shared: &shared, cpu }.run(vcpu);
        shared.ended(cpu, end);
    })
}

impl Running for RunningVcpus {
    fn stop(&self) {
        self.shared.kickouts.iter().for_each(Kickout::request);
        for thread in self.threads.iter().filter(|thread| !thread.is_finished()) {
            if let Err(error) = thread.kill(SIGRTMIN()) {
                tracing::error!("cannot signal a vCPU: {error}");
            }
        }
    }

    fn join(self: Box<Self>) {
        // The guest ends on one vCPU. The others run on until now.
        self.stop();
        for thread in self.threads {
            if thread.join().is_err() {
                tracing::error!("a vCPU's thread panicked");
            }
        }
    }
}

/// The guest on one vCPU.
struct Guest<'a> {
    shared: &'a Shared,
    cpu: usize,
}

impl Guest<'_> {
    fn run(&self, vcpu: &mut VcpuFd) -> Ended {
        let kickout = &self.shared.kickouts[self.cpu];
        loop {
            // Acquire, pairs with the release in `request`.
            if kickout.requested.load(Ordering::Acquire) {
                return Ended::Stopped(arch::registers(vcpu));
            }
            if let Step::End(end) = self.step(vcpu) {
                return end;
            }
        }
    }

    /// Enters the guest once.
    fn step(&self, vcpu: &mut VcpuFd) -> Step {
        let exit = match vcpu.run() {
            Ok(exit) => exit,
            Err(error) if matches!(error.errno(), libc::EINTR | libc::EAGAIN) => return Step::On,
            Err(error) => {
                return Step::End(Ended::Host(RunError::Os {
                    what: "run the vCPU",
                    source: std::io::Error::from_raw_os_error(error.errno()),
                }));
            }
        };
        self.shared.bus.console().counters().exit(self.cpu);
        let what = match exit {
            VcpuExit::MmioRead(addr, data) => {
                self.shared.bus.read(addr, data);
                return Step::On;
            }
            VcpuExit::MmioWrite(addr, data) => {
                let end = self.shared.bus.write(addr, data);
                return self.after(vcpu, end);
            }
            VcpuExit::Intr => return Step::On,
            VcpuExit::InternalError => "KVM could not go on with it (internal error)".to_owned(),
            VcpuExit::FailEntry(reason, _) => format!("the processor refused its state ({reason:#x})"),
            other => match arch::exit(other, &self.shared.bus) {
                ArchExit::Served(end) => return self.after(vcpu, end),
                ArchExit::Reset => return Step::End(Ended::TripleFault(arch::registers(vcpu))),
                ArchExit::Failed(what) => what,
            },
        };
        Step::End(Ended::Failed(GuestFailure { reason: what, registers: arch::registers(vcpu) }))
    }

    /// Decides whether to continue after a write.
    fn after(&self, vcpu: &VcpuFd, end: Option<GuestEnd>) -> Step {
        match end {
            None => Step::On,
            Some(GuestEnd::Exit(code)) => Step::End(Ended::Exit(code, arch::registers(vcpu))),
            Some(GuestEnd::Crash(vector)) => {
                Step::End(Ended::Failed(arch::crash(vcpu, &self.shared.region, self.cpu, vector)))
            }
            Some(GuestEnd::Power(power)) => Step::End(Ended::Power(power)),
        }
    }
}
