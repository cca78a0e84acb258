//! `paravane top` on a pseudo-terminal, as a screen shows it.
use crate::daemon::{Daemon, Folder, paravane, patience};
use crate::raw::Ask;
use crate::watching::Client;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};
use serde_json::Value;
use std::fs::File;
use std::io::{Read, Write};
use std::num::NonZeroU16;
use std::process::{Child, Command, ExitStatus};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

fn nonzero(size: u16) -> NonZeroU16 {
    NonZeroU16::new(size).expect("a size")
}

fn size(columns: u16, rows: u16) -> Winsize {
    Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 }
}

/// A program on a terminal.
struct Terminal {
    child: Child,
    /// Our end.
    keys: File,
    /// The program's end, kept open so that its modes can be read after the end.
    device: File,
    screen: Arc<Mutex<vt100::Parser>>,
    reader: Option<JoinHandle<()>>,
}

impl Terminal {
    fn start(command: &mut Command, (columns, rows): (u16, u16)) -> Self {
        let ours = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        grantpt(&ours).unwrap();
        unlockpt(&ours).unwrap();
        let name = ptsname(&ours, Vec::new()).unwrap().into_string().unwrap();
        let device = File::options().read(true).write(true).open(name).unwrap();
        tcsetwinsize(&device, size(columns, rows)).unwrap();
        let end = || device.try_clone().unwrap();
        let child =
            command.env("LC_ALL", "C.UTF-8").stdin(end()).stdout(end()).stderr(end()).spawn().unwrap();
        let keys = File::from(ours);
        let screen = Arc::new(Mutex::new(vt100::Parser::new(nonzero(rows), nonzero(columns), 0)));
        let (mut output, shown) = (keys.try_clone().unwrap(), Arc::clone(&screen));
        let reader = std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            // Fails when the last of the other ends is closed.
            while let Ok(len @ 1..) = output.read(&mut bytes) {
                shown.lock().unwrap().process(&bytes[..len]);
            }
        });
        Self { child, keys, device, screen, reader: Some(reader) }
    }

    fn top(folder: &Folder, arguments: &[&str], size: (u16, u16)) -> Self {
        let control = folder.text("control");
        let fixed = ["top", "--interval", "0.1", "--control", &control];
        Self::start(paravane().args(fixed).args(arguments), size)
    }

    fn lines(&self) -> Vec<String> {
        let screen = self.screen.lock().unwrap();
        let width = screen.screen().size().1.get();
        screen.screen().rows(0, width).map(|line| line.trim_end().to_owned()).collect()
    }

    /// Waits until the screen is as `wanted`.
    fn wait_for(&self, what: &str, wanted: impl Fn(&[String]) -> bool) -> Vec<String> {
        let end = Instant::now() + patience();
        loop {
            let lines = self.lines();
            if wanted(&lines) {
                return lines;
            }
            assert!(Instant::now() < end, "{what}:\n{}", lines.join("\n"));
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn press(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).unwrap();
    }

    fn signal(&self, signal: rustix::process::Signal) {
        rustix::process::kill_process(rustix::process::Pid::from_child(&self.child), signal).unwrap();
    }

    fn resize(&self, columns: u16, rows: u16) {
        self.screen.lock().unwrap().screen_mut().set_size(nonzero(rows), nonzero(columns));
        tcsetwinsize(&self.device, size(columns, rows)).unwrap();
        // The terminal is no controlling terminal of the program, so the kernel does not tell it.
        self.signal(rustix::process::Signal::WINCH);
    }

    /// Waits for the end of the program; checks that the terminal was given back.
    fn end(mut self) -> ExitStatus {
        let status = self.child.wait().unwrap();
        let modes = tcgetattr(&self.device).unwrap().local_modes;
        assert!(modes.contains(LocalModes::ICANON | LocalModes::ECHO), "{modes:?}");
        drop(self.device);
        self.reader.take().unwrap().join().unwrap();
        let screen = self.screen.lock().unwrap();
        assert!(!screen.screen().alternate_screen() && !screen.screen().hide_cursor());
        status
    }
}

/// A disk and two entropy sources.
fn serve(folder: &Folder) -> Daemon {
    let image = folder.image("vm.img");
    let rng = |name: &str| format!("[[rng]]\nname = \"{name}\"\nsocket = \"{name}\"\n");
    let disk = format!("[[blk]]\nname = \"vm0\"\nimage = \"{image}\"\nsocket = \"s\"\n");
    let file = folder.write("d.toml", &(disk + &rng("r2") + &rng("r10")));
    Daemon::start(&["--config", &file, "--control", &folder.text("control")])
}

fn devices(lines: &[String]) -> Vec<&str> {
    let first = lines.iter().skip(3).filter_map(|line| line.split_whitespace().next());
    first.filter(|name| ["vm0", "r2", "r10"].contains(name)).collect()
}

#[test]
fn devices_are_shown_sorted_and_resized() {
    let folder = Folder::new();
    let _daemon = serve(&folder);
    let mut client = Some(Client::connect(&folder.path("s")));
    let mut top = Terminal::top(&folder, &[], (80, 24));
    let lines = top.wait_for("devices", |lines| devices(lines).len() == 3 && lines[1].contains("done/s"));
    assert!(lines[0].starts_with("paravane top: 1 daemon, 3 devices, 1 connected"), "{lines:?}");
    for head in
        ["DEVICE", "DONE/s", "P50", "P99", "STAGE", "DEPTH", "/KICK", "/IRQ", "CPU%", "ERRORS", "HISTORY"]
    {
        assert!(lines[2].contains(head), "{head}: {}", lines[2]);
    }
    assert!(lines[23].contains("q quit"), "{lines:?}");
    // The client works until the row shows it.
    let end = Instant::now() + patience();
    let busy = loop {
        // A client has 16 requests.
        drop(client.take());
        client = Some(Client::connect(&folder.path("s")));
        let statuses = (0..16).map(|sector| client.as_mut().map(|client| client.ask(Ask::Read, sector)));
        assert!(statuses.into_iter().all(|status| status == Some(0)));
        let lines = top.lines();
        if let Some(row) = lines.iter().find(|line| line.starts_with("vm0") && line.contains('█')) {
            break row.clone();
        }
        assert!(Instant::now() < end, "{}", lines.join("\n"));
    };
    assert_ne!(busy.split_whitespace().nth(1), Some("0"), "{busy}");
    // By name, forwards and backwards.
    top.press("S");
    top.wait_for("by name", |lines| devices(lines) == ["r2", "r10", "vm0"]);
    top.press("r");
    top.wait_for("reversed", |lines| devices(lines) == ["vm0", "r10", "r2"]);
    top.resize(60, 6);
    let resized = |lines: &[String]| {
        lines.len() == 6 && devices(lines) == ["vm0", "r10"] && lines[5].contains("q quit")
    };
    top.wait_for("resized", resized);
    top.press("\x1b[B");
    top.wait_for("scrolled", |lines| devices(lines) == ["r10", "r2"]);
    top.press("q");
    assert_eq!(top.end().code(), Some(0));
}

#[test]
fn every_end_gives_the_terminal_back() {
    use rustix::process::Signal;
    let folder = Folder::new();
    let daemon = serve(&folder);
    for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
        let top = Terminal::top(&folder, &[], (80, 24));
        top.wait_for("devices", |lines| devices(lines).len() == 3);
        top.signal(signal);
        assert_eq!(top.end().code(), Some(130), "{signal:?}");
    }
    // The only daemon ends: so does the program, with a reason behind the screen.
    let top = Terminal::top(&folder, &[], (80, 24));
    top.wait_for("devices", |lines| devices(lines).len() == 3);
    let _ = daemon.end();
    let screen = Arc::clone(&top.screen);
    assert_eq!(top.end().code(), Some(1));
    let text = screen.lock().unwrap().screen().contents();
    assert!(text.contains("paravane: ") && text.contains("control"), "{text}");
}

#[test]
fn without_a_terminal_it_prints_once_or_json() {
    let folder = Folder::new();
    let _daemon = serve(&folder);
    let control = folder.text("control");
    let run = |arguments: &[&str]| {
        let arguments = [&["top", "--interval", "0.1", "--control", &control], arguments].concat();
        paravane().args(arguments).output().unwrap()
    };
    let refused = run(&[]);
    crate::daemon::assert_refused(&refused, "stdout is no terminal: use --once or --json");
    for format in ["--sort=name", "--json"] {
        let missing = run(&["--once", format, "nosuch", "nor*"]);
        assert_eq!(missing.status.code(), Some(1), "{missing:?}");
        let said = String::from_utf8(missing.stderr).unwrap();
        assert!(said.contains("no such device: nosuch; no such device: nor*"), "{said}");
        assert!(!String::from_utf8(missing.stdout).unwrap().contains("-0"));
    }
    let once = run(&["--once", "--sort", "name"]);
    assert!(once.status.success());
    let text = String::from_utf8(once.stdout).unwrap();
    assert!(!text.contains('\x1b'), "{text}");
    let lines: Vec<String> = text.lines().map(str::to_owned).collect();
    assert_eq!(devices(&lines), ["r2", "r10", "vm0"], "{text}");
    let json = run(&["--once", "--json", "r*"]);
    let rows: Value = serde_json::from_slice(&json.stdout).unwrap();
    let names: Vec<_> = rows.as_array().unwrap().iter().map(|row| row["device"].as_str().unwrap()).collect();
    assert_eq!(names, ["r2", "r10"]);
    assert!(rows[0]["cpu_percent"].is_number() && rows[0]["completed_per_s"].is_number(), "{rows}");
    for (interval, code) in [("0", 2), ("nan", 2), ("1e9", 2)] {
        let arguments = ["top", "--once", "--interval", interval, "--control", &control];
        assert_eq!(paravane().args(arguments).status().unwrap().code(), Some(code), "{interval}");
    }
}
