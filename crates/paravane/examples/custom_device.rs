//! A device of your own: a queue that returns what the driver sends, in capital letters.
//!
//! A request has a readable part (the text) and a writable part (room for the answer). The device
//! is served over vhost-user, to any front end that knows its identifier:
//!
//! ```sh
//! cargo run --example custom_device -- /tmp/echo.sock
//! ```
use paravane::device::{Device, MappedQueue, QueueBatch, QueueHandler, ServeError, Served};
use paravane::dma::{Access, AccessGuard, DmaError};
use paravane::ring::device::QueueConfig;
use paravane::ring::{QueueError, Segment};
use paravane::spec::feature;
use paravane::vhost::{Endpoint, Export, ExportConfig};

/// The identifier that the driver looks for. The specification has not assigned it.
const DEVICE_ID: u32 = 63;
/// Largest text, in bytes. The rest of a longer one is not returned.
const MAX_TEXT: usize = 4096;

/// The control path: what the transport asks.
struct Echo;

impl Device for Echo {
    fn device_id(&self) -> u32 {
        DEVICE_ID
    }

    fn features(&self) -> u64 {
        feature::VERSION_1 | feature::RING_RESET | QueueConfig::SPLIT_FEATURES
    }

    /// One queue of up to 64 descriptors.
    fn queue_sizes(&self) -> &[u16] {
        &[64]
    }

    /// There is no configuration space.
    fn read_config(&self, _offset: u32, out: &mut [u8]) {
        out.fill(0);
    }

    fn start_queue(&mut self, _index: u16, _features: u64) -> std::io::Result<Box<dyn QueueHandler>> {
        Ok(Box::new(EchoQueue { text: [0; MAX_TEXT] }))
    }
}

/// The data path of one queue. It is owned by one I/O thread.
struct EchoQueue {
    text: [u8; MAX_TEXT],
}

impl EchoQueue {
    /// Serves one request and returns the length of the answer.
    fn answer(
        &mut self,
        memory: &AccessGuard<'_>,
        readable: &[Segment],
        writable: &[Segment],
        len: u32,
    ) -> Result<u32, DmaError> {
        let len = MAX_TEXT.min(len as usize);
        let text = &mut self.text[..len];
        memory.read_segments(readable, 0, text, Access::READ)?;
        text.make_ascii_uppercase();
        memory.write_segments(writable, 0, text, Access::WRITE)?;
        Ok(len as u32)
    }
}

impl QueueHandler for EchoQueue {
    /// Takes a batch of requests, serves all of it, and publishes once.
    fn serve(&mut self, queue: &mut MappedQueue) -> Result<Served, ServeError> {
        let mut batch = queue.begin_batch();
        let taken = batch.pop()? as u32;
        let QueueBatch { queue, memory, chains } = batch;
        for (chain, readable, writable) in chains.iter() {
            let len = chain.readable_len().min(chain.writable_len());
            match self.answer(&memory, readable, writable, len) {
                Ok(written) => queue.complete(chain.head, written)?,
                Err(error) => {
                    // The driver named memory that it does not have: the queue stops until it is
                    // reset.
                    let error = QueueError::Address { addr: error.addr(), len };
                    return Err(queue.fail(error).into());
                }
            }
        }
        Ok(Served { taken, completed: taken, interrupt: queue.publish()? })
    }

    /// Nothing is in flight when `serve` returns.
    fn drain(&mut self, _queue: &mut MappedQueue, _complete: bool) -> Served {
        Served::default()
    }
}

fn serve_over_vhost_user(socket: &str) -> Result<(), Box<dyn std::error::Error>> {
    let config = ExportConfig::new("echo", Endpoint::Listen(socket.into()));
    Export::start(config, Box::new(Echo))?.join()?;
    Ok(())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let socket = std::env::args().nth(1).ok_or("usage: custom_device SOCKET")?;
    serve_over_vhost_user(&socket)
}
