//! The socket that an export listens on.
use crate::rig::Rig;
use paravane_export::{Endpoint, Export, ExportError};
use paravane_vhost::ExportConfig;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::UnixListener;

#[test]
fn a_socket_is_private_and_goes_with_its_export() {
    let mut rig = Rig::new(1);
    let path = rig.socket();
    let found = std::fs::symlink_metadata(&path).unwrap();
    assert!(found.file_type().is_socket());
    assert_eq!(found.permissions().mode() & 0o777, 0o600);
    // A second server finds it in use.
    let config = ExportConfig::new("second", Endpoint::Listen(path.clone()));
    let disk = || Box::new(paravane_device::rng::Rng::new());
    assert!(matches!(Export::start(config, disk()), Err(ExportError::InUse { .. })));
    rig.stop();
    assert!(!path.exists());
    // A stale socket of a dead server is replaced.
    drop(UnixListener::bind(&path).unwrap());
    rig.start(1);
    rig.stop();
    assert!(!path.exists());
    // Another file is kept.
    std::fs::write(&path, "precious").unwrap();
    let config = ExportConfig::new("third", Endpoint::Listen(path.clone()));
    assert!(matches!(Export::start(config, disk()), Err(ExportError::NotASocket { .. })));
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
}

#[test]
fn joining_waits_for_a_stop() {
    let folder = tempfile::tempdir().unwrap();
    let config = ExportConfig::new("joined", Endpoint::Listen(folder.path().join("s")));
    let export = Export::start(config, Box::new(paravane_device::rng::Rng::new())).unwrap();
    std::thread::scope(|scope| {
        let joined = [0, 1].map(|_| scope.spawn(|| export.join()));
        assert!(!export.has_ended());
        export.begin_stop();
        for thread in joined {
            thread.join().unwrap().unwrap();
            assert!(export.has_ended());
        }
    });
    assert!(!folder.path().join("s").exists());
}
