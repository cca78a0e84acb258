//! Writes for which the host has no room.
use super::*;
use crate::blk::{Full, OnFull};
use crate::{Device, Rest};
use std::sync::MutexGuard;
use std::sync::atomic::AtomicBool;

const DISK: usize = 64 * 512;

struct FullRig {
    rig: Rig<Blk>,
    orders: Arc<Mutex<Orders>>,
    full: Arc<Full>,
}

impl FullRig {
    /// A host with these results for the first jobs, which it does at once.
    fn new(file: &NamedTempFile, results: &[i32], on_full: OnFull) -> Self {
        let disk = Blk::open(BlkConfig { on_full, ..config(file, EngineChoice::Threads) }).unwrap();
        let (full, features) = (disk.full(), disk.features());
        let orders = Orders { prompt: true, results: results.iter().copied().collect(), ..Orders::default() };
        let orders = Arc::new(Mutex::new(orders));
        let handler = held_handler(&disk, orders.clone(), features);
        Self { rig: Rig::with_handler(disk, features, Box::new(handler)), orders, full }
    }

    fn orders(&self) -> MutexGuard<'_, Orders> {
        self.orders.lock().unwrap()
    }

    /// Makes a request of one sector available.
    fn add(&mut self, number: u64, kind: u32) {
        self.rig.poke(HEADER + number * 16, &header(kind, number));
        self.rig.poke(STATUS + number, &[UNTOUCHED]);
        let (head, status) = (segment(HEADER + number * 16, 16), segment(STATUS + number, 1));
        let data = segment(PAYLOAD + number * 512, 512);
        match kind {
            blk::T_IN => self.rig.add(&[head], &[data, status]),
            blk::T_FLUSH => self.rig.add(&[head], &[status]),
            _ => {
                self.rig.poke(PAYLOAD + number * 512, &[1 + number as u8; 512]);
                self.rig.add(&[head, data], &[status])
            }
        };
    }

    fn waiting(&self) -> u64 {
        self.full.status().map_or(0, |status| status.requests)
    }
}

/// Results of a host that never has room.
const FULL: [i32; 64] = [-libc::ENOSPC; 64];

#[test]
fn writes_wait_for_room_and_reads_do_not() {
    let file = image(&[0; DISK]);
    let mut it = FullRig::new(&file, &[-libc::ENOSPC], OnFull::Wait);
    it.add(0, blk::T_OUT);
    assert_eq!(it.rig.serve().unwrap().completed, 0);
    let status = it.full.status().unwrap();
    assert_eq!((status.requests, it.full.times()), (1, 1));
    assert!(status.error.contains("No space"), "{status:?}");
    // The host would take it, but it is behind the other one.
    it.add(1, blk::T_OUT);
    it.add(2, blk::T_IN);
    it.add(3, blk::T_FLUSH);
    assert_eq!(it.rig.serve().unwrap().completed, 2);
    assert_eq!(it.rig.peek(STATUS, 4), [UNTOUCHED, UNTOUCHED, blk::S_OK, blk::S_OK]);
    assert_eq!(it.waiting(), 2);
    // A quota is the same.
    it.orders().results = [-libc::EDQUOT].into();
    it.full.retry();
    assert_eq!(it.rig.handler.rest(true), Rest::Serve, "there is something to do");
    assert_eq!(it.rig.serve().unwrap().completed, 1);
    assert_eq!(it.waiting(), 1);
    it.full.retry();
    assert_eq!(it.rig.serve().unwrap().completed, 1);
    assert_eq!((it.full.status(), it.full.times()), (None, 1));
    assert_eq!(it.rig.peek(STATUS, 2), [blk::S_OK; 2]);
    assert!(content(&file)[..1024] == [[1; 512], [2; 512]].concat());
    assert_eq!(it.rig.device.errors().totals().operations, [0; 5]);
}

#[test]
fn a_write_that_waits_wakes_its_thread_by_itself() {
    let file = image(&[0; DISK]);
    let mut it = FullRig::new(&file, &[-libc::ENOSPC, -libc::ENOSPC], OnFull::Wait);
    it.add(0, blk::T_OUT);
    assert_eq!(it.rig.run().unwrap().len(), 1);
    assert_eq!((it.rig.peek(STATUS, 1), it.full.status()), (vec![blk::S_OK], None));
}

#[test]
fn without_waiting_or_after_another_error_a_write_fails() {
    let file = image(&[0; DISK]);
    for (error, on_full) in
        [(libc::ENOSPC, OnFull::Error), (libc::EDQUOT, OnFull::Error), (libc::EIO, OnFull::Wait)]
    {
        let mut it = FullRig::new(&file, &[-error], on_full);
        assert_eq!(it.rig.status(blk::T_OUT, 0, &[1; 512]), blk::S_IOERR);
        assert_eq!((it.full.status(), it.full.times()), (None, 0));
    }
    // A flush cannot be tried again: the host has dropped the data.
    let mut it = FullRig::new(&file, &[-libc::ENOSPC], OnFull::Wait);
    assert_eq!(it.rig.status(blk::T_FLUSH, 0, &[]), blk::S_IOERR);
}

#[test]
fn zeroes_and_discards_wait_too_and_go_on_where_they_were() {
    let file = image(&[7; DISK]);
    let mut it = FullRig::new(&file, &[], OnFull::Wait);
    // Not supported, hence written; in parts.
    it.orders().results = [-libc::EOPNOTSUPP, -libc::ENOSPC].into();
    it.orders().most = Some(1024);
    it.rig.poke(HEADER, &header(blk::T_WRITE_ZEROES, 0));
    it.rig.poke(PAYLOAD, &range(2, 8, 0));
    it.rig.add(&[segment(HEADER, 16), segment(PAYLOAD, 16)], &[segment(STATUS, 1)]);
    assert_eq!(it.rig.serve().unwrap().completed, 0);
    while it.waiting() == 0 {
        it.rig.serve().unwrap();
    }
    it.full.retry();
    assert_eq!(it.rig.run().unwrap().len(), 1);
    assert_eq!((it.rig.peek(STATUS, 1), it.full.status()), (vec![blk::S_OK], None));
    let end = content(&file);
    assert!(end[1024..5120].iter().all(|byte| *byte == 0) && end[5120] == 7 && end[1023] == 7);
}

#[test]
fn a_stop_tries_once_more_and_does_not_wait() {
    let file = image(&[0; DISK]);
    let mut it = FullRig::new(&file, &[-libc::ENOSPC, -libc::ENOSPC], OnFull::Wait);
    it.add(0, blk::T_OUT);
    it.add(1, blk::T_OUT);
    it.rig.serve().unwrap();
    // The first one fails once more, the second one has room.
    it.orders().results = [-libc::ENOSPC].into();
    let served = it.rig.handler.drain(&mut it.rig.live, true);
    assert_eq!((served.completed, it.full.status()), (2, None));
    assert_eq!(it.rig.peek(STATUS, 2), [blk::S_IOERR, blk::S_OK]);
    drop(it);
    // A reset forgets them.
    let mut it = FullRig::new(&file, &FULL, OnFull::Wait);
    it.add(0, blk::T_OUT);
    it.rig.serve().unwrap();
    assert_eq!(it.waiting(), 1);
    assert_eq!(it.rig.handler.drain(&mut it.rig.live, false).completed, 0);
    assert_eq!((it.full.status(), it.rig.peek(STATUS, 1)), (None, vec![UNTOUCHED]));
}

#[test]
fn in_flight_tracking_leaves_them_to_a_successor() {
    let file = image(&[0; DISK]);
    let mut it = FullRig::new(&file, &FULL, OnFull::Wait);
    super::in_flight::track(&mut it.rig);
    it.add(0, blk::T_OUT);
    it.rig.serve().unwrap();
    assert_eq!(it.waiting(), 1);
    let served = it.rig.handler.drain_until(&mut it.rig.live, true, &AtomicBool::new(true));
    assert_eq!((served.completed, it.full.status()), (0, None));
    assert_eq!((it.rig.live.queue().in_flight(), it.rig.peek(STATUS, 1)), (1, vec![UNTOUCHED]));
}
