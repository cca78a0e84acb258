//! Daemons that are killed again and again, `PARAVANE_KILLS` times, with disks on servers.
use super::http::{base, create, on_copy};
use super::servers::{Nbdkit, Nginx, has_nginx, location};
use super::{assert_content, ceph, has};
use crate::daemon::Folder;
use crate::driver::{Driver, Random};
use crate::images::has_qemu_img;
use crate::kill::{Kept, killed_under_load};
use crate::load::{DISKS, SIZE, wish};
use paravane_test_support::CephCluster;
use std::sync::atomic::{AtomicBool, Ordering};

#[test]
fn clients_lose_nothing_when_daemons_of_disks_on_a_server_are_killed() {
    let test = "clients_lose_nothing_when_daemons_of_disks_on_a_server_are_killed";
    if !has("nbdkit", "nbdkit", test) {
        return;
    }
    let folder = Folder::new();
    DISKS.iter().for_each(|name| drop(folder.image(&format!("{name}.img"))));
    let kept = Kept::with_keys(folder, "", &DISKS, |name| format!("image = \"{}\"\n", location(name)));
    let _server = Nbdkit::start(&kept.folder, &[]);
    let models = killed_under_load(&kept, &vec![0; SIZE], 20, |_| (), |_| ());
    assert_content(&kept.folder, models);
}

#[test]
fn clients_lose_nothing_when_daemons_of_overlays_over_http_are_killed() {
    /// Bytes of the base.
    const BASE: usize = 32 << 20;
    /// An overlay that is only read.
    const READ: &str = "e";
    let test = "clients_lose_nothing_when_daemons_of_overlays_over_http_are_killed";
    if !has_nginx(test) || !has_qemu_img(test) {
        return;
    }
    let folder = Folder::new();
    let base = base(&folder, BASE);
    let nginx = Nginx::start(&folder);
    let backing = format!("raw:http://127.0.0.1:{}/base.img", nginx.port);
    std::fs::create_dir(folder.path("cache")).unwrap();
    let disks = [&DISKS[..], &[READ]].concat();
    for name in &disks {
        create(&backing, &folder.text(&format!("{name}.qcow2")));
    }
    // Less than the base: chunks are fetched, kept and evicted all the time.
    let daemon = "cache = \"cache\"\ncache-size = \"8M\"\n";
    let keys =
        |name: &str| format!("image = \"{name}.qcow2\"\nformat = \"qcow2\"\nbacking = [\"{backing}\"]\n");
    let kept = Kept::with_keys(folder, daemon, &disks, keys);
    let socket = kept.socket(READ);
    let read = |done: &AtomicBool| {
        let mut driver = Driver::connect(&socket, wish(false, true, 1)).unwrap();
        driver.be_patient();
        let (mut random, mut reads) = (Random::new(12), 0);
        while !done.load(Ordering::Relaxed) {
            let (at, len) = (random.below(BASE / 512 - 32) * 512, (1 + random.below(32)) * 512);
            assert!(driver.read_once(at, len).unwrap() == base[at..at + len], "{len} bytes at {at}");
            reads += 1;
        }
        eprintln!("{reads} reads of the base");
    };
    let models = killed_under_load(&kept, &base[..4 * SIZE], 20, |_| (), read);
    for (name, model) in models {
        let content = on_copy(&kept.folder, &kept.folder.text(&format!("{name}.qcow2")));
        assert!(content[..model.len()] == model && content[model.len()..] == base[model.len()..], "{name}");
    }
}

#[test]
fn clients_lose_nothing_when_daemons_of_images_of_ceph_are_killed() {
    let test = "clients_lose_nothing_when_daemons_of_images_of_ceph_are_killed";
    let Some(cluster) = CephCluster::find(test) else { return };
    let _in_use = cluster.in_use();
    let image = |name: &str| ceph::image("killed", name);
    DISKS.iter().for_each(|name| ceph::create(&cluster, &image(name)));
    let keys = |name: &str| format!("image = \"{}\"\n", ceph::location(&cluster, &image(name)));
    let kept = Kept::with_keys(Folder::new(), "", &DISKS, keys);
    let fence = |number| {
        // The first successor waits for 30 s until the cluster misses the dead daemon. The others
        // need not: an operator who knows that it is dead has the cluster refuse it.
        if number > 1 {
            std::thread::scope(|scope| {
                for name in &DISKS {
                    scope.spawn(|| ceph::refuse_owner(&cluster, &image(name)));
                }
            });
        }
    };
    let models = killed_under_load(&kept, &vec![0; SIZE], 4, fence, |_| ());
    // The last daemon was killed, too.
    fence(2);
    for (name, model) in models {
        assert!(ceph::take(&cluster, &image(name)) == model, "disk {name}");
    }
}
