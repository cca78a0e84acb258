//! Files that locations name: certificates, keys and digests.
use super::servers::{Nginx, free_port, has_nginx};
use super::{has, serve};
use crate::certificates::certificates;
use crate::daemon::{Folder, paravane, status, without_sandbox};
use crate::driver::{Driver, Random};
use crate::load::{SIZE, wish};
use std::process::Command;

#[test]
fn files_that_bases_name_are_read_before_the_sandbox_closes_and_stay_secret() {
    let test = "files_that_bases_name_are_read_before_the_sandbox_closes_and_stay_secret";
    if !has_nginx(test) || !has("certtool", "gnutls-bin", test) {
        return;
    }
    let folder = Folder::new();
    std::fs::create_dir(folder.path("bucket")).unwrap();
    let mut random = Random::new(7);
    let base: Vec<u8> = (0..SIZE / 8).flat_map(|_| random.u64().to_le_bytes()).collect();
    std::fs::write(folder.path("bucket/base.img"), &base).unwrap();
    let (pki, theirs) = (folder.path("pki"), folder.path("theirs"));
    std::fs::create_dir(&pki).unwrap();
    std::fs::create_dir(&theirs).unwrap();
    certificates(&theirs);
    std::fs::copy(theirs.join("ca-cert.pem"), pki.join("ca-cert.pem")).unwrap();
    let root = folder.root().display();
    let tls = free_port();
    let nginx = Nginx::start_with(
        &folder,
        &format!(
            "access_log {root}/access; listen 127.0.0.1:{tls} ssl; ssl_certificate {root}/theirs/server-cert.pem; \
             ssl_certificate_key {root}/theirs/server-key.pem;"
        ),
    );
    let (key, secret) = ("AKIDEXAMPLE", "wJalrXUtnFEMI-K7MDENG");
    folder.write("keys", &format!("[default]\naws_access_key_id={key}\naws_secret_access_key={secret}\n"));
    let list = Command::new("split")
        .args(["-b", "262144", "--filter=sha256sum"])
        .arg(folder.path("bucket/base.img"))
        .output()
        .unwrap();
    let list = String::from_utf8(list.stdout).unwrap();
    folder.write("list", &list);
    folder.write("wrong", &list.replace(&list[..64], &"ab".repeat(32)));
    let endpoint = format!("http://127.0.0.1:{}", nginx.port);
    let bases = [
        ("tls", format!("https://localhost:{tls}/bucket/base.img#tls-certificates=pki&digests=list")),
        ("s3", format!("s3://bucket/base.img?endpoint={endpoint}&credentials=keys&digests=list")),
        ("wrong", format!("{endpoint}/bucket/base.img#digests=wrong")),
    ];
    let mut config = String::new();
    for (name, base) in &bases {
        let (backing, overlay) = (format!("raw:{base}"), format!("{name}.qcow2"));
        // The options hold for all commands.
        let made = paravane()
            .args(["disk", "create", "--backing", &backing, &overlay])
            .current_dir(folder.root())
            .output()
            .unwrap();
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        config += &format!(
            "[[blk]]\nname = \"{name}\"\nimage = \"{overlay}\"\nformat = \"qcow2\"\n\
             backing = [\"{backing}\"]\nsocket = \"{name}.sock\"\nstore-timeout = 1\n"
        );
    }
    let config = folder.write("d.toml", &config);
    std::fs::write(folder.path("access"), "").unwrap();
    let daemon = serve(&folder, &config);
    // From here on, the daemon cannot read them, and need not.
    std::fs::remove_dir_all(pki).unwrap();
    for file in ["keys", "list", "wrong"] {
        std::fs::remove_file(folder.path(file)).unwrap();
    }
    for name in ["tls", "s3"] {
        let mut driver =
            Driver::connect(&folder.path(&format!("{name}.sock")), wish(false, true, 1)).unwrap();
        driver.exercise(&mut base.clone(), 300, &mut random);
    }
    // The rest of the cluster is copied from the base, where a byte differs from what is expected.
    let mut driver = Driver::connect(&folder.path("wrong.sock"), wish(false, true, 1)).unwrap();
    assert_eq!(driver.write_once(0, 512, 1), -libc::EIO);
    drop(driver);
    let report = status(&folder.text("control"));
    let store = |name: &str| {
        let devices = report["devices"].as_array().unwrap();
        devices.iter().find(|device| device["name"] == name).unwrap()["stores"][0].clone()
    };
    let wrong = store("wrong")["error"].to_string();
    assert!(wrong.contains("the chunk at 0 does not have its digest"), "{wrong}");
    assert_eq!(store("s3")["location"], "s3://bucket/base.img");
    assert_eq!(store("tls")["location"], format!("https://localhost:{tls}/bucket/base.img"));
    let requests = std::fs::read_to_string(folder.path("access")).unwrap();
    assert!(requests.contains(&format!("X-Amz-Credential={key}")), "{requests}");
    let arguments = std::fs::read(format!("/proc/{}/cmdline", daemon.pid())).unwrap();
    let (ended, log) = daemon.end();
    assert!(ended.success(), "{log:?}");
    // Beside the images, the sandbox leaves the folder of certificates and the keys in reach.
    let warned = log.iter().filter(|line| line.contains("could read the keys in")).count();
    assert_eq!(warned, if without_sandbox().is_none() { 2 } else { 0 }, "{log:?}");
    let shown = format!("{report} {log:?} {}", String::from_utf8_lossy(&arguments));
    assert!(!shown.contains(secret) && !shown.contains("Signature"), "{shown}");
}
