//! Crashes between any two stores, with a driver that lives on.
//!
//! The device side may do a limited number of stores (`crate::area::fuse`), and unwinds before the
//! next one. The next device side finds all that was stored until then. Every store counts: to the
//! ring and to the region, in every operation and in recovery.
extern crate std;

use crate::area::fuse;
use crate::device::{Batch, Queue, QueueConfig, State, StateError};
use crate::driver::{DriverConfig, Queue as Driver};
use crate::{Area, DmaArea, Segment};
use alloc::collections::VecDeque;
use alloc::vec;
use alloc::vec::Vec;
use core::ptr::NonNull;
use paravane_spec::feature::{EVENT_IDX, IN_ORDER, INDIRECT_DESC, RING_PACKED};

const BASE: u64 = 0x30_0000;
/// Bytes that a request offers to the device.
const OFFERED: u32 = 1000;

struct Dice(u64);

impl Dice {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        ((self.0 >> 33) % end as u64) as usize
    }
}

/// Bytes that the device writes for request `tag`: they name the request.
fn written(tag: u64) -> u32 {
    1 + (tag % u64::from(OFFERED)) as u32
}

/// Everything but the device side. It lives through all crashes.
struct World {
    _memory: Vec<u128>,
    area: Area,
    region: Area,
    config: QueueConfig,
    driver: Driver,
    dice: Dice,
    tag: u64,
    /// Identifiers and numbers of outstanding requests, in available order.
    outstanding: VecDeque<(u16, u64)>,
}

impl World {
    fn new(size: u16, features: u64, seed: u64) -> Self {
        let layout = DriverConfig::new(size, 4, features).unwrap();
        let bytes = layout.memory().next_multiple_of(16);
        let mut memory = vec![0u128; bytes / 16 + 32 * usize::from(size)];
        // SAFETY: the memory lives as long as the world, and is not touched but through areas.
        let all = unsafe { Area::new(NonNull::new(memory.as_mut_ptr().cast()).unwrap(), memory.len() * 16) };
        let area = all.slice(0, bytes).unwrap();
        let (driver, addresses) = Driver::new(layout, DmaArea { area, addr: BASE }).unwrap();
        let config = QueueConfig::new(addresses, size, features).unwrap();
        let region = all.slice(bytes, config.tracking_bytes()).unwrap();
        let outstanding = VecDeque::new();
        Self { _memory: memory, area, region, config, driver, dice: Dice(seed), tag: 0, outstanding }
    }

    fn start(&self) -> Result<Queue, StateError> {
        let [desc, driver, device] =
            self.config.areas().map(|area| self.area.slice((area.addr - BASE) as usize, area.len).unwrap());
        let start = if self.config.packed() { 1 << 31 | 1 << 15 } else { 0 };
        let state = State::from_vring_base(start, if self.config.packed() { RING_PACKED } else { 0 })?;
        // SAFETY: these are the areas asked for; memory and region live as long as the world, and
        // the queue does not live longer.
        unsafe { self.config.resume_tracked(desc, driver, device, state, self.region) }
    }

    /// The driver makes a request available, if there is room.
    ///
    /// Of one to three descriptors or in a table.
    fn add(&mut self) {
        self.tag += 1;
        let mut segments = vec![Segment { addr: self.tag << 20, len: 16 }];
        segments.resize(1 + self.dice.below(3), Segment { addr: 0x1000, len: 32 });
        let answer = Segment { addr: 0x2000, len: OFFERED };
        if let Ok(id) = self.driver.add(&segments, &[answer]) {
            self.driver.publish();
            self.outstanding.push_back((id.0, self.tag));
        }
    }

    /// The driver takes buffers back: none twice, and only outstanding ones.
    fn take_back(&mut self) {
        while let Some(used) = self.driver.pop_used().unwrap() {
            let at =
                self.outstanding.iter().position(|(id, _)| *id == used.id.0).expect("a completion too many");
            let (_, tag) = self.outstanding.remove(at).unwrap();
            assert_eq!(used.len, written(tag), "the completion of another request");
        }
    }

    /// Pops into `in_flight`: identifier and number.
    fn pop(&self, device: &mut Queue, batch: &mut Batch, in_flight: &mut Vec<(u16, u64)>) -> usize {
        let area = self.area;
        let fetch = |addr: u64, out: &mut [u8]| area.read((addr - BASE) as usize, out);
        let count = device.pop(batch, fetch).unwrap();
        in_flight.extend(batch.chains().iter().map(|chain| {
            assert_eq!(chain.writable_len(), OFFERED);
            (chain.head, batch.readable(chain)[0].addr >> 20)
        }));
        count
    }
}

/// A crash.
struct Crash;

/// Runs `work` with at most this number of stores; `None`: it crashed.
fn mortal<T>(stores: &mut Option<u64>, work: impl FnOnce() -> T) -> Option<T> {
    fuse::set(*stores);
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
    *stores = fuse::take();
    match result {
        Ok(result) => Some(result),
        Err(payload) if payload.is::<fuse::Blown>() => None,
        Err(payload) => std::panic::resume_unwind(payload),
    }
}

/// One history. Returns whether it crashed at work, and in recovery.
fn history(
    size: u16,
    features: u64,
    seed: u64,
    mut stores: Option<u64>,
    mut recovery: Option<u64>,
    refill: bool,
) -> (bool, bool) {
    let mut world = World::new(size, features, seed);
    let mut batch = Batch::new(3);
    let mut in_flight = Vec::new();
    let crash = (|| {
        let mut device = mortal(&mut stores, || world.start().unwrap()).ok_or(Crash)?;
        for _ in 0..90 {
            match world.dice.below(8) {
                0 | 1 => world.add(),
                2 => world.take_back(),
                3 => {
                    mortal(&mut stores, || world.pop(&mut device, &mut batch, &mut in_flight))
                        .ok_or(Crash)?;
                }
                4..6 if !in_flight.is_empty() => {
                    let (id, tag) = in_flight.swap_remove(world.dice.below(in_flight.len()));
                    mortal(&mut stores, || device.complete(id, written(tag)).unwrap()).ok_or(Crash)?;
                }
                4..6 => world.add(),
                _ => {
                    mortal(&mut stores, || device.publish().unwrap()).ok_or(Crash)?;
                }
            }
        }
        Ok::<(), Crash>(())
    })()
    .is_err();

    // The driver lives on: it takes what it sees, and fills the places with new requests.
    if refill {
        world.take_back();
        (0..size).for_each(|_| world.add());
    }
    let again = mortal(&mut recovery, || world.start().unwrap());
    let recovery_crash = again.is_none();
    let mut device = again.unwrap_or_else(|| world.start().unwrap());
    world.take_back();

    // Everything that the driver waits for comes exactly once, and in order; what was in flight
    // comes first.
    for round in 0..3 {
        let mut popped = Vec::new();
        while world.pop(&mut device, &mut batch, &mut popped) > 0 {}
        assert_eq!(popped, world.outstanding.iter().copied().collect::<Vec<_>>(), "round {round}");
        assert_eq!(usize::from(device.in_flight()), popped.len());
        while !popped.is_empty() {
            let (id, tag) = popped.swap_remove(world.dice.below(popped.len()));
            device.complete(id, written(tag)).unwrap();
            if world.dice.below(3) == 0 {
                device.publish().unwrap();
                world.take_back();
            }
        }
        device.publish().unwrap();
        world.take_back();
        assert!(world.outstanding.is_empty(), "{:?} is lost", world.outstanding);
        (0..size).for_each(|_| world.add());
    }
    (crash, recovery_crash)
}

fn every_crash(features: u64) {
    // The interpreter has the patience for a few crashes only, spread over one short history.
    let histories = [(2, 1), (8, 2), (4, 3), (8, 4), (16, 5)];
    let (histories, stride, recoveries) =
        if cfg!(miri) { (&histories[..1], 29, 11) } else { (&histories[..], 1, 1) };
    for &(size, seed) in histories {
        let mut cut = 0;
        loop {
            let (crash, _) = history(size, features, seed, Some(cut), None, cut % 2 == 0);
            if !cfg!(miri) {
                history(size, features, seed, Some(cut), None, cut % 2 == 1);
            }
            let mut second = 0;
            while history(size, features, seed, Some(cut), Some(second), cut % 3 == 0).1 {
                second += recoveries;
            }
            if !crash {
                break;
            }
            cut += stride;
        }
        assert!(cut > if size > 4 { 50 } else { 20 }, "only {cut} stores");
    }
}

#[test]
fn a_crash_after_any_store_loses_and_repeats_nothing_split() {
    every_crash(EVENT_IDX);
    every_crash(INDIRECT_DESC);
}

#[test]
fn a_crash_after_any_store_loses_and_repeats_nothing_packed() {
    every_crash(RING_PACKED | EVENT_IDX);
    every_crash(RING_PACKED | INDIRECT_DESC);
}

/// A queue with a region that someone rewrites may refuse, and must not break.
///
/// Before and after the start.
#[test]
fn a_corrupt_region_is_refused_or_harmless() {
    let (mut refused, mut taken) = (0, 0);
    for seed in 0..if cfg!(miri) { 20 } else { 4000 } {
        let features = if seed % 2 == 0 { RING_PACKED } else { 0 };
        let mut world = World::new(8, features, seed);
        let mut batch = Batch::new(3);
        let mut in_flight = Vec::new();
        let mut device = world.start().unwrap();
        for round in 0..2 {
            for _ in 0..30 {
                match world.dice.below(5) {
                    0 | 1 => world.add(),
                    2 => {
                        let area = world.area;
                        let fetch = |addr: u64, out: &mut [u8]| {
                            addr.checked_sub(BASE).is_some_and(|at| area.read(at as usize, out))
                        };
                        if device.pop(&mut batch, fetch).is_ok() {
                            in_flight.extend(batch.chains().iter().map(|chain| chain.head));
                        }
                    }
                    3 if !in_flight.is_empty() => {
                        let id = in_flight.swap_remove(world.dice.below(in_flight.len()));
                        let _ = device.complete(id, 0);
                    }
                    _ => drop(device.publish()),
                }
                if round == 1 {
                    scribble(&mut world);
                }
            }
            if round == 0 {
                (0..1 + world.dice.below(3)).for_each(|_| scribble(&mut world));
                match world.start() {
                    Ok(queue) => device = queue,
                    Err(
                        StateError::Region { .. }
                        | StateError::Distance { .. }
                        | StateError::Available { .. },
                    ) => {
                        refused += 1;
                        break;
                    }
                    Err(error) => panic!("{error}"),
                }
                in_flight.clear();
                taken += 1;
            }
        }
    }
    assert!(refused > 0 && taken > 0, "{refused} refused, {taken} taken");
}

fn scribble(world: &mut World) {
    let at = world.dice.below(world.region.len());
    let byte =
        if world.dice.below(2) == 0 { world.dice.below(256) as u8 } else { world.dice.below(10) as u8 };
    assert!(world.region.write(at, &[byte]));
}

#[test]
fn a_region_of_another_shape_is_refused() {
    for features in [0, RING_PACKED] {
        let world = World::new(8, features, 0);
        drop(world.start().unwrap());
        for (offset, value, what) in
            [(8, 2_u16, "the version"), (0, 1, "the feature word"), (10, 4, "the number of descriptors")]
        {
            let mut before = [0; 2];
            assert!(world.region.read(offset, &mut before));
            assert!(world.region.write(offset, &value.to_le_bytes()));
            assert_eq!(world.start().unwrap_err(), StateError::Region { what, value: value.into() });
            assert!(world.region.write(offset, &before));
        }
        drop(world.start().unwrap());
    }
    let world = World::new(8, IN_ORDER, 0);
    assert_eq!(world.start().unwrap_err(), StateError::InOrder);
}

#[test]
fn a_region_too_short_is_refused() {
    let mut world = World::new(8, RING_PACKED, 0);
    world.region = world.region.slice(0, world.region.len() - 1).unwrap();
    assert!(matches!(
        world.start(),
        Err(StateError::Config(crate::ConfigError::Short { needed: 288, given: 287, .. }))
    ));
}
