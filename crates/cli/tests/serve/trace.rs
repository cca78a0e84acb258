//! `paravane trace` and the control socket that it asks.
use crate::daemon::{Daemon, Folder, paravane, patience, status};
use crate::raw::Ask;
use crate::watching::Client;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// `paravane trace`, with its output in pipes.
pub(crate) fn trace(control: &str, more: &[&str]) -> Command {
    let mut command = paravane();
    command.args(["trace", "--control", control]).args(more).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Sends reads, several at a time, until the trace has ended.
fn feed(socket: &Path, mut trace: Child) -> Output {
    let end = Instant::now() + patience();
    while trace.try_wait().unwrap().is_none() {
        assert!(Instant::now() < end, "the trace goes on");
        let mut client = Client::connect(socket);
        let slots: Vec<_> = (0..8).map(|_| client.submit(Ask::Read, 8..9)).collect();
        assert!(slots.into_iter().all(|slot| client.wait(slot) == 0));
    }
    let output = trace.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    output
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value} is no number"))
}

#[test]
fn requests_that_a_rate_limit_holds_are_slow_at_the_limit() {
    let folder = Folder::new();
    let (image, socket, control) = (folder.image("vm.img"), folder.text("s"), folder.text("control"));
    // Of eight that come together, most are held, also on a busy host.
    let limit = ["--ops-per-second", "20", "--burst-ops", "1", "--slow", "10ms", "--name", "vm0"];
    let arguments = ["blk", "--image", &image, "--socket", &socket, "--control", &control];
    let mut daemon = Daemon::start(&[&arguments[..], &limit[..]].concat());
    let clients = folder.path("s");

    let json =
        trace(&control, &["vm0", "--json", "--slower-than", "10ms", "--operation", "read", "--count", "6"]);
    let output = feed(&clients, { json }.spawn().unwrap());
    let lines: Vec<Value> =
        output.stdout.lines().map(|line| serde_json::from_str(&line.unwrap()).unwrap()).collect();
    assert_eq!(lines.len(), 6);
    let mut held = 0;
    for line in &lines {
        assert_eq!(
            (&line["device"], &line["operation"], &line["queue"]),
            (&"vm0".into(), &"read".into(), &0.into())
        );
        assert_eq!(
            (&line["sector"], &line["bytes"], &line["status"]),
            (&8.into(), &512.into(), &0.into()),
            "{line}"
        );
        let stages = ["ring_ns", "throttled_ns", "host_ns", "interrupt_ns"].map(|stage| number(&line[stage]));
        assert_eq!(stages.iter().sum::<u64>(), number(&line["total_ns"]), "{line}");
        assert!(number(&line["total_ns"]) >= 10_000_000, "{line}");
        held += usize::from(stages[1] > 0);
    }
    assert!(held >= 3, "{lines:?}");
    let mut line = daemon.wait_for("slow request");
    // A busy host may make another stage the slowest one.
    while !line.contains("stage=\"throttled\"") {
        line = daemon.wait_for("slow request");
    }
    for field in ["vm0", "queue=0", "operation=\"read\"", "sector=8", "bytes=512", "stage=\"throttled\""] {
        assert!(line.contains(field), "{field} is not in: {line}");
    }

    let output = feed(&clients, trace(&control, &["vm0", "--count", "2"]).spawn().unwrap());
    let text = String::from_utf8(output.stdout).unwrap();
    let rows: Vec<_> = text.lines().collect();
    assert!(rows[0].starts_with("TIME") && rows[1].contains("  read ") && rows.len() == 3, "{text}");

    let file = folder.text("trace.json");
    let chrome = trace(&control, &["vm0", "--count", "5", "--chrome", &file]).spawn().unwrap();
    feed(&clients, chrome);
    let chrome: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    let events = chrome["traceEvents"].as_array().unwrap();
    assert_eq!(events.iter().filter(|event| event["cat"] == "request").count(), 5);
    assert!(events.iter().any(|event| event["cat"] == "stage" && event["name"] == "throttled"), "{chrome}");
    let (ended, log) = daemon.end();
    assert!(ended.success(), "{log:?}");
}

/// A client that asks: its end has a name.
fn asking(control: &str, text: &str) -> UnixStream {
    let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
    rustix::net::bind(&socket, &SocketAddrUnix::new_unnamed()).unwrap();
    rustix::net::connect(&socket, &SocketAddrUnix::new(control).unwrap()).unwrap();
    let mut stream = UnixStream::from(socket);
    stream.set_read_timeout(Some(patience())).unwrap();
    stream.write_all(text.as_bytes()).unwrap();
    stream
}

fn answer(stream: UnixStream) -> String {
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).unwrap();
    line
}

#[test]
fn the_control_socket_bounds_what_clients_ask() {
    let folder = Folder::new();
    let (image, socket, control) = (folder.image("vm.img"), folder.text("s"), folder.text("control"));
    let arguments = ["blk", "--image", &image, "--socket", &socket, "--control", &control];
    let daemon = Daemon::start(&arguments);
    let ask = "{\"trace\": {\"device\": \"blk\"}}\n";
    for (text, wanted) in [
        ("nonsense\n", "{\"error\":\"invalid request: "),
        ("{\"trace\": {\"device\": \"blk\", \"more\": 1}}\n", "unknown field"),
        ("{\"trace\": {\"device\": \"vm7\"}}\n", "{\"no_device\":"),
        ("{\"trace\": {\"device\": \"blk\", \"queue\": 1}}\n", "has no queue 1"),
        ("{\"trace\": {\"device\": \"blk\", \"operations\": [\"x\"]}}\n", "unknown operation"),
        (ask, "{\"started\":{\"pid\":"),
    ] {
        let answer = answer(asking(&control, text));
        assert!(answer.contains(wanted), "{text}: {answer}");
    }
    // A line without an end is not kept.
    let mut text = String::new();
    let endless = asking(&control, &"x".repeat(1024)).read_to_string(&mut text);
    assert!(text.is_empty(), "{endless:?} {text}");
    // Silent clients keep nobody out.
    let silent: Vec<_> = (0..32).map(|_| asking(&control, "")).collect();
    let wait_for = |wanted: &str| {
        let end = Instant::now() + patience();
        loop {
            let stream = asking(&control, ask);
            let mut line = String::new();
            BufReader::new(&stream).read_line(&mut line).unwrap();
            if line.contains(wanted) {
                return stream;
            }
            assert!(Instant::now() < end, "{line}");
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    let own: Vec<_> = (0..4).map(|_| wait_for("started")).collect();
    assert!(answer(asking(&control, ask)).contains("this process runs 4 traces already"));
    let mut others: Vec<_> =
        (0..4).map(|_| trace(&control, &["blk"]).stdout(Stdio::null()).spawn().unwrap()).collect();
    let end = Instant::now() + patience();
    while !answer(asking(&control, ask)).contains("8 traces run already") {
        assert!(Instant::now() < end, "the others do not trace");
    }
    let refused = trace(&control, &["blk"]).output().unwrap();
    assert!(String::from_utf8_lossy(&refused.stderr).contains("8 traces run already"));
    assert_eq!(status(&control)["devices"][0]["name"], "blk");
    for other in &mut others {
        other.kill().unwrap();
        other.wait().unwrap();
    }
    drop((own, silent));
    wait_for("started");
    let (ended, log) = daemon.end();
    assert!(ended.success(), "{log:?}");
}

#[test]
fn a_device_that_cannot_be_traced_is_named() {
    let folder = Folder::new();
    folder.image("a.img");
    let file = folder.write(
        "d.toml",
        "[[blk]]\nname = \"a\"\nimage = \"a.img\"\nsocket = \"a\"\nlatencies = \"off\"\n\
         [[rng]]\nname = \"r\"\nsocket = \"r\"\n",
    );
    let control = folder.text("control");
    let _daemon = Daemon::start(&["--config", &file, "--control", &control]);
    for (device, wanted) in
        [("a", "remove --latencies off"), ("r", "only disks are traced"), ("b", "no device is named \"b\"")]
    {
        let output = trace(&control, &[device]).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(1) && stderr.contains(wanted), "{stderr}");
    }
    let refuse = |more: &[&str], wanted: &str| {
        let output = paravane().args(["serve", "--config", &file, "--check"]).args(more).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && stderr.contains(wanted), "{stderr}");
    };
    folder.write(
        "d.toml",
        "[[blk]]\nname = \"a\"\nimage = \"a.img\"\nsocket = \"a\"\nlatencies = \"off\"\nslow = \"5ms\"\n",
    );
    refuse(&[], "d.toml:6: slow: needs latencies");
    folder.write("d.toml", "[[blk]]\nname = \"a\"\nimage = \"a.img\"\nsocket = \"a\"\nslow = \"0s\"\n");
    refuse(&[], "d.toml:5: slow: 0 would log every request");
}
