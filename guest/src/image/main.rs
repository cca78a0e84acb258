//! The freestanding image: the built-in guest as a KVM guest.
//!
//! ```text
//! arch      the header, the code that takes interrupts, and the program's Platform
//! memory    an allocator; processors: has all of them work
//! ```
//! Built by the build script of the vmm crate (profile `guest`, feature `image`). Built otherwise,
//! as by `--all-features`, it is an ordinary program that says so.
#![cfg_attr(freestanding, no_std, no_main)]

#[cfg(freestanding)]
mod arch;
#[cfg(freestanding)]
mod memory;
#[cfg(freestanding)]
mod processors;

#[cfg(freestanding)]
mod start {
    use crate::arch::Machine;
    use core::fmt::{self, Write};
    use core::panic::PanicInfo;
    use paravane_spec::builtin::{BOOT_INFO, BootInfo, CONTROL_BASE, control, exit};

    /// Where the program begins; the header names it.
    ///
    /// Its arguments are the address of the boot information, and the number of the processor.
    #[unsafe(no_mangle)]
    extern "C" fn guest_entry(boot_info: u64, cpu: u64) -> ! {
        if cpu != 0 {
            crate::processors::serve(cpu as usize);
        }
        let info = if boot_info == BOOT_INFO {
            // SAFETY: the VMM starts the image with the boot information in place and mapped,
            // aligned to a page; every bit pattern is a BootInfo, and nothing else writes there
            // from now on.
            Some(unsafe { core::ptr::read_volatile(boot_info as *const BootInfo) })
        } else {
            None
        };
        match info.as_ref().and_then(Machine::new) {
            Some(machine) => {
                paravane_guest::run(&machine);
            }
            None => Machine::control(control::EXIT, exit::BAD_BOOT_INFO),
        }
        Machine::stop()
    }

    /// Prints the message and ends the run.
    #[panic_handler]
    fn panic(info: &PanicInfo<'_>) -> ! {
        let mut line = Line { bytes: [0; 400], len: 0 };
        // What does not fit is cut.
        let _ = write!(line, "{info}");
        // The image lies below 4 GiB and the stack is RAM that the VMM sees at the same address.
        Machine::control(control::PRINT_ADDR, line.bytes.as_ptr() as u32);
        Machine::control(control::PRINT_LEN, line.len as u32);
        Machine::control(control::EXIT, exit::PANIC);
        Machine::stop()
    }

    struct Line {
        bytes: [u8; 400],
        len: usize,
    }

    impl Write for Line {
        fn write_str(&mut self, text: &str) -> fmt::Result {
            for &byte in text.as_bytes() {
                *self.bytes.get_mut(self.len).ok_or(fmt::Error)? = byte;
                self.len += 1;
            }
            Ok(())
        }
    }

    impl Machine {
        /// Writes a register of the control page.
        pub(crate) fn control(register: u64, value: u32) {
            Self::write32(CONTROL_BASE + register, value);
        }

        /// Sleeps for ever: the VMM has ended the run, or is about to.
        pub(crate) fn stop() -> ! {
            loop {
                Self::sleep(Self::taken_here());
            }
        }
    }
}

#[cfg(not(freestanding))]
fn main() {
    eprintln!(
        "This is the built-in guest's image; the build script of paravane-vmm builds it for its machine."
    );
}
