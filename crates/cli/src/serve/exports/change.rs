//! What a new specification changes of a device that is served.
//!
//! | change | what becomes of the device |
//! |---|---|
//! | in place | it goes on, requests in flight included |
//! | restart | it is opened again; its session goes on if the guest would find the same device |
//! | restart, of what the guest is connected to | it is opened again, and its client has to reconnect |
use super::super::spec::{Blk, DeviceSpec, Kind, Net, Network};
use paravane_device::RateLimit;
use paravane_store::Location;

/// What changes of a device, by the names of options.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    Unchanged,
    /// Settings that apply to a device in use.
    InPlace(Vec<&'static str>),
    /// Settings of which some take effect when the device is opened.
    Restart {
        /// All that change.
        keys: Vec<&'static str>,
        /// The session cannot go on: it would be with another device, or elsewhere.
        ends_session: bool,
    },
}

/// When a setting takes effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Effect {
    InPlace,
    Restart,
    /// The session ends.
    Session,
}

/// Settings that differ.
#[derive(Default)]
struct Differences(Vec<(&'static str, Effect)>);

impl Differences {
    fn add(&mut self, key: &'static str, effect: Effect, differs: bool) {
        if differs {
            self.0.push((key, effect));
        }
    }

    fn limit(&mut self, old: RateLimit, new: RateLimit) {
        let RateLimit { bytes, ops } = old;
        let keys = [
            (bytes, new.bytes, "bytes-per-second", "burst-bytes"),
            (ops, new.ops, "ops-per-second", "burst-ops"),
        ];
        for (old, new, rate, burst) in keys {
            let (old, new) =
                (old.map(|one| (one.per_second, one.burst)), new.map(|one| (one.per_second, one.burst)));
            let is_rate = old.map(|(rate, _)| rate) != new.map(|(rate, _)| rate);
            self.add(rate, Effect::InPlace, is_rate);
            // The default follows the rate.
            self.add(burst, Effect::InPlace, !is_rate && old != new);
        }
    }
}

impl Change {
    /// What becomes of a device that is `served` by a file that has it as `wanted`.
    pub(crate) fn between(served: &DeviceSpec, wanted: &DeviceSpec) -> Self {
        let (served, wanted) = served.comparable(wanted);
        let mut all = Differences::default();
        // A new setting has to be named here.
        let DeviceSpec { name, endpoint, workers, longest_poll, latencies, packed, kind } = &served;
        all.add("name", Effect::Session, *name != wanted.name);
        all.add("socket", Effect::Session, *endpoint != wanted.endpoint);
        all.add("workers", Effect::Restart, *workers != wanted.workers);
        all.add("poll-us", Effect::InPlace, *longest_poll != wanted.longest_poll);
        all.add("latencies", Effect::InPlace, *latencies != wanted.latencies);
        all.add("no-packed", Effect::Restart, *packed != wanted.packed);
        match (kind, &wanted.kind) {
            (Kind::Blk(served), Kind::Blk(wanted)) => blk(&mut all, served, wanted),
            (Kind::Net(served), Kind::Net(wanted)) => net(&mut all, served, wanted),
            (Kind::Rng, Kind::Rng) => {}
            _ => all.add("kind", Effect::Session, true),
        }
        let mut keys: Vec<_> = Vec::new();
        for (key, _) in &all.0 {
            if !keys.contains(key) {
                keys.push(*key);
            }
        }
        match all.0.iter().map(|(_, effect)| *effect).max() {
            None => Self::Unchanged,
            Some(Effect::InPlace) => Self::InPlace(keys),
            Some(Effect::Restart) => Self::Restart { keys, ends_session: false },
            Some(Effect::Session) => Self::Restart { keys, ends_session: true },
        }
    }

    /// Names of the settings that change.
    pub(crate) fn keys(&self) -> &[&'static str] {
        match self {
            Self::Unchanged => &[],
            Self::InPlace(keys) | Self::Restart { keys, .. } => keys,
        }
    }
}

fn blk(all: &mut Differences, served: &Blk, wanted: &Blk) {
    use Effect::{InPlace, Restart, Session};
    let Blk {
        image,
        format,
        backing,
        force_layers,
        read_only,
        lock,
        direct,
        block_size,
        registered_buffers,
        store_timeout,
        polls,
        serial,
        told_serial,
        queues,
        queue_size,
        engine,
        on_full,
        slow,
        limit,
    } = served;
    let is_remote = |location: &Location| location.path().is_none();
    all.add("image", Session, *image != wanted.image);
    all.add("format", Session, *format != wanted.format);
    all.add("backing", Session, *backing != wanted.backing);
    all.add("force-layers", Restart, *force_layers != wanted.force_layers);
    all.add("read-only", Restart, *read_only != wanted.read_only);
    all.add("no-lock", Restart, *lock != wanted.lock);
    all.add("direct", Restart, *direct != wanted.direct);
    all.add("block-size", Restart, *block_size != wanted.block_size);
    all.add("registered-buffers", Restart, *registered_buffers != wanted.registered_buffers);
    all.add("store-timeout", Restart, *store_timeout != wanted.store_timeout);
    // Threads of a connection to a server poll, too, or never do.
    let remote = is_remote(image) || backing.iter().any(|layer| is_remote(&layer.location));
    all.add("poll-us", if remote { Restart } else { InPlace }, *polls != wanted.polls);
    all.add("serial", Restart, (serial, told_serial) != (&wanted.serial, &wanted.told_serial));
    all.add("queues", Restart, *queues != wanted.queues);
    all.add("queue-size", Restart, *queue_size != wanted.queue_size);
    all.add("engine", Restart, *engine != wanted.engine);
    all.add("on-full", InPlace, *on_full != wanted.on_full);
    all.add("slow", InPlace, *slow != wanted.slow);
    all.limit(*limit, wanted.limit);
}

fn net(all: &mut Differences, served: &Net, wanted: &Net) {
    use Effect::{Restart, Session};
    let Net { network, mac, queues, queue_size, mtu, offloads, limit } = served;
    let network_key = match &wanted.network {
        Network::Tap(_) => "tap",
        Network::Link(_) => "link",
        Network::Echo => "echo",
        Network::Sink => "sink",
        Network::Source(_) => "source",
    };
    all.add(network_key, Session, *network != wanted.network);
    all.add("mac", Restart, *mac != wanted.mac);
    all.add("queues", Restart, *queues != wanted.queues);
    all.add("queue-size", Restart, *queue_size != wanted.queue_size);
    all.add("mtu", Restart, *mtu != wanted.mtu);
    all.add("no-offloads", Restart, *offloads != wanted.offloads);
    all.limit(*limit, wanted.limit);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serve::config::Config;
    use std::path::Path;

    fn spec(text: &str) -> DeviceSpec {
        Config::parse(Path::new("/d.toml"), text).unwrap().devices.remove(0)
    }

    /// The change by a line that is added to a device.
    fn by(device: &str, line: &str) -> Change {
        let (served, wanted) = (spec(device), spec(&format!("{device}{line}\n")));
        assert_eq!(Change::between(&served, &served), Change::Unchanged);
        let change = Change::between(&served, &wanted);
        let back = Change::between(&wanted, &served);
        assert_eq!(change.keys(), back.keys());
        change
    }

    const DISK: &str = "[[blk]]\nname = \"a\"\nimage = \"a.img\"\nsocket = \"a\"\n";
    const CARD: &str = "[[net]]\nname = \"a\"\ntap = \"tap0\"\nsocket = \"a\"\nmac = \"52:54:00:00:00:01\"\n";

    #[test]
    fn limits_and_what_is_observed_change_in_place() {
        for (line, keys) in [
            ("bytes-per-second = \"1M\"", vec!["bytes-per-second"]),
            ("ops-per-second = 5\nburst-ops = 9", vec!["ops-per-second"]),
            ("slow = \"9ms\"", vec!["slow"]),
            ("on-full = \"error\"", vec!["on-full"]),
            ("poll-us = 7", vec!["poll-us"]),
            ("poll-us = 0", vec!["poll-us"]),
            ("latencies = \"off\"", vec!["latencies"]),
            ("poll-us = 0\nslow = \"9ms\"", vec!["poll-us", "slow"]),
        ] {
            assert_eq!(by(DISK, line), Change::InPlace(keys), "{line}");
        }
        assert_eq!(by(CARD, "ops-per-second = 5"), Change::InPlace(vec!["ops-per-second"]));
        let limited = |burst| format!("{CARD}ops-per-second = 5\nburst-ops = {burst}\n");
        let change = Change::between(&spec(&limited(1)), &spec(&limited(2)));
        assert_eq!(change, Change::InPlace(vec!["burst-ops"]));
        assert_eq!(by("[[rng]]\nname = \"r\"\nsocket = \"r\"\n", "poll-us = 0").keys(), ["poll-us"]);
    }

    #[test]
    fn what_is_opened_needs_a_restart() {
        for (line, keys) in [
            ("workers = 2", vec!["workers"]),
            ("no-packed = true", vec!["no-packed"]),
            ("read-only = true", vec!["read-only"]),
            ("direct = true", vec!["direct"]),
            ("serial = \"x\"", vec!["serial"]),
            ("queues = 2\nslow = \"1ms\"", vec!["queues", "slow"]),
            ("engine = \"threads\"", vec!["engine"]),
            ("queue-size = 64", vec!["queue-size"]),
        ] {
            assert_eq!(by(DISK, line), Change::Restart { keys, ends_session: false }, "{line}");
        }
        assert_eq!(by(CARD, "mtu = 9000"), Change::Restart { keys: vec!["mtu"], ends_session: false });
        // A thread that never polls a server must not begin to.
        let store = DISK.replace("a.img", "nbd://host/x");
        assert_eq!(by(&store, "poll-us = 0"), Change::Restart { keys: vec!["poll-us"], ends_session: false });
        assert_eq!(by(&store, "poll-us = 7"), Change::InPlace(vec!["poll-us"]));
    }

    #[test]
    fn another_image_network_or_socket_ends_the_session() {
        let ends = |keys: &[&'static str]| Change::Restart { keys: keys.to_vec(), ends_session: true };
        let other = |from: &str, to: &str| DISK.replace(from, to);
        assert_eq!(Change::between(&spec(DISK), &spec(&other("a.img", "b.img"))), ends(&["image"]));
        assert_eq!(
            Change::between(&spec(DISK), &spec(&other("socket = \"a\"", "socket = \"b\""))),
            ends(&["socket"])
        );
        assert_eq!(Change::between(&spec(CARD), &spec(&CARD.replace("tap0", "tap1"))), ends(&["tap"]));
        let echo = CARD.replace("tap = \"tap0\"", "echo = true");
        assert_eq!(Change::between(&spec(CARD), &spec(&echo)), ends(&["echo"]));
        assert_eq!(Change::between(&spec(DISK), &spec(CARD)), ends(&["kind"]));
    }
}
