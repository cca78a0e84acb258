//! Clients that come, work and go.
use crate::driver::{Dice, Driver, Wish};
use crate::rig::{DISK, Rig};
use paravane_vhost::{Endpoint, Export, ExportConfig, ExportError};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::UnixListener;

#[test]
fn a_disk_serves_one_driver_after_the_other() {
    let rig = Rig::new(2);
    let mut model = vec![0; DISK];
    let mut dice = Dice::new(1);
    let mut sessions = 0;
    for packed in [false, true, true, false] {
        for event_idx in [false, true] {
            for (queues, depth) in [(1, 1), (1, 32), (2, 16)] {
                let wish = Wish { packed, event_idx, queues, depth };
                let mut driver = Driver::connect(&rig.socket(), wish).unwrap();
                driver.exercise(&mut model, 300, &mut dice);
                sessions += 1;
                let status = rig.status();
                assert!(status.connected);
                assert_eq!(status.sessions, sessions);
                assert!(status.queues[0].live && status.queues[0].enabled);
                drop(driver);
            }
        }
    }
    let status = rig.wait_for(|status| !status.connected);
    assert_eq!((status.protocol_errors, &status.last_error), (0, &None));
    for queue in &status.queues {
        assert_eq!(queue.taken, queue.completed);
        assert!(queue.interrupts > 0 && queue.kicks > 0 && !queue.live, "{queue:?}");
    }
    let (one, two) = (status.queues[0].taken, status.queues[1].taken);
    assert_eq!((one, two), (300 * sessions, 300 * 8));
    drop(rig.export);
    assert!(std::fs::read(rig.folder.path().join("disk.img")).unwrap() == model);
}

#[test]
fn a_socket_is_private_and_goes_with_its_export() {
    let mut rig = Rig::new(1);
    let path = rig.socket();
    let found = std::fs::symlink_metadata(&path).unwrap();
    assert!(found.file_type().is_socket());
    assert_eq!(found.permissions().mode() & 0o777, 0o600);
    // A second server finds it taken.
    let config = ExportConfig::new("second", Endpoint::Listen(path.clone()));
    let disk = || Box::new(paravane_device::rng::Rng::new());
    assert!(matches!(Export::start(config, disk()), Err(ExportError::InUse { .. })));
    rig.export.take().unwrap().stop();
    assert!(!path.exists());
    // One that a dead server has left behind is replaced.
    drop(UnixListener::bind(&path).unwrap());
    rig.start(1);
    rig.export.take().unwrap().stop();
    assert!(!path.exists());
    // A file that is no socket stays.
    std::fs::write(&path, "precious").unwrap();
    let config = ExportConfig::new("third", Endpoint::Listen(path.clone()));
    assert!(matches!(Export::start(config, disk()), Err(ExportError::NotASocket { .. })));
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
}
