//! What crossings cost here, measured with a guest of a few instructions.
//!
//! The guest is a loop that counts down, with or without a store to device memory in it, and ends
//! by a store to the control page. Each loop's time is taken twice, with few and with many rounds,
//! so that the cost of entering and leaving the guest cancels out.
use crate::arch::{Loop, start_loop};
use crate::config::MsiDelivery;
use crate::machine::kvm::KvmMachine;
use kvm_ioctls::{VcpuExit, VcpuFd};
use paravane_dma::{Backing, Region, RegionConfig};
use paravane_notify::{IoEventFds, KvmIoEventFds, Notifier};
use paravane_spec::builtin::{CONTROL_BASE, MMIO_BASE, control};
use paravane_spec::mmio::QUEUE_NOTIFY;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Stores a measurement.
const STORES: u32 = 2000;
/// Rounds of the empty loop in ring 3, where a round takes less than a nanosecond.
const ROUNDS_RING3: u32 = 2_000_000;
/// Rounds of the empty loop in ring 0, where a round may take microseconds.
const ROUNDS_RING0: u32 = 2000;
/// Ring-0 instructions below this time in nanoseconds are native.
const NATIVE_NS: f64 = 100.0;
/// Instructions in a round of the empty loop.
const INSTRUCTIONS: f64 = 2.0;
/// Where the guest says that it is done.
const DONE: u64 = CONTROL_BASE + control::EXIT;
/// Where a store stops the guest and does nothing else.
const NOP: u64 = CONTROL_BASE + control::NOP;
/// Where a store signals an ioeventfd.
const KICK: u64 = MMIO_BASE + QUEUE_NOTIFY;

/// The results.
#[derive(Debug)]
pub(super) struct Costs {
    /// A store that exits to this process, in nanoseconds.
    pub(super) exit_ns: f64,
    /// A store that signals an ioeventfd, or why there is none.
    pub(super) kick_ns: Result<f64, String>,
    /// One plain instruction in ring 0.
    pub(super) ring0_ns: f64,
    /// One plain instruction in ring 3.
    pub(super) ring3_ns: f64,
}

/// Measures all of it.
///
/// # Errors
/// KVM is not usable, or does not run the guest.
pub(super) fn measure() -> Result<Costs, String> {
    let region = Region::new(RegionConfig { gpa: 0, size: 4 << 20, backing: Backing::Pages, writable: true })
        .map_err(|error| error.to_string())?;
    let machine = KvmMachine::new(region, false, MsiDelivery::default(), 1).map_err(|why| why.reason)?;
    let (vm, mut vcpus, region) = machine.into_parts();
    let vcpu = vcpus.remove(0);
    let mut probe = Probe { vcpu, region };
    let exit_ns = probe.cost(Some(NOP), STORES, true)?;
    let kick_ns = kick(&mut probe, &KvmIoEventFds::new(vm));
    let ring3_ns = probe.cost(None, ROUNDS_RING3, true)? / INSTRUCTIONS;
    let mut ring0_ns = probe.cost(None, ROUNDS_RING0, false)? / INSTRUCTIONS;
    // So few rounds drown in the cost of entering where they are native; then there is time for
    // many.
    if ring0_ns < NATIVE_NS {
        ring0_ns = probe.cost(None, ROUNDS_RING3, false)? / INSTRUCTIONS;
    }
    Ok(Costs { exit_ns, kick_ns, ring0_ns, ring3_ns })
}

fn kick(probe: &mut Probe, fds: &KvmIoEventFds) -> Result<f64, String> {
    let notifier = Notifier::new(false).map_err(|error| error.to_string())?;
    fds.assign(KICK, None, &notifier).map_err(|error| error.to_string())?;
    let cost = probe.cost(Some(KICK), STORES, true);
    let removed = fds.deassign(KICK, None, &notifier).map_err(|error| error.to_string());
    let cost = cost?;
    removed?;
    match notifier.take() {
        signals if signals >= u64::from(STORES) => Ok(cost),
        signals => Err(format!("only {signals} of {STORES} stores signalled")),
    }
}

struct Probe {
    vcpu: VcpuFd,
    region: Arc<Region>,
}

impl Probe {
    /// Nanoseconds a round.
    fn cost(&mut self, store: Option<u64>, rounds: u32, ring3: bool) -> Result<f64, String> {
        let few = self.time(store, 1, ring3)?;
        let many = self.time(store, rounds, ring3)?;
        // At least a picosecond: clocks are coarse, and ratios are taken of this.
        Ok((many.saturating_sub(few).as_nanos() as f64 / f64::from(rounds.max(2) - 1)).max(1e-3))
    }

    fn time(&mut self, store: Option<u64>, rounds: u32, ring3: bool) -> Result<Duration, String> {
        let guest = Loop { store, rounds, done: DONE, ring3 };
        start_loop(&self.region, &self.vcpu, guest).map_err(|error| error.to_string())?;
        let start = Instant::now();
        loop {
            match self.vcpu.run() {
                Ok(VcpuExit::MmioWrite(DONE, _)) => break,
                Ok(VcpuExit::MmioWrite(..) | VcpuExit::Intr) => {}
                Ok(other) => return Err(format!("unexpected exit {other:?}")),
                Err(error) if matches!(error.errno(), libc::EINTR | libc::EAGAIN) => {}
                Err(error) => return Err(error.to_string()),
            }
        }
        let time = start.elapsed();
        self.settle();
        Ok(time)
    }

    /// Lets KVM finish the last store, which would move the next guest's registers.
    fn settle(&mut self) {
        self.vcpu.set_kvm_immediate_exit(1);
        // It returns EINTR without entering the guest, which is the point.
        let _ = self.vcpu.run();
        self.vcpu.set_kvm_immediate_exit(0);
    }
}
