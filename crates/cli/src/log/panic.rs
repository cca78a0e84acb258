//! Logs panics. The standard library's hook would write to stderr and block.
use super::lines::{Style, is_inside, own_line};
use std::backtrace::{Backtrace, BacktraceStatus};
use std::panic::PanicHookInfo;
use tracing::Level;

/// Logs the panics of all threads from now on; `push` takes lines.
///
/// RUST_BACKTRACE works as usual.
pub(super) fn install(style: Style, push: fn(&str)) {
    std::panic::set_hook(Box::new(move |info| log(style, push, info)));
}

fn log(style: Style, push: fn(&str), info: &PanicHookInfo<'_>) {
    let thread = std::thread::current();
    let thread = thread.name().unwrap_or("(unnamed)");
    let words = info.payload_as_str().unwrap_or("no message");
    let place = info.location().map(ToString::to_string).unwrap_or_default();
    // A panic in the formatting code bypasses it. RUST_LOG does not suppress panics.
    if is_inside() || !tracing::enabled!(Level::ERROR) {
        push(&own_line(style, Level::ERROR, &format!("thread {thread} panicked at {place}: {words}")));
    } else {
        tracing::error!(thread, place, "thread panicked: {words}");
    }
    let backtrace = Backtrace::capture();
    if backtrace.status() == BacktraceStatus::Captured {
        push(&format!("{backtrace}\n"));
    }
}

#[cfg(test)]
mod tests {
    use crate::log::{self, Level, Settings};
    use std::process::{Command, Stdio};

    const TEST: &str = "log::panic::tests::a_panic_is_a_line_of_the_log_and_ends_its_thread_only";
    const CHILD: &str = "PARAVANE_TEST_PANIC";

    /// Panics in two ways, in a process with our hook.
    fn child() {
        log::set_up(Settings { base: Level::WARN, verbose: 0, json: true, rate: None });
        log::start_writing();
        std::thread::Builder::new()
            .name("io0-vm0".into())
            .spawn(|| panic!("no\nluck"))
            .unwrap()
            .join()
            .unwrap_err();
        struct Bad;
        impl std::fmt::Debug for Bad {
            fn fmt(&self, _: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                panic!("in a line")
            }
        }
        std::thread::spawn(|| tracing::warn!(bad = ?Bad, "a")).join().unwrap_err();
        log::finish();
    }

    #[test]
    fn a_panic_is_a_line_of_the_log_and_ends_its_thread_only() {
        if std::env::var_os(CHILD).is_some() {
            return child();
        }
        let run = |stderr: Stdio| {
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.args(["--exact", TEST, "--nocapture"]).env(CHILD, "1").stdout(Stdio::null());
            command.env_remove("RUST_BACKTRACE").env_remove("RUST_LOG").stderr(stderr).spawn().unwrap()
        };
        let output = run(Stdio::piped()).wait_with_output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{text}");
        let lines: Vec<serde_json::Value> =
            text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!((lines.len(), &lines[0]["level"]), (2, &"ERROR".into()), "{text}");
        assert_eq!(
            (&lines[0]["message"], &lines[0]["thread"]),
            (&"thread panicked: no\nluck".into(), &"io0-vm0".into())
        );
        assert!(lines[0]["place"].as_str().unwrap().contains("panic.rs"), "{text}");
        assert!(lines[1]["message"].as_str().unwrap().ends_with("in a line"), "{text}");

        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        assert!(run(full.into()).wait().unwrap().success());
        let (_read, write) = std::io::pipe().unwrap();
        drop(_read);
        assert!(run(write.into()).wait().unwrap().success());
    }
}
