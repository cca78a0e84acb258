//! Images of a real Ceph cluster, which `scripts/ceph-one start FOLDER` makes.
//!
//! `PARAVANE_CEPH_CONF` names its ceph.conf; without it all of this is skipped, and listed.
#![cfg(feature = "rbd")]
mod cluster;
mod disk;
mod images;
mod io;
mod killed;
mod lock;
mod open;
mod outage;
