//! `paravane serve` and `paravane status`, end to end: the real program, real sockets, real signals.
mod activation;
mod client;
mod daemon;
#[path = "../../../vhost/tests/serve/driver.rs"]
mod driver;
mod manuals;
mod operation;
mod reload;
mod requests;
mod sandbox;
