//! Networks and servers that stall, reorder, split, and say wrong things.
use super::messages::Wrong;
use super::proxy::Proxy;
use super::servers::Nbdkit;
use super::{
    assert_content, config, end_without_errors, has, see_stall, serve, stores, wait_for_stores,
    wait_for_text, wait_until_up,
};
use crate::daemon::{Daemon, Folder, status};
use crate::driver::{Driver, Random};
use crate::load::{self, DISKS, SIZE, wish};

/// A server with a proxy for each disk.
struct Rig {
    folder: Folder,
    _server: Nbdkit,
    proxies: Vec<Proxy>,
    daemon: Daemon,
    control: String,
}

impl Rig {
    fn new(test: &str) -> Option<Self> {
        if !has("nbdkit", "nbdkit", test) {
            return None;
        }
        let folder = Folder::new();
        let server = Nbdkit::start(&folder, &[]);
        let proxies: Vec<_> = DISKS.iter().map(|_| Proxy::start(&folder.path("nbd.sock"))).collect();
        let location = |name: &str| {
            let at = DISKS.iter().position(|disk| *disk == name).unwrap();
            proxies[at].location(name)
        };
        let config = config(&folder, location);
        let (daemon, control) = (serve(&folder, &config), folder.text("control"));
        Some(Self { folder, _server: server, proxies, daemon, control })
    }

    /// Runs clients while `fault` is called with 1 to `times`.
    fn under_load(&self, times: usize, fault: impl FnMut(usize)) -> Vec<(&'static str, Vec<u8>)> {
        let report = || status(&self.control).to_string();
        load::under_load(|name| self.folder.path(&format!("{name}.sock")), times, fault, report)
    }

    /// Ends the daemon, and compares what the server has.
    fn end(self, models: Vec<(&'static str, Vec<u8>)>) {
        end_without_errors(self.daemon, &self.control);
        assert_content(&self.folder, models);
    }
}

#[test]
fn clients_lose_nothing_when_the_network_stalls() {
    let Some(rig) = Rig::new("clients_lose_nothing_when_the_network_stalls") else { return };
    let models = rig.under_load(2, |_| {
        rig.proxies.iter().for_each(|proxy| proxy.stall(true));
        see_stall(&rig.control);
        rig.proxies.iter().for_each(|proxy| proxy.stall(false));
    });
    for store in stores(&wait_until_up(&rig.control)) {
        assert_eq!((&store["reconnects"], &store["waiting"]), (&0.into(), &0.into()), "{store}");
    }
    rig.end(models);
}

#[test]
fn clients_lose_nothing_when_replies_are_reordered_and_split() {
    let test = "clients_lose_nothing_when_replies_are_reordered_and_split";
    let Some(rig) = Rig::new(test) else { return };
    let models = rig.under_load(6, |number| {
        for proxy in &rig.proxies {
            proxy.split(number % 3 != 1);
            proxy.reorder(number % 3 != 2);
        }
    });
    for (store, proxy) in stores(&wait_until_up(&rig.control)).into_iter().zip(&rig.proxies) {
        assert_eq!((&store["reconnects"], &store["error"]), (&0.into(), &().into()), "{store}");
        assert!(proxy.reordered() > 0, "{store}");
    }
    rig.end(models);
}

#[test]
fn clients_lose_nothing_when_a_server_sends_a_wrong_reply() {
    let Some(rig) = Rig::new("clients_lose_nothing_when_a_server_sends_a_wrong_reply") else { return };
    let models = rig.under_load(2 * Wrong::ALL.len(), |number| {
        let wrong = Wrong::ALL[number % Wrong::ALL.len()];
        let before = status(&rig.control);
        rig.proxies.iter().for_each(|proxy| proxy.spoil(wrong, 1));
        rig.proxies.iter().for_each(Proxy::wait_until_spoiled);
        // A connection is made again, and the reason is told.
        for (at, before) in stores(&before).into_iter().enumerate() {
            let made = before["reconnects"].as_u64();
            let report = wait_for_stores(&rig.control, |store| {
                store["location"] != before["location"] || store["reconnects"].as_u64() > made
            });
            let store = stores(&report)[at];
            let error = store["error"].as_str().unwrap_or_default();
            assert!(error.contains("the server breaks the protocol: "), "{wrong:?}: {store}");
        }
    });
    rig.end(models);
}

#[test]
fn requests_fail_while_all_replies_are_wrong() {
    let Some(rig) = Rig::new("requests_fail_while_all_replies_are_wrong") else { return };
    let (mut random, half) = (Random::new(3), SIZE / 2);
    let mut models = Vec::new();
    for (name, proxy) in DISKS.into_iter().zip(&rig.proxies) {
        let socket = rig.folder.path(&format!("{name}.sock"));
        let mut driver = Driver::connect(&socket, wish(false, true, 1)).unwrap();
        driver.be_patient();
        let mut model = vec![0; SIZE];
        driver.exercise(&mut model[..half], 100, &mut random);
        proxy.spoil(Wrong::Cookie, usize::MAX);
        // The server may have done it.
        assert_eq!(driver.write_once(half, 512, 1), -libc::EIO);
        // It is tried again every 5 s, and seen to be unusable by the next request.
        let place = format!("/{name}.img");
        let report = wait_for_stores(&rig.control, |store| {
            let is_other = !store["location"].as_str().unwrap().ends_with(&place);
            let seen = is_other || store["link"] == "unusable";
            assert!(seen || driver.write_once(half, 512, 1) == -libc::EIO, "{store}");
            seen
        });
        let reason = "unusable: all requests fail: the server breaks the protocol: ";
        wait_for_text(&rig.control, |text| {
            let start = format!("! {name}: ");
            let seen = text.lines().any(|line| line.contains(&start) && line.contains(reason));
            assert!(seen || driver.write_once(half, 512, 1) == -libc::EIO, "{text}");
            seen
        });
        let store = report["devices"].as_array().unwrap().iter().find(|device| device["name"] == name);
        let store = &store.unwrap()["stores"][0];
        let error = store["error"].as_str().unwrap_or_default();
        assert!(error.contains("the server breaks the protocol: "), "{store}");
        proxy.spoil_none();
        wait_until_up(&rig.control);
        driver.exercise(&mut model[..half], 100, &mut random);
        assert_eq!(driver.write_once(half, 512, 1), 0);
        (0..512).for_each(|index| model[half + index] = 1_u8.wrapping_add(index as u8));
        models.push((name, model));
    }
    let (ended, log) = rig.daemon.end();
    assert!(ended.success(), "{log:?}");
    assert_content(&rig.folder, models);
}
