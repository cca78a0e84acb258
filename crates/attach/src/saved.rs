//! A device that is saved, and goes on in another process.
//!
//! ```text
//!  save     queues off their threads, drained or left to in-flight memory -> positions, registers, the device's state
//!  restore  registers -> queues started at their positions -> each interrupts once, perhaps once too often
//! ```
//! Guest memory, in-flight memory and what the device has of the host go another way: as descriptors,
//! or as files that both processes open.
use crate::AttachedDevice;
use crate::error::AttachError;
use crate::queue::Started;
use paravane_device::Device;
use paravane_io::Retired;
use paravane_transport::{RestoreError, Restored};
use std::sync::atomic::Ordering;

/// First bytes of a saved device.
const MAGIC: [u8; 4] = *b"PVSD";
/// Version of the format.
const VERSION: u16 = 1;
/// Bytes of the configuration space that are compared.
const CONFIG: usize = 256;

/// Where a queue goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SavedQueue {
    pub(crate) queue: u16,
    /// Position, as vhost has it.
    pub(crate) base: u32,
    /// In-flight memory has requests, and with them the position.
    pub(crate) has_requests: bool,
}

/// A device with its registers, without anything of the host. See [`AttachedDevice::save`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SavedDevice {
    registers: Vec<u8>,
    queues: Vec<SavedQueue>,
    state: Vec<u8>,
    identity: Vec<u8>,
    /// Configuration space as the driver has seen it.
    config: Vec<u8>,
}

impl SavedDevice {
    /// The device as bytes, in a format that has a version.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let Self { registers, queues, state, identity, config } = self;
        let mut bytes = [&MAGIC[..], &VERSION.to_le_bytes()].concat();
        for part in [registers, state, identity, config] {
            bytes.extend((part.len() as u32).to_le_bytes());
            bytes.extend(part);
        }
        for SavedQueue { queue, base, has_requests } in queues {
            bytes.extend(queue.to_le_bytes());
            bytes.extend(base.to_le_bytes());
            bytes.push(u8::from(*has_requests));
        }
        bytes
    }

    /// Reads what [`SavedDevice::to_bytes`] has returned.
    ///
    /// The registers are checked when they are restored.
    ///
    /// # Errors
    /// It is something else, or of a later version.
    pub fn from_bytes(mut bytes: &[u8]) -> Result<Self, RestoreError> {
        let from = &mut bytes;
        if take(from)? != MAGIC || u16::from_le_bytes(take(from)?) != VERSION {
            return Err(RestoreError::Format);
        }
        let [registers, state, identity, config] = [part(from)?, part(from)?, part(from)?, part(from)?];
        let mut queues: Vec<SavedQueue> = Vec::new();
        while !from.is_empty() {
            let (queue, base) = (u16::from_le_bytes(take(from)?), u32::from_le_bytes(take(from)?));
            let [has_requests] = take(from)?;
            if has_requests > 1 || queues.last().is_some_and(|last| last.queue >= queue) {
                return Err(RestoreError::Value("position of a queue"));
            }
            queues.push(SavedQueue { queue, base, has_requests: has_requests == 1 });
        }
        Ok(Self { registers, queues, state, identity, config })
    }
}

fn take<const N: usize>(from: &mut &[u8]) -> Result<[u8; N], RestoreError> {
    from.split_off(..N).and_then(|bytes| bytes.try_into().ok()).ok_or(RestoreError::Length)
}

/// Reads bytes behind their length.
fn part(from: &mut &[u8]) -> Result<Vec<u8>, RestoreError> {
    let len = u32::from_le_bytes(take(from)?) as usize;
    from.split_off(..len).map(<[u8]>::to_vec).ok_or(RestoreError::Length)
}

impl AttachedDevice {
    /// Saves the device, for [`Builder::restore`](crate::Builder::restore) in another process.
    ///
    /// Its queues stop. Requests in flight are completed, or left to the next process if there is
    /// in-flight memory ([`Builder::track`](crate::Builder::track)); a queue that is lent is taken
    /// back. Stop the guest's register accesses before: kicks that come later are lost, but each
    /// restored queue looks at its ring once.
    ///
    /// Returns the device as well, which may hold locks and interfaces of the host; `None`: it was
    /// stopped before.
    pub fn save(&self) -> Option<(SavedDevice, Box<dyn Device>)> {
        let mut control = self.control.lock_settled();
        let device = control.device.take()?;
        let (all, leave) = (control.queues.all(), self.settings.tracking.is_some());
        let mut queues = Vec::new();
        for Retired { queue, position, in_flight } in
            control.queues.retire(all, leave, |_| self.events.clone())
        {
            match position {
                Some(position) => {
                    queues.push(SavedQueue {
                        queue,
                        base: position.vring_base(),
                        has_requests: in_flight > 0,
                    });
                }
                // The driver has to reset the device, here or there.
                None => self.events.fault(format!("queue {queue} cannot be saved")),
            }
        }
        let registers = self.events.transport.lock().save();
        let (state, identity, config) = (device.state(), device.identity(), config(&*device));
        Some((SavedDevice { registers, queues, state, identity, config }, device))
    }

    /// Takes up a device that another process has saved. Nothing has started yet.
    pub(crate) fn restore(&self, saved: &SavedDevice) -> Result<(), AttachError> {
        let SavedDevice { registers, queues, state, identity, config: before } = saved;
        let control = &mut *self.control.lock();
        if let Some(device) = &mut control.device {
            device.keep_identity(Some(identity));
        }
        let restored = self.events.transport.lock().restore(registers)?;
        let Restored { features, queues: live, suspended, window } = restored;
        if queues.iter().any(|saved| !live.iter().any(|(queue, _)| *queue == saved.queue)) {
            return Err(RestoreError::Value("position of a queue that is not live").into());
        }
        control.suspended = suspended;
        if let Some(window) = window {
            // Relaxed: nobody knows the device yet.
            self.window.store(window, Ordering::Relaxed);
        }
        for (queue, addresses) in live {
            // One without a position has failed: its driver knows that the device needs a reset.
            let Some(at) = queues.iter().find(|saved| saved.queue == queue) else { continue };
            self.try_start_queue(control, queue, Started { features, addresses }, Some(*at))
                .map_err(|reason| AttachError::Queue { queue, reason })?;
            // The process before may have ended between the two.
            if !suspended {
                self.events.interrupts.used_buffer(queue);
            }
        }
        if let Some(device) = &mut control.device {
            device.restore_state(state);
            if config(&**device) != *before {
                self.events.transport.lock().config_changed();
            }
        }
        Ok(())
    }
}

fn config(device: &dyn Device) -> Vec<u8> {
    let mut bytes = vec![0; CONFIG];
    device.read_config(0, &mut bytes);
    bytes
}
