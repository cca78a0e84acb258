//! What network cards need of a host.
use crate::doctor::finding::Finding;
use crate::doctor::host;
use rustix::thread::CapabilitySet;
use std::path::Path;

/// Flags of a TAP device in sysfs (linux/if_tun.h).
const IFF_TAP: u32 = 0x2;
const IFF_MULTI_QUEUE: u32 = 0x100;
/// Flag of an interface that is up (linux/if.h).
const IFF_UP: u32 = 0x1;

/// Whether this process can use a TAP device with `queues` queue pairs.
pub(super) fn tap(name: &str, queues: u16) -> Finding {
    let creates = rustix::thread::capabilities(None)
        .is_ok_and(|sets| sets.effective.contains(CapabilitySet::NET_ADMIN));
    let user = rustix::process::geteuid().as_raw();
    Tap::read(Path::new("/sys/class/net"), name).judge(queues, creates, user)
}

/// A TAP device in sysfs.
#[derive(Debug)]
struct Tap<'a> {
    name: &'a str,
    exists: bool,
    /// `None`: no TAP device.
    tun_flags: Option<u32>,
    flags: u32,
    /// `None`: any user may open it.
    owner: Option<u32>,
}

impl<'a> Tap<'a> {
    fn read(interfaces: &Path, name: &'a str) -> Self {
        let folder = interfaces.join(name);
        let word = |file: &str| host::read_word(&folder.join(file));
        let flags = |file: &str| u32::from_str_radix(word(file)?.trim_start_matches("0x"), 16).ok();
        Self {
            name,
            exists: folder.exists(),
            tun_flags: flags("tun_flags"),
            flags: flags("flags").unwrap_or(0),
            owner: word("owner").and_then(|owner| owner.parse().ok()),
        }
    }

    /// `creates`: this process has CAP_NET_ADMIN.
    fn judge(&self, queues: u16, creates: bool, user: u32) -> Finding {
        let (name, multi) = (self.name, if queues > 1 { " multi_queue" } else { "" });
        let missing = |found: String, remedy: String| Finding::missing("tap", found, remedy);
        let add = format!("ip tuntap add {name} mode tap{multi} user USER");
        if !self.exists {
            return match creates {
                true => Finding::ok("tap", format!("{name} does not exist; the daemon creates it")),
                false => missing(format!("{name} does not exist, and creating it needs CAP_NET_ADMIN"), add),
            };
        }
        let Some(flags) = self.tun_flags.filter(|flags| flags & IFF_TAP != 0) else {
            return missing(format!("{name} is not a TAP device"), "use another name".to_owned());
        };
        if queues > 1 && flags & IFF_MULTI_QUEUE == 0 {
            let remedy = format!("ip tuntap del {name} mode tap; {add}; or set queues = 1");
            return missing(format!("{name} has one queue; the card has {queues} pairs"), remedy);
        }
        if !creates && self.owner.is_some_and(|owner| owner != user) {
            let remedy = format!("ip tuntap del {name} mode tap; {add}");
            return missing(format!("{name} belongs to another user than {user}"), remedy);
        }
        if self.flags & IFF_UP == 0 {
            let remedy = format!("ip link set {name} up");
            return Finding::warn("tap", format!("{name} is down: frames are dropped"), remedy);
        }
        let kind = if flags & IFF_MULTI_QUEUE == 0 { "one queue" } else { "multi-queue" };
        Finding::ok("tap", format!("{name}, {kind}, up"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::Level;

    #[test]
    fn a_tap_device_is_judged_by_its_flags() {
        let folder = tempfile::tempdir().unwrap();
        let make = |name: &str, tun: &str, flags: &str| {
            let tap = folder.path().join(name);
            std::fs::create_dir(&tap).unwrap();
            for (file, text) in [("tun_flags", tun), ("flags", flags), ("owner", "1000")] {
                if !text.is_empty() {
                    std::fs::write(tap.join(file), format!("{text}\n")).unwrap();
                }
            }
        };
        make("tap0", "0x1002", "0x1003");
        make("tap1", "0x1102", "0x1002");
        make("eth0", "", "0x1003");
        let judge = |name: &str, queues, creates, user| {
            let finding = Tap::read(folder.path(), name).judge(queues, creates, user);
            assert_eq!(finding.remedy.is_empty(), finding.level == Level::Ok, "{finding:?}");
            (finding.level, finding.found)
        };
        assert_eq!(judge("tap0", 1, false, 1000), (Level::Ok, "tap0, one queue, up".into()));
        assert_eq!(judge("tap0", 2, true, 0).0, Level::Missing);
        assert_eq!(judge("tap0", 1, false, 1001).0, Level::Missing);
        assert_eq!(judge("tap1", 2, true, 0), (Level::Warn, "tap1 is down: frames are dropped".into()));
        assert_eq!(judge("eth0", 1, true, 0), (Level::Missing, "eth0 is not a TAP device".into()));
        assert_eq!((judge("none", 1, true, 0).0, judge("none", 1, false, 0).0), (Level::Ok, Level::Missing));
    }
}
