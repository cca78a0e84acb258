//! Virtio drivers for guests and firmware.
//!
//! ```text
//! Registers (the caller's MMIO access) -> mmio::Mmio --negotiate--> features
//!                                            | start_queue (memory from a Pool)
//!                                            v
//!                              blk::Blk, rng::Rng --driver_ok--> in use
//! ```
//! The device is hostile: nothing it says is trusted without a check. What a device may do at worst is to
//! give wrong data; it can neither make a driver panic nor keep it in a loop.
#![no_std]
#![forbid(unsafe_code)]
extern crate alloc;

pub mod blk;
mod channel;
mod error;
pub mod mmio;
mod pool;
pub mod rng;

pub use error::DriverError;
pub use paravane_ring::{Area, DmaArea};
pub use pool::Pool;
