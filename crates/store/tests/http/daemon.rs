//! Servers of other projects, started for a test and ended with it.
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use tempfile::TempDir;

/// A server in a folder of its own.
pub(crate) struct Daemon {
    child: Child,
    pub(crate) folder: TempDir,
    pub(crate) port: u16,
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Daemon {
    /// Starts a program, for which `command` gets a folder and a free port. `None`: it is missing.
    pub(crate) fn start(command: impl Fn(&Path, u16) -> Command) -> Option<Self> {
        loop {
            let folder = TempDir::new().unwrap();
            let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
            let log = folder.path().join("log");
            let output = std::fs::File::create(&log).unwrap();
            let mut command = command(folder.path(), port);
            command.stdin(Stdio::null()).stdout(output.try_clone().unwrap()).stderr(output);
            let child = match command.spawn() {
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => return None,
                child => child.unwrap(),
            };
            let mut daemon = Self { child, folder, port };
            while daemon.child.try_wait().unwrap().is_none() {
                if TcpStream::connect(("127.0.0.1", port)).is_ok() {
                    return Some(daemon);
                }
                std::thread::sleep(std::time::Duration::from_millis(20));
            }
            // Another process may have taken the port meanwhile.
            let log = std::fs::read_to_string(log).unwrap();
            assert!(log.to_lowercase().contains("in use"), "the server has ended: {log}");
        }
    }
}

/// The program `moto_server`: that of `scripts/moto`, or that of this host.
pub(crate) fn moto() -> PathBuf {
    let target = std::env::current_exe().unwrap();
    let target = target.ancestors().find(|path| path.join("CACHEDIR.TAG").exists());
    let own = target.map(|target| target.join("moto/bin/moto_server")).filter(|path| path.exists());
    own.unwrap_or_else(|| "moto_server".into())
}
