//! Measures the cost of an interrupt, with a guest of a few instructions.
//!
//! ```text
//!  host:   clock -> call -> clock -> look at the count in guest memory until it has changed -> clock
//!  guest:  HLT, or a loop in ring 3  --interrupt-->  count + 1, EOI, IRET  -->  HLT, or the loop
//! ```
//! Both deliveries are measured in one machine, by turns. The host's thread looks from the CPU that
//! it runs on; if that is the guest's, it takes the guest's time.
use crate::arch::{self, INTERRUPT_COUNT};
use crate::config::MsiDelivery;
use crate::error::RunError;
use crate::machine::accel::{Accelerator, on_cpus, stop};
use crate::machine::bus::Bus;
use crate::machine::console::Console;
use crate::machine::counters::RunCounters;
use crate::machine::kvm::KvmMachine;
use paravane_dma::{Access, Backing, Handle, Memory, Region, RegionConfig};
use paravane_notify::msi::{MsiMessage, MsiSink};
use paravane_spec::builtin::IRQ_COUNT;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

/// How long the guest has to get back to where it was interrupted.
const REST: Duration = Duration::from_micros(200);
/// How long an interrupt may take.
const PATIENCE: Duration = Duration::from_secs(2);

/// A delivery, and what it delivers.
type Sink = (Box<dyn MsiSink>, MsiMessage);

/// What the guest does when it is interrupted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GuestState {
    /// It sleeps (HLT).
    Halted,
    /// It computes in ring 3.
    Computing,
    /// Not started: interrupts stay pending, and only the call is measured.
    Stopped,
}

/// Cost of each delivery: a sample per interrupt, in nanoseconds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Injections {
    /// What the call took the host's thread.
    pub call: Vec<u64>,
    /// From before the call until the handler counted it; none if stopped.
    pub latency: Vec<u64>,
}

/// Interrupts a guest on `vcpu_cpu` `samples` times by each of `deliveries`.
///
/// # Errors
/// KVM is not usable here ([`RunError::NoKvm`]), or the host refuses, or the guest does not take
/// its interrupts.
pub fn measure(
    state: GuestState,
    deliveries: [MsiDelivery; 2],
    samples: usize,
    vcpu_cpu: Option<usize>,
) -> Result<[Injections; 2], RunError> {
    let region =
        Region::new(RegionConfig { gpa: 0, size: 4 << 20, backing: Backing::Pages, writable: true })?;
    let memory = Memory::new(vec![Arc::clone(&region)])?;
    let machine = KvmMachine::new(Arc::clone(&region), false, MsiDelivery::default(), 1)
        .map_err(|why| RunError::NoKvm(why.to_string()))?;
    arch::start_counter(&region, &machine.vcpus()[0], state == GuestState::Halted)?;
    // Each has its number, as the messages of different devices have.
    let [one, other] = deliveries;
    let sinks = [sink(&machine, one, 0)?, sink(&machine, other, 1)?];
    if state == GuestState::Stopped {
        return Ok(call_only(&sinks, samples));
    }
    let bus = Arc::new(Bus::new(Vec::new(), None, Console::new(&memory, Arc::new(RunCounters::new(1)))));
    let (sender, ended) = channel();
    let running = on_cpus(vcpu_cpu.as_slice(), || Box::new(machine).start(bus, sender))??;
    let measured = interrupt(&mut memory.handle(), &sinks, samples);
    stop(running, &ended)?;
    measured
}

/// Delivery of an interrupt of the guest's.
fn sink(machine: &KvmMachine, delivery: MsiDelivery, number: u32) -> Result<Sink, RunError> {
    let message = arch::message(IRQ_COUNT as u32 + number);
    let sink = machine.msi_by(delivery).sink()?;
    sink.route(message)?;
    Ok((sink, message))
}

/// Calls each sink in turn, over and over, while nobody takes the interrupts.
fn call_only(sinks: &[Sink; 2], samples: usize) -> [Injections; 2] {
    let mut all = <[Injections; 2]>::default();
    for _ in 0..samples {
        for ((sink, message), found) in sinks.iter().zip(&mut all) {
            let start = Instant::now();
            sink.fire(*message);
            found.call.push(start.elapsed().as_nanos() as u64);
        }
    }
    all
}

/// Interrupts the guest by each sink in turn, over and over.
fn interrupt(memory: &mut Handle, sinks: &[Sink; 2], samples: usize) -> Result<[Injections; 2], RunError> {
    let mut count = || memory.enter().read_obj::<u64>(INTERRUPT_COUNT, Access::READ).unwrap_or(0);
    let mut all = <[Injections; 2]>::default();
    // The first ones find the guest on its way to where it is to be.
    let warm_up = 3;
    for round in 0..samples + warm_up {
        for ((sink, message), found) in sinks.iter().zip(&mut all) {
            let rest = Instant::now();
            while rest.elapsed() < REST {
                std::hint::spin_loop();
            }
            let before = count();
            let start = Instant::now();
            sink.fire(*message);
            let call = start.elapsed();
            while count() == before {
                if start.elapsed() > PATIENCE {
                    let source = std::io::ErrorKind::TimedOut.into();
                    return Err(RunError::Os { what: "interrupt the guest", source });
                }
                std::hint::spin_loop();
            }
            let latency = start.elapsed();
            if round >= warm_up {
                found.call.push(call.as_nanos() as u64);
                found.latency.push(latency.as_nanos() as u64);
            }
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_interrupt_is_taken() {
        let deliveries = [MsiDelivery::Signal, MsiDelivery::Irqfd];
        for state in [GuestState::Halted, GuestState::Computing, GuestState::Stopped] {
            match measure(state, deliveries, 5, None) {
                Ok(found) => {
                    for each in found {
                        let latencies = if state == GuestState::Stopped { 0 } else { 5 };
                        assert_eq!((each.call.len(), each.latency.len()), (5, latencies));
                        assert!(each.call.iter().zip(&each.latency).all(|(call, latency)| call < latency));
                    }
                }
                Err(RunError::NoKvm(why)) => {
                    paravane_test_support::skip("injection::every_interrupt_is_taken", why);
                }
                Err(other) => panic!("{other}"),
            }
        }
    }
}
