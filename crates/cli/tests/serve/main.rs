//! `paravane serve` and `paravane status`, end to end: the real program, real sockets, real signals.
//!
//! Hostile clients are those of the crate vhost; `rig` gives them a disk of the program in its sandbox.
mod activation;
mod client;
mod daemon;
#[path = "../../../vhost/tests/serve/driver.rs"]
mod driver;
#[path = "../../../vhost/tests/serve/held.rs"]
mod held;
mod log;
#[path = "../../../vhost/tests/serve/malformed.rs"]
mod malformed;
mod manuals;
mod operation;
#[expect(dead_code, reason = "some of it is for tests that are not here")]
#[path = "../../../vhost/tests/serve/raw.rs"]
mod raw;
mod reload;
mod requests;
mod resources;
mod rig;
#[path = "../../../vhost/tests/serve/rings.rs"]
mod rings;
mod sandbox;
mod stop;
mod watching;
