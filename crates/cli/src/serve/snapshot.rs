//! Snapshots of disks that are served: the daemon's side.
//!
//! ```text
//!   client (`paravane disk snapshot`)                    daemon
//!   {"snapshot": {"device": "vm0"}}              ----->  same user or root? a disk with snapshots?
//!                                                        no other snapshot of it on its way?
//!                                                <-----  Base: its image; or Failed
//!   creates and locks the overlay
//!   Overlay, with its descriptors, and Base's id ----->  still that device and image? prepares, holds the queues,
//!                                                        goes on with the overlay
//!                                                <-----  Taken; or Failed, and nothing has changed
//! ```
//! The daemon may not create files in its sandbox, and so the client does. A client that goes after
//! Overlay changes nothing: the daemon's log says what was done.
pub(crate) mod messages;
mod start;

use super::exports::{Exports, SnapshotBase, SnapshotTurn};
use super::places::{EACH, Full, MOST, Places};
use super::wire::{Parcel, Wire};
use messages::{Base, Message, NextStart, Taken};
use paravane_device::LogDevice;
use paravane_device::blk::Overlay;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Longest wait for all that a client sends.
const PATIENCE: Duration = Duration::from_secs(30);
/// Longest time for which queues may be held.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// Takes snapshots for clients.
pub(crate) struct SnapshotServer {
    exports: Exports,
    places: Arc<Places>,
}

impl SnapshotServer {
    pub(crate) fn new(exports: Exports) -> Arc<Self> {
        Arc::new(Self { exports, places: Arc::default() })
    }

    /// Answers a client, in a thread.
    pub(crate) fn answer(self: &Arc<Self>, stream: UnixStream, device: String) -> io::Result<()> {
        let full = |full| match full {
            Full::All => format!("{MOST} snapshots are being taken: try again"),
            Full::Share => format!("this process is taking {EACH} snapshots: try again"),
        };
        let server = self.clone();
        let serve = move |wire: &Wire<Message>| Some(server.serve(wire, &device));
        let names = ["snapshot", "take snapshots of"];
        self.places.answer(stream, PATIENCE, names, (full, Message::Failed), serve)
    }

    fn serve(&self, wire: &Wire<Message>, device: &str) -> Message {
        let _named = LogDevice::enter(Some(device.into()));
        match self.take(wire, device) {
            Ok(taken) => Message::Taken(taken),
            Err(why) => {
                tracing::warn!(device, "no snapshot: {why}");
                Message::Failed(why)
            }
        }
    }

    fn take(&self, wire: &Wire<Message>, device: &str) -> Result<Taken, String> {
        let lost = |error: io::Error| format!("the client has failed: {error}");
        let turn = self.exports.begin_snapshot(device)?;
        wire.say(&Message::Base(base(&turn)?)).map_err(lost)?;
        let (request, fds) = match wire.receive().map_err(lost)? {
            Some(Parcel { message: Message::Overlay(request), fds, .. }) => (request, fds),
            Some(_) => return Err("a message is out of order".to_owned()),
            None => return Err("the client has closed the connection".to_owned()),
        };
        let path = Path::new(&request.path);
        if !path.is_absolute() {
            return Err(format!("{}: the path of the overlay is not absolute", path.display()));
        }
        let limit = Duration::from_micros(request.pause_limit_us).min(LONGEST_PAUSE);
        let made_for =
            request.base.ok_or("the client does not say which image its overlay is for: update it")?;
        let overlay = Overlay::received(fds, path).map_err(|error| error.to_string())?;
        let taken = turn.take(overlay, made_for.into(), path, limit)?;
        let pause_us = taken.pause.as_secs_f64() * 1e6;
        tracing::info!(
            device,
            overlay = %path.display(),
            base = %taken.base.display(),
            queues = taken.queues,
            "snapshot taken: the base is frozen, writes go to the overlay; pause of {:.3} ms",
            pause_us / 1e3
        );
        if let Some(error) = &taken.unsynced {
            tracing::warn!(device, "the base is not synced until the next flush: {error}");
        }
        Ok(Taken {
            pause_us,
            queues: taken.queues,
            marked: taken.is_marked,
            engine: taken.engine,
            unsynced: taken.unsynced,
        })
    }
}

/// What the client has to know of the image.
fn base(turn: &SnapshotTurn) -> Result<Base, String> {
    let SnapshotBase { base, start, serial } = turn.base()?;
    let start = NextStart { image: messages::Layer { format: base.format, ..start.image }, ..start };
    let (size, id) = (base.size, Some(base.id.into()));
    Ok(Base { pid: std::process::id(), size, serial: Some(serial), id, start })
}
