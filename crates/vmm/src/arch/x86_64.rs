//! x86-64: a local APIC and an I/O APIC, I/O ports, ACPI, Linux's 64-bit boot protocol.
//!
//! ```text
//! vm          interrupt controller, vCPUs (cpuid), time-stamp counter
//! start       page and descriptor tables, registers: guests in ring 3, and the built-in one (image)
//! bare        guests of a few instructions, for measurements
//! exits       exits of this architecture; ports: a Linux guest's console and power controls
//! registers   what is reported of a failed guest; messages: what an MSI message means
//! linux       a stock kernel: loaded, described to (ACPI), entered
//! ```
mod bare;
mod cpuid;
mod exits;
mod image;
pub(crate) mod linux;
mod messages;
mod ports;
mod registers;
mod start;
mod vm;

pub(crate) use bare::{INTERRUPT_COUNT, Loop, start_counter, start_loop};
pub(crate) use cpuid::Place;
pub(crate) use exits::{ArchExit, exit};
pub(crate) use image::builtin as builtin_image;
pub(crate) use messages::{interrupt, is_interrupt, message};
pub(crate) use ports::{CONSOLE_GSI, Output, SystemDevices};
pub(crate) use registers::{crash, lines as registers};
pub(crate) use start::start_builtin;
pub(crate) use vm::{clock_khz, new_vcpu, set_up as set_up_vm, wired_routes};
