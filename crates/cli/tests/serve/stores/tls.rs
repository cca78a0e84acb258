//! Certificates that expire.
use super::servers::Nbdkit;
use super::{assert_content, config, has, names_each, serve, wait_for_stores, wait_for_text, wait_until_up};
use crate::certificates::certificates;
use crate::daemon::{Folder, paravane, status, status_text, without_sandbox};
use crate::load;
use std::path::Path;

/// Copies files of a folder to another one, under the names that both sides expect.
fn copy(from: &Path, to: &Path, names: &[(&str, &str)]) {
    std::fs::create_dir_all(to).unwrap();
    for (old, new) in names {
        std::fs::copy(from.join(old), to.join(new)).unwrap();
    }
}

const AUTHORITY: (&str, &str) = ("ca-cert.pem", "ca-cert.pem");
const GOOD: [(&str, &str); 2] =
    [("server-cert.pem", "server-cert.pem"), ("server-key.pem", "server-key.pem")];
const EXPIRED: [(&str, &str); 2] =
    [("expired-cert.pem", "server-cert.pem"), ("expired-key.pem", "server-key.pem")];

#[test]
fn clients_lose_nothing_when_a_certificate_has_expired() {
    let test = "clients_lose_nothing_when_a_certificate_has_expired";
    if !has("nbdkit", "nbdkit", test) || !has("certtool", "gnutls-bin", test) {
        return;
    }
    let folder = Folder::new();
    let (all, theirs, ours) = (folder.path("all"), folder.path("theirs"), folder.path("ours"));
    std::fs::create_dir(&all).unwrap();
    certificates(&all);
    copy(&all, &ours, &[AUTHORITY]);
    copy(&all, &theirs, &[AUTHORITY]);
    copy(&all, &theirs, &EXPIRED);
    let files = format!("--tls-certificates={}", theirs.display());
    let mut server = Nbdkit::start(&folder, &["--tls=require", &files]);
    let location = |name: &str| {
        let part = "&tls-certificates=ours&tls-hostname=localhost";
        format!("nbds+unix:///{name}.img?socket=nbd.sock{part}")
    };
    let config = config(&folder, location);
    // At the start.
    let arguments = ["serve", "--config", &config, "--control", "off"];
    let output = paravane().args(arguments).args(without_sandbox()).output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.contains("nbds+unix:///a.img") && error.contains("certificate expired"), "{error}");
    // While the disks are served.
    copy(&all, &theirs, &GOOD);
    server.restart();
    let (daemon, control) = (serve(&folder, &config), folder.text("control"));
    let report = || status(&control).to_string();
    let models = load::under_load(
        |name| folder.path(&format!("{name}.sock")),
        3,
        |_| {
            copy(&all, &theirs, &EXPIRED);
            server.restart();
            let has_expired = |store: &serde_json::Value| {
                store["link"] == "reconnecting"
                    && store["connections"] == 0
                    && store["waiting"].as_u64() > Some(0)
                    && store["error"].as_str().is_some_and(|error| error.contains("certificate expired"))
            };
            wait_for_stores(&control, has_expired);
            // The connections of a disk have one reason, that of the last one.
            wait_for_text(&control, |text| {
                names_each(text, "requests wait: TLS: ") && names_each(text, "certificate expired")
            });
            copy(&all, &theirs, &GOOD);
            server.restart();
        },
        report,
    );
    for device in wait_until_up(&control)["devices"].as_array().unwrap() {
        assert_eq!(device["storage_errors"]["write"], 0, "{device}");
        assert!(device["stores"][0]["reconnects"].as_u64() >= Some(3), "{device}");
    }
    let text = status_text(&control);
    assert!(!text.contains("! "), "{text}");
    let (ended, log) = daemon.end();
    assert!(ended.success(), "{log:?}");
    assert_content(&folder, models);
}
