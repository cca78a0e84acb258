//! Requests as lines of text.
use crate::printable::printable;
use crate::serve::status::latency::short_duration;
use crate::serve::trace::lines::TraceLine;
use std::time::{Duration, SystemTime};

/// The first line.
pub(super) const HEADER: &str =
    "TIME              Q  OPERATION         SECTOR    SIZE   RING THROTTLED   HOST INTERRUPT  TOTAL\n";

/// One request.
pub(super) fn row(line: &TraceLine) -> String {
    let sector = line.sector.map_or_else(|| "-".to_owned(), |sector| sector.to_string());
    let [ring, throttled, host, interrupt] = line.stages().map(|(_, time)| short_duration(time));
    let status = match line.status {
        0 => String::new(),
        1 => "  I/O error".to_owned(),
        2 => "  not supported".to_owned(),
        status => format!("  status {status}"),
    };
    format!(
        "{} {:>3}  {:12} {sector:>11} {:>7} {ring:>6} {throttled:>9} {host:>6} {interrupt:>9} {:>6}{status}\n",
        time(line.end_unix_ns),
        line.queue,
        printable(&line.operation.chars().take(12).collect::<String>()),
        line.bytes,
        short_duration(line.total_ns)
    )
}

/// Time of day with microseconds.
fn time(unix_ns: u64) -> String {
    let at = SystemTime::UNIX_EPOCH.checked_add(Duration::from_nanos(unix_ns));
    let text = at.map(|at| humantime::format_rfc3339_micros(at).to_string()).unwrap_or_default();
    // "2026-01-02T03:04:05.678901Z"
    text.get(11..26).unwrap_or("-").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_below_their_names() {
        let mut line = TraceLine {
            end_unix_ns: 1_700_000_000_123_456_789,
            queue: 1,
            head: 9,
            operation: "write_zeroes".into(),
            sector: Some(12_345_678),
            bytes: 4096,
            status: 0,
            ring_ns: 12_000,
            throttled_ns: 150_000_000,
            host_ns: 1_200_000,
            interrupt_ns: 900,
            total_ns: 151_212_900,
        };
        let expected = "\
TIME              Q  OPERATION         SECTOR    SIZE   RING THROTTLED   HOST INTERRUPT  TOTAL
22:13:20.123456   1  write_zeroes    12345678    4096   12µs     150ms  1.2ms     900ns  151ms
";
        assert_eq!(HEADER.to_owned() + &row(&line), expected);
        (line.status, line.sector, line.operation) = (1, None, "fl\x1bsh".into());
        assert!(row(&line).contains("  fl?sh                  -    4096 "), "{}", row(&line));
        assert!(row(&line).ends_with("151ms  I/O error\n"));
        assert_eq!(time(u64::MAX).len(), 15);
    }
}
