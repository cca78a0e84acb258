//! Handle: state that a holder keeps from batch to batch.
use crate::cache::{Cache, CacheLine};
use crate::pending_marks::PendingMarks;
use crate::published::{Published, SnapshotPin};
use crate::reader_slot::ReaderSlot;
use crate::table::Near;
use crate::translations::Translations;
use crate::window::Window;
use crate::{Access, DirtyLog, DmaFault, Miss, Region};
use std::sync::Arc;

/// [`Handle::shift`] while no log is on.
const OFF: u32 = u32::MAX;
/// Turn of a page found while no log is on: as if noted in all turns to come.
const NEVER: u64 = u64::MAX;
/// Turn of a page found while a log is on: as if noted in a turn before the first.
const ONCE_WRITTEN: u64 = 0;

/// Access of one holder (a queue, say) to a memory or a domain.
///
/// Keeps the pinned snapshot of the map, the cache of translations, and the reader slot. Accesses
/// go through the [`AccessGuard`](crate::AccessGuard) of [`Handle::enter`], which lives for one
/// batch. Without a live guard, nothing waits for the holder.
#[derive(Debug)]
pub struct Handle {
    /// Where accesses look first.
    ///
    /// With one region and no domain, it is the only look-up.
    cache: Cache,
    /// Page size of the active log, as a power of two.
    shift: u32,
    /// Turn that pages get when they are found.
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
    shared: Arc<Translations>,
    /// Change number of the domain that the cache reflects.
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

impl Handle {
    pub(crate) fn new(published: &Arc<Published>, domain: Option<Arc<Translations>>) -> Self {
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
        handle.load_pin();
        handle
    }

    /// Names the holder for the errors of threads that wait for it.
    ///
    /// The first name stays.
    #[must_use]
    pub fn named(self, name: impl Into<String>) -> Self {
        self.reader.set_name(name.into());
        self
    }

    /// Returns the regions of the newest map, by address, and its generation number.
    ///
    /// Each map has a different number. A later batch may see a newer map.
    pub fn regions(&mut self) -> (u64, &[Arc<Region>]) {
        let inside = self.begin();
        self.leave(inside);
        (self.pin.generation, self.pin.snapshot.regions())
    }

    /// Whether addresses are translated by a domain.
    #[must_use]
    pub fn is_translated(&self) -> bool {
        self.translation.is_some()
    }

    /// The largest region of the map.
    #[inline(always)]
    pub(crate) fn home(&self) -> Window {
        self.home
    }

    #[cold]
    fn load_pin(&mut self) {
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

    /// Clears the cache.
    #[cold]
    fn forget(&mut self) {
        // Nothing is left to mark, unless an access guard was leaked.
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

    /// Number of the domain's last change that this batch has seen; 0 without a domain.
    pub(crate) fn change(&self) -> u64 {
        self.translation.as_ref().map_or(0, |translation| translation.change)
    }

    /// Cache line of `addr`, which holds its window if that was found before.
    #[inline(always)]
    pub(crate) fn line(&self, addr: u64) -> &CacheLine {
        self.cache.line(addr)
    }

    /// Finds the window around `addr`.
    ///
    /// The access guard in which `near` was made must be live.
    #[inline(always)]
    pub(crate) fn find_near(&self, addr: u64, near: &mut Near) -> Result<Window, DmaFault> {
        let snapshot = &self.pin.snapshot;
        Ok(match &self.translation {
            None => *snapshot.find(addr).ok_or(DmaFault::Unmapped)?,
            Some(Translation { shared, .. }) => {
                // SAFETY: the access guard is live, as it was for the node in `near`:
                // `Domain::unmap` frees no node that a walk inside it can find before it has seen
                // the guard dropped.
                let block = unsafe { shared.table().find(addr, near) }.ok_or(DmaFault::Untranslated)?;
                let region = snapshot.find(block.gpa + (addr - block.start)).ok_or(DmaFault::Unmapped)?;
                region.behind(block.start, block.size, block.gpa, block.allows)
            }
        })
    }

    /// Finds the window around `addr` and puts it in its line, if there is one.
    ///
    /// An access guard must be live.
    ///
    /// Handles the common case, and needs so few registers that none is saved first. Accesses that
    /// miss the cache wait for memory: the fewer instructions each has, the further ahead the
    /// processor looks at the next ones.
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

    /// Finds the window around `addr` and puts it in its line.
    ///
    /// An access guard must be live.
    pub(crate) fn look_up(&self, addr: u64, line: &CacheLine) -> Result<Window, DmaFault> {
        let window = self.find_near(addr, &mut Near::nowhere())?;
        self.cache.put(line, addr, window, self.found);
        Ok(window)
    }

    /// Reports to the domain that an access lacked a translation or a permission.
    #[cold]
    pub(crate) fn missed(&self, addr: u64, access: Access, denied: bool) {
        if let Some(translation) = &self.translation {
            let access = access & (Access::READ | Access::WRITE);
            translation.shared.missed(Miss { addr, access, denied });
        }
    }

    /// Notes `len` written bytes (at least 1) at `addr`, in the window of `line`.
    ///
    /// They are marked when the access guard is dropped.
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

    /// Notes a write to a part of a window of many pages while a log is on.
    #[inline(never)]
    fn wrote_part(&self, line: &CacheLine, addr: u64, len: usize) {
        let window = line.window();
        if let Some(offset) = window.offset(addr) {
            self.wrote_run(window.gpa(offset), len);
        }
    }

    /// Notes a write to guest-physical memory.
    ///
    /// It is marked when the access guard is dropped.
    #[inline(always)]
    pub(crate) fn wrote(&self, gpa: u64, len: usize) {
        if self.shift != OFF && len > 0 {
            self.wrote_logged(gpa, len);
        }
    }

    /// [`Handle::wrote`] while a log is on.
    #[cold]
    #[inline(never)]
    fn wrote_logged(&self, gpa: u64, len: usize) {
        self.wrote_run(gpa, len);
    }

    /// [`Handle::wrote`] for at least one byte while a log is on.
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
            // Many pages at once: each word is marked in one go, and the fence is cheap relative to
            // the data.
            crate::sync::fence(std::sync::atomic::Ordering::SeqCst);
            return log.mark_pages(first_page, last_page);
        }
        self.wrote_page(gpa);
        if first_page != last_page {
            self.wrote_page(last);
        }
    }

    /// Notes a write to the page around `gpa` while a log is on.
    #[inline(always)]
    fn wrote_page(&self, gpa: u64) {
        if !self.written.add(gpa) {
            self.make_room(gpa);
        }
    }

    /// [`Handle::wrote_page`] when the list is full.
    #[cold]
    fn make_room(&self, gpa: u64) {
        self.mark_written();
        self.written.add(gpa);
    }

    /// Marks everything noted.
    #[inline(always)]
    fn mark_written(&self) {
        if !self.written.is_empty()
            && let Some(log) = self.log()
        {
            self.written.mark(log);
        }
    }

    /// Enters the reader slot, and takes over earlier publications.
    ///
    /// Returns the number to pass to [`Handle::leave`].
    #[inline(always)]
    pub(crate) fn begin(&mut self) -> u64 {
        let inside = self.reader.enter();
        if self.published.generation() != self.pin.generation {
            self.pin = self.published.pin(&self.reader);
            self.load_pin();
        }
        if let Some(translation) = &mut self.translation {
            let change = translation.shared.change();
            if change != translation.change {
                translation.change = change;
                self.forget();
            }
        }
        inside
    }

    /// Marks everything written and leaves the reader slot.
    #[inline(always)]
    pub(crate) fn leave(&self, inside: u64) {
        self.mark_written();
        self.reader.leave(inside);
    }
}
