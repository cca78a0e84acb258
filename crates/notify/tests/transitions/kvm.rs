//! Transitions on a real KVM, while a guest kicks as fast as it is served.
//!
//! ```text
//! guest      used == available? -> available += 1 -> kick wanted? -> write to the current address
//! owner      eventfd -> kicks off -> used = available -> kicks on -> again until nothing is new
//! control    handler off -> a transition -> another owner, notifier or address -> handler on
//! ```
//! The guest has one buffer in flight and kicks once for it, so a lost kick stops everything; after
//! each transition the control thread waits for buffers to be used. A second queue, which the guest
//! never kicks, moves to the addresses that the first one leaves: its eventfd must only have what
//! its own transitions put there.
#[path = "../machine/mod.rs"]
mod machine;

use kvm_ioctls::{VcpuExit, VcpuFd, VmFd};
use machine::{Page, vm};
use paravane_notify::{HostNotifier, IoEventFds, KvmIoEventFds, Notifier, NotifierState, NotifyError};
use paravane_test_support::patience;
use rustix::event::{PollFd, PollFlags, poll};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::*, fence};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::{Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};

const TRANSITIONS: u64 = 10_000;

const WINDOW: u64 = 0xd000_0000;
/// Offsets of the first queue in the window; the second queue has the other one.
const PLACES: [u16; 2] = [0x50, 0x1050];
const CODE: u64 = 0x1000;
const RING: u64 = 0x2000;

// Words of the ring's page.
const AVAILABLE: usize = 0;
const USED: usize = 4;
const ASKED: usize = 8;
/// Offset in the window to kick at.
const PLACE: usize = 12;
/// Not 0: the guest must exit its loop.
const COME: usize = 16;

/// Real mode; the data segment is the window, the extra segment the ring.
const GUEST: &[u8] = &[
    0x26, 0x66, 0xa1, 0x04, 0x00, // next: mov eax, es:[USED]
    0x26, 0x66, 0x3b, 0x06, 0x00, 0x00, // cmp eax, es:[AVAILABLE]
    0x75, 0x1e, // jne out
    0x26, 0x66, 0xff, 0x06, 0x00, 0x00, // inc dword es:[AVAILABLE]
    0xf0, 0x26, 0x66, 0x83, 0x0e, 0x14, 0x00, 0x00, // lock or dword es:[20], 0
    0x26, 0x80, 0x3e, 0x08, 0x00, 0x00, // cmp byte es:[ASKED], 0
    0x74, 0x08, // je out
    0x26, 0x8b, 0x1e, 0x0c, 0x00, // mov bx, es:[PLACE]
    0x66, 0x89, 0x07, // mov [bx], eax
    0x26, 0x80, 0x3e, 0x10, 0x00, 0x00, // out: cmp byte es:[COME], 0
    0x74, 0xcd, // je next
    0xe6, 0x10, // out 0x10, al
    0xeb, 0xc9, // jmp next
];

/// KVM's ioeventfds, on a host that can be told to refuse.
struct Moody {
    fds: KvmIoEventFds,
    refuse: AtomicBool,
}

impl IoEventFds for Moody {
    fn assign(&self, addr: u64, datamatch: Option<u32>, notifier: &Notifier) -> Result<(), NotifyError> {
        if self.refuse.load(Relaxed) {
            return Err(NotifyError::Os { what: "register", source: std::io::ErrorKind::StorageFull.into() });
        }
        self.fds.assign(addr, datamatch, notifier)
    }

    fn deassign(&self, addr: u64, datamatch: Option<u32>, notifier: &Notifier) -> Result<(), NotifyError> {
        self.fds.deassign(addr, datamatch, notifier)
    }
}

/// Page of the ring, which the guest writes too.
struct Ring(*mut u8);

// SAFETY: the page is accessed atomically only, and outlives every thread that has it.
unsafe impl Sync for Ring {}

impl Ring {
    fn word(&self, offset: usize) -> &AtomicU32 {
        // SAFETY: the word is in the page, aligned, and accessed atomically only.
        unsafe { AtomicU32::from_ptr(self.0.add(offset).cast()) }
    }

    fn used(&self) -> u32 {
        self.word(USED).load(Acquire)
    }
}

/// State that the vCPU's thread shares with the control thread.
struct Machine {
    ring: Ring,
    /// Notifiers of the two queues, and the offset of the first.
    queues: Mutex<([Arc<HostNotifier>; 2], usize)>,
    wish: Mutex<Wish>,
    granted: Condvar,
}

/// Reason for the guest to exit its loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wish {
    None,
    /// To exchange the offsets of the queues, like a guest that moves a window.
    Move,
    /// To reset the device, and wait until that is done.
    Reset,
    Waiting,
    End,
}

impl Machine {
    /// Has the guest exit for `wish`, and waits until it is `then`.
    fn wish(&self, wish: Wish, then: Wish) {
        *self.wish.lock().unwrap() = wish;
        self.ring.word(COME).store(1, Release);
        let now = self.wish.lock().unwrap();
        let waited = self.granted.wait_timeout_while(now, patience(), |now| *now != then).unwrap().1;
        assert!(!waited.timed_out(), "the guest does not come out");
    }

    fn grant(&self, then: Wish) {
        *self.wish.lock().unwrap() = then;
        self.granted.notify_all();
    }

    /// Handles the guest's access to port 0x10. `false` at the end.
    fn come(&self) -> bool {
        let wish = *self.wish.lock().unwrap();
        if wish == Wish::End {
            return false;
        }
        self.ring.word(COME).store(0, Release);
        match wish {
            Wish::Move => {
                let mut queues = self.queues.lock().unwrap();
                let ([first, second], place) = &mut *queues;
                *place = 1 - *place;
                self.ring.word(PLACE).store(PLACES[*place].into(), Release);
                let at = |place: usize| Some(WINDOW + u64::from(PLACES[place]));
                // Both out of the way first. Registered or not, both end where the guest kicks
                // them.
                second.relocate(None).expect("nowhere is always free");
                first.relocate(at(*place)).expect("the place is free");
                second.relocate(at(1 - *place)).expect("the other place is free");
                drop(queues);
                self.grant(Wish::None);
            }
            Wish::Reset => {
                self.grant(Wish::Waiting);
                let wish = self.wish.lock().unwrap();
                drop(self.granted.wait_while(wish, |wish| *wish == Wish::Waiting).unwrap());
            }
            _ => {}
        }
        true
    }

    fn run(&self, mut vcpu: VcpuFd) {
        loop {
            match vcpu.run() {
                Ok(VcpuExit::MmioWrite(addr, _)) => {
                    let queues = self.queues.lock().unwrap();
                    let ([first, second], place) = &*queues;
                    if addr == WINDOW + u64::from(PLACES[*place]) {
                        first.kick();
                    } else {
                        second.kick();
                    }
                }
                Ok(VcpuExit::IoOut(0x10, _)) => {
                    if !self.come() {
                        return;
                    }
                }
                Err(error) if error.errno() == libc::EINTR => {}
                other => panic!("unexpected exit {other:?}"),
            }
        }
    }

    fn first(&self) -> Arc<HostNotifier> {
        Arc::clone(&self.queues.lock().unwrap().0[0])
    }
}

/// Ends the guest, also if the test fails.
struct Ending<'a>(&'a Machine);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.grant(Wish::End);
        self.0.ring.word(COME).store(1, Release);
    }
}

/// Handler of an owner that has the queue: a thread that waits on the eventfd.
struct Handler<'scope> {
    stop: Arc<Notifier>,
    thread: Option<ScopedJoinHandle<'scope, ()>>,
}

impl<'scope> Handler<'scope> {
    fn on<'env>(scope: &'scope Scope<'scope, 'env>, machine: &'env Machine) -> Self {
        let stop = Arc::new(Notifier::new(false).expect("an eventfd"));
        let (stopped, queue) = (Arc::clone(&stop), machine.first());
        let thread = scope.spawn(move || serve(&machine.ring, queue.notifier(), &stopped));
        Self { stop, thread: Some(thread) }
    }

    /// Leaves undone what it has taken and not looked at.
    fn off(mut self) {
        self.stop.signal();
        self.thread.take().unwrap().join().expect("the owner");
    }
}

impl Drop for Handler<'_> {
    fn drop(&mut self) {
        self.stop.signal();
    }
}

fn serve(ring: &Ring, notifier: &Notifier, stop: &Notifier) {
    loop {
        let mut fds = [PollFd::new(notifier, PollFlags::IN), PollFd::new(stop, PollFlags::IN)];
        poll(&mut fds, None).expect("poll");
        let stopped = !fds[1].revents().is_empty();
        let signalled = notifier.take() > 0;
        if signalled {
            ring.word(ASKED).store(0, Relaxed);
        }
        if stopped {
            // Perhaps with a signal taken, kicks disabled, and the ring not looked at.
            return;
        }
        if signalled {
            look(ring);
        }
    }
}

/// Uses available buffers until nothing new is there and kicks are on.
fn look(ring: &Ring) {
    loop {
        let available = ring.word(AVAILABLE).load(Acquire);
        ring.word(USED).store(available, Release);
        ring.word(ASKED).store(1, Relaxed);
        // Pairs with the guest's locked instruction: it sees the request, or we the buffer.
        fence(SeqCst);
        if ring.word(AVAILABLE).load(Acquire) == available {
            return;
        }
        ring.word(ASKED).store(0, Relaxed);
    }
}

/// Pseudo-random numbers, the same in each run.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }
}

fn guest(vm: &VmFd, code: &Page, ring: &Page) -> VcpuFd {
    code.map(vm, CODE);
    ring.map(vm, RING);
    let vcpu = vm.create_vcpu(0).expect("a vCPU");
    let mut sregs = vcpu.get_sregs().expect("registers");
    (sregs.cs.base, sregs.cs.selector) = (0, 0);
    (sregs.ds.base, sregs.es.base) = (WINDOW, RING);
    vcpu.set_sregs(&sregs).expect("registers");
    let mut regs = vcpu.get_regs().expect("registers");
    (regs.rip, regs.rflags) = (CODE, 2);
    vcpu.set_regs(&regs).expect("registers");
    vcpu
}

/// Control path of the first queue.
struct Control<'scope, 'env> {
    scope: &'scope Scope<'scope, 'env>,
    machine: &'env Machine,
    host: Arc<Moody>,
    handler: Option<Handler<'scope>>,
    done: u64,
}

impl Control<'_, '_> {
    fn off(&mut self) {
        if let Some(handler) = self.handler.take() {
            handler.off();
        }
    }

    /// Removing and installing a handler is a transition too.
    fn on(&mut self) {
        assert!(self.handler.is_none());
        self.done += 1;
        self.handler = Some(Handler::on(self.scope, self.machine));
    }

    fn queue(&self) -> Arc<HostNotifier> {
        self.machine.first()
    }

    fn transition(&mut self, transition: impl FnOnce(&HostNotifier)) {
        transition(&self.queue());
        self.done += 1;
    }

    /// Back to our event loop; kicks exit.
    fn stop(&mut self) {
        while self.queue().state() == NotifierState::OffLimits {
            self.transition(|queue| queue.release().expect("it was grabbed"));
        }
        if self.queue().state() == NotifierState::Assigned {
            self.transition(|queue| queue.deassign().expect("KVM lets go"));
        }
    }

    /// Another notifier at the same offset.
    fn renew(&mut self) {
        let mut queues = self.machine.queues.lock().unwrap();
        let addr = WINDOW + u64::from(PLACES[queues.1]);
        let fds: Arc<dyn IoEventFds> = Arc::<Moody>::clone(&self.host);
        queues.0[0] = Arc::new(HostNotifier::new(fds, addr, None).expect("an eventfd"));
        self.done += 1;
    }

    fn assign(&mut self) {
        if self.queue().state() == NotifierState::Deassigned {
            self.transition(|queue| queue.assign().expect("KVM takes it"));
        }
    }

    /// One random change; the handler is installed afterwards.
    fn change(&mut self, kind: u64) {
        match kind {
            // Stop, and start again.
            0 => {
                self.off();
                self.stop();
                if self.queue().notifier().take() > 0 {
                    // The final test: the next owner must be signalled.
                    self.queue().notifier().signal();
                }
                self.assign();
                self.on();
            }
            // Stop; kicks exit for a while, and nothing is assigned.
            1 => {
                self.off();
                self.stop();
                self.queue().notifier().signal();
                self.on();
            }
            // A start that the host refuses.
            2 => {
                self.off();
                self.stop();
                self.host.refuse.store(true, Relaxed);
                self.transition(|queue| {
                    queue.assign().expect_err("the host refuses");
                });
                self.host.refuse.store(false, Relaxed);
                self.on();
            }
            // A start while the handler is installed.
            3 => self.assign(),
            // To the other owner, or one level deeper or back while it continues.
            4 | 5 if self.queue().state() == NotifierState::OffLimits => {
                for _ in 0..2 {
                    self.transition(|queue| queue.grab().expect("one more"));
                }
                for _ in 0..2 {
                    self.transition(|queue| queue.release().expect("one less"));
                }
            }
            4 | 5 => {
                self.off();
                self.transition(|queue| queue.grab().expect("a grab"));
                self.on();
            }
            6 | 7 if self.queue().state() == NotifierState::OffLimits => {
                self.off();
                self.transition(|queue| queue.release().expect("it was grabbed"));
                self.on();
            }
            // The handler alone, off and on.
            6 | 7 => {
                self.off();
                self.queue().notifier().signal();
                self.on();
            }
            // Stop and restore, the ring where it was.
            8 => {
                self.off();
                self.stop();
                self.renew();
                self.on();
            }
            9 => {
                self.off();
                self.stop();
                self.renew();
                self.assign();
                self.on();
            }
            // The guest moves the window.
            10 => {
                self.machine.wish(Wish::Move, Wish::None);
                self.done += 1;
            }
            // The guest resets the device, and starts it again from an empty ring.
            _ => {
                self.machine.wish(Wish::Reset, Wish::Waiting);
                self.off();
                self.stop();
                let ring = &self.machine.ring;
                for word in [AVAILABLE, USED, ASKED] {
                    ring.word(word).store(u32::from(word == ASKED), Release);
                }
                self.renew();
                self.assign();
                self.on();
                self.machine.grant(Wish::None);
            }
        }
    }

    /// Waits until buffers are used.
    fn progress(&self, what: u64) {
        let start = Instant::now();
        let before = self.machine.ring.used();
        while self.machine.ring.used().wrapping_sub(before) < 2 {
            if start.elapsed() > patience() {
                let ring = &self.machine.ring;
                panic!(
                    "a kick is lost in transition {} (kind {what}): {} available, {} used, asked {}, {:?}",
                    self.done,
                    ring.word(AVAILABLE).load(Acquire),
                    ring.used(),
                    ring.word(ASKED).load(Acquire),
                    self.queue(),
                );
            }
            // Sleeps: the guest and the owner need the processors.
            std::thread::sleep(Duration::from_micros(20));
        }
    }
}

#[test]
fn thousands_of_transitions_under_a_guest_that_kicks() {
    let Some((_kvm, vm)) = vm("thousands_of_transitions_under_a_guest_that_kicks") else { return };
    let (code, page) = (Page::with(GUEST), Page::with(&[]));
    let vm = Arc::new(vm);
    let vcpu = guest(&vm, &code, &page);
    let host = Arc::new(Moody { fds: KvmIoEventFds::new(vm), refuse: AtomicBool::new(false) });
    let queues = PLACES.map(|place| {
        let fds: Arc<dyn IoEventFds> = Arc::<Moody>::clone(&host);
        Arc::new(HostNotifier::new(fds, WINDOW + u64::from(place), None).expect("an eventfd"))
    });
    queues[1].assign().expect("KVM takes it");
    let idle = Arc::clone(&queues[1]);
    let machine = Machine {
        ring: Ring(page.host()),
        queues: Mutex::new((queues, 0)),
        wish: Mutex::new(Wish::None),
        granted: Condvar::new(),
    };
    machine.ring.word(PLACE).store(PLACES[0].into(), Relaxed);
    machine.ring.word(ASKED).store(1, Release);
    let mut numbers = Numbers(0x9e37_79b9_7f4a_7c15);
    let mut moves = 0;
    let mut used = 0_u64;
    std::thread::scope(|scope| {
        let _ending = Ending(&machine);
        scope.spawn(|| machine.run(vcpu));
        let mut control =
            Control { scope, machine: &machine, host: Arc::clone(&host), handler: None, done: 0 };
        control.on();
        while control.done < TRANSITIONS {
            let kind = numbers.below(12);
            moves += u64::from(kind == 10);
            let before = machine.ring.used();
            control.change(kind);
            control.progress(kind);
            used += u64::from(machine.ring.used().saturating_sub(before));
        }
        control.off();
    });
    // From its making and its start, and two of each move: to nowhere, and to its new offset.
    assert_eq!(idle.notifier().take(), 2 + 2 * moves, "a kick of the other queue");
    assert_eq!(idle.exit_kicks(), 0, "a kick of the other queue");
    assert!(used > TRANSITIONS / 2, "{used} buffers");
}
