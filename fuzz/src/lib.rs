//! Fuzz targets as functions: corpora replay as tests (`tests/replay.rs`).
//!
//! ```text
//! bytes -> Unstructured -> set-up, then steps until the bytes are used up
//!                            |
//!     steps of the hostile side (memory, registers)   steps of the side under test, each checked
//! ```
//! Every input is valid. A target panics if the side under test breaks a promise. Reads past the
//! end of the input return zeroes.
//!
//! `cargo run -p paravane-fuzz --example seeds` writes the hand-made seeds of the corpora.
mod arena;
mod blk_request;
mod device_rig;
mod dma;
mod driver_rig;
mod guarded;
mod hostile;
pub mod hostile_peer;
mod mmio;
mod mmio_msi;
mod nbd_reply;
mod net_request;
mod owner;
mod packed_device;
mod packed_driver;
mod pci;
pub mod power_loss;
mod split_device;
mod split_driver;
mod vhost_user;

pub use blk_request::blk_request;
pub use dma::dma;
pub use mmio::mmio;
pub use mmio_msi::mmio_msi;
pub use nbd_reply::nbd_reply;
pub use net_request::net_request;
pub use packed_device::packed_device;
pub use packed_driver::packed_driver;
pub use pci::pci;
pub use split_device::split_device;
pub use split_driver::split_driver;
pub use vhost_user::vhost_user;

/// A function that runs one input.
pub type Target = fn(&[u8]);

/// Every target: name (also of its corpus) and function.
pub const TARGETS: [(&str, Target); 12] = [
    ("split_device", split_device),
    ("split_driver", split_driver),
    ("packed_device", packed_device),
    ("packed_driver", packed_driver),
    ("mmio", mmio),
    ("mmio_msi", mmio_msi),
    ("pci", pci),
    ("blk_request", blk_request),
    ("net_request", net_request),
    ("nbd_reply", nbd_reply),
    ("dma", dma),
    ("vhost_user", vhost_user),
];
