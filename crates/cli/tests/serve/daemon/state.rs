//! What a test that fails prints about its daemon.
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::time::Duration;

/// Log lines that are printed.
const LINES: usize = 60;
/// Longest wait for the report of a daemon that may hang.
const LIMIT: Duration = Duration::from_secs(10);

/// The control socket that the arguments of `paravane serve` name.
pub(super) fn control_of(command: &Command) -> Option<String> {
    let mut arguments = command.get_args().skip_while(|argument| *argument != "--control").skip(1);
    arguments.next()?.to_str().filter(|control| *control != "off").map(str::to_owned)
}

/// The report of the control socket and the end of the log.
pub(super) fn describe(control: Option<&str>, log: &[String]) -> String {
    let report = control.map_or_else(|| "no control socket is known".to_owned(), report);
    let end = &log[log.len().saturating_sub(LINES)..];
    format!(
        "status: {}\nthe last {} of {} log lines:\n{}",
        report.trim_end(),
        end.len(),
        log.len(),
        end.join("\n")
    )
}

fn report(control: &str) -> String {
    let mut text = Vec::new();
    let read = UnixStream::connect(control).and_then(|mut socket| {
        socket.set_read_timeout(Some(LIMIT))?;
        socket.read_to_end(&mut text)
    });
    let text = String::from_utf8_lossy(&text);
    read.map_or_else(|error| format!("{control}: {error} {text}"), |_| text.to_string())
}

#[test]
fn a_test_that_fails_prints_the_report_and_the_end_of_the_log() {
    let mut command = super::paravane();
    assert_eq!(control_of(command.args(["serve", "rng", "--socket", "s"])), None);
    assert_eq!(control_of(command.args(["--control", "/c", "--queues", "2"])).as_deref(), Some("/c"));
    let folder = super::Folder::new();
    let control = folder.text("control");
    let socket = folder.text("s");
    let mut daemon =
        super::Daemon::start(&["rng", "--name", "mine", "--socket", &socket, "--control", &control]);
    let state = daemon.state();
    assert!(state.contains("\"mine\"") && state.contains("ready"), "{state}");
    let log: Vec<_> = (1..=100).map(|line| format!("line {line}")).collect();
    let text = describe(Some(&folder.text("nothing")), &log);
    assert!(
        text.contains("nothing: ") && text.contains("the last 60 of 100 log lines:\nline 41\n"),
        "{text}"
    );
    assert!(text.ends_with("line 100"), "{text}");
}
