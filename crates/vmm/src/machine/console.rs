//! The control page: messages, milestones and the end of the built-in guest.
use crate::machine::counters::RunCounters;
use paravane_device::lock;
use paravane_dma::{Access, Handle, Memory};
use paravane_spec::builtin::{control, event};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

/// Most bytes of one message.
const MAX_MESSAGE: u32 = 1024;

/// A power request of the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Power {
    /// Switch off.
    Off,
    /// Reset.
    Reset,
}

/// How the guest ended its run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GuestEnd {
    /// By the EXIT register, with this code.
    Exit(u32),
    /// By an exception with this vector.
    Crash(u32),
    /// By switching off or resetting: a Linux guest.
    Power(Power),
}

/// State of the control page.
pub(crate) struct Console {
    memory: Mutex<Handle>,
    counters: Arc<RunCounters>,
    print_addr: AtomicU32,
    last_message: Mutex<String>,
}

impl Console {
    /// For a guest with this memory.
    pub(crate) fn new(memory: &Memory, counters: Arc<RunCounters>) -> Self {
        Self {
            memory: Mutex::new(memory.handle().named("the console")),
            counters,
            print_addr: AtomicU32::new(0),
            last_message: Mutex::new(String::new()),
        }
    }

    /// The guest writes `value` to the register at `offset`.
    pub(crate) fn write(&self, offset: u64, value: u32) -> Option<GuestEnd> {
        match offset {
            // Relaxed: address and length are written by the same vCPU, one after the other.
            control::PRINT_ADDR => self.print_addr.store(value, Ordering::Relaxed),
            control::PRINT_LEN => self.print(value),
            control::EXIT => return Some(GuestEnd::Exit(value)),
            control::CRASH => return Some(GuestEnd::Crash(value)),
            control::EVENT => {
                tracing::debug!(event = value, "guest milestone");
                if value == event::FIRST_IO {
                    self.counters.first_io();
                }
            }
            control::YIELD => std::thread::yield_now(),
            _ => {}
        }
        None
    }

    fn print(&self, len: u32) {
        let addr = u64::from(self.print_addr.load(Ordering::Relaxed));
        let mut bytes = vec![0; len.min(MAX_MESSAGE) as usize];
        let read = lock(&self.memory).enter().read(addr, &mut bytes, Access::READ);
        if let Err(error) = read {
            tracing::debug!("the guest's message cannot be read: {error}");
            return;
        }
        // Control characters could do harm to the operator's terminal.
        let text: String =
            String::from_utf8_lossy(&bytes).chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
        let text = text.trim_end().to_owned();
        tracing::info!("guest: {text}");
        *lock(&self.last_message) = text;
    }

    /// The machine's counters.
    pub(crate) fn counters(&self) -> &RunCounters {
        &self.counters
    }

    /// The guest's last message, for the reason of its end.
    pub(crate) fn last_message(&self) -> String {
        lock(&self.last_message).clone()
    }
}
