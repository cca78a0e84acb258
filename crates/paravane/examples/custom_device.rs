//! A device of your own: its queue returns the driver's text in capital letters.
//!
//! A request has a readable part (the text) and a writable part (room for the answer). With a path,
//! the device is served over vhost-user, to any front end that knows its identifier. Without one,
//! it is put behind virtio-mmio, and a driver in the same program sends it a text.
//!
//! ```sh
//! cargo run --example custom_device --features full -- /tmp/echo.sock
//! cargo run --example custom_device --features full
//! ```
use paravane::attach::{AttachedDevice, InterruptFn};
use paravane::device::{Device, MappedQueue, QueueBatch, QueueHandler, ServeError, Served};
use paravane::dma::{Access, AccessGuard, Backing, DmaError, Memory, Region, RegionConfig};
use paravane::driver::mmio::Mmio;
use paravane::driver::{Pool, Virtio};
use paravane::export::{Endpoint, Export};
use paravane::ring::device::QueueConfig;
use paravane::ring::{Area, DmaArea, Segment};
use paravane::spec::feature;
use paravane::vhost::ExportConfig;

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
        let QueueBatch { queue, memory, chains, .. } = batch;
        for (chain, readable, writable) in chains.iter() {
            let len = chain.readable_len().min(chain.writable_len());
            // Memory that the driver does not have is an error of the queue: it stops until it is
            // reset.
            let written = self.answer(&memory, readable, writable, len)?;
            queue.complete(chain.head, written)?;
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

/// Puts the device behind virtio-mmio, and drives it by its registers.
fn serve_behind_mmio(text: &[u8]) -> Result<Vec<u8>, Box<dyn std::error::Error>> {
    let ram = Region::new(RegionConfig { gpa: 0, size: 1 << 20, backing: Backing::Pages, writable: true })?;
    let memory = Memory::new(vec![ram.clone()])?;
    // The driver polls, so an interrupt does nothing.
    let device =
        AttachedDevice::builder(Box::new(Echo), &memory).mmio(0xd000_0000, InterruptFn::new(|| ()))?;

    // SAFETY: `ram` outlives the driver, and no reference is made to its bytes.
    let area = unsafe { Area::new(ram.host(), ram.size() as usize) };
    let mut pool = Pool::new(DmaArea { area, addr: 0 });
    let mut driver = Virtio::probe(Mmio::new(&device)?, DEVICE_ID)?;
    driver.negotiate(feature::VERSION_1, 0)?;
    let mut queue = driver.start_queue(0, 8, 0, &mut pool)?;
    driver.driver_ok()?;

    let (request, answer) = (pool.take(MAX_TEXT, 8)?, pool.take(MAX_TEXT, 8)?);
    assert!(request.area.write(0, text));
    let segment = |at: DmaArea, len: usize| Segment { addr: at.addr, len: len as u32 };
    queue.add(&[segment(request, text.len())], &[segment(answer, text.len())])?;
    if queue.publish() {
        driver.notify(0, &queue);
    }
    let used = loop {
        match queue.pop_used()? {
            Some(used) => break used,
            None => std::thread::yield_now(),
        }
    };
    let mut bytes = vec![0; used.len as usize];
    assert!(answer.area.read(0, &mut bytes));
    Ok(bytes)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    if let Some(socket) = std::env::args().nth(1) {
        return serve_over_vhost_user(&socket);
    }
    println!("{}", String::from_utf8(serve_behind_mmio(b"hello from virtio-mmio")?)?);
    Ok(())
}
