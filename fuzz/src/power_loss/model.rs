//! What a disk may read as, now and after a crash.
use super::stamp::{self, SECTOR};
use std::ops::Range;
use std::sync::Arc;

/// A sector's content, by the request that made it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Value {
    /// The stamp of a write.
    Write(u64),
    Zero,
    /// Discarded: zeroes, or anything that the sector held before.
    Discarded,
}

/// A value, and when the request that made it was made and answered.
#[derive(Clone, Copy, Debug)]
struct Version<T> {
    value: T,
    begun: u64,
    /// `u64::MAX` while it is in flight.
    done: u64,
}

/// How a machine ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Crash {
    /// What was not flushed may be lost.
    Power,
    /// The process ends, and the host goes on.
    Kill,
}

/// A moment at which a machine ends.
#[derive(Clone, Copy, Debug)]
pub(super) struct Moment {
    /// Requests and events of earlier ticks have happened.
    pub(super) at: u64,
    /// Requests that were answered before it are kept.
    pub(super) kept: u64,
}

/// The disk of one life of a guest.
#[derive(Clone, Debug)]
pub(super) struct Model {
    /// Content at the start.
    initial: Arc<Vec<u8>>,
    /// What the disk holds where nothing was written to it: that of its backing file.
    base: Arc<Vec<u8>>,
    /// Later versions of each sector.
    sectors: Vec<Vec<Version<Value>>>,
    /// Sizes in sectors.
    sizes: Vec<Version<u64>>,
    /// When flushes were asked for, and answered.
    flushes: Vec<(u64, u64)>,
    /// What was answered is durable, without a flush.
    write_through: bool,
    /// A discarded range may read as anything.
    loose: bool,
}

impl Model {
    pub(super) fn new(initial: Vec<u8>, base: Arc<Vec<u8>>, write_through: bool, loose: bool) -> Self {
        let sectors = initial.len() / SECTOR;
        Self {
            initial: Arc::new(initial),
            base,
            sectors: vec![Vec::new(); sectors],
            sizes: vec![Version { value: sectors as u64, begun: 0, done: 0 }],
            flushes: Vec::new(),
            write_through,
            loose,
        }
    }

    /// The disk of the next life, which reads as `initial`.
    pub(super) fn next(&self, initial: Vec<u8>, write_through: bool) -> Self {
        Self::new(initial, self.base.clone(), write_through, self.loose)
    }

    /// Size in sectors.
    pub(super) fn size(&self) -> u64 {
        self.sizes.last().map_or(0, |size| size.value)
    }

    /// A request begins that gives sectors a value.
    pub(super) fn begin(&mut self, first: u64, count: u64, value: Value, begun: u64) {
        for sector in first..first + count {
            self.sectors[sector as usize].push(Version { value, begun, done: u64::MAX });
        }
    }

    /// It is answered.
    pub(super) fn end(&mut self, first: u64, count: u64, done: u64) {
        for sector in first..first + count {
            if let Some(last) = self.sectors[sector as usize].last_mut() {
                last.done = done;
            }
        }
    }

    pub(super) fn flushed(&mut self, begun: u64, done: u64) {
        self.flushes.push((begun, done));
    }

    /// The size begins to change.
    pub(super) fn begin_resize(&mut self, sectors: u64, begun: u64) {
        let old = self.size();
        let end = (sectors as usize).max(self.sectors.len());
        self.sectors.resize_with(end, Vec::new);
        match sectors > old {
            true => self.begin(old, sectors - old, Value::Zero, begun),
            false => self.begin(sectors, old - sectors, Value::Discarded, begun),
        }
        self.sizes.push(Version { value: sectors, begun, done: u64::MAX });
    }

    pub(super) fn end_resize(&mut self, done: u64) {
        let [.., before, last] = &mut *self.sizes else { return };
        last.done = done;
        let (first, end) = (before.value.min(last.value), before.value.max(last.value));
        self.end(first, end - first, done);
    }

    /// When the size changed: ticks from the begin to the end.
    pub(super) fn resizes(&self) -> impl Iterator<Item = Range<u64>> {
        self.sizes.iter().skip(1).map(|size| size.begun + 1..size.done)
    }

    /// A crash before tick `at`.
    pub(super) fn crash(&self, at: u64, crash: Crash) -> Moment {
        let flushes = self.flushes.iter().filter(|(_, done)| *done < at);
        let flushed = flushes.map(|(begun, _)| *begun).max().unwrap_or(0);
        let kept = match crash {
            Crash::Kill => at,
            Crash::Power if self.write_through => at,
            Crash::Power => flushed,
        };
        Moment { at, kept }
    }

    /// Without a crash: all that was answered counts.
    pub(super) fn now(&self) -> Moment {
        Moment { at: u64::MAX, kept: u64::MAX - 1 }
    }

    /// Compares what the disk reads as from sector `first` on.
    ///
    /// # Errors
    /// The first sector that it cannot read as.
    pub(super) fn compare(&self, first: u64, data: &[u8], moment: Moment) -> Result<(), String> {
        for (sector, bytes) in (first..).zip(data.chunks(SECTOR)) {
            if !self.accepts(sector, bytes, moment) {
                return Err(self.complaint(sector, bytes, moment));
            }
        }
        Ok(())
    }

    /// Compares size and content of the whole disk.
    ///
    /// # Errors
    /// What it cannot be.
    pub(super) fn check(&self, disk: &[u8], moment: Moment) -> Result<(), String> {
        let sectors = (disk.len() / SECTOR) as u64;
        let (_, sizes) = possible(&self.sizes, moment);
        if !sizes.iter().any(|size| size.value == sectors) {
            let expected: Vec<_> = sizes.iter().map(|size| size.value).collect();
            return Err(format!("size is wrong: {sectors} sectors; expected one of {expected:?}"));
        }
        self.compare(0, disk, moment)
    }

    fn accepts(&self, sector: u64, bytes: &[u8], moment: Moment) -> bool {
        let versions = &self.sectors[sector as usize];
        let (is_first, maybe) = possible(versions, moment);
        if is_first && self.is_initial(sector, bytes) {
            return true;
        }
        let start = maybe.as_ptr_range().start;
        maybe.iter().enumerate().any(|(number, version)| match version.value {
            Value::Write(write) => stamp::is(bytes, write, sector),
            Value::Zero => stamp::is_zero(bytes),
            Value::Discarded if self.loose => true,
            Value::Discarded => {
                // Those that may be there, and all before them.
                let before = versions.iter().take_while(|one| !std::ptr::eq(*one, start)).count();
                stamp::is_zero(bytes)
                    || self.is_initial(sector, bytes)
                    || bytes == at(&self.base, sector)
                    || versions[..before + number].iter().any(
                        |one| matches!(one.value, Value::Write(write) if stamp::is(bytes, write, sector)),
                    )
            }
        })
    }

    fn is_initial(&self, sector: u64, bytes: &[u8]) -> bool {
        bytes == at(&self.initial, sector)
    }

    #[cold]
    fn complaint(&self, sector: u64, bytes: &[u8], moment: Moment) -> String {
        let (is_first, maybe) = possible(&self.sectors[sector as usize], moment);
        let mut expected: Vec<_> = maybe.iter().map(|version| format!("{:?}", version.value)).collect();
        if is_first {
            expected.insert(0, format!("{} of the start", stamp::describe(at(&self.initial, sector))));
        }
        let what = match expected.len() {
            1 => "kept data is wrong",
            _ => "data is neither old nor new",
        };
        let found = stamp::describe(bytes);
        format!("{what}: sector {sector} reads as {found}; expected {}", expected.join(" or "))
    }
}

/// A sector of a disk, which reads as zeroes beyond its end.
fn at(bytes: &[u8], sector: u64) -> &[u8] {
    let start = sector as usize * SECTOR;
    bytes.get(start..start + SECTOR).unwrap_or(&[0; SECTOR])
}

/// Versions that may be there, and whether the state before all of them may be.
fn possible<T>(versions: &[Version<T>], moment: Moment) -> (bool, &[Version<T>]) {
    let begun = versions.iter().take_while(|version| version.begun < moment.at).count();
    let kept = versions[..begun].iter().rposition(|version| version.done < moment.kept);
    (kept.is_none(), &versions[kept.unwrap_or(0)..begun])
}
