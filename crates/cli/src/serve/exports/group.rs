//! Devices that start and stop together: one device, or the two cards of a link.
use super::super::open::UnlockedDisk;
use super::super::report;
use super::super::spec::{DeviceSpec, Kind};
use super::lock_wait::LockWait;
use super::served::ServedDevice;
use paravane_store::Location;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

/// Devices of the file that start and stop together.
pub(super) struct Group {
    pub(super) id: u64,
    /// In the order of the file.
    pub(super) specs: Vec<DeviceSpec>,
    pub(super) state: State,
    /// Opened when the daemon started, and still to be locked.
    pub(super) unlocked: Option<Box<UnlockedDisk>>,
    /// When it entered this state.
    pub(super) since: Instant,
}

/// See the module `exports`.
pub(super) enum State {
    Waiting,
    Opening(Arc<LockWait>),
    Served(Vec<ServedDevice>),
    Failed(Vec<report::Failed>),
}

/// A removed group whose devices have not ended.
pub(super) struct Leaving {
    pub(super) id: u64,
    pub(super) specs: Vec<DeviceSpec>,
    pub(super) since: Instant,
    /// `None`: a thread is still opening them.
    pub(super) members: Option<Vec<ServedDevice>>,
}

impl Group {
    pub(super) fn new(id: u64, specs: Vec<DeviceSpec>) -> Self {
        Self { id, specs, state: State::Waiting, unlocked: None, since: Instant::now() }
    }

    pub(super) fn enter(&mut self, state: State) {
        (self.state, self.since) = (state, Instant::now());
    }

    /// Whether a reload with the same specifications leaves the group alone.
    pub(super) fn is_good(&self) -> bool {
        match &self.state {
            State::Waiting | State::Opening(_) => true,
            State::Served(members) => !members.iter().any(|member| member.export.has_failed()),
            State::Failed(_) => false,
        }
    }
}

impl Leaving {
    pub(super) fn has_ended(&self) -> bool {
        self.members.as_ref().is_some_and(|members| {
            members.iter().all(|member| member.export.has_ended() && !member.is_handing_over())
        })
    }

    /// A device of this group that holds a resource which one of `specs` needs.
    pub(super) fn holds_up(&self, specs: &[DeviceSpec]) -> Option<&DeviceSpec> {
        self.specs.iter().find(|old| specs.iter().any(|new| collide(old, new)))
    }
}

/// Divides devices into groups, in the order of the file.
pub(super) fn groups(devices: Vec<DeviceSpec>) -> Vec<Vec<DeviceSpec>> {
    let mut groups: Vec<Vec<DeviceSpec>> = Vec::new();
    let mut links: HashMap<String, usize> = HashMap::new();
    for device in devices {
        match device.link().map(str::to_owned) {
            Some(link) => match links.get(&link) {
                Some(&group) => groups[group].push(device),
                None => {
                    links.insert(link, groups.len());
                    groups.push(vec![device]);
                }
            },
            None => groups.push(vec![device]),
        }
    }
    groups
}

/// Whether two devices exclude each other.
///
/// They do with the same name, socket, TAP device, or writable image.
fn collide(one: &DeviceSpec, other: &DeviceSpec) -> bool {
    let images = one.locations();
    let shares_image = images.iter().any(|image| other.locations().contains(image));
    one.name == other.name
        || (one.socket().is_some() && one.socket() == other.socket())
        || (one.tap().is_some() && one.tap() == other.tap())
        || (shares_image && (writes(one, other) || writes(other, one)))
}

/// Whether `one` writes to an image of `other`.
fn writes(one: &DeviceSpec, other: &DeviceSpec) -> bool {
    let image: Option<&Location> = match &one.kind {
        Kind::Blk(blk) if !blk.read_only => Some(&blk.image),
        _ => None,
    };
    image.is_some_and(|image| other.locations().contains(&image))
}
