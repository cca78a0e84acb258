//! What a new specification changes of a device that is served.
//!
//! | change | what becomes of the device |
//! |---|---|
//! | in place | it goes on, requests in flight included |
//! | restart | it is opened again; its session goes on if the guest would find the same device |
//! | restart, of what the guest is connected to | it is opened again, and its client has to reconnect |
use super::super::spec::DeviceSpec;
use crate::kinds::changes::{Change, Effect};

impl Change {
    /// What becomes of a device that is `served` by a file that has it as `wanted`.
    pub(crate) fn between(served: &DeviceSpec, wanted: &DeviceSpec) -> Self {
        let mut all = Self::default();
        // A new setting has to be named here.
        let DeviceSpec { name, endpoint, workers, longest_poll, latencies, packed, kind } = served;
        all.add("name", Effect::Session, *name != wanted.name);
        all.add("socket", Effect::Session, *endpoint != wanted.endpoint);
        all.add("workers", Effect::Restart, *workers != wanted.workers);
        all.add("poll-us", Effect::InPlace, *longest_poll != wanted.longest_poll);
        all.add("latencies", Effect::InPlace, *latencies != wanted.latencies);
        all.add("no-packed", Effect::Restart, *packed != wanted.packed);
        match kind.name() == wanted.kind.name() {
            true => kind.changes(&*wanted.kind, &mut all),
            false => all.add("kind", Effect::Session, true),
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serve::config::Config;
    use std::path::Path;

    fn spec(text: &str) -> DeviceSpec {
        Config::parse(Path::new("/d.toml"), text).unwrap().devices.remove(0)
    }

    fn change(effect: Effect, keys: Vec<&'static str>) -> Change {
        Change { keys, effect: Some(effect) }
    }

    /// The change by a line that is added to a device.
    fn by(device: &str, line: &str) -> Change {
        let (served, wanted) = (spec(device), spec(&format!("{device}{line}\n")));
        assert_eq!(Change::between(&served, &served), Change::default());
        let change = Change::between(&served, &wanted);
        let back = Change::between(&wanted, &served);
        assert_eq!(change.keys, back.keys);
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
            assert_eq!(by(DISK, line), change(Effect::InPlace, keys), "{line}");
        }
        assert_eq!(by(CARD, "ops-per-second = 5"), change(Effect::InPlace, vec!["ops-per-second"]));
        let limited = |burst| format!("{CARD}ops-per-second = 5\nburst-ops = {burst}\n");
        let burst = Change::between(&spec(&limited(1)), &spec(&limited(2)));
        assert_eq!(burst, change(Effect::InPlace, vec!["burst-ops"]));
        assert_eq!(by("[[rng]]\nname = \"r\"\nsocket = \"r\"\n", "poll-us = 0").keys, ["poll-us"]);
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
            assert_eq!(by(DISK, line), change(Effect::Restart, keys), "{line}");
        }
        assert_eq!(by(CARD, "mtu = 9000"), change(Effect::Restart, vec!["mtu"]));
        // A thread that never polls a server must not begin to.
        let store = DISK.replace("a.img", "nbd://host/x");
        assert_eq!(by(&store, "poll-us = 0"), change(Effect::Restart, vec!["poll-us"]));
        assert_eq!(by(&store, "poll-us = 7"), change(Effect::InPlace, vec!["poll-us"]));
    }

    #[test]
    fn another_image_network_or_socket_ends_the_session() {
        let ends = |keys: &[&'static str]| change(Effect::Session, keys.to_vec());
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
