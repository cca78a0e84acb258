//! Images of a Ceph cluster, whose OSD is killed, or hangs.
use super::{devices, end_without_errors, see_stall, serve};
use crate::daemon::{Daemon, Folder, paravane, status, without_sandbox};
use crate::driver::{Driver, Random};
use crate::kill::kills;
use crate::load::{self, DISKS, SIZE, wish};
use paravane_test_support::CephCluster;

/// Image of a disk of a test.
pub(super) fn image(test: &str, disk: &str) -> String {
    format!("pool/{test}-{}-{disk}", std::process::id())
}

/// Makes an image of [`SIZE`].
pub(super) fn create(cluster: &CephCluster, image: &str) {
    cluster.run("rbd", &["create", image, "--size", "1M", "--object-size", "64K"]);
}

/// Location of an image.
pub(super) fn location(cluster: &CephCluster, image: &str) -> String {
    format!("rbd:{image}:conf={}", cluster.conf().display())
}

/// Removes an image. Returns its content.
pub(super) fn take(cluster: &CephCluster, image: &str) -> Vec<u8> {
    let content = cluster.output("rbd", &["export", "--no-progress", image, "-"]);
    cluster.run("rbd", &["rm", "--no-progress", image]);
    content
}

/// Has the cluster refuse the client that holds the lock of an image.
pub(super) fn refuse_owner(cluster: &CephCluster, image: &str) {
    let locks = cluster.output("rbd", &["lock", "ls", "--format", "json", image]);
    let locks: serde_json::Value = serde_json::from_slice(&locks).unwrap();
    for lock in locks.as_array().unwrap() {
        let address = lock["address"].as_str().unwrap();
        cluster.run("ceph", &["osd", "blocklist", "add", address, "600"]);
    }
}

#[test]
fn a_disk_in_a_ceph_cluster_is_served_in_the_sandbox() {
    let test = "a_disk_in_a_ceph_cluster_is_served_in_the_sandbox";
    let Some(cluster) = CephCluster::find(test) else { return };
    let _in_use = cluster.in_use();
    let image = image("serve", "a");
    create(&cluster, &image);
    let folder = Folder::new();
    let (socket, control) = (folder.path("a.sock"), folder.text("control"));
    let location = location(&cluster, &image);
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
    assert!(take(&cluster, &image) == model);
}

/// Runs clients while `fault` has the OSD fail, `times` times, and compares what the cluster has.
///
/// `fault` waits for the control socket to name the fault, and ends it.
fn under_faults(cluster: &CephCluster, test: &str, times: usize, fault: impl Fn(&str)) {
    let _alone = cluster.alone();
    let folder = Folder::new();
    DISKS.iter().for_each(|disk| create(cluster, &image(test, disk)));
    let config = devices(&folder, |disk| location(cluster, &image(test, disk)));
    let (daemon, control) = (serve(&folder, &config), folder.text("control"));
    let socket = |disk: &str| folder.path(&format!("{disk}.sock"));
    let models = load::under_load(socket, times, |_| fault(&control), || status(&control).to_string());
    end_without_errors(daemon, &control);
    for (disk, model) in models {
        assert!(take(cluster, &image(test, disk)) == model, "disk {disk}");
    }
}

#[test]
fn clients_lose_nothing_when_an_osd_is_killed() {
    let test = "clients_lose_nothing_when_an_osd_is_killed";
    let Some(cluster) = CephCluster::find(test) else { return };
    cluster.unless_it_loses_data(test, || {
        under_faults(&cluster, "osd-killed", kills(3), |control| {
            let killed = cluster.kill_osd();
            see_stall(control);
            drop(killed);
        });
    });
}

#[test]
fn clients_lose_nothing_when_an_osd_hangs() {
    let Some(cluster) = CephCluster::find("clients_lose_nothing_when_an_osd_hangs") else { return };
    under_faults(&cluster, "osd-hangs", 3, |control| {
        let stopped = cluster.stop_osd();
        see_stall(control);
        drop(stopped);
    });
}
