//! The numbers and plain layouts that both sides of every interface read: the virtio specification's
//! (version 1.4 unless said otherwise), our virtio-mmio extension's, and the built-in guest's contract.
//!
//! There is no code here. What is not in the specification says so.
#![no_std]

pub mod blk;
pub mod builtin;
pub mod feature;
pub mod inflight;
pub mod mmio;
pub mod mmio_msi;
pub mod net;
pub mod packed;
pub mod pci;
pub mod queue;
pub mod split;
pub mod status;
pub mod vhost_user;

/// Virtio device identifiers (section 5).
pub mod device_id {
    /// No device: a driver must ignore the slot (section 4.2.2).
    pub const NONE: u32 = 0;
    /// Network card (section 5.1).
    pub const NET: u32 = 1;
    /// Block device (section 5.2).
    pub const BLK: u32 = 2;
    /// Entropy source (section 5.4).
    pub const RNG: u32 = 4;
}
