//! Watches the host's side of a device, which may be gone behind open descriptors.
//!
//! ```text
//!   a queue finds it gone, a refresh, a session begins --> look --gone--> look again every half second
//!                                                           '--there--> no look until one of these
//! ```
//! Whether the guest's link is up is compared whenever the thread wakes.
use super::Shared;
use super::orders::Order;
use paravane_device::{Device, HostSide};
use std::sync::PoisonError;
use std::time::{Duration, Instant};

/// Interval between looks while the host's side is gone.
const INTERVAL: Duration = Duration::from_millis(500);

/// What [`Shared::look`] found last.
#[derive(Debug, Default)]
pub(super) struct HostState {
    /// Next look at a host's side that is gone.
    due: Option<Instant>,
    /// Whether the guest's link is up; `None`: the guest may believe either.
    link_is_up: Option<bool>,
}

/// Result of [`Shared::look`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Look {
    /// Time until the next one, if there is one.
    pub(super) again: Option<Duration>,
    /// The configuration space may have changed.
    pub(super) changed: bool,
}

impl Shared {
    /// Forgets what the guest was told, for another one.
    pub(super) fn forget_link(&self) {
        self.host.lock().unwrap_or_else(PoisonError::into_inner).link_is_up = None;
    }

    /// Looks at the host's side of the device, if that is due, and at the guest's link.
    pub(super) fn look(&self, name: &str, device: &mut dyn Device) -> Look {
        let mut host = self.host.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let is_due = self.orders.take(Order::Look) || host.due.is_some_and(|due| due <= now);
        let Some(net) = device.net() else { return Look::default() };
        if is_due {
            let side = net.look();
            host.due = matches!(side, HostSide::Gone(_)).then(|| now + INTERVAL);
            self.note(name, side);
        }
        let is_up = net.link_is_up();
        let before = host.link_is_up.replace(is_up);
        if before == Some(!is_up) {
            tracing::info!(device = name, "the guest's link is {}", if is_up { "up" } else { "down" });
        }
        self.shared_status.write().link_is_up = Some(is_up);
        Look { again: host.due.map(|due| due.saturating_duration_since(now)), changed: before != Some(is_up) }
    }

    /// Notes the state of the host's side, and logs what has changed.
    fn note(&self, name: &str, side: HostSide) {
        let mut status = self.shared_status.write();
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
}
