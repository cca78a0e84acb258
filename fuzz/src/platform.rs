//! Where interrupts end, for the targets that fuzz a transport.
use paravane_notify::msi::{MsiController, MsiMessage, MsiSink};
use paravane_notify::{InterruptSink, NotifyError};
use std::sync::{Arc, Mutex};

/// What was sent. Messages to anything but a local APIC are refused.
#[derive(Clone, Default)]
pub(crate) struct Platform(pub(crate) Arc<Mutex<Vec<MsiMessage>>>);

impl MsiController for Platform {
    fn sink(&self) -> Result<Box<dyn MsiSink>, NotifyError> {
        Ok(Box::new(self.clone()))
    }
}

impl MsiSink for Platform {
    fn route(&self, message: MsiMessage) -> Result<(), NotifyError> {
        message.check_apic().map(|_| ())
    }

    fn fire(&self, message: MsiMessage) {
        self.0.lock().expect("nobody panics while sending").push(message);
    }
}

/// A line that leads nowhere: its status register is what is looked at.
pub(crate) struct NoLine;

impl InterruptSink for NoLine {
    fn raise(&self) {}
}
