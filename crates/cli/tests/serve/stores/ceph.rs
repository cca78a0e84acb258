//! Images of a Ceph cluster.
use crate::daemon::{Daemon, Folder, paravane, skip, status, without_sandbox};
use crate::driver::{Driver, Random};
use crate::load::{SIZE, wish};
use std::process::Command;

/// The configuration of a cluster, or `None` and a line in the list of skipped tests.
pub(super) fn cluster(test: &str) -> Option<String> {
    let conf = std::env::var("PARAVANE_CEPH_CONF").ok();
    if conf.is_none() {
        skip(test, "PARAVANE_CEPH_CONF names no cluster (scripts/ceph-one makes one)");
    }
    conf
}

/// Runs a program of Ceph.
pub(super) fn ceph(conf: &str, program: &str, arguments: &[&str]) -> Vec<u8> {
    let output = Command::new(program).args(["--conf", conf]).args(arguments).output().unwrap();
    assert!(output.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

/// Has the cluster refuse the client that holds the lock of an image.
pub(super) fn refuse_owner(conf: &str, image: &str) {
    let locks = ceph(conf, "rbd", &["lock", "ls", "--format", "json", image]);
    let locks: serde_json::Value = serde_json::from_slice(&locks).unwrap();
    for lock in locks.as_array().unwrap() {
        let address = lock["address"].as_str().unwrap();
        ceph(conf, "ceph", &["osd", "blocklist", "add", address, "600"]);
    }
}

#[test]
fn a_disk_in_a_ceph_cluster_is_served_in_the_sandbox() {
    let test = "a_disk_in_a_ceph_cluster_is_served_in_the_sandbox";
    let Some(conf) = cluster(test) else { return };
    let image = format!("pool/serve-{}", std::process::id());
    ceph(&conf, "rbd", &["create", &image, "--size", "1M", "--object-size", "64K"]);
    let folder = Folder::new();
    let (socket, control) = (folder.path("a.sock"), folder.text("control"));
    let location = format!("rbd:{image}:conf={conf}");
    let arguments = ["blk", "--image", &location, "--queues", "2", "--control", &control, "--socket"];
    let daemon = Daemon::start(&[&arguments[..], &[socket.to_str().unwrap()]].concat());
    let mut driver = Driver::connect(&socket, wish(true, true, 2)).unwrap();
    let (mut model, mut random) = (vec![0; SIZE], Random::new(5));
    driver.exercise(&mut model, 300, &mut random);
    // Smaller discards free nothing in objects of 64 KiB.
    let config = driver.transport.get_config().unwrap();
    assert_eq!(u32::from(config.discard_sector_alignment), 128);
    let store = status(&control)["devices"][0]["stores"][0].clone();
    assert_eq!((&store["link"], &store["location"]), (&"up".into(), &format!("rbd:{image}").into()));
    // A second daemon is told that the image is in use.
    let other = folder.text("b.sock");
    let second = paravane()
        .args(["serve", "blk", "--image", &location, "--control", "off", "--socket", &other])
        .args(without_sandbox())
        .output()
        .unwrap();
    let error = String::from_utf8(second.stderr).unwrap();
    assert_eq!(second.status.code(), Some(2), "{error}");
    assert!(error.contains("in use"), "{error}");
    drop(driver);
    let (ended, log) = daemon.end();
    assert!(ended.success(), "{log:?}");
    assert!(ceph(&conf, "rbd", &["export", "--no-progress", &image, "-"]) == model);
    ceph(&conf, "rbd", &["rm", "--no-progress", &image]);
}
