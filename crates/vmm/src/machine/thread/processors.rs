//! The threads that stand for the guest's processors.
//!
//! ```text
//! processor 0: the guest's thread --on_each--> a thread for each other; ends when all have ended
//! ```
//! A panic on one of them stops the others, and goes on on processor 0.
use super::lines::Lines;
use super::panics::{self, Panic};
use crate::machine::counters::RunCounters;
use paravane_device::lock;
use std::cell::Cell;
use std::sync::Mutex;

/// Stack of each in bytes.
const STACK: usize = 512 << 10;

thread_local! {
    static CPU: Cell<usize> = const { Cell::new(0) };
}

/// Number of the processor that the calling thread is.
pub(super) fn current() -> usize {
    CPU.get()
}

/// See [`paravane_guest::Platform::on_each_cpu`].
pub(super) fn on_each<W: Send>(
    work: &mut [W],
    run: &(dyn Fn(usize, &mut W) + Sync),
    lines: &Lines,
    counters: &RunCounters,
) {
    let failed = Mutex::new(None);
    let one = |cpu: usize, work: &mut W| {
        CPU.set(cpu);
        lines.attach(cpu);
        if let Err(panic) = panics::catch(|| run(cpu, work)) {
            // Those that the stop ends come later.
            lock(&failed).get_or_insert(panic);
            lines.stop();
        }
    };
    std::thread::scope(|scope| {
        let mut work = work.iter_mut().enumerate();
        let first = work.next();
        for (cpu, work) in work {
            let one = &one;
            let thread = std::thread::Builder::new().name(format!("guest{cpu}")).stack_size(STACK);
            let started = thread.spawn_scoped(scope, move || {
                one(cpu, work);
                counters.ends(cpu);
            });
            if let Err(error) = started {
                let panic = Panic::new(format!("cannot start a thread for the guest's CPU {cpu}: {error}"));
                lines.stop();
                lock(&failed).get_or_insert(panic);
            }
        }
        if let Some((cpu, work)) = first {
            one(cpu, work);
        }
    });
    let failed = lock(&failed).take();
    if let Some(panic) = failed {
        panic.resume();
    }
}
