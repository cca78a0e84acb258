//! Our driver side, split, and Linux's device side.
use crate::DriverConfig;
use crate::model::{MAX_SEGMENTS, Model, Op, gather};
use crate::peer::{Peer, pattern, sum};
use crate::wish::Wish;
use paravane_ring::driver::{BufferId, Queue};
use paravane_ring::{QueueAddresses, Segment};
use paravane_spec::feature::VERSION_1;
use std::collections::HashMap;

pub(crate) struct Pair {
    driver: Queue,
    addresses: QueueAddresses,
    features: u64,
    model: Model,
    /// Which slot each of the driver's identifiers stands for.
    slots: HashMap<u16, u16>,
    /// Last, since the queue has pointers into its memory.
    peer: Peer,
}

impl Pair {
    pub(crate) fn new(size: u16, features: u64) -> Self {
        let mut peer = Peer::start("device");
        let ours = peer.ours();
        // Every buffer of several segments goes into a table, as the model has it.
        let layout = DriverConfig::new(size, 2 * MAX_SEGMENTS, features).unwrap();
        let (driver, addresses) = Queue::new(layout, ours).unwrap();
        let QueueAddresses { desc, driver: avail, device: used, .. } = addresses;
        peer.ask(&format!("queue {size} {} {desc} {avail} {used}", features | VERSION_1));
        let start = layout.memory().next_multiple_of(4096);
        let data = ours.slice(start, ours.area.len() - start).unwrap();
        let model = Model::new(size, features, data);
        Self { driver, addresses, features, model, slots: HashMap::new(), peer }
    }

    fn add(&mut self, readable: u16, writable: u16, len: u32) {
        let Some(buffer) = self.model.make(readable, writable, len) else { return };
        let total: u32 = buffer.readable.iter().map(|segment| segment.len).sum();
        crate::model::scatter(&self.peer, &buffer.readable, total as usize, buffer.slot.into());
        match self.driver.add(&buffer.readable, &buffer.writable) {
            Ok(BufferId(id)) => {
                assert!(self.model.fits(&buffer));
                assert_eq!(self.slots.insert(id, buffer.slot), None);
                self.model.add(buffer);
            }
            Err(full) => assert!(!self.model.fits(&buffer), "{full}"),
        }
    }

    fn kick(&mut self) {
        let wish = Wish::of_device(&self.peer, &self.addresses, self.features);
        let expected = wish.covers(self.model.kicks.old, self.model.kicks.new);
        let kick = self.driver.publish();
        self.model.kicked(expected, kick);
    }

    fn compare_pop(model: &mut Model, answer: &[u64]) -> bool {
        let [1, head, readable, writable, sum_read, ref segments @ ..] = *answer else {
            assert_eq!(answer, [0]);
            return false;
        };
        let segments: Vec<_> = segments
            .as_chunks::<2>()
            .0
            .iter()
            .map(|&[addr, len]| Segment { addr, len: len as u32 })
            .collect();
        assert_eq!(segments.len() as u64, readable + writable);
        let (readable, writable) = segments.split_at(readable as usize);
        model.pop(head as u16, readable, writable);
        let slot = model.serving.last().unwrap().1.slot;
        let total: u32 = readable.iter().map(|segment| segment.len).sum();
        let bytes: Vec<u8> = (0..total as usize).map(|at| pattern(slot.into(), at)).collect();
        assert_eq!(sum_read, sum(&bytes));
        true
    }

    /// One chain; whether there was one.
    fn pop(&mut self) -> bool {
        let published = self.published();
        let answer = self.peer.ask("pop");
        assert_eq!(answer[0] == 1, published > 0);
        Self::compare_pop(&mut self.model, &answer)
    }

    /// Buffers that wait where the device can see them.
    ///
    /// Our driver publishes them when it asks about a kick.
    fn published(&self) -> usize {
        let added = self.model.kicks.new - self.model.kicks.old;
        self.model.waiting.len() - added as usize
    }

    fn complete_command(&mut self, which: usize, len: u32) -> Option<String> {
        let (head, buffer, len) = self.model.choose(which, len)?;
        self.model.staged.push((buffer, len, head.into()));
        self.model.publish();
        Some(format!("complete {head} {len}"))
    }

    fn notify(&mut self) {
        let wish = Wish::of_driver(&self.peer, &self.addresses, self.features);
        let expected = wish.as_linux_has_it(self.model.interrupts.old, self.model.interrupts.new);
        let interrupt = self.peer.is("notify");
        self.model.interrupted(expected, interrupt);
    }

    fn used(&mut self) -> bool {
        let used = self.driver.pop_used().unwrap();
        let Some((buffer, bytes)) = self.model.take_back() else {
            assert_eq!(used, None);
            return false;
        };
        let used = used.expect("a used buffer");
        assert_eq!(self.slots.remove(&used.id.0), Some(buffer.slot));
        assert_eq!(used.len as usize, bytes.len());
        assert_eq!(gather(&self.peer, &buffer.writable, bytes.len()), bytes);
        true
    }
}

/// Both sides run at the same time, and sleep when there is nothing to do.
///
/// No notification may be lost, and no byte may be seen before it is written.
pub(crate) fn stream(size: u16, features: u64, count: u64) {
    const PLACE: usize = 64;
    let mut pair = Pair::new(size, features);
    let Pair { driver, peer, .. } = &mut pair;
    let ours = peer.ours();
    let data = ours.slice(ours.area.len() / 2, usize::from(size) * PLACE).unwrap();
    let mut places: Vec<usize> = (0..usize::from(size)).collect();
    // What each of the driver's identifiers was sent with, and where.
    let mut sent = vec![(0, 0); size.into()];
    peer.start_step(&format!("serve {count}"));
    let (mut added, mut done) = (0u64, 0);
    while done < count {
        while added < count && driver.room() >= 2 {
            let place = places.pop().unwrap();
            let addr = data.addr + (place * PLACE) as u64;
            assert!(data.area.write(place * PLACE, &added.to_le_bytes()));
            let segment = |offset| Segment { addr: addr + offset, len: 8 };
            let BufferId(id) = driver.add(&[segment(0)], &[segment(32)]).unwrap();
            sent[usize::from(id)] = (added, place);
            added += 1;
        }
        if driver.publish() {
            peer.wake();
        }
        driver.disable_interrupts();
        let before = done;
        while let Some(used) = driver.pop_used().unwrap() {
            let (value, place) = sent[usize::from(used.id.0)];
            let mut bytes = [0; 8];
            assert!(data.area.read(place * PLACE + 32, &mut bytes));
            assert_eq!((used.len, u64::from_le_bytes(bytes)), (8, value * 3 + 1));
            places.push(place);
            done += 1;
        }
        if done == before {
            crate::linger(done);
            let token = driver.enable_interrupts();
            if !driver.poll(token) {
                peer.sleep();
            }
        }
    }
    let [interrupts, sleeps] = pair.peer.answer().try_into().expect("two numbers");
    eprintln!(
        "features {features:#x}, size {size}: {interrupts} interrupts, the device slept {sleeps} times"
    );
}

impl crate::Pair for Pair {
    fn step(&mut self, op: &Op) {
        match *op {
            Op::Add { readable, writable, len } => self.add(readable, writable, len),
            Op::Kick => self.kick(),
            Op::Pop => {
                self.pop();
            }
            Op::Complete { which, len } => {
                if let Some(command) = self.complete_command(which, len) {
                    self.peer.ask(&command);
                }
            }
            Op::Publish => self.notify(),
            Op::ArmKicks => {
                let more = !self.peer.is("enable");
                assert_eq!(more, self.published() > 0);
                self.model.kick_due = (!more).then_some(self.model.kicks.old);
            }
            Op::DisableKicks => {
                self.peer.ask("disable");
                self.model.kick_due = None;
            }
            Op::Used => {
                self.used();
            }
            Op::Enable => {
                let token = self.driver.enable_interrupts();
                let more = self.driver.poll(token);
                assert_eq!(more, !self.model.used.is_empty());
                // What was completed and not yet asked about is noticed by the poll.
                self.model.interrupt_due = !more && self.model.interrupts.old == self.model.interrupts.new;
            }
            // Ours has no such thing.
            Op::EnableDelayed => {}
            Op::Disable => {
                self.driver.disable_interrupts();
                self.model.interrupt_due = false;
            }
            Op::Bulk { count } => {
                self.drain();
                for at in 0..count {
                    self.add(at % 2, 1 - at % 2, at.into());
                }
                self.drain();
            }
        }
    }

    fn drain(&mut self) {
        self.kick();
        let commands = vec!["pop".to_owned(); self.model.waiting.len() + 1];
        for answer in self.peer.ask_all(&commands) {
            Self::compare_pop(&mut self.model, &answer);
        }
        assert!(self.model.waiting.is_empty());
        let mut commands = Vec::new();
        while let Some(command) = self.complete_command(3, 200) {
            commands.push(command);
        }
        self.peer.ask_all(&commands);
        self.notify();
        while self.used() {}
        assert_eq!(self.driver.in_flight(), 0);
    }
}
