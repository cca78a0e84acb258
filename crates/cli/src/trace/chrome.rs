//! Requests as a Chrome trace: JSON for ui.perfetto.dev and chrome://tracing.
//!
//! Format: "Trace Event Format", a public document of the Chromium project. Requests overlap, and
//! events of one track must nest. So each queue has as many tracks ("lanes") as it had requests at
//! a time; each request is a complete event (X) there, and its stages are events within it.
use crate::serve::trace::lines::TraceLine;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::{self, Write};

/// Lanes of one queue; a queue has at most 32768 requests.
const LANES: u64 = 1 << 16;

/// Writes the requests of one device.
pub(super) fn write(
    out: &mut impl Write,
    device: &str,
    pid: u32,
    mut lines: Vec<TraceLine>,
) -> io::Result<()> {
    let start = |line: &TraceLine| line.end_unix_ns.saturating_sub(line.total_ns);
    lines.sort_by_key(start);
    let first = lines.first().map_or(0, start);
    // Of each lane of a queue, the end of its last request.
    let mut queues: BTreeMap<u16, Vec<u64>> = BTreeMap::new();
    let mut events = vec![json!({
        "ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": format!("paravane {device}")},
    })];
    for line in &lines {
        let lanes = queues.entry(line.queue).or_default();
        let from = start(line);
        let lane = lanes.iter().position(|end| *end <= from).unwrap_or(lanes.len());
        let tid = u64::from(line.queue) * LANES + lane as u64 + 1;
        if lane == lanes.len() {
            lanes.push(0);
            let name = format!("queue {} lane {lane}", line.queue);
            events.push(
                json!({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}),
            );
        }
        lanes[lane] = line.end_unix_ns;
        let complete = |name: &str, category: &str, at: u64, time: u64, args: Value| {
            json!({
                "ph": "X", "name": name, "cat": category, "pid": pid, "tid": tid,
                "ts": micros(at - first), "dur": micros(time), "args": args,
            })
        };
        let args = json!({
            "queue": line.queue, "head": line.head, "sector": line.sector, "bytes": line.bytes,
            "status": line.status, "end_unix_ns": line.end_unix_ns,
        });
        // Sums that saturated do not nest; a daemon does not send them.
        events.push(complete(&line.operation, "request", from, line.end_unix_ns - from, args));
        let mut at = from;
        for (stage, time) in line.stages() {
            let time = time.min(line.end_unix_ns - at);
            if time > 0 {
                events.push(complete(stage, "stage", at, time, json!({})));
            }
            at += time;
        }
    }
    out.write_all(b"{\"displayTimeUnit\":\"ns\",\"traceEvents\":[")?;
    let mut separator = "\n";
    for event in events {
        write!(out, "{separator}{event}")?;
        separator = ",\n";
    }
    out.write_all(b"\n]}\n")
}

/// Microseconds, as the format has them; exact for a trace of years.
fn micros(ns: u64) -> f64 {
    ns as f64 / 1000.0
}

#[cfg(test)]
mod tests;
