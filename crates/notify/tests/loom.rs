//! Kicks and interrupts under the model checker: the real state machine over atomics and locks that it explores.
//! `RUSTFLAGS="--cfg loom" cargo test -p paravane-notify --test loom --release`.
#![cfg(loom)]
use loom::sync::Mutex;
use loom::sync::atomic::{AtomicU32, Ordering};
use loom::thread;
use paravane_notify::msi::{MsiController, MsiMessage, MsiSink, MsiTable};
use paravane_notify::{HostNotifier, InterruptLine, InterruptSink, IoEventFds, Notifier, NotifyError};
use std::sync::Arc;

/// A host and a driver. The driver makes one buffer available and kicks; the "ring" is a counter that is
/// accessed without order, so that only the way of the kick can make it visible.
#[derive(Default)]
struct Host {
    /// As KVM: a write is delivered while the registration stands, and removal waits for those under way.
    registered: Mutex<Option<Notifier>>,
    /// How many kicks went through the registration. Written under its lock.
    delivered: Mutex<u32>,
}

impl IoEventFds for Host {
    fn assign(&self, _addr: u64, _datamatch: Option<u32>, notifier: &Notifier) -> Result<(), NotifyError> {
        *self.registered.lock().unwrap() = Some(notifier.try_clone()?);
        Ok(())
    }

    fn deassign(&self, _addr: u64, _datamatch: Option<u32>, _notifier: &Notifier) -> Result<(), NotifyError> {
        assert!(self.registered.lock().unwrap().take().is_some());
        Ok(())
    }
}

struct Scene {
    host: Arc<Host>,
    queue: HostNotifier,
    available: AtomicU32,
}

impl Scene {
    fn new() -> Arc<Self> {
        let host = Arc::new(Host::default());
        let fds: Arc<dyn IoEventFds> = Arc::<Host>::clone(&host);
        let queue = HostNotifier::new(fds, 0x50, None).expect("an eventfd");
        // The signal from birth would hide what these tests look for.
        assert_eq!(queue.notifier().take(), 1);
        Arc::new(Self { host, queue, available: AtomicU32::new(0) })
    }

    /// The driver's side: a buffer, and the write that an ioeventfd catches or that exits.
    fn drive(&self) {
        self.available.store(1, Ordering::Relaxed);
        {
            let registered = self.host.registered.lock().unwrap();
            if let Some(notifier) = &*registered {
                notifier.signal();
                *self.host.delivered.lock().unwrap() += 1;
                return;
            }
        }
        self.queue.kick();
    }

    /// The owner's side: looks at the ring only when it is signalled.
    fn serve(&self, seen: &mut u32) -> bool {
        let signalled = self.queue.notifier().take() > 0;
        if signalled {
            *seen = (*seen).max(self.available.load(Ordering::Relaxed));
        }
        signalled
    }
}

#[test]
fn an_owner_that_takes_a_kick_sees_what_it_is_about() {
    loom::model(|| {
        let scene = Scene::new();
        let driver = {
            let scene = Arc::clone(&scene);
            thread::spawn(move || scene.drive())
        };
        let mut seen = 0;
        if scene.serve(&mut seen) {
            assert_eq!(seen, 1);
        }
        driver.join().unwrap();
        scene.serve(&mut seen);
        assert_eq!(seen, 1, "the kick is lost");
    });
}

#[test]
fn a_kick_at_any_point_of_a_start_and_a_stop_is_found() {
    loom::model(|| {
        let scene = Scene::new();
        let driver = {
            let scene = Arc::clone(&scene);
            thread::spawn(move || scene.drive())
        };
        let mut seen = 0;
        scene.queue.assign().expect("a registration");
        assert!(scene.serve(&mut seen), "a start is signalled");
        // The handler is off. A kick may be under way.
        scene.queue.deassign().expect("removal");
        // The final test.
        scene.serve(&mut seen);
        if *scene.host.delivered.lock().unwrap() > 0 {
            assert_eq!(seen, 1, "a kick by ioeventfd is lost when it is removed");
        }
        // A kick by exit finds the eventfd where it was, for the next owner.
        driver.join().unwrap();
        scene.serve(&mut seen);
        assert_eq!(seen, 1, "a kick by exit is lost");
    });
}

#[test]
fn a_kick_that_a_back_end_took_with_it_is_made_good_by_the_hand_back() {
    loom::model(|| {
        let scene = Scene::new();
        scene.queue.assign().expect("a registration");
        let mut seen = 0;
        scene.serve(&mut seen);
        let driver = {
            let scene = Arc::clone(&scene);
            thread::spawn(move || scene.drive())
        };
        scene.queue.grab().expect("a grab");
        // A back end that takes the signal and is stopped before it looks at the ring.
        let _ = scene.queue.notifier().take();
        scene.queue.release().expect("the hand-back");
        assert!(scene.serve(&mut seen), "a hand-back is signalled");
        driver.join().unwrap();
        scene.serve(&mut seen);
        assert_eq!(seen, 1, "the kick is lost");
    });
}

struct Edge(loom::sync::atomic::AtomicBool);

impl InterruptSink for Edge {
    fn raise(&self) {
        self.0.store(true, Ordering::Release);
    }
}

/// A device that publishes one used buffer (without order) and raises; a driver that is in its interrupt handler
/// for an earlier one at the time. `reads` says whether the handler reads the status before it acknowledges.
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
        // Whatever the first round did, the edge of the second cause comes, and a pending cause is found.
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

/// A cause that comes while a silence ends is raised by the one or by the other, and stands for what was published.
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

/// A platform that takes messages: what was delivered with which message, by data.
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
    MsiMessage { address: u64::from(data), data }
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
