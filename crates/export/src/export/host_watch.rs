//! Watches the host's side of a device, which may be gone behind open descriptors.
//!
//! ```text
//!   a queue finds it gone, a refresh, a session begins --> look --gone--> look again every half second
//!                                                           '--there--> no look until one of these
//! ```
//! Whether the guest's link is up is compared whenever the thread wakes.
use crate::status::SharedStatus;
use paravane_device::{Device, HostSide};
use std::io;
use std::time::{Duration, Instant};

/// Interval between looks while the host's side is gone.
const INTERVAL: Duration = Duration::from_millis(500);

/// What [`HostState::look`] found last.
#[derive(Debug, Default)]
pub(super) struct HostState {
    /// Next look at a host's side that is gone.
    due: Option<Instant>,
    /// Whether the guest's link is up; `None`: the guest may believe either.
    link_is_up: Option<bool>,
}

/// Result of [`HostState::look`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Look {
    /// Time until the next one, if there is one.
    pub(super) again: Option<Duration>,
    /// The configuration space may have changed.
    pub(super) changed: bool,
}

impl HostState {
    /// Forgets what the guest was told, for another one.
    pub(super) fn forget_link(&mut self) {
        self.link_is_up = None;
    }

    /// Looks at the host's side of the device, if that is due, and at the guest's link.
    ///
    /// `is_asked`: it is due whatever the time is.
    pub(super) fn look(
        &mut self,
        is_asked: bool,
        shared_status: &SharedStatus,
        name: &str,
        device: &mut dyn Device,
    ) -> Look {
        let now = Instant::now();
        let is_due = is_asked || self.due.is_some_and(|due| due <= now);
        if is_due {
            let side = device.look();
            self.due = matches!(side, HostSide::Gone(_)).then(|| now + INTERVAL);
            note(shared_status, name, side);
        }
        let again = self.due.map(|due| due.saturating_duration_since(now));
        let Some(is_up) = device.link_is_up() else { return Look { again, changed: false } };
        let before = self.link_is_up.replace(is_up);
        if before == Some(!is_up) {
            tracing::info!(device = name, "the guest's link is {}", if is_up { "up" } else { "down" });
        }
        shared_status.write().link_is_up = Some(is_up);
        Look { again, changed: before != Some(is_up) }
    }
}

/// Notes the state of the host's side, and logs what has changed.
fn note(shared_status: &SharedStatus, name: &str, side: HostSide) {
    let mut status = shared_status.write();
    let before = status.host_error.take();
    match side {
        HostSide::Present => {}
        HostSide::Returned(what) => tracing::info!(device = name, "{what}"),
        HostSide::Gone(why) => {
            if before.as_ref() != Some(&why) {
                tracing::warn!(device = name, "{why}");
            }
            status.host_error = Some(why);
        }
    }
}

/// Logs the result of a refresh.
pub(super) fn log_refresh(device: &str, changed: io::Result<bool>) {
    match changed {
        Ok(true) => tracing::info!(device, "device configuration has changed"),
        Ok(false) => {}
        Err(error) => tracing::error!(device, %error, "cannot read the device's configuration"),
    }
}
