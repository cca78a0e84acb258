//! nginx, with and without TLS.
use crate::daemon::Daemon;
use crate::reader::{CHUNK, Reader, at_once, cache, content, open};
use paravane_store::{Link, ObjectOptions, Store};
use paravane_test_support::{Random, skip};
use std::path::Path;
use std::process::Command;
use tempfile::TempDir;

const SIZE: usize = 100 * CHUNK as usize + 5;

/// nginx that serves the folder `www` with these lines in its server block.
fn nginx(test: &str, server: &str) -> Option<Daemon> {
    let daemon = Daemon::start(|folder, port| {
        std::fs::create_dir(folder.join("www")).unwrap();
        std::fs::write(folder.join("www/disk.img"), content(SIZE)).unwrap();
        let server = server.replace("PORT", &port.to_string()).replace("FOLDER", folder.to_str().unwrap());
        if server.contains("ssl") {
            certificates(folder);
        }
        let temporary = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
            .map(|name| format!("{name}_temp_path {}/{name};\n", folder.display()))
            .concat();
        // As root it would serve as another user, who cannot read the folder.
        let user = if rustix::process::geteuid().is_root() { "user root;\n" } else { "" };
        let config = format!(
            "{user}daemon off;\nmaster_process off;\npid {0}/pid;\nerror_log stderr;\nevents {{ }}\n\
            http {{\naccess_log {0}/access;\n{temporary}server {{\nroot {0}/www;\n{server}\n}}\n}}\n",
            folder.display()
        );
        std::fs::write(folder.join("conf"), config).unwrap();
        let mut command = Command::new("nginx");
        // Debian keeps it where ordinary users do not look.
        command.env("PATH", format!("{}:/usr/sbin", std::env::var("PATH").unwrap_or_default()));
        command.arg("-p").arg(folder).arg("-c").arg(folder.join("conf")).args(["-e", "stderr"]);
        command
    });
    if daemon.is_none() {
        skip(test, "nginx is missing");
    }
    daemon
}

/// An authority and a certificate for localhost, made with the program openssl.
///
/// The folder `pki` trusts the authority; `client` has a certificate of it, too.
fn certificates(folder: &Path) {
    let openssl = |arguments: &str| {
        let output = Command::new("openssl").args(arguments.split(' ')).current_dir(folder).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    };
    let key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2";
    openssl(&format!(
        "req -x509 {key} -keyout ca.key -out ca.pem -subj /CN=authority \
        -addext basicConstraints=critical,CA:TRUE -addext keyUsage=keyCertSign"
    ));
    openssl(&format!(
        "req -x509 {key} -keyout key.pem -out cert.pem -subj /CN=server -CA ca.pem -CAkey ca.key \
        -addext subjectAltName=DNS:localhost -addext basicConstraints=critical,CA:FALSE"
    ));
    for pki in ["pki", "client"] {
        std::fs::create_dir(folder.join(pki)).unwrap();
        std::fs::copy(folder.join("ca.pem"), folder.join(pki).join("ca-cert.pem")).unwrap();
    }
    openssl(&format!(
        "req -x509 {key} -keyout client/client-key.pem -out client/client-cert.pem -subj /CN=client \
        -CA ca.pem -CAkey ca.key -addext basicConstraints=critical,CA:FALSE"
    ));
}

fn check_reads(store: &dyn Store) {
    let bytes = content(SIZE);
    let mut reader = Reader::new(store);
    let mut random = Random::new(2);
    for _ in 0..300 {
        let (at, len) = (random.below(SIZE), 1 + random.below(5 * CHUNK as usize));
        assert!(reader.read(at as u64, len).unwrap() == bytes[at..SIZE.min(at + len)]);
    }
}

#[test]
fn nginx_serves_ranges() {
    let Some(daemon) = nginx("nginx_serves_ranges", "listen 127.0.0.1:PORT;") else { return };
    let folder = TempDir::new().unwrap();
    let url = format!("http://127.0.0.1:{}/disk.img", daemon.port);
    let object = open(&url, &at_once(), Some(&cache(folder.path()))).unwrap();
    check_reads(&object);
    let status = object.status();
    assert_eq!((status.link, status.error, status.reconnects), (Link::Up, None, 0));
    let missing = open(&url.replace("disk", "missing"), &at_once(), None).unwrap_err();
    assert!(missing.contains("no such object"), "{missing}");
}

#[test]
fn a_file_that_is_replaced_at_nginx_is_noticed() {
    let Some(daemon) = nginx("a_file_that_is_replaced_at_nginx_is_noticed", "listen 127.0.0.1:PORT;") else {
        return;
    };
    let folder = TempDir::new().unwrap();
    let url = format!("http://127.0.0.1:{}/disk.img", daemon.port);
    let object = open(&url, &ObjectOptions::default(), Some(&cache(folder.path()))).unwrap();
    let mut reader = Reader::new(&object);
    assert_eq!(reader.read(0, 100).unwrap(), content(SIZE)[..100]);
    // Of another size, so that its tag differs within the same second, too.
    let other = daemon.folder.path().join("www/new");
    std::fs::write(&other, content(SIZE + 1)).unwrap();
    std::fs::rename(other, daemon.folder.path().join("www/disk.img")).unwrap();
    assert_eq!(reader.read(5 * CHUNK, 100), Err(libc::EIO));
    let status = object.status();
    assert_eq!((status.link, status.error.as_deref()), (Link::Unusable, Some("the object has changed")));
    // Who opens it now has the new one.
    let object = open(&url, &at_once(), Some(&cache(folder.path()))).unwrap();
    assert_eq!(object.size(), SIZE as u64 + 1);
    assert_eq!(Reader::new(&object).read(5, 100).unwrap(), content(SIZE + 1)[5..105]);
}

#[test]
fn a_server_without_ranges_is_refused() {
    let Some(daemon) = nginx("a_server_without_ranges_is_refused", "listen 127.0.0.1:PORT; max_ranges 0;")
    else {
        return;
    };
    let url = format!("http://127.0.0.1:{}/disk.img", daemon.port);
    let error = open(&url, &at_once(), None).unwrap_err();
    assert!(error.contains("does not serve ranges"), "{error}");
}

#[test]
fn tls_trusts_the_authority_that_is_named() {
    let test = "tls_trusts_the_authority_that_is_named";
    if Command::new("openssl").arg("version").output().is_err() {
        return skip(test, "openssl is missing");
    }
    let tls = "listen 127.0.0.1:PORT ssl; ssl_certificate FOLDER/cert.pem; ssl_certificate_key FOLDER/key.pem;\n\
        keepalive_requests 5;";
    let Some(daemon) = nginx(test, tls) else { return };
    let folder = TempDir::new().unwrap();
    let url = format!("https://localhost:{}/disk.img", daemon.port);
    let trusting = |url: &str| format!("{url}#tls-certificates={}/pki", daemon.folder.path().display());
    // nginx ends each connection after five requests; no request fails for that.
    let object = open(&trusting(&url), &at_once(), Some(&cache(folder.path()))).unwrap();
    check_reads(&object);
    assert_eq!(object.status().error, None);

    let other_name = open(&trusting(&url.replace("localhost", "127.0.0.1")), &at_once(), None).unwrap_err();
    assert!(other_name.contains("not valid for name"), "{other_name}");
    let (key, none) = (daemon.folder.path().join("key.pem"), TempDir::new().unwrap());
    std::fs::copy(key, none.path().join("ca-cert.pem")).unwrap();
    let none = format!("{url}#tls-certificates={}", none.path().display());
    assert!(open(&none, &at_once(), None).unwrap_err().contains("holds no certificate"));
    match open(&url, &at_once(), None).unwrap_err() {
        error if error.contains("no certificates of authorities") => skip(test, error),
        error => assert!(error.contains("UnknownIssuer"), "{error}"),
    }
    // Plain text where TLS is due, and TLS where plain text is due.
    let plain = open(&url.replace("https", "http"), &at_once(), None).unwrap_err();
    assert!(plain.contains("400"), "{plain}");
}

#[test]
fn a_server_that_asks_for_a_certificate_gets_it() {
    let test = "a_server_that_asks_for_a_certificate_gets_it";
    if Command::new("openssl").arg("version").output().is_err() {
        return skip(test, "openssl is missing");
    }
    let tls = "listen 127.0.0.1:PORT ssl; ssl_certificate FOLDER/cert.pem; ssl_certificate_key FOLDER/key.pem;\n\
        ssl_verify_client on; ssl_client_certificate FOLDER/ca.pem;";
    let Some(daemon) = nginx(test, tls) else { return };
    let url = |pki: &str| {
        let folder = daemon.folder.path().display();
        format!("https://localhost:{}/disk.img#tls-certificates={folder}/{pki}", daemon.port)
    };
    check_reads(&open(&url("client"), &at_once(), None).unwrap());
    let without = open(&url("pki"), &at_once(), None).unwrap_err();
    assert!(without.contains("400"), "{without}");
}
