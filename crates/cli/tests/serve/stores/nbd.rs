//! NBD servers that are killed, missing, or grow a disk.
use super::servers::{Nbdkit, location};
use super::{assert_content, config, has, serve, wait_for_stores, wait_until_up};
use crate::daemon::{Daemon, Folder, paravane, status, status_text, without_sandbox};
use crate::driver::{Driver, Random};
use crate::load::{self, SIZE, wish};

#[test]
fn clients_lose_nothing_when_their_server_is_killed() {
    if !has("nbdkit", "nbdkit", "clients_lose_nothing_when_their_server_is_killed") {
        return;
    }
    let folder = Folder::new();
    let config = config(&folder, location);
    let mut server = Nbdkit::start(&folder, &[]);
    let daemon = serve(&folder, &config);
    let report = || status(&folder.text("control")).to_string();
    let models =
        load::under_load(|name| folder.path(&format!("{name}.sock")), 20, |_| server.restart(), report);
    // The requests may have ended before the last server was there.
    let report = wait_until_up(&folder.text("control"));
    for device in report["devices"].as_array().unwrap() {
        let store = &device["stores"][0];
        assert_eq!(device["storage_errors"]["write"], 0, "{device}");
        assert!(store["reconnects"].as_u64().unwrap() > 0, "{device}");
    }
    let (ended, log) = daemon.end();
    assert!(ended.success(), "{log:?}");
    assert_content(&folder, models);
}

#[test]
fn requests_wait_for_a_lost_server_and_then_fail() {
    if !has("nbdkit", "nbdkit", "requests_wait_for_a_lost_server_and_then_fail") {
        return;
    }
    let folder = Folder::new();
    folder.image("a.img");
    let mut server = Nbdkit::start(&folder, &[]);
    let (socket, control) = (folder.path("a.sock"), folder.text("control"));
    let image = format!("nbd+unix:///a.img?socket={}", folder.text("nbd.sock"));
    let start = |timeout: &str| {
        Daemon::start(&[
            "blk",
            "--image",
            &image,
            "--socket",
            socket.to_str().unwrap(),
            "--control",
            &control,
            "--store-timeout",
            timeout,
        ])
    };
    let link = |wanted: &str| {
        let report = wait_for_stores(&control, |store| store["link"] == wanted);
        report["devices"][0]["stores"][0].clone()
    };
    // A second is over at some time; until then the request waits.
    let daemon = start("1");
    let mut driver = Driver::connect(&socket, wish(false, true, 1)).unwrap();
    assert_eq!(link("up")["location"], image);
    server.kill();
    assert_eq!(driver.write_once(0, 512, 1), -libc::EIO);
    let store = link("down");
    assert!(store["error"].as_str().is_some_and(|error| !error.is_empty()), "{store}");
    let text = status_text(&control);
    assert!(text.contains("unreachable: requests fail"), "{text}");
    // The server is back: so is the disk.
    server.restart();
    link("up");
    let (mut model, mut random) = (vec![0; SIZE], Random::new(3));
    driver.exercise(&mut model, 100, &mut random);
    drop(driver);
    drop(daemon);
    assert!(std::fs::read(folder.path("a.img")).unwrap() == model);
}

#[test]
fn a_disk_on_a_server_grows_when_the_daemon_is_told_to_look() {
    let test = "a_disk_on_a_server_grows_when_the_daemon_is_told_to_look";
    if !has("nbdkit", "nbdkit", test) {
        return;
    }
    let folder = Folder::new();
    let file = folder.image("a.img");
    let _server = Nbdkit::start(&folder, &[]);
    let (socket, control) = (folder.path("a.sock"), folder.text("control"));
    let image = format!("nbd+unix:///a.img?socket={}", folder.text("nbd.sock"));
    let arguments = ["blk", "--image", &image, "--queues", "2", "--control", &control, "--socket"];
    let mut daemon = Daemon::start(&[&arguments[..], &[socket.to_str().unwrap()]].concat());
    let mut driver = Driver::connect(&socket, wish(false, true, 2)).unwrap();
    let (mut model, mut random) = (vec![0; 2 * SIZE], Random::new(3));
    driver.exercise(&mut model[..SIZE], 100, &mut random);
    std::fs::File::options().write(true).open(&file).unwrap().set_len(2 * SIZE as u64).unwrap();
    daemon.signal(rustix::process::Signal::HUP);
    daemon.wait_for("configuration has changed");
    assert_eq!(u64::from(driver.transport.get_config().unwrap().capacity), 2 * SIZE as u64 / 512);
    driver.exercise(&mut model, 300, &mut random);
    drop(driver);
    let (ended, log) = daemon.end();
    assert!(ended.success(), "{log:?}");
    assert!(std::fs::read(&file).unwrap() == model);
}

#[test]
fn a_server_that_is_missing_at_the_start_is_named() {
    let folder = Folder::new();
    let image = format!("nbd+unix:///a?socket={}", folder.text("none.sock"));
    let socket = folder.text("a.sock");
    let arguments = ["serve", "blk", "--image", &image, "--socket", &socket, "--control", "off"];
    let output = paravane().args(arguments).args(without_sandbox()).output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.contains("nbd+unix:///a?socket=") && error.contains("No such file"), "{error}");
}
