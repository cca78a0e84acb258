//! The dirty log against a full comparison of memory.
//!
//! While the driver stands still, only the device changes bytes, and their pages must be in the
//! log.
use crate::blk::{Blk, BlkConfig};
use crate::rig::{BASE, DATA, Rig, SIZE, becomes_readable, registered, segment};
use crate::rng::Rng;
use crate::{Device, Rest, ServeError};
use paravane_dma::{DirtyLog, DirtyPages, Segment};
use paravane_ring::device::QueueConfig;
use paravane_spec::{blk, feature};
use rustix::fs::{MemfdFlags, memfd_create};
use std::collections::BTreeSet;
use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::time::Duration;

const PAGE: u64 = 4096;
/// Where a device behind a domain sees what others see in its place.
const OFFSET: u64 = 0x12_3456_7000;

/// Every layout of the rings.
fn layouts(features: u64) -> [u64; 4] {
    let plain = features & !QueueConfig::FEATURES;
    let split = plain | QueueConfig::SPLIT_FEATURES;
    [plain, split, split | feature::RING_PACKED, split | feature::RING_PACKED | feature::IN_ORDER]
}

impl<D: Device> Rig<D> {
    fn log_on(&self) {
        let log = DirtyLog::new(self.memory.end(), PAGE).unwrap();
        self.memory.start_log(log, Duration::from_secs(60)).unwrap();
    }

    fn harvest(&self) -> BTreeSet<u64> {
        let mut pages = DirtyPages::new(BASE, SIZE, PAGE).unwrap();
        self.memory.log().expect("the log is on").harvest(&mut pages);
        pages.iter().collect()
    }

    /// Serves all that was added, and returns the logged pages.
    ///
    /// Fails if the memory of any other page has changed meanwhile.
    fn serve_logged(&mut self) -> Result<BTreeSet<u64>, ServeError> {
        self.harvest();
        let before = self.peek(BASE, SIZE as usize);
        let mut end = Ok(());
        loop {
            match self.serve() {
                Ok(served) if served.taken > 0 || served.completed > 0 => continue,
                Ok(_) if self.handler.rest(true) == Rest::Serve => continue,
                Ok(_) => {}
                Err(error) => {
                    self.handler.drain(&mut self.live, false);
                    end = Err(error);
                    break;
                }
            }
            if self.live.queue().in_flight() == 0 {
                break;
            }
            assert!(becomes_readable(registered(&mut *self.handler)), "a request was lost");
        }
        if end.is_ok() {
            self.live.arm_kicks().unwrap();
        }
        let after = self.peek(BASE, SIZE as usize);
        let logged = self.harvest();
        let changed = before.chunks(PAGE as usize).zip(after.chunks(PAGE as usize)).zip(0_u64..);
        for ((before, after), page) in changed {
            let addr = BASE + page * PAGE;
            assert!(before == after || logged.contains(&addr), "{addr:#x} has changed and is not in the log");
        }
        end.map(|()| logged)
    }

    fn forget_used(&mut self) {
        while self.driver.pop_used().unwrap().is_some() {}
    }
}

/// An image on the disk, or in memory.
fn image(in_memory: bool) -> File {
    let mut file = match in_memory {
        true => memfd_create(c"image", MemfdFlags::CLOEXEC).unwrap().into(),
        false => tempfile::tempfile().unwrap(),
    };
    file.write_all(&[0x5a; 1 << 20]).unwrap();
    file
}

fn disk(image: &File, features: impl Fn(u64) -> u64, offset: u64) -> Rig<Blk> {
    let path = format!("/proc/self/fd/{}", image.as_raw_fd());
    let mut device = Blk::open(BlkConfig::new(path)).unwrap();
    let features = features(device.features());
    let handler = device.start_queue(0, features).unwrap();
    Rig::behind(device, features, handler, offset)
}

fn header(rig: &Rig<Blk>, at: u64, kind: u32, sector: u64) {
    rig.poke(at, &[kind.to_le_bytes().as_slice(), &[0; 4], &sector.to_le_bytes()].concat());
}

#[test]
fn what_a_disk_writes_is_in_the_log() {
    for (offset, in_memory) in [(0, false), (0, true), (OFFSET, false), (OFFSET, true)] {
        for layout in 0..4 {
            let image = image(in_memory);
            let mut rig = disk(&image, |features| layouts(features)[layout], offset);
            rig.log_on();
            let at = |addr: u64, len: usize| -> Segment { segment(addr + offset, len) };
            // Buffers in pieces, across pages, and a status on a separate page.
            let (one, two, whole) = (DATA + 0x1_0000, DATA + 0x2_0ff0, DATA + 0x5_0e00);
            for turn in 0..100_u64 {
                let sector = turn * 7 % 1000;
                header(&rig, DATA, blk::T_IN, sector);
                let status = DATA + 0x10_0000 + turn % 3 * PAGE;
                rig.add(&[at(DATA, 16)], &[at(one, 512), at(two, 1024), at(status, 1)]);
                header(&rig, DATA + 16, blk::T_OUT, sector);
                rig.add(&[at(DATA + 16, 16), at(DATA + 0x3_0000, 512)], &[at(status + 1, 1)]);
                header(&rig, DATA + 32, blk::T_GET_ID, 0);
                rig.add(&[at(DATA + 32, 16)], &[at(DATA + 0x4_0000 + turn * 64, 20), at(status + 2, 1)]);
                header(&rig, DATA + 48, blk::T_IN, sector);
                rig.add(&[at(DATA + 48, 16)], &[at(whole, 1024), at(status + 3, 1)]);
                let logged = rig.serve_logged().unwrap();
                let across = |addr: u64| [addr & !4095, (addr & !4095) + PAGE];
                for page in [across(two), across(whole), [one & !4095, status & !4095]].concat() {
                    assert!(logged.contains(&page), "layout {layout}: {page:#x} was written");
                }
                assert!(!logged.contains(&(DATA + 0x3_0000)), "it was only read");
                rig.forget_used();
            }
        }
    }
}

#[test]
fn what_was_written_before_a_fault_is_in_the_log() {
    let mut rig = Rig::new(Rng::new());
    rig.log_on();
    rig.add(&[], &[segment(DATA, 64), segment(BASE + SIZE - 64, 128)]);
    let before = rig.peek(BASE + SIZE - PAGE, PAGE as usize);
    assert!(matches!(rig.serve_logged(), Err(ServeError::Queue(_))));
    assert_ne!(rig.peek(BASE + SIZE - PAGE, PAGE as usize), before, "it is to write as far as it can");
}

#[test]
fn what_the_entropy_device_writes_is_in_the_log() {
    for layout in 0..4 {
        let mut device = Rng::new();
        let features = layouts(device.features())[layout];
        let handler = device.start_queue(0, features).unwrap();
        let mut rig = Rig::behind(device, features, handler, OFFSET);
        rig.log_on();
        for turn in 0..50 {
            let len = 1 + turn * 997 % 20_000;
            rig.add(&[], &[segment(DATA + OFFSET + turn as u64 * 1000, len)]);
            assert!(rig.serve_logged().unwrap().contains(&((DATA + turn as u64 * 1000) & !4095)));
            rig.forget_used();
        }
    }
}

#[test]
fn requests_in_flight_when_the_log_comes_on_are_in_it() {
    let image = image(false);
    let mut rig = disk(&image, |features| features, 0);
    header(&rig, DATA, blk::T_IN, 8);
    rig.add(&[segment(DATA, 16)], &[segment(DATA + 0x1_0000, 4096), segment(DATA + 0x2_0000, 1)]);
    // Taken and perhaps not done yet: what it holds was mapped while there was no log.
    rig.serve().unwrap();
    rig.log_on();
    rig.serve_logged().unwrap();
}
