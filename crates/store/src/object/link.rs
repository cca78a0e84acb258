//! Whether the server can be reached, and since when it cannot.
use super::answer::Failure;
use crate::Link;
use crate::lock::lock;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// State of the link to a server.
#[derive(Debug, Default)]
pub(super) struct LinkState(Mutex<LatestLink>);

#[derive(Debug, Default)]
struct LatestLink {
    link: Link,
    error: Option<String>,
    failing_since: Option<Instant>,
}

/// What to do after a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AfterFailure {
    /// Try again.
    Again,
    /// Give up what waits.
    GiveUp,
    /// Give up for ever.
    Never,
}

impl LinkState {
    /// The state, and the last error.
    pub(super) fn get(&self) -> (Link, Option<String>) {
        let state = lock(&self.0);
        (state.link, state.error.clone())
    }

    /// The server has answered.
    pub(super) fn answered(&self, object: &dyn std::fmt::Display) {
        let mut state = lock(&self.0);
        state.failing_since = None;
        if matches!(state.link, Link::Reconnecting | Link::Down) {
            state.link = Link::Up;
            tracing::info!("{object}: the server answers again");
        }
    }

    /// Nobody waits for what has failed: the next request finds out.
    pub(super) fn leave(&self) {
        let mut state = lock(&self.0);
        if state.link == Link::Reconnecting {
            state.link = Link::Up;
            state.failing_since = None;
        }
    }

    /// A request has failed. Servers that may answer later have `retry` to do so.
    pub(super) fn failed(
        &self,
        failure: &Failure,
        retry: Duration,
        object: &dyn std::fmt::Display,
    ) -> AfterFailure {
        let mut state = lock(&self.0);
        if state.link == Link::Unusable {
            return AfterFailure::Never;
        }
        let message = failure.message();
        let since = *state.failing_since.get_or_insert_with(Instant::now);
        let (link, next) = match failure {
            Failure::Unusable(_) => (Link::Unusable, AfterFailure::Never),
            Failure::Again(_) if state.link != Link::Down && since.elapsed() < retry => {
                (Link::Reconnecting, AfterFailure::Again)
            }
            _ => (Link::Down, AfterFailure::GiveUp),
        };
        if link != state.link {
            match link {
                Link::Unusable => tracing::error!("{object}: {message}; all requests fail"),
                Link::Down => tracing::error!("{object}: {message}; requests fail"),
                _ => tracing::warn!("{object}: {message}; trying again for {retry:?}"),
            }
        }
        state.link = link;
        state.error = Some(message.into());
        next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_goes_down_comes_back_and_ends() {
        let (link, again) = (LinkState::default(), Failure::Again("503".into()));
        let hour = Duration::from_secs(3600);
        assert_eq!(link.failed(&again, hour, &"x"), AfterFailure::Again);
        assert_eq!(link.get(), (Link::Reconnecting, Some("503".into())));
        link.answered(&"x");
        assert_eq!(link.get().0, Link::Up);
        assert_eq!(link.failed(&again, Duration::ZERO, &"x"), AfterFailure::GiveUp);
        // While it is down, a request has one attempt.
        assert_eq!(link.failed(&again, hour, &"x"), AfterFailure::GiveUp);
        assert_eq!(link.get().0, Link::Down);
        link.answered(&"x");
        assert_eq!(link.failed(&Failure::Refused("404".into()), hour, &"x"), AfterFailure::GiveUp);
        assert_eq!(link.failed(&Failure::Unusable("changed".into()), hour, &"x"), AfterFailure::Never);
        link.answered(&"x");
        assert_eq!(link.failed(&again, hour, &"x"), AfterFailure::Never);
        assert_eq!(link.get(), (Link::Unusable, Some("changed".into())));
    }
}
