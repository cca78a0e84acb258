//! The work on one queue of a device, of any kind, and its driver's interrupts.
use crate::platform::Platform;
use crate::report::Failure;
use paravane_driver::net::Net;
use paravane_driver::rng::Rng;
use paravane_driver::{DriverError, Message, Transport};

/// Results of one step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Step {
    /// Requests, answers or frames that came back or went through.
    pub(crate) completed: u64,
    /// Requests or frames published.
    pub(crate) sent: u64,
    /// Kicks written.
    pub(crate) kicks: u64,
    /// Random bytes received.
    pub(crate) entropy_bytes: u64,
}

/// The work on one queue of a device, or on all of a device.
pub(crate) trait Worker<P: Platform> {
    /// Takes what came back, and sends what can be sent.
    ///
    /// `ready`: all that serve the other devices can do so.
    fn step(&mut self, platform: &P, ready: bool) -> Result<Step, Failure>;

    /// Whether the work is done.
    fn finished(&self) -> bool;

    /// Whether the work is in its measured phase.
    fn is_measuring(&self) -> bool {
        false
    }

    /// Whether what [`Worker::step`] completes has interrupted, if interrupts were armed before.
    fn completes_by_interrupt(&self) -> bool {
        false
    }

    /// Does not end the measured phase while `holds`, if its length is free.
    fn hold(&mut self, holds: bool) {
        let _ = holds;
    }

    /// Whether it serves the other devices until [`Worker::finish`], and has no end.
    fn serves(&self) -> bool {
        false
    }

    /// Whether the other devices can rely on it.
    fn is_ready(&self) -> bool {
        true
    }

    /// The other devices have finished.
    fn finish(&self) {}

    /// The driver, for its interrupts.
    fn driver(&mut self) -> &mut dyn Interrupts;
}

/// The interrupts of a driver.
pub(crate) trait Interrupts {
    /// Arms interrupts; `true`: something has arrived, and the caller must not sleep.
    fn enable_interrupts(&mut self) -> bool;

    /// Suppresses interrupts.
    fn disable_interrupts(&mut self);

    /// Reads and acknowledges the causes of an interrupt of the device. For its first queue.
    fn interrupt(&mut self) -> Result<u32, DriverError>;

    /// See [`paravane_driver::Transport::set_message`].
    fn set_message(&self, number: u16, message: Message) -> Result<(), DriverError>;
}

macro_rules! interrupts {
    ($($driver:ident),*) => {$(
        impl<T: Transport> Interrupts for $driver<T> {
            fn enable_interrupts(&mut self) -> bool {
                self.enable_interrupts()
            }

            fn disable_interrupts(&mut self) {
                self.disable_interrupts();
            }

            fn interrupt(&mut self) -> Result<u32, DriverError> {
                self.interrupt()
            }

            fn set_message(&self, number: u16, message: Message) -> Result<(), DriverError> {
                self.device().set_message(number, message)
            }
        }
    )*};
}
interrupts!(Net, Rng);
