//! Cost of a run for the host: CPU time and memory.
use paravane_dma::Region;
use rustix::time::{ClockId, clock_gettime};
use std::ops::Range;

/// CPU time of all threads in seconds: user (with guest) and system.
pub(crate) fn cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// Seconds of a clock that is not set.
pub(crate) fn clock_seconds() -> f64 {
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// CPU time of the calling thread in nanoseconds.
pub(crate) fn thread_ns() -> u64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec.unsigned_abs() * 1_000_000_000 + time.tv_nsec.unsigned_abs()
}

/// Resident memory in bytes without guest RAM; 0 if the kernel hides it.
pub(crate) fn resident_beyond(region: &Region) -> u64 {
    sum(&smaps(), range(region), false, &["Rss"])
}

/// Resident bytes of guest RAM, and bytes of it in huge pages; 0 if the kernel hides them.
pub(crate) fn guest_memory(region: &Region) -> (u64, u64) {
    let smaps = smaps();
    let sum = |fields: &[&str]| sum(&smaps, range(region), true, fields);
    // Pages of the pool do not count as resident.
    let pool = sum(&["Shared_Hugetlb", "Private_Hugetlb"]);
    (sum(&["Rss"]) + pool, sum(&["AnonHugePages", "ShmemPmdMapped"]) + pool)
}

fn smaps() -> String {
    std::fs::read_to_string("/proc/self/smaps").unwrap_or_default()
}

/// Addresses of guest RAM in this process.
fn range(region: &Region) -> Range<u64> {
    let start = region.host().as_ptr() as u64;
    start..start + region.size()
}

/// Sums fields of mappings, of those in `ram` or of all others, in bytes.
fn sum(smaps: &str, ram: Range<u64>, inside: bool, fields: &[&str]) -> u64 {
    let mut counted = !inside;
    let mut sum = 0;
    for line in smaps.lines() {
        if let Some((first, last)) = mapping(line) {
            counted = inside == (first >= ram.start && last <= ram.end);
        } else if counted
            && let Some((name, value)) = line.split_once(':')
            && fields.contains(&name)
        {
            let kib = value.trim().trim_end_matches(" kB").parse::<u64>().unwrap_or(0);
            sum += kib * 1024;
        }
    }
    sum
}

/// The range in the first line of a mapping's entry.
fn mapping(line: &str) -> Option<(u64, u64)> {
    let (first, last) = line.split_ascii_whitespace().next()?.split_once('-')?;
    Some((u64::from_str_radix(first, 16).ok()?, u64::from_str_radix(last, 16).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guest_memory_is_told_from_the_rest() {
        let smaps = "1000-2000 r-xp 0 00:00 1 /bin/a\nSize: 4 kB\nRss:                4 kB\n\
                     10000-20000 rw-s 0 00:00 1 /memfd:ram\nRss:               64 kB\n\
                     AnonHugePages:     32 kB\nShmemPmdMapped:     8 kB\n\
                     20000-21000 rw-p 0 00:00 0 [heap]\nRss:                8 kB\nVmFlags: rd wr\n";
        let sum = |inside, fields: &[&str]| sum(smaps, 0x10000..0x20000, inside, fields) >> 10;
        assert_eq!(sum(false, &["Rss"]), 12);
        assert_eq!(sum(true, &["Rss"]), 64);
        assert_eq!(sum(true, &["AnonHugePages", "ShmemPmdMapped"]), 40);
    }

    #[test]
    fn time_is_spent() {
        assert!(cpu_seconds() > 0.0);
    }
}
