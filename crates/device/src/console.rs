//! Console device (virtio specification, section 5.3): port 0, with the size of the window.
//!
//! ```text
//!   guest ==transmit==> output --.                 .--> socket, pseudo-terminal, log, standard streams
//!                                |-- Port <-> pump-|
//!   guest <==receive=== input <--'   (a thread)    '--- and back
//! ```
//! **Bounds.** Output that nobody has read yet waits in a buffer of the device. When it is full, the guest
//! waits, if somebody reads; else the oldest output makes room for the newest, so that a guest without a
//! reader does not stop. Input waits in the socket.
//!
//! **Reconnection.** The buffers belong to the device: they outlive the driver's queues, and whoever
//! reads on the host's side. Bytes leave a buffer once the other side has them, a socket or a
//! buffer of the driver. What a socket or a pseudo-terminal still has when its reader goes is lost with it.
mod back_end;
mod port;
mod pump;
mod receive;
#[cfg(test)]
mod tests;
mod transmit;

pub use back_end::{BackEnd, Pty};
pub use port::Carried;

use crate::{Device, QueueHandler};
use paravane_ring::device::QueueConfig;
use paravane_spec::console::{Config, F_SIZE, RECEIVE, TRANSMIT};
use paravane_spec::feature;
use port::Port;
use pump::Pump;
use std::any::Any;
use std::io;
use std::sync::Arc;
use zerocopy::IntoBytes;

/// Default size of the buffer for output, in bytes.
pub const BUFFER: usize = 1 << 20;

/// Largest queue size: some VMMs make all queues of one size, and QEMU makes none larger.
const QUEUE_SIZE: u16 = 1024;

/// Size of a console's window, in characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// Characters of a line.
    pub columns: u16,
    /// Lines.
    pub rows: u16,
}

/// A console.
#[derive(Debug)]
pub struct Console {
    port: Arc<Port>,
    window: Option<Window>,
    pump: Pump,
}

/// Tells what a console has carried.
#[derive(Clone, Debug)]
pub struct ConsoleCounters(Arc<Port>);

impl ConsoleCounters {
    /// What it has carried so far.
    #[must_use]
    pub fn carried(&self) -> Carried {
        self.0.carried()
    }
}

impl Console {
    /// Creates the device, and starts the thread of its host's side.
    ///
    /// `buffer`: most bytes of output that wait for a reader [[`BUFFER`]].
    ///
    /// # Errors
    /// The host refuses a descriptor or a thread.
    pub fn new(back_end: BackEnd, window: Option<Window>, buffer: usize) -> io::Result<Self> {
        let port = Arc::new(Port::new(buffer.max(1))?);
        let pump = Pump::start(Arc::clone(&port), back_end)?;
        Ok(Self { port, window, pump })
    }

    /// Its counters.
    #[must_use]
    pub fn counters(&self) -> ConsoleCounters {
        ConsoleCounters(Arc::clone(&self.port))
    }
}

impl Device for Console {
    fn device_id(&self) -> u32 {
        paravane_spec::device_id::CONSOLE
    }

    fn features(&self) -> u64 {
        let size = if self.window.is_some() { F_SIZE } else { 0 };
        feature::VERSION_1 | feature::RING_RESET | QueueConfig::SPLIT_FEATURES | size
    }

    fn queue_sizes(&self) -> &[u16] {
        &[QUEUE_SIZE; 2]
    }

    fn read_config(&self, offset: u32, out: &mut [u8]) {
        let mut config = Config::default();
        if let Some(Window { columns, rows }) = self.window {
            (config.cols, config.rows) = (columns.into(), rows.into());
        }
        crate::read_config(config.as_bytes(), offset, out);
    }

    fn start_queue(&mut self, index: u16, _features: u64) -> io::Result<Box<dyn QueueHandler>> {
        let port = Arc::clone(&self.port);
        match index {
            RECEIVE => Ok(Box::new(receive::Receive::new(port))),
            TRANSMIT => Ok(Box::new(transmit::Transmit::new(port))),
            _ => Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("the console has no queue {index}; it has 2"),
            )),
        }
    }

    fn retire(self: Box<Self>) -> Option<Box<dyn Any + Send>> {
        // A log's disk may keep the thread for long.
        Some(Box::new(self.pump))
    }
}
