//! An HTTP server of images: nginx, one process for all.
use crate::BenchError;
use crate::daemon::Daemon;
use crate::error::broken;
use std::ffi::OsString;
use std::io;
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The program (Debian: nginx-light).
const SERVER: &str = "nginx";
/// Time for the server to listen.
const PATIENCE: Duration = Duration::from_secs(10);
/// QEMU's module for images on HTTP servers (Debian: qemu-block-extra).
const MODULE: &str = "block-curl.so";

/// The note if there are no cases because the server is missing.
pub(crate) const MISSING: &str = "http-cached/... is missing: install nginx-light.";

/// Whether images can be behind an HTTP server.
pub(crate) fn is_there() -> bool {
    server().arg("-v").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok()
}

/// Whether `qemu-storage-daemon` can read images from HTTP servers.
pub(super) fn qemu_can() -> bool {
    super::qemu_module::is_there(MODULE)
}

/// Debian keeps the program where ordinary users do not look.
fn server() -> Command {
    let mut path = std::env::var_os("PATH").unwrap_or_default();
    path.push(OsString::from(":/usr/sbin"));
    let mut command = Command::new(SERVER);
    command.env("PATH", path);
    command
}

/// A running server of a folder.
pub(super) struct HttpServer {
    _daemon: Daemon,
    port: u16,
}

impl HttpServer {
    /// Serves the files of `folder`, on `cpu`.
    ///
    /// # Errors
    /// The server does not listen.
    pub(super) fn start(folder: &Path, cpu: Option<usize>) -> Result<Self, BenchError> {
        let failed = |source| BenchError::Os { what: "configure an HTTP server", source };
        // Free now; if another process takes it meanwhile, the server ends and says so.
        let listener = TcpListener::bind("127.0.0.1:0").map_err(failed)?;
        let port = listener.local_addr().map_err(failed)?.port();
        drop(listener);
        let conf = configure(folder, port).map_err(failed)?;
        let mut command = server();
        command.arg("-p").arg(folder).arg("-c").arg(conf).args(["-e", "stderr"]);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let mut daemon = Daemon::start(command, SERVER, cpu)?;
        let end = Instant::now() + PATIENCE;
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            if let Some(ended) = daemon.ended() {
                return Err(broken(SERVER, ended));
            }
            if Instant::now() > end {
                return Err(broken(SERVER, "the server does not listen"));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(Self { _daemon: daemon, port })
    }

    /// URL of an image.
    pub(super) fn url(&self, name: &str) -> PathBuf {
        format!("http://127.0.0.1:{}/{name}", self.port).into()
    }
}

/// Writes the server's configuration.
///
/// # Errors
/// The host refuses.
fn configure(folder: &Path, port: u16) -> io::Result<PathBuf> {
    let shown = folder.display();
    let temporary = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .map(|name| format!("{name}_temp_path {shown}/nginx-{name};\n"))
        .concat();
    // As root it would serve as another user, who cannot read the folder.
    let user = if nix::unistd::geteuid().is_root() { "user root;\n" } else { "" };
    let text = format!(
        "{user}daemon off;\nmaster_process off;\npid {shown}/nginx.pid;\nerror_log stderr;\nevents {{ }}\n\
        http {{\naccess_log off;\n{temporary}server {{\nlisten 127.0.0.1:{port};\nroot {shown};\n}}\n}}\n"
    );
    let conf = folder.join("nginx.conf");
    std::fs::write(&conf, text)?;
    Ok(conf)
}
