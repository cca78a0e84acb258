//! Messages to the operator, through the control page.
use crate::platform::Platform;
use crate::report::Failure;
use core::fmt::{self, Write};
use paravane_driver::DmaArea;
use paravane_spec::builtin::{CONTROL_BASE, control};

/// Longest message in bytes; longer ones are cut.
const LINE: usize = 240;

/// Bytes of shared memory that a console needs, below 4 GiB.
pub(crate) const MEMORY: usize = LINE;

/// Prints messages from one piece of shared memory.
pub(crate) struct Console<'p, P> {
    platform: &'p P,
    memory: DmaArea,
}

impl<'p, P: Platform> Console<'p, P> {
    /// `memory` has [`MEMORY`] bytes.
    pub(crate) fn new(platform: &'p P, memory: DmaArea) -> Self {
        Self { platform, memory }
    }

    /// Prints the failure of the work on device `number`, on its queue or pair `lane`.
    pub(crate) fn tell(&self, number: usize, lane: u32, failure: &Failure) {
        let Failure { reason, detail, sector, .. } = failure;
        self.say(format_args!(
            "device {number}, queue {lane}: {reason} (sector {sector}, detail {detail:#x})"
        ));
    }

    /// Prints one line.
    fn say(&self, message: fmt::Arguments<'_>) {
        let mut line = Line { bytes: [0; LINE], len: 0 };
        // A line that is cut is an error to the formatter and not to us.
        let _ = line.write_fmt(message);
        let Ok(addr) = u32::try_from(self.memory.addr) else { return };
        if self.memory.area.write(0, &line.bytes[..line.len]) {
            self.platform.mmio_write32(CONTROL_BASE + control::PRINT_ADDR, addr);
            self.platform.mmio_write32(CONTROL_BASE + control::PRINT_LEN, line.len as u32);
        }
    }
}

/// Tells the VMM of a milestone.
pub(crate) fn milestone<P: Platform>(platform: &P, code: u32) {
    platform.mmio_write32(CONTROL_BASE + control::EVENT, code);
}

struct Line {
    bytes: [u8; LINE],
    len: usize,
}

impl Write for Line {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for character in text.chars() {
            let mut encoded = [0; 4];
            let encoded = character.encode_utf8(&mut encoded).as_bytes();
            let end = self.len + encoded.len();
            self.bytes.get_mut(self.len..end).ok_or(fmt::Error)?.copy_from_slice(encoded);
            self.len = end;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    extern crate std;

    #[test]
    fn a_long_line_is_cut_at_a_character() {
        let mut line = Line { bytes: [0; LINE], len: 0 };
        let long = "a".repeat(LINE - 1) + "é and more";
        assert!(line.write_str(&long).is_err());
        assert_eq!(core::str::from_utf8(&line.bytes[..line.len]), Ok("a".repeat(LINE - 1).as_str()));
    }
}
