//! Entropy device driver (section 5.4).
use crate::channel::{Channel, QUEUE};
use crate::{DmaArea, DriverError, Pool, Transport, Virtio};
use paravane_ring::{QueueError, Segment};
use paravane_spec::device_id;

/// An entropy source.
#[derive(Debug)]
pub struct Rng<T> {
    channel: Channel<T>,
    buffer: DmaArea,
}

impl<T: Transport> Rng<T> {
    /// Sets the device up with one buffer of `buffer` bytes, and sets DRIVER_OK.
    ///
    /// # Errors
    /// No such device, or too little memory. The device is then told FAILED.
    pub fn new(transport: T, buffer: usize, pool: &mut Pool) -> Result<Self, DriverError> {
        let (device, (queue, buffer)) = Virtio::set_up(transport, device_id::RNG, 0, |device| {
            // One request of one segment is in flight at a time.
            Ok((device.start_queue(QUEUE, 1, 0, pool)?, pool.take(buffer, 64)?))
        })?;
        Ok(Self { channel: Channel::new(device, [queue]), buffer })
    }

    /// Asks for up to the buffer's length of bytes and kicks if the device wants it.
    ///
    /// At most one request is in flight. Returns whether it kicked.
    ///
    /// # Errors
    /// One is in flight already, `len` is 0 or more than the buffer holds, or the driver has
    /// failed.
    pub fn request(&mut self, len: usize) -> Result<bool, DriverError> {
        self.channel.check_failed()?;
        if self.channel.in_flight(QUEUE) != 0 {
            return Err(DriverError::Request("a request is in flight already"));
        }
        let segment = match u32::try_from(len) {
            Ok(bytes) if bytes > 0 && len <= self.buffer.area.len() => {
                Segment { addr: self.buffer.addr, len: bytes }
            }
            _ => return Err(DriverError::Request("the length is 0 or more than the buffer holds")),
        };
        if self.channel.add(QUEUE, &[], &[segment])?.is_none() {
            return Err(self.channel.fail(DriverError::Queue(QUEUE)));
        }
        Ok(self.channel.kick(QUEUE))
    }

    /// Copies received bytes into `out` and returns their number; `None`: none yet.
    ///
    /// The number is what the device claims, limited by the request and by `out`. Further bytes are
    /// dropped.
    ///
    /// # Errors
    /// The device broke the protocol. The driver has latched.
    pub fn poll(&mut self, out: &mut [u8]) -> Result<Option<usize>, DriverError> {
        let Some(used) = self.channel.pop(QUEUE)? else { return Ok(None) };
        let len = out.len().min(used.len as usize);
        if !self.buffer.area.read(0, &mut out[..len]) {
            return Err(self.channel.fail(QueueError::NotInFlight { id: u32::from(used.id.0) }));
        }
        Ok(Some(len))
    }

    /// Arms interrupts; `true`: something is there, and the caller must not sleep.
    #[must_use = "`true` means that no interrupt comes for what is there"]
    pub fn enable_interrupts(&mut self) -> bool {
        self.channel.enable_interrupts()
    }

    /// Suppresses interrupts.
    pub fn disable_interrupts(&mut self) {
        self.channel.disable_interrupts();
    }

    /// The device, for what is the same with every driver.
    pub fn device(&self) -> &Virtio<T> {
        self.channel.device()
    }

    /// Reads and acknowledges the causes of an interrupt of this device.
    ///
    /// # Errors
    /// The device needs a reset. The driver has latched.
    pub fn interrupt(&mut self) -> Result<u32, DriverError> {
        self.channel.interrupt()
    }
}
