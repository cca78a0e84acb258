//! Has all processors work at the same time.
//!
//! ```text
//! processor 0      on_each: puts the work down --wakes--> works ---------> waits for the others
//! others           serve: sleep until there is work ------> work ---> one fewer --wakes--> 0; sleep
//! ```
use crate::arch::Machine;
use core::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use paravane_spec::builtin::WAKE;

/// The work of one call of [`on_each`].
struct Work<'a> {
    run: &'a (dyn Fn(usize) + Sync),
    /// Number of processors that work.
    cpus: usize,
}

/// The work that was put down, or null.
///
/// Points to a [`Work`] that lives until [`BUSY`] is 0 again.
static WORK: AtomicPtr<Work<'static>> = AtomicPtr::new(core::ptr::null_mut());
/// Processors besides 0 that have not ended the work.
static BUSY: AtomicUsize = AtomicUsize::new(0);

/// Elements of a slice: each processor takes the one of its number.
struct Elements<W>(*mut W);

// SAFETY: each processor takes the element of its number only, and W may go to another processor.
unsafe impl<W: Send> Sync for Elements<W> {}

impl<W> Elements<W> {
    /// The element of processor `cpu`.
    ///
    /// # Safety
    /// It is inside, and no other processor takes it.
    unsafe fn take(&self, cpu: usize) -> *mut W {
        // SAFETY: as the caller promises.
        unsafe { self.0.add(cpu) }
    }
}

/// See [`paravane_guest::Platform::on_each_cpu`].
pub(crate) fn on_each<W: Send>(work: &mut [W], run: &(dyn Fn(usize, &mut W) + Sync)) {
    let cpus = work.len();
    let elements = Elements(work.as_mut_ptr());
    let each = |cpu: usize| {
        // SAFETY: `cpu` is less than `cpus`, and each processor calls this once, with its number.
        run(cpu, unsafe { &mut *elements.take(cpu) });
    };
    let mut given = Work { run: &each, cpus };
    BUSY.store(cpus.saturating_sub(1), Ordering::Relaxed);
    // Release, pairs with the acquire in `serve`: with it comes the work, and BUSY.
    WORK.store((&raw mut given).cast(), Ordering::Release);
    (1..cpus).for_each(|cpu| Machine::send(cpu, WAKE));
    if cpus > 0 {
        each(0);
    }
    loop {
        let seen = Machine::taken(0);
        // Acquire, pairs with the release in `serve`: what the others did has happened.
        if BUSY.load(Ordering::Acquire) == 0 {
            break;
        }
        Machine::sleep(seen);
    }
    WORK.store(core::ptr::null_mut(), Ordering::Relaxed);
}

/// Waits for work, and does it, once: the program has one piece of work for all processors.
pub(crate) fn serve(cpu: usize) -> ! {
    loop {
        let seen = Machine::taken(cpu);
        let work = WORK.load(Ordering::Acquire);
        if !work.is_null() {
            // SAFETY: `on_each` put it there, and waits for this processor before it returns, if
            // this is one that works.
            let work = unsafe { &*work };
            if cpu < work.cpus {
                (work.run)(cpu);
                // Release, pairs with the acquire in `on_each`.
                if BUSY.fetch_sub(1, Ordering::Release) == 1 {
                    Machine::send(0, WAKE);
                }
            }
            Machine::stop();
        }
        Machine::sleep(seen);
    }
}
