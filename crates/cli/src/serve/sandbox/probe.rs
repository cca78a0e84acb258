//! Attempts that the sandbox must deny (for tests: --try-sandbox).
use std::fs::File;
use std::io;
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::Command;

/// Tries to open, write and execute `file` and to create sockets.
///
/// It does so in a new thread, and logs each result.
///
/// Then a thread panics. The panic reads the program's symbols if RUST_BACKTRACE is set, and must
/// end that thread only.
pub(crate) fn run(file: &Path) {
    let path = file.to_owned();
    let tried = move || {
        let attempts: [(&str, io::Result<()>); 7] = [
            ("open", File::open(&path).map(drop)),
            ("write", File::options().write(true).open(&path).map(drop)),
            ("exec", Command::new(&path).status().map(drop)),
            ("tcp-listen", TcpListener::bind("127.0.0.1:0").map(drop)),
            ("tcp-connect", TcpStream::connect("127.0.0.1:9").map(drop)),
            ("udp", UdpSocket::bind("127.0.0.1:0").map(drop)),
            ("unix", UnixDatagram::unbound().map(drop)),
        ];
        for (attempt, result) in attempts {
            match result {
                Ok(()) => tracing::warn!(attempt, "sandbox: allowed"),
                Err(error) => tracing::warn!(attempt, %error, "sandbox: refused"),
            }
        }
    };
    if std::thread::spawn(tried).join().is_err() {
        tracing::error!("sandbox: the attempts panicked");
    }
    let panicked = std::thread::spawn(|| panic!("a panic in the sandbox")).join().is_err();
    tracing::warn!(panicked, "sandbox: thread ended");
}
