//! What is wrong with a location, a configuration or a user.
use crate::cluster::Cluster;
use paravane_store::RbdLocation;
use paravane_store::rbd::{Rbd, RbdError, RbdOptions, RbdReason};
use std::fs;
use std::net::TcpListener;
use std::path::Path;
use std::time::Duration;

fn fails(location: &RbdLocation) -> RbdError {
    let options = RbdOptions { timeout: Duration::from_secs(5), ..RbdOptions::default() };
    let error = Rbd::open(location, &options).expect_err("it cannot be opened");
    assert!(error.to_string().starts_with(&format!("{location}: ")), "{error}");
    error
}

#[test]
fn names_that_do_not_exist() {
    let Some(cluster) = Cluster::find("names_that_do_not_exist") else { return };
    let _up = cluster.in_use();
    let image = cluster.image("names", "1M", &[]);
    let known = image.location();
    paravane_store::rbd::load().expect("the libraries");
    let error = fails(&RbdLocation { image: "nowhere".into(), ..known.clone() });
    assert_eq!(
        error.to_string(),
        "rbd:pool/nowhere: there is no such image; `rbd ls` and `rbd snap ls` list them"
    );
    let error = fails(&RbdLocation { snapshot: Some("never".into()), ..known.clone() });
    assert!(error.to_string().contains("@never: there is no such image or snapshot; "), "{error}");
    let error = fails(&RbdLocation { namespace: Some("empty".into()), ..known.clone() });
    assert!(matches!(error.reason, RbdReason::Unknown { .. }), "{error}");
    let error = fails(&RbdLocation { pool: "nowhere".into(), ..known.clone() });
    assert!(error.to_string().contains("cannot use the pool nowhere: "), "{error}");
    let error = fails(&RbdLocation { image: "a\0b".into(), ..known.clone() });
    assert!(matches!(error.reason, RbdReason::Name(_)), "{error}");
    let error = fails(&RbdLocation { conf: Some("/nowhere/ceph.conf".into()), ..known });
    assert!(error.to_string().contains("cannot read /nowhere/ceph.conf: "), "{error}");
}

/// A configuration like the cluster's, with another keyring.
fn conf_with_keyring(cluster: &Cluster, folder: &Path, keyring: &str) -> std::path::PathBuf {
    let file = folder.join("keyring");
    fs::write(&file, keyring).unwrap();
    let text = fs::read_to_string(cluster.conf()).unwrap();
    let lines = text.lines().map(|line| match line.split('=').next().map(str::trim) {
        Some("keyring") => format!("keyring = {}\n", file.display()),
        _ => format!("{line}\n"),
    });
    let conf = folder.join("ceph.conf");
    fs::write(&conf, lines.collect::<String>()).unwrap();
    conf
}

#[test]
fn users_without_the_right_key() {
    let Some(cluster) = Cluster::find("users_without_the_right_key") else { return };
    let _up = cluster.in_use();
    let image = cluster.image("users", "1M", &[]);
    let folder = tempfile::tempdir().unwrap();
    let user = format!("vm{}", std::process::id());
    let as_user = |keyring: &str| RbdLocation {
        id: Some(user.clone()),
        conf: Some(conf_with_keyring(&cluster, folder.path(), keyring)),
        ..image.location()
    };
    let entity = format!("client.{user}");
    let keyring = folder.path().join("keyring");
    let error = fails(&as_user(""));
    let expected = format!("{} has no key of it", keyring.display());
    assert!(error.to_string().contains(&expected), "{error}");
    let no_file = as_user("");
    fs::remove_file(&keyring).unwrap();
    let error = fails(&no_file);
    let expected = format!("{entity} needs a key, and there is no keyring at {}; ", keyring.display());
    assert!(error.to_string().contains(&expected), "{error}");

    let key = cluster.text("ceph", &["auth", "get-or-create", &entity, "mon", "profile rbd"]);
    // A key that is well-formed, and another's.
    let admin = cluster.text("ceph", &["auth", "get-key", "client.admin"]);
    let error = fails(&as_user(&format!("[{entity}]\n\tkey = {admin}\n")));
    assert!(error.to_string().contains(&format!("refuses {entity}")), "{error}");
    assert!(!error.to_string().contains(admin.trim()), "a secret is shown: {error}");
    // The right key of a user that may not read the pool.
    let error = fails(&as_user(&key));
    assert!(error.to_string().contains(&format!("{entity} has no right to it")), "{error}");
    // What the message proposes helps.
    cluster.run("ceph", &["auth", "caps", &entity, "mon", "profile rbd", "osd", "profile rbd pool=pool"]);
    Rbd::open(&as_user(&key), &RbdOptions::default()).expect("with the right to it");
    cluster.run(
        "ceph",
        &["auth", "caps", &entity, "mon", "profile rbd", "osd", "profile rbd-read-only pool=pool"],
    );
    let read_only = RbdOptions { read_only: true, ..RbdOptions::default() };
    Rbd::open(&as_user(&key), &read_only).expect("with the right to read");
    let error = fails(&as_user(&key));
    assert!(error.to_string().contains(&format!("{entity} has no right to it")), "{error}");
    cluster.run("ceph", &["auth", "rm", &entity]);
}

#[test]
fn a_cluster_that_does_not_answer() {
    let Some(cluster) = Cluster::find("a_cluster_that_does_not_answer") else { return };
    let folder = tempfile::tempdir().unwrap();
    // Accepts connections, and says nothing.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("v2:{}/0", silent.local_addr().unwrap());
    let text = fs::read_to_string(cluster.conf()).unwrap();
    let lines = text.lines().map(|line| match line.split('=').next().map(str::trim) {
        Some("mon host") => format!("mon host = {address}\n"),
        _ => format!("{line}\n"),
    });
    let conf = folder.path().join("ceph.conf");
    fs::write(&conf, lines.collect::<String>()).unwrap();
    let location =
        RbdLocation { pool: "pool".into(), image: "disk".into(), conf: Some(conf), ..RbdLocation::default() };
    let error = fails(&location);
    assert!(error.to_string().contains(&format!("from the monitors {address}")), "{error}");
}
