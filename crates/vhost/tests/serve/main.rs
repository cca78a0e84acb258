//! An export as its clients see it: over a real socket, with real I/O threads.
mod driver;
mod entropy;
mod frontend;
mod held;
mod iotlb;
mod killed;
mod malformed;
mod migration;
mod panics;
mod raw;
mod rig;
mod rings;
mod sessions;
mod signals;
