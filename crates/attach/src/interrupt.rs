//! Interrupts delivered by a closure, for hosts without irqfds.
use paravane_notify::msi::{MsiController, MsiMessage, MsiSink};
use paravane_notify::{InterruptSink, NotifyError};
use std::sync::Arc;

/// A wired interrupt as a closure, which raises an edge.
///
/// It is called by the thread that serves the queue, and must not wait for the device.
pub struct InterruptFn<F>(F);

impl<F: Fn() + Send + Sync + 'static> InterruptFn<F> {
    /// Calls `raise` for each interrupt.
    pub fn new(raise: F) -> Arc<Self> {
        Arc::new(Self(raise))
    }
}

impl<F: Fn() + Send + Sync> InterruptSink for InterruptFn<F> {
    fn raise(&self) {
        (self.0)();
    }
}

/// Message-signalled interrupts as a closure, `KVM_SIGNAL_MSI` for instance.
///
/// It is called by the thread that serves the queue, and must not wait for the device.
pub struct MessageFn<F>(Arc<F>);

impl<F: Fn(MsiMessage) + Send + Sync + 'static> MessageFn<F> {
    /// Calls `send` for each message.
    pub fn new(send: F) -> Self {
        Self(Arc::new(send))
    }
}

impl<F: Fn(MsiMessage) + Send + Sync + 'static> MsiController for MessageFn<F> {
    fn sink(&self) -> Result<Box<dyn MsiSink>, NotifyError> {
        Ok(Box::new(Self(Arc::clone(&self.0))))
    }
}

impl<F: Fn(MsiMessage) + Send + Sync> MsiSink for MessageFn<F> {
    fn route(&self, _message: MsiMessage) -> Result<(), NotifyError> {
        Ok(())
    }

    fn fire(&self, message: MsiMessage) {
        (self.0)(message);
    }
}
