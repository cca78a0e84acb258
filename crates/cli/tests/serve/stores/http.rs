//! HTTP servers that are killed, objects that change, and caches that are full.
use super::serve;
use super::servers::{Nginx, has_nginx};
use crate::daemon::{Daemon, Folder, is_root, paravane, skip, status, status_text};
use crate::driver::{Driver, Random};
use crate::full::Small;
use crate::images::{has_qemu_img, qemu_img};
use crate::load::{self, DISKS, SIZE, wish};
use std::io::Write;
use std::path::Path;
use std::time::{Duration, SystemTime};

/// Makes an overlay.
pub(super) fn create(backing: &str, top: &str) {
    let made = paravane().args(["disk", "create", "--backing", backing, top]).output().unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
}

/// Makes `base.img`, which an HTTP server shows.
pub(super) fn base(folder: &Folder, size: usize) -> Vec<u8> {
    let (mut base, mut random) = (vec![0; size], Random::new(11));
    base.chunks_mut(8).for_each(|word| word.copy_from_slice(&random.u64().to_le_bytes()));
    std::fs::write(folder.path("base.img"), &base).unwrap();
    base
}

/// What an overlay of `base.img` holds, as qemu-img reads it without the server.
///
/// Clusters of a killed daemon may be allocated and not used; qemu-img frees them.
pub(super) fn on_copy(folder: &Folder, top: &str) -> Vec<u8> {
    let flat = folder.text("flat.img");
    qemu_img(&["rebase", "-u", "-f", "qcow2", "-F", "raw", "-b", &folder.text("base.img"), top]);
    qemu_img(&["check", "-q", "-r", "leaks", top]);
    qemu_img(&["check", "-q", top]);
    qemu_img(&["convert", "-f", "qcow2", "-O", "raw", top, &flat]);
    std::fs::read(flat).unwrap()
}

#[test]
fn an_overlay_has_its_base_on_an_http_server_with_a_cache() {
    let test = "an_overlay_has_its_base_on_an_http_server_with_a_cache";
    if !has_nginx(test) {
        return;
    }
    let folder = Folder::new();
    std::fs::write(folder.path("base.img"), vec![7; SIZE]).unwrap();
    let nginx = Nginx::start(&folder);
    let backing = format!("raw:http://127.0.0.1:{}/base.img", nginx.port);
    let (socket, control) = (folder.path("a.sock"), folder.text("control"));
    let cache = folder.text("cache");
    std::fs::create_dir(&cache).unwrap();
    let mut random = Random::new(3);
    // Each round with an overlay of its own: one that was written reads its base no more.
    for round in 0..2 {
        let top = folder.text(&format!("top{round}.qcow2"));
        create(&backing, &top);
        let mut model = vec![7; SIZE];
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
            "--cache",
            &cache,
        ]);
        let mut driver = Driver::connect(&socket, wish(false, true, 1)).unwrap();
        driver.exercise(&mut model, 300, &mut random);
        let report = status(&control);
        let store = &report["devices"][0]["stores"][0];
        assert_eq!(store["link"], "up", "{store}");
        let bytes = |name: &str| store["cache"][name].as_u64().unwrap();
        assert!(bytes("used_bytes") > 0 && bytes("not_kept") == 0, "{store}");
        if round == 0 {
            assert!(bytes("miss_bytes") + bytes("read_ahead_bytes") > 0, "{store}");
        } else {
            // Chunks of the first daemon.
            assert!(bytes("hit_bytes") > 0, "{store}");
        }
        drop(driver);
        let (ended, log) = daemon.end();
        assert!(ended.success(), "{log:?}");
    }
}

#[test]
fn reads_of_a_base_wait_while_its_server_is_killed() {
    /// Bytes of the base: more than is fetched ahead of a reader.
    const BASE: usize = 64 << 20;
    /// From here on nothing is read or fetched ahead before.
    const FAR: usize = 16 << 20;
    /// From one such place to the next.
    const STEP: usize = 4 << 20;
    let test = "reads_of_a_base_wait_while_its_server_is_killed";
    if !has_nginx(test) || !has_qemu_img(test) {
        return;
    }
    let folder = Folder::new();
    let (base, mut random) = (base(&folder, BASE), Random::new(6));
    let mut nginx = Nginx::start(&folder);
    let backing = format!("raw:http://127.0.0.1:{}/base.img", nginx.port);
    let (top, socket, control) = (folder.text("top.qcow2"), folder.text("s"), folder.text("control"));
    create(&backing, &top);
    let disk = ["blk", "--name", "vm0", "--image", &top, "--format", "qcow2", "--backing", &backing];
    let more = ["--store-timeout", "600", "--socket", &socket, "--control", &control];
    let daemon = Daemon::start(&[&disk[..], &more].concat());
    let mut driver = Driver::connect(Path::new(&socket), wish(false, true, 1)).unwrap();
    let mut model = base[..SIZE].to_vec();
    // From the end, so that nothing is fetched ahead.
    for at in (FAR..BASE).step_by(STEP).rev() {
        driver.exercise(&mut model, 50, &mut random);
        nginx.kill();
        let read = std::thread::scope(|scope| {
            let reader = scope.spawn(|| driver.read_once(at, 4096));
            super::wait_for_stores(&control, |store| {
                store["link"] == "reconnecting" && store["waiting"].as_u64() > Some(0)
            });
            super::wait_for_text(&control, |text| {
                text.contains("! vm0: http://") && text.contains("connecting again: ")
            });
            nginx.restart();
            reader.join().unwrap()
        });
        assert!(read.unwrap() == base[at..at + 4096], "{at}");
        super::wait_until_up(&control);
    }
    driver.exercise(&mut model, 300, &mut random);
    assert_eq!(status(&control)["devices"][0]["storage_errors"]["read"], 0);
    drop(driver);
    let (ended, log) = daemon.end();
    assert!(ended.success(), "{log:?}");
    assert!(on_copy(&folder, &top)[..SIZE] == model);
}

#[test]
fn an_object_that_changes_fails_the_disk_that_is_based_on_it() {
    /// The disk whose base changes.
    const CHANGED: &str = "e";
    /// Bytes of a base. More than is fetched ahead of a reader.
    const BASE: usize = 32 << 20;
    /// A place that nobody has read.
    const FAR: usize = 24 << 20;
    let test = "an_object_that_changes_fails_the_disk_that_is_based_on_it";
    if !has_nginx(test) {
        return;
    }
    let folder = Folder::new();
    let (good, changes) = (folder.path("good.img"), folder.path("changes.img"));
    std::fs::write(&good, vec![7; SIZE]).unwrap();
    std::fs::write(&changes, vec![7; BASE]).unwrap();
    let nginx = Nginx::start(&folder);
    let mut text = format!("[daemon]\ncache = {:?}\n", folder.text("cache"));
    std::fs::create_dir(folder.path("cache")).unwrap();
    for name in DISKS.into_iter().chain([CHANGED]) {
        let object = if name == CHANGED { "changes" } else { "good" };
        let backing = format!("raw:http://127.0.0.1:{}/{object}.img", nginx.port);
        create(&backing, &folder.text(&format!("{name}.qcow2")));
        text += &format!(
            "[[blk]]\nname = \"{name}\"\nimage = \"{name}.qcow2\"\nsocket = \"{name}.sock\"\nqueues = 2\n\
             format = \"qcow2\"\nbacking = [\"{backing}\"]\n",
        );
    }
    let (config, control) = (folder.write("d.toml", &text), folder.text("control"));
    let daemon = serve(&folder, &config);
    let socket = |name: &str| folder.path(&format!("{name}.sock"));
    let mut driver = Driver::connect(&socket(CHANGED), wish(false, true, 2)).unwrap();
    let (mut model, mut random) = (vec![7; SIZE], Random::new(3));
    let device = |report: &serde_json::Value| {
        let devices = report["devices"].as_array().unwrap();
        devices.iter().find(|device| device["name"] == CHANGED).unwrap().clone()
    };
    let report = || status(&control).to_string();
    let change = |number| {
        if number == 1 {
            // Whole clusters, so that the base is needed for none of it.
            driver.exercise(&mut model, 500, &mut random);
            for at in (0..SIZE).step_by(8192) {
                assert_eq!(driver.write_once(at, 8192, 1), 0);
            }
            let new = folder.path("new.img");
            std::fs::write(&new, vec![8; BASE]).unwrap();
            // nginx makes the tag of size and seconds.
            let time = SystemTime::now() + Duration::from_secs(100);
            std::fs::File::options().write(true).open(&new).unwrap().set_modified(time).unwrap();
            std::fs::rename(&new, &changes).unwrap();
        }
        // Neither what is new nor what is cached.
        for at in [FAR, FAR + 8192, 2 * SIZE] {
            assert_eq!(driver.read_once(at, 512).err(), Some(-libc::EIO), "{at}");
        }
        // A part of a cluster takes the rest from the base.
        assert_eq!(driver.write_once(FAR, 512, 1), -libc::EIO);
        let device = device(&status(&control));
        let store = &device["stores"][0];
        let error = store["error"].as_str().unwrap_or_default();
        assert!(store["link"] == "unusable" && error.contains("the object has changed"), "{store}");
        let text = status_text(&control);
        let line = text.lines().find(|line| line.contains(&format!("! {CHANGED}: http://"))).unwrap();
        assert!(line.contains("unusable: all requests fail: the object has changed"), "{line}");
        // What the overlay has is there.
        for at in (0..SIZE).step_by(8192) {
            let data = driver.read_once(at, 8192).unwrap();
            assert!(data.iter().enumerate().all(|(index, byte)| *byte == 1_u8.wrapping_add(index as u8)));
        }
    };
    let models = load::under_load_from(&vec![7; SIZE], socket, 5, change, report);
    assert_eq!(models.len(), DISKS.len());
    let last = status(&control);
    for device in last["devices"].as_array().unwrap().iter().filter(|device| device["name"] != CHANGED) {
        assert_eq!(
            (&device["stores"][0]["link"], &device["storage_errors"]["read"]),
            (&"up".into(), &0.into())
        );
    }
    drop(driver);
    let (ended, log) = daemon.end();
    assert!(ended.success(), "{log:?}");
    // The next daemon takes the object as it is now.
    let daemon = serve(&folder, &config);
    let mut driver = Driver::connect(&socket(CHANGED), wish(false, true, 1)).unwrap();
    assert!(driver.read_once(FAR + 8192, 512).unwrap() == [8; 512]);
    for (name, mut model) in models {
        let mut driver = Driver::connect(&socket(name), wish(false, true, 1)).unwrap();
        driver.exercise(&mut model, 100, &mut random);
    }
    drop(driver);
    let (ended, log) = daemon.end();
    assert!(ended.success(), "{log:?}");
}

#[test]
fn a_full_cache_costs_nothing_but_the_cache() {
    /// Bytes of the base, and of its part that is read while the cache is full.
    const BASE: usize = 32 << 20;
    const FIRST: usize = 4 << 20;
    let test = "a_full_cache_costs_nothing_but_the_cache";
    if !has_nginx(test) || !has_qemu_img(test) {
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
    let (mut base, mut random) = (base(&folder, BASE), Random::new(4));
    let nginx = Nginx::start(&folder);
    let backing = format!("raw:http://127.0.0.1:{}/base.img", nginx.port);
    let (top, socket, control) = (folder.text("top.qcow2"), folder.text("s"), folder.text("control"));
    create(&backing, &top);
    let disk = ["blk", "--name", "vm0", "--image", &top, "--format", "qcow2", "--backing", &backing];
    let cache = small.text("");
    let more = ["--cache", &cache, "--socket", &socket, "--control", &control];
    let daemon = Daemon::start(&[&disk[..], &more].concat());
    // Others take all the room.
    let rest = small.text("rest");
    let mut file = std::fs::File::create(&rest).unwrap();
    while file.write_all(&[1; 4096]).is_ok() {}
    let mut driver = Driver::connect(Path::new(&socket), wish(true, true, 1)).unwrap();
    let mut model = base[..FIRST].to_vec();
    driver.exercise(&mut model, 1000, &mut random);
    let store = |report: serde_json::Value| report["devices"][0]["stores"][0].clone();
    let full = store(status(&control));
    let error = full["error"].as_str().unwrap_or_default();
    assert!(full["link"] == "up" && full["cache"]["failing"] == true, "{full}");
    assert!(full["cache"]["not_kept"].as_u64() > Some(0) && error.contains("No space left"), "{full}");
    let text = status_text(&control);
    let line = text.lines().find(|line| line.contains("! vm0: http://")).unwrap();
    assert!(line.contains("chunks are not cached: ") && line.contains("No space left"), "{line}");
    // There is room again.
    std::fs::remove_file(&rest).unwrap();
    drop(file);
    // From the end, so that nothing is fetched ahead.
    let mut places = (FIRST..BASE).step_by(1 << 20).rev();
    let mut read = || {
        let at = places.next().expect("a chunk is kept");
        assert!(driver.read_once(at, 512).unwrap() == base[at..at + 512], "{at}");
        store(status(&control))
    };
    let kept = loop {
        let now = read();
        if now["cache"]["failing"] == false {
            break now;
        }
    };
    for _ in 0..3 {
        let now = read();
        assert_eq!((&now["cache"]["not_kept"], &now["error"]), (&kept["cache"]["not_kept"], &().into()));
    }
    let text = status_text(&control);
    assert!(!text.contains("! "), "{text}");
    driver.exercise(&mut model, 100, &mut random);
    drop(driver);
    let (ended, log) = daemon.end();
    assert!(ended.success(), "{log:?}");
    base[..FIRST].copy_from_slice(&model);
    assert!(on_copy(&folder, &top) == base);
}
