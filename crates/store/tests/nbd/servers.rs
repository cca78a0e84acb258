//! Real servers as child processes.
use paravane_test_support::{patience, skip};
use std::fs;
use std::net::TcpListener;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Whether a program can be run; else the test is reported as skipped.
pub(crate) fn has(test: &str, program: &str) -> bool {
    let found = std::env::var_os("PATH")
        .is_some_and(|path| std::env::split_paths(&path).any(|folder| folder.join(program).exists()));
    if !found {
        skip(test, format_args!("{program} is missing"));
    }
    found
}

/// A server that ends with its value.
pub(crate) struct Server {
    child: Option<Running>,
    command: Box<dyn Fn() -> Command>,
    socket: PathBuf,
    /// Holds the socket and what the test puts there.
    pub(crate) folder: TempDir,
}

impl Server {
    /// Starts a program; `arguments` get the paths of the socket and of the folder.
    pub(crate) fn start(
        program: &'static str,
        arguments: impl Fn(&Path, &Path) -> Vec<String> + 'static,
    ) -> Self {
        let folder = TempDir::new().unwrap();
        let socket = folder.path().join("socket");
        let (path, place) = (socket.clone(), folder.path().to_owned());
        let command = Box::new(move || {
            let mut command = Command::new(program);
            command.args(arguments(&path, &place));
            command
        });
        let mut server = Self { child: None, command, socket, folder };
        server.restart();
        server
    }

    pub(crate) fn nbdkit(arguments: &'static str) -> Self {
        Self::start("nbdkit", move |socket, _| {
            let mut list = vec!["-f".into(), "-U".into(), socket.display().to_string()];
            list.extend(arguments.split_whitespace().map(Into::into));
            list
        })
    }

    pub(crate) fn kill(&mut self) {
        self.child = None;
    }

    /// Ends it as an operator would.
    pub(crate) fn terminate(&mut self) {
        if let Some(mut child) = self.child.take() {
            self::signal(&child.0, "TERM");
            child.0.wait().unwrap();
        }
    }

    pub(crate) fn signal(&self, name: &str) {
        self::signal(&self.child.as_ref().unwrap().0, name);
    }

    /// Starts it again, and waits until it listens.
    pub(crate) fn restart(&mut self) {
        let _ = fs::remove_file(&self.socket);
        let mut command = (self.command)();
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
        let mut child = Running(child);
        let start = Instant::now();
        while UnixStream::connect(&self.socket).is_err() {
            if let Some(status) = child.0.try_wait().unwrap() {
                panic!("{command:?}: {status}");
            }
            assert!(start.elapsed() < patience(), "{command:?} does not listen");
            sleep(Duration::from_millis(5));
        }
        self.child = Some(child);
    }

    /// Location of an export; may be empty.
    pub(crate) fn url(&self, export: &str) -> String {
        format!("nbd+unix:///{export}?socket={}", self.socket.display())
    }

    pub(crate) fn socket(&self) -> &Path {
        &self.socket
    }
}

fn signal(child: &Child, name: &str) {
    let status = Command::new("kill").args([format!("-{name}"), child.id().to_string()]).status();
    assert!(status.unwrap().success());
}

/// A process that ends with its value.
pub(crate) struct Running(pub(crate) Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A TCP port that was free a moment ago.
pub(crate) fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// Runs a program and returns what it prints.
pub(crate) fn output(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success(),
        "{program} {arguments:?}: {text} {}",
        String::from_utf8_lossy(&output.stderr)
    );
    text
}
