//! Watches the host's side of a device, which may be gone behind open descriptors.
//!
//! ```text
//!   a queue finds it gone, a refresh, a session begins --> look --gone--> look again every half second
//!                                                           '--there--> no look until one of these
//! ```
use super::Shared;
use paravane_device::{Device, HostSide};
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Interval between looks while the host's side is gone.
const INTERVAL: Duration = Duration::from_millis(500);

/// Result of [`Shared::look`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Look {
    /// Time until the next one, if there is one.
    pub(super) again: Option<Duration>,
    /// The configuration space may have changed.
    pub(super) changed: bool,
}

impl Shared {
    /// Looks at the host's side of the device, if that is due.
    pub(super) fn look(&self, name: &str, device: &mut dyn Device) -> Look {
        let mut due = self.look_due.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        // Relaxed: the wake-up orders.
        let is_due = self.look.swap(false, Ordering::Relaxed) || due.is_some_and(|due| due <= now);
        let Some(net) = device.net().filter(|_| is_due) else {
            return Look { again: due.map(|due| due - now), changed: false };
        };
        let side = net.look();
        *due = matches!(side, HostSide::Gone(_)).then(|| now + INTERVAL);
        let mut status = self.shared_status.write();
        let before = status.host_error.take();
        let was_gone = before.is_some();
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
        Look { again: due.map(|_| INTERVAL), changed: was_gone != status.host_error.is_some() }
    }
}
