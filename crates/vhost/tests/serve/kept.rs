//! Exports that are left to their keeper while clients use them, and recovered from what that has.
//!
//! `crates/cli/tests/serve/kill*` kill processes; here the records are looked at and changed.
use crate::driver::Random;
use crate::iotlb::Iommu;
use crate::raw::{GPA, Machine, Raw};
use crate::rig::DISK;
use paravane_device::blk::{Blk, BlkConfig};
use paravane_export::keeper::RECORD;
use paravane_export::record_file::RecordFile;
use paravane_export::{Endpoint, Exchanged, Export, ExportError, Keeper, Kept, KeptError};
use paravane_spec::feature::{ACCESS_PLATFORM, EVENT_IDX, INDIRECT_DESC, RING_PACKED};
use paravane_spec::vhost_user::{F_LOG_ALL, F_PROTOCOL_FEATURES, LOG_PAGE, LogArea, request};
use paravane_vhost::ExportConfig;
use rustix::fs::{MemfdFlags, memfd_create};
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use tempfile::TempDir;
use zerocopy::IntoBytes;

const LAYOUTS: [u64; 4] =
    [0, INDIRECT_DESC | EVENT_IDX, RING_PACKED, RING_PACKED | INDIRECT_DESC | EVENT_IDX];

/// A keeper that is no other process.
#[derive(Clone, Debug, Default)]
struct Shelf(Arc<Mutex<BTreeMap<u64, OwnedFd>>>);

impl Keeper for Shelf {
    fn put(&mut self, number: u64, fd: BorrowedFd<'_>) -> io::Result<()> {
        let before = self.0.lock().unwrap().insert(number, fd.try_clone_to_owned()?);
        assert!(before.is_none(), "{number} is in use");
        Ok(())
    }

    fn remove(&mut self, number: u64) -> io::Result<()> {
        assert!(self.0.lock().unwrap().remove(&number).is_some(), "there is no {number}");
        Ok(())
    }
}

impl Shelf {
    fn copies(&self) -> Vec<(u64, OwnedFd)> {
        let all = self.0.lock().unwrap();
        all.iter().map(|(number, fd)| (*number, fd.try_clone().unwrap())).collect()
    }

    /// Changes the content of the record file.
    fn change(&self, change: impl FnOnce(&mut Content)) {
        let fd = self.0.lock().unwrap()[&RECORD].try_clone().unwrap();
        let (mut file, record) = RecordFile::open(fd).unwrap();
        let mut content = Content::read(&record.unwrap());
        change(&mut content);
        file.write(&content.write()).unwrap();
    }
}

/// A record with the numbers of its descriptors (docs/reference/handover-record.md).
struct Content {
    device: u32,
    numbers: Vec<u64>,
    /// Magic number and version.
    head: [u8; 12],
    sections: Vec<u8>,
}

impl Content {
    fn read(bytes: &[u8]) -> Self {
        let word = |at: usize| u32::from_le_bytes(std::array::from_fn(|byte| bytes[at + byte]));
        let count = word(0) as usize;
        let number =
            |index: usize| u64::from_le_bytes(std::array::from_fn(|byte| bytes[8 + index * 8 + byte]));
        let record = &bytes[8 + count * 8..];
        let head = std::array::from_fn(|byte| record[byte]);
        let sections = record[16..record.len() - 4].to_vec();
        Self { device: word(4), numbers: (0..count).map(number).collect(), head, sections }
    }

    fn write(&self) -> Vec<u8> {
        let mut record = self.head.to_vec();
        record.extend((16 + self.sections.len() as u32 + 4).to_le_bytes());
        record.extend(&self.sections);
        record.extend(crc32fast::hash(&record).to_le_bytes());
        let mut content = [self.numbers.len() as u32, self.device].map(u32::to_le_bytes).concat();
        self.numbers.iter().for_each(|number| content.extend(number.to_le_bytes()));
        content.extend(record);
        content
    }

    fn add(&mut self, tag: u32, fds: &[u64], value: &[u8]) {
        self.numbers.extend(fds);
        self.sections.extend([tag, fds.len() as u32, value.len() as u32].map(u32::to_le_bytes).concat());
        self.sections.extend(value);
    }

    fn has(&self, tag: u32) -> bool {
        let mut rest = &self.sections[..];
        while let Some((head, more)) = rest.split_first_chunk::<12>() {
            if u32::from_le_bytes([head[0], head[1], head[2], head[3]]) == tag {
                return true;
            }
            rest = &more[u32::from_le_bytes([head[8], head[9], head[10], head[11]]) as usize..];
        }
        false
    }
}

/// Disk of two queues, with a keeper.
struct Disk {
    folder: TempDir,
    shelf: Shelf,
    export: Option<Export>,
}

impl Disk {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("disk.img"), vec![0; DISK]).unwrap();
        let mut disk = Self { folder, shelf: Shelf::default(), export: None };
        disk.start();
        disk
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("vhost.sock")
    }

    fn parts(&self) -> (ExportConfig, Box<Blk>) {
        let mut config = ExportConfig::new("kept", Endpoint::Listen(self.socket()));
        config.workers = 2;
        config.keeper = Some(Box::new(self.shelf.clone()));
        let image = self.folder.path().join("disk.img");
        (config, Box::new(Blk::open(BlkConfig { queues: 2, ..BlkConfig::new(image) }).unwrap()))
    }

    fn start(&mut self) {
        let (config, device) = self.parts();
        self.export = Some(Export::start(config, device).unwrap());
    }

    fn export(&self) -> &Export {
        self.export.as_ref().unwrap()
    }

    fn wait_until_kept(&self) {
        crate::rig::wait_for(|| self.export().status(), |status| status.kept);
    }

    /// Ends the export, whose session stays.
    fn leave(&mut self) {
        self.wait_until_kept();
        let export = self.export.take().unwrap();
        export.begin_leave();
        export.join().unwrap();
    }

    fn recover(&mut self) {
        let kept = Kept::open(self.shelf.copies()).unwrap().expect("a session was kept");
        let (config, device) = self.parts();
        let export = Export::recover(config, device, kept).unwrap();
        // From the first moment on: a daemon may be stopped before its first record.
        assert!(export.status().kept);
        self.export = Some(export);
    }

    /// Takes the state of the export for the next one, when its session is kept.
    fn begin_exchange(&mut self) -> Exchanged {
        self.wait_until_kept();
        let export = self.export.take().unwrap();
        export.begin_exchange();
        export.join().unwrap();
        export.take_exchange().unwrap().unwrap()
    }

    /// Exchanges the export. `between` is called when none serves, and returns what is kept.
    fn exchange(&mut self, next: Next, between: impl FnOnce(&Self) -> Kept) {
        let exchanged = self.begin_exchange();
        let copy = exchanged.try_clone().unwrap();
        let kept = between(self);
        if matches!(next, Next::Kill) {
            // As if the process had died: nothing runs.
            std::mem::forget((exchanged, copy));
            let (config, device) = self.parts();
            self.export = Some(Export::recover(config, device, kept).unwrap());
            return;
        }
        if matches!(next, Next::SecondCopy) {
            let (mut config, device) = self.parts();
            config.endpoint = Endpoint::Listen(self.folder.path().join("other.sock"));
            Export::exchange(config, device, exchanged).unwrap_err();
            self.start_exchanged(copy);
            return;
        }
        self.start_exchanged(exchanged);
        drop(copy);
        if matches!(next, Next::KillLater) {
            // Whether it has written its record or not.
            self.leave();
            self.recover();
        }
    }

    fn start_exchanged(&mut self, exchanged: Exchanged) {
        let (config, device) = self.parts();
        let export = Export::exchange(config, device, exchanged).unwrap();
        assert!(export.status().kept);
        self.export = Some(export);
    }

    fn content(&self) -> Vec<u8> {
        std::fs::read(self.folder.path().join("disk.img")).unwrap()
    }
}

#[test]
fn a_session_that_is_left_goes_on() {
    for features in LAYOUTS {
        for tracked in [false, true] {
            let mut disk = Disk::new();
            let (mut model, mut random) = (vec![0; DISK], Random::new(51));
            let raw = Raw::connect(&disk.socket());
            let mut machine = Machine::new(features, 64, 16);
            machine.attach(&raw, machine.first_base(), tracked);
            for _ in 0..30 {
                machine.fill(DISK, &mut random);
                disk.leave();
                // Kicks are counted while nobody serves.
                machine.fill(DISK, &mut random);
                disk.recover();
                machine.finish(&mut model);
            }
            let status = disk.export().status();
            assert_eq!((status.sessions, status.protocol_errors, status.last_error), (1, 0, None));
            disk.export.take().unwrap().stop();
            assert!(disk.shelf.copies().is_empty(), "an export that is stopped leaves nothing");
            assert!(!disk.socket().exists());
            assert!(disk.content() == model);
        }
    }
}

/// What comes after the queues of an export that is exchanged are drained.
#[derive(Clone, Copy)]
enum Next {
    Exchange,
    /// An export fails with a copy of the state, and the next one resumes from a second copy.
    SecondCopy,
    Kill,
    /// A kill when the new export serves.
    KillLater,
}

#[test]
fn a_record_of_the_session_is_kept_at_each_point_of_an_exchange() {
    let all = [Next::Exchange, Next::Kill, Next::Exchange, Next::SecondCopy, Next::KillLater, Next::Kill];
    for features in LAYOUTS {
        for tracked in [false, true] {
            let mut disk = Disk::new();
            let (mut model, mut random) = (vec![0; DISK], Random::new(55));
            let raw = Raw::connect(&disk.socket());
            let mut machine = Machine::new(features, 64, 16);
            machine.attach(&raw, machine.first_base(), tracked);
            for next in all.into_iter().cycle().take(3 * all.len()) {
                machine.fill(DISK, &mut random);
                disk.exchange(next, |disk| {
                    // Kicks are counted while nobody serves.
                    machine.fill(DISK, &mut random);
                    Kept::open(disk.shelf.copies()).unwrap().expect("a session is kept")
                });
                machine.finish(&mut model);
                assert_eq!(raw.ask_number(request::GET_QUEUE_NUM), 2);
            }
            let status = disk.export().status();
            assert_eq!((status.sessions, status.protocol_errors, status.last_error), (1, 0, None));
            disk.export.take().unwrap().stop();
            assert!(disk.shelf.copies().is_empty(), "an export that is stopped leaves nothing");
            assert!(disk.content() == model);
        }
    }
}

#[test]
fn what_no_export_continues_is_not_kept() {
    let mut disk = Disk::new();
    let raw = Raw::connect(&disk.socket());
    let mut machine = Machine::new(0, 64, 16);
    machine.attach(&raw, 0, false);
    let exchanged = disk.begin_exchange();
    let copy = exchanged.try_clone().unwrap();
    drop(exchanged);
    assert!(!disk.shelf.copies().is_empty());
    drop(copy);
    assert!(disk.shelf.copies().is_empty());
    assert!(raw.is_closed());
    // Nor what nobody has taken.
    disk.start();
    let raw = Raw::connect(&disk.socket());
    machine.attach(&raw, 0, false);
    disk.wait_until_kept();
    let export = disk.export.take().unwrap();
    export.begin_exchange();
    export.join().unwrap();
    assert!(!disk.shelf.copies().is_empty());
    drop(export);
    assert!(disk.shelf.copies().is_empty());
}

#[test]
fn translations_are_asked_for_again() {
    for features in LAYOUTS {
        let mut disk = Disk::new();
        let (mut model, mut random) = (vec![0; DISK], Random::new(52));
        let raw = Raw::connect(&disk.socket());
        let mut machine = Machine::new(features | ACCESS_PLATFORM, 64, 16);
        machine.attach(&raw, machine.first_base(), false);
        let iommu = Iommu::new(&raw);
        for _ in 0..20 {
            machine.fill(DISK, &mut random);
            iommu.answer(&[&machine]);
            disk.leave();
            disk.recover();
            iommu.finish(&mut machine, &mut model);
        }
        assert_eq!(disk.export().status().last_error, None);
        drop(raw);
        disk.export.take().unwrap().stop();
        assert!(disk.content() == model);
    }
}

#[test]
fn the_dirty_log_goes_on() {
    let mut disk = Disk::new();
    let (mut model, mut random) = (vec![0; DISK], Random::new(53));
    let raw = Raw::connect(&disk.socket());
    let mut machine = Machine::new(0, 64, 16);
    machine.attach(&raw, 0, false);
    let file = File::from(memfd_create("log", MemfdFlags::CLOEXEC).unwrap());
    let area = LogArea { size: (GPA + (2 << 20)) / LOG_PAGE / 8, offset: 0 };
    file.set_len(area.size).unwrap();
    raw.send(request::SET_LOG_BASE, area.as_bytes(), &[file.as_fd()]).unwrap();
    assert_eq!(raw.receive().unwrap().0.request, request::SET_LOG_BASE);
    raw.say(request::SET_FEATURES, &(machine.features | F_PROTOCOL_FEATURES | F_LOG_ALL), &[]);
    for _ in 0..10 {
        disk.leave();
        disk.recover();
        file.write_all_at(&vec![0; area.size as usize], 0).unwrap();
        machine.fill(DISK, &mut random);
        machine.finish(&mut model);
        let mut marks = vec![0; area.size as usize];
        file.read_exact_at(&mut marks, 0).unwrap();
        assert!(marks.iter().any(|byte| *byte != 0), "writes to guest memory are not in the log");
    }
}

/// Tags of later versions: one that can be skipped, and one that must be known.
const OPTIONAL: u32 = 0x777;
const REQUIRED: u32 = 0x4000_0777;

#[test]
fn a_record_of_a_changed_version_is_resumed_and_one_of_this_version_follows() {
    for features in LAYOUTS {
        let mut disk = Disk::new();
        let (mut model, mut random) = (vec![0; DISK], Random::new(54));
        let raw = Raw::connect(&disk.socket());
        let mut machine = Machine::new(features, 64, 16);
        machine.attach(&raw, machine.first_base(), false);
        for round in 0..10 {
            machine.fill(DISK, &mut random);
            disk.leave();
            // A later version adds what this one does not know, with a descriptor.
            let number = 1_000_000 + round;
            disk.shelf.clone().put(number, io::stderr().as_fd()).unwrap();
            disk.shelf.change(|content| content.add(OPTIONAL, &[number], b"more"));
            disk.recover();
            machine.finish(&mut model);
            // The answer comes when this version has recorded its own state.
            assert_eq!(raw.ask_number(request::GET_QUEUE_NUM), 2);
            machine.fill(DISK, &mut random);
            disk.leave();
            disk.shelf.change(|content| assert!(!content.has(OPTIONAL), "what is not known was written"));
            assert!(!disk.shelf.0.lock().unwrap().contains_key(&number), "its descriptor is still kept");
            // Back to the later version, which reads what this one wrote: it is that of this test.
            disk.recover();
            machine.finish(&mut model);
        }
        assert_eq!(disk.export().status().sessions, 1);
        drop(raw);
        disk.export.take().unwrap().stop();
        assert!(disk.content() == model);
    }
}

#[test]
fn a_record_that_is_not_understood_disconnects_its_client_alone() {
    let refused: [fn(&mut Content); 3] = [
        |content| content.add(REQUIRED, &[], b""),
        |content| content.head[8] = 2,
        |content| content.sections.truncate(20),
    ];
    for change in refused {
        let mut disk = Disk::new();
        let raw = Raw::connect(&disk.socket());
        let mut machine = Machine::new(0, 64, 16);
        machine.attach(&raw, 0, false);
        disk.leave();
        disk.shelf.change(change);
        let kept = Kept::open(disk.shelf.copies()).unwrap().unwrap();
        let (config, device) = disk.parts();
        let error = Export::recover(config, device, kept).unwrap_err();
        assert!(matches!(error, ExportError::Handover(_)), "{error}");
        // What its owner does then.
        disk.shelf.0.lock().unwrap().clear();
        assert!(raw.is_closed());
        disk.start();
        let raw = Raw::connect(&disk.socket());
        let mut machine = Machine::new(0, 64, 16);
        machine.attach(&raw, 0, false);
        machine.fill(DISK, &mut Random::new(55));
        machine.finish(&mut vec![0; DISK]);
    }
}

#[test]
fn what_is_no_export_is_refused() {
    let mut disk = Disk::new();
    let raw = Raw::connect(&disk.socket());
    raw.begin(0);
    disk.leave();
    let open = |keep: fn(u64) -> bool| {
        Kept::open(disk.shelf.copies().into_iter().filter(|(number, _)| keep(*number)).collect())
    };
    assert!(open(|_| true).unwrap().is_some());
    assert!(matches!(open(|number| number != RECORD), Err(KeptError::Files(0))));
    assert!(matches!(open(|number| number == RECORD), Err(KeptError::Missing(_))));
    let twice = disk.shelf.copies().into_iter().chain(disk.shelf.copies()).collect();
    assert!(matches!(Kept::open(twice), Err(KeptError::Files(2))));
    assert!(matches!(
        Kept::open(vec![(RECORD, io::stderr().as_fd().try_clone_to_owned().unwrap())]),
        Err(KeptError::File(_))
    ));
    let fd = disk.shelf.0.lock().unwrap()[&RECORD].try_clone().unwrap();
    let mut file = RecordFile::open(fd).unwrap().0;
    for list in [&[1_u8][..], &[1, 0, 0, 0, 0, 0, 0, 0], &[0, 0, 0, 0, 1, 0, 0, 0]] {
        file.write(list).unwrap();
        assert!(matches!(open(|_| true), Err(KeptError::List)), "{list:?}");
    }
    file.write(&[]).unwrap();
    assert!(open(|_| true).unwrap().is_none());
}
