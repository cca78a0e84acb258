//! Virtio drivers for guests and firmware.
//!
//! ```text
//! mmio::Mmio, pci::Pci (the caller's register access) : Transport -> Virtio --negotiate--> features
//!                                                             | start_queue (memory from a Pool)
//!                                                             v
//!                                              blk::Blk, net::Net, rng::Rng --driver_ok--> in use
//! ```
//! The device is hostile: nothing it says is trusted without a check. What a device may do at worst is to
//! give wrong data; it can neither make a driver panic nor keep it in a loop.
#![no_std]
// Only `space`, and the constructor of its registers, reach device memory through raw pointers.
#![deny(unsafe_code)]
extern crate alloc;

pub mod blk;
mod channel;
mod error;
mod latch;
pub mod mmio;
pub mod net;
pub mod pci;
mod pool;
pub mod rng;
mod slots;
mod space;
mod transport;
mod virtio;

pub use error::DriverError;
pub use paravane_ring::{Area, DmaArea};
pub use pool::Pool;
pub use space::{Space, VolatileSpace};
pub use transport::{Message, Transport};
pub use virtio::{NotReset, Virtio};
