//! A disk on a block device: a loop device over a file, where permitted.
use super::super::{Geometry, OnFull, OpenError, OpenReason};
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
        Self::with(test, content, &[])
    }

    /// With these options of losetup.
    fn with(test: &str, content: &[u8], options: &[&str]) -> Option<Self> {
        let file = image(content);
        let mut losetup = Command::new("losetup");
        let why = match losetup.args(["--find", "--show"]).args(options).arg(file.path()).output() {
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
        assert!(matches!(again, Err(OpenError { reason: OpenReason::InUse, .. })), "{again:?}");

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
    assert!(matches!(opened, Err(OpenError { reason: OpenReason::InUse, .. })), "{opened:?}");
    drop(Blk::open(BlkConfig { read_only: true, ..BlkConfig::new(&device.path) }).unwrap());
    drop(claim);
    Blk::open(BlkConfig::new(&device.path)).unwrap();
}

#[test]
fn a_read_only_block_device_is_refused_for_writing() {
    let test = "a_read_only_block_device_is_refused_for_writing";
    let Some(device) = Loop::with(test, &pattern(DISK, 53), &["--read-only"]) else { return };
    let opened = Blk::open(BlkConfig::new(&device.path));
    assert!(matches!(opened, Err(OpenError { reason: OpenReason::ReadOnly, .. })), "{opened:?}");
    let told = BlkConfig::new(&device.path).geometry_of_device();
    assert!(matches!(told, Err(OpenError { reason: OpenReason::ReadOnly, .. })), "{told:?}");
    let disk = Blk::open(BlkConfig { read_only: true, ..BlkConfig::new(&device.path) }).unwrap();
    assert_eq!(Rig::new(disk).read(8, 512), pattern(DISK, 53)[4096..4608]);
}

#[test]
fn a_disk_may_have_smaller_blocks_than_its_device() {
    let test = "a_disk_may_have_smaller_blocks_than_its_device";
    let before = pattern(DISK, 54);
    let Some(device) = Loop::with(test, &before, &["--sector-size", "4096"]) else { return };
    let mut engines = vec![EngineChoice::Immediate, EngineChoice::Threads];
    match io_uring_available() {
        Ok(()) => engines.push(EngineChoice::IoUring),
        Err(why) => skipped(test, why.to_string()),
    }
    let block = |disk: &Blk| disk.current.image().file.block;
    let own = BlkConfig { direct: true, ..BlkConfig::new(&device.path) };
    assert_eq!(block(&Blk::open(own.clone()).unwrap()), 4096, "what the device takes");
    assert_eq!(own.geometry_of_device().unwrap(), Geometry { size: DISK as u64, block: 4096 });
    for (number, engine) in (0..).zip(engines) {
        let config = BlkConfig { block_size: Some(512), engine, on_full: OnFull::Error, ..own.clone() };
        let disk = Blk::open(config).unwrap();
        assert_eq!((block(&disk), disk.current.image().file.physical_block), (512, 4096));
        let mut rig = Rig::new(disk);
        assert_eq!(rig.read(9, 512), before[9 * 512..10 * 512]);
        let sector = 16 + 64 * number;
        let (at, data) = (sector as usize * 512, pattern(9 * 512, sector));
        // A sector, sectors across a block's border, and a whole block.
        for (first, count) in [(1, 1), (6, 3), (8, 8)] {
            let part = &data[..count * 512];
            assert_eq!(rig.status(blk::T_OUT, sector + first, part), blk::S_OK, "{engine:?}");
            assert_eq!(rig.read(sector + first, count * 512), part, "{engine:?}");
        }
        assert_eq!(rig.status(blk::T_WRITE_ZEROES, 0, &range(sector + 17, 3, 0)), blk::S_OK);
        assert_eq!(rig.status(blk::T_FLUSH, 0, &[]), blk::S_OK);
        let mut model = before[at..at + 24 * 512].to_vec();
        for (first, count) in [(1, 1), (6, 3), (8, 8)] {
            model[first * 512..][..count * 512].copy_from_slice(&data[..count * 512]);
        }
        model[17 * 512..20 * 512].fill(0);
        assert!(rig.read(sector, 24 * 512) == model, "{engine:?}");
        assert_eq!(rig.device.errors().totals().operations, [0; 5]);
    }
}

#[test]
fn a_block_device_is_overwritten() {
    use super::super::images::{Content, Disk, ImageError, NewImage, NewQcow2, Use, copy};
    use super::super::{Format, LayerSource};
    let test = "a_block_device_is_overwritten";
    let mut content = pattern(DISK - 1536, 60);
    content[512..300_032].fill(0);
    content[600_000..].fill(0);
    let source = image(&content);
    let from = Disk::open(&LayerSource::Path(source.path().into()), Format::Raw, &[], Use::Read).unwrap();
    for sectors in ["512", "4096"] {
        let Some(device) = Loop::with(test, &pattern(2 * DISK, 61), &["--sector-size", sectors]) else {
            return;
        };
        let place = LayerSource::Path(device.path.clone());
        let size = from.size();
        for new in
            [NewImage::Raw(size), NewImage::Qcow2(NewQcow2 { size, cluster_size: 65536, backing: None })]
        {
            let (format, before) = match new {
                NewImage::Raw(_) => (Format::Raw, Content::Unknown),
                NewImage::Qcow2(_) => (Format::Qcow2, Content::Zeroes),
            };
            let to = Disk::overwrite(&place, &new).unwrap();
            assert!(matches!(
                Disk::overwrite(&place, &new),
                Err(ImageError::Open(OpenError { reason: OpenReason::InUse, .. }))
            ));
            copy(&from, &to, before, &mut |_| std::ops::ControlFlow::Continue(())).unwrap();
            drop(to);
            let disk = Disk::open(&place, format, &[], Use::Read).unwrap();
            let mut read = vec![1; disk.size() as usize];
            disk.read(&mut read, 0).unwrap();
            let mut expected = content.clone();
            expected.resize(disk.size() as usize, 0);
            assert!(read == expected, "{format:?} on sectors of {sectors} bytes");
        }
        let small = Disk::overwrite(&place, &NewImage::Raw(2 * DISK as u64 + 512));
        assert!(matches!(small, Err(ImageError::Small { .. })), "{small:?}");
    }
}
