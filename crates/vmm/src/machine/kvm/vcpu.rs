//! The vCPU's thread: runs guest code and serves its exits.
//!
//! A stop takes the thread out of the guest without a race. It first sets `immediate_exit` in the
//! shared run structure, which makes the next entry fail. Then it sends a signal, which ends the
//! current one.
use crate::arch::{self, ArchExit};
use crate::error::RunError;
use crate::machine::accel::{Ended, Running};
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

/// Stack of the vCPU's thread in bytes, for exits and for device start and stop.
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

#[derive(Default)]
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

/// Clears the stop target when the vCPU's thread ends, also by a panic.
struct Disarm<'a>(&'a Kickout);

impl Drop for Disarm<'_> {
    fn drop(&mut self) {
        *lock(&self.0.target) = None;
    }
}

/// A running vCPU.
pub(super) struct RunningVcpu {
    kickout: Arc<Kickout>,
    thread: JoinHandle<()>,
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

impl RunningVcpu {
    /// Starts a thread that runs `vcpu`, and keeps `vm` open.
    ///
    /// The kernel drops a VM's irqfds when its descriptor is closed.
    pub(super) fn spawn(
        vm: Arc<VmFd>,
        mut vcpu: VcpuFd,
        region: Arc<Region>,
        bus: Arc<Bus>,
        ended: Sender<Ended>,
    ) -> Result<Self, RunError> {
        register_signal()?;
        let run = NonNull::from(&mut vcpu.get_kvm_run().immediate_exit);
        let kickout = Arc::new(Kickout::default());
        *lock(&kickout.target) = Some(ImmediateExit(run.cast()));
        let shared = Arc::clone(&kickout);
        let thread = std::thread::Builder::new()
            .name("vcpu0".into())
            .stack_size(STACK)
            .spawn(move || {
                // Dropped in the opposite order: target, vCPU, VM, region.
                let guest = Guest { region, bus };
                let _vm = vm;
                let mut vcpu = vcpu;
                let _disarm = Disarm(&shared);
                let end = guest.run(&mut vcpu, &shared);
                // The receiver waits for this message for as long as it lives.
                let _ = ended.send(end);
            })
            .map_err(|source| RunError::Os { what: "start the vCPU's thread", source })?;
        Ok(Self { kickout, thread })
    }
}

impl Running for RunningVcpu {
    fn stop(&self) {
        self.kickout.request();
        if let Err(error) = self.thread.kill(SIGRTMIN()) {
            tracing::error!("cannot signal the vCPU: {error}");
        }
    }

    fn join(self: Box<Self>) {
        if self.thread.join().is_err() {
            tracing::error!("the vCPU's thread panicked");
        }
    }
}

struct Guest {
    region: Arc<Region>,
    bus: Arc<Bus>,
}

impl Guest {
    fn run(&self, vcpu: &mut VcpuFd, kickout: &Kickout) -> Ended {
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
        self.bus.console().counters().exit();
        let what = match exit {
            VcpuExit::MmioRead(addr, data) => {
                self.bus.read(addr, data);
                return Step::On;
            }
            VcpuExit::MmioWrite(addr, data) => {
                let end = self.bus.write(addr, data);
                return self.after(vcpu, end);
            }
            VcpuExit::Intr => return Step::On,
            VcpuExit::InternalError => "KVM could not go on with it (internal error)".to_owned(),
            VcpuExit::FailEntry(reason, _) => format!("the processor refused its state ({reason:#x})"),
            other => match arch::exit(other, &self.bus) {
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
                Step::End(Ended::Failed(arch::crash(vcpu, &self.region, vector)))
            }
            Some(GuestEnd::Power(power)) => Step::End(Ended::Power(power)),
        }
    }
}
