//! Servers of other projects, with the files of a folder.
use crate::daemon::{Folder, is_root, patience, skip};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Waits until a server listens.
pub(super) fn await_listening(program: &str, listens: impl Fn() -> bool) {
    let end = Instant::now() + patience();
    while !listens() {
        assert!(Instant::now() < end, "{program} does not listen");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// nbdkit with the files of a folder as its exports, killed when dropped.
pub(super) struct Nbdkit {
    child: Child,
    arguments: Vec<String>,
    folder: std::path::PathBuf,
}

impl Nbdkit {
    /// At the socket `nbd.sock` of the folder. Filters' parameters have no dashes.
    pub(super) fn start(folder: &Folder, more: &[&str]) -> Self {
        let arguments: Vec<_> = more.iter().map(|argument| (*argument).to_owned()).collect();
        let folder = folder.root().to_owned();
        let child = Self::spawn(&folder, &arguments);
        Self { child, arguments, folder }
    }

    fn spawn(folder: &Path, more: &[String]) -> Child {
        let socket = folder.join("nbd.sock");
        drop(std::fs::remove_file(&socket));
        let mut command = Command::new("nbdkit");
        // With several threads, nbdkit 1.32.5 fails an assertion at times when connections are cut.
        command
            .args(["--foreground", "--exit-with-parent", "--threads", "1", "--unix"])
            .arg(&socket)
            .args(more.iter().filter(|argument| argument.starts_with("--")));
        command.arg("file").arg(format!("dir={}", folder.display()));
        command.args(more.iter().filter(|argument| !argument.starts_with("--")));
        let child = command.stderr(Stdio::null()).spawn().expect("nbdkit starts");
        await_listening("nbdkit", || socket.exists());
        child
    }

    pub(super) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub(super) fn restart(&mut self) {
        self.kill();
        self.child = Self::spawn(&self.folder, &self.arguments);
    }
}

impl Drop for Nbdkit {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// Location of a file of the folder, for a file of devices in it.
pub(super) fn location(export: &str) -> String {
    format!("nbd+unix:///{export}.img?socket=nbd.sock")
}

/// Whether nginx is installed.
pub(super) fn has_nginx(test: &str) -> bool {
    let found = Path::new("/usr/sbin/nginx").exists();
    if !found {
        skip(test, "nginx (package nginx-light)");
    }
    found
}

/// A TCP port that nobody listens on.
pub(super) fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// nginx with the files of a folder, killed when dropped.
pub(super) struct Nginx {
    child: Child,
    config: String,
    pub(super) port: u16,
}

impl Nginx {
    pub(super) fn start(folder: &Folder) -> Self {
        Self::start_with(folder, "access_log off;")
    }

    /// With more lines in its server block.
    pub(super) fn start_with(folder: &Folder, more: &str) -> Self {
        let port = free_port();
        let root = folder.root().display();
        // As root it would serve as another user, who cannot read the folder.
        let user = if is_root() { "user root; " } else { "" };
        let config = format!(
            "{user}daemon off; master_process off; pid {root}/nginx.pid; error_log {root}/nginx.log;\n\
             events {{}}\n\
             http {{ client_body_temp_path {root}/t1; proxy_temp_path {root}/t2;\n\
             fastcgi_temp_path {root}/t3; uwsgi_temp_path {root}/t4; scgi_temp_path {root}/t5;\n\
             server {{ listen 127.0.0.1:{port}; root {root}; {more} }} }}\n"
        );
        let config = folder.write("nginx.conf", &config);
        let child = Self::spawn(&config, port);
        Self { child, config, port }
    }

    fn spawn(config: &str, port: u16) -> Child {
        let mut command = Command::new("nginx");
        command.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").args(["-c", config]);
        let child = command.stderr(Stdio::null()).spawn().expect("nginx starts");
        await_listening("nginx", || std::net::TcpStream::connect(("127.0.0.1", port)).is_ok());
        child
    }

    pub(super) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Starts it again, at the same port.
    pub(super) fn restart(&mut self) {
        self.child = Self::spawn(&self.config, self.port);
    }
}

impl Drop for Nginx {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}
