//! Puts a virtio device behind a transport: the part between exits and [`Device`].
//!
//! ```text
//!                       read, write, offset          AttachedDevice                       threads
//! vCPU's exit --------------------------> Transport (pure) -> Effect, carried out before the access returns:
//!                                            Activate, StartQueue   rings mapped, handler made, put on an I/O thread
//! guest's kick --ioeventfd or exit-----> Notify: the queue's eventfd ------------------>  served
//!                                            ResetQueue, Reset      queue taken off its thread and stopped [1]
//! guest's interrupt <--irqfd, MSI, closure-- Interrupts <-------------------------------  used buffers
//!                                            Move                   ioeventfds follow the window
//! ```
//! \[1\] perhaps after the access, see [Resets](crate#resets).
//!
//! [`AttachedDevice::builder`] takes the device and guest memory; what else there is has a default.
//! The last call of the [`Builder`] names the transport, its place and its interrupt:
//! [`Builder::mmio`], [`Builder::mmio_msi`], [`Builder::pci`]. From then on the VMM passes register
//! accesses on, and nothing else. `examples/kvm_mmio.rs` is a whole VMM.
//!
//! With the feature `driver`, `&AttachedDevice` implements the `Registers` of `paravane-driver`: a
//! driver in the same process can use a device behind virtio-mmio.
//!
//! ```
//! use paravane_attach::{AttachedDevice, InterruptFn};
//! use paravane_device::rng::Rng;
//! use paravane_dma::{Backing, Memory, Region, RegionConfig};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let ram = RegionConfig { gpa: 0, size: 1 << 20, backing: Backing::Pages, writable: true };
//! let memory = Memory::new(vec![Region::new(ram)?])?;
//! let device = AttachedDevice::builder(Box::new(Rng::new()), &memory)
//!     .mmio(0xd000_0000, InterruptFn::new(|| { /* raise the line */ }))?;
//!
//! // What a vCPU's exit brings: a read of the magic value.
//! let offset = device.offset(0xd000_0000).ok_or("not this device's")?;
//! let mut magic = [0; 4];
//! device.read(offset, &mut magic);
//! assert_eq!(&magic, b"virt");
//! # Ok(())
//! # }
//! ```
//!
//! # Saved devices
//! [`AttachedDevice::save`] stops a device and returns its registers and the positions of its queues,
//! and [`Builder::restore`] starts a device from them, also in another process that maps the same guest
//! memory. The driver notices nothing. Requests in flight are completed first, or left to the next
//! process ([`Builder::track`]).
//!
//! ```
//! # use paravane_attach::{AttachedDevice, InterruptFn, SavedDevice};
//! # use paravane_device::rng::Rng;
//! # use paravane_dma::{Backing, Memory, Region, RegionConfig};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let ram = RegionConfig { gpa: 0, size: 1 << 20, backing: Backing::Pages, writable: true };
//! # let memory = Memory::new(vec![Region::new(ram)?])?;
//! # let attach = AttachedDevice::builder(Box::new(Rng::new()), &memory);
//! # let device = attach.mmio(0xd000_0000, InterruptFn::new(|| ()))?;
//! let (saved, _device) = device.save().ok_or("it was stopped before")?;
//! let bytes = saved.to_bytes();
//!
//! // In the next process:
//! let device = AttachedDevice::builder(Box::new(Rng::new()), &memory)
//!     .restore(SavedDevice::from_bytes(&bytes)?)
//!     .mmio(0xd000_0000, InterruptFn::new(|| { /* raise the line */ }))?;
//! # Ok(())
//! # }
//! ```
//!
//! # Features
//! ```text
//!   bits  0-23, 50-63   Device::features          what this kind of device can do
//!   bits 24-49          RingFeatures              queue layout and notification suppression
//!                       always                    VERSION_1, RING_RESET
//!                       behind a domain           ACCESS_PLATFORM
//!                       Builder::suspendable      SUSPEND
//!                       virtio-mmio with MSI      the extension's bits
//! ```
//! Bits 24 to 49 of a device are ignored: section 6 of the specification reserves them for queues
//! and negotiation, which no device decides. [`AttachedDevice::features`] is the result.
//!
//! # States of a queue
//! [`paravane_io::QueueSet`] draws them. A queue is started, and served by a thread of the device's
//! [`IoPool`](paravane_io::IoPool), unless there is a back end ([`Builder::lend_to`]) or the driver has
//! suspended the device.
//!
//! A queue that its driver breaks, or whose start fails, sets DEVICE_NEEDS_RESET and is recorded as
//! a [`Fault`].
//!
//! # Resets
//! A reset waits for requests in flight. With version 3 of virtio-mmio
//! ([`Builder::mmio_version_3`]) the write that asks for it returns at once, and a thread waits:
//! no vCPU does. [`AttachedDevice::stop`], [`AttachedDevice::save`] and [`AttachedDevice::reset`] wait
//! for the end of such a reset; until then no queue is live.
//!
//! # Locks
//! `control` (device, queues), then `transport` (registers). An I/O thread takes only `transport`,
//! to mark a failed queue, and nobody waits for an I/O thread while holding `transport`. An access
//! that is no configuration access and no write takes only `transport`.
//!
//! [`Device`]: paravane_device::Device
mod builder;
mod control;
mod counters;
mod device;
mod error;
mod events;
mod features;
mod interrupt;
mod lending;
mod local_ioeventfds;
mod queue;
#[cfg(feature = "driver")]
mod registers;
mod reset;
mod saved;
mod start;
mod status;
mod suspend;
#[cfg(test)]
mod tests;

pub use builder::{Builder, PciPlace};
pub use counters::{AccessCounts, Counters, Fault};
pub use device::AttachedDevice;
pub use error::AttachError;
pub use features::RingFeatures;
pub use interrupt::{InterruptFn, MessageFn};
pub use local_ioeventfds::LocalIoEventFds;
pub use saved::SavedDevice;
pub use status::{KickPath, QueueStatus};
