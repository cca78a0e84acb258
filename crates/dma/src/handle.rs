//! A holder's place at the memory: what it keeps from batch to batch.
use crate::cache::Cache;
use crate::domain::Shared;
use crate::memory::{Pin, Published};
use crate::seat::Seat;
use crate::snapshot::Window;
use crate::table::Near;
use crate::written::Written;
use crate::{Access, DirtyLog, Door, Miss};
use std::sync::Arc;

/// `Handle::shift` when no log is on.
const OFF: u32 = u32::MAX;

/// What one holder (a queue, say) keeps across calls: a pinned snapshot of the map, the translations that it has found,
/// its place in the list of those who are waited for. Accesses are made through the [`Door`], which is open for one
/// batch; while it is shut nobody waits for the holder.
#[derive(Debug)]
pub struct Handle {
    /// Where accesses look first. With one region and no domain, the only look-up there is.
    cache: Cache,
    /// Page size of the log that is on, as a power of two.
    shift: u32,
    written: Written,
    pin: Arc<Pin>,
    published: Arc<Published>,
    translation: Option<Translation>,
    seat: Arc<Seat>,
}

#[derive(Debug)]
struct Translation {
    shared: Arc<Shared>,
    /// The change that the cache is up to.
    change: u64,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.published.seats().remove(&self.seat);
        if let Some(translation) = &self.translation {
            translation.shared.seats().remove(&self.seat);
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
        let seat = Seat::new();
        published.seats().add(&seat);
        let translation = domain.map(|shared| {
            shared.seats().add(&seat);
            Translation { change: shared.change(), shared }
        });
        let mut handle = Self {
            cache: Cache::new(),
            shift: OFF,
            written: Written::new(),
            pin: published.pin(&seat),
            published: Arc::clone(published),
            translation,
            seat,
        };
        handle.look_at_pin();
        handle
    }

    /// Names the holder, for errors of those who wait for it. The first name stays.
    #[must_use]
    pub fn named(self, name: impl Into<String>) -> Self {
        self.seat.call(name.into());
        self
    }

    /// Opens the door for one batch. All that was published before is seen; what is published later is seen when it is
    /// opened again, but for new translations of a [`Domain`](crate::Domain), which are seen at once.
    ///
    /// Costs a full fence (about 5 ns) and two loads while nothing changes. Whoever changes the map may wait until
    /// the door is shut, so nothing that takes long belongs into a batch.
    #[inline]
    pub fn open(&mut self) -> Door<'_> {
        let inside = self.seat.enter();
        if self.published.generation() != self.pin.generation {
            self.pin = self.published.pin(&self.seat);
            self.look_at_pin();
        }
        if let Some(translation) = &mut self.translation {
            let change = translation.shared.change();
            if change != translation.change {
                translation.change = change;
                self.forget();
            }
        }
        Door::new(self, inside)
    }

    /// Whether the device's addresses are translated.
    #[must_use]
    pub fn is_translated(&self) -> bool {
        self.translation.is_some()
    }

    #[cold]
    fn look_at_pin(&mut self) {
        self.shift = self.log().map_or(OFF, |log| log.shift());
        match (&self.translation, self.pin.snapshot.only()) {
            (None, Some(window)) => {
                self.forget();
                self.cache.put_only(window);
            }
            _ => self.forget(),
        }
    }

    /// Forgets what it has found.
    #[cold]
    fn forget(&mut self) {
        // Nothing is left to mark, unless a door was leaked instead of shut.
        self.mark_written();
        self.cache.clear();
    }

    pub(crate) fn log(&self) -> Option<&DirtyLog> {
        self.pin.snapshot.log().map(|log| &**log)
    }

    pub(crate) fn pin(&self) -> &Arc<Pin> {
        &self.pin
    }

    pub(crate) fn seat(&self) -> &Seat {
        &self.seat
    }

    /// The number of the domain's last change that this batch has seen; 0 without a domain.
    pub(crate) fn change(&self) -> u64 {
        self.translation.as_ref().map_or(0, |translation| translation.change)
    }

    /// Number of the place where a window around `addr` would be.
    #[inline(always)]
    pub(crate) fn place(&self, addr: u64) -> usize {
        self.cache.number(addr)
    }

    /// What is in a place: the window around an address, if it has been found already.
    #[inline(always)]
    pub(crate) fn window(&self, place: usize) -> Window {
        self.cache.window(place)
    }

    /// Finds the window around `addr`. To be called while the door is open, the same one that `near` was made in.
    #[inline(always)]
    pub(crate) fn find_near(&self, addr: u64, near: &mut Near) -> Result<Window, Fault> {
        let snapshot = &self.pin.snapshot;
        Ok(match &self.translation {
            None => *snapshot.find(addr).ok_or(Fault::Unmapped)?,
            Some(Translation { shared, .. }) => {
                // SAFETY: the door is open, as it was for what is in `near`: `Domain::unmap` frees no node that a walk
                // inside it can find before it has seen the door shut.
                let block = unsafe { shared.table().find(addr, near) }.ok_or(Fault::Untranslated)?;
                let region = snapshot.find(block.gpa + (addr - block.start)).ok_or(Fault::Unmapped)?;
                region.behind(block.start, block.size, block.gpa, block.allows)
            }
        })
    }

    /// Finds the window around `addr` and puts it in its place. To be called while the door is open.
    #[inline(never)]
    pub(crate) fn find(&self, addr: u64, place: usize) -> Result<(), Fault> {
        let window = self.find_near(addr, &mut Near::nowhere())?;
        if self.shift != OFF && self.written.take_place(place) {
            self.wrote_page(self.cache.window(place).gpa(0));
        }
        self.cache.put(place, window);
        Ok(())
    }

    /// An access has failed for want of a translation, or of what it allows.
    #[cold]
    pub(crate) fn missed(&self, addr: u64, access: Access) {
        if let Some(translation) = &self.translation {
            translation.shared.missed(Miss { addr, access: access & (Access::READ | Access::WRITE) });
        }
    }

    /// The window in a place has been written: its page is to be marked when the door is shut.
    #[inline(always)]
    pub(crate) fn wrote_window(&self, place: usize) {
        if self.shift != OFF {
            self.written.add_place(place);
        }
    }

    /// Guest-physical memory has been written: it is to be marked when the door is shut.
    #[inline(always)]
    pub(crate) fn wrote(&self, gpa: u64, len: usize) {
        if self.shift == OFF || len == 0 {
            return;
        }
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

    /// The page around `gpa` has been written.
    fn wrote_page(&self, gpa: u64) {
        if !self.written.add(gpa) {
            self.mark_written();
            // There is room now.
            self.written.add(gpa);
        }
    }

    /// Marks all that was written.
    #[inline(always)]
    fn mark_written(&self) {
        if !self.written.is_empty()
            && let Some(log) = self.log()
        {
            self.written.mark(&self.cache, log);
        }
    }

    /// The batch ends.
    #[inline(always)]
    pub(crate) fn shut(&self, inside: u64) {
        self.mark_written();
        self.seat.leave(inside);
    }
}
