//! Latencies in the report of the program.
use crate::daemon::{Daemon, Folder, status};
use crate::driver::{Driver, Random, Wish};
use serde_json::Value;

/// Serves 200 requests, and returns the report of the queue.
fn queue(more: &[&str]) -> Value {
    let folder = Folder::new();
    let (image, socket, control) = (folder.image("vm.img"), folder.text("s"), folder.text("control"));
    let arguments = ["blk", "--image", &image, "--socket", &socket, "--control", &control];
    let daemon = Daemon::start(&[&arguments[..], more].concat());
    let wish = Wish { packed: false, event_idx: true, queues: 1, depth: 4 };
    let mut driver = Driver::connect(&folder.path("s"), wish).unwrap();
    driver.exercise(&mut std::fs::read(&image).unwrap(), 200, &mut Random::new(6));
    drop(driver);
    let device = loop {
        let report = status(&control);
        if report["devices"][0]["connected"] == false {
            break report["devices"][0].clone();
        }
        std::thread::yield_now();
    };
    let (ended, log) = daemon.end();
    assert!(ended.success(), "{log:?}");
    device["queues"][0].clone()
}

#[test]
fn the_report_has_the_latencies_of_each_operation_and_stage() {
    let queue = queue(&["--ops-per-second", "100000"]);
    let number = |value: &Value| value.as_u64().unwrap();
    assert_eq!(number(&queue["completed"]), 200);
    let check = |latency: &Value| {
        let buckets = latency["buckets"].as_array().unwrap();
        let counts = buckets.iter().map(|bucket| number(&bucket[1]));
        assert_eq!(counts.sum::<u64>(), number(&latency["count"]));
        let values = ["p50", "p99", "p999", "max"].map(|name| number(&latency[name]));
        assert!(values.is_sorted() && number(&latency["sum"]) >= values[3], "{latency}");
        number(&latency["count"])
    };
    let list = |name: &str| queue[name].as_array().unwrap().clone();
    assert_eq!(list("operations").iter().map(|operation| check(&operation["latency"])).sum::<u64>(), 200);
    assert_eq!(list("operations")[0]["operation"], "read");
    for stage in ["ring", "host", "interrupt"] {
        let of = list("stages").into_iter().find(|other| other["stage"] == stage).unwrap();
        assert_eq!(check(&of["latency"]), 200, "{stage}");
    }
    assert_eq!(check(&queue["batch"]), check(&queue["depth"]));
    assert_eq!(number(&queue["batch"]["sum"]), 200);
}

#[test]
fn latencies_can_be_turned_off() {
    let queue = queue(&["--latencies", "off"]);
    assert_eq!(queue["completed"], 200);
    assert_eq!(queue["operations"], Value::Array(Vec::new()));
    assert_eq!((&queue["batch"], &queue["stages"]), (&Value::Null, &Value::Array(Vec::new())));
}
