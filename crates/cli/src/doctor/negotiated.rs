//! What a VMM and a driver have negotiated, and the checks of it.
use crate::serve::report::{Device, Queue};

/// What a VMM and the driver of its guest have negotiated for a device.
pub(crate) struct Negotiated<'a> {
    pub(crate) device: &'a Device,
    /// Of virtio.
    pub(crate) features: u64,
    /// Of vhost-user.
    pub(crate) protocol: u64,
    pub(crate) live: Vec<&'a Queue>,
}

/// A feature, and the cost of its absence.
pub(crate) struct Check {
    pub(crate) name: &'static str,
    /// Whether devices like this one use the feature.
    pub(crate) applies: fn(&Negotiated<'_>) -> bool,
    pub(crate) has: fn(&Negotiated<'_>) -> bool,
    pub(crate) with: &'static str,
    pub(crate) without: &'static str,
    pub(crate) remedy: &'static str,
}

/// How users choose number and size of a device's queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum QueueUse {
    /// Nothing: nobody chooses their number and size.
    Fixed,
    /// Each vCPU can have one.
    Queues,
    /// Each vCPU can have a pair of network queues.
    Pairs,
}

impl Negotiated<'_> {
    /// Whether any bit of `feature` was negotiated.
    pub(crate) fn has(&self, feature: u64) -> bool {
        self.features & feature != 0
    }

    pub(crate) fn has_protocol(&self, feature: u64) -> bool {
        self.protocol & feature != 0
    }
}
