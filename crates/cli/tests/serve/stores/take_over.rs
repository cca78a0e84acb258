//! Daemons that take over disks on servers.
use super::servers::{Nbdkit, await_listening, location};
use super::{has, serve};
use crate::daemon::{Daemon, Folder, paravane, patience, without_sandbox};
use crate::driver::{Driver, Random};
use crate::load::{SIZE, wish};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Starts a daemon that takes over from the one of [`serve`].
fn take_over(folder: &Folder, config: &str) -> Daemon {
    let arguments = ["serve", "--config", config, "--control", &folder.text("control"), "--take-over"];
    Daemon::spawn(paravane().args(arguments).args(without_sandbox()))
}

#[test]
fn a_daemon_that_takes_over_connects_while_the_old_one_serves() {
    let test = "a_daemon_that_takes_over_connects_while_the_old_one_serves";
    if !has("nbdkit", "nbdkit", test) {
        return;
    }
    let folder = Folder::new();
    let file = folder.image("a.img");
    let log = folder.path("log");
    let with_log = ["--filter=log".to_owned(), format!("logfile={}", log.display())];
    let _server = Nbdkit::start(&folder, &with_log.each_ref().map(String::as_str));
    let config = format!("[[blk]]\nname = \"a\"\nimage = \"{}\"\nsocket = \"a.sock\"\n", location("a"));
    let config = folder.write("d.toml", &config);
    let old = serve(&folder, &config);
    let mut driver = Driver::connect(&folder.path("a.sock"), wish(false, true, 1)).unwrap();
    let (mut model, mut random) = (vec![0; SIZE], Random::new(3));
    driver.exercise(&mut model, 100, &mut random);
    let connections = || std::fs::read_to_string(&log).unwrap().matches(" Connect export=").count();
    assert_eq!(connections(), 1);
    // The old daemon cannot hand anything over meanwhile.
    old.signal(rustix::process::Signal::STOP);
    let mut new = take_over(&folder, &config);
    let end = Instant::now() + patience();
    while connections() < 2 {
        assert!(Instant::now() < end, "the new daemon does not connect");
        std::thread::sleep(Duration::from_millis(2));
    }
    let before = std::fs::read_to_string(&log).unwrap();
    assert!(!before.contains("connection=2 Write"), "{before}");
    old.signal(rustix::process::Signal::CONT);
    new.wait_for("ready");
    let (ended, lines) = old.wait();
    assert!(ended.success(), "{lines:?}");
    driver.exercise(&mut model, 300, &mut random);
    drop(driver);
    let (ended, lines) = new.end();
    assert!(ended.success(), "{lines:?}");
    // That connection has all requests; another one may ask for the size.
    let after = std::fs::read_to_string(&log).unwrap();
    assert!(after.contains("connection=2 Write") && !after.contains("connection=3 Write"), "{after}");
    assert!(std::fs::read(&file).unwrap() == model);
}

#[test]
fn a_server_with_one_client_at_a_time_is_opened_when_the_old_daemon_has_closed_it() {
    let test = "a_server_with_one_client_at_a_time_is_opened_when_the_old_daemon_has_closed_it";
    if !has("qemu-nbd", "qemu-utils", test) {
        return;
    }
    let folder = Folder::new();
    let file = folder.image("a.img");
    let socket = folder.path("nbd.sock");
    let mut command = Command::new("qemu-nbd");
    command.args(["--persistent", "-f", "raw", "-x", "a.img", "-k"]).arg(&socket).arg(&file);
    let mut server = command.stderr(Stdio::null()).spawn().expect("qemu-nbd starts");
    await_listening("qemu-nbd", || socket.exists());
    let config = format!("[[blk]]\nname = \"a\"\nimage = \"{}\"\nsocket = \"a.sock\"\n", location("a"));
    let config = folder.write("d.toml", &config);
    let mut daemon = serve(&folder, &config);
    let mut driver = Driver::connect(&folder.path("a.sock"), wish(false, true, 1)).unwrap();
    let (mut model, mut random) = (vec![0; SIZE], Random::new(3));
    for _ in 0..2 {
        driver.exercise(&mut model, 100, &mut random);
        let mut new = take_over(&folder, &config);
        new.wait_for("opened when the running daemon has closed it");
        new.wait_for("ready");
        let (ended, lines) = std::mem::replace(&mut daemon, new).wait();
        assert!(ended.success(), "{lines:?}");
    }
    driver.exercise(&mut model, 300, &mut random);
    drop(driver);
    let (ended, lines) = daemon.end();
    assert!(ended.success(), "{lines:?}");
    drop(server.kill());
    drop(server.wait());
    assert!(std::fs::read(&file).unwrap() == model);
}
