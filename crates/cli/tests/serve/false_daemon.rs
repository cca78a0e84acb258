//! Commands that ask a daemon which a guest has taken over.
use crate::daemon::{Daemon, Folder, paravane, patience};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::Output;
use std::time::{Duration, Instant};

/// Colours, sets the title, goes to the start of the line, and turns the direction.
const EVIL: &str = "x\u{1b}[31mEVIL\u{1b}]0;owned\u{7}\r\n\u{9b}\u{202e}y";

/// Appends [`EVIL`] to all strings but those that commands look for.
fn poison(value: &mut Value) {
    match value {
        Value::Object(map) => map.values_mut().for_each(poison),
        Value::Array(list) => list.iter_mut().for_each(poison),
        Value::String(text) if !["a", "blk"].contains(&&**text) => text.push_str(EVIL),
        _ => {}
    }
}

/// A daemon that answers each client by a function.
fn answering(folder: &Folder, name: &str, answer: impl Fn(UnixStream) + Clone + Send + 'static) -> String {
    let listener = UnixListener::bind(folder.path(name)).unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let answer = answer.clone();
            std::thread::spawn(move || answer(stream));
        }
    });
    folder.text(name)
}

fn run(control: &str, arguments: &[&str]) -> Output {
    paravane().args(arguments).args(["--control", control]).output().unwrap()
}

/// Neither output has anything that controls a terminal, and one has the harmless part.
fn assert_harmless(output: &Output) {
    let mut found = false;
    for text in [&output.stdout, &output.stderr] {
        let text = String::from_utf8(text.clone()).unwrap();
        let controls = |c: char| c.is_control() && c != '\n' || c == '\u{202e}';
        assert!(!text.contains(controls), "{text:?}");
        found |= text.contains("EVIL");
    }
    assert!(found, "{output:?}");
}

/// The message of a daemon that takes snapshots (see the program's `serve::wire`).
fn message(value: &Value) -> Vec<u8> {
    let text = value.to_string();
    let numbers = [u32::from_le_bytes(*b"PVHO"), text.len() as u32, 0, 0];
    [numbers.map(u32::to_le_bytes).concat(), text.into_bytes()].concat()
}

#[test]
fn what_it_says_does_not_control_the_terminal() {
    let folder = Folder::new();
    let (image, socket, control) = (folder.image("a.img"), folder.text("s"), folder.text("control"));
    let _daemon =
        Daemon::start(&["blk", "--name", "a", "--image", &image, "--socket", &socket, "--control", &control]);
    let mut report = Vec::new();
    UnixStream::connect(&control).unwrap().read_to_end(&mut report).unwrap();
    let mut report: Value = serde_json::from_slice(&report).unwrap();
    report["failed"] = json!([{"name": "b", "why": "w"}]);
    report["waiting"] = json!([{"name": "c", "why": "w", "seconds": 1.0}]);
    report["devices"][0]["last_error"] = json!("e");
    poison(&mut report);
    let name = report["devices"][0]["name"].as_str().unwrap().to_owned();
    assert_eq!(name, "a", "commands find it");
    report["devices"][0]["kind"] = json!(format!("blk{EVIL}"));
    let reports = answering(&folder, "reports", move |mut stream| {
        drop(stream.write_all(report.to_string().as_bytes()));
    });
    for more in [&[][..], &["--details"], &["--problems"], &["--json"]] {
        assert_harmless(&run(&reports, &[&["status", "--seconds", "0"], more].concat()));
    }
    let shown = run(&reports, &["top", "--once", "--interval", "0.1", "--json"]);
    assert_harmless(&shown);

    let asked = |stream: &UnixStream| BufReader::new(stream).read_line(&mut String::new()).unwrap();
    let snapshots = answering(&folder, "snapshots", move |mut stream| {
        asked(&stream);
        drop(stream.write_all(&message(&json!({"failed": EVIL}))));
    });
    assert_harmless(&run(&snapshots, &["disk", "snapshot", "a", &folder.text("o.qcow2")]));
    let traces = answering(&folder, "traces", move |mut stream| {
        asked(&stream);
        let request = json!({"request": {
            "end_unix_ns": 1, "queue": 0, "head": 0, "operation": EVIL, "sector": 0, "bytes": 1, "status": 0,
            "ring_ns": 1, "throttled_ns": 1, "host_ns": 1, "interrupt_ns": 1, "total_ns": 4
        }});
        let lines = [json!({"started": {"pid": 1, "queues": 1}}), request, json!({"error": EVIL})];
        lines.iter().for_each(|line| drop(writeln!(stream, "{line}")));
    });
    assert_harmless(&run(&traces, &["trace", "a"]));
    assert_harmless(&run(&traces, &["trace", "a", "--json"]));
}

#[test]
fn one_that_sends_now_and_then_is_not_waited_for() {
    let folder = Folder::new();
    let drip = answering(&folder, "drip", |mut stream| {
        while stream.write_all(b" ").is_ok() {
            std::thread::sleep(Duration::from_millis(50));
        }
    });
    let start = Instant::now();
    let asked = [&["status", "--seconds", "0"][..], &["trace", "a"]].map(|arguments| {
        let mut command = paravane();
        command.args(arguments).args(["--control", &drip]).stderr(std::process::Stdio::piped());
        command.spawn().unwrap()
    });
    for (child, why) in asked.into_iter().zip(["the other side is too slow", "no answer within 10 s"]) {
        let output = child.wait_with_output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(1) && stderr.contains(why), "{stderr}");
    }
    assert!(start.elapsed() < patience());
}
