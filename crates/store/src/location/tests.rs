use super::*;

fn nbd(text: &str) -> NbdLocation {
    match text.parse() {
        Ok(Location::Nbd(nbd)) => nbd,
        other => panic!("{text}: {other:?}"),
    }
}

fn refused(text: &str, part: &str) {
    let error = text.parse::<Location>().expect_err(text).to_string();
    assert!(error.starts_with(&without_secrets(text)) && error.contains(part), "{error}");
    assert!(!error.contains("secret"), "{error}");
}

#[test]
fn what_has_no_known_scheme_is_a_path() {
    for path in ["vm0.img", "/dev/vg/vm0", "./nbd:x", "C:/x", "a:b", "file.nbd"] {
        assert_eq!(path.parse(), Ok(Location::File(path.into())));
    }
}

#[test]
fn other_kinds_of_urls_are_no_files() {
    refused("ftp://host/vm.img", "unknown kind of URL; use nbd,");
    refused("vmdk+x.y-1://a", "unknown kind of URL");
    refused("file:///tmp/vm.img", "write its path, /tmp/vm.img");
    refused("file://host/vm.img", "unknown kind of URL");
    let secret = "ftp://user:secret@host/x".parse::<Location>().unwrap_err().to_string();
    assert!(secret.starts_with("ftp://...@host/x: unknown"), "{secret}");
    for path in ["file:vm.img", "ftp:/x", "./ftp://host", "1a://b", "RBD:pool/disk", "a b://c", "://x"] {
        assert_eq!(path.parse(), Ok(Location::File(path.into())));
    }
    let upper: Location = "HTTP://host/vm.img".parse().unwrap();
    assert_eq!(upper.to_string(), "http://host/vm.img");
    assert_eq!(nbd("NBD://store/vm0").export, "vm0");
}

#[test]
fn exports_of_nbd_servers() {
    let tcp = |host: &str, port| Target::Tcp { host: host.into(), port };
    assert_eq!(
        nbd("nbd://store/vm0"),
        NbdLocation { target: tcp("store", 10809), export: "vm0".into(), tls: None, write_through: false }
    );
    assert!(nbd("nbd://store/vm0?write-through=on").write_through);
    assert!(!nbd("nbd://store/vm0?write-through=off").write_through);
    refused("nbd://store/vm0?write-through=yes", "on or off");
    assert_eq!(nbd("nbd://[::1]:7/a%20b/c").target, tcp("::1", 7));
    assert_eq!(nbd("nbd://[::1]:7/a%20b/c").export, "a b/c");
    assert_eq!(nbd("nbd://store").export, "");
    let unix = nbd("nbd+unix:///vm0?socket=/run/nbd.sock");
    assert_eq!((unix.target, unix.export.as_str()), (Target::Unix("/run/nbd.sock".into()), "vm0"));
    let tls = nbd("nbds://store/vm0?tls-certificates=/etc/pki&tls-hostname=other").tls.unwrap();
    assert_eq!(tls, TlsFiles { folder: Some("/etc/pki".into()), hostname: Some("other".into()) });
    refused("nbd+unix:///vm0", "socket=PATH");
    refused("nbd://store/vm0?socket=/x", "nbd+unix");
    refused("nbd://store/vm0?tls-certificates=/x", "nbds");
    refused("nbds+unix:///?socket=/x", "tls-hostname");
    refused("nbd://store/vm0?sockets=/x", "unknown parameter sockets");
    refused("nbd:///vm0", "host");
    refused("nbd://user:secret@store/vm0", "password");
    refused("nbd://secret@store/vm0", "password");
    refused("nbd://store/vm0?key=secret", "unknown parameter key");
}

#[test]
fn images_of_ceph() {
    let full = RbdLocation {
        pool: "pool".into(),
        namespace: Some("space".into()),
        image: "disk".into(),
        snapshot: Some("monday".into()),
        id: Some("vm".into()),
        conf: Some("/c.conf".into()),
    };
    assert_eq!("rbd:pool/space/disk@monday:id=vm:conf=/c.conf".parse(), Ok(Location::Rbd(full)));
    let Ok(Location::Rbd(short)) = "rbd:pool/disk".parse() else { panic!() };
    assert_eq!((short.namespace, short.snapshot, short.id), (None, None, None));
    for wrong in
        ["rbd:disk", "rbd:/disk", "rbd:a/b/c/d", "rbd:pool/disk@", "rbd:pool/", "rbd:pool/disk?key=secret"]
    {
        refused(wrong, "rbd:POOL");
    }
    refused("rbd:pool/disk:key=secret", "unknown parameter key;");
}

#[test]
fn objects() {
    let Ok(Location::S3(s3)) = "s3://bucket/a/b.img?endpoint=http://127.0.0.1:5000&region=x".parse() else {
        panic!()
    };
    assert_eq!((s3.bucket.as_str(), s3.key.as_str(), s3.region.as_deref()), ("bucket", "a/b.img", Some("x")));
    refused("s3://bucket", "names no object");
    refused("s3://bucket/key?endpoint=http://user:secret@host", "password");
    refused("ftp://user:secret@host/a", "unknown kind of URL");
    assert_eq!("./ftp://a".parse(), Ok(Location::File("./ftp://a".into())));
    let Ok(Location::Http(plain)) = "https://host/a.img?b#".parse() else { panic!() };
    assert_eq!((plain.url.as_str(), plain.files), ("https://host/a.img?b", ObjectFiles::default()));
}

#[test]
fn files_of_objects() {
    let files = ObjectFiles { certificates: Some("/etc/pki/a b".into()), digests: Some("/list".into()) };
    let named = "tls-certificates=/etc/pki/a%20b&digests=/list";
    let Ok(Location::Http(http)) = format!("https://host/a?digests=x#{named}").parse() else { panic!() };
    assert_eq!((http.url.as_str(), &http.files), ("https://host/a?digests=x", &files));
    let Ok(Location::S3(s3)) = format!("s3://bucket/k?credentials=/keys&{named}").parse() else { panic!() };
    assert_eq!((&s3.credentials, &s3.files), (&Some("/keys".into()), &files));
    assert_eq!(Location::S3(s3).keys(), [Path::new("/etc/pki/a b"), Path::new("/keys")]);
    refused("http://host/a#tls-certificates=/x", "certificates need the scheme https");
    refused("s3://b/k?endpoint=http://h&tls-certificates=/x", "an endpoint with https");
    refused("https://host/a#credentials=/x", "unknown parameter credentials after #");
    refused("s3://bucket/k?key=secret", "unknown parameter key");
}

#[test]
fn a_location_is_shown_without_secrets_and_read_again() {
    for text in [
        "images/vm0.img",
        "nbd://store:10809/vm0",
        "nbds://[::1]:7/a%20b/c",
        "nbd+unix:///vm0?socket=/run/nbd.sock",
        "rbd:pool/space/disk@monday",
        "s3://bucket/a/b.img",
        "https://host/a.img",
    ] {
        let location: Location = text.parse().unwrap();
        assert_eq!(location.to_string(), text);
    }
    let signed: Location = "https://host/a.img?signature=secret#digests=/list".parse().unwrap();
    assert_eq!(signed.to_string(), "https://host/a.img");
    let keys: Location = "s3://bucket/k?credentials=/keys".parse().unwrap();
    assert_eq!(keys.to_string(), "s3://bucket/k");
}

#[test]
fn relative_paths_are_relative_to_a_folder() {
    let resolved = |text: &str| {
        let mut location: Location = text.parse().unwrap();
        location.resolve(Path::new("/etc/p"));
        location
    };
    assert_eq!(resolved("a.img"), Location::File("/etc/p/a.img".into()));
    let Location::Nbd(nbd) = resolved("nbds+unix:///x?socket=s&tls-certificates=/pki&tls-hostname=h") else {
        panic!()
    };
    assert_eq!(nbd.target, Target::Unix("/etc/p/s".into()));
    assert_eq!(nbd.tls.unwrap().folder, Some("/pki".into()));
    let Location::Rbd(rbd) = resolved("rbd:a/b:conf=c") else { panic!() };
    assert_eq!(rbd.conf, Some("/etc/p/c".into()));
    let Location::S3(s3) = resolved("s3://b/k?credentials=keys&digests=list") else { panic!() };
    assert_eq!((s3.credentials, s3.files.digests), (Some("/etc/p/keys".into()), Some("/etc/p/list".into())));
    let Location::Http(http) = resolved("https://h/k#tls-certificates=pki") else { panic!() };
    assert_eq!(http.files.certificates, Some("/etc/p/pki".into()));
}

#[test]
fn a_name_is_the_last_part() {
    let name = |text: &str| text.parse::<Location>().unwrap().name();
    assert_eq!(name("/images/vm0.img"), "vm0.img");
    assert_eq!(name("nbd://store/group/vm0"), "vm0");
    assert_eq!(name("rbd:pool/disk@monday"), "disk");
    assert_eq!(name("https://host/images/vm0.img?x=/y"), "vm0.img");
}
