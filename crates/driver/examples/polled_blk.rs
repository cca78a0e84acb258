//! A boot loader's disk driver: reads by polling, without interrupts and `std`.
//!
//! It is a `no_std` library, so that it builds for bare metal as it is: [`disk_at`] is what
//! firmware calls. The crate's tests run [`read`] against a device in their own process (`cargo
//! test -p paravane-driver --test disk`), and the built-in guest runs the same driver on the same
//! registers inside KVM (`paravane run`).
#![no_std]
use core::hint::spin_loop;
use core::ptr::NonNull;
use paravane_driver::blk::{Blk, Request};
use paravane_driver::mmio::{Mmio, VolatileRegisters};
use paravane_driver::{Area, DmaArea, DriverError, Pool, Transport};
use paravane_spec::{blk, mmio};

/// Memory shared with the device in bytes: the queue, one request and the data.
pub const MEMORY: usize = 64 << 10;
/// Looks at the queue before the device is taken for dead.
const MOST_POLLS: u32 = 1 << 30;

/// The virtio-mmio device at `registers`, and the memory to share with it.
///
/// # Errors
/// There is no virtio-mmio device.
///
/// # Safety
/// `registers` is the address of a virtio-mmio device, and `memory` that of [`MEMORY`] bytes of RAM
/// that nothing else uses until the device is reset. Both are mapped one to one.
pub unsafe fn disk_at(
    registers: usize,
    memory: NonNull<u8>,
) -> Result<(Mmio<VolatileRegisters>, Pool), DriverError> {
    // SAFETY: the caller vouches for the registers.
    let registers = unsafe { VolatileRegisters::at(registers as *mut u8, mmio::WINDOW) };
    // SAFETY: the caller vouches for the memory.
    let area = unsafe { Area::new(memory, MEMORY) };
    let pool = Pool::new(DmaArea { area, addr: memory.as_ptr() as u64 });
    Ok((Mmio::new(registers)?, pool))
}

/// Reads `out.len()` bytes, a multiple of 512, from `sector` on.
///
/// # Errors
/// There is no working disk, or it fails the request.
pub fn read(disk: impl Transport, pool: &mut Pool, sector: u64, out: &mut [u8]) -> Result<(), DriverError> {
    let buffer = pool.take(out.len(), 512)?;
    let mut disk = Blk::new(disk, 1, pool)?;
    disk.disable_interrupts();
    disk.submit(Request::Read { sector, buffer }, 0)?;
    disk.kick();
    for _ in 0..MOST_POLLS {
        match disk.complete()? {
            None => spin_loop(),
            Some(done) if done.status == blk::S_OK && buffer.area.read(0, out) => return Ok(()),
            Some(_) => return Err(DriverError::Request("the disk failed the request")),
        }
    }
    Err(DriverError::NeedsReset)
}
