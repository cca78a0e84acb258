//! What a hostile driver may put in shared memory, against the device side: each input is named,
//! gets its typed error, latches the queue, and nothing panics or loops.
#![cfg(not(loom))]
#[path = "../memory/mod.rs"]
mod memory;
mod packed;
mod rig;
mod split;
