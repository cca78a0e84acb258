//! Virtio drivers for guests and firmware: disk, network card, entropy source, console.
//!
//! The drivers run on virtio-mmio, with or without message-signalled interrupts, and on virtio-pci.
//! They own no policy: the caller supplies register access, memory and the decision when to poll or
//! to sleep.
//!
//! ```text
//! mmio::Mmio, pci::Pci (over the caller's register access) : Transport -> Virtio --negotiate--> features
//!                                                                   | start_queue (memory from a Pool)
//!                                                                   v
//!                                  blk::Blk, net::Net, rng::Rng, console::Console --driver_ok--> in use
//! ```
//! Each of these has one owner. [`blk::BlkDevice`] and [`net::NetDevice`] set a device up whose queues have
//! owners: [`blk::RequestQueue`] and [`net::QueuePair`], each used on its processor without a lock.
//!
//! The device is hostile: the drivers check everything it says. At worst it supplies wrong data; it
//! can neither make a driver panic nor keep it in a loop. The first error of a driver latches:
//! every later call returns it.
//!
//! The crate is `no_std` and needs `alloc`. It has no cargo features.
//!
//! # Example
//! Reads the first sector of a disk by polling. `examples/polled_blk.rs` and
//! `examples/polled_net.rs` do the same with a bound on polling and with error handling.
//!
//! ```no_run
//! use paravane_driver::blk::{Blk, Request};
//! use paravane_driver::mmio::{Mmio, VolatileRegisters};
//! use paravane_driver::{Area, DmaArea, DriverError, Pool};
//! use core::ptr::NonNull;
//!
//! /// Safety: `registers` is a virtio-mmio device and `ram` 64 KiB of unused RAM, both mapped one to one.
//! unsafe fn first_sector(registers: *mut u8, ram: NonNull<u8>) -> Result<[u8; 512], DriverError> {
//!     // SAFETY: the caller vouches for the registers.
//!     let registers = unsafe { VolatileRegisters::at(registers, 0x200) };
//!     // SAFETY: the caller vouches for the memory.
//!     let area = unsafe { Area::new(ram, 64 << 10) };
//!     let mut pool = Pool::new(DmaArea { area, addr: ram.as_ptr() as u64 });
//!     let buffer = pool.take(512, 512)?;
//!     let mut disk = Blk::new(Mmio::new(registers)?, 1, &mut pool)?;
//!     disk.submit(Request::Read { sector: 0, buffer }, 0)?;
//!     disk.kick();
//!     while disk.complete()?.is_none() {
//!         core::hint::spin_loop();
//!     }
//!     let mut sector = [0; 512];
//!     assert!(buffer.area.read(0, &mut sector));
//!     Ok(sector)
//! }
//! ```
//!
//! # Files
//!
//! * `Transport` (what a driver needs of registers), implemented by `mmio` and `pci` (from ECAM
//!   on); `space`, volatile access to registers; `Virtio` (negotiation, queues) over any; `blk`,
//!   `net`, `rng`, `console`, which share `channel` (a device with a fixed number of queues and one
//!   owner), `shared` (a device whose queues have owners), `latch` and `slots`; `Pool` (memory shared
//!   with devices).
#![no_std]
// Only `space`, and the constructor of its registers, reach device memory through raw pointers.
#![deny(unsafe_code)]
extern crate alloc;

pub mod blk;
mod channel;
pub mod console;
mod error;
mod latch;
pub mod mmio;
pub mod net;
pub mod pci;
mod pool;
pub mod rng;
mod shared;
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
