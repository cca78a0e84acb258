//! How to start a disk again after a snapshot.
use super::messages::{NextStart, StartOption};
use crate::kinds::blk::args::Blk;
use crate::kinds::endpoint::Endpoint;
use crate::kinds::kind::POLL_US;
use crate::serve::spec::DeviceSpec;
use crate::serve::told::Told;
use std::path::Path;
use std::time::Duration;

impl NextStart {
    /// The images and options of a disk whose guest was `told` these facts.
    ///
    /// # Errors
    /// A path is not UTF-8, as qcow2 and JSON demand.
    pub(crate) fn of(spec: &DeviceSpec, disk: &Blk, told: &Told) -> Result<Self, String> {
        let mut start = disk.next_start(told)?;
        start.options.extend(common(spec));
        Ok(Self { name: spec.name.clone(), endpoint: endpoint(&spec.endpoint), ..start })
    }
}

fn endpoint(endpoint: &Endpoint) -> StartOption {
    let absolute = |path: &Path| {
        let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        path.to_string_lossy().into_owned()
    };
    match endpoint {
        Endpoint::Listen(path) => StartOption::new("socket", absolute(path)),
        Endpoint::Connect(path) => StartOption::new("connect", absolute(path)),
        Endpoint::Activated => StartOption::flag("socket-activation"),
        Endpoint::Inherited(number) => StartOption::new("fd", number),
    }
}

/// Options of any device that are not the defaults.
fn common(spec: &DeviceSpec) -> Vec<StartOption> {
    // An option that is added has to be listed.
    let DeviceSpec { workers, longest_poll, latencies, packed, name: _, endpoint: _, kind: _ } = spec;
    let mut options = Vec::new();
    let mut add = |is_set: bool, option: StartOption| options.extend(is_set.then_some(option));
    if let Some(workers) = workers {
        add(true, StartOption::new("workers", workers));
    }
    // An overlay is a file.
    let is_poll_other = *longest_poll != Duration::from_micros(POLL_US.into());
    add(is_poll_other, StartOption::new("poll-us", longest_poll.as_micros()));
    add(!latencies, StartOption::new("latencies", "off"));
    add(!packed, StartOption::flag("no-packed"));
    options
}
