//! Cost of a run for the host: CPU time and memory.
use paravane_dma::Region;
use rustix::time::{ClockId, clock_gettime};

/// CPU time of all threads in seconds: user (with guest) and system.
pub(crate) fn cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// Resident memory in bytes without guest RAM; 0 if the kernel hides it.
pub(crate) fn resident_beyond(region: &Region) -> u64 {
    let start = region.host().as_ptr() as u64;
    std::fs::read_to_string("/proc/self/smaps")
        .map(|smaps| resident_outside(&smaps, start, start + region.size()))
        .unwrap_or(0)
}

fn resident_outside(smaps: &str, start: u64, end: u64) -> u64 {
    let mut counted = true;
    let mut sum = 0;
    for line in smaps.lines() {
        if let Some((first, last)) = mapping(line) {
            counted = first < start || last > end;
        } else if counted && let Some(rss) = line.strip_prefix("Rss:") {
            let kib = rss.trim().trim_end_matches(" kB").parse::<u64>().unwrap_or(0);
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
    fn guest_memory_is_left_out() {
        let smaps = "1000-2000 r-xp 0 00:00 1 /bin/a\nSize: 4 kB\nRss:                4 kB\n\
                     10000-20000 rw-s 0 00:00 1 /memfd:ram\nRss:               64 kB\n\
                     20000-21000 rw-p 0 00:00 0 [heap]\nRss:                8 kB\nVmFlags: rd wr\n";
        assert_eq!(resident_outside(smaps, 0x10000, 0x20000), 12 << 10);
    }

    #[test]
    fn time_is_spent() {
        assert!(cpu_seconds() > 0.0);
    }
}
