//! Ends of a device's interrupts.
use paravane_notify::msi::{MsiController, MsiMessage, MsiSink};
use paravane_notify::{InterruptSink, NotifyError};
use std::sync::{Arc, Mutex, PoisonError};

/// Interrupt line that leads nowhere.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoInterrupt;

impl InterruptSink for NoInterrupt {
    fn raise(&self) {}
}

/// The x86 interrupt vector of a message; `None`: its address is not that of the local APICs.
#[must_use]
pub fn apic_vector(message: MsiMessage) -> Option<u8> {
    (message.address >> 20 == 0xfee).then_some(message.data as u8)
}

/// Machine that records the messages to its local APICs. Clones share the record.
#[derive(Clone, Debug, Default)]
pub struct RecordedMessages(Arc<Mutex<Vec<MsiMessage>>>);

impl RecordedMessages {
    /// Messages delivered since the last call, in order.
    #[must_use]
    pub fn take(&self) -> Vec<MsiMessage> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// True if no message was delivered since the last [`RecordedMessages::take`].
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }
}

impl MsiController for RecordedMessages {
    fn sink(&self) -> Result<Box<dyn MsiSink>, NotifyError> {
        Ok(Box::new(self.clone()))
    }
}

impl MsiSink for RecordedMessages {
    fn route(&self, message: MsiMessage) -> Result<(), NotifyError> {
        apic_vector(message).map(|_| ()).ok_or(message.refused())
    }

    fn fire(&self, message: MsiMessage) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(message);
    }
}
