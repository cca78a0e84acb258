//! What the devices of a file need.
use super::{Finding, Level, host, kernel};
use crate::engine::Engine;
use crate::failure::one_line;
use crate::serve;
use crate::serve::config::Config;
use crate::serve::spec::{Blk, DeviceSpec, Kind, Net, Network};
use rustix::process::{Resource, getrlimit};
use rustix::thread::CapabilitySet;
use std::path::Path;

/// Descriptors of a daemon besides its devices.
const DAEMON_FDS: u64 = 32;
/// Of a device: its socket and its files.
const DEVICE_FDS: u64 = 9;
/// Of the session of a VMM, with eight memory regions.
const SESSION_FDS: u64 = 12;
/// Of a queue, with the ring of its storage.
const QUEUE_FDS: u64 = 7;
/// And of a queue whose image is not a file: a connection of an NBD server takes most.
const STORE_FDS: u64 = 6;
/// Of a thread.
const THREAD_FDS: u64 = 3;

/// Flags of a TAP device in sysfs (linux/if_tun.h).
const IFF_TAP: u32 = 0x2;
const IFF_MULTI_QUEUE: u32 = 0x100;
/// Flag of an interface that is up (linux/if.h).
const IFF_UP: u32 = 0x1;

/// Checks what these devices can use, and nothing else.
pub(super) fn examine(config: &Config) -> Vec<Finding> {
    let Config { daemon, devices } = config;
    let mut findings = vec![configuration(config)];
    if !daemon.no_sandbox {
        findings.push(host::landlock());
    }
    findings.push(nofile(devices, host::descriptors()));
    let disks = || devices.iter().filter_map(|device| Some((device, disk(device)?)));
    let rings: Vec<_> = disks().filter(|(_, blk)| blk.engine.may_be_io_uring()).collect();
    let has_tap = devices.iter().any(|device| device.tap().is_some());
    for finding in kernel::examine() {
        match finding.name {
            "io_uring" => {
                let demands = rings.iter().find(|(_, blk)| blk.engine == Engine::IoUring);
                if let (Level::Warn, Some((device, _))) = (finding.level, demands) {
                    let level = Level::Missing;
                    findings.push(Finding { level, device: Some(device.name.clone()), ..finding });
                } else if !rings.is_empty() {
                    findings.push(finding);
                }
            }
            "shared hugepages" => findings.push(finding),
            "tun" if has_tap => findings.push(finding),
            _ => {}
        }
    }
    let limit = getrlimit(Resource::Memlock).maximum;
    let pins = disks().filter(|(_, blk)| blk.registered_buffers);
    findings.extend(pins.map(|(device, blk)| memlock(&device.name, blk.queues, limit)));
    let creates = rustix::thread::capabilities(None)
        .is_ok_and(|sets| sets.effective.contains(CapabilitySet::NET_ADMIN));
    let user = rustix::process::geteuid().as_raw();
    for device in devices {
        if let Kind::Net(Net { network: Network::Tap(tap), queues, .. }) = &device.kind {
            let tap = Tap::read(Path::new("/sys/class/net"), tap);
            findings.push(Finding { device: Some(device.name.clone()), ..tap.judge(*queues, creates, user) });
        }
    }
    findings.push(host::governor());
    findings
}

fn disk(device: &DeviceSpec) -> Option<&Blk> {
    match &device.kind {
        Kind::Blk(blk) => Some(blk),
        _ => None,
    }
}

fn configuration(config: &Config) -> Finding {
    let name = "configuration";
    match serve::check(&config.daemon, &config.devices) {
        Ok(()) => Finding::new(name, Level::Ok, format!("{} devices", config.devices.len()), ""),
        Err(error) => {
            let remedy = "create it, or change the file: paravane serve --config FILE --check";
            Finding::new(name, Level::Missing, one_line(&error), remedy)
        }
    }
}

/// Descriptors that the devices take when all have a VMM.
fn needed(devices: &[DeviceSpec]) -> u64 {
    let of = |device: &DeviceSpec| {
        let queues = match &device.kind {
            Kind::Blk(blk) => u64::from(blk.queues),
            Kind::Net(net) => 2 * u64::from(net.queues) + 1,
            Kind::Rng => 1,
        };
        let store = match &device.kind {
            Kind::Blk(blk) if blk.image.path().is_none() => STORE_FDS,
            _ => 0,
        };
        // One for requests, one that says that the daemon lives.
        let images = 2 * device.images().len() as u64;
        DEVICE_FDS
            + SESSION_FDS
            + images
            + (QUEUE_FDS + store) * queues
            + THREAD_FDS * u64::from(device.workers.unwrap_or(0))
    };
    DAEMON_FDS + devices.iter().map(of).sum::<u64>()
}

fn nofile(devices: &[DeviceSpec], limit: Option<u64>) -> Finding {
    let needed = needed(devices);
    match limit {
        Some(limit) if limit < needed => Finding::new(
            "nofile",
            Level::Missing,
            format!("limit of {limit}; the devices take about {needed} when each has a VMM"),
            format!("raise it to {} (ulimit -Hn, LimitNOFILE=)", needed.next_power_of_two()),
        ),
        limit => {
            let limit = limit.map_or("unlimited".to_owned(), |limit| format!("limit of {limit}"));
            let found = format!("{limit}; the devices take about {needed} when each has a VMM");
            Finding::new("nofile", Level::Ok, found, "")
        }
    }
}

fn memlock(device: &str, queues: u16, limit: Option<u64>) -> Finding {
    let finding = match limit {
        None => Finding::new("memlock", Level::Ok, "unlimited", ""),
        Some(bytes) => Finding::new(
            "memlock",
            Level::Warn,
            format!(
                "limit of {} MiB; registered-buffers pins the memory of the VMM once for each of {queues} queues",
                bytes >> 20
            ),
            "LimitMEMLOCK=infinity, or the memory of the VMM times the queues",
        ),
    };
    Finding { device: Some(device.to_owned()), ..finding }
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
        let missing = |found: String, remedy: String| Finding::new("tap", Level::Missing, found, remedy);
        let add = format!("ip tuntap add {name} mode tap{multi} user USER");
        if !self.exists {
            return match creates {
                true => Finding::new(
                    "tap",
                    Level::Ok,
                    format!("{name} does not exist; the daemon creates it"),
                    "",
                ),
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
            return Finding::new("tap", Level::Warn, format!("{name} is down: frames are dropped"), remedy);
        }
        let kind = if flags & IFF_MULTI_QUEUE == 0 { "one queue" } else { "multi-queue" };
        Finding::new("tap", Level::Ok, format!("{name}, {kind}, up"), "")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(text: &str) -> Config {
        Config::parse(Path::new("/d.toml"), text).unwrap()
    }

    #[test]
    fn a_file_is_checked_for_what_its_devices_use() {
        let names = |text: &str| -> Vec<_> {
            let findings = examine(&config(text));
            assert!(findings.iter().all(Finding::is_documented), "{findings:?}");
            findings.into_iter().map(|finding| finding.name).collect()
        };
        let rng = names("[daemon]\nno-sandbox = true\n[[rng]]\nname = \"r\"\nsocket = \"s\"\n");
        assert_eq!(rng, ["configuration", "nofile", "shared hugepages", "cpu governor"]);
        let both = names(
            "[[blk]]\nname = \"d\"\nimage = \"i\"\nsocket = \"s\"\nregistered-buffers = true\n[[net]]\nname = \"n\"\n\
             tap = \"paravane-none\"\nsocket = \"t\"\n",
        );
        for name in ["configuration", "landlock", "nofile", "io_uring", "memlock", "tun", "tap"] {
            assert!(both.contains(&name), "{name} is not in {both:?}");
        }
        assert!(!both.contains(&"kvm") && !both.contains(&"vhost-net"), "{both:?}");
        let qcow2 = names("[[blk]]\nname = \"d\"\nimage = \"i\"\nsocket = \"s\"\nformat = \"qcow2\"\n");
        assert!(qcow2.contains(&"io_uring"), "{qcow2:?}");
    }

    #[test]
    fn descriptors_follow_from_queues_and_threads() {
        let of = |text: &str| needed(&config(text).devices);
        let one = of("[[blk]]\nname = \"d\"\nimage = \"i\"\nsocket = \"s\"\n");
        let four = of("[[blk]]\nname = \"d\"\nimage = \"i\"\nsocket = \"s\"\nqueues = 4\nworkers = 2\n");
        assert_eq!(four - one, 3 * QUEUE_FDS + 2 * THREAD_FDS);
        let two = |image: &str| {
            of(&format!("[[blk]]\nname = \"d\"\nimage = \"{image}\"\nsocket = \"s\"\nqueues = 2\n"))
        };
        // A file has two of its own.
        assert_eq!(two("nbd://host/d") + 2 - two("i"), 2 * STORE_FDS);
        assert_eq!(nofile(&[], Some(8)).level, Level::Missing);
        assert_eq!(nofile(&[], None).level, Level::Ok);
        assert_eq!(memlock("d", 4, Some(64 << 20)).level, Level::Warn);
    }

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
