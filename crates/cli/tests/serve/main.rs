//! `paravane serve` and `paravane status`, end to end.
//!
//! The real program in its sandbox, real sockets, real signals.
//!
//! Clients are those of the crate vhost's tests; `rig` gives them devices of the program. Those of
//! the crate vhost's front end, of devices with a mistake in them and of disks that offer IN_ORDER
//! stay there: the program has no such devices.
mod activation;
#[path = "../../../store/tests/nbd/certificates.rs"]
mod certificates;
mod client;
mod console;
mod conventions;
mod daemon;
mod descriptors;
mod disks;
mod doctor;
#[path = "../../../vhost/tests/serve/driver.rs"]
mod driver;
#[path = "../../../vhost/tests/serve/entropy.rs"]
mod entropy;
mod false_daemon;
mod full;
#[path = "../../../vhost/tests/serve/guest_physical.rs"]
mod guest_physical;
#[path = "../../../vhost/tests/serve/held.rs"]
mod held;
mod hold;
mod holes;
mod images;
#[path = "../../../vhost/tests/serve/iotlb.rs"]
mod iotlb;
mod kill;
mod kill_reload;
mod kill_steps;
mod kill_tap;
#[path = "../../../vhost/tests/serve/killed.rs"]
mod killed;
mod late;
mod late_child;
mod late_parties;
mod latencies;
mod load;
mod log;
#[path = "../../../vhost/tests/serve/malformed.rs"]
mod malformed;
mod manager;
mod manuals;
#[path = "../../../vhost/tests/serve/migration.rs"]
mod migration;
mod one_bad;
mod operation;
mod other_programs;
mod probes;
mod prometheus;
#[path = "../../../vhost/tests/serve/raw.rs"]
mod raw;
mod reload;
mod reload_in_use;
mod report;
mod requests;
mod resources;
mod rig;
#[path = "../../../vhost/tests/serve/rings.rs"]
mod rings;
mod rounds;
mod sandbox;
#[path = "../schema/mod.rs"]
mod schema;
mod service;
#[path = "../../../vhost/tests/serve/sessions.rs"]
mod sessions;
mod shares;
#[path = "../../../vhost/tests/serve/signals.rs"]
mod signals;
mod slow_disk;
mod snapshot;
mod stalled;
mod stop;
// The daemon's side of `paravane hold`.
#[allow(dead_code)]
#[path = "../../src/fds.rs"]
mod fds;
#[allow(dead_code, unused_imports)]
#[path = "../../src/serve/store/mod.rs"]
mod store;
mod stores;
mod take_over;
mod taken_over;
mod tap_changes;
mod told;
mod top;
mod trace;
mod watching;
