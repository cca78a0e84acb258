//! Shared memory of a hostile device, against the driver side.
//!
//! And what the driver puts there.
#![cfg(not(loom))]
#[path = "../memory/mod.rs"]
mod memory;
mod packed;
mod rig;
mod split;
