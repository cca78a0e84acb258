//! Two queues of a simulated machine, beside a plain model of what they must do.
//!
//! ```text
//! driver    Publish -> Decide --wanted--> Write --taken by an ioeventfd--> done
//!                        '-- not wanted      '--> Exit (delivered, or no queue's address)
//! owner     Take (kicks off from here on) -> Look (kicks on again)
//! control   On, Off: the owner's handler
//!           Assign, Deassign, Grab, Release, Relocate, Renew, Refuse
//! ```
//! Other steps can come between any two steps. The model is exact: after each step the notifier is
//! in the modelled state, the host has the modelled registrations, and an owner that takes signals
//! finds as many as the model has. So a kick that goes to another queue is one too many there and
//! one too few here.
use paravane_notify::{HostNotifier, IoEventFds, Notifier, NotifierState, NotifyError};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

/// Addresses of kicks.
///
/// There are fewer than two queues can want, so that they take each other's.
pub(crate) const ADDRESSES: [u64; 3] = [0x50, 0x1050, 0x2050];

/// Gives out ioeventfds, one per address, unless it is told to refuse.
#[derive(Default)]
struct Host {
    table: Mutex<Vec<(u64, Notifier)>>,
    refuse: AtomicBool,
}

impl Host {
    fn answer(&self, agreed: bool) -> Result<(), NotifyError> {
        let source = std::io::ErrorKind::ResourceBusy.into();
        if agreed && !self.refuse.load(Relaxed) {
            Ok(())
        } else {
            Err(NotifyError::Os { what: "do that", source })
        }
    }

    /// A guest's write; returns whether an ioeventfd took it.
    fn write(&self, addr: u64) -> bool {
        let table = self.table.lock().unwrap();
        let caught = table.iter().find(|(at, _)| *at == addr);
        caught.inspect(|(_, notifier)| notifier.signal()).is_some()
    }
}

impl IoEventFds for Host {
    fn assign(&self, addr: u64, _datamatch: Option<u32>, notifier: &Notifier) -> Result<(), NotifyError> {
        let mut table = self.table.lock().unwrap();
        self.answer(table.iter().all(|(at, _)| *at != addr))?;
        table.push((addr, notifier.try_clone()?));
        Ok(())
    }

    fn deassign(&self, addr: u64, _datamatch: Option<u32>, _notifier: &Notifier) -> Result<(), NotifyError> {
        let mut table = self.table.lock().unwrap();
        self.answer(true)?;
        let at = table.iter().position(|(at, _)| *at == addr).expect("what is removed was registered");
        table.swap_remove(at);
        Ok(())
    }
}

/// Next step of the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Driver {
    Idle,
    Published,
    /// A kick is wanted.
    Asked,
    /// Its write to this address exits.
    Exits(u64),
}

/// Model of a queue.
struct Model {
    /// Address of kicks, which the driver knows.
    addr: Option<u64>,
    wanted: bool,
    registered: bool,
    grabs: u32,
    /// Number of signals in the eventfd.
    signals: u64,
}

impl Model {
    fn new(addr: u64) -> Self {
        // Signalled when made.
        Self { addr: Some(addr), wanted: false, registered: false, grabs: 0, signals: 1 }
    }

    fn state(&self) -> NotifierState {
        match (self.grabs, self.registered) {
            (0, false) => NotifierState::Deassigned,
            (0, true) => NotifierState::Assigned,
            _ => NotifierState::OffLimits,
        }
    }
}

struct Queue {
    notifier: HostNotifier,
    model: Model,
    driver: Driver,
    available: u64,
    asked: bool,
    /// Position that owners hand on to each other.
    seen: u64,
    /// Whether the present owner's handler is installed.
    on: bool,
    /// Whether it has taken signals and not looked yet.
    serving: bool,
    /// Whether a transition since its handler was removed has signalled.
    changed: bool,
}

/// One step, of one queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    Publish,
    Decide,
    Write,
    Exit,
    Take,
    Look,
    On,
    Off,
    Assign,
    Deassign,
    Grab,
    Release,
    /// To one of [`ADDRESSES`], or to nowhere.
    Relocate(Option<usize>),
    /// Stop and restore: another notifier, at the same address and ring position.
    Renew,
    /// The host refuses from now on, or stops refusing.
    Refuse(bool),
}

/// Steps that one kick takes of its driver.
pub(crate) const KICK: [Step; 4] = [Step::Publish, Step::Decide, Step::Write, Step::Exit];

pub(crate) struct World {
    host: Arc<Host>,
    queues: [Queue; 2],
}

impl World {
    pub(crate) fn new() -> Self {
        let host = Arc::new(Host::default());
        let queues = [ADDRESSES[0], ADDRESSES[1]].map(|addr| Queue {
            notifier: Self::notifier(&host, addr),
            model: Model::new(addr),
            driver: Driver::Idle,
            available: 0,
            asked: true,
            seen: 0,
            on: true,
            serving: false,
            changed: false,
        });
        Self { host, queues }
    }

    fn notifier(host: &Arc<Host>, addr: u64) -> HostNotifier {
        let fds: Arc<dyn IoEventFds> = Arc::<Host>::clone(host);
        HostNotifier::new(fds, addr, None).expect("an eventfd")
    }

    /// Carries out `step` as far as the state allows, and compares.
    pub(crate) fn apply(&mut self, number: usize, step: Step) {
        self.step(number, step);
        self.compare();
    }

    fn step(&mut self, number: usize, step: Step) {
        let refuses = self.host.refuse.load(Relaxed);
        let taken = |at: u64| {
            let others = self.queues.iter().enumerate().filter(|(other, _)| *other != number);
            others.into_iter().any(|(_, queue)| queue.model.registered && queue.model.addr == Some(at))
        };
        // Answer of the host to a registration at the queue's address, or its next one.
        let to = match step {
            Step::Relocate(to) => to.map(|to| ADDRESSES[to]),
            _ => self.queues[number].model.addr,
        };
        let agrees = to.is_none_or(|at| !refuses && !taken(at));
        let queue = &mut self.queues[number];
        let model = &mut queue.model;
        match step {
            Step::Publish if queue.driver == Driver::Idle => {
                queue.available += 1;
                queue.driver = Driver::Published;
            }
            Step::Decide if queue.driver == Driver::Published => {
                queue.driver = if queue.asked { Driver::Asked } else { Driver::Idle };
            }
            Step::Write if queue.driver == Driver::Asked => {
                queue.driver = Driver::Idle;
                let Some(at) = model.addr else { return };
                if self.host.write(at) {
                    let caught =
                        self.queues.iter_mut().find(|q| q.model.registered && q.model.addr == Some(at));
                    caught.expect("the model has no such registration").model.signals += 1;
                } else {
                    queue.driver = Driver::Exits(at);
                }
            }
            Step::Exit => {
                let Driver::Exits(at) = queue.driver else { return };
                queue.driver = Driver::Idle;
                // Device at that address by now, if any.
                if let Some(queue) = self.queues.iter_mut().find(|queue| queue.model.addr == Some(at)) {
                    queue.notifier.kick();
                    queue.model.signals += 1;
                }
            }
            Step::Take if queue.on && !queue.serving => {
                assert_eq!(queue.notifier.notifier().take(), model.signals, "queue {number}: signals");
                if std::mem::take(&mut model.signals) > 0 {
                    queue.serving = true;
                    queue.asked = false;
                }
            }
            Step::Look if queue.serving => {
                queue.serving = false;
                queue.seen = queue.available;
                queue.asked = true;
            }
            Step::On if !queue.on => {
                queue.on = true;
                if !std::mem::take(&mut queue.changed) {
                    // Only the handler was removed and installed: installing it signals.
                    queue.notifier.notifier().signal();
                    model.signals += 1;
                }
            }
            Step::Off => {
                queue.on = false;
                queue.serving = false;
                queue.changed = false;
            }
            Step::Assign => {
                let fits = model.state() == NotifierState::Deassigned;
                let result = queue.notifier.assign();
                assert_eq!(result.is_ok(), fits && agrees, "queue {number}: {result:?}");
                if fits {
                    model.wanted = agrees;
                    model.registered = agrees && model.addr.is_some();
                    model.signals += 1;
                    queue.changed = true;
                }
            }
            Step::Deassign if !queue.on => {
                let result = queue.notifier.deassign();
                let homeless = model.state() == NotifierState::Deassigned && model.wanted;
                let assigned = model.state() == NotifierState::Assigned && !refuses;
                assert_eq!(result.is_ok(), homeless || assigned, "queue {number}: {result:?}");
                if result.is_ok() {
                    model.wanted = false;
                    model.registered = false;
                }
            }
            Step::Grab if !queue.on => {
                queue.notifier.grab().expect("one more");
                model.grabs += 1;
                if model.grabs == 1 {
                    model.signals += 1;
                    queue.changed = true;
                }
            }
            Step::Release if !queue.on => {
                let result = queue.notifier.release();
                assert_eq!(result.is_ok(), model.grabs > 0, "queue {number}: {result:?}");
                if model.grabs > 0 {
                    model.grabs -= 1;
                    if model.grabs == 0 {
                        model.signals += 1;
                        queue.changed = true;
                    }
                }
            }
            // Two devices at one address are the guest's own fault; this test does not cover them.
            Step::Relocate(to) => {
                let to = to.map(|to| ADDRESSES[to]);
                let crowded = |(other, queue): (usize, &Queue)| other != number && queue.model.addr == to;
                if to.is_some() && self.queues.iter().enumerate().any(crowded) {
                    return;
                }
                let queue = &mut self.queues[number];
                let model = &mut queue.model;
                let result = queue.notifier.relocate(to);
                if model.registered && refuses {
                    assert!(result.is_err(), "queue {number}: it does not let go");
                    // The driver learns the address of its kicks, and kicks there exit.
                    return;
                }
                assert_eq!(result.is_ok(), !model.wanted || agrees, "queue {number}: {result:?}");
                model.addr = to;
                model.wanted &= agrees;
                model.registered = model.wanted && to.is_some();
                model.signals += 1;
            }
            Step::Renew if !queue.on && !refuses && model.addr.is_some() => {
                let addr = model.addr.expect("an address");
                queue.notifier = Self::notifier(&self.host, addr);
                // What the old one leaves behind does not concern the host any more.
                queue.model = Model::new(addr);
                queue.changed = true;
            }
            Step::Refuse(refuse) => self.host.refuse.store(refuse, Relaxed),
            _ => {}
        }
    }

    fn compare(&self) {
        let mut table: Vec<_> = self.host.table.lock().unwrap().iter().map(|(at, _)| *at).collect();
        let registered = |queue: &Queue| queue.model.addr.filter(|_| queue.model.registered);
        let mut model: Vec<_> = self.queues.iter().filter_map(registered).collect();
        table.sort_unstable();
        model.sort_unstable();
        assert_eq!(table, model, "registrations");
        for (number, queue) in self.queues.iter().enumerate() {
            assert_eq!(queue.notifier.state(), queue.model.state(), "queue {number}");
            // An owner that rests, and a driver that has done its part: something must still be
            // pending.
            let resting = queue.on && !queue.serving && queue.driver == Driver::Idle;
            let done = queue.seen == queue.available && queue.asked;
            assert!(
                !resting || done || queue.model.signals > 0 || queue.model.addr.is_none(),
                "queue {number}: a kick is lost"
            );
        }
    }

    /// Finishes all that was begun; every buffer must have been seen.
    pub(crate) fn settle(&mut self) {
        self.apply(0, Step::Refuse(false));
        for number in 0..self.queues.len() {
            if self.queues[number].model.addr.is_none() {
                let free = (0..ADDRESSES.len())
                    .find(|&at| self.queues.iter().all(|queue| queue.model.addr != Some(ADDRESSES[at])));
                self.apply(number, Step::Relocate(free));
            }
            for step in [Step::Decide, Step::Write, Step::Exit, Step::On, Step::Look, Step::Take, Step::Look]
            {
                self.apply(number, step);
            }
            assert_eq!(
                self.queues[number].seen, self.queues[number].available,
                "queue {number}: a kick is lost"
            );
        }
    }
}
