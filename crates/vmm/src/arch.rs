//! What one processor architecture needs of the machine. The crate is compiled for one of them.
//!
//! ```text
//! VM       set_up_vm, new_vcpu, wired_routes, clock_khz    interrupt controller, processor, clock
//! guest    start_builtin, linux, start_loop, start_counter  what the vCPU begins with
//! run      exit, registers, crash                           exits, and the report of a failed guest
//!          SystemDevices                                    console and power controls of a Linux guest
//! thread   interrupt                                        the processor and interrupt that a message stands for
//! ```
//! A new architecture is a folder beside `x86_64` with the same names; on one without, the built-in guest
//! refuses to compile.
#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(target_arch = "x86_64")]
pub(crate) use x86_64::*;

#[cfg(target_arch = "x86_64")]
pub use x86_64::linux::LoadError;
