//! Root complex: one bus behind a memory window (ECAM).
//!
//! The bus has a host bridge, and one function per device.
//!
//! ```text
//! offset in the window:  bus (0) | device (5 bits) | function (3 bits) | register (12 bits)
//!                                      |                  '-- 0; others do not exist
//!                                      '-- 0: the host bridge; n: endpoint n - 1, which the owner keeps
//! ```
//! Without a function, reads return ones and writes have no effect. The same holds for accesses
//! wider than 8 bytes or unaligned. The BARs belong to the endpoints ([`crate::Effect::Move`]).
use super::config_space::{ConfigSpace, Identity, accessible};
use paravane_spec::pci::{HOST_BRIDGE, class, ecam};

/// Most endpoints of a root.
pub const MOST_ENDPOINTS: usize = ecam::DEVICES as usize - 1;

/// Target of an access to the window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    /// Index of the endpoint, which need not exist.
    pub endpoint: usize,
    /// Offset in its configuration space.
    pub register: u16,
}

/// Root complex with one bus.
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
    /// Makes a root with its host bridge only.
    #[must_use]
    pub fn new() -> Self {
        let [vendor, device] = HOST_BRIDGE;
        let identity = Identity { vendor, device, revision: 0, class: class::HOST_BRIDGE, subsystem: [0, 0] };
        Self { bridge: ConfigSpace::new(identity) }
    }

    /// Reads at `offset` of the window.
    ///
    /// `endpoint` reads the configuration space of an endpoint and returns whether it exists; it is
    /// called at most once.
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

    /// Decodes a write.
    ///
    /// Returns the endpoint's register, if it is one. The host bridge has nothing to write.
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
