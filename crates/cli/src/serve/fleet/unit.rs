//! What is started and stopped as one: a device, or the two cards of a link.
use super::super::report;
use super::super::spec::{DeviceSpec, Kind};
use super::member::Member;
use std::collections::HashMap;
use std::path::Path;
use std::time::Instant;

/// Devices of the file that are started and stopped together.
pub(super) struct Unit {
    pub(super) id: u64,
    /// In the order of the file.
    pub(super) specs: Vec<DeviceSpec>,
    pub(super) state: State,
    /// Since when it is in this state.
    pub(super) since: Instant,
}

/// See the module `fleet`.
pub(super) enum State {
    Waiting,
    Opening,
    Served(Vec<Member>),
    Failed(Vec<report::Failed>),
}

/// Devices that are not wanted any more, and have not ended.
pub(super) struct Leaving {
    pub(super) id: u64,
    pub(super) specs: Vec<DeviceSpec>,
    pub(super) since: Instant,
    /// `None`: a thread still opens them.
    pub(super) members: Option<Vec<Member>>,
}

impl Unit {
    pub(super) fn new(id: u64, specs: Vec<DeviceSpec>) -> Self {
        Self { id, specs, state: State::Waiting, since: Instant::now() }
    }

    pub(super) fn enter(&mut self, state: State) {
        (self.state, self.since) = (state, Instant::now());
    }

    /// Whether it can stay as it is, when the file asks for the same.
    pub(super) fn is_good(&self) -> bool {
        match &self.state {
            State::Waiting | State::Opening => true,
            State::Served(members) => !members.iter().any(|member| member.export.has_failed()),
            State::Failed(_) => false,
        }
    }
}

impl Leaving {
    pub(super) fn has_ended(&self) -> bool {
        self.members.as_ref().is_some_and(|members| members.iter().all(|member| member.export.has_ended()))
    }

    /// The device of it that has something which one of these needs.
    pub(super) fn holds_up(&self, specs: &[DeviceSpec]) -> Option<&DeviceSpec> {
        self.specs.iter().find(|old| specs.iter().any(|new| collide(old, new)))
    }
}

/// Deals devices out to units, in the order of the file.
pub(super) fn units(devices: Vec<DeviceSpec>) -> Vec<Vec<DeviceSpec>> {
    let mut units: Vec<Vec<DeviceSpec>> = Vec::new();
    let mut links: HashMap<String, usize> = HashMap::new();
    for device in devices {
        match device.link().map(str::to_owned) {
            Some(link) => match links.get(&link) {
                Some(&unit) => units[unit].push(device),
                None => {
                    links.insert(link, units.len());
                    units.push(vec![device]);
                }
            },
            None => units.push(vec![device]),
        }
    }
    units
}

/// Whether two devices cannot be served at one time: they have the same name, socket, TAP device, or image to write to.
fn collide(one: &DeviceSpec, other: &DeviceSpec) -> bool {
    let images = one.images();
    let shares_image = images.iter().any(|image| other.images().contains(image));
    one.name == other.name
        || (one.socket().is_some() && one.socket() == other.socket())
        || (one.tap().is_some() && one.tap() == other.tap())
        || (shares_image && (writes(one, other) || writes(other, one)))
}

/// Whether `one` writes to an image of `other`.
fn writes(one: &DeviceSpec, other: &DeviceSpec) -> bool {
    let image: Option<&Path> = match &one.kind {
        Kind::Blk(blk) if !blk.read_only => Some(&blk.image),
        _ => None,
    };
    image.is_some_and(|image| other.images().contains(&image))
}
