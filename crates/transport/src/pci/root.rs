//! The root: one bus, reached through a window in memory (ECAM), with a host bridge and one function a device.
//!
//! ```text
//! offset in the window:  bus (0) | device (5 bits) | function (3 bits) | register (12 bits)
//!                                      |                  '-- 0, or there is nothing
//!                                      '-- 0: the host bridge; n: endpoint n - 1, which the owner keeps
//! ```
//! Where there is no function everything reads as ones and writes go nowhere, and so do accesses that are wider than
//! 8 bytes or not aligned. The BARs of the endpoints are the endpoints' own ([`crate::Effect::Move`]).
use super::config_space::{ConfigSpace, Identity, accessible};
use paravane_spec::pci::{HOST_BRIDGE, class, ecam};

/// Most endpoints of a root.
pub const MOST_ENDPOINTS: usize = ecam::DEVICES as usize - 1;

/// Where an access to the window goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    /// Number of the endpoint, from 0 on. It need not exist.
    pub endpoint: usize,
    /// Offset in its configuration space.
    pub register: u16,
}

/// A root complex with one bus.
#[derive(Debug)]
pub struct Root {
    bridge: ConfigSpace,
}

impl Default for Root {
    fn default() -> Self {
        Self::new()
    }
}

impl Root {
    /// With its host bridge and nothing else on the bus.
    #[must_use]
    pub fn new() -> Self {
        let [vendor, device] = HOST_BRIDGE;
        let identity = Identity { vendor, device, revision: 0, class: class::HOST_BRIDGE, subsystem: [0, 0] };
        Self { bridge: ConfigSpace::new(identity) }
    }

    /// The guest reads at `offset` of the window. `endpoint` reads the configuration space of an endpoint and says
    /// whether it exists; it is called at most once.
    pub fn read(&self, offset: u64, data: &mut [u8], endpoint: impl FnOnce(Target, &mut [u8]) -> bool) {
        let found = match decode(offset, data.len()) {
            Some((0, register)) => {
                self.bridge.read(register, data);
                true
            }
            Some((device, register)) => endpoint(Target { endpoint: device - 1, register }, data),
            None => false,
        };
        if !found {
            data.fill(0xff);
        }
    }

    /// The guest writes there: the endpoint's register, if it is one's. Nothing in the host bridge can be written.
    #[must_use]
    pub fn write(&self, offset: u64, len: usize) -> Option<Target> {
        let (device, register) = decode(offset, len)?;
        Some(Target { endpoint: device.checked_sub(1)?, register })
    }
}

/// Device and register on bus 0, function 0.
fn decode(offset: u64, len: usize) -> Option<(usize, u16)> {
    let (function, register) = (offset / ecam::FUNCTION, (offset % ecam::FUNCTION) as u16);
    let (device, function) = (function / ecam::FUNCTIONS, function % ecam::FUNCTIONS);
    let there = device < ecam::DEVICES && function == 0 && accessible(register, len);
    there.then_some((device as usize, register))
}
