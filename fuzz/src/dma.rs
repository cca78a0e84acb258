//! Memory, domains and the dirty log against a model: maps of pages, byte by byte.
//!
//! Steps map, unmap, access through a domain or directly, hold mappings, exchange the memory map,
//! turn the log on and off, and harvest it. Every result, error (with address and count), byte and
//! dirty page must equal those of the model.
use arbitrary::{Result, Unstructured};
use paravane_dma::{
    Access, Backing, BusyWith, DirtyLog, DirtyPages, DmaError, DmaFault, Domain, DomainError, Handle,
    Mapping, Memory, Region, RegionConfig,
};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

const PAGE: u64 = 4096;
/// Pages of guest-physical addresses that steps use; not all are memory.
const PAGES: u64 = 20;
/// Bases of device addresses: low, at borders of large leaves, high, the end.
const BASES: [u64; 5] =
    [0, 510 << 12, (1 << 30) - (8 << 12), (1 << 47) - (8 << 12), u64::MAX - (16 << 12) + 1];
/// Most held mappings.
const MOST_HELD: usize = 4;
/// First page, pages, writable.
const REGIONS: [(u64, u64, bool); 3] = [(0, 8, true), (8, 2, false), (12, 4, true)];

/// A held mapping: its range, whether through the domain, and whether writable.
struct Held {
    mapping: Mapping,
    addr: u64,
    translated: bool,
    written: bool,
}

struct Rig {
    regions: [Arc<Region>; 3],
    memory: Memory,
    domain: Domain,
    through: Handle,
    direct: Handle,
    held: Vec<Held>,
    model: Model,
}

/// The expected state.
struct Model {
    bytes: Vec<u8>,
    /// Present regions of [`REGIONS`].
    there: [bool; 3],
    /// Device page to guest page.
    map: BTreeMap<u64, (u64, Access)>,
    /// Page size of the log, if on, and its expected contents.
    log: Option<(u64, BTreeSet<u64>)>,
}

/// Runs one input.
pub fn dma(data: &[u8]) {
    let mut u = Unstructured::new(data);
    let mut rig = Rig::new();
    while !u.is_empty() && rig.step(&mut u).is_ok() {}
    rig.end();
}

impl Model {
    /// Guest-physical addresses of `addr .. addr + len`, with regions.
    ///
    /// Up to the first error, and that error.
    fn walk(
        &self,
        translated: bool,
        addr: u64,
        len: usize,
        access: Access,
    ) -> (Vec<(u64, usize)>, std::result::Result<(), DmaError>) {
        let mut found = Vec::new();
        if len > 0 && addr.checked_add(len as u64 - 1).is_none() {
            return (found, Err(DmaError { addr, len, done: 0, fault: DmaFault::Wraps }));
        }
        for done in 0..len {
            let addr = addr + done as u64;
            let (gpa, allows) = match self.map.get(&(addr / PAGE)) {
                _ if !translated => (addr, Access::READ | Access::WRITE),
                Some(&(page, allows)) => (page * PAGE + addr % PAGE, allows),
                None => return (found, Err(DmaError { addr, len, done, fault: DmaFault::Untranslated })),
            };
            let inside =
                |&(first, pages, _): &(u64, u64, bool)| (first..first + pages).contains(&(gpa / PAGE));
            let Some(number) = REGIONS.iter().position(inside).filter(|&number| self.there[number]) else {
                return (found, Err(DmaError { addr, len, done, fault: DmaFault::Unmapped }));
            };
            let region = if REGIONS[number].2 { Access::READ | Access::WRITE } else { Access::READ };
            let forbidden = access - (allows & region);
            if !forbidden.is_empty() {
                return (found, Err(DmaError { addr, len, done, fault: DmaFault::Denied(forbidden) }));
            }
            found.push((gpa, number));
        }
        (found, Ok(()))
    }

    fn mark(&mut self, gpa: u64) {
        if let Some((page, marked)) = &mut self.log {
            marked.insert(gpa / *page * *page);
        }
    }

    fn put(&mut self, found: &[(u64, usize)], data: &[u8]) {
        for (&(gpa, _), &byte) in found.iter().zip(data) {
            self.bytes[gpa as usize] = byte;
            self.mark(gpa);
        }
    }
}

/// A device address, mostly near the end of a page.
fn address(u: &mut Unstructured<'_>, translated: bool) -> Result<u64> {
    let base = if translated { BASES[u.arbitrary::<u8>()? as usize % BASES.len()] } else { 0 };
    let page = u64::from(u.arbitrary::<u8>()?) % PAGES;
    let near = u64::from(u.arbitrary::<u8>()?);
    let offset = if near < 128 { near } else { PAGE - 256 + near };
    Ok(base.wrapping_add(page * PAGE).wrapping_add(offset))
}

fn length(u: &mut Unstructured<'_>) -> Result<usize> {
    Ok(match u.arbitrary::<u8>()? {
        small @ 0..128 => small.into(),
        large => usize::from(large - 127) * 300,
    })
}

fn directions(u: &mut Unstructured<'_>) -> Result<Access> {
    Ok([Access::READ, Access::WRITE, Access::READ | Access::WRITE][u.arbitrary::<u8>()? as usize % 3])
}

impl Rig {
    fn new() -> Self {
        let regions = REGIONS.map(|(first, pages, writable)| {
            let config =
                RegionConfig { gpa: first * PAGE, size: pages * PAGE, backing: Backing::Pages, writable };
            Region::new(config).expect("memory")
        });
        let memory = Memory::new(regions.to_vec()).expect("a map");
        let domain = Domain::with_limit(&memory, 4 << 20);
        Self {
            regions,
            through: domain.handle().named("through the domain"),
            direct: memory.handle().named("direct"),
            memory,
            domain,
            held: Vec::new(),
            model: Model {
                bytes: vec![0; (PAGES * PAGE) as usize],
                there: [true; 3],
                map: BTreeMap::new(),
                log: None,
            },
        }
    }

    fn step(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        match u.arbitrary::<u8>()? % 16 {
            0..3 => self.map(u)?,
            3..5 => self.unmap(u)?,
            5..7 => self.read(u)?,
            7..10 => self.write(u)?,
            10 => self.hold(u)?,
            11 => {
                if !self.held.is_empty() {
                    let number = usize::from(u.arbitrary::<u8>()?) % self.held.len();
                    self.let_go(number);
                }
            }
            12 => self.exchange(u)?,
            13 => self.log(u)?,
            _ => self.harvest(),
        }
        Ok(())
    }

    /// A range of device pages: few, or enough for a large leaf.
    fn range(u: &mut Unstructured<'_>) -> Result<(u64, u64)> {
        let base = BASES[u.arbitrary::<u8>()? as usize % BASES.len()];
        let first = u64::from(u.arbitrary::<u8>()? % 16);
        let pages = match u.arbitrary::<u8>()? {
            few @ 0..240 => u64::from(few % 8) + 1,
            many => 512 * u64::from(many % 2 + 1) + 3,
        };
        // A range beyond the address space is refused.
        Ok((base + first * PAGE, pages * PAGE))
    }

    fn map(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        let (addr, size) = Self::range(u)?;
        let page = u64::from(u.arbitrary::<u8>()?) % PAGES;
        let access = directions(u)?;
        let pages = size / PAGE;
        let taken = self.model.map.range(addr / PAGE..).next().map(|(&page, _)| page);
        let expected = if addr.checked_add(size - 1).is_none() {
            Err(DomainError::Wraps { addr, size })
        } else if let Some(taken) = taken.filter(|&taken| taken < addr / PAGE + pages) {
            Err(DomainError::Overlap { addr: taken * PAGE })
        } else {
            for at in 0..pages {
                self.model.map.insert(addr / PAGE + at, (page + at, access));
            }
            Ok(())
        };
        assert_eq!(self.domain.map(addr, page * PAGE, size, access), expected);
        assert_eq!(self.domain.mapped(), self.model.map.len() as u64 * PAGE);
        Ok(())
    }

    fn unmap(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        let (addr, size) = Self::range(u)?;
        let result = self.domain.unmap(addr, size, Duration::ZERO);
        let Some(last) = addr.checked_add(size - 1) else {
            assert_eq!(result, Err(DomainError::Wraps { addr, size }));
            return Ok(());
        };
        let before = self.model.map.len();
        self.model.map.retain(|&page, _| !(addr / PAGE..=last / PAGE).contains(&page));
        let users = self.held.iter().filter(|held| {
            let len = held.mapping.len() as u64;
            held.translated && len > 0 && held.addr <= last && addr <= held.addr + (len - 1)
        });
        let users: Vec<_> =
            users.map(|held| BusyWith::Mapping { addr: held.addr, len: held.mapping.len() as u64 }).collect();
        match result {
            Ok(bytes) => {
                assert_eq!(users, []);
                assert_eq!(bytes, (before - self.model.map.len()) as u64 * PAGE);
            }
            Err(DomainError::Busy(busy)) => {
                assert!(users.contains(&busy.with), "{busy}");
                assert_eq!(busy.holder, "through the domain");
            }
            Err(other) => panic!("{other}"),
        }
        Ok(())
    }

    fn handle(&mut self, translated: bool) -> &mut Handle {
        if translated { &mut self.through } else { &mut self.direct }
    }

    fn read(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        let translated = u.arbitrary()?;
        let (addr, len) = (address(u, translated)?, length(u)?);
        let (found, expected) = self.model.walk(translated, addr, len, Access::READ);
        let mut out = vec![0xcc; len];
        assert_eq!(self.handle(translated).enter().read(addr, &mut out, Access::empty()), expected);
        let bytes = found.iter().map(|&(gpa, _)| self.model.bytes[gpa as usize]);
        assert!(bytes.eq(out[..found.len()].iter().copied()), "{len} bytes at {addr:#x}");
        Ok(())
    }

    fn write(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        let translated = u.arbitrary()?;
        // Several writes in one batch, so that the guard merges their pages.
        let count = u.arbitrary::<u8>()? % 4;
        for _ in 0..count {
            let (addr, len, seed) = (address(u, translated)?, length(u)?, u.arbitrary::<u8>()?);
            let data: Vec<u8> = (0..len).map(|at| seed.wrapping_add(at as u8)).collect();
            let (found, expected) = self.model.walk(translated, addr, len, Access::WRITE);
            let guard = self.handle(translated).enter();
            if seed % 4 == 0 {
                assert_eq!(guard.fill(addr, seed, len, Access::empty()), expected);
                drop(guard);
                self.model.put(&found, &vec![seed; len]);
            } else {
                assert_eq!(guard.write(addr, &data, Access::empty()), expected);
                drop(guard);
                self.model.put(&found, &data);
            }
        }
        Ok(())
    }

    fn hold(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        let translated = u.arbitrary()?;
        let (addr, len, access) = (address(u, translated)?, length(u)?, directions(u)?);
        if self.held.len() == MOST_HELD {
            return Ok(());
        }
        let (found, mut expected) = self.model.walk(translated, addr, len, access);
        let apart = |pair: &[(u64, usize)]| pair[0].1 != pair[1].1 || pair[0].0 + 1 != pair[1].0;
        if expected.is_ok() && found.windows(2).any(apart) {
            expected = Err(DmaError { addr, len, done: 0, fault: DmaFault::NotContiguous });
        }
        let mapped = self.handle(translated).enter().map(addr, len, access);
        assert_eq!(mapped.as_ref().map(|_| ()), expected.as_ref().map(|_| ()));
        if let Ok(mapping) = mapped {
            assert_eq!(mapping.len(), len);
            assert!(found.first().is_none_or(|&(gpa, _)| mapping.range().gpa == gpa));
            self.held.push(Held { mapping, addr, translated, written: access.contains(Access::WRITE) });
        }
        Ok(())
    }

    fn let_go(&mut self, number: usize) {
        let held = self.held.swap_remove(number);
        let range = held.mapping.range();
        drop(held.mapping);
        if held.written {
            (range.gpa..range.gpa + range.len as u64).for_each(|gpa| self.model.mark(gpa));
        }
    }

    /// Exchanges the memory map for some of the regions.
    fn exchange(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        let mask = u.arbitrary::<u8>()?;
        self.model.there = [0, 1, 2].map(|bit| mask >> bit & 1 != 0);
        let regions = self.regions.iter().zip(self.model.there).filter(|(_, there)| *there);
        self.memory.replace(regions.map(|(region, _)| Arc::clone(region)).collect()).expect("no overlap");
        Ok(())
    }

    fn log(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        let wish = u.arbitrary::<u8>()?;
        if wish % 4 == 3 {
            let stopped = self.memory.stop_log(Duration::ZERO).expect("nobody is inside");
            assert_eq!(stopped.is_some(), self.model.log.is_some());
            self.model.log = None;
        } else {
            let page = PAGE << (wish % 4);
            let log = DirtyLog::new(PAGES * PAGE, page).expect("a log");
            self.memory.start_log(log, Duration::ZERO).expect("nobody is inside");
            self.model.log = Some((page, BTreeSet::new()));
        }
        Ok(())
    }

    fn harvest(&mut self) {
        let log = self.memory.log();
        assert_eq!(log.is_some(), self.model.log.is_some());
        if let (Some(log), Some((page, expected))) = (log, &mut self.model.log) {
            let mut pages = DirtyPages::new(0, (PAGES * PAGE).next_multiple_of(*page), *page).expect("pages");
            log.harvest(&mut pages);
            assert!(pages.iter().eq(expected.iter().copied()), "{pages:?} is not {expected:x?}");
            assert_eq!(pages.count(), expected.len() as u64);
            expected.clear();
        }
    }

    /// Drops all mappings.
    ///
    /// The domain must then be empty, and all bytes equal to the model.
    fn end(&mut self) {
        while !self.held.is_empty() {
            self.let_go(0);
        }
        self.harvest();
        let mapped = self.model.map.len() as u64 * PAGE;
        assert_eq!(self.domain.clear(Duration::ZERO), Ok(mapped));
        assert_eq!(self.domain.mapped(), 0);
        self.memory.replace(self.regions.to_vec()).expect("no overlap");
        let guard = self.direct.enter();
        for (first, pages, _) in REGIONS {
            let (at, len) = ((first * PAGE) as usize, (pages * PAGE) as usize);
            let mut out = vec![0; len];
            guard.read(first * PAGE, &mut out, Access::READ).expect("memory");
            assert!(out == self.model.bytes[at..at + len]);
        }
    }
}
