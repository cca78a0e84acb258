//! A disk on a block device: a loop device over a file, where permitted.
use super::super::OpenError;
use super::*;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::process::Command;

const DISK: usize = 1 << 20;

/// Detached when it goes.
struct Loop {
    path: PathBuf,
    _file: NamedTempFile,
}

impl Loop {
    fn new(test: &str, content: &[u8]) -> Option<Self> {
        let file = image(content);
        let why = match Command::new("losetup").args(["--find", "--show"]).arg(file.path()).output() {
            Ok(output) if output.status.success() => {
                let path = PathBuf::from(String::from_utf8(output.stdout).unwrap().trim());
                return Some(Self { path, _file: file });
            }
            Ok(output) => String::from_utf8_lossy(&output.stderr).trim().to_owned(),
            Err(error) => format!("losetup: {error}"),
        };
        skipped(test, &why);
        None
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let detached = Command::new("losetup").arg("--detach").arg(&self.path).status();
        assert!(detached.is_ok_and(|status| status.success()), "{} is left over", self.path.display());
    }
}

#[test]
fn a_block_device_is_a_disk() {
    let Some(device) = Loop::new("a_block_device_is_a_disk", &pattern(DISK, 50)) else { return };
    for way in ways("a_block_device_is_a_disk") {
        let disk = Blk::open(config_at(&device.path, way)).unwrap();
        assert_eq!(disk.size(), DISK as u64);
        let again = Blk::open(BlkConfig::new(&device.path));
        assert!(matches!(again, Err(OpenError::InUse { .. })), "{again:?}");

        let mut rig = Rig::new(disk);
        let data = pattern(8192, 51);
        assert_eq!(rig.status(blk::T_OUT, 8, &data), blk::S_OK);
        assert_eq!(rig.status(blk::T_FLUSH, 0, &[]), blk::S_OK);
        assert_eq!(rig.read(8, 8192), data);
        assert_eq!(rig.read(100, 512), pattern(DISK, 50)[100 * 512..101 * 512]);
        // Not aligned to anything but sectors, and with and without unmapping.
        let ranges = [range(9, 3, 0), range(16, 8, blk::WRITE_ZEROES_F_UNMAP)].concat();
        assert_eq!(rig.status(blk::T_WRITE_ZEROES, 0, &ranges), blk::S_OK);
        assert_eq!(rig.read(9, 3 * 512), [0; 3 * 512]);
        assert_eq!(rig.read(16, 8 * 512), [0; 8 * 512]);
        assert_eq!(rig.read(8, 512), data[..512]);
        assert_eq!(rig.status(blk::T_DISCARD, 0, &range(1024, 1024, 0)), blk::S_OK);
        assert_eq!(rig.request(blk::T_IN, 2048, &[], 512).status, blk::S_IOERR);
    }
}

#[test]
fn a_block_device_that_the_host_uses_is_refused() {
    let Some(device) = Loop::new("a_block_device_that_the_host_uses_is_refused", &pattern(DISK, 52)) else {
        return;
    };
    // What mounting does, too.
    let claim = std::fs::OpenOptions::new().read(true).custom_flags(libc::O_EXCL).open(&device.path).unwrap();
    let opened = Blk::open(BlkConfig::new(&device.path));
    assert!(matches!(opened, Err(OpenError::InUse { .. })), "{opened:?}");
    drop(Blk::open(BlkConfig { read_only: true, ..BlkConfig::new(&device.path) }).unwrap());
    drop(claim);
    Blk::open(BlkConfig::new(&device.path)).unwrap();
}
