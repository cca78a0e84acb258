//! An export as its clients see it: over a real socket, with real I/O threads.
//!
//! All but `frontend`, `handover`, `in_order`, `kept`, `latencies`, `lost_network`, `negotiation`, `panics` and
//! `sockets` are also run against the program in its sandbox (crates/cli/tests/serve).
mod driver;
mod entropy;
mod frontend;
mod guest_physical;
mod handover;
mod held;
mod in_order;
mod iotlb;
mod kept;
mod killed;
mod latencies;
mod lost_network;
mod malformed;
mod migration;
mod negotiation;
mod panics;
mod raw;
mod rig;
mod rings;
mod sessions;
mod signals;
mod sockets;
