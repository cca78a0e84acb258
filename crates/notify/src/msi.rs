//! Message-signalled interrupts, as virtio-mmio's extension and PCI's MSI-X share them.
//!
//! ```text
//!                       source -> vector            vector: message, mask, pending      one of the deliveries
//! queue n is used   --> queues[n]   --.                    .--> irqfd with an MSI route (KVM routes the message)
//! configuration     --> configuration -+--> vectors[v] ----+--> KVM_SIGNAL_MSI
//!                       (NO_VECTOR: nothing)               '--> in-process (a guest that is a thread)
//!
//! one vector:
//!                     raise: sends                          raise: sets pending
//!                    +-----------+         mask            +-----------------+
//!                    |  Unmasked | ----------------------> | Masked, pending?|
//!                    +-----------+ <---------------------- +-----------------+
//!                                   unmask; sends if pending
//! ```
//! A vector is masked if its own mask or that of its function ([`MsiTable::mask_function`]) is set.
//!
//! **Promises.** An interrupt goes to the old message or to the new one, never to a mixture. When
//! [`MsiTable::set_message`] has returned, nothing is sent to the old message any more; when [`MsiTable::mask`] has
//! returned, nothing is sent at all until the vector is unmasked. An interrupt raised while the vector is masked
//! is sent, once, when it is unmasked.
//!
//! Each vector has a lock, and [`MsiTable::queue`] holds it while it sends: that is what the second and the third
//! promise take (a sender that had looked at mask and message without it could be anywhere by the time
//! the change returns, and would have to be waited for). The lock is the queue's own unless vectors are shared, and so is
//! almost never contended; it is taken once a batch, beside a system call.
use crate::sync::{AtomicU16, AtomicU64, Mutex, MutexGuard};
use crate::{Notifier, NotifyError};
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

/// In place of a vector: the source sends no interrupt (as VIRTIO_MSI_NO_VECTOR).
pub const NO_VECTOR: u16 = 0xffff;

/// What is sent: a write of `data` to `address`, which the platform takes for an interrupt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MsiMessage {
    /// Where to; on x86 it names the local APIC.
    pub address: u64,
    /// What; on x86 the low 8 bits are the vector.
    pub data: u32,
}

impl MsiMessage {
    /// The vector that this message stands for on x86, `None` if its address is not the local APICs' (a memory write
    /// to anywhere else is no interrupt).
    #[must_use]
    pub fn apic_vector(self) -> Option<u8> {
        // Bits 20 to 31 say what it is; the bits below hold the destination. The upper half is reserved.
        (self.address >> 20 == 0xfee).then_some(self.data as u8)
    }

    /// An error if [`MsiMessage::apic_vector`] has none.
    ///
    /// # Errors
    /// [`NotifyError::Message`].
    pub fn check_apic(self) -> Result<u8, NotifyError> {
        self.apic_vector().ok_or(NotifyError::Message { address: self.address, data: self.data })
    }
}

/// Delivers the messages of one vector. The table calls with the vector's lock held, so not concurrently.
pub trait MsiSink: Send + Sync {
    /// From now on the vector's message is `message`. A sink that needs a route makes it here, and when this returns
    /// nothing goes the old way.
    ///
    /// # Errors
    /// The message is no interrupt here, or the host refuses. The old message stays.
    fn route(&self, message: MsiMessage) -> Result<(), NotifyError>;

    /// What sends the vector's message when it is signalled, for another process; `None`: there is no such thing.
    fn eventfd(&self) -> Option<&Notifier> {
        None
    }

    /// Sends `message`, the one that was routed last. Whoever it interrupts sees all that this thread did before
    /// (a release).
    fn fire(&self, message: MsiMessage);
}

/// What gives out message delivery: the machine.
pub trait MsiController: Send + Sync {
    /// Delivery for one vector.
    ///
    /// # Errors
    /// The host has none left.
    fn sink(&self) -> Result<Box<dyn MsiSink>, NotifyError>;
}

/// The vectors of one device and the map from its sources to them.
pub struct MsiTable {
    vectors: Box<[Vector]>,
    queues: Box<[AtomicU16]>,
    configuration: AtomicU16,
    /// Messages sent.
    sent: AtomicU64,
}

struct Vector {
    sink: Box<dyn MsiSink>,
    gate: Mutex<Gate>,
}

/// What decides whether a vector sends.
#[derive(Clone, Copy, Debug, Default)]
struct Gate {
    /// `None`: never set, or refused by the sink. Nothing is sent then.
    message: Option<MsiMessage>,
    masked: bool,
    function_masked: bool,
    pending: bool,
}

impl Gate {
    fn closed(self) -> bool {
        self.masked || self.function_masked
    }
}

impl MsiTable {
    /// `vectors` vectors of `controller`, without messages and unmasked, for `queues` queues and the configuration
    /// change, which all are mapped to no vector.
    ///
    /// # Errors
    /// The host has not that many.
    pub fn new(controller: &dyn MsiController, vectors: u16, queues: usize) -> Result<Self, NotifyError> {
        let vectors = (0..vectors)
            .map(|_| Ok(Vector { sink: controller.sink()?, gate: Mutex::new(Gate::default()) }))
            .collect::<Result<_, NotifyError>>()?;
        Ok(Self {
            vectors,
            queues: (0..queues).map(|_| AtomicU16::new(NO_VECTOR)).collect(),
            configuration: AtomicU16::new(NO_VECTOR),
            sent: AtomicU64::new(0),
        })
    }

    /// Number of vectors, at most 65535.
    #[must_use]
    pub fn len(&self) -> u16 {
        // `new` was given a u16.
        self.vectors.len() as u16
    }

    /// Whether there is no vector at all.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.vectors.is_empty()
    }

    /// Used buffers of `queue` were published: interrupts the driver, unless the queue has no vector.
    pub fn queue(&self, queue: u16) {
        if let Some(map) = self.queues.get(usize::from(queue)) {
            // Relaxed: a map is set before its queue starts, and the start hands it to the thread that raises. A change
            // under way concerns interrupts that are under way as well.
            self.raise(map.load(Ordering::Relaxed));
        }
    }

    /// A second descriptor of what sends the message of `queue`, for another process. Mask and pending are not for it:
    /// the driver has not masked the vector, or does not mind. `None` if there is none, or no vector.
    #[must_use]
    pub fn queue_eventfd(&self, queue: u16) -> Option<Notifier> {
        self.get(self.queue_vector(queue))?.sink.eventfd()?.try_clone().ok()
    }

    /// The configuration has changed: as [`MsiTable::queue`].
    pub fn configuration(&self) {
        // Relaxed: as in `queue`.
        self.raise(self.configuration.load(Ordering::Relaxed));
    }

    /// Sends the message of `vector`, or leaves it pending.
    fn raise(&self, vector: u16) {
        let Some(vector) = self.vectors.get(usize::from(vector)) else { return };
        let mut gate = vector.lock();
        if gate.closed() {
            gate.pending = true;
        } else {
            self.send(vector, &gate);
        }
    }

    /// With the gate locked, so that neither mask nor message changes meanwhile.
    fn send(&self, vector: &Vector, gate: &Gate) {
        if let Some(message) = gate.message {
            // Relaxed: a statistic.
            self.sent.fetch_add(1, Ordering::Relaxed);
            vector.sink.fire(message);
        }
    }

    /// The vector that `queue` is mapped to, [`NO_VECTOR`] if none or no such queue.
    #[must_use]
    pub fn queue_vector(&self, queue: u16) -> u16 {
        // Relaxed: read by whoever maps.
        self.queues.get(usize::from(queue)).map_or(NO_VECTOR, |map| map.load(Ordering::Relaxed))
    }

    /// Maps `queue` to `vector` and returns what it is mapped to now: [`NO_VECTOR`] if there is no such vector.
    pub fn map_queue(&self, queue: u16, vector: u16) -> u16 {
        let vector = self.existing(vector);
        match self.queues.get(usize::from(queue)) {
            // Relaxed: as in `queue`.
            Some(map) => map.store(vector, Ordering::Relaxed),
            None => return NO_VECTOR,
        }
        vector
    }

    /// The vector that the configuration change is mapped to.
    #[must_use]
    pub fn configuration_vector(&self) -> u16 {
        // Relaxed: read by whoever maps.
        self.configuration.load(Ordering::Relaxed)
    }

    /// As [`MsiTable::map_queue`], for the configuration change.
    pub fn map_configuration(&self, vector: u16) -> u16 {
        let vector = self.existing(vector);
        // Relaxed: as in `queue`.
        self.configuration.store(vector, Ordering::Relaxed);
        vector
    }

    fn existing(&self, vector: u16) -> u16 {
        if usize::from(vector) < self.vectors.len() { vector } else { NO_VECTOR }
    }

    /// The message of `vector`, `None` if it has none.
    #[must_use]
    pub fn message(&self, vector: u16) -> Option<MsiMessage> {
        self.get(vector)?.lock().message
    }

    /// `vector` sends `message` from now on. Mask and pending stay as they are.
    ///
    /// # Errors
    /// The sink refuses it, or there is no such vector: the message that was there stays.
    pub fn set_message(&self, vector: u16, message: MsiMessage) -> Result<(), NotifyError> {
        let refused = NotifyError::Message { address: message.address, data: message.data };
        let vector = self.get(vector).ok_or(refused)?;
        let mut gate = vector.lock();
        if gate.message != Some(message) {
            vector.sink.route(message)?;
            gate.message = Some(message);
        }
        Ok(())
    }

    /// `vector` has no message any more, so it sends none; nothing is pending in it, and it is not masked by itself.
    pub fn forget(&self, vector: u16) {
        if let Some(vector) = self.get(vector) {
            let mut gate = vector.lock();
            *gate = Gate { function_masked: gate.function_masked, ..Gate::default() };
        }
    }

    /// Sends nothing by `vector` until it is unmasked.
    pub fn mask(&self, vector: u16) {
        if let Some(vector) = self.get(vector) {
            vector.lock().masked = true;
        }
    }

    /// Takes the vector's own mask off, and sends what was pending if that opens it.
    pub fn unmask(&self, vector: u16) {
        if let Some(vector) = self.get(vector) {
            let mut gate = vector.lock();
            gate.masked = false;
            self.open(vector, &mut gate);
        }
    }

    /// Masks all vectors, or takes that mask off (the function mask of MSI-X). Each vector's own mask stays as it is.
    pub fn mask_function(&self, masked: bool) {
        for vector in &self.vectors {
            let mut gate = vector.lock();
            gate.function_masked = masked;
            self.open(vector, &mut gate);
        }
    }

    fn open(&self, vector: &Vector, gate: &mut Gate) {
        if !gate.closed() && std::mem::take(&mut gate.pending) {
            self.send(vector, gate);
        }
    }

    /// Whether the vector's own mask is set.
    #[must_use]
    pub fn masked(&self, vector: u16) -> bool {
        self.get(vector).is_some_and(|vector| vector.lock().masked)
    }

    /// Whether an interrupt waits for the vector to be unmasked.
    #[must_use]
    pub fn pending(&self, vector: u16) -> bool {
        self.get(vector).is_some_and(|vector| vector.lock().pending)
    }

    /// As after [`MsiTable::new`]. The caller has stopped whoever raises.
    pub fn reset(&self) {
        for map in &self.queues {
            // Relaxed: as in `queue`.
            map.store(NO_VECTOR, Ordering::Relaxed);
        }
        self.configuration.store(NO_VECTOR, Ordering::Relaxed);
        for vector in &self.vectors {
            *vector.lock() = Gate::default();
        }
    }

    /// Messages sent since the start.
    #[must_use]
    pub fn sent(&self) -> u64 {
        // Relaxed: a statistic.
        self.sent.load(Ordering::Relaxed)
    }

    fn get(&self, vector: u16) -> Option<&Vector> {
        self.vectors.get(usize::from(vector))
    }
}

impl Vector {
    fn lock(&self) -> MutexGuard<'_, Gate> {
        // Each change under the lock leaves a gate that means something, so a poisoned one is as good as any.
        self.gate.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for MsiTable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MsiTable")
            .field("vectors", &self.vectors.iter().map(|vector| *vector.lock()).collect::<Vec<_>>())
            .field("sent", &self.sent())
            .finish_non_exhaustive()
    }
}
