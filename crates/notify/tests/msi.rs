//! Vector table, over sinks that record what they are given.
#![cfg(not(loom))]
use paravane_notify::msi::{MsiController, MsiMessage, MsiSink, MsiTable, NO_VECTOR};
use paravane_notify::{InterruptSink, Interrupts, NotifyError};
use paravane_spec::mmio::{INT_CONFIG_CHANGE, INT_USED_BUFFER};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// Deliveries of all sinks of a table.
#[derive(Default)]
struct Platform {
    delivered: Mutex<Vec<MsiMessage>>,
    routed: Mutex<Vec<MsiMessage>>,
    refuses: AtomicBool,
}

struct Controller(Arc<Platform>);
struct Sink(Arc<Platform>);

impl MsiController for Controller {
    fn sink(&self) -> Result<Box<dyn MsiSink>, NotifyError> {
        Ok(Box::new(Sink(Arc::clone(&self.0))))
    }
}

impl MsiSink for Sink {
    fn route(&self, message: MsiMessage) -> Result<(), NotifyError> {
        if self.0.refuses.load(Ordering::Relaxed) {
            return Err(NotifyError::Message { address: message.address, data: message.data });
        }
        self.0.routed.lock().unwrap().push(message);
        Ok(())
    }

    fn fire(&self, message: MsiMessage) {
        self.0.delivered.lock().unwrap().push(message);
    }
}

impl Platform {
    fn delivered(&self) -> Vec<u32> {
        self.delivered.lock().unwrap().drain(..).map(|message| message.data).collect()
    }
}

fn message(data: u32) -> MsiMessage {
    MsiMessage { address: 0xfee0_0000, data, device: 7 }
}

/// Three vectors, two queues.
///
/// Queue n has vector n with message 100 + n. The configuration has vector 2.
fn table() -> (MsiTable, Arc<Platform>) {
    let platform = Arc::new(Platform::default());
    let table = MsiTable::new(&Controller(Arc::clone(&platform)), 3, 2).unwrap().of_device(7);
    for vector in 0..3 {
        table.set_message(vector, message(100 + u32::from(vector))).unwrap();
    }
    assert_eq!(table.message(0), Some(message(100)), "it names its device");
    assert_eq!((table.map_queue(0, 0), table.map_queue(1, 1), table.map_configuration(2)), (0, 1, 2));
    (table, platform)
}

#[test]
fn each_source_sends_the_message_of_its_vector() {
    let (table, platform) = table();
    table.queue(0);
    table.queue(1);
    table.configuration();
    assert_eq!(platform.delivered(), [100, 101, 102]);
    assert_eq!(table.sent(), 3);
}

#[test]
fn sources_may_share_a_vector_or_have_none() {
    let (table, platform) = table();
    assert_eq!(table.map_queue(0, 1), 1);
    assert_eq!(table.map_configuration(NO_VECTOR), NO_VECTOR);
    table.queue(0);
    table.queue(1);
    table.configuration();
    assert_eq!(platform.delivered(), [101, 101]);
}

#[test]
fn what_does_not_exist_is_no_vector() {
    let (table, platform) = table();
    assert_eq!((table.map_queue(0, 3), table.queue_vector(0)), (NO_VECTOR, NO_VECTOR));
    assert_eq!((table.map_queue(2, 0), table.queue_vector(2)), (NO_VECTOR, NO_VECTOR));
    assert_eq!((table.map_configuration(77), table.configuration_vector()), (NO_VECTOR, NO_VECTOR));
    for queue in [0, 2, NO_VECTOR] {
        table.queue(queue);
    }
    table.mask(3);
    table.unmask(NO_VECTOR);
    table.forget(3);
    assert!(table.set_message(3, message(1)).is_err());
    assert!(!table.masked(3) && !table.pending(3) && table.message(3).is_none());
    assert!(platform.delivered().is_empty());
}

#[test]
fn a_masked_vector_keeps_one_interrupt_for_later() {
    let (table, platform) = table();
    table.mask(0);
    assert!(table.masked(0) && !table.pending(0));
    table.queue(0);
    table.queue(0);
    table.queue(1);
    assert_eq!(platform.delivered(), [101]);
    assert!(table.pending(0));
    // To the message that it has by then.
    table.set_message(0, message(7)).unwrap();
    assert!(table.pending(0));
    table.unmask(0);
    assert_eq!(platform.delivered(), [7]);
    assert!(!table.pending(0) && !table.masked(0));
    table.unmask(0);
    assert!(platform.delivered().is_empty());
}

#[test]
fn the_function_mask_and_the_vectors_own_both_count() {
    let (table, platform) = table();
    table.mask(0);
    table.mask_function(true);
    table.queue(0);
    table.queue(1);
    table.unmask(0);
    assert!(platform.delivered().is_empty());
    table.mask(1);
    table.mask_function(false);
    assert_eq!(platform.delivered(), [100]);
    assert!(table.pending(1));
    table.unmask(1);
    assert_eq!(platform.delivered(), [101]);
}

#[test]
fn a_refused_message_leaves_the_old_one() {
    let (table, platform) = table();
    platform.refuses.store(true, Ordering::Relaxed);
    assert!(matches!(table.set_message(0, message(8)), Err(NotifyError::Message { data: 8, .. })));
    table.queue(0);
    assert_eq!((platform.delivered(), table.message(0)), (vec![100], Some(message(100))));
}

#[test]
fn the_same_message_again_makes_no_new_route() {
    let (table, platform) = table();
    platform.routed.lock().unwrap().clear();
    table.set_message(0, message(100)).unwrap();
    assert!(platform.routed.lock().unwrap().is_empty());
    // After its message was removed, the sink is asked again: it may have another route by now.
    table.forget(0);
    table.set_message(0, message(100)).unwrap();
    assert_eq!(*platform.routed.lock().unwrap(), [message(100)]);
}

#[test]
fn without_a_message_nothing_is_sent_and_nothing_waits() {
    let (table, platform) = table();
    table.mask(0);
    table.queue(0);
    table.forget(0);
    assert!(!table.masked(0) && !table.pending(0));
    table.queue(0);
    table.set_message(0, message(5)).unwrap();
    assert!(platform.delivered().is_empty());
    table.queue(0);
    assert_eq!(platform.delivered(), [5]);
}

#[test]
fn a_reset_forgets_everything() {
    let (table, platform) = table();
    table.mask(0);
    table.queue(0);
    table.reset();
    for queue in 0..2 {
        assert_eq!(table.queue_vector(queue), NO_VECTOR);
        table.queue(queue);
    }
    for vector in 0..table.len() {
        assert!(!table.masked(vector) && !table.pending(vector) && table.message(vector).is_none());
    }
    table.configuration();
    assert!(platform.delivered().is_empty());
}

#[derive(Default)]
struct Edges(AtomicU64);

impl InterruptSink for Edges {
    fn raise(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn with_messages_on_the_status_stays_zero() {
    let (table, platform) = table();
    let edges = Arc::new(Edges::default());
    let interrupts = Interrupts::with_msi(Arc::<Edges>::clone(&edges), table);
    interrupts.used_buffer(0);
    interrupts.config_change();
    assert_eq!(interrupts.line().status(), INT_USED_BUFFER | INT_CONFIG_CHANGE);
    interrupts.line().acknowledge(INT_USED_BUFFER | INT_CONFIG_CHANGE);

    interrupts.use_msi(true);
    interrupts.used_buffer(1);
    interrupts.config_change();
    assert_eq!((interrupts.line().status(), platform.delivered()), (0, vec![101, 102]));
    assert_eq!((edges.0.load(Ordering::Relaxed), interrupts.raised()), (2, 4));

    interrupts.reset();
    assert!(!interrupts.msi_on());
    interrupts.used_buffer(0);
    assert_eq!((interrupts.line().status(), platform.delivered()), (INT_USED_BUFFER, vec![]));
}

#[test]
fn without_messages_they_cannot_be_turned_on() {
    let interrupts = Interrupts::wired(Arc::new(Edges::default()));
    interrupts.use_msi(true);
    interrupts.used_buffer(3);
    assert_eq!((interrupts.msi_on(), interrupts.line().status()), (false, INT_USED_BUFFER));
}

/// Rewrites the message, and masks the vector at times, while interrupts fire.
///
/// Each interrupt goes to a message that was set, none to the old one after the change has
/// returned, none while masked, and the last one always arrives.
#[test]
fn no_interrupt_goes_astray_or_is_lost_while_its_message_changes() {
    const CHANGES: u32 = if cfg!(miri) { 50 } else { 20_000 };
    /// Half of a message determines the other half, so a mixture shows.
    fn pair(n: u32) -> MsiMessage {
        MsiMessage {
            address: u64::from(n) << 32 | u64::from(!n),
            data: n.wrapping_mul(0x9e37_79b9),
            device: 0,
        }
    }
    struct Strict {
        now: AtomicU64,
        masked: AtomicBool,
        fired: AtomicU64,
    }
    struct StrictSink(Arc<Strict>);
    impl MsiController for StrictSink {
        fn sink(&self) -> Result<Box<dyn MsiSink>, NotifyError> {
            Ok(Box::new(Self(Arc::clone(&self.0))))
        }
    }
    impl MsiSink for StrictSink {
        fn route(&self, _message: MsiMessage) -> Result<(), NotifyError> {
            Ok(())
        }
        fn fire(&self, message: MsiMessage) {
            let n = (message.address >> 32) as u32;
            assert_eq!(message, pair(n), "a mixture of two messages");
            // `now` is the last change that has returned; the next one may be under way.
            let now = self.0.now.load(Ordering::SeqCst) as u32;
            assert!(n == now || n == now + 1, "to message {n}, and {now} is in force");
            assert!(!self.0.masked.load(Ordering::SeqCst), "sent while masked");
            self.0.fired.fetch_add(1, Ordering::SeqCst);
        }
    }
    let strict =
        Arc::new(Strict { now: AtomicU64::new(0), masked: AtomicBool::new(false), fired: AtomicU64::new(0) });
    let table = Arc::new(MsiTable::new(&StrictSink(Arc::clone(&strict)), 1, 1).unwrap());
    table.set_message(0, pair(0)).unwrap();
    table.map_queue(0, 0);
    let done = Arc::new(AtomicBool::new(false));
    let device = {
        let (table, done) = (Arc::clone(&table), Arc::clone(&done));
        std::thread::spawn(move || {
            let mut raised = 0_u64;
            while !done.load(Ordering::Relaxed) {
                table.queue(0);
                raised += 1;
            }
            raised
        })
    };
    for n in 1..CHANGES {
        let mask = n % 4 == 0;
        if mask {
            table.mask(0);
            strict.masked.store(true, Ordering::SeqCst);
        }
        table.set_message(0, pair(n)).unwrap();
        strict.now.store(n.into(), Ordering::SeqCst);
        if mask {
            strict.masked.store(false, Ordering::SeqCst);
            table.unmask(0);
        }
        if n % 64 == 0 {
            std::thread::yield_now();
        }
    }
    done.store(true, Ordering::Relaxed);
    let raised = device.join().expect("no interrupt went astray");
    let before = strict.fired.load(Ordering::SeqCst);
    assert!(!table.pending(0) && before <= raised && before > 0);
    table.queue(0);
    assert_eq!(strict.fired.load(Ordering::SeqCst), before + 1);
}
