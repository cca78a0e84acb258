//! What `paravane serve` needs of any host.
use super::finding::Finding;
use crate::serve::sandbox::paths::landlock_version;
use rustix::process::{Resource, getrlimit};
use std::path::Path;

/// The version of Landlock from which the sandbox restricts all that it can.
const WHOLE_LANDLOCK: u32 = 6;
/// Descriptors of a daemon without devices, rounded up.
const DAEMON_FDS: u64 = 32;
/// Descriptors of a device with one queue and its VMM, rounded up.
const DEVICE_FDS: u64 = 32;
/// Devices that a host should have descriptors for.
const SOME_DEVICES: u64 = 100;

pub(super) fn landlock() -> Finding {
    landlock_of(landlock_version())
}

fn landlock_of(version: std::io::Result<u32>) -> Finding {
    let name = "landlock";
    let version = match version {
        Ok(version) => version,
        Err(error) => {
            let remedy = match error.raw_os_error() {
                Some(libc::EOPNOTSUPP) => "add landlock to lsm= on the command line of the kernel",
                _ => {
                    "use Linux 5.13 or later with CONFIG_SECURITY_LANDLOCK; until then, serve with --no-sandbox"
                }
            };
            return Finding::missing(name, format!("not available ({error})"), remedy);
        }
    };
    // What each version added: see landlock(7).
    let parts =
        [(4, "TCP ports"), (5, "ioctls of devices"), (WHOLE_LANDLOCK, "signals and abstract sockets")];
    let lacking: Vec<_> = parts.iter().filter(|(since, _)| version < *since).map(|(_, part)| *part).collect();
    if lacking.is_empty() {
        let found = format!("version {version}: files, ports, ioctls, signals and abstract sockets");
        return Finding::ok(name, found);
    }
    let found = format!("version {version} does not restrict {}", lacking.join(", "));
    Finding::warn(name, found, "use Linux 6.12 or later; seccomp restricts the rest of the sandbox")
}

/// RLIMIT_NOFILE as the daemon has it: it raises its limit to the maximum.
pub(super) fn descriptors() -> Option<u64> {
    getrlimit(Resource::Nofile).maximum
}

pub(super) fn nofile(limit: Option<u64>) -> Finding {
    let name = "nofile";
    let Some(limit) = limit else { return Finding::ok(name, "unlimited") };
    let devices = limit.saturating_sub(DAEMON_FDS) / DEVICE_FDS;
    let found = format!("limit of {limit}, enough for {devices} devices with one queue");
    if devices >= SOME_DEVICES {
        return Finding::ok(name, found);
    }
    Finding::warn(name, found, "raise it (ulimit -Hn, LimitNOFILE=)")
}

pub(super) fn governor() -> Finding {
    let mut policies = Vec::new();
    let entries = std::fs::read_dir("/sys/devices/system/cpu/cpufreq").into_iter().flatten();
    for entry in entries.filter_map(Result::ok) {
        let read = |name: &str| read_word(&entry.path().join(name));
        if let Some(governor) = read("scaling_governor") {
            policies.push((governor, read("scaling_driver").unwrap_or_default()));
        }
    }
    governor_of(&policies)
}

/// By governor and driver of each policy.
fn governor_of(policies: &[(String, String)]) -> Finding {
    let name = "cpu governor";
    if policies.is_empty() {
        return Finding::ok(name, "this kernel changes no frequencies");
    }
    // In these drivers the hardware chooses, and the governor is a hint.
    let by_hardware = |driver: &str| driver == "intel_pstate" || driver == "amd-pstate-epp";
    let slow = policies.iter().find(|(governor, driver)| governor != "performance" && !by_hardware(driver));
    match slow {
        None => Finding::ok(name, format!("{} ({})", policies[0].0, policies[0].1)),
        Some((governor, driver)) => Finding::warn(
            name,
            format!("{governor} ({driver}): requests after an idle time take longer"),
            "if latency matters: cpupower frequency-set -g performance",
        ),
    }
}

/// The contents of a short file of sysfs.
pub(crate) fn read_word(path: &Path) -> Option<String> {
    Some(std::fs::read_to_string(path).ok()?.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::Level;

    #[test]
    fn older_landlock_restricts_less() {
        let error = |code| landlock_of(Err(std::io::Error::from_raw_os_error(code)));
        assert!(error(libc::ENOSYS).remedy.contains("5.13"));
        assert!(error(libc::EOPNOTSUPP).remedy.contains("lsm="));
        let old = landlock_of(Ok(4));
        assert_eq!(old.level, Level::Warn);
        assert_eq!(old.found, "version 4 does not restrict ioctls of devices, signals and abstract sockets");
        assert_eq!(landlock_of(Ok(6)).level, Level::Ok);
    }

    #[test]
    fn descriptors_are_counted_in_devices() {
        assert_eq!(nofile(None).level, Level::Ok);
        let few = nofile(Some(1024));
        assert_eq!(
            (few.level, few.found.as_str()),
            (Level::Warn, "limit of 1024, enough for 31 devices with one queue")
        );
        assert_eq!(nofile(Some(65536)).level, Level::Ok);
    }

    #[test]
    fn governors_that_the_kernel_runs_slow_down() {
        let of = |governor: &str, driver: &str| governor_of(&[(governor.into(), driver.into())]).level;
        assert_eq!(governor_of(&[]).level, Level::Ok);
        assert_eq!(of("performance", "acpi-cpufreq"), Level::Ok);
        assert_eq!(of("powersave", "intel_pstate"), Level::Ok);
        assert_eq!(of("schedutil", "acpi-cpufreq"), Level::Warn);
    }
}
