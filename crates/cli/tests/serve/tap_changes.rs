//! A TAP device that is deleted, made anew, set down and up, while nothing passes it.
//!
//! Needs root, /dev/net/tun and the program `ip`; the network is one of the test's own.
use crate::daemon::{Daemon, Folder, patience, status};
use crate::raw::Raw;
use paravane_spec::net::{Config, S_LINK_UP};
use paravane_spec::vhost_user::{ConfigAccess, protocol_feature, request};
use paravane_test_support::{in_own_network, ip};
use serde_json::Value;
use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

/// Until the report of the first device is as it should be.
fn until(control: &str, what: &str, is_so: impl Fn(&Value) -> bool) {
    let end = Instant::now() + patience();
    while !is_so(&status(control)["devices"][0]) {
        assert!(Instant::now() < end, "{what}: {}", status(control));
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn start(folder: &Folder) -> (Daemon, String) {
    ip("tuntap add pv0 mode tap");
    ip("link set pv0 up");
    let (socket, control) = (folder.text("s"), folder.text("control"));
    let daemon =
        Daemon::start(&["net", "--name", "n", "--tap", "pv0", "--socket", &socket, "--control", &control]);
    (daemon, control)
}

fn is_deleted_and_comes_back(control: &str) {
    for _ in 0..2 {
        ip("link delete pv0");
        until(control, "the loss is not noticed", |device| {
            device["host_error"]
                .as_str()
                .is_some_and(|error| error.contains("pv0: the TAP device was deleted"))
        });
        ip("tuntap add pv0 mode tap");
        until(control, "the successor is not attached", |device| device["host_error"].is_null());
    }
}

#[test]
fn a_loss_is_noticed_without_traffic_and_without_a_client() {
    in_own_network("a_loss_is_noticed_without_traffic_and_without_a_client", || {
        let folder = Folder::new();
        let (mut daemon, control) = start(&folder);
        is_deleted_and_comes_back(&control);
        daemon.wait_for("pv0: attached to the TAP device that was made anew");
    });
}

/// The front end accepts changes of the configuration space; no queue is started.
fn front_end(folder: &Folder) -> (Raw, UnixStream) {
    let raw = Raw::connect(&folder.path("s"));
    raw.begin(0);
    let protocol = raw.ask_number(request::GET_PROTOCOL_FEATURES);
    assert_ne!(protocol & protocol_feature::CONFIG, 0);
    raw.say(request::SET_PROTOCOL_FEATURES, &protocol, &[]);
    let (ours, theirs) = UnixStream::pair().unwrap();
    raw.say(request::SET_BACKEND_REQ_FD, &[0_u8; 0][..], &[theirs.as_fd()]);
    ours.set_read_timeout(Some(patience())).unwrap();
    (raw, ours)
}

fn link_is_up(raw: &Raw) -> bool {
    let size = size_of::<Config>() as u32;
    let access = ConfigAccess { offset: 0, size, flags: 0 };
    let reply = raw.ask(request::GET_CONFIG, &[access.as_bytes(), &vec![0; size as usize]].concat());
    let status = &reply[access.as_bytes().len() + 6..][..2];
    u16::from_le_bytes(status.try_into().unwrap()) & S_LINK_UP != 0
}

#[test]
fn a_guest_that_is_told_follows_its_tap_device() {
    in_own_network("a_guest_that_is_told_follows_its_tap_device", || {
        let folder = Folder::new();
        let (mut daemon, control) = start(&folder);
        let (raw, mut said) = front_end(&folder);
        assert!(link_is_up(&raw));
        for (state, is_up) in [("down", false), ("up", true), ("down", false), ("up", true)] {
            ip(&format!("link set pv0 {state}"));
            // The first one may be that of the session's begin.
            while link_is_up(&raw) != is_up {
                let mut message = [0; 12];
                said.read_exact(&mut message).unwrap();
                assert_eq!(message[0], 2, "CONFIG_CHANGE_MSG");
            }
            until(&control, state, |device| device["net"]["link_up"] == is_up);
            daemon.wait_for(&format!("the guest's link is {state}"));
        }
        is_deleted_and_comes_back(&control);
    });
}

/// Without a way to tell it, a guest that reads that its link is down would never learn that it is up.
#[test]
fn a_guest_that_is_not_told_has_its_link_up() {
    in_own_network("a_guest_that_is_not_told_has_its_link_up", || {
        let folder = Folder::new();
        let (_daemon, control) = start(&folder);
        ip("link set pv0 down");
        let raw = Raw::connect(&folder.path("s"));
        raw.begin(0);
        assert!(link_is_up(&raw));
        until(&control, "the link", |device| device["net"]["link_up"] == true);
    });
}
