//! A holder's line at the memory: what it keeps from batch to batch.
use crate::cache::{Cache, CacheLine};
use crate::domain::Shared;
use crate::memory::{Published, SnapshotPin};
use crate::pending_marks::PendingMarks;
use crate::reader_slot::ReaderSlot;
use crate::snapshot::Window;
use crate::table::Near;
use crate::{Access, AccessGuard, DirtyLog, Miss, Region};
use std::sync::Arc;

/// `Handle::shift` when no log is on.
const OFF: u32 = u32::MAX;
/// A page that is found while no log is on: as if noted in all turns to come.
const NEVER: u64 = u64::MAX;
/// A page that is found while one is on: as if noted in a turn before the first.
const ONCE_WRITTEN: u64 = 0;

/// What one holder (a queue, say) keeps across calls: a pinned snapshot of the map, the translations that it has found,
/// its line in the list of those who are waited for. Accesses are made through the [`AccessGuard`], which is open for one
/// batch; while it is shut nobody waits for the holder.
#[derive(Debug)]
pub struct Handle {
    /// Where accesses look first. With one region and no domain, the only look-up there is.
    cache: Cache,
    /// Page size of the log that is on, as a power of two.
    shift: u32,
    /// What pages are noted as when they are found.
    found: u64,
    /// The largest region.
    home: Window,
    written: PendingMarks,
    pin: Arc<SnapshotPin>,
    published: Arc<Published>,
    translation: Option<Translation>,
    reader: Arc<ReaderSlot>,
}

#[derive(Debug)]
struct Translation {
    shared: Arc<Shared>,
    /// The change that the cache is up to.
    change: u64,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.published.readers().remove(&self.reader);
        if let Some(translation) = &self.translation {
            translation.shared.readers().remove(&self.reader);
        }
    }
}

/// Why an access ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// No memory.
    Unmapped,
    /// No translation.
    Untranslated,
    /// These directions are forbidden.
    Denied(Access),
}

impl Handle {
    pub(crate) fn new(published: &Arc<Published>, domain: Option<Arc<Shared>>) -> Self {
        let reader = ReaderSlot::new();
        published.readers().add(&reader);
        let translation = domain.map(|shared| {
            shared.readers().add(&reader);
            Translation { change: shared.change(), shared }
        });
        let mut handle = Self {
            cache: Cache::new(),
            shift: OFF,
            found: NEVER,
            home: Window::EMPTY,
            written: PendingMarks::new(),
            pin: published.pin(&reader),
            published: Arc::clone(published),
            translation,
            reader,
        };
        handle.look_at_pin();
        handle
    }

    /// Names the holder, for errors of those who wait for it. The first name stays.
    #[must_use]
    pub fn named(self, name: impl Into<String>) -> Self {
        self.reader.call(name.into());
        self
    }

    /// Opens the guard for one batch. All that was published before is seen; what is published later is seen when it is
    /// opened again, but for new translations of a [`Domain`](crate::Domain), which are seen at once.
    ///
    /// Costs a full fence (about 5 ns) and two loads while nothing changes. Whoever changes the map may wait until
    /// the guard is shut, so nothing that takes long belongs into a batch.
    #[inline]
    pub fn enter(&mut self) -> AccessGuard<'_> {
        let inside = self.reader.enter();
        if self.published.generation() != self.pin.generation {
            self.pin = self.published.pin(&self.reader);
            self.look_at_pin();
        }
        if let Some(translation) = &mut self.translation {
            let change = translation.shared.change();
            if change != translation.change {
                translation.change = change;
                self.forget();
            }
        }
        AccessGuard::new(self, inside)
    }

    /// The regions of the newest map, by address, and its number: another map has another one. What a guard that is opened later
    /// finds may be newer.
    pub fn regions(&mut self) -> (u64, &[Arc<Region>]) {
        drop(self.enter());
        (self.pin.generation, self.pin.snapshot.regions())
    }

    /// Whether the device's addresses are translated.
    #[must_use]
    pub fn is_translated(&self) -> bool {
        self.translation.is_some()
    }

    #[cold]
    fn look_at_pin(&mut self) {
        self.shift = self.log().map_or(OFF, |log| log.shift());
        self.home = self.pin.snapshot.largest();
        self.found = if self.shift == OFF { NEVER } else { ONCE_WRITTEN };
        match (&self.translation, self.pin.snapshot.only()) {
            (None, Some(window)) => {
                self.forget();
                self.cache.put_only(window, self.found);
            }
            _ => self.forget(),
        }
    }

    /// Forgets what it has found.
    #[cold]
    fn forget(&mut self) {
        // Nothing is left to mark, unless a guard was leaked instead of shut.
        self.mark_written();
        self.cache.clear();
    }

    pub(crate) fn log(&self) -> Option<&DirtyLog> {
        self.pin.snapshot.log().map(|log| &**log)
    }

    pub(crate) fn pin(&self) -> &Arc<SnapshotPin> {
        &self.pin
    }

    pub(crate) fn reader(&self) -> &ReaderSlot {
        &self.reader
    }

    /// The number of the domain's last change that this batch has seen; 0 without a domain.
    pub(crate) fn change(&self) -> u64 {
        self.translation.as_ref().map_or(0, |translation| translation.change)
    }

    /// The line where the window around `addr` is, if it has been found already.
    #[inline(always)]
    pub(crate) fn line(&self, addr: u64) -> &CacheLine {
        self.cache.line(addr)
    }

    /// Finds the window around `addr`. To be called while the guard is open, the same one that `near` was made in.
    #[inline(always)]
    pub(crate) fn find_near(&self, addr: u64, near: &mut Near) -> Result<Window, Fault> {
        let snapshot = &self.pin.snapshot;
        Ok(match &self.translation {
            None => *snapshot.find(addr).ok_or(Fault::Unmapped)?,
            Some(Translation { shared, .. }) => {
                // SAFETY: the guard is open, as it was for what is in `near`: `Domain::unmap` frees no node that a walk
                // inside it can find before it has seen the guard shut.
                let block = unsafe { shared.table().find(addr, near) }.ok_or(Fault::Untranslated)?;
                let region = snapshot.find(block.gpa + (addr - block.start)).ok_or(Fault::Unmapped)?;
                region.behind(block.start, block.size, block.gpa, block.allows)
            }
        })
    }

    /// Finds the window around `addr` and puts it in its line, if there is one. To be called while the guard is open.
    ///
    /// What most look-ups need is here, and needs so few registers that none is saved first. Accesses that find nothing in
    /// the cache wait for memory, and the fewer instructions each has, the further ahead the processor looks at the next
    /// ones.
    #[inline(never)]
    pub(crate) fn find(&self, addr: u64, line: &CacheLine) -> bool {
        if let Some(Translation { shared, .. }) = &self.translation
            && !line.window().is_empty()
            // SAFETY: as in `find_near`.
            && let Some(block) = unsafe { shared.table().find(addr, &mut Near::nowhere()) }
            && let Some(window) = self.home.behind_whole(block.start, block.size, block.gpa, block.allows)
        {
            self.cache.replace(line, window, self.found);
            return true;
        }
        self.find_any(addr, line)
    }

    /// [`Handle::find`], in all cases.
    #[inline(never)]
    fn find_any(&self, addr: u64, line: &CacheLine) -> bool {
        self.look_up(addr, line).is_ok()
    }

    /// Finds the window around `addr` and puts it in its line. To be called while the guard is open.
    pub(crate) fn look_up(&self, addr: u64, line: &CacheLine) -> Result<Window, Fault> {
        let window = self.find_near(addr, &mut Near::nowhere())?;
        self.cache.put(line, addr, window, self.found);
        Ok(window)
    }

    /// An access has failed for want of a translation, or of what it allows.
    #[cold]
    pub(crate) fn missed(&self, addr: u64, access: Access, denied: bool) {
        if let Some(translation) = &self.translation {
            let access = access & (Access::READ | Access::WRITE);
            translation.shared.missed(Miss { addr, access, denied });
        }
    }

    /// `len` bytes have been written, which are not none, from `addr` on inside the window of a line: they are to be
    /// marked when the guard is shut.
    #[inline(always)]
    pub(crate) fn wrote_inside(&self, line: &CacheLine, addr: u64, len: usize) {
        let turn = self.written.turn();
        if line.is_noted(turn) {
            return;
        }
        let window = line.window();
        if window.is_in_one_page() {
            line.note(turn);
            self.wrote_page(window.gpa(0));
        } else {
            self.wrote_part(line, addr, len);
        }
    }

    /// Some of a window of many pages has been written, and a log is on.
    #[inline(never)]
    fn wrote_part(&self, line: &CacheLine, addr: u64, len: usize) {
        let window = line.window();
        if let Some(offset) = window.offset(addr) {
            self.wrote_run(window.gpa(offset), len);
        }
    }

    /// Guest-physical memory has been written: it is to be marked when the guard is shut.
    #[inline(always)]
    pub(crate) fn wrote(&self, gpa: u64, len: usize) {
        if self.shift != OFF && len > 0 {
            self.wrote_run(gpa, len);
        }
    }

    /// [`Handle::wrote`], of more than nothing, when a log is on.
    #[inline(always)]
    fn wrote_run(&self, gpa: u64, len: usize) {
        let last = gpa + (len as u64 - 1);
        if (gpa ^ last) >> self.shift != 0 || !self.written.add(gpa) {
            self.wrote_pages(gpa, last);
        }
    }

    #[inline(never)]
    fn wrote_pages(&self, gpa: u64, last: u64) {
        let Some(log) = self.log() else { return };
        let (first_page, last_page) = (gpa >> self.shift, last >> self.shift);
        if last_page - first_page > 1 {
            // Many at once: a word is marked at a time, and the fence is cheap beside so much data.
            crate::sync::fence(std::sync::atomic::Ordering::SeqCst);
            return log.mark_pages(first_page, last_page);
        }
        self.wrote_page(gpa);
        if first_page != last_page {
            self.wrote_page(last);
        }
    }

    /// The page around `gpa` has been written, and a log is on.
    #[inline(always)]
    fn wrote_page(&self, gpa: u64) {
        if !self.written.add(gpa) {
            self.make_room(gpa);
        }
    }

    /// [`Handle::wrote_page`], when the list is full.
    #[cold]
    fn make_room(&self, gpa: u64) {
        self.mark_written();
        self.written.add(gpa);
    }

    /// Marks all that was written.
    #[inline(always)]
    fn mark_written(&self) {
        if !self.written.is_empty()
            && let Some(log) = self.log()
        {
            self.written.mark(log);
        }
    }

    /// The batch ends.
    #[inline(always)]
    pub(crate) fn shut(&self, inside: u64) {
        self.mark_written();
        self.reader.leave(inside);
    }
}
