//! SIGBUS handler: protects mapped files that another process may truncate.
//!
//! ```text
//!   access -> SIGBUS -> address in a protected mapping?
//!       yes: replace it by private zeroes, mark it `lost`, raise the alarm, go on
//!       no:  call the previous handler, or take the default action: the process ends
//!
//!   slot:  free --protect--> protected --fault--> lost --drop--> free
//! ```
//! **The whole mapping is replaced**, not only the missing page: later writes of a device to this
//! memory, its used entries above all, reach no other process. A file that shrinks page by page
//! causes one fault, not thousands, and as few mappings.
//!
//! **The kernel's own accesses raise no signal.** A system call that reads or writes missing memory
//! fails with EFAULT. The request fails, and the mapping is lost once this process touches it
//! itself.
//!
//! **The handler may run between any two instructions of any thread.** It reads the table below,
//! which is never moved or freed, makes two system calls, and takes no lock. The fault is in a
//! mapping that the thread uses and therefore keeps, so that the slot of *that* mapping does not
//! change meanwhile. Other slots may change under the handler; each has a version, odd while it
//! changes; a copy of a slot is discarded unless its version was even and still is.
//!
//! A thread that blocks SIGBUS is killed by a fault: do not block it in threads that touch guest
//! memory.
use crate::HostSlice;
use rustix::event::EventfdFlags;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// Alarm: a descriptor that signals when protected memory is lost.
///
/// Use one for all mappings with a common owner, a device for example.
#[derive(Debug)]
pub struct Alarm {
    event: OwnedFd,
}

impl Alarm {
    /// Makes an alarm that is not raised.
    ///
    /// # Errors
    /// The process has no file descriptors left.
    pub fn new() -> io::Result<Arc<Self>> {
        let event = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Arc::new(Self { event }))
    }

    /// Whether it was raised since the last call. Makes [`Alarm::as_fd`] unreadable.
    #[must_use]
    pub fn take(&self) -> bool {
        rustix::io::read(&self.event, &mut [0; 8]).is_ok()
    }
}

/// Readable when protected memory is lost.
impl AsFd for Alarm {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

/// Most protected mappings at a time.
///
/// As many as the kernel's default allows per process in all (`vm.max_map_count`).
///
/// The table is static and zero, so unused parts take no memory.
pub(crate) const MAX_MAPPINGS: usize = 1 << 16;
const WORD: usize = u64::BITS as usize;

static SLOTS: [Slot; MAX_MAPPINGS] = [const { Slot::new() }; MAX_MAPPINGS];

/// Number of slots that have ever been used: those below.
static USED: AtomicUsize = AtomicUsize::new(0);

/// One bit per slot: its mapping is lost.
static LOST: [AtomicU64; MAX_MAPPINGS / WORD] = [const { AtomicU64::new(0) }; MAX_MAPPINGS / WORD];

/// Number of lost mappings.
static LOST_COUNT: AtomicUsize = AtomicUsize::new(0);

/// Held while the table changes; no slot below its number is free.
///
/// The lock also orders the changes: a thread that finds an address mapped anew has taken the lock
/// after the thread that gave that address up.
static CHANGE: Mutex<usize> = Mutex::new(0);

/// One protected mapping.
#[derive(Debug)]
struct Slot {
    /// Odd while the other fields change.
    version: AtomicU32,
    /// First address; 0 if the slot is free.
    start: AtomicUsize,
    /// Length in bytes.
    len: AtomicUsize,
    /// Page size in bytes.
    page: AtomicUsize,
    /// Descriptor of the alarm.
    alarm: AtomicI32,
}

/// Contents of a slot.
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

    /// Writes the slot. Call it with `CHANGE` held.
    fn set(&self, found: Found) {
        // Relaxed: no other thread writes it. The fence keeps the stores below behind the odd
        // number, for those whose load of one of them is followed by the fence in `get`.
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

    /// Reads the slot. `None` while it changes.
    fn get(&self) -> Option<Found> {
        // Pairs with the last store in `set`.
        let version = self.version.load(Ordering::Acquire);
        let found = Found {
            start: self.start.load(Ordering::Relaxed),
            len: self.len.load(Ordering::Relaxed),
            page: self.page.load(Ordering::Relaxed),
            alarm: self.alarm.load(Ordering::Relaxed),
        };
        // Pairs with the fence in `set`: if one of the loads above saw a later change, the load
        // below sees its number.
        fence(Ordering::Acquire);
        (version.is_multiple_of(2) && self.version.load(Ordering::Relaxed) == version).then_some(found)
    }
}

/// Word and bit that tell whether the mapping in a slot is lost.
fn lost_bit(index: usize) -> (&'static AtomicU64, u64) {
    (&LOST[index / WORD], 1 << (index % WORD))
}

/// Protection of one mapping. Drop it before the mapping is unmapped.
#[derive(Debug)]
pub(crate) struct Protection {
    /// Index of the slot.
    index: usize,
    /// Its descriptor is in the slot.
    _alarm: Arc<Alarm>,
}

impl Protection {
    /// Protects the `len` bytes mapped at `start`, in pages of `page` bytes.
    pub(crate) fn new(start: NonNull<u8>, len: usize, page: usize, alarm: &Arc<Alarm>) -> io::Result<Self> {
        install()?;
        let mut first_free = CHANGE.lock().unwrap_or_else(PoisonError::into_inner);
        let free = SLOTS.iter().skip(*first_free).position(|slot| slot.start.load(Ordering::Relaxed) == 0);
        let index = *first_free
            + free.ok_or_else(|| {
                io::Error::other(format!("the process has {MAX_MAPPINGS} protected mappings, the maximum"))
            })?;
        // Relaxed: a thread that accesses the mapping has it from the caller, and with it this
        // number.
        USED.fetch_max(index + 1, Ordering::Relaxed);
        let alarm_fd = alarm.as_fd().as_raw_fd();
        SLOTS[index].set(Found { start: start.as_ptr() as usize, len, page, alarm: alarm_fd });
        *first_free = index + 1;
        Ok(Self { index, _alarm: Arc::clone(alarm) })
    }

    /// Whether zeroes have replaced the mapping, or are about to.
    pub(crate) fn lost(&self) -> bool {
        let (word, bit) = lost_bit(self.index);
        // What was copied before is not copied after the load below.
        fence(Ordering::Acquire);
        // Acquire: pairs with the handler's store.
        word.load(Ordering::Acquire) & bit != 0
    }
}

impl Drop for Protection {
    fn drop(&mut self) {
        let mut first_free = CHANGE.lock().unwrap_or_else(PoisonError::into_inner);
        SLOTS[self.index].set(Found { start: 0, len: 0, page: 0, alarm: -1 });
        let (word, bit) = lost_bit(self.index);
        // Relaxed, both: nothing accesses the mapping any more, and the lock orders this before the
        // slot's next use.
        if word.fetch_and(!bit, Ordering::Relaxed) & bit != 0 {
            LOST_COUNT.fetch_sub(1, Ordering::Relaxed);
        }
        *first_free = self.index.min(*first_free);
    }
}

/// Whether one of these pieces may be lost: its owner truncated the file.
///
/// Zeroes may then have replaced it.
///
/// If this returns `false` after a copy, the copy is of the real contents. Cheap while nothing is
/// lost in this process.
#[must_use]
pub fn is_lost(pieces: &[HostSlice]) -> bool {
    // What was copied before is not copied after the load below. Pairs with the handler's stores.
    fence(Ordering::Acquire);
    LOST_COUNT.load(Ordering::Relaxed) != 0 && is_any_lost(pieces)
}

#[cold]
fn is_any_lost(pieces: &[HostSlice]) -> bool {
    // Relaxed, all: as in `is_lost`, and in `Protection::new`.
    let words = LOST.iter().take(USED.load(Ordering::Relaxed).div_ceil(WORD)).enumerate();
    words.filter(|(_, word)| word.load(Ordering::Relaxed) != 0).any(|(number, word)| {
        (0..WORD).filter(|at| word.load(Ordering::Relaxed) >> at & 1 != 0).any(|at| {
            let Some(Found { start, len, .. }) = SLOTS[number * WORD + at].get() else { return false };
            let end = start.saturating_add(len);
            let touches = |piece: &HostSlice| {
                piece.ptr.addr() < end && start < piece.ptr.addr().saturating_add(piece.len)
            };
            // Checked again, because the slot may have become another mapping's. `get` has acquired
            // what came before that.
            pieces.iter().any(touches) && word.load(Ordering::Relaxed) >> at & 1 != 0
        })
    })
}

/// Action of SIGBUS before ours.
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();

/// Installs the handler, once.
fn install() -> io::Result<()> {
    static DONE: Mutex<bool> = Mutex::new(false);
    let mut done = DONE.lock().unwrap_or_else(PoisonError::into_inner);
    if *done {
        return Ok(());
    }
    let checked = |result| if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) };
    let mut previous = MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: this only queries the present action, and `previous` has room for it.
    checked(unsafe { libc::sigaction(libc::SIGBUS, std::ptr::null(), previous.as_mut_ptr()) })?;
    // Stored before the handler is in place: it may be called at once. SAFETY: the call has filled
    // it.
    let previous = *PREVIOUS.get_or_init(|| unsafe { previous.assume_init() });
    // SAFETY: plain data, for which zeroes are valid.
    let mut ours: libc::sigaction = unsafe { std::mem::zeroed() };
    ours.sa_sigaction = handler as *const () as usize;
    // Signals that the previous handler blocks.
    ours.sa_mask = previous.sa_mask;
    // ONSTACK: as Rust's own handler for guard pages of stacks, which is the previous one and needs
    // it.
    ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
    // SAFETY: `handler` has the signature that SA_SIGINFO asks for and does only what a signal
    // handler may.
    checked(unsafe { libc::sigaction(libc::SIGBUS, &raw const ours, std::ptr::null_mut()) })?;
    *done = true;
    Ok(())
}

extern "C" fn handler(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the thread's own variable.
    let errno = unsafe { *libc::__errno_location() };
    // SAFETY: the kernel passes a valid structure, and sets the address in those of faults
    // (positive codes).
    let fault = unsafe { ((*info).si_code > 0).then(|| (*info).si_addr() as usize) };
    if !fault.is_some_and(replace) {
        // SAFETY: as the kernel has called us.
        unsafe { pass_on(signal, info, context) };
    }
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
}

/// Replaces the protected mapping around `addr`.
///
/// `false` if there is none, or if the host refuses.
fn replace(addr: usize) -> bool {
    let inside = |found: &Found| addr.wrapping_sub(found.start) < found.len;
    // Relaxed: see `Protection::new`.
    let mut slots = SLOTS.iter().take(USED.load(Ordering::Relaxed)).enumerate();
    let found = slots.find_map(|(index, slot)| Some((index, slot.get().filter(inside)?)));
    let Some((index, found)) = found else { return false };
    let (word, bit) = lost_bit(index);
    // Before the zeroes are there: a thread that reads one of them has taken a fault behind the
    // change of the mapping, and finds it lost. Release: pairs with the fences in
    // `Protection::lost` and `is_lost`, which come after such an access.
    if word.fetch_or(bit, Ordering::Release) & bit == 0 {
        LOST_COUNT.fetch_add(1, Ordering::Release);
    }
    let map = |start: usize, len: usize| {
        let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
        // SAFETY: the addresses are those of a mapping of ours that stays mapped while its
        // protection lives, which the faulting thread ensures. There are no references to guest
        // memory, so its content may change.
        unsafe { mmap_anonymous(start as *mut _, len, ProtFlags::READ | ProtFlags::WRITE, flags) }.is_ok()
    };
    // A host that does not overcommit may refuse that much memory, but not a page.
    if !map(found.start, found.len) && !map(addr - (addr - found.start) % found.page, found.page) {
        return false;
    }
    // SAFETY: the protection keeps the alarm, and with it the descriptor, open.
    let alarm = unsafe { BorrowedFd::borrow_raw(found.alarm) };
    // Fails only if the counter is at its end: then the alarm is raised.
    let _ = rustix::io::write(alarm, &1_u64.to_ne_bytes());
    true
}

/// Acts as if this handler were not installed.
///
/// # Safety
/// Call it in the handler, with its arguments.
unsafe fn pass_on(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: as in `handler`.
    let sent = unsafe { (*info).si_code } <= 0;
    let previous = PREVIOUS.get();
    match previous.map_or(libc::SIG_DFL, |previous| previous.sa_sigaction) {
        libc::SIG_IGN if sent => {}
        // A fault that is ignored ends the process as well.
        libc::SIG_DFL | libc::SIG_IGN => {
            // SAFETY: to the default, which no code of ours is part of.
            unsafe { libc::signal(signal, libc::SIG_DFL) };
            if sent {
                // Unlike a fault it does not repeat by itself; this one arrives when the handler
                // returns. SAFETY: raises a signal in this thread.
                unsafe { libc::raise(signal) };
            }
        }
        action if previous.is_some_and(|previous| previous.sa_flags & libc::SA_SIGINFO != 0) => {
            // SAFETY: the code that installed it declared this signature.
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
