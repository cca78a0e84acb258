//! Numbers and plain layouts of the virtio specification and its neighbours.
//!
//! Both sides of every interface read them here. There is no code, only constants and plain
//! structures.
//!
//! | module | source |
//! |---|---|
//! | [`device_id`], [`feature`], [`status`], [`queue`], [`split`], [`packed`], [`mmio`], [`pci`], [`blk`], [`net`], [`console`] | virtio specification 1.4; modules and items name their sections |
//! | [`vhost_user`], [`inflight`] | vhost-user specification (QEMU, `docs/interop/vhost-user.rst`) |
//! | [`mmio_msi`] | Paravane's extension of virtio-mmio (`docs/reference/virtio-mmio-msi.md`) |
//! | [`builtin`] | Paravane's contract with its built-in guest |
//!
//! Section numbers are those of virtio 1.4 unless another document is named. Structures are little
//! endian and convert to bytes with the crate `zerocopy`:
//!
//! ```
//! use paravane_spec::blk::{RequestHeader, T_IN};
//! use zerocopy::IntoBytes;
//!
//! let header = RequestHeader { kind: T_IN, reserved: 0, sector: 8 };
//! assert_eq!(header.as_bytes()[8], 8);
//! ```
#![no_std]

pub mod blk;
pub mod builtin;
pub mod console;
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
    /// Network device (section 5.1).
    pub const NET: u32 = 1;
    /// Block device (section 5.2).
    pub const BLK: u32 = 2;
    /// Console (section 5.3).
    pub const CONSOLE: u32 = 3;
    /// Entropy source (section 5.4).
    pub const RNG: u32 = 4;
}
