//! I/O ports of a Linux guest: a 16550 console, and registers that end the run.
//!
//! ```text
//! 0x064           keyboard controller: reads 0 (it takes a command), and PULSE_RESET resets; there is no keyboard
//! 0x3f8 to 0x3ff  UART, interrupt line 4; what the guest sends goes to the console, and it receives nothing
//! 0x600           sleep control: SLP_EN with the type of S5 switches off
//! 0x601           sleep status: reads 0
//! 0x602           reset: RESET resets
//! ```
//! Unassigned ports read as all ones.
use crate::machine::console::Power;
use paravane_device::lock;
use paravane_notify::InterruptSink;
use std::convert::Infallible;
use std::io::Write;
use std::sync::{Arc, Mutex};
use vm_superio::Trigger;
use vm_superio::serial::{NoEvents, Serial};

/// First port of the UART.
pub(super) const UART: u16 = 0x3f8;
/// How many it has.
pub(super) const UART_PORTS: u8 = 8;
/// Its interrupt line.
pub(crate) const CONSOLE_GSI: u32 = 4;
/// The keyboard controller's status, and its commands.
const KEYBOARD: u16 = 0x64;
/// Of its commands, what every PC takes for a reset.
const PULSE_RESET: u8 = 0xfe;
/// ACPI's sleep control register (ACPI 6.5, section 4.8.3.7).
pub(super) const SLEEP_CONTROL: u16 = 0x600;
/// ACPI's sleep status register.
pub(super) const SLEEP_STATUS: u16 = 0x601;
/// ACPI's reset register.
pub(super) const RESET: u16 = 0x602;
/// What is to be written there.
pub(super) const RESET_VALUE: u8 = 1;
/// Type of S5, soft off: our own choice, which the DSDT tells.
pub(super) const S5: u8 = 5;

/// Sleep control: go to sleep.
const SLP_EN: u8 = 1 << 5;
/// Sleep control: where the type lies, three bits.
const SLP_TYP_SHIFT: u8 = 2;

/// The UART's interrupt line.
struct Line(Arc<dyn InterruptSink>);

impl Trigger for Line {
    type E = Infallible;

    fn trigger(&self) -> Result<(), Infallible> {
        self.0.raise();
        Ok(())
    }
}

/// Destination of the guest's console output.
pub(crate) type Output = Box<dyn Write + Send>;

/// Console and power controls of a Linux guest: all ports.
pub(crate) struct SystemDevices {
    uart: Mutex<Serial<Line, NoEvents, Output>>,
}

impl SystemDevices {
    /// With a UART on this interrupt line that sends to `output`.
    pub(crate) fn new(line: Arc<dyn InterruptSink>, output: Output) -> Self {
        Self { uart: Mutex::new(Serial::new(Line(line), output)) }
    }

    /// The guest reads.
    pub(super) fn read(&self, port: u16, data: &mut [u8]) {
        let value = match (uart_register(port), port) {
            (Some(register), _) => lock(&self.uart).read(register),
            (None, SLEEP_STATUS | KEYBOARD) => 0,
            _ => 0xff,
        };
        data.fill(0xff);
        // All registers are one byte wide.
        if let [byte] = data {
            *byte = value;
        }
    }

    /// The guest writes to `port`. `Some`: that ends the run.
    pub(super) fn write(&self, port: u16, data: &[u8]) -> Option<Power> {
        let &[value] = data else { return None };
        if let Some(register) = uart_register(port) {
            if let Err(error) = lock(&self.uart).write(register, value) {
                tracing::debug!("console output is lost: {error}");
            }
            return None;
        }
        match port {
            SLEEP_CONTROL if value == S5 << SLP_TYP_SHIFT | SLP_EN => Some(Power::Off),
            RESET if value == RESET_VALUE => Some(Power::Reset),
            KEYBOARD if value == PULSE_RESET => Some(Power::Reset),
            _ => None,
        }
    }
}

/// The register of the UART that `port` is.
fn uart_register(port: u16) -> Option<u8> {
    let register = u8::try_from(port.checked_sub(UART)?).ok()?;
    (register < UART_PORTS).then_some(register)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    #[derive(Default)]
    struct Raised(AtomicU32);

    impl InterruptSink for Raised {
        fn raise(&self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[derive(Clone, Default)]
    struct Screen(Arc<Mutex<Vec<u8>>>);

    impl Write for Screen {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            lock(&self.0).extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    fn ports() -> (SystemDevices, Arc<Raised>, Screen) {
        let (line, screen) = (Arc::new(Raised::default()), Screen::default());
        (SystemDevices::new(line.clone(), Box::new(screen.clone())), line, screen)
    }

    #[test]
    fn what_is_sent_is_shown_and_interrupts_when_asked_to() {
        let (ports, line, screen) = ports();
        for byte in b"up" {
            assert_eq!(ports.write(UART, &[*byte]), None);
        }
        assert_eq!(*lock(&screen.0), b"up");
        assert_eq!(line.0.load(Ordering::Relaxed), 0);
        // Interrupt enable: transmitter empty.
        ports.write(UART + 1, &[2]);
        ports.write(UART, b"!");
        assert!(line.0.load(Ordering::Relaxed) > 0);
        let mut status = [0];
        ports.read(UART + 5, &mut status);
        assert_eq!(status[0] & 0x61, 0x60, "empty, and nothing received");
    }

    #[test]
    fn only_the_right_words_end_the_run() {
        let (ports, _, _) = ports();
        for value in 0..=u8::MAX {
            let off = (value == 0x34).then_some(Power::Off);
            assert_eq!(ports.write(SLEEP_CONTROL, &[value]), off);
            let reset = (value == RESET_VALUE).then_some(Power::Reset);
            assert_eq!(ports.write(RESET, &[value]), reset);
            let pulse = (value == 0xfe).then_some(Power::Reset);
            assert_eq!(ports.write(KEYBOARD, &[value]), pulse);
        }
        assert_eq!(ports.write(SLEEP_CONTROL, &[0x34, 0]), None);
        assert_eq!(ports.write(RESET, &[]), None);
    }

    #[test]
    fn what_is_not_there_reads_as_ones() {
        let (ports, _, _) = ports();
        let mut word = [0; 2];
        for port in [0, UART - 1, UART, UART + 8, RESET, u16::MAX] {
            ports.read(port, &mut word);
            assert_eq!(word, [0xff; 2], "{port:#x}");
        }
        let mut byte = [1];
        ports.read(SLEEP_STATUS, &mut byte);
        assert_eq!(byte, [0]);
        byte = [1];
        ports.read(KEYBOARD, &mut byte);
        assert_eq!(byte, [0]);
    }
}
