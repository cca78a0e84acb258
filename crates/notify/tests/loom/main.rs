//! Kicks and interrupts under the model checker.
//!
//! The state machine is the real one, over atomics and locks that the checker explores:
//! `RUSTFLAGS="--cfg loom" cargo test -p paravane-notify --test loom --release`.
#![cfg(loom)]
mod baton;
mod scene;
mod transitions;

use loom::sync::Mutex;
use loom::sync::atomic::{AtomicU32, Ordering};
use loom::thread;
use paravane_notify::msi::{MsiController, MsiMessage, MsiSink, MsiTable};
use paravane_notify::{InterruptLine, InterruptSink, NotifyError};
use std::sync::Arc;

struct Edge(loom::sync::atomic::AtomicBool);

impl InterruptSink for Edge {
    fn raise(&self) {
        self.0.store(true, Ordering::Release);
    }
}

/// A device publishes a used buffer and raises; a driver handles an earlier one.
///
/// The used buffer is published without order.
///
/// `reads` says whether the handler reads the status before it acknowledges.
fn interrupted(reads: bool) {
    loom::model(move || {
        let edge = Arc::new(Edge(loom::sync::atomic::AtomicBool::new(false)));
        let line = Arc::new(InterruptLine::new(Arc::<Edge>::clone(&edge)));
        let used = Arc::new(AtomicU32::new(0));
        let device = {
            let (line, used) = (Arc::clone(&line), Arc::clone(&used));
            thread::spawn(move || {
                used.store(1, Ordering::Relaxed);
                line.raise(1);
            })
        };
        let mut seen = 0;
        let mut handle = || {
            let causes = if reads { line.status() } else { 1 };
            line.acknowledge(causes);
            if causes != 0 {
                seen = seen.max(used.load(Ordering::Relaxed));
            }
        };
        handle();
        device.join().unwrap();
        // Whatever the first round did, the edge of the second cause arrives, and a pending cause
        // is found.
        assert!(edge.0.load(Ordering::Acquire));
        if line.status() != 0 {
            handle();
        }
        assert_eq!(line.status(), 0);
        assert_eq!(seen, 1, "a used buffer is never looked for");
    });
}

#[test]
fn a_cause_that_is_read_stands_for_what_was_published() {
    interrupted(true);
}

#[test]
fn a_cause_that_is_cleared_unseen_stands_for_what_was_published() {
    interrupted(false);
}

/// A cause that is added while a silence ends is raised by one of the two.
///
/// The edge comes after the buffers that the cause stands for.
#[test]
fn a_cause_around_the_end_of_a_silence_is_raised() {
    loom::model(|| {
        let edge = Arc::new(Edge(loom::sync::atomic::AtomicBool::new(false)));
        let line = Arc::new(InterruptLine::new(Arc::<Edge>::clone(&edge)));
        line.silence(true);
        let used = Arc::new(AtomicU32::new(0));
        let device = {
            let (line, used) = (Arc::clone(&line), Arc::clone(&used));
            thread::spawn(move || {
                used.store(1, Ordering::Relaxed);
                line.raise(1);
            })
        };
        line.silence(false);
        if edge.0.load(Ordering::Acquire) {
            assert_eq!(used.load(Ordering::Relaxed), 1, "an edge before what it is for");
        }
        device.join().unwrap();
        assert!(edge.0.load(Ordering::Acquire));
    });
}

/// Platform that accepts messages: the messages that were delivered, by data.
#[derive(Default)]
struct Apic {
    delivered: Mutex<Vec<u32>>,
}

struct Wire(Arc<Apic>);

impl MsiController for Wire {
    fn sink(&self) -> Result<Box<dyn MsiSink>, NotifyError> {
        Ok(Box::new(Self(Arc::clone(&self.0))))
    }
}

impl MsiSink for Wire {
    fn route(&self, _message: MsiMessage) -> Result<(), NotifyError> {
        Ok(())
    }

    fn fire(&self, message: MsiMessage) {
        assert_eq!(message.address, u64::from(message.data), "a mixture of two messages");
        self.0.delivered.lock().unwrap().push(message.data);
    }
}

fn to(data: u32) -> MsiMessage {
    MsiMessage { address: u64::from(data), data, device: 0 }
}

/// A table with one vector, message 1, for one queue.
fn table() -> (Arc<MsiTable>, Arc<Apic>) {
    let apic = Arc::new(Apic::default());
    let table = MsiTable::new(&Wire(Arc::clone(&apic)), 1, 1).expect("a table");
    table.set_message(0, to(1)).expect("any message");
    table.map_queue(0, 0);
    (Arc::new(table), apic)
}

#[test]
fn an_interrupt_raised_around_a_mask_comes_once_and_never_while_masked() {
    loom::model(|| {
        let (table, apic) = table();
        let device = {
            let table = Arc::clone(&table);
            thread::spawn(move || table.queue(0))
        };
        table.mask(0);
        let before = apic.delivered.lock().unwrap().len();
        thread::yield_now();
        assert_eq!(apic.delivered.lock().unwrap().len(), before, "sent while masked");
        table.unmask(0);
        device.join().unwrap();
        assert_eq!(*apic.delivered.lock().unwrap(), [1], "lost, or sent twice");
        assert!(!table.pending(0));
    });
}

#[test]
fn an_interrupt_raised_around_a_change_goes_to_one_of_the_two_messages() {
    loom::model(|| {
        let (table, apic) = table();
        let device = {
            let table = Arc::clone(&table);
            thread::spawn(move || {
                table.queue(0);
                table.queue(0);
            })
        };
        table.set_message(0, to(2)).expect("any message");
        let to_old = apic.delivered.lock().unwrap().iter().filter(|&&data| data == 1).count();
        device.join().unwrap();
        let delivered = apic.delivered.lock().unwrap();
        assert_eq!(delivered.len(), 2, "lost");
        assert_eq!(delivered.iter().filter(|&&data| data == 1).count(), to_old, "astray: to the old one");
    });
}

#[test]
fn two_devices_and_two_masks_lose_nothing() {
    loom::model(|| {
        let (table, apic) = table();
        table.mask(0);
        let device = {
            let table = Arc::clone(&table);
            thread::spawn(move || table.queue(0))
        };
        let function = {
            let table = Arc::clone(&table);
            thread::spawn(move || {
                table.mask_function(true);
                table.mask_function(false);
            })
        };
        table.unmask(0);
        device.join().unwrap();
        function.join().unwrap();
        assert_eq!(*apic.delivered.lock().unwrap(), [1], "lost, or sent twice");
    });
}
