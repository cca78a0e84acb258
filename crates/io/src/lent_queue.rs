//! A queue on loan: its back end, and what is kept for it.
use crate::backend::{Loan, QueueBackend, Relay};
use crate::{Kicks, RestingQueue};
use paravane_device::State;
use paravane_dma::{Lent, LogError};
use std::io;
use thiserror::Error;

/// Why a queue is not lent, or not taken back.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum LendError {
    /// None of our I/O threads has the queue.
    #[error("queue {queue} is not running, or is lent already")]
    NotOurs {
        /// Queue index.
        queue: u16,
    },
    /// No back end has the queue.
    #[error("queue {queue} is not lent")]
    NotLent {
        /// Queue index.
        queue: u16,
    },
    /// The back end would take the device's addresses for guest-physical ones.
    #[error("the device is behind a domain, whose addresses a back end cannot translate")]
    Translated,
    /// The back end's writes would be missing in the dirty log.
    #[error("guest memory cannot be lent: {0}")]
    Log(#[from] LogError),
    /// The handler holds work that parking would lose.
    #[error("queue {queue} has work that waits for room in its back end; try again later")]
    Busy {
        /// Queue index.
        queue: u16,
    },
    /// The back end has not started. Our thread serves the queue again.
    #[error("the back end refuses the queue: {source}")]
    Refused {
        /// The reason.
        source: io::Error,
    },
    /// Nobody serves the queue any more: the driver has to reset the device.
    #[error("queue {queue} was lost: {reason}")]
    Lost {
        /// Queue index.
        queue: u16,
        /// The reason.
        reason: String,
    },
}

/// A queue while a back end has it.
///
/// Fields are in the order of their end: the server, the relay of its calls, the queue, the memory.
pub(crate) struct LentQueue {
    backend: Box<dyn QueueBackend>,
    _relay: Relay,
    resting: Box<RestingQueue>,
    _memory: Lent,
}

impl LentQueue {
    /// Starts a back end.
    ///
    /// # Errors
    /// It refuses the queue, which is given back.
    pub(crate) fn start(
        mut resting: Box<RestingQueue>,
        mut backend: Box<dyn QueueBackend>,
        memory: Lent,
    ) -> Result<Self, (Box<RestingQueue>, io::Error)> {
        match start_backend(&mut resting, &mut *backend, &memory) {
            Ok(relay) => Ok(Self { backend, _relay: relay, resting, _memory: memory }),
            Err(error) => {
                give_back_handler(&mut resting, &mut *backend);
                Err((resting, error))
            }
        }
    }

    /// Serves a kick that has come as an exit; see [`QueueBackend::kick`].
    pub(crate) fn kick(&mut self) -> bool {
        self.backend.kick()
    }

    /// Ends the loan. What the back end had in flight is completed, and its last call passed on.
    ///
    /// # Errors
    /// The back end does not know its position, and the queue has ended.
    pub(crate) fn end(self) -> Result<Box<RestingQueue>, String> {
        let Self { mut backend, _relay: relay, mut resting, _memory } = self;
        let base = backend.stop();
        drop(relay);
        give_back_handler(&mut resting, &mut *backend);
        let position = base
            .map_err(|error| format!("its back end does not report its position: {error}"))
            .and_then(|base| {
                let features = resting.parked.config().features();
                State::from_vring_base(base, features).map_err(|error| error.to_string())
            });
        match position {
            Ok(position) => {
                resting.position = position;
                Ok(resting)
            }
            Err(reason) => {
                resting.end();
                Err(reason)
            }
        }
    }
}

/// Has the notifier's kicks go to the back end, and starts it.
fn start_backend(
    resting: &mut RestingQueue,
    backend: &mut dyn QueueBackend,
    memory: &Lent,
) -> io::Result<Relay> {
    let RestingQueue { key, parked, handler, kicks, events, .. } = resting;
    let Kicks::Host(notifier) = kicks else {
        return Err(io::Error::new(io::ErrorKind::Unsupported, "its kicks come from another process"));
    };
    let relay = Relay::new(key.queue, events.clone())?;
    notifier.grab().map_err(io::Error::other)?;
    let message = events.message(key.queue);
    backend.start(&mut Loan {
        queue: key.queue,
        features: parked.config().features(),
        addresses: parked.config().addresses(),
        parked,
        handler,
        memory,
        kick: notifier.notifier(),
        call: relay.call(),
        message: message.as_ref(),
        error: relay.error(),
        events,
    })?;
    Ok(relay)
}

fn give_back_handler(resting: &mut RestingQueue, backend: &mut dyn QueueBackend) {
    if resting.handler.is_none() {
        resting.handler = backend.handler();
    }
}
