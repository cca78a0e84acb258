//! What guests are told of their devices, and keep while daemons come and go.
//!
//! ```text
//!   running daemon:  Told::running --Offer--.
//!   ended daemon:    Told::recorded --------+--> Told::difference --none--> the new daemon begins
//!   new daemon:      Told::planned ---------'          '--------some--> it exits with status 2
//! ```
//! A guest reads block size, number of queues and the like once, when its driver starts. So a new daemon
//! that would tell anything else is refused while the old one serves on, or before the session is
//! resumed.
use super::spec::{Blk, DeviceSpec, Kind, Net};
use paravane_device::blk::{Geometry, most_segments};
use paravane_spec::{blk, feature, net};
use paravane_vhost::KnownToDriver;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use zerocopy::FromBytes;

/// Size of a disk in bytes. It may grow: the guest is told.
const SIZE: &str = "size";
const BLOCK: &str = "block size";
const READ_ONLY: &str = "read-only";
const QUEUES: &str = "queues";
const SEGMENTS: &str = "segments of a request";
const MAC: &str = "MAC address";
const MTU: &str = "MTU";
const OFFLOADS: &str = "offloads";
const PACKED: &str = "packed queues";
const IN_ORDER: &str = "IN_ORDER";

/// The driver uses it.
const USED: &str = "in use";
/// The device does not offer it.
const MISSING: &str = "not offered";

/// Facts by name. What is not known is left out.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct Told(BTreeMap<String, String>);

impl Told {
    fn put(&mut self, name: &str, value: impl ToString) {
        self.0.insert(name.to_owned(), value.to_string());
    }

    /// Of a device that is served, with the features that its driver has accepted.
    pub(crate) fn running(spec: &DeviceSpec, disk: Option<Geometry>, accepted: u64) -> Self {
        let mut told = Self::default();
        told.device(spec);
        told.disk(disk);
        told.accepted(spec.kind.name(), accepted);
        told
    }

    /// Of a device that is to be served. `is_kept`: by a daemon with a descriptor store.
    pub(crate) fn planned(spec: &DeviceSpec, disk: Option<Geometry>, is_kept: bool) -> Self {
        let mut told = Self::default();
        told.device(spec);
        told.disk(disk);
        if !spec.packed {
            told.put(PACKED, MISSING);
        }
        if !matches!(spec.kind, Kind::Net(_)) || is_kept {
            told.put(IN_ORDER, MISSING);
        }
        if let Kind::Net(net) = &spec.kind {
            if !net.offloads {
                told.put(OFFLOADS, MISSING);
            }
            if net.mtu.is_none() {
                told.put(MTU, MISSING);
            }
        }
        told
    }

    /// Of a device whose daemon has ended, by what it has recorded.
    pub(crate) fn recorded(kind: &str, known: &KnownToDriver) -> Self {
        let mut told = Self::default();
        match kind {
            "blk" => told.blk_config(known),
            "net" => told.net_config(known),
            _ => {}
        }
        told.accepted(kind, known.features);
        told
    }

    /// What the specification says.
    fn device(&mut self, spec: &DeviceSpec) {
        match &spec.kind {
            Kind::Blk(disk) => {
                let Blk { queues, queue_size, read_only, .. } = **disk;
                self.put(READ_ONLY, read_only);
                self.put(QUEUES, queues);
                self.put(SEGMENTS, most_segments(queue_size));
            }
            Kind::Net(Net { mac, queues, mtu, .. }) => {
                self.put(MAC, address(mac));
                self.put(QUEUES, queues);
                if let Some(mtu) = mtu {
                    self.put(MTU, mtu);
                }
            }
            Kind::Rng => {}
        }
    }

    fn disk(&mut self, disk: Option<Geometry>) {
        if let Some(Geometry { size, block }) = disk {
            self.put(SIZE, size);
            self.put(BLOCK, block);
        }
    }

    /// What a driver uses of what may be offered or not.
    fn accepted(&mut self, kind: &str, features: u64) {
        const OFFLOAD: u64 = net::F_CSUM
            | net::F_GUEST_CSUM
            | net::F_GUEST_TSO4
            | net::F_GUEST_TSO6
            | net::F_HOST_TSO4
            | net::F_HOST_TSO6;
        let uses = [
            (PACKED, feature::RING_PACKED),
            (IN_ORDER, feature::IN_ORDER),
            (OFFLOADS, if kind == "net" { OFFLOAD } else { 0 }),
        ];
        for (name, _) in uses.into_iter().filter(|(_, bits)| features & bits != 0) {
            self.put(name, USED);
        }
    }

    fn blk_config(&mut self, known: &KnownToDriver) {
        let Ok((config, _)) = blk::Config::read_from_prefix(&known.config) else { return };
        self.put(SIZE, u64::from_le(config.capacity).saturating_mul(blk::SECTOR));
        self.put(BLOCK, u32::from_le(config.blk_size));
        self.put(QUEUES, u16::from_le(config.num_queues));
        self.put(SEGMENTS, u32::from_le(config.seg_max));
        // Only a disk that is written to has them.
        self.put(READ_ONLY, config.max_write_zeroes_sectors == 0);
    }

    fn net_config(&mut self, KnownToDriver { config, features }: &KnownToDriver) {
        let Ok((config, _)) = net::Config::read_from_prefix(config) else { return };
        self.put(MAC, address(&config.mac));
        self.put(QUEUES, u16::from_le(config.max_virtqueue_pairs));
        if features & net::F_MTU != 0 {
            self.put(MTU, u16::from_le(config.mtu));
        }
    }

    /// Removes the block of a disk, which is not known yet.
    pub(crate) fn without_block(mut self) -> Self {
        self.0.remove(BLOCK);
        self
    }

    /// Block of a disk in bytes.
    pub(crate) fn block(&self) -> Option<u32> {
        self.0.get(BLOCK)?.parse().ok().filter(|block| (512..=4096).contains(block))
    }

    /// The first fact that `new` has differently, in words.
    ///
    /// A disk that has grown is none: its guest is told.
    pub(crate) fn difference(&self, new: &Self) -> Option<String> {
        let number = |text: &str| text.parse::<u64>().ok();
        self.0.iter().find_map(|(name, value)| {
            let now = new.0.get(name).filter(|now| *now != value)?;
            let grows = name == SIZE && number(now) >= number(value);
            (!grows).then(|| format!("{name}: {value} for the guest, {now} here"))
        })
    }
}

fn address(mac: &[u8; 6]) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

/// What cannot be done if a device differs, and the way out.
pub(crate) const NOT_TAKEN: &str =
    "cannot take over: a guest would find another device; keep it as it is, or restart";
pub(crate) const NOT_RESUMED: &str = "cannot resume a session: a guest would find another device; keep it as it \
     was, or end the session by a restart of the holder";
