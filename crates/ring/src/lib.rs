//! Virtqueues (virtio 1.x, section 2.6): both sides, split and packed.
//!
//! A device takes descriptor chains from a [`device::Queue`] and completes them; a driver adds
//! buffers to a [`driver::Queue`] and takes them back. One type serves both layouts. The crate
//! knows neither registers nor address translation: the caller hands it host memory ([`Area`]), and
//! gets descriptors with the device's addresses.
//!
//! ```text
//!             QueueAddresses (unchecked, from a transport)
//!                   |  QueueConfig::new        sizes, alignment, features
//!                   v
//!             QueueConfig --activate(areas)--> device::Queue
//!
//!   device::Queue: pop* -> (serve) -> complete* -> publish -> interrupt?
//!                  disable_kicks ... arm_kicks -> sleep, or more work is there
//!   driver::Queue: add* -> publish -> kick?      pop_used*
//!                  disable_interrupts ... enable_interrupts -> sleep, or more is there
//!                  poller (before it is in use) -> asks from any thread
//! ```
//!
//! Each side treats the other as hostile: it reads shared memory once into a local and checks it
//! there. The first error latches the queue.
//!
//! The crate is `no_std` and needs `alloc`. It has no cargo features. INDIRECT_DESC, EVENT_IDX,
//! RING_PACKED, IN_ORDER and, with [`Platform`] barriers, ORDER_PLATFORM are implemented;
//! [`device::QueueConfig::FEATURES`] has the bits that a device may offer. It runs on every
//! architecture with 64-bit atomics.
//!
//! # A driver and a device
//! Both run in one process, on memory that the device addresses from 4 GiB on.
//!
//! ```
//! use paravane_ring::device::{Batch, QueueConfig};
//! use paravane_ring::driver::{DriverConfig, Queue};
//! use paravane_ring::{Area, DmaArea, Segment};
//! use std::ptr::NonNull;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! const BASE: u64 = 0x1_0000_0000;
//! let layout = DriverConfig::new(8, 0, 0)?;
//! let mut memory = vec![0u128; layout.memory().div_ceil(16) + 2];
//! let start = NonNull::new(memory.as_mut_ptr().cast()).unwrap();
//! // SAFETY: `memory` outlives the queues, and nothing else touches it meanwhile.
//! let shared = DmaArea { area: unsafe { Area::new(start, memory.len() * 16) }, addr: BASE };
//! let data = shared.slice(layout.memory(), 32).unwrap();
//!
//! // The driver lays out the queue, and adds a buffer: 5 bytes to read, 16 to write.
//! let (mut driver, addresses) = Queue::new(layout, shared)?;
//! assert!(data.area.write(0, b"hello"));
//! let request = Segment { addr: data.addr, len: 5 };
//! let answer = Segment { addr: data.addr + 16, len: 16 };
//! let id = driver.add(&[request], &[answer])?;
//! assert!(driver.publish(), "a device that has just started wants a kick");
//!
//! // The device checks what the transport has told it, and takes the queue into use.
//! let at = |addr: u64, len| shared.area.slice((addr - BASE) as usize, len);
//! let config = QueueConfig::new(addresses, 256, 0)?;
//! let [desc, avail, used] = config.areas().map(|area| at(area.addr, area.len).unwrap());
//! // SAFETY: these are the areas that were asked for, and `memory` outlives the queue.
//! let mut device = unsafe { config.activate(desc, avail, used) }?;
//!
//! // It serves what is available, publishes once, and looks again before it sleeps.
//! let mut batch = Batch::new(32);
//! loop {
//!     device.disable_kicks();
//!     while device.pop(&mut batch, |addr, out| at(addr, out.len()).is_some_and(|a| a.read(0, out)))? > 0 {
//!         for chain in batch.chains() {
//!             let mut written = 0;
//!             for (from, to) in batch.readable(chain).iter().zip(batch.writable(chain)) {
//!                 let mut bytes = vec![0; from.len as usize];
//!                 let from = at(from.addr, bytes.len()).ok_or("no such memory")?;
//!                 let to = at(to.addr, bytes.len()).ok_or("no such memory")?;
//!                 assert!(from.read(0, &mut bytes) && to.write(0, &bytes.to_ascii_uppercase()));
//!                 written += bytes.len() as u32;
//!             }
//!             device.complete(chain.head, written)?;
//!         }
//!         if device.publish()? {
//!             // Here goes the interrupt.
//!         }
//!     }
//!     if !device.arm_kicks()? {
//!         break; // Here it would sleep until the next kick.
//!     }
//! }
//!
//! // The driver takes its buffer back.
//! let used = driver.pop_used()?.ok_or("nothing was used")?;
//! assert_eq!((used.id, used.len), (id, 5));
//! let mut bytes = [0; 5];
//! assert!(data.area.read(16, &mut bytes));
//! assert_eq!(&bytes, b"HELLO");
//! # Ok(())
//! # }
//! ```
//!
//! # A driver that sleeps
//! A driver enables interrupts and looks once more before it sleeps: a buffer that the device used
//! before it saw them enabled raises none. A driver that polls keeps the token and polls again.
//!
//! ```
//! use paravane_ring::QueueError;
//! use paravane_ring::driver::{Queue, Used};
//!
//! /// The next used buffer; `sleep` returns after an interrupt.
//! fn wait(queue: &mut Queue, mut sleep: impl FnMut()) -> Result<Used, QueueError> {
//!     loop {
//!         if let Some(used) = queue.pop_used()? {
//!             queue.disable_interrupts();
//!             return Ok(used);
//!         }
//!         let token = queue.enable_interrupts();
//!         if !queue.poll(token) {
//!             sleep();
//!         }
//!     }
//! }
//! # use paravane_ring::{Area, DmaArea, Segment, device, driver::DriverConfig};
//! # let layout = DriverConfig::new(8, 0, 0).unwrap();
//! # let mut memory = vec![0u128; layout.memory().div_ceil(16)];
//! # let start = std::ptr::NonNull::new(memory.as_mut_ptr().cast()).unwrap();
//! # // SAFETY: `memory` outlives the queues, and nothing else touches it meanwhile.
//! # let area = unsafe { Area::new(start, memory.len() * 16) };
//! # let (mut driver, addresses) = Queue::new(layout, DmaArea { area, addr: 0 }).unwrap();
//! # let config = device::QueueConfig::new(addresses, 8, 0).unwrap();
//! # let [desc, avail, used] = config.areas().map(|a| area.slice(a.addr as usize, a.len).unwrap());
//! # // SAFETY: these are the areas that were asked for, and `memory` outlives the queue.
//! # let mut device = unsafe { config.activate(desc, avail, used) }.unwrap();
//! let id = driver.add(&[], &[Segment { addr: 0x10_0000, len: 512 }])?;
//! driver.publish();
//! let mut interrupts = 0;
//! let used = wait(&mut driver, || {
//!     // While the driver sleeps, the device serves the buffer.
//!     let mut batch = device::Batch::new(8);
//!     device.pop(&mut batch, |_, _| false).unwrap();
//!     device.complete(batch.chains()[0].head, 512).unwrap();
//!     interrupts += u32::from(device.publish().unwrap());
//! })?;
//! assert_eq!((used.id, used.len, interrupts), (id, 512, 1));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Files
//!
//! * `QueueConfig -> activate -> device::Queue`, and `driver::Queue`; each is one type over two
//!   layouts.
//! * `device` is the device side: `config` checks and freezes, `queue` is live, `layout` is the
//!   ring of either layout, `resume` and `tracked` take up a position.
//! * `split` and `packed` hold a layout each, a file a side, and in `device/pop` how chains are
//!   taken, by kind; `packed/position` is a place in a packed ring with its lap; `device_ring` what
//!   the device sides of both share, `walk` the walk over the descriptors of a chain with which
//!   nothing is wrong, `chain` the walk that names what is; `table_memory` where indirect tables
//!   are read, in place or copied; `event` has the event-index rules with their derivation;
//!   `in_order` what IN_ORDER adds on the device side; `order` barrier strength as a type;
//!   `driver/poll` poll tokens; `driver/state` what the drivers of both layouts share;
//!   `translation` keeps chains in the ring until the device can reach them; `state` is a position
//!   that moves to another host; `tracking` survives a crash; `area` is the only access to shared
//!   memory (a model under loom).
#![no_std]
extern crate alloc;

mod area;
mod batch;
mod chain;
pub mod device;
mod device_ring;
pub mod driver;
mod error;
pub mod event;
mod in_flight;
mod in_order;
#[cfg(all(test, not(loom)))]
mod model_test;
mod order;
mod packed;
mod split;
mod state;
mod table_memory;
mod tracking;
mod translation;
mod walk;

pub use area::{Area, DmaArea};
pub use error::{ConfigError, QueueError};
pub use order::{Order, Platform, Smp};
pub use paravane_spec::queue::{QueueAddresses, Segment};
