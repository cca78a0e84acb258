//! A boot loader's network driver: one frame and its answer by polling.
//!
//! It needs neither interrupts nor `std`.
//!
//! It is a `no_std` library, so that it builds for bare metal as it is: [`card_at`] is what
//! firmware calls. The crate's tests run [`exchange`] against a device in their own process (`cargo
//! test -p paravane-driver --test net`), and the built-in guest runs the same driver on the same
//! registers inside KVM (`paravane run`).
#![no_std]
use core::hint::spin_loop;
use paravane_driver::mmio::{Mmio, Window};
use paravane_driver::net::{Net, NetOptions};
use paravane_driver::{DriverError, Pool, Transport, VolatileSpace};
use paravane_spec::mmio;

/// Looks at the queue before the answer is taken for lost.
const MOST_POLLS: u32 = 1 << 30;

/// The virtio-mmio device in `slot`; devices lie side by side from `base` on.
///
/// # Errors
/// There is no virtio-mmio device.
///
/// # Safety
/// Only device memory lies from `base` to `end`, and it is mapped one to one.
pub unsafe fn card_at(base: u64, end: u64, slot: u64) -> Result<Mmio<Window<VolatileSpace>>, DriverError> {
    // SAFETY: the caller vouches for the range.
    let devices = unsafe { VolatileSpace::new(base as *mut u8, base..end) };
    Mmio::new(Window::new(devices, base + slot * mmio::WINDOW, mmio::WINDOW))
}

/// Sends `frame`, and copies the next frame received to `answer`.
///
/// Returns its length.
///
/// # Errors
/// There is no working card, or no answer.
pub fn exchange(
    card: impl Transport,
    pool: &mut Pool,
    frame: &[u8],
    answer: &mut [u8],
) -> Result<usize, DriverError> {
    let options = NetOptions { receive_slots: 8, transmit_slots: 8, ..NetOptions::default() };
    let mut net = Net::new(card, options, pool)?;
    net.send(0, frame)?;
    net.kick();
    for _ in 0..MOST_POLLS {
        if let Some(len) = net.receive(0, answer)? {
            return Ok(len);
        }
        spin_loop();
    }
    Err(DriverError::NeedsReset)
}
