//! Guests of a few instructions, for measurements.
use super::start::{Entry, prepare};
use crate::error::RunError;
use kvm_ioctls::VcpuFd;
use paravane_dma::{Access, Memory, Region};
use paravane_spec::builtin::{IMAGE_BASE, INTERRUPTS, ImageHeader, STACK_TOP};
use std::sync::Arc;

/// Stubs behind the program: a table for exceptions and one for interrupts.
const EXCEPTIONS: u64 = IMAGE_BASE + 0x1000;
const HANDLERS: u64 = IMAGE_BASE + 0x2000;
const WAIT: u64 = IMAGE_BASE + 0x4000;
/// Where [`start_counter`]'s guest counts its interrupts.
pub(crate) const INTERRUPT_COUNT: u64 = IMAGE_BASE + 0x5000;
/// Bytes between stubs.
const STRIDE: u32 = 32;
/// The end-of-interrupt register of the local APIC.
const APIC_EOI: u32 = 0xfee0_00b0;

/// A loop that counts down from `rounds`, then stores to `done`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Loop {
    /// Address of a store in each round.
    pub(crate) store: Option<u64>,
    pub(crate) rounds: u32,
    pub(crate) done: u64,
    /// Whether it runs in ring 3.
    pub(crate) ring3: bool,
}

/// Makes `vcpu` start with this loop.
///
/// # Errors
/// RAM is too small, or KVM refuses a register.
pub(crate) fn start_loop(region: &Arc<Region>, vcpu: &VcpuFd, guest: Loop) -> Result<(), RunError> {
    put(region, &[(IMAGE_BASE, code(guest))])?;
    start(region, vcpu, guest.ring3, None)
}

/// Makes `vcpu` start with a guest in ring 3 that counts its interrupts, asleep or in a loop.
///
/// # Errors
/// As [`start_loop`].
pub(crate) fn start_counter(region: &Arc<Region>, vcpu: &VcpuFd, asleep: bool) -> Result<(), RunError> {
    // again: int3; jmp again, or only the jump
    let program = if asleep { vec![0xcc, 0xeb, 0xfd] } else { vec![0xeb, 0xfe] };
    // sti; hlt; iretq: the gate has turned interrupts off, and none comes in before HLT.
    let mut pieces = vec![(IMAGE_BASE, program), (WAIT, vec![0xfb, 0xf4, 0x48, 0xcf])];
    let stubs = |first: u64, count: u64| (0..count).map(move |number| first + number * u64::from(STRIDE));
    // again: hlt; jmp again
    pieces.extend(stubs(EXCEPTIONS, 32).map(|at| (at, vec![0xf4, 0xeb, 0xfd])));
    pieces.extend(stubs(HANDLERS, INTERRUPTS as u64).map(|at| (at, handler())));
    put(region, &pieces)?;
    let stubs = ImageHeader {
        stub_stride: STRIDE,
        exception_stubs: EXCEPTIONS,
        irq_stubs: HANDLERS,
        wait_stub: WAIT,
        ..ImageHeader::default()
    };
    start(region, vcpu, true, Some(stubs))
}

fn start(
    region: &Arc<Region>,
    vcpu: &VcpuFd,
    ring3: bool,
    stubs: Option<ImageHeader>,
) -> Result<(), RunError> {
    prepare(region, vcpu, &Entry { rip: IMAGE_BASE, rsp: STACK_TOP - 8, rdi: 0, cpu: 0, ring3, stubs })
}

fn put(region: &Arc<Region>, pieces: &[(u64, Vec<u8>)]) -> Result<(), RunError> {
    let mut memory = Memory::new(vec![Arc::clone(region)])?.handle();
    let memory = memory.enter();
    pieces
        .iter()
        .try_for_each(|(addr, code)| memory.write(*addr, code, Access::WRITE))
        .map_err(|error| RunError::Config(error.to_string()))
}

/// Code of a loop.
fn code(Loop { store, rounds, done, .. }: Loop) -> Vec<u8> {
    let low = |addr: u64| (addr as u32).to_le_bytes();
    // mov ecx, rounds
    let mut code = vec![0xb9];
    code.extend(rounds.to_le_bytes());
    match store {
        Some(addr) => {
            // mov ebx, addr; round: mov [rbx], ecx; dec ecx; jnz round
            code.push(0xbb);
            code.extend(low(addr));
            code.extend([0x89, 0x0b, 0xff, 0xc9, 0x75, 0xfa]);
        }
        // round: dec ecx; jnz round
        None => code.extend([0xff, 0xc9, 0x75, 0xfc]),
    }
    // mov ebx, done; mov [rbx], ecx; here: jmp here
    code.push(0xbb);
    code.extend(low(done));
    code.extend([0x89, 0x0b, 0xeb, 0xfe]);
    code
}

/// Counts, ends the interrupt, returns. Changes no register.
fn handler() -> Vec<u8> {
    // inc qword ptr [INTERRUPT_COUNT]
    let mut code = vec![0x48, 0xff, 0x04, 0x25];
    code.extend((INTERRUPT_COUNT as u32).to_le_bytes());
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
    fn the_loops_jump_to_their_start() {
        let guest = Loop { store: Some(0xd000_0050), rounds: 7, done: 0xd0ff_f008, ring3: true };
        let with_store = code(guest);
        assert_eq!(with_store[..5], [0xb9, 7, 0, 0, 0]);
        assert_eq!(with_store[5..10], [0xbb, 0x50, 0, 0, 0xd0]);
        // The jump is 6 bytes long with its own 2: back to the store at 10.
        assert_eq!(with_store[10..16], [0x89, 0x0b, 0xff, 0xc9, 0x75, 0xfa]);
        assert_eq!(code(Loop { store: None, ..guest })[5..9], [0xff, 0xc9, 0x75, 0xfc]);
    }

    #[test]
    fn a_handler_fits() {
        assert!(handler().len() <= STRIDE as usize);
        const { assert!(HANDLERS + INTERRUPTS as u64 * (STRIDE as u64) <= WAIT) };
        const { assert!(INTERRUPT_COUNT as u32 as u64 == INTERRUPT_COUNT && INTERRUPT_COUNT < 1 << 31) };
    }
}
