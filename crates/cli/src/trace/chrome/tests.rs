use super::*;

fn line(queue: u16, end_unix_ns: u64, [ring_ns, throttled_ns, host_ns, interrupt_ns]: [u64; 4]) -> TraceLine {
    TraceLine {
        end_unix_ns,
        queue,
        head: 3,
        operation: "read".into(),
        sector: Some(8),
        bytes: 512,
        status: 0,
        ring_ns,
        throttled_ns,
        host_ns,
        interrupt_ns,
        total_ns: ring_ns + throttled_ns + host_ns + interrupt_ns,
    }
}

fn written(lines: Vec<TraceLine>) -> Value {
    let mut out = Vec::new();
    write(&mut out, "vm0", 7, lines).unwrap();
    serde_json::from_slice(&out).unwrap()
}

/// The format's required fields, and events that nest on each track.
fn check(trace: &Value) -> usize {
    let mut tracks: BTreeMap<u64, Vec<(f64, f64)>> = BTreeMap::new();
    let mut count = 0;
    for event in trace["traceEvents"].as_array().unwrap() {
        let tid = event["tid"].as_u64().unwrap();
        assert!(event["name"].is_string() && event["pid"].is_u64() && event["args"].is_object(), "{event}");
        match event["ph"].as_str().unwrap() {
            "M" => assert!(event["args"]["name"].is_string(), "{event}"),
            "X" => {
                let (ts, dur) = (event["ts"].as_f64().unwrap(), event["dur"].as_f64().unwrap());
                assert!(event["cat"].is_string() && ts >= 0.0 && dur >= 0.0, "{event}");
                count += usize::from(event["cat"] == "request");
                let open = tracks.entry(tid).or_default();
                open.retain(|(_, end)| *end > ts + 0.000_5);
                assert!(open.iter().all(|(_, end)| ts + dur <= end + 0.000_5), "{event} crosses {open:?}");
                open.push((ts, ts + dur));
            }
            other => panic!("{other}"),
        }
    }
    count
}

#[test]
fn requests_that_overlap_are_on_tracks_of_their_own() {
    let trace = written(vec![
        line(0, 10_000, [1000, 0, 3000, 500]),
        line(0, 11_000, [1000, 500, 3000, 500]),
        line(0, 15_000, [0, 0, 3000, 0]),
        line(1, 15_000, [0, 0, 3000, 0]),
    ]);
    assert_eq!(check(&trace), 4);
    let names = trace["traceEvents"].as_array().unwrap().iter().filter(|event| event["ph"] == "M");
    let names: Vec<_> = names.map(|event| event["args"]["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["paravane vm0", "queue 0 lane 0", "queue 0 lane 1", "queue 1 lane 0"]);
    let stages = trace["traceEvents"].as_array().unwrap().iter().filter(|event| event["cat"] == "stage");
    assert_eq!(stages.count(), 3 + 4 + 1 + 1);
}

#[test]
fn a_trace_may_be_empty_or_nonsense() {
    assert_eq!(check(&written(Vec::new())), 0);
    let mut wrong = line(0, 5, [1, 2, 3, 4]);
    (wrong.total_ns, wrong.host_ns) = (u64::MAX, u64::MAX);
    assert_eq!(check(&written(vec![wrong, line(0, 9, [0; 4])])), 2);
}
