//! Devices that are saved, and made anew on the same memory.
use super::*;
use crate::{AttachError, SavedDevice};
use paravane_device::{MappedQueue, QueueBatch, ServeError, Served};
use paravane_io::InFlightMemory;
use paravane_transport::RestoreError;
use std::sync::atomic::{AtomicU64, Ordering};

/// Takes buffers; uses them if it is not to hold them.
struct Holder {
    holds: bool,
    /// Each byte of the configuration space.
    config: u8,
    taken: Arc<AtomicU64>,
}

impl Device for Holder {
    fn device_id(&self) -> u32 {
        Rng::new().device_id()
    }

    fn features(&self) -> u64 {
        Rng::new().features()
    }

    fn queue_sizes(&self) -> &[u16] {
        &[4]
    }

    fn read_config(&self, _offset: u32, out: &mut [u8]) {
        out.fill(self.config);
    }

    fn start_queue(&mut self, _index: u16, _features: u64) -> io::Result<Box<dyn QueueHandler>> {
        Ok(Box::new(Self { taken: Arc::clone(&self.taken), ..*self }))
    }
}

impl QueueHandler for Holder {
    fn serve(&mut self, queue: &mut MappedQueue) -> Result<Served, ServeError> {
        let QueueBatch { queue, memory, chains, .. } = queue.begin_batch();
        let taken = memory.pop(queue, chains)? as u32;
        self.taken.fetch_add(u64::from(taken), Ordering::Relaxed);
        if self.holds {
            return Ok(Served { taken, ..Served::default() });
        }
        for (chain, ..) in chains.iter() {
            queue.complete(chain.head, 64)?;
        }
        Ok(Served { taken, completed: taken, interrupt: queue.publish()? })
    }

    fn drain(&mut self, _queue: &mut MappedQueue, _complete: bool) -> Served {
        Served::default()
    }
}

/// Attaches it with in-flight memory.
fn attach(
    holds: bool,
    memory: &Memory,
    in_flight: InFlightMemory,
    saved: Option<SavedDevice>,
) -> (AttachedDevice, Arc<AtomicU64>) {
    let taken = Arc::<AtomicU64>::default();
    let device = Box::new(Holder { holds, config: 0, taken: Arc::clone(&taken) });
    let builder = AttachedDevice::builder(device, memory).suspendable().track(in_flight);
    let builder = match saved {
        Some(saved) => builder.restore(saved),
        None => builder,
    };
    (builder.mmio(BASE, InterruptFn::new(|| ())).unwrap(), taken)
}

fn again(memory: &InFlightMemory) -> InFlightMemory {
    InFlightMemory::open(&[4], memory.file().unwrap().try_clone_to_owned().unwrap()).unwrap()
}

#[test]
fn requests_in_flight_are_done_by_the_next_process() {
    let (memory, in_flight) = (memory(), InFlightMemory::new(&[4]).unwrap());
    let (device, taken) = attach(true, &memory, again(&in_flight), None);
    let mut rig = Rig { device, memory: memory.handle(), extension: 0, available: 0 };
    rig.start(DESC as u32);
    rig.offer();
    rig.kick();
    rig.wait_for("the buffer", |_| taken.load(Ordering::Relaxed) == 1);
    let (saved, _) = rig.device.save().unwrap();
    assert_eq!(rig.used(), 0);
    let saved = SavedDevice::from_bytes(&saved.to_bytes()).unwrap();
    (rig.device, _) = attach(false, &memory, again(&in_flight), Some(saved));
    rig.wait_for("the used buffer", |rig| rig.used() == 1);
    assert!(rig.read(INTERRUPT_STATUS) & INT_USED_BUFFER != 0);
    rig.served();
    // And once more, with nothing in flight.
    let (saved, _) = rig.device.save().unwrap();
    (rig.device, _) = attach(false, &memory, again(&in_flight), Some(saved));
    rig.served();
    assert_eq!((rig.used(), rig.needs_reset()), (3, false));
    // A driver that starts over finds nothing of it.
    rig.write(STATUS, 0);
    rig.start(DESC as u32);
    rig.served();
}

#[test]
fn a_suspended_device_stays_so() {
    let memory = memory();
    let mut rig = Rig::with(&memory, Arc::new(NoIoEventFds), Builder::suspendable);
    rig.extension = feature::SUSPEND;
    rig.start(DESC as u32);
    rig.served();
    rig.write(INTERRUPT_ACK, INT_USED_BUFFER);
    rig.write(STATUS, RUNNING | SUSPEND);
    let (saved, device) = rig.device.save().unwrap();
    let restored = AttachedDevice::builder(device, &memory).suspendable().restore(saved);
    rig.device = restored.mmio(BASE, InterruptFn::new(|| ())).unwrap();
    assert_eq!((rig.read(STATUS), rig.device.interrupts()), (SUSPENDED, 0));
    rig.offer();
    rig.write(STATUS, SUSPENDED | DRIVER_OK);
    rig.wait_for("the buffer that waited", |rig| rig.used() == 2);
}

#[test]
fn a_queue_that_has_failed_is_saved_as_one() {
    let memory = memory();
    let mut rig = Rig::with(&memory, Arc::new(NoIoEventFds), |builder| builder);
    rig.start(DESC as u32);
    rig.memory.enter().write_obj(AVAIL + 2, &1000_u16, Access::WRITE).unwrap();
    rig.kick();
    rig.wait_for("DEVICE_NEEDS_RESET", |rig| rig.needs_reset());
    let (saved, device) = rig.device.save().unwrap();
    rig.device =
        AttachedDevice::builder(device, &memory).restore(saved).mmio(BASE, InterruptFn::new(|| ())).unwrap();
    assert!(rig.needs_reset());
    rig.write(STATUS, 0);
    rig.start(DESC as u32);
    rig.served();
}

#[test]
fn a_change_of_the_configuration_meanwhile_is_announced() {
    let memory = memory();
    let configured =
        |changed: bool| Box::new(Holder { holds: false, config: changed.into(), taken: Arc::default() });
    let mut rig = Rig::attached(configured(false), &memory, Arc::new(NoIoEventFds), 0, |builder| {
        builder.mmio(BASE, InterruptFn::new(|| ())).unwrap()
    });
    rig.start(DESC as u32);
    for (changed, causes) in [(false, INT_USED_BUFFER), (true, INT_USED_BUFFER | INT_CONFIG_CHANGE)] {
        let (saved, _) = rig.device.save().unwrap();
        let builder = AttachedDevice::builder(configured(changed), &memory).restore(saved);
        rig.device = builder.mmio(BASE, InterruptFn::new(|| ())).unwrap();
        assert_eq!(rig.read(INTERRUPT_STATUS), causes);
    }
}

#[test]
fn no_bytes_do_harm() {
    let memory = memory();
    let mut rig = Rig::with(&memory, Arc::new(NoIoEventFds), |builder| builder);
    rig.start(DESC as u32);
    rig.served();
    let (saved, _) = rig.device.save().unwrap();
    let bytes = saved.to_bytes();
    assert_eq!(SavedDevice::from_bytes(&bytes).unwrap(), saved);
    let restore = |bytes: &[u8]| {
        let saved = SavedDevice::from_bytes(bytes)?;
        let builder = AttachedDevice::builder(Box::new(Rng::new()), &memory).restore(saved);
        builder.mmio(BASE, InterruptFn::new(|| ())).map(drop)
    };
    restore(&bytes).unwrap();
    for end in 0..bytes.len() {
        // Without its position, the queue has failed.
        assert!(restore(&bytes[..end]).is_err() || end == bytes.len() - 7, "{end} bytes");
    }
    for at in 0..bytes.len() {
        for value in [0, 1, 0x7f, 0xff] {
            let mut changed = bytes.clone();
            changed[at] = value;
            // Whatever it is: the device stops in order.
            let _ = restore(&changed);
        }
    }
    // The position of a queue that the device lacks.
    let other = [&bytes[..], &[9, 0, 0, 0, 0, 0, 0]].concat();
    assert!(matches!(restore(&other), Err(AttachError::Restore(RestoreError::Value(_)))));
    let twice = [&bytes[..], &bytes[bytes.len() - 7..]].concat();
    assert!(matches!(restore(&twice), Err(AttachError::Restore(RestoreError::Value(_)))));
}
