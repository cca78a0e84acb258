//! A vCPU's registers, for the report of a failed guest.
use super::start::ring0_stack;
use crate::report::GuestFailure;
use kvm_ioctls::VcpuFd;
use paravane_dma::{Access, Memory, Region};
use std::sync::Arc;

/// Names of the exceptions, by vector.
const EXCEPTIONS: [&str; 22] = [
    "division by zero",
    "debug trap",
    "non-maskable interrupt",
    "breakpoint",
    "overflow",
    "bound range exceeded",
    "undefined instruction",
    "no floating-point unit",
    "double fault",
    "coprocessor overrun",
    "invalid task state",
    "segment not present",
    "stack fault",
    "general protection fault",
    "page fault",
    "reserved exception",
    "floating-point error",
    "alignment check",
    "machine check",
    "SIMD floating-point error",
    "virtualisation exception",
    "control protection exception",
];

/// Name of an exception.
fn exception(vector: u32) -> &'static str {
    usize::try_from(vector).ok().and_then(|at| EXCEPTIONS.get(at)).copied().unwrap_or("exception")
}

/// Whether the processor pushes an error code.
fn has_error_code(vector: u32) -> bool {
    matches!(vector, 8 | 10..=14 | 17 | 21 | 29 | 30)
}

/// Stack frame that the processor pushed when it interrupted ring 3.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Frame {
    error: Option<u64>,
    rip: u64,
    cs: u64,
    rflags: u64,
    rsp: u64,
    ss: u64,
}

impl Frame {
    /// Reads the frame at the top of the ring-0 stack of a vCPU.
    ///
    /// An exception in ring 3 starts there afresh.
    fn read(region: &Arc<Region>, cpu: u64, vector: u32) -> Option<Self> {
        let mut memory = Memory::new(vec![Arc::clone(region)]).ok()?.handle();
        let memory = memory.enter();
        let word = |from_top: u64| memory.read_obj::<u64>(ring0_stack(cpu) - from_top, Access::READ).ok();
        Some(Self {
            error: if has_error_code(vector) { Some(word(48)?) } else { None },
            rip: word(40)?,
            cs: word(32)?,
            rflags: word(24)?,
            rsp: word(16)?,
            ss: word(8)?,
        })
    }

    fn lines(&self, lines: &mut Vec<String>) {
        let error = self.error.map(|error| format!(" error={error:#x}")).unwrap_or_default();
        lines.push(format!(
            "interrupted: rip={:#018x} rsp={:#018x} rflags={:#x} cs={:#x} ss={:#x}{error}",
            self.rip, self.rsp, self.rflags, self.cs, self.ss
        ));
    }
}

/// The failure of a guest that was interrupted by exception `vector` on vCPU `cpu`.
pub(crate) fn crash(vcpu: &VcpuFd, region: &Arc<Region>, cpu: usize, vector: u32) -> GuestFailure {
    let frame = Frame::read(region, cpu as u64, vector);
    let at = frame.map(|frame| format!(" at {:#x}", frame.rip)).unwrap_or_default();
    GuestFailure {
        reason: format!("{} (exception {vector}){at}", exception(vector)),
        registers: interrupted(vcpu, frame.as_ref()),
    }
}

/// All registers as lines to print.
pub(crate) fn lines(vcpu: &VcpuFd) -> Vec<String> {
    interrupted(vcpu, None)
}

/// All registers, after the interrupted frame, if any.
fn interrupted(vcpu: &VcpuFd, frame: Option<&Frame>) -> Vec<String> {
    let mut lines = Vec::new();
    if let Some(frame) = frame {
        frame.lines(&mut lines);
    }
    match vcpu.get_regs() {
        Ok(r) => {
            let rows = [
                [("rip", r.rip), ("rsp", r.rsp), ("rbp", r.rbp), ("rflags", r.rflags)],
                [("rax", r.rax), ("rbx", r.rbx), ("rcx", r.rcx), ("rdx", r.rdx)],
                [("rsi", r.rsi), ("rdi", r.rdi), ("r8", r.r8), ("r9", r.r9)],
                [("r10", r.r10), ("r11", r.r11), ("r12", r.r12), ("r13", r.r13)],
            ];
            for row in rows {
                lines.push(row.map(|(name, value)| format!("{name}={value:#018x}")).join(" "));
            }
            lines.push(format!("r14={:#018x} r15={:#018x}", r.r14, r.r15));
        }
        Err(error) => lines.push(format!("registers cannot be read: {error}")),
    }
    match vcpu.get_sregs() {
        Ok(s) => lines.push(format!(
            "cs={:#x} ss={:#x} cr0={:#x} cr2={:#018x} cr3={:#x} cr4={:#x} efer={:#x}",
            s.cs.selector, s.ss.selector, s.cr0, s.cr2, s.cr3, s.cr4, s.efer
        )),
        Err(error) => lines.push(format!("system registers cannot be read: {error}")),
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use paravane_dma::{Backing, RegionConfig};

    #[test]
    fn reads_the_frame_with_and_without_an_error_code() {
        let region = Region::new(RegionConfig {
            gpa: 0,
            size: ring0_stack(1),
            backing: Backing::Pages,
            writable: true,
        })
        .unwrap();
        let mut memory = Memory::new(vec![Arc::clone(&region)]).unwrap().handle();
        let memory = memory.enter();
        for (from_top, value) in
            [(48_u64, 4_u64), (40, 0x10_1234), (32, 0x1b), (24, 0x202), (16, 0x3f_0000), (8, 0x23)]
        {
            memory.write_obj(ring0_stack(1) - from_top, &value, Access::WRITE).unwrap();
        }
        let fault = Frame::read(&region, 1, 14).unwrap();
        assert_eq!((fault.error, fault.rip, fault.rsp), (Some(4), 0x10_1234, 0x3f_0000));
        assert_eq!(Frame::read(&region, 1, 6).unwrap().error, None);
        assert_eq!(exception(6), "undefined instruction");
        assert_eq!(exception(4711), "exception");
    }
}
