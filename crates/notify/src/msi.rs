//! Message-signalled interrupts for the virtio-mmio extension and PCI's MSI-X.
//!
//! ```text
//!                   source -> vector       message, mask, pending   one of the deliveries
//! queue n is used   --> queues[n]   ---.                         .--> irqfd with an MSI route
//! configuration     --> configuration -+--> vectors[v] ----------+--> KVM_SIGNAL_MSI
//!                       (NO_VECTOR: nothing)                     '--> in-process, to a thread
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
//! [`MsiTable::set_message`] has returned, nothing is sent to the old message any more; when
//! [`MsiTable::mask`] has returned, nothing is sent at all until the vector is unmasked. An
//! interrupt raised while the vector is masked is sent, once, when it is unmasked.
//!
//! Each vector has a lock, and [`MsiTable::queue`] holds it while it sends. The second and third
//! promise require that: a sender that had looked at mask and message without the lock could be
//! anywhere when the change returns, and would have to be waited for. Unless vectors are shared,
//! each queue has its own lock, so it is almost never contended; it is taken once per batch, beside
//! a system call.
use crate::sync::{AtomicU16, AtomicU64, Mutex, MutexGuard};
use crate::{Notifier, NotifyError};
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

/// Value in place of a vector: no interrupt (VIRTIO_MSI_NO_VECTOR).
pub const NO_VECTOR: u16 = 0xffff;

/// Message: a write of `data` to `address`.
///
/// The platform treats it as an interrupt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MsiMessage {
    /// Address of the write.
    pub address: u64,
    /// Data of the write.
    pub data: u32,
    /// Number of the device that writes, as the machine counts: a requester identifier of PCI.
    ///
    /// The table of its device sets it ([`MsiTable::of_device`]). x86 ignores it; the interrupt
    /// controller of arm64 (ITS) needs it.
    pub device: u32,
}

impl MsiMessage {
    /// Makes the error for a message that the machine does not deliver as an interrupt.
    #[must_use]
    pub fn refused(self) -> NotifyError {
        NotifyError::Message { address: self.address, data: self.data }
    }
}

/// Delivers the messages of one vector.
///
/// The table calls it with the vector's lock held, so not concurrently.
pub trait MsiSink: Send + Sync {
    /// Sets the vector's message to `message`.
    ///
    /// A sink that needs a route sets it here. When this returns, nothing goes the old way.
    ///
    /// # Errors
    /// The message is no interrupt here, or the host refuses. The old message stays.
    fn route(&self, message: MsiMessage) -> Result<(), NotifyError>;

    /// Eventfd that sends the vector's message when signalled.
    ///
    /// For another process. `None` if there is none.
    fn eventfd(&self) -> Option<&Notifier> {
        None
    }

    /// Sends `message`, the one that was routed last.
    ///
    /// A release: the interrupted thread sees all that this thread did before.
    fn fire(&self, message: MsiMessage);
}

/// Source of message delivery: the machine.
pub trait MsiController: Send + Sync {
    /// Makes the delivery for one vector.
    ///
    /// # Errors
    /// The host has none left.
    fn sink(&self) -> Result<Box<dyn MsiSink>, NotifyError>;
}

/// Vectors of one device, and the map from its interrupt sources to them.
pub struct MsiTable {
    device: u32,
    vectors: Box<[Vector]>,
    queues: Box<[AtomicU16]>,
    configuration: AtomicU16,
    /// Number of messages sent.
    sent: AtomicU64,
}

struct Vector {
    sink: Box<dyn MsiSink>,
    state: Mutex<VectorState>,
}

/// State that decides whether a vector sends.
#[derive(Clone, Copy, Debug, Default)]
struct VectorState {
    /// `None` if never set, or refused by the sink: nothing is sent.
    message: Option<MsiMessage>,
    masked: bool,
    function_masked: bool,
    pending: bool,
}

impl VectorState {
    fn closed(self) -> bool {
        self.masked || self.function_masked
    }
}

impl MsiTable {
    /// Makes `vectors` vectors, without messages and unmasked.
    ///
    /// The sources are `queues` queues and the configuration change; none is mapped to a vector.
    ///
    /// # Errors
    /// The host has too few.
    pub fn new(controller: &dyn MsiController, vectors: u16, queues: usize) -> Result<Self, NotifyError> {
        let vectors = (0..vectors)
            .map(|_| Ok(Vector { sink: controller.sink()?, state: Mutex::new(VectorState::default()) }))
            .collect::<Result<_, NotifyError>>()?;
        Ok(Self {
            device: 0,
            vectors,
            queues: (0..queues).map(|_| AtomicU16::new(NO_VECTOR)).collect(),
            configuration: AtomicU16::new(NO_VECTOR),
            sent: AtomicU64::new(0),
        })
    }

    /// Has the messages come from this device \[0\]; see [`MsiMessage::device`].
    #[must_use]
    pub fn of_device(self, device: u32) -> Self {
        Self { device, ..self }
    }

    /// Number of vectors, at most 65535.
    #[must_use]
    pub fn len(&self) -> u16 {
        // `new` was given a u16.
        self.vectors.len() as u16
    }

    /// Whether there are no vectors.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.vectors.is_empty()
    }

    /// Interrupts the driver for used buffers of `queue`.
    ///
    /// Does nothing if the queue has no vector.
    pub fn queue(&self, queue: u16) {
        if let Some(map) = self.queues.get(usize::from(queue)) {
            // Relaxed: a map is set before its queue starts, and the start hands it to the thread
            // that raises. A change under way concerns interrupts that are under way as well.
            self.raise(map.load(Ordering::Relaxed));
        }
    }

    /// Duplicates the eventfd that sends the message of `queue`.
    ///
    /// For another process.
    ///
    /// Mask and pending have no effect on it: use it while the vector is not masked, or where that
    /// does not matter. `None` if there is no eventfd, or no vector.
    #[must_use]
    pub fn queue_eventfd(&self, queue: u16) -> Option<Notifier> {
        self.get(self.queue_vector(queue))?.sink.eventfd()?.try_clone().ok()
    }

    /// Interrupts the driver for a configuration change, as [`MsiTable::queue`].
    pub fn configuration(&self) {
        // Relaxed: as in `queue`.
        self.raise(self.configuration.load(Ordering::Relaxed));
    }

    /// Sends the message of `vector`, or sets it pending.
    fn raise(&self, vector: u16) {
        let Some(vector) = self.vectors.get(usize::from(vector)) else { return };
        let mut state = vector.lock();
        if state.closed() {
            state.pending = true;
        } else {
            self.send(vector, &state);
        }
    }

    /// Sends a message.
    ///
    /// The state is locked, so that neither mask nor message changes meanwhile.
    fn send(&self, vector: &Vector, state: &VectorState) {
        if let Some(message) = state.message {
            // Relaxed: a statistic.
            self.sent.fetch_add(1, Ordering::Relaxed);
            vector.sink.fire(message);
        }
    }

    /// Vector of `queue`; [`NO_VECTOR`] if it has none or does not exist.
    #[must_use]
    pub fn queue_vector(&self, queue: u16) -> u16 {
        // Relaxed: read by the thread that maps.
        self.queues.get(usize::from(queue)).map_or(NO_VECTOR, |map| map.load(Ordering::Relaxed))
    }

    /// Maps `queue` to `vector`.
    ///
    /// Returns the new vector: [`NO_VECTOR`] if `vector` does not exist.
    pub fn map_queue(&self, queue: u16, vector: u16) -> u16 {
        let vector = self.existing(vector);
        match self.queues.get(usize::from(queue)) {
            // Relaxed: as in `queue`.
            Some(map) => map.store(vector, Ordering::Relaxed),
            None => return NO_VECTOR,
        }
        vector
    }

    /// Vector of the configuration change.
    #[must_use]
    pub fn configuration_vector(&self) -> u16 {
        // Relaxed: read by the thread that maps.
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

    /// Message of `vector`, if it has one.
    #[must_use]
    pub fn message(&self, vector: u16) -> Option<MsiMessage> {
        self.get(vector)?.lock().message
    }

    /// Sets the message of `vector`. Mask and pending stay.
    ///
    /// # Errors
    /// The sink refuses it, or there is no such vector: the old message stays.
    pub fn set_message(&self, vector: u16, message: MsiMessage) -> Result<(), NotifyError> {
        let message = MsiMessage { device: self.device, ..message };
        let vector = self.get(vector).ok_or(message.refused())?;
        let mut state = vector.lock();
        if state.message != Some(message) {
            vector.sink.route(message)?;
            state.message = Some(message);
        }
        Ok(())
    }

    /// Removes the message of `vector`, and clears its own mask and its pending bit.
    pub fn forget(&self, vector: u16) {
        if let Some(vector) = self.get(vector) {
            let mut state = vector.lock();
            *state = VectorState { function_masked: state.function_masked, ..VectorState::default() };
        }
    }

    /// Masks `vector`: it sends nothing until it is unmasked.
    pub fn mask(&self, vector: u16) {
        if let Some(vector) = self.get(vector) {
            vector.lock().masked = true;
        }
    }

    /// Clears the vector's own mask.
    ///
    /// Sends a pending interrupt if the vector is unmasked then.
    pub fn unmask(&self, vector: u16) {
        if let Some(vector) = self.get(vector) {
            let mut state = vector.lock();
            state.masked = false;
            self.open(vector, &mut state);
        }
    }

    /// Sets or clears the function mask of MSI-X, which masks all vectors.
    ///
    /// Each vector's own mask stays.
    pub fn mask_function(&self, masked: bool) {
        for vector in &self.vectors {
            let mut state = vector.lock();
            state.function_masked = masked;
            self.open(vector, &mut state);
        }
    }

    fn open(&self, vector: &Vector, state: &mut VectorState) {
        if !state.closed() && std::mem::take(&mut state.pending) {
            self.send(vector, state);
        }
    }

    /// Whether the vector's own mask is set.
    #[must_use]
    pub fn masked(&self, vector: u16) -> bool {
        self.get(vector).is_some_and(|vector| vector.lock().masked)
    }

    /// Whether an interrupt is pending until the vector is unmasked.
    #[must_use]
    pub fn pending(&self, vector: u16) -> bool {
        self.get(vector).is_some_and(|vector| vector.lock().pending)
    }

    /// Sets `vector` pending, as an interrupt does while the vector is masked.
    ///
    /// For a vector that is masked, by itself or by its function: another one has sent its interrupt.
    pub fn set_pending(&self, vector: u16) {
        if let Some(vector) = self.get(vector) {
            let mut state = vector.lock();
            state.pending = state.closed();
        }
    }

    /// Resets to the state after [`MsiTable::new`].
    ///
    /// Stop all threads that raise interrupts first.
    pub fn reset(&self) {
        for map in &self.queues {
            // Relaxed: as in `queue`.
            map.store(NO_VECTOR, Ordering::Relaxed);
        }
        self.configuration.store(NO_VECTOR, Ordering::Relaxed);
        for vector in &self.vectors {
            *vector.lock() = VectorState::default();
        }
    }

    /// Number of messages sent since the start.
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
    fn lock(&self) -> MutexGuard<'_, VectorState> {
        // Each change under the lock leaves a valid state, so a poisoned one is valid.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
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
