//! Overlays whose base lies on a server.
use super::has;
use super::servers::Nbdkit;
use crate::daemon::{Daemon, Folder, is_root, paravane, skip, status};
use crate::driver::{Driver, Random};
use crate::full::{Small, fill};
use crate::images::qemu_img;
use crate::load::{self, DISKS, SIZE, wish};
use crate::snapshot::{Chain, paste, printed, snapshot};

/// An overlay of a file on a server, which qemu-img reads, too. Returns its `--backing`.
fn overlay(server: &Folder, base: &str, size: usize, top: &str) -> String {
    let socket = server.text("nbd.sock");
    let name = format!("nbd:unix:{socket}:exportname={base}");
    qemu_img(&["create", "-q", "-u", "-f", "qcow2", "-b", &name, "-F", "raw", top, &size.to_string()]);
    format!("raw:nbd+unix:///{base}?socket={socket}")
}

/// What an image and all below it hold, as qemu-img reads it.
fn content(folder: &Folder, top: &str) -> Vec<u8> {
    let flat = folder.text("flat.img");
    qemu_img(&["check", "-q", top]);
    qemu_img(&["convert", "-f", "qcow2", "-O", "raw", top, &flat]);
    std::fs::read(flat).unwrap()
}

#[test]
fn an_overlay_has_its_base_on_a_server() {
    let test = "an_overlay_has_its_base_on_a_server";
    if !has("nbdkit", "nbdkit", test) || !has("qemu-img", "qemu-utils", test) {
        return;
    }
    let folder = Folder::new();
    std::fs::write(folder.path("base.img"), vec![7; SIZE]).unwrap();
    let _server = Nbdkit::start(&folder, &[]);
    let top = folder.text("top.qcow2");
    let backing = overlay(&folder, "base.img", SIZE, &top);
    let (socket, control) = (folder.path("a.sock"), folder.text("control"));
    let daemon = Daemon::start(&[
        "blk",
        "--image",
        &top,
        "--format",
        "qcow2",
        "--backing",
        &backing,
        "--socket",
        socket.to_str().unwrap(),
        "--control",
        &control,
    ]);
    let mut driver = Driver::connect(&socket, wish(false, true, 1)).unwrap();
    let (mut model, mut random) = (vec![7; SIZE], Random::new(3));
    driver.exercise(&mut model, 300, &mut random);
    let report = status(&control);
    assert_eq!(report["devices"][0]["stores"][0]["link"], "up", "{report}");
    drop(driver);
    let (ended, log) = daemon.end();
    assert!(ended.success(), "{log:?}");
    assert!(std::fs::read(folder.path("base.img")).unwrap() == vec![7; SIZE], "the base has changed");
    // The same chain, read by another program.
    assert!(content(&folder, &top) == model);
}

#[test]
fn writes_wait_for_room_for_an_overlay_of_a_base_on_a_server() {
    const SIZE: usize = 4 << 20;
    let test = "writes_wait_for_room_for_an_overlay_of_a_base_on_a_server";
    if !has("nbdkit", "nbdkit", test) || !has("qemu-img", "qemu-utils", test) {
        return;
    }
    if !is_root() {
        return skip(test, "needs root to mount a file system");
    }
    let small = match Small::new() {
        Ok(small) => small,
        Err(why) => return skip(test, why),
    };
    let folder = Folder::new();
    std::fs::write(folder.path("base.img"), vec![7; SIZE]).unwrap();
    let _server = Nbdkit::start(&folder, &[]);
    let top = small.text("top.qcow2");
    let backing = overlay(&folder, "base.img", SIZE, &top);
    let disk = ["--image", &top, "--format", "qcow2", "--backing", &backing, "--on-full", "wait"];
    let model = fill(&small, &disk, vec![7; SIZE]);
    assert!(content(&folder, &top) == model);
    assert!(std::fs::read(folder.path("base.img")).unwrap() == vec![7; SIZE], "the base has changed");
}

#[test]
fn snapshots_are_taken_of_overlays_whose_base_is_on_a_server() {
    let test = "snapshots_are_taken_of_overlays_whose_base_is_on_a_server";
    if !has("nbdkit", "nbdkit", test) || !has("qemu-img", "qemu-utils", test) {
        return;
    }
    let folder = Folder::new();
    let base = vec![7; SIZE];
    std::fs::write(folder.path("base.img"), &base).unwrap();
    let _server = Nbdkit::start(&folder, &[]);
    let mut chains: Vec<_> = DISKS
        .iter()
        .map(|name| {
            let top = folder.text(&format!("{name}.qcow2"));
            let backing = overlay(&folder, "base.img", SIZE, &top);
            Chain::on(top, backing)
        })
        .collect();
    let text = |chains: &[Chain]| -> String {
        let disk = |(name, chain): (&&str, &Chain)| crate::snapshot::disk(name, &chain.keys());
        DISKS.iter().zip(chains).map(disk).collect()
    };
    let (file, control) = (folder.write("d.toml", &text(&chains)), folder.text("control"));
    let daemon = Daemon::start(&["--config", &file, "--control", &control]);
    let mut frozen = Vec::new();
    let models = load::under_load_from(
        &base,
        |name| folder.path(&format!("{name}.sock")),
        8,
        |number| {
            let at = number % DISKS.len();
            let overlay = folder.text(&format!("{}-{number}.qcow2", DISKS[at]));
            let report = snapshot(&control, DISKS[at], &overlay);
            let below = report["base"]["path"].as_str().unwrap().to_owned();
            assert_eq!(below, chains[at].top(), "{report}");
            assert!(report["unsynced"].is_null(), "{report}");
            frozen.push((std::fs::read(&below).unwrap(), below));
            chains[at].put(overlay.clone());
            let device = status(&control)["devices"][at].clone();
            assert!(device["back_end"].as_str().unwrap().starts_with(&overlay), "{device}");
            assert_eq!(device["stores"][0]["link"], "up", "{device}");
        },
        || status(&control).to_string(),
    );
    let (ended, log) = daemon.end();
    assert!(ended.success(), "{log:?}");
    for (content, path) in &frozen {
        assert!(std::fs::read(path).unwrap() == *content, "{path} was written to");
    }
    assert!(std::fs::read(folder.path("base.img")).unwrap() == base, "the base has changed");
    for (chain, (name, model)) in chains.iter().zip(&models) {
        assert!(content(&folder, chain.top()) == *model, "disk {name}, as qemu-img reads it");
        // By names on the command line, as an operator does.
        let (whole, source) = (folder.text(&format!("{name}-whole.img")), format!("qcow2:{}", chain.top()));
        let mut convert = paravane();
        convert.args(["disk", "convert", &source]);
        for layer in chain.below() {
            convert.args(["--backing", &layer]);
        }
        let output = convert.arg(format!("raw:{whole}")).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert!(std::fs::read(whole).unwrap() == *model, "disk {name}, as paravane reads it");
    }
    // The next daemon.
    folder.write("d.toml", &text(&chains));
    let daemon = Daemon::start(&["--config", &file, "--control", &control]);
    for (name, mut model) in models {
        let mut driver = Driver::connect(&folder.path(&format!("{name}.sock")), wish(true, true, 2)).unwrap();
        driver.exercise(&mut model, 100, &mut Random::new(9));
    }
    let (ended, log) = daemon.end();
    assert!(ended.success(), "{log:?}");
}

/// A disk at a URL, and one with a URL among its layers: what a snapshot prints starts them again.
#[test]
fn the_command_after_a_snapshot_names_servers() {
    let test = "the_command_after_a_snapshot_names_servers";
    if !has("nbdkit", "nbdkit", test) {
        return;
    }
    let folder = Folder::new();
    std::fs::write(folder.path("base.img"), vec![0; SIZE]).unwrap();
    let _server = Nbdkit::start(&folder, &[]);
    let (socket, control) = (folder.text("a.sock"), folder.text("control"));
    let url = format!("nbd+unix:///base.img?socket={}", folder.text("nbd.sock"));
    let served = ["blk", "--name", "vm", "--image", &url, "--socket", &socket, "--control", &control];
    let mut daemon = Daemon::start(&served);
    let (mut model, mut random) = (vec![0; SIZE], Random::new(3));
    for number in 1..=2 {
        let overlay = folder.text(&format!("{number}.qcow2"));
        let mut driver = Driver::connect(socket.as_ref(), wish(false, true, 1)).unwrap();
        driver.exercise(&mut model, 50, &mut random);
        let serial = status(&control)["devices"][0]["serial"].clone();
        assert_eq!(serial, "base.img");
        let text = printed(&control, "vm", &overlay);
        driver.exercise(&mut model, 50, &mut random);
        drop(driver);
        assert!(daemon.end().0.success());
        assert!(text.contains(&format!("'raw:{url}'")), "{text}");
        daemon = paste(&text, &control);
        assert_eq!(status(&control)["devices"][0]["serial"], serial);
    }
    let mut driver = Driver::connect(socket.as_ref(), wish(false, true, 1)).unwrap();
    driver.exercise(&mut model, 50, &mut random);
    drop(driver);
    assert!(daemon.end().0.success());
    // The header names the server, too.
    let disk = |arguments: &[&str]| {
        let output = paravane().arg("disk").args(arguments).output().unwrap();
        assert!(output.status.success(), "{arguments:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let first = folder.text("1.qcow2");
    assert!(disk(&["info", &first]).contains(&format!("{url:?}, format \"raw\"")));
    let backing = format!("raw:{url}");
    disk(&["commit", &folder.text("2.qcow2"), "--backing", &format!("qcow2:{first}"), "--backing", &backing]);
    disk(&["commit", &first, "--backing", &backing]);
    assert!(std::fs::read(folder.path("base.img")).unwrap() == model);
}
