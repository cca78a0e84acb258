//! Shared memory of a hostile driver, against the device side.
//!
//! Each input has a name, gets its typed error and latches the queue. Nothing panics or loops.
#![cfg(not(loom))]
#[path = "../memory/mod.rs"]
mod memory;
mod packed;
mod rig;
mod split;
