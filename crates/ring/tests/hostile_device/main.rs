//! What a hostile device may put in shared memory, against the driver side; and what the driver
//! puts there.
#![cfg(not(loom))]
#[path = "../memory/mod.rs"]
mod memory;
mod packed;
mod rig;
mod split;
