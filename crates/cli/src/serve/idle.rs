//! The scheduling class of a daemon that has handed its devices over.

/// Has this thread run only while a CPU has nothing else to do (SCHED_IDLE, sched(7)).
///
/// Others interrupt it at once; with a nice value alone it would keep its CPU for milliseconds.
pub(super) fn run_when_idle() {
    let priority: libc::c_int = 0;
    // If it is refused, the thread takes its share.
    // SAFETY: the kernel only reads the priority, which outlives the call; 0 is this thread. Not by
    // the C library, as that of musl refuses it.
    unsafe { libc::syscall(libc::SYS_sched_setscheduler, 0, libc::SCHED_IDLE, &raw const priority) };
}
