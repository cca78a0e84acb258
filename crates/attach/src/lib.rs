//! Puts a virtio device behind a transport: what stands between a VMM's exits and a [`Device`].
//!
//! ```text
//!                       read, write, offset          AttachedDevice                       threads
//! vCPU's exit --------------------------> Transport (pure) -> Effect, carried out before the access returns:
//!                                            Activate, StartQueue   rings mapped, handler made, put on an I/O thread
//! guest's kick --ioeventfd or exit-----> Notify: the queue's eventfd ------------------>  served
//!                                            ResetQueue, Reset      queue taken off its thread and stopped
//! guest's interrupt <--irqfd, MSI, closure-- Interrupts <-------------------------------  used buffers
//!                                            Move                   ioeventfds follow the window
//! ```
//! [`AttachedDevice::builder`] takes the device and guest memory; what else there is has a default. The last call of the
//! [`Builder`] names the transport, its place and its interrupt: [`Builder::mmio`], [`Builder::mmio_msi`], [`Builder::pci`].
//! From then on the VMM passes register accesses on, and nothing else. `examples/kvm_mmio.rs` is a whole VMM.
//!
//! # Features
//! The device says what its kind can do. The builder adds what rings, transport and memory offer: `features.rs` has the table,
//! [`RingFeatures`] the choice, [`AttachedDevice::features`] the result.
//!
//! # States of a queue
//! ```text
//!               start                   move_queue
//!   Stopped ----------> Thread(n) <-----------------> Thread(m)
//!    ^ ^ ^ ^              |   ^
//!    | | | '--- reset, stop   |                   start, elsewhere:  Inline   (in the exits of its kicks)
//!    | | |                |   |                                      Process  (another process)
//!    | | |     lend_queue v   | take_back_queue
//!    | | '--- reset, stop - Lent
//!    | |                    |
//!    | '--- reset, stop - Lost   no thread takes the queue back, or the back end does not report its position
//!    '--- reset, stop --- Inline, Process
//! ```
//! A queue that its driver breaks, or whose start fails, sets DEVICE_NEEDS_RESET and is recorded as a [`Fault`].
//!
//! # Locks
//! `control` (device, queues), then `transport` (registers). An I/O thread takes only `transport`, to mark a failed queue, and
//! nobody waits for an I/O thread while holding `transport`. An access that is no configuration access and no write takes
//! only `transport`.
//!
//! [`Device`]: paravane_device::Device
mod backend;
mod builder;
mod counters;
mod device;
mod events;
mod features;
mod interrupt;
mod lending;
mod local_ioeventfds;
mod lock;
mod placement;
mod queue;
mod status;
#[cfg(test)]
mod tests;

pub use backend::{Loan, QueueBackend};
pub use builder::{AttachError, Builder, PciPlace};
pub use counters::{AccessCounts, Counters, Fault};
pub use device::{AttachedDevice, MoveError};
pub use features::RingFeatures;
pub use interrupt::{InterruptFn, MessageFn};
pub use lending::LendError;
pub use local_ioeventfds::LocalIoEventFds;
pub use placement::{Placement, QueueProcess, RemoteQueue, Spread};
pub use status::{KickPath, QueueStatus};
