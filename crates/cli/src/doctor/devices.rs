//! What the devices of a file need.
use super::finding::{Finding, Level};
use super::{host, kernel};
use crate::failure::one_line;
use crate::kinds::kind::{Descriptors, IoUring};
use crate::serve::check;
use crate::serve::config::Config;
use crate::serve::spec::DeviceSpec;

/// Descriptors of a daemon besides its devices.
const DAEMON_FDS: u64 = 32;
/// Of a device: its socket and its files.
const DEVICE_FDS: u64 = 9;
/// Of the session of a VMM, with eight memory regions.
const SESSION_FDS: u64 = 12;
/// Of a queue, with the ring of its storage.
const QUEUE_FDS: u64 = 7;
/// Of a thread.
const THREAD_FDS: u64 = 3;

/// Checks what these devices can use, and nothing else.
pub(super) fn examine(config: &Config) -> Vec<Finding> {
    let Config { daemon, devices } = config;
    let mut findings = vec![configuration(config)];
    if !daemon.no_sandbox {
        findings.push(host::landlock());
    }
    findings.push(nofile(devices, host::descriptors()));
    let of_each = || devices.iter().map(|device| (device, device.kind.io_uring()));
    let demands = of_each().find(|(_, io_uring)| *io_uring == IoUring::Only);
    let uses_io_uring = of_each().any(|(_, io_uring)| io_uring != IoUring::No);
    let has_tap = devices.iter().any(|device| device.kind.tap().is_some());
    for finding in kernel::examine() {
        match finding.name {
            "io_uring" => {
                if let (Level::Warn, Some((device, _))) = (finding.level, demands) {
                    let level = Level::Missing;
                    findings.push(Finding { level, device: Some(device.name.clone()), ..finding });
                } else if uses_io_uring {
                    findings.push(finding);
                }
            }
            "shared hugepages" => findings.push(finding),
            "tun" if has_tap => findings.push(finding),
            _ => {}
        }
    }
    for device in devices {
        let named = |finding| Finding { device: Some(device.name.clone()), ..finding };
        findings.extend(device.kind.examine().into_iter().map(named));
    }
    findings.push(host::governor());
    findings
}

fn configuration(config: &Config) -> Finding {
    let name = "configuration";
    match check::check(&config.daemon, &config.devices) {
        Ok(()) => Finding::ok(name, format!("{} devices", config.devices.len())),
        Err(error) => {
            let remedy = "create it, or change the file: paravane serve --config FILE --check";
            Finding::missing(name, one_line(&error), remedy)
        }
    }
}

/// Descriptors that the devices take when all have a VMM.
fn needed(devices: &[DeviceSpec]) -> u64 {
    let of = |device: &DeviceSpec| {
        let Descriptors { own, queues } = device.kind.descriptors();
        let threads = u64::from(device.workers.unwrap_or(0));
        DEVICE_FDS + SESSION_FDS + own + QUEUE_FDS * queues + THREAD_FDS * threads
    };
    DAEMON_FDS + devices.iter().map(of).sum::<u64>()
}

fn nofile(devices: &[DeviceSpec], limit: Option<u64>) -> Finding {
    let needed = needed(devices);
    let text = limit.map_or("unlimited".to_owned(), |limit| format!("limit of {limit}"));
    let found = format!("{text}; the devices take about {needed} when each has a VMM");
    match limit {
        Some(limit) if limit < needed => {
            let more = needed.next_power_of_two();
            Finding::missing("nofile", found, format!("raise it to {more} (ulimit -Hn, LimitNOFILE=)"))
        }
        _ => Finding::ok("nofile", found),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kinds::blk::spec::STORE_FDS;
    use std::path::Path;

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
    }
}
