//! The protocol as an export sees it.
use crate::message::FRAMING;
use crate::session::{VhostSession, check};
use paravane_device::Device;
use paravane_export::protocol::{Offer, Protocol, Section, Session};
use paravane_export::{Framing, HandoverError, SessionEnd, SharedStatus};
use paravane_io::DeviceThreads;
use std::sync::Arc;

/// Most queues that a client can address: a message has 8 bits for the index.
const MAX_QUEUES: usize = 256;

/// Protocol vhost-user.
#[derive(Clone, Copy, Debug, Default)]
pub struct VhostUser;

impl Protocol for VhostUser {
    fn number(&self) -> u32 {
        0
    }

    fn name(&self) -> &'static str {
        "vhost-user"
    }

    fn max_queues(&self) -> usize {
        MAX_QUEUES
    }

    fn framing(&self) -> &'static Framing {
        &FRAMING
    }

    fn check(&self, sections: &[Section]) -> Result<(), HandoverError> {
        check(sections)
    }

    fn begin(
        &self,
        device: Box<dyn Device>,
        threads: Arc<DeviceThreads>,
        status: Arc<SharedStatus>,
        offer: Offer,
    ) -> Result<Box<dyn Session>, (Box<dyn Device>, SessionEnd)> {
        match VhostSession::new(device, threads, status, offer) {
            Ok(session) => Ok(Box::new(session)),
            Err((device, error)) => Err((device, error.into())),
        }
    }
}

/// Configuration of an export with vhost-user.
pub type ExportConfig = paravane_export::ExportConfig<VhostUser>;
