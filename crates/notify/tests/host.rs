//! State machine of the host notifier, and the interrupt line, on a simulated host.
#![cfg(not(loom))]
use paravane_notify::{
    HostNotifier, InterruptLine, InterruptSink, IoEventFds, LimitedIoEventFds, NoIoEventFds, Notifier,
    NotifierState, NotifyError,
};
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

const ADDR: u64 = 0xd000_0050;

/// Host that accepts one registration, unless it is told to refuse.
#[derive(Default)]
struct Host {
    registered: Mutex<Option<(u64, Option<u32>, Notifier)>>,
    refuse: Mutex<bool>,
}

impl Host {
    fn refuse(&self, refuse: bool) {
        *self.refuse.lock().expect("a lock") = refuse;
    }

    fn registered(&self) -> bool {
        self.registered.lock().expect("a lock").is_some()
    }

    /// A write of the guest.
    fn guest_writes(&self, exits: &HostNotifier) {
        match &*self.registered.lock().expect("a lock") {
            Some((.., notifier)) => notifier.signal(),
            None => {
                exits.kick();
            }
        }
    }

    fn answer(&self, what: &'static str) -> Result<(), NotifyError> {
        if *self.refuse.lock().expect("a lock") {
            return Err(NotifyError::Os { what, source: std::io::ErrorKind::StorageFull.into() });
        }
        Ok(())
    }
}

impl IoEventFds for Host {
    fn assign(&self, addr: u64, datamatch: Option<u32>, notifier: &Notifier) -> Result<(), NotifyError> {
        self.answer("register")?;
        let mut registered = self.registered.lock().expect("a lock");
        assert!(registered.is_none(), "registered twice");
        *registered = Some((addr, datamatch, notifier.try_clone()?));
        Ok(())
    }

    fn deassign(&self, addr: u64, datamatch: Option<u32>, _notifier: &Notifier) -> Result<(), NotifyError> {
        self.answer("remove")?;
        let (at, value, _) = self.registered.lock().expect("a lock").take().expect("registered");
        assert_eq!((at, value), (addr, datamatch));
        Ok(())
    }
}

fn queue(host: &Arc<Host>) -> HostNotifier {
    let fds: Arc<dyn IoEventFds> = Arc::<Host>::clone(host);
    HostNotifier::new(fds, ADDR, Some(2)).expect("an eventfd")
}

fn state_error(result: Result<(), NotifyError>) -> NotifierState {
    match result {
        Err(NotifyError::State { state, .. }) => state,
        other => panic!("expected a state error, got {other:?}"),
    }
}

#[test]
fn signals_collapse_and_a_test_takes_them_all() {
    let notifier = Notifier::new(false).expect("an eventfd");
    assert_eq!(notifier.take(), 0);
    notifier.signal();
    notifier.signal();
    assert_eq!(notifier.take(), 2);
    assert_eq!(notifier.take(), 0);
}

#[test]
fn a_full_count_is_still_a_signal_and_blocks_nobody() {
    let notifier = Notifier::new(false).expect("an eventfd");
    // The largest count that an eventfd holds.
    rustix::io::write(notifier.as_fd(), &(u64::MAX - 1).to_ne_bytes()).expect("an eventfd");
    notifier.signal();
    assert_eq!(notifier.take(), u64::MAX - 1);
}

#[test]
fn a_clone_is_the_same_eventfd() {
    let one = Notifier::new(false).expect("an eventfd");
    let two = one.try_clone().expect("a descriptor");
    assert_ne!(one.as_raw_fd(), two.as_raw_fd());
    two.signal();
    assert_eq!(one.take(), 1);
    assert_eq!(two.take(), 0);
}

#[test]
fn a_notifier_can_be_waited_for() {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let notifier = Notifier::new(true).expect("an eventfd");
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    let ready = |n: &Notifier| poll(&mut [PollFd::new(n, PollFlags::IN)], Some(&now)).expect("poll");
    assert_eq!(ready(&notifier), 1);
    assert_eq!(notifier.take(), 1);
    assert_eq!(ready(&notifier), 0);
}

#[test]
fn the_life_of_a_queue() {
    let host = Arc::new(Host::default());
    let queue = queue(&host);
    assert_eq!(queue.state(), NotifierState::Deassigned);
    assert_eq!(queue.notifier().take(), 1, "born signalled");

    host.guest_writes(&queue);
    assert_eq!(queue.exit_kicks(), 1);
    assert_eq!(queue.notifier().take(), 1, "a kick by exit reaches the owner");

    queue.assign().expect("a registration");
    assert_eq!(queue.state(), NotifierState::Assigned);
    assert_eq!(queue.notifier().take(), 1, "signalled once at the start");
    host.guest_writes(&queue);
    assert_eq!(queue.notifier().take(), 1);
    assert_eq!(queue.exit_kicks(), 1, "without an exit");

    // A kick whose exit was under way when the ioeventfd was registered.
    queue.kick();
    assert_eq!(queue.notifier().take(), 1);

    host.guest_writes(&queue);
    queue.deassign().expect("removal");
    assert_eq!(queue.state(), NotifierState::Deassigned);
    assert_eq!(queue.notifier().take(), 1, "the final test finds the last kick");
    host.guest_writes(&queue);
    assert_eq!(queue.notifier().take(), 1);
    assert_eq!(queue.exit_kicks(), 3);
}

#[test]
fn transitions_out_of_order_are_errors_and_change_nothing() {
    let host = Arc::new(Host::default());
    let queue = queue(&host);
    assert_eq!(state_error(queue.deassign()), NotifierState::Deassigned);
    assert_eq!(state_error(queue.release()), NotifierState::Deassigned);
    queue.assign().expect("a registration");
    assert_eq!(state_error(queue.assign()), NotifierState::Assigned);
    assert_eq!(state_error(queue.release()), NotifierState::Assigned);
    queue.grab().expect("a grab");
    assert_eq!(state_error(queue.assign()), NotifierState::OffLimits);
    assert_eq!(state_error(queue.deassign()), NotifierState::OffLimits);
    assert!(host.registered());
    let message = queue.assign().expect_err("off limits").to_string();
    assert_eq!(message, "notifier cannot be assigned: its state is OffLimits");
}

#[test]
fn a_refusal_leaves_kicks_to_exits_and_can_be_tried_again() {
    let host = Arc::new(Host::default());
    let queue = queue(&host);
    assert_eq!(queue.notifier().take(), 1);
    host.refuse(true);
    assert!(matches!(queue.assign(), Err(NotifyError::Os { .. })));
    assert_eq!(queue.state(), NotifierState::Deassigned);
    assert_eq!(queue.notifier().take(), 1, "the queue starts all the same");
    host.guest_writes(&queue);
    assert_eq!((queue.notifier().take(), queue.exit_kicks()), (1, 1));
    host.refuse(false);
    queue.assign().expect("a registration");
    assert_eq!(queue.state(), NotifierState::Assigned);
}

#[test]
fn a_host_that_does_not_let_go_keeps_the_queue_assigned() {
    let host = Arc::new(Host::default());
    let queue = queue(&host);
    queue.assign().expect("a registration");
    host.refuse(true);
    assert!(matches!(queue.deassign(), Err(NotifyError::Os { .. })));
    assert_eq!(queue.state(), NotifierState::Assigned);
    host.refuse(false);
    queue.deassign().expect("removal");
}

#[test]
fn a_host_without_ioeventfds_serves_by_exits() {
    let queue = HostNotifier::new(Arc::new(NoIoEventFds), ADDR, None).expect("an eventfd");
    assert_eq!(queue.notifier().take(), 1);
    assert!(matches!(queue.assign(), Err(NotifyError::Os { .. })));
    queue.kick();
    assert_eq!(queue.notifier().take(), 2, "the start and the kick");
}

#[test]
fn grabs_are_counted_and_each_change_of_owner_signals_once() {
    let host = Arc::new(Host::default());
    let queue = queue(&host);
    queue.assign().expect("a registration");
    assert_ne!(queue.notifier().take(), 0);
    queue.grab().expect("a grab");
    queue.grab().expect("another");
    assert_eq!(queue.state(), NotifierState::OffLimits);
    assert_eq!(queue.notifier().take(), 1, "for the back end, to look at the ring once");
    assert!(host.registered(), "the back end gets its kicks by the same ioeventfd");
    queue.release().expect("one release");
    assert_eq!(queue.state(), NotifierState::OffLimits);
    assert_eq!(queue.notifier().take(), 0, "not given back yet");
    queue.release().expect("the last release");
    assert_eq!(queue.state(), NotifierState::Assigned);
    assert_eq!(queue.notifier().take(), 1, "ours again, and signalled once");
    assert_eq!(state_error(queue.release()), NotifierState::Assigned);
}

#[test]
fn a_back_end_can_own_a_queue_whose_kicks_exit() {
    let host = Arc::new(Host::default());
    host.refuse(true);
    let queue = queue(&host);
    assert!(queue.assign().is_err());
    assert_ne!(queue.notifier().take(), 0);
    queue.grab().expect("a grab");
    assert_eq!(queue.notifier().take(), 1, "for the back end, to look at the ring once");
    host.guest_writes(&queue);
    assert_eq!(queue.notifier().take(), 1, "for the back end");
    queue.release().expect("the release");
    assert_eq!(queue.state(), NotifierState::Deassigned);
    assert_eq!(queue.notifier().take(), 1);
}

#[test]
fn a_registration_goes_with_its_notifier() {
    let host = Arc::new(Host::default());
    let first = queue(&host);
    first.assign().expect("a registration");
    first.grab().expect("a grab");
    drop(first);
    assert!(!host.registered());
    queue(&host).assign().expect("the address is free again");
    assert!(!host.registered());
}

#[derive(Default)]
struct Edges(AtomicU32);

impl InterruptSink for Edges {
    fn raise(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn an_interrupt_line_repeats_its_edge_while_causes_are_left() {
    let edges = Arc::new(Edges::default());
    let count = || edges.0.load(Ordering::Relaxed);
    let line = InterruptLine::new(Arc::<Edges>::clone(&edges));
    assert_eq!((line.status(), line.raised(), count()), (0, 0, 0));
    line.raise(0);
    assert_eq!((line.status(), count()), (0, 0), "no cause, no interrupt");
    line.raise(1);
    line.raise(2);
    line.raise(2);
    assert_eq!((line.status(), count()), (3, 3));
    line.acknowledge(1);
    assert_eq!((line.status(), count()), (2, 4), "the other cause is still there");
    line.acknowledge(0xffff_fffd);
    assert_eq!((line.status(), count()), (2, 5));
    line.acknowledge(3);
    assert_eq!((line.status(), count()), (0, 5));
    line.acknowledge(1);
    assert_eq!(count(), 5, "nothing pending, no edge");
    line.raise(1);
    line.reset();
    assert_eq!((line.status(), line.raised(), count()), (0, 6, 6));
}

#[test]
fn a_notifier_is_a_sink_for_a_driver_in_this_process() {
    let notifier = Notifier::new(false).expect("an eventfd");
    let line = InterruptLine::new(Arc::new(notifier.try_clone().expect("a descriptor")));
    line.raise(1);
    assert_eq!(notifier.take(), 1);
}

#[test]
fn a_relocated_notifier_takes_its_ioeventfd_along() {
    let host = Arc::new(Host::default());
    let queue = queue(&host);
    let at = || host.registered.lock().expect("a lock").as_ref().map(|(addr, ..)| *addr);
    queue.relocate(Some(0x1000)).expect("nothing to move");
    assert_eq!(at(), None);
    queue.assign().expect("the host takes it");
    assert_eq!(at(), Some(0x1000));
    assert!(format!("{queue:?}").contains("addr: Some(1000)"), "{queue:?}");
    assert_ne!(queue.notifier().take(), 0);
    queue.relocate(Some(0x2000)).expect("moved");
    assert_eq!((at(), queue.state()), (Some(0x2000), NotifierState::Assigned));
    assert_eq!(queue.notifier().take(), 1, "a kick may have come meanwhile");
    queue.relocate(None).expect("taken off");
    assert_eq!((at(), queue.state()), (None, NotifierState::Deassigned));
    queue.relocate(None).expect("still off");
    host.refuse(true);
    queue.relocate(Some(0x3000)).expect_err("the host refuses");
    host.refuse(false);
    host.guest_writes(&queue);
    assert_eq!((at(), queue.exit_kicks()), (None, 1));
}

#[test]
fn a_notifier_that_is_off_limits_moves_as_well() {
    let host = Arc::new(Host::default());
    let queue = queue(&host);
    queue.assign().expect("the host takes it");
    queue.grab().expect("the first");
    queue.relocate(Some(0x2000)).expect("moved");
    assert_eq!(queue.state(), NotifierState::OffLimits);
    queue.release().expect("given back");
    queue.deassign().expect("from the new address");
}

#[test]
fn a_notifier_without_an_address_is_registered_when_it_has_one() {
    let host = Arc::new(Host::default());
    let queue = queue(&host);
    queue.relocate(None).expect("nothing to move");
    assert_ne!(queue.notifier().take(), 0);
    queue.assign().expect("nothing to register");
    assert!(!host.registered(), "not where it was before");
    assert_eq!((queue.notifier().take(), queue.state()), (1, NotifierState::Deassigned));
    queue.relocate(Some(0x1000)).expect("it has an address");
    assert_eq!(queue.state(), NotifierState::Assigned);
    queue.relocate(None).expect("and none again");
    queue.deassign().expect("it is not wanted any more");
    assert_eq!(state_error(queue.deassign()), NotifierState::Deassigned);
    queue.relocate(Some(0x1000)).expect("a new address");
    assert!(!host.registered());
}

#[test]
fn a_silent_line_keeps_its_causes_and_makes_up_for_them() {
    #[derive(Default)]
    struct Edges(AtomicU32);
    impl InterruptSink for Edges {
        fn raise(&self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }
    let edges = Arc::new(Edges::default());
    let line = InterruptLine::new(Arc::<Edges>::clone(&edges));
    let count = || edges.0.load(Ordering::Relaxed);
    line.silence(true);
    line.silence(false);
    assert_eq!(count(), 0, "nothing was pending");
    line.silence(true);
    line.raise(3);
    line.acknowledge(1);
    assert_eq!((count(), line.status()), (0, 2));
    line.silence(false);
    line.silence(false);
    assert_eq!((count(), line.raised()), (1, 1));
    line.silence(true);
    line.reset();
    line.raise(1);
    assert_eq!((count(), line.status()), (1, 1), "a reset does not end the silence");
}

#[test]
fn a_limited_host_assigns_up_to_its_limit() {
    let host = Arc::new(Host::default());
    let few: Arc<dyn IoEventFds> =
        Arc::new(LimitedIoEventFds::new(Arc::clone(&host) as Arc<dyn IoEventFds>, 1));
    let notifier = || HostNotifier::new(Arc::clone(&few), ADDR, Some(0)).expect("a notifier");
    let (first, second) = (notifier(), notifier());
    // A refusal by the underlying host uses up none.
    host.refuse(true);
    assert!(matches!(first.assign(), Err(NotifyError::Os { .. })));
    host.refuse(false);
    first.assign().expect("there is one");
    assert!(matches!(second.assign(), Err(NotifyError::Limit { limit: 1 })));
    assert_eq!(second.state(), NotifierState::Deassigned);
    // Those that are not returned are not available.
    host.refuse(true);
    assert!(first.deassign().is_err());
    host.refuse(false);
    assert!(matches!(second.assign(), Err(NotifyError::Limit { .. })));
    first.deassign().expect("the host lets go");
    second.assign().expect("there is one again");
    drop(second);
    first.assign().expect("a notifier that goes gives it back");
}

#[test]
fn a_limit_of_none_refuses_all() {
    let none = LimitedIoEventFds::new(Arc::new(Host::default()), 0);
    let notifier = Notifier::new(false).expect("a notifier");
    assert!(matches!(none.assign(ADDR, None, &notifier), Err(NotifyError::Limit { limit: 0 })));
}
