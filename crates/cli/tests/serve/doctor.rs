//! `paravane doctor --client` and `--config`.
use crate::daemon::{Daemon, Folder, assert_refused, paravane};
use crate::driver::{Driver, Random, Wish};
use serde_json::Value;

/// Findings, and the exit status.
fn doctor(arguments: &[&str]) -> (Vec<Value>, Option<i32>) {
    let output = paravane().args(["doctor", "--json"]).args(arguments).output().unwrap();
    assert!(output.stderr.is_empty(), "{output:?}");
    (serde_json::from_slice(&output.stdout).unwrap(), output.status.code())
}

/// Level of a finding.
fn level<'a>(findings: &'a [Value], name: &str) -> &'a str {
    let finding = findings.iter().find(|finding| finding["name"] == name);
    finding.unwrap_or_else(|| panic!("{name} is not in {findings:?}"))["level"].as_str().unwrap()
}

#[test]
fn what_a_client_negotiated_is_explained() {
    let folder = Folder::new();
    let (image, socket, control) = (folder.image("vm.img"), folder.text("s"), folder.text("c"));
    let arguments = ["blk", "--image", &image, "--socket", &socket, "--queues", "2", "--control", &control];
    let _daemon = Daemon::start(&[&arguments[..], &["--name", "vm0"]].concat());
    let ask = |client: &str| doctor(&["--client", client, "--control", &control]);
    let (findings, status) = ask("vm0");
    assert_eq!((findings.len(), level(&findings, "connection"), status), (1, "missing", Some(1)));

    for event_idx in [false, true] {
        let wish = Wish { packed: false, event_idx, queues: 1, depth: 4 };
        let mut driver = Driver::connect(&folder.path("s"), wish).unwrap();
        driver.exercise(&mut vec![0; 1 << 20], 20, &mut Random::new(1));
        for client in ["vm0", &socket] {
            let (findings, status) = ask(client);
            assert_eq!(status, Some(0));
            assert_eq!(level(&findings, "event index"), if event_idx { "ok" } else { "warn" });
            assert_eq!(level(&findings, "queues"), "warn", "one of two");
            assert_eq!(level(&findings, "memory slots"), "ok");
            // This driver keeps no region for it.
            assert_eq!(level(&findings, "in-flight tracking"), "warn");
            assert!(findings.iter().all(|finding| finding["device"] == "vm0"), "{findings:?}");
        }
        // The next driver starts with an image of zeroes.
        drop(driver);
        std::fs::write(&image, vec![0; 1 << 20]).unwrap();
    }
    let nobody = paravane().args(["doctor", "--client", "vm1", "--control", &control]).output().unwrap();
    assert_eq!(nobody.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&nobody.stderr).contains("no daemon of this user serves it"));
}

#[test]
fn the_needs_of_a_file_are_checked() {
    let folder = Folder::new();
    folder.image("vm.img");
    let disk = "[[blk]]\nname = \"vm0\"\nimage = \"vm.img\"\nsocket = \"s\"\n";
    let file = folder.write("d.toml", disk);
    let (findings, _) = doctor(&["--config", &file]);
    assert_eq!(level(&findings, "configuration"), "ok");
    assert!(!findings.iter().any(|finding| finding["name"] == "kvm"), "{findings:?}");
    let file = folder.write("d.toml", &disk.replace("vm.img", "missing.img"));
    let (findings, status) = doctor(&["--config", &file]);
    assert_eq!((level(&findings, "configuration"), status), ("missing", Some(1)));
    let file = folder.write("d.toml", "nonsense = 1\n");
    assert_refused(&paravane().args(["doctor", "--config", &file]).output().unwrap(), "unknown table");
}
