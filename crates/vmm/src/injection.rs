//! Measures the cost of an interrupt, with a guest of a few instructions.
//!
//! ```text
//!  host:   clock -> call -> clock -> look at the count in guest memory until it has changed -> clock
//!  guest:  HLT, or a loop in ring 3  --interrupt-->  count + 1, EOI, IRET  -->  HLT, or the loop
//! ```
//! Both deliveries are measured in one machine, by turns. The host's thread looks from the CPU that
//! it runs on; if that is the guest's, it takes the guest's time.
use crate::config::MsiDelivery;
use crate::error::RunError;
use crate::machine::accel::{Accelerator, on_cpu, stop};
use crate::machine::bus::Bus;
use crate::machine::console::Console;
use crate::machine::counters::RunCounters;
use crate::machine::kvm::{Entry, KvmMachine, prepare};
use paravane_dma::{Access, Backing, Handle, Memory, Region, RegionConfig};
use paravane_notify::msi::{MsiMessage, MsiSink};
use paravane_spec::builtin::{
    IMAGE_BASE, INTERRUPTS, IRQ_COUNT, IRQ_VECTOR_BASE, ImageHeader, MESSAGE_ADDRESS, STACK_TOP,
};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

/// Stubs behind the program: a table for exceptions and one for interrupts.
const EXCEPTIONS: u64 = IMAGE_BASE + 0x1000;
const HANDLERS: u64 = IMAGE_BASE + 0x2000;
const WAIT: u64 = IMAGE_BASE + 0x4000;
/// Where the handlers count.
const COUNT: u64 = IMAGE_BASE + 0x5000;
/// Bytes between stubs.
const STRIDE: u32 = 32;
/// The end-of-interrupt register of the local APIC.
const APIC_EOI: u32 = 0xfee0_00b0;
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
    let machine =
        KvmMachine::new(Arc::clone(&region), false, MsiDelivery::default()).map_err(RunError::NoKvm)?;
    put_guest(&memory, state)?;
    let stubs = ImageHeader {
        stub_stride: STRIDE,
        exception_stubs: EXCEPTIONS,
        irq_stubs: HANDLERS,
        wait_stub: WAIT,
        ..ImageHeader::default()
    };
    let entry = Entry { rip: IMAGE_BASE, rsp: STACK_TOP - 8, rdi: 0, ring3: true, stubs: Some(stubs) };
    prepare(&region, machine.parts().1, &entry)?;
    // Each has its number, as the messages of different devices have.
    let [one, other] = deliveries;
    let sinks = [sink(&machine, one, 0)?, sink(&machine, other, 1)?];
    if state == GuestState::Stopped {
        return Ok(call_only(&sinks, samples));
    }
    let bus = Arc::new(Bus::new(Vec::new(), None, Console::new(&memory, Arc::new(RunCounters::default()))));
    let (sender, ended) = channel();
    let running = on_cpu(vcpu_cpu, || Box::new(machine).start(bus, sender))??;
    let measured = interrupt(&mut memory.handle(), &sinks, samples);
    stop(running, &ended)?;
    measured
}

/// Delivery of an interrupt of the guest's.
fn sink(machine: &KvmMachine, delivery: MsiDelivery, number: u32) -> Result<Sink, RunError> {
    let data = u32::from(IRQ_VECTOR_BASE) + IRQ_COUNT as u32 + number;
    let message = MsiMessage { address: MESSAGE_ADDRESS, data };
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
    let mut count = || memory.enter().read_obj::<u64>(COUNT, Access::READ).unwrap_or(0);
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

fn put_guest(memory: &Memory, state: GuestState) -> Result<(), RunError> {
    let mut handle = memory.handle();
    let guard = handle.enter();
    let put = |addr: u64, code: &[u8]| {
        guard.write(addr, code, Access::WRITE).map_err(|error| RunError::Config(error.to_string()))
    };
    put(
        IMAGE_BASE,
        match state {
            // again: int3; jmp again
            GuestState::Halted => &[0xcc, 0xeb, 0xfd],
            // again: jmp again
            GuestState::Computing | GuestState::Stopped => &[0xeb, 0xfe],
        },
    )?;
    // sti; hlt; iretq: the gate has turned interrupts off, and none comes in before HLT.
    put(WAIT, &[0xfb, 0xf4, 0x48, 0xcf])?;
    for exception in 0..32 {
        // again: hlt; jmp again
        put(EXCEPTIONS + exception * u64::from(STRIDE), &[0xf4, 0xeb, 0xfd])?;
    }
    for number in 0..INTERRUPTS as u64 {
        put(HANDLERS + number * u64::from(STRIDE), &handler())?;
    }
    Ok(())
}

/// Counts, ends the interrupt, returns. Changes no register.
fn handler() -> Vec<u8> {
    // inc qword ptr [COUNT]
    let mut code = vec![0x48, 0xff, 0x04, 0x25];
    code.extend((COUNT as u32).to_le_bytes());
    // mov dword ptr [eoi], 0, with a 32-bit address
    code.extend([0x67, 0xc7, 0x04, 0x25]);
    code.extend(APIC_EOI.to_le_bytes());
    code.extend(0_u32.to_le_bytes());
    // iretq
    code.extend([0x48, 0xcf]);
    code
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handler_fits() {
        assert!(handler().len() <= STRIDE as usize);
        const { assert!(HANDLERS + INTERRUPTS as u64 * (STRIDE as u64) <= WAIT) };
        const { assert!(COUNT as u32 as u64 == COUNT && COUNT < 1 << 31) };
    }

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
