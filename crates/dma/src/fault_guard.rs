//! Memory that another process may take away: a mapped file that its owner makes shorter.
//!
//! ```text
//!   access -> SIGBUS -> whose address is it?
//!                         a guarded mapping: private zeroes take its place, it is `lost`, the alarm rings; the access goes on
//!                         nobody's of ours:  the handler that was there before, or the default, which ends the process
//!
//!   slot:  free --guard--> guarded --fault--> lost --drop--> free
//! ```
//! **All of the mapping is replaced**, not the page that is missing: what a device still does to this memory afterwards is
//! seen by nobody, its used entries least of all, and a file that shrinks page by page makes one fault and not thousands,
//! nor as many mappings.
//!
//! **The kernel's own accesses raise no signal.** A system call that reads or writes what is gone fails with EFAULT. Such
//! a request fails, and the mapping is lost when we touch it ourselves.
//!
//! **The handler may run between any two instructions of any thread.** It reads the table below, which is never moved or
//! freed, makes two system calls, and takes no lock. The fault is in a mapping that the thread uses and therefore keeps,
//! so that the slot of *that* mapping does not change meanwhile. Other slots may, under the handler's eyes; each has a
//! version, odd while it is changed, and what was read is thrown away unless the version was even and still is.
//!
//! A thread that blocks SIGBUS is killed by a fault: do not block it in threads that touch guest memory.
use crate::HostSlice;
use rustix::event::EventfdFlags;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// Rings when guarded memory is lost. One a device, say: all that it guards fails the same owner.
#[derive(Debug)]
pub struct Alarm {
    event: OwnedFd,
}

impl Alarm {
    /// A silent one.
    ///
    /// # Errors
    /// The process has no descriptors left.
    pub fn new() -> io::Result<Arc<Self>> {
        let event = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Arc::new(Self { event }))
    }

    /// Whether it has rung since this was last asked; makes [`Alarm::as_fd`] unreadable.
    #[must_use]
    pub fn take(&self) -> bool {
        rustix::io::read(&self.event, &mut [0; 8]).is_ok()
    }
}

/// Readable when something has been lost.
impl AsFd for Alarm {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

/// Most mappings that are guarded at a time: as many as the kernel's default allows a process in all (`vm.max_map_count`). The
/// table is static and all zeroes, so what is never used takes no memory.
pub(crate) const MOST: usize = 1 << 16;
const WORD: usize = u64::BITS as usize;

static SLOTS: [Slot; MOST] = [const { Slot::new() }; MOST];

/// Slots that have ever been used: those below.
static USED: AtomicUsize = AtomicUsize::new(0);

/// A bit for each slot: its mapping is lost.
static LOST: [AtomicU64; MOST / WORD] = [const { AtomicU64::new(0) }; MOST / WORD];

/// How many are lost.
static LOST_COUNT: AtomicUsize = AtomicUsize::new(0);

/// Held by those who change the table. Besides, it orders them: who finds that an address has been mapped anew has taken it
/// after the one who gave that address up. No slot below its number is free.
static CHANGE: Mutex<usize> = Mutex::new(0);

/// One guarded mapping.
#[derive(Debug)]
struct Slot {
    /// Odd while the rest is changed.
    version: AtomicU32,
    /// First address; 0 when the slot is free.
    start: AtomicUsize,
    /// Bytes.
    len: AtomicUsize,
    /// Bytes of a page.
    page: AtomicUsize,
    /// The alarm's descriptor.
    alarm: AtomicI32,
}

/// What the handler found in a slot.
#[derive(Clone, Copy)]
struct Found {
    start: usize,
    len: usize,
    page: usize,
    alarm: i32,
}

impl Slot {
    const fn new() -> Self {
        Self {
            version: AtomicU32::new(0),
            start: AtomicUsize::new(0),
            len: AtomicUsize::new(0),
            page: AtomicUsize::new(0),
            alarm: AtomicI32::new(0),
        }
    }

    /// To be called with `CHANGE` held.
    fn set(&self, found: Found) {
        // Relaxed: nobody else writes it. The fence keeps the stores below behind the odd number, for those whose load
        // of one of them is followed by the fence in `get`.
        let version = self.version.load(Ordering::Relaxed);
        self.version.store(version.wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::Release);
        self.start.store(found.start, Ordering::Relaxed);
        self.len.store(found.len, Ordering::Relaxed);
        self.page.store(found.page, Ordering::Relaxed);
        self.alarm.store(found.alarm, Ordering::Relaxed);
        // Pairs with the first load in `get`.
        self.version.store(version.wrapping_add(2), Ordering::Release);
    }

    /// What is in the slot, unless it is being changed.
    fn get(&self) -> Option<Found> {
        // Pairs with the last store in `set`.
        let version = self.version.load(Ordering::Acquire);
        let found = Found {
            start: self.start.load(Ordering::Relaxed),
            len: self.len.load(Ordering::Relaxed),
            page: self.page.load(Ordering::Relaxed),
            alarm: self.alarm.load(Ordering::Relaxed),
        };
        // Pairs with the fence in `set`: if one of the loads above saw a later change, the load below sees its number.
        fence(Ordering::Acquire);
        (version.is_multiple_of(2) && self.version.load(Ordering::Relaxed) == version).then_some(found)
    }
}

/// The word and the bit that tell whether the mapping in a slot is lost.
fn lost_bit(index: usize) -> (&'static AtomicU64, u64) {
    (&LOST[index / WORD], 1 << (index % WORD))
}

/// Keeps one mapping guarded. To be dropped before that is unmapped.
#[derive(Debug)]
pub(crate) struct Guard {
    /// Number of the slot.
    index: usize,
    /// Its descriptor is in the slot.
    _alarm: Arc<Alarm>,
}

impl Guard {
    /// Guards the `len` bytes mapped at `start`, in pages of `page` bytes.
    pub(crate) fn new(start: NonNull<u8>, len: usize, page: usize, alarm: &Arc<Alarm>) -> io::Result<Self> {
        install()?;
        let mut first_free = CHANGE.lock().unwrap_or_else(PoisonError::into_inner);
        let free = SLOTS.iter().skip(*first_free).position(|slot| slot.start.load(Ordering::Relaxed) == 0);
        let index = *first_free
            + free.ok_or_else(|| io::Error::other(format!("this process guards {MOST} mappings already")))?;
        // Relaxed: who accesses the mapping has it from the caller, and with it this number.
        USED.fetch_max(index + 1, Ordering::Relaxed);
        let alarm_fd = alarm.as_fd().as_raw_fd();
        SLOTS[index].set(Found { start: start.as_ptr() as usize, len, page, alarm: alarm_fd });
        *first_free = index + 1;
        Ok(Self { index, _alarm: Arc::clone(alarm) })
    }

    /// Whether zeroes have taken the mapping's place, or are about to.
    pub(crate) fn lost(&self) -> bool {
        let (word, bit) = lost_bit(self.index);
        // What was copied before is not copied after the load below.
        fence(Ordering::Acquire);
        // Acquire: pairs with the handler's store.
        word.load(Ordering::Acquire) & bit != 0
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let mut first_free = CHANGE.lock().unwrap_or_else(PoisonError::into_inner);
        SLOTS[self.index].set(Found { start: 0, len: 0, page: 0, alarm: -1 });
        let (word, bit) = lost_bit(self.index);
        // Relaxed, both: nobody accesses the mapping any more, and the lock orders this before the slot's next use.
        if word.fetch_and(!bit, Ordering::Relaxed) & bit != 0 {
            LOST_COUNT.fetch_sub(1, Ordering::Relaxed);
        }
        *first_free = self.index.min(*first_free);
    }
}

/// Whether zeroes may be in the place of one of these pieces, because their owner has taken them away. Who has copied from them,
/// and is told that it is not so, has copied what was there. Cheap while nothing is lost in this process.
#[must_use]
pub fn is_lost(pieces: &[HostSlice]) -> bool {
    // What was copied before is not copied after the load below. Pairs with the handler's stores.
    fence(Ordering::Acquire);
    LOST_COUNT.load(Ordering::Relaxed) != 0 && is_any_lost(pieces)
}

#[cold]
fn is_any_lost(pieces: &[HostSlice]) -> bool {
    // Relaxed, all: as in `is_lost`, and in `Guard::new`.
    let words = LOST.iter().take(USED.load(Ordering::Relaxed).div_ceil(WORD)).enumerate();
    words.filter(|(_, word)| word.load(Ordering::Relaxed) != 0).any(|(number, word)| {
        (0..WORD).filter(|at| word.load(Ordering::Relaxed) >> at & 1 != 0).any(|at| {
            let Some(Found { start, len, .. }) = SLOTS[number * WORD + at].get() else { return false };
            let end = start.saturating_add(len);
            let touches = |piece: &HostSlice| {
                piece.ptr.addr() < end && start < piece.ptr.addr().saturating_add(piece.len)
            };
            // Looked at again, since the slot may have become another mapping's. `get` has acquired what came before that.
            pieces.iter().any(touches) && word.load(Ordering::Relaxed) >> at & 1 != 0
        })
    })
}

/// What SIGBUS did before.
static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();

/// Puts the handler in its place, once.
fn install() -> io::Result<()> {
    static DONE: Mutex<bool> = Mutex::new(false);
    let mut done = DONE.lock().unwrap_or_else(PoisonError::into_inner);
    if *done {
        return Ok(());
    }
    let checked = |result| if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) };
    let mut before = MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: only the present action is asked for, and `before` has room for it.
    checked(unsafe { libc::sigaction(libc::SIGBUS, std::ptr::null(), before.as_mut_ptr()) })?;
    // Kept before the handler is in place: it may be called at once.
    // SAFETY: the call has filled it.
    let before = *BEFORE.get_or_init(|| unsafe { before.assume_init() });
    // SAFETY: plain data, for which zeroes are valid.
    let mut ours: libc::sigaction = unsafe { std::mem::zeroed() };
    ours.sa_sigaction = handler as *const () as usize;
    // Those that the handler before did not want to be interrupted by.
    ours.sa_mask = before.sa_mask;
    // ONSTACK: as Rust's own handler for guard pages of stacks, which is the one before and needs it.
    ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
    // SAFETY: `handler` has the signature that SA_SIGINFO asks for and does only what a signal handler may.
    checked(unsafe { libc::sigaction(libc::SIGBUS, &raw const ours, std::ptr::null_mut()) })?;
    *done = true;
    Ok(())
}

extern "C" fn handler(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the thread's own variable.
    let errno = unsafe { *libc::__errno_location() };
    // SAFETY: the kernel hands over a valid structure, and sets the address in those of faults (positive codes).
    let fault = unsafe { ((*info).si_code > 0).then(|| (*info).si_addr() as usize) };
    if !fault.is_some_and(replace) {
        // SAFETY: as the kernel has called us.
        unsafe { pass_on(signal, info, context) };
    }
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
}

/// Replaces the guarded mapping around `addr`. `false`: there is none, or the host refuses.
fn replace(addr: usize) -> bool {
    let inside = |found: &Found| addr.wrapping_sub(found.start) < found.len;
    // Relaxed: see `Guard::new`.
    let mut slots = SLOTS.iter().take(USED.load(Ordering::Relaxed)).enumerate();
    let found = slots.find_map(|(index, slot)| Some((index, slot.get().filter(inside)?)));
    let Some((index, found)) = found else { return false };
    let (word, bit) = lost_bit(index);
    // Before the zeroes are there: who has met one of them has taken a fault behind the change of the mapping, and finds it
    // lost. Release: pairs with the fences in `Guard::lost` and `is_lost`, which come after such an access.
    if word.fetch_or(bit, Ordering::Release) & bit == 0 {
        LOST_COUNT.fetch_add(1, Ordering::Release);
    }
    let map = |start: usize, len: usize| {
        let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
        // SAFETY: the addresses are those of a mapping of ours that stays mapped while its guard lives, which the
        // faulting thread sees to. Nobody has references to guest memory, so that its content may change.
        unsafe { mmap_anonymous(start as *mut _, len, ProtFlags::READ | ProtFlags::WRITE, flags) }.is_ok()
    };
    // A host that commits no more than it has may refuse that much memory, but not a page.
    if !map(found.start, found.len) && !map(addr - (addr - found.start) % found.page, found.page) {
        return false;
    }
    // SAFETY: the guard keeps the alarm, and with it the descriptor, open.
    let alarm = unsafe { BorrowedFd::borrow_raw(found.alarm) };
    // It fails only if the count is at its end: then it has rung.
    let _ = rustix::io::write(alarm, &1_u64.to_ne_bytes());
    true
}

/// Does what would have been done without us.
///
/// # Safety
/// To be called in the handler, with its arguments.
unsafe fn pass_on(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: as in `handler`.
    let sent = unsafe { (*info).si_code } <= 0;
    let before = BEFORE.get();
    match before.map_or(libc::SIG_DFL, |before| before.sa_sigaction) {
        libc::SIG_IGN if sent => {}
        // A fault that is ignored ends the process as well.
        libc::SIG_DFL | libc::SIG_IGN => {
            // SAFETY: to the default, which no code of ours is part of.
            unsafe { libc::signal(signal, libc::SIG_DFL) };
            if sent {
                // Unlike a fault it is not repeated by itself; this one comes when the handler returns.
                // SAFETY: raises a signal in this thread.
                unsafe { libc::raise(signal) };
            }
        }
        action if before.is_some_and(|before| before.sa_flags & libc::SA_SIGINFO != 0) => {
            // SAFETY: whoever installed it said that it has this signature.
            let action = unsafe {
                std::mem::transmute::<
                    usize,
                    extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void),
                >(action)
            };
            action(signal, info, context);
        }
        action => {
            // SAFETY: as above, without SA_SIGINFO.
            let action = unsafe { std::mem::transmute::<usize, extern "C" fn(libc::c_int)>(action) };
            action(signal);
        }
    }
}
