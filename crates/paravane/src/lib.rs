//! Virtio devices and drivers for VMM, guest and firmware authors.
//!
//! This crate re-exports the libraries of Paravane, so that they need one dependency and one
//! version. Each module is a crate and a feature.
//!
//! | feature | module | what it does |
//! |---|---|---|
//! | (always) | `spec` | constants and memory layouts of the virtio specification, `no_std` |
//! | `ring` | `ring` | split and packed virtqueues, device side and driver side, `no_std` |
//! | `driver` | `driver` | block, network, entropy and console drivers for guests and firmware, `no_std` |
//! | `dma` | `dma` | guest memory: ordered access, IOMMU domains, dirty log |
//! | `device` | `device` | block, network, entropy and console devices; traits for devices of your own |
//! | `notify` | `notify` | kicks and interrupts: eventfds, MSI tables |
//! | `transport` | `transport` | virtio-mmio and virtio-pci as register machines |
//! | `io` | `io` | I/O threads that serve queues |
//! | `attach` | `attach` | a device behind virtio-mmio or PCI, in your own VMM |
//! | `export` | `export` | a device behind a socket, for a protocol of your own |
//! | `vhost` (default) | `vhost` | vhost-user exports: a device for another VMM |
//! | `kvm` | `notify` | ioeventfd, irqfd and MSI on a VM of the crate kvm-ioctls |
//! | `vm-memory` | `dma` | guest memory in the traits of the crate vm-memory |
//! | `full` | | all of these |
//!
//! A guest or firmware switches the default off: `default-features = false, features = ["driver"]`.
//!
//! # A disk over vhost-user
//! Serves `disk.img` to QEMU and other VMMs that connect to `disk.sock`:
//!
#![cfg_attr(feature = "vhost", doc = "```no_run")]
#![cfg_attr(not(feature = "vhost"), doc = "```ignore")]
//! use paravane::device::blk::{Blk, BlkConfig};
//! use paravane::export::{Endpoint, Export};
//! use paravane::vhost::ExportConfig;
//!
//! fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     let disk = Blk::open(BlkConfig::new("disk.img"))?;
//!     let endpoint = Endpoint::Listen("disk.sock".into());
//!     Export::start(ExportConfig::new("disk", endpoint), Box::new(disk))?.join()?;
//!     Ok(())
//! }
//! ```
//! The crate's examples: `vhost_user_disk` (this one), `custom_device` (a device of your own), `vm_memory` (a client's
//! memory through the crate vm-memory).
#![no_std]
#![forbid(unsafe_code)]

#[cfg(feature = "attach")]
pub use paravane_attach as attach;
#[cfg(feature = "device")]
pub use paravane_device as device;
#[cfg(feature = "dma")]
pub use paravane_dma as dma;
#[cfg(feature = "driver")]
pub use paravane_driver as driver;
#[cfg(feature = "export")]
pub use paravane_export as export;
#[cfg(feature = "io")]
pub use paravane_io as io;
#[cfg(feature = "notify")]
pub use paravane_notify as notify;
#[cfg(feature = "ring")]
pub use paravane_ring as ring;
pub use paravane_spec as spec;
#[cfg(feature = "transport")]
pub use paravane_transport as transport;
#[cfg(feature = "vhost")]
pub use paravane_vhost as vhost;
