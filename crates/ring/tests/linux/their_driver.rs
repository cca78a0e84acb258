//! Linux's driver side, split or packed, and our device side.
use crate::model::{Buffer, Model, Op, gather, scatter};
use crate::peer::{Peer, pattern, sum};
use crate::wish::Wish;
use paravane_ring::QueueAddresses;
use paravane_ring::device::{Batch, Queue, QueueConfig};
use paravane_spec::feature::VERSION_1;

pub(crate) struct Pair {
    device: Queue,
    batch: Batch,
    addresses: QueueAddresses,
    features: u64,
    model: Model,
    /// Counts completions, so that the bytes of each answer are unique.
    answers: u64,
    /// Last, since the queue has pointers into its memory.
    peer: Peer,
}

impl Pair {
    pub(crate) fn new(size: u16, features: u64) -> Self {
        let mut peer = Peer::start("driver");
        let areas = peer.ask(&format!("queue {size} {}", features | VERSION_1));
        let [desc, driver, device] = areas.try_into().expect("three addresses");
        let addresses = QueueAddresses { size, desc, driver, device };
        let config = QueueConfig::new(addresses, size, features).unwrap();
        let areas = config.areas().map(|area| peer.at(area.addr, area.len).unwrap());
        let [desc, driver, device] = areas;
        // SAFETY: the areas are the ones that were asked for; the peer, and its mapping, goes last.
        let device = unsafe { config.activate(desc, driver, device) }.unwrap();
        let model = Model::new(size, features, peer.ours());
        Self { device, batch: Batch::new(5), addresses, features, model, answers: 0, peer }
    }

    fn add_command(buffer: &Buffer) -> String {
        let (readable, writable) = (buffer.readable.len(), buffer.writable.len());
        let mut command = format!("add {} {readable} {writable}", buffer.slot);
        for segment in buffer.readable.iter().chain(&buffer.writable) {
            command += &format!(" {} {}", segment.addr, segment.len);
        }
        command
    }

    fn kick(&mut self) {
        let wish = Wish::of_device(&self.peer, &self.addresses, self.features);
        let expected = wish.as_linux_has_it(self.model.kicks.old, self.model.kicks.new);
        let kick = self.peer.is("kick");
        self.model.kicked(expected, kick);
    }

    /// One batch; whether there was anything.
    fn pop(&mut self) -> bool {
        let Self { device, batch, model, peer, .. } = self;
        let waiting = model.waiting.len();
        let count = device.pop(batch, |addr, out| peer.fetch(addr, out)).unwrap();
        assert_eq!(count == 0, waiting == 0);
        for chain in batch.chains() {
            model.pop(chain.head, batch.readable(chain), batch.writable(chain));
            let (_, buffer) = model.serving.last().unwrap();
            let bytes = gather(peer, &buffer.readable, usize::MAX);
            assert!(bytes.iter().enumerate().all(|(at, byte)| *byte == pattern(buffer.slot.into(), at)));
        }
        count > 0
    }

    fn complete(&mut self, which: usize, len: u32) {
        let Some((head, buffer, len)) = self.model.choose(which, len) else { return };
        self.answers += 1;
        scatter(&self.peer, &buffer.writable, len as usize, self.answers);
        self.device.complete(head, len).unwrap();
        self.model.staged.push((buffer, len, self.answers));
    }

    fn publish(&mut self) {
        self.model.publish();
        let wish = Wish::of_driver(&self.peer, &self.addresses, self.features);
        let expected = wish.covers(self.model.interrupts.old, self.model.interrupts.new);
        let interrupt = self.device.publish().unwrap();
        self.model.interrupted(expected, interrupt);
    }

    fn compare_used(model: &mut Model, answer: &[u64]) {
        let expected = match model.take_back() {
            Some((buffer, bytes)) => vec![1, buffer.slot.into(), bytes.len() as u64, sum(&bytes)],
            None => vec![0],
        };
        assert_eq!(answer, expected);
    }
}

/// Both sides run at the same time, and sleep when there is nothing to do.
///
/// No notification may be lost, and no byte may be seen before it is written.
pub(crate) fn stream(size: u16, features: u64, count: u64) {
    let mut pair = Pair::new(size, features);
    let at = pair.peer.ours().addr;
    pair.peer.start_step(&format!("stream {count} {} {at}", size.min(200)));
    let (mut served, mut next) = (0, 0);
    let Pair { device, batch, peer, .. } = &mut pair;
    loop {
        device.disable_kicks();
        while device.pop(batch, |addr, out| peer.fetch(addr, out)).unwrap() > 0 {
            for chain in batch.chains() {
                let ([from], [to]) = batch.segments(chain) else { panic!("two segments") };
                let mut bytes = [0; 8];
                assert!(from.len == 8 && to.len == 8 && peer.fetch(from.addr, &mut bytes));
                let value = u64::from_le_bytes(bytes);
                assert_eq!(value, next, "in the order in which they were added");
                next += 1;
                let answer = value * 3 + 1;
                assert!(peer.at(to.addr, 8).unwrap().write(0, &answer.to_le_bytes()));
                device.complete(chain.head, 8).unwrap();
                served += 1;
            }
            if device.publish().unwrap() {
                peer.wake();
            }
        }
        if served == count {
            break;
        }
        crate::linger(served);
        if !device.arm_kicks().unwrap() {
            peer.sleep();
        }
    }
    let [kicks, sleeps] = pair.peer.answer().try_into().expect("two numbers");
    eprintln!("features {features:#x}, size {size}: {kicks} kicks, the driver slept {sleeps} times");
}

impl crate::Pair for Pair {
    fn step(&mut self, op: &Op) {
        match *op {
            Op::Add { readable, writable, len } => {
                let Some(buffer) = self.model.make(readable, writable, len) else { return };
                let fits = self.model.fits(&buffer);
                assert_eq!(self.peer.is(&Self::add_command(&buffer)), fits);
                if fits {
                    self.model.add(buffer);
                }
            }
            Op::Kick => self.kick(),
            Op::Pop => {
                self.pop();
            }
            Op::Complete { which, len } => self.complete(which, len),
            Op::Publish => self.publish(),
            Op::ArmKicks => {
                let more = self.device.arm_kicks().unwrap();
                assert_eq!(more, !self.model.waiting.is_empty());
                self.model.kick_due = (!more).then_some(self.model.kicks.new);
            }
            Op::DisableKicks => {
                self.device.disable_kicks();
                self.model.kick_due = None;
            }
            Op::Used => {
                let answer = self.peer.ask("used");
                Self::compare_used(&mut self.model, &answer);
            }
            Op::Enable => {
                let token = self.peer.ask("enable")[0];
                let more = self.peer.is(&format!("poll {token}"));
                assert_eq!(more, !self.model.used.is_empty());
                self.model.interrupt_due = !more;
            }
            Op::EnableDelayed => {
                self.peer.ask("enable_delayed");
                self.model.interrupt_due = false;
            }
            Op::Disable => {
                self.peer.ask("disable");
                self.model.interrupt_due = false;
            }
            Op::Bulk { count } => {
                self.drain();
                let mut commands = Vec::new();
                for at in 0..count {
                    let buffer = self.model.make(at % 2, 1 - at % 2, at.into()).unwrap();
                    commands.push(Self::add_command(&buffer));
                    self.model.add(buffer);
                }
                for answer in self.peer.ask_all(&commands) {
                    assert_eq!(answer, [1]);
                }
                self.kick();
                self.drain();
            }
        }
    }

    fn drain(&mut self) {
        while self.pop() {}
        while !self.model.serving.is_empty() {
            self.complete(3, 200);
        }
        self.publish();
        let commands = vec!["used".to_owned(); self.model.used.len() + 1];
        for answer in self.peer.ask_all(&commands) {
            Self::compare_used(&mut self.model, &answer);
        }
        assert!(!self.peer.is("broken"));
        assert_eq!(self.device.in_flight(), 0);
    }
}
