//! A daemon under test.
use serde_json::Value;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Instant;

mod state;

pub(crate) fn paravane() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_paravane"));
    command.stdin(Stdio::null()).env_remove("RUST_LOG").env_remove("NOTIFY_SOCKET");
    command
}

pub(crate) use paravane_test_support::{patience, skip};

pub(crate) fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// A folder for images and sockets.
pub(crate) struct Folder(tempfile::TempDir);

impl Folder {
    pub(crate) fn new() -> Self {
        Self(tempfile::tempdir().expect("a folder is made"))
    }

    /// Creates the folder in this directory.
    pub(crate) fn within(directory: &Path) -> Self {
        Self(tempfile::tempdir_in(directory).expect("a folder is made"))
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub(crate) fn text(&self, name: &str) -> String {
        self.path(name).to_str().expect("names are ASCII").to_owned()
    }

    pub(crate) fn image(&self, name: &str) -> String {
        let file = File::create(self.path(name)).expect("the image is made");
        file.set_len(1 << 20).expect("the image gets its size");
        self.text(name)
    }

    pub(crate) fn write(&self, name: &str, text: &str) -> String {
        std::fs::write(self.path(name), text).expect("the file is written");
        self.text(name)
    }

    pub(crate) fn root(&self) -> &Path {
        self.0.path()
    }
}

/// A running daemon. A test that fails prints its state and kills it.
pub(crate) struct Daemon {
    child: Child,
    control: Option<String>,
    log: Receiver<String>,
    seen: Vec<String>,
}

impl Daemon {
    /// Starts `paravane serve` and waits until it is ready.
    pub(crate) fn start(arguments: &[&str]) -> Self {
        let more = without_sandbox().filter(|option| !arguments.contains(option));
        let mut daemon = Self::spawn(paravane().arg("serve").args(arguments).args(more));
        daemon.wait_for("ready");
        daemon
    }

    pub(crate) fn spawn(command: &mut Command) -> Self {
        let mut child = command.stderr(Stdio::piped()).spawn().expect("the daemon starts");
        let stderr = child.stderr.take().expect("it is piped");
        let (sender, log) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        Self { child, control: state::control_of(command), log, seen: Vec::new() }
    }

    /// Waits for the next log line that contains `text`, and returns it.
    pub(crate) fn wait_for(&mut self, text: &str) -> String {
        self.find(text).unwrap_or_else(|why| panic!("{why}; waited for {text:?} in the log"))
    }

    /// Like [`Daemon::wait_for`], with a result: the log may end, or time may run out.
    pub(crate) fn find(&mut self, text: &str) -> Result<String, RecvTimeoutError> {
        let deadline = Instant::now() + patience();
        loop {
            let line = self.log.recv_timeout(deadline.saturating_duration_since(Instant::now()))?;
            self.seen.push(line.clone());
            if line.contains(text) {
                return Ok(line);
            }
        }
    }

    /// Its report and the end of its log.
    pub(crate) fn state(&mut self) -> String {
        self.seen.extend(self.log.try_iter());
        state::describe(self.control.as_deref(), &self.seen)
    }

    /// All log lines so far.
    pub(crate) fn seen(&self) -> &[String] {
        &self.seen
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).expect("the signal is sent");
    }

    /// Waits until the daemon ends by itself.
    pub(crate) fn wait(mut self) -> (ExitStatus, Vec<String>) {
        loop {
            match self.log.recv_timeout(patience()) {
                Ok(line) => self.seen.push(line),
                Err(RecvTimeoutError::Timeout) => panic!("the daemon does not end"),
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        (self.child.wait().expect("it ends"), std::mem::take(&mut self.seen))
    }

    /// Waits until a daemon has ended that a signal was sent to.
    pub(crate) fn wait_for_end(&mut self) {
        self.child.wait().expect("it ends");
    }

    /// Ends the daemon by SIGTERM and waits for it.
    pub(crate) fn end(mut self) -> (ExitStatus, Vec<String>) {
        self.signal(rustix::process::Signal::TERM);
        while let Ok(line) = self.log.recv_timeout(patience()) {
            self.seen.push(line);
        }
        (self.child.wait().expect("it ends"), std::mem::take(&mut self.seen))
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the daemon {}: {}", self.pid(), self.state());
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Output of `paravane status --json` for the daemon with this control socket.
pub(crate) fn status(control: &str) -> Value {
    let output = paravane()
        .args(["status", "--seconds", "0", "--json", "--control", control])
        .output()
        .expect("the program starts");
    assert_answered(&output);
    let list: Value = serde_json::from_slice(&output.stdout).expect("it prints JSON");
    list[0].clone()
}

/// Status 3: a device of the file is not served.
fn assert_answered(output: &Output) {
    let answered = matches!(output.status.code(), Some(0 | 3));
    assert!(answered, "{}", String::from_utf8_lossy(&output.stderr));
}

/// Output of `paravane status` for people.
pub(crate) fn status_text(control: &str) -> String {
    let output = paravane().args(["status", "--seconds", "0", "--control", control]).output();
    let output = output.expect("the program starts");
    assert_answered(&output);
    String::from_utf8(output.stdout).expect("it prints text")
}

/// Names of the devices of a status.
pub(crate) fn names(status: &Value) -> Vec<&str> {
    let devices = status["devices"].as_array().expect("a list");
    devices.iter().map(|device| device["name"].as_str().expect("a name")).collect()
}

/// Checks that a request is refused as invalid.
///
/// Status 2, one line on stderr that names the problem, and no output.
pub(crate) fn assert_refused(output: &Output, what: &str) {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains(what), "{what:?} is not in: {stderr}");
    assert_eq!(stderr.trim_end().lines().count(), 1, "more than one line: {stderr}");
    assert!(output.stdout.is_empty());
}

/// Whether the sandbox works on this host; if not, `test` is skipped.
pub(crate) fn sandbox_usable(test: &str) -> bool {
    if !has_sandbox() {
        skip(test, "the sandbox needs Landlock");
    }
    has_sandbox()
}

/// Checked once; a missing sandbox is reported once for all tests.
fn has_sandbox() -> bool {
    static FOUND: OnceLock<bool> = OnceLock::new();
    *FOUND.get_or_init(|| {
        let folder = Folder::new();
        let mut daemon = Daemon::spawn(paravane().args([
            "serve",
            "rng",
            "--control",
            "off",
            "--socket",
            &folder.text("s"),
        ]));
        match daemon.find("ready") {
            Ok(_) => true,
            Err(_) if daemon.seen().iter().any(|line| line.contains("the sandbox needs Landlock")) => {
                skip(
                    "the sandbox, in every test of `paravane serve`",
                    "the sandbox needs Landlock: --no-sandbox",
                );
                false
            }
            Err(why) => panic!("{why}: {:?}", daemon.seen()),
        }
    })
}

/// Option that turns the sandbox off where the host has none; else nothing.
///
/// Daemons of all tests run in the sandbox if the host has one. Without this option they would not
/// start on other hosts, where [`has_sandbox`] reports the skip once.
pub(crate) fn without_sandbox() -> Option<&'static str> {
    (!has_sandbox()).then_some("--no-sandbox")
}
