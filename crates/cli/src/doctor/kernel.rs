//! What the kernel and the limits of this user offer devices.
use super::Finding;
use paravane_dma::MemInfo;
use rustix::process::{Resource, getrlimit};
use std::fs::OpenOptions;
use std::io::ErrorKind;

/// Enough locked memory in bytes.
///
/// For the io_uring rings and registered buffers of a small guest.
const ENOUGH_MEMLOCK: u64 = 64 << 20;

/// Checks everything that devices use of the kernel.
pub(super) fn examine() -> Vec<Finding> {
    let meminfo = MemInfo::read();
    let transparent = |name| {
        std::fs::read_to_string(format!("/sys/kernel/mm/transparent_hugepage/{name}")).unwrap_or_default()
    };
    vec![
        device_file(
            "vhost-net",
            "/dev/vhost-net",
            "modprobe vhost_net; without it, vhost=on has no effect and this process serves the queues",
        ),
        device_file("tun", "/dev/net/tun", "modprobe tun; in a container, pass the device in"),
        transparent_hugepages(&transparent("enabled")),
        hugepages(&meminfo),
        shared_hugepages(&meminfo, &transparent("shmem_enabled")),
        io_uring(),
        memlock(),
        postcopy(),
    ]
}

/// Checks that a device file can be opened.
///
/// Opening these files has no side effects.
fn device_file(name: &'static str, path: &'static str, remedy: &'static str) -> Finding {
    match OpenOptions::new().read(true).write(true).open(path) {
        Ok(_) => Finding::ok(name, path),
        Err(error) => match error.kind() {
            ErrorKind::NotFound => Finding::missing(name, format!("{path} does not exist"), remedy),
            ErrorKind::PermissionDenied => Finding::missing(
                name,
                format!("no permission to open {path}"),
                "run as root, or add your user to the group that owns the file",
            ),
            _ => Finding::missing(name, format!("cannot open {path}: {error}"), remedy),
        },
    }
}

/// The bracketed choice of a line such as `always [madvise] never`.
fn chosen(line: &str) -> &str {
    line.split_once('[').and_then(|(_, rest)| rest.split_once(']')).map_or("unknown", |(word, _)| word)
}

/// Huge pages for memory of one process, which need no reservation.
fn transparent_hugepages(enabled: &str) -> Finding {
    let (name, mode) = ("transparent hugepages", chosen(enabled));
    match mode {
        "always" | "madvise" => {
            Finding::ok(name, format!("{mode}: `paravane run` gets 2 MiB pages without set-up"))
        }
        _ => Finding::warn(
            name,
            format!("{mode}: guest memory of `paravane run` has 4 KiB pages"),
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled; or reserve pages (vm.nr_hugepages) and give \
             --hugepages",
        ),
    }
}

fn hugepages(meminfo: &MemInfo) -> Finding {
    let (Some(total), Some(free), Some(kib)) =
        (meminfo.get("HugePages_Total"), meminfo.get("HugePages_Free"), meminfo.get("Hugepagesize"))
    else {
        return Finding::missing(
            "hugepages",
            "not supported by this kernel",
            "for --hugepages, use a host kernel with CONFIG_HUGETLBFS",
        );
    };
    let mib = kib >> 10;
    let found = format!("{free} of {total} pages of {mib} MiB free");
    if free > 0 {
        return Finding::ok("hugepages", found);
    }
    let pages = 128_u64.div_ceil(mib.max(1));
    let remedy = format!("for --hugepages, sysctl vm.nr_hugepages={pages} (enough for a guest of 128 MiB)");
    Finding::warn("hugepages", found, remedy)
}

/// Huge pages for memory that a VMM shares: transparent (memfd) or hugetlb.
fn shared_hugepages(meminfo: &MemInfo, thp: &str) -> Finding {
    let name = "shared hugepages";
    let mode = chosen(thp);
    let free = meminfo.get("HugePages_Free").unwrap_or(0);
    let mib = meminfo.get("Hugepagesize").unwrap_or(0) >> 10;
    let found = format!("transparent huge pages for shared memory: {mode}; {free} pages of {mib} MiB free");
    match mode {
        "always" | "within_size" | "advise" | "force" => Finding::ok(name, found),
        _ if free > 0 => Finding::ok(name, found),
        _ => Finding::warn(
            name,
            format!("{found}: guest memory has 4 KiB pages"),
            "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled; or reserve pages (vm.nr_hugepages) and \
             give QEMU's memory-backend-memfd hugetlb=on",
        ),
    }
}

fn io_uring() -> Finding {
    match paravane_device::blk::io_uring_registers_vectors() {
        Ok(true) => Finding::ok("io_uring", "available, with registered buffers of several pieces"),
        Ok(false) => Finding::ok(
            "io_uring",
            "available; with --registered-buffers, requests of several pieces are copied (Linux 6.15 avoids it)",
        ),
        Err(error) => Finding::warn(
            "io_uring",
            format!("not available ({error}): disks use threads"),
            "sysctl kernel.io_uring_disabled=0; in a container, allow it in the seccomp profile",
        ),
    }
}

fn memlock() -> Finding {
    match getrlimit(Resource::Memlock).current {
        None => Finding::ok("memlock", "unlimited"),
        Some(bytes) if bytes >= ENOUGH_MEMLOCK => Finding::ok("memlock", format!("{} MiB", bytes >> 20)),
        Some(bytes) => Finding::warn(
            "memlock",
            format!("limit of {} KiB", bytes >> 10),
            "raise it to 64 MiB or more for --registered-buffers and large io_uring queues (ulimit -l, LimitMEMLOCK=)",
        ),
    }
}

/// Why postcopy migration is not offered to VMMs, on this host.
fn postcopy() -> Finding {
    let sysctl = std::fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd").unwrap_or_default();
    // Opening the device makes no userfaultfd.
    let device = || OpenOptions::new().read(true).write(true).open("/dev/userfaultfd").is_ok();
    let why = if sysctl.trim() == "1" || device() {
        "the protocol excludes it with CONFIGURE_MEM_SLOTS"
    } else {
        "userfaultfd does not cover accesses of the kernel here (io_uring, preadv)"
    };
    Finding::ok("postcopy", format!("not offered, migrate by precopy: {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Level;

    const MEMINFO: &str = "MemTotal:       24000000 kB\nHugePages_Total:     512\nHugePages_Free:      0\n\
                           Hugepagesize:       2048 kB\n";

    fn host(text: &str) -> MemInfo {
        MemInfo::from_text(text)
    }

    #[test]
    fn all_of_it_is_found() {
        let findings = examine();
        for name in [
            "vhost-net",
            "tun",
            "transparent hugepages",
            "hugepages",
            "shared hugepages",
            "io_uring",
            "memlock",
            "postcopy",
        ] {
            assert!(findings.iter().any(|finding| finding.name == name), "{name}");
        }
    }

    #[test]
    fn hugepages_are_counted() {
        let none_free = hugepages(&host(MEMINFO));
        assert_eq!(none_free.level, Level::Warn);
        assert_eq!(none_free.found, "0 of 512 pages of 2 MiB free");
        assert!(none_free.remedy.contains("vm.nr_hugepages=64"));
        let some = MEMINFO.replace("HugePages_Free:      0", "HugePages_Free:      3");
        assert_eq!(hugepages(&host(&some)).level, Level::Ok);
        assert_eq!(hugepages(&host("")).level, Level::Missing);
    }

    #[test]
    fn a_host_without_transparent_huge_pages_gets_a_remedy() {
        for mode in ["always", "madvise"] {
            assert_eq!(transparent_hugepages(&format!("never [{mode}]")).level, Level::Ok, "{mode}");
        }
        for mode in ["always madvise [never]", ""] {
            let found = transparent_hugepages(mode);
            assert_eq!(found.level, Level::Warn, "{mode}");
            assert!(found.remedy.contains("transparent_hugepage/enabled"));
        }
    }

    #[test]
    fn shared_memory_has_huge_pages_of_either_kind() {
        for mode in ["always", "within_size", "advise"] {
            let line = format!("never [{mode}] deny");
            assert_eq!(shared_hugepages(&host(MEMINFO), &line).level, Level::Ok, "{mode}");
        }
        assert_eq!(shared_hugepages(&host(MEMINFO), "always [never] deny").level, Level::Warn);
        let some = MEMINFO.replace("HugePages_Free:      0", "HugePages_Free:      3");
        assert_eq!(shared_hugepages(&host(&some), "always [never] deny").level, Level::Ok);
    }

    #[test]
    fn a_missing_device_is_told_from_a_forbidden_one() {
        let missing = device_file("tun", "/nonexistent/tun", "modprobe tun");
        assert_eq!((missing.level, missing.remedy.as_str()), (Level::Missing, "modprobe tun"));
        assert_eq!(device_file("tun", "/dev/null", "none").level, Level::Ok);
    }
}
