use super::*;
use paravane_device::blk::operation::{READ, WRITE};
use paravane_device::latency::{Operation, Request};

fn record(operation: &'static Operation, host: u64) -> RequestRecord {
    let request = Request { head: 3, sector: Some(8), bytes: 512, status: 0 };
    RequestRecord { operation, request, stages: [1, 0, host, 1] }
}

fn trace(queues: usize) -> Arc<RequestTrace> {
    RequestTrace::new(std::iter::repeat_with(Arc::default).take(queues).collect(), None)
}

/// As the queue's thread tells.
fn tell(trace: &RequestTrace, queue: u16, record: &RequestRecord) {
    let readers = trace.readers.lock();
    let of = |reader: &ReaderEnd| reader.outputs[usize::from(queue)].clone();
    let outputs = readers.list.iter().filter_map(of).collect();
    QueueObserver { queue, slow: None, outputs }.ended(record);
}

#[test]
fn readers_get_what_they_ask_for_and_leave_nothing_behind() {
    let trace = trace(2);
    let ask = |text: &str| serde_json::from_str::<TraceRequest>(text).unwrap();
    let mut all = trace.read(&ask(r#"{"device": "vm0"}"#)).unwrap();
    let mut some = trace
        .read(&ask(
            r#"{"device": "vm0", "slower_than_ns": 100, "operations": ["write", "flush"], "queue": 1}"#,
        ))
        .unwrap();
    for queue in 0..2 {
        for (operation, host) in [(READ, 500), (WRITE, 5), (WRITE, 98)] {
            tell(&trace, queue, &record(operation, host));
        }
    }
    let mut lines = Vec::new();
    assert!(!all.take(100, &mut lines));
    assert_eq!(lines.len(), 6);
    assert!(lines.is_sorted_by_key(|line| line.end_unix_ns));
    lines.clear();
    some.take(100, &mut lines);
    assert_eq!(lines.len(), 1);
    assert_eq!((lines[0].queue, &*lines[0].operation, lines[0].total_ns), (1, "write", 100));
    drop((all, some));
    assert!(trace.readers.lock().list.is_empty());
}

#[test]
fn a_full_ring_drops_and_counts() {
    let trace = trace(1);
    let mut reader = trace.read(&TraceRequest::default()).unwrap();
    for _ in 0..ROOM + 7 {
        tell(&trace, 0, &record(READ, 5));
    }
    assert_eq!(reader.dropped(), 7);
    let mut lines = Vec::new();
    assert!(reader.take(1024, &mut lines));
    assert_eq!(lines.len(), 1024);
    assert!(!reader.has_ended());
    trace.end();
    assert!(reader.has_ended());
}

#[test]
fn invalid_requests_are_refused() {
    let trace = trace(1);
    let refused = |request: TraceRequest| trace.read(&request).unwrap_err();
    let operations = vec!["reads".to_owned()];
    let error = refused(TraceRequest { operations, ..TraceRequest::default() });
    assert!(error.contains("unknown operation \"reads\": use read, write"), "{error}");
    let error = refused(TraceRequest { device: "vm0".into(), queue: Some(1), ..TraceRequest::default() });
    assert_eq!(error, "device vm0 has no queue 1: use 0 to 0");
    assert!(trace.readers.lock().list.is_empty());
}
