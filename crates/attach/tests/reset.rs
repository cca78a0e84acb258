//! A reset while requests are in flight, with version 3 of virtio-mmio: the write returns at once.
use paravane_attach::{AttachedDevice, Builder, InterruptFn};
use paravane_device::blk::{Blk, BlkConfig};
use paravane_dma::{Backing, Memory, Region, RegionConfig};
use paravane_driver::blk::{Blk as Driver, Request};
use paravane_driver::mmio::Mmio;
use paravane_driver::{Area, DmaArea, Pool};
use paravane_io::{LendError, MoveError};
use paravane_spec::blk::S_OK;
use paravane_spec::{mmio, status};
use paravane_store::file::perform;
use paravane_store::{Job, Outcome, Rest, Store, StoreLimits, StoreQueue};
use paravane_test_support::wait_until;
use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::mpsc::channel;
use std::sync::{Arc, Condvar, Mutex};
use std::thread::scope;

const BASE: u64 = 0xd000_0000;
const RAM: u64 = 0x4000_0000;
const RAM_SIZE: usize = 4 << 20;
const BLOCK: usize = 4096;
const IN_FLIGHT: usize = 4;
const RUNNING: u32 = status::ACKNOWLEDGE | status::DRIVER | status::FEATURES_OK | status::DRIVER_OK;

/// What a store and its test share.
#[derive(Debug, Default)]
struct Gate {
    state: Mutex<GateState>,
    opened: Condvar,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct GateState {
    /// Jobs are begun later.
    is_shut: bool,
    pushed: usize,
    performed: usize,
    reaped: usize,
}

impl Gate {
    fn set_shut(&self, is_shut: bool) {
        self.state.lock().unwrap().is_shut = is_shut;
        self.opened.notify_all();
    }

    fn state(&self) -> GateState {
        *self.state.lock().unwrap()
    }
}

/// A file whose jobs are held back while the gate is shut.
#[derive(Debug)]
struct HeldStore(Arc<File>, Arc<Gate>);

impl Store for HeldStore {
    fn queue(&self, _jobs: u16) -> io::Result<Box<dyn StoreQueue>> {
        let (file, gate) = (Arc::clone(&self.0), Arc::clone(&self.1));
        Ok(Box::new(HeldQueue { file, gate, jobs: VecDeque::new(), outcomes: VecDeque::new() }))
    }

    unsafe fn perform(&self, job: Job) -> i32 {
        // SAFETY: the caller's promise.
        unsafe { perform(&self.0, job) }
    }

    fn size(&self) -> u64 {
        self.0.metadata().unwrap().len()
    }

    fn limits(&self) -> StoreLimits {
        StoreLimits::FILE
    }
}

/// Jobs that are performed when the gate is open: in `submit`, or where the queue is waited for.
#[derive(Debug)]
struct HeldQueue {
    file: Arc<File>,
    gate: Arc<Gate>,
    jobs: VecDeque<(u16, Job)>,
    outcomes: VecDeque<Outcome>,
}

impl HeldQueue {
    fn perform(&mut self) {
        while let Some((head, job)) = self.jobs.pop_front() {
            // SAFETY: the promise of `push`.
            let result = unsafe { perform(&self.file, job) };
            // SAFETY: the job has ended.
            self.outcomes.push_back(unsafe { Outcome::new(head, result) });
            self.gate.state.lock().unwrap().performed += 1;
        }
    }
}

impl StoreQueue for HeldQueue {
    fn rest(&mut self, _arm: bool) -> Rest {
        if self.outcomes.is_empty() { Rest::Sleep { kicks: true } } else { Rest::Serve }
    }

    unsafe fn push(&mut self, head: u16, job: Job) -> io::Result<()> {
        self.jobs.push_back((head, job));
        self.gate.state.lock().unwrap().pushed += 1;
        Ok(())
    }

    fn submit(&mut self) -> io::Result<()> {
        if !self.gate.state().is_shut {
            self.perform();
        }
        Ok(())
    }

    fn reap(&mut self, outcomes: &mut VecDeque<Outcome>) {
        self.gate.state.lock().unwrap().reaped += self.outcomes.len();
        outcomes.append(&mut self.outcomes);
    }

    fn wait(&mut self) -> io::Result<()> {
        let state = self.gate.state.lock().unwrap();
        drop(self.gate.opened.wait_while(state, |state| state.is_shut).unwrap());
        self.perform();
        Ok(())
    }

    /// It has begun them all.
    fn cancel(&mut self) {}
}

/// Opens a gate when a test ends, however it does.
struct OpenAtLast(Arc<Gate>);

impl Drop for OpenAtLast {
    fn drop(&mut self) {
        self.0.set_shut(false);
    }
}

/// A disk over such a store, and the memory of its guest.
struct Rig {
    // Dropped before the device.
    _open: OpenAtLast,
    device: AttachedDevice,
    region: Arc<Region>,
    image: tempfile::NamedTempFile,
    gate: Arc<Gate>,
    number: usize,
}

impl Rig {
    fn new(number: usize, choose: impl FnOnce(Builder) -> Builder) -> Self {
        let image = tempfile::NamedTempFile::new().unwrap();
        image.as_file().set_len(1 << 20).unwrap();
        let gate = Arc::new(Gate::default());
        let store = HeldStore(Arc::new(image.reopen().unwrap()), Arc::clone(&gate));
        let disk = Blk::over(Arc::new(store), BlkConfig::new("held")).unwrap();
        let ram = RegionConfig { gpa: RAM, size: RAM_SIZE as u64, backing: Backing::Pages, writable: true };
        let region = Region::new(ram).unwrap();
        let memory = Memory::new(vec![region.clone()]).unwrap();
        let builder = choose(AttachedDevice::builder(Box::new(disk), &memory).number(number));
        let device = builder.mmio(BASE, InterruptFn::new(|| ())).unwrap();
        Self { _open: OpenAtLast(Arc::clone(&gate)), device, region, image, gate, number }
    }

    fn version_3(number: usize) -> Self {
        Self::new(number, Builder::mmio_version_3)
    }

    /// A driver that sets the device up.
    fn driver(&self) -> (Driver<Mmio<&AttachedDevice>>, Pool) {
        // SAFETY: the region outlives the driver, and nobody makes references to its bytes.
        let area = unsafe { Area::new(self.region.host(), RAM_SIZE) };
        let mut pool = Pool::new(DmaArea { area, addr: RAM });
        (Driver::new(Mmio::new(&self.device).unwrap(), IN_FLIGHT as u16, &mut pool).unwrap(), pool)
    }

    /// Sets the device up, and has writes of `byte` in flight that the store holds back.
    fn with_requests_in_flight(&self, byte: u8) {
        self.gate.set_shut(true);
        let (mut driver, mut pool) = self.driver();
        let before = self.gate.state().pushed;
        for n in 0..IN_FLIGHT {
            let buffer = pool.take(BLOCK, BLOCK).unwrap();
            assert!(buffer.area.write(0, &[byte; BLOCK]));
            assert!(driver.submit(Request::Write { sector: (n * BLOCK / 512) as u64, buffer }, 0).unwrap());
        }
        driver.kick();
        wait_until("requests in flight", || self.gate.state().pushed == before + IN_FLIGHT);
        // The driver forgets the device: the test goes on by registers.
    }

    /// Writes a block and reads the whole area back.
    fn works(&self, byte: u8) {
        let (mut driver, mut pool) = self.driver();
        let buffer = pool.take(BLOCK, BLOCK).unwrap();
        assert!(buffer.area.write(0, &[byte; BLOCK]));
        for request in [Request::Write { sector: 0, buffer }, Request::Read { sector: 0, buffer }] {
            assert!(driver.submit(request, 0).unwrap());
            driver.kick();
            let mut answer = None;
            wait_until("an answer", || {
                answer = driver.complete().unwrap();
                answer.is_some()
            });
            assert_eq!(answer.unwrap().status, S_OK);
        }
        let mut read = [0; BLOCK];
        assert!(buffer.area.read(0, &mut read));
        assert_eq!(read, [byte; BLOCK]);
        assert_eq!(self.device.counters().faults(), []);
    }

    fn read(&self, offset: u64) -> u32 {
        let mut data = [0; 4];
        self.device.read(offset, &mut data);
        u32::from_le_bytes(data)
    }

    fn write(&self, offset: u64, value: u32) {
        self.device.write(offset, &value.to_le_bytes());
    }

    fn status(&self) -> u32 {
        self.read(mmio::STATUS)
    }

    /// Threads of resets of this device.
    fn reset_threads(&self) -> usize {
        let name = format!("reset {}\n", self.number);
        let tasks = std::fs::read_dir("/proc/self/task").unwrap();
        // One may end meanwhile.
        let names = tasks.filter_map(|task| std::fs::read_to_string(task.unwrap().path().join("comm")).ok());
        names.filter(|comm| *comm == name).count()
    }

    /// What the guest would see of its memory.
    fn memory(&self) -> Vec<u8> {
        // SAFETY: as in `driver`.
        let area = unsafe { Area::new(self.region.host(), RAM_SIZE) };
        let mut bytes = vec![0; RAM_SIZE];
        assert!(area.read(0, &mut bytes));
        bytes
    }
}

/// Runs `call`, which sleeps until the gate opens.
fn waits(gate: &Gate, call: impl FnOnce() + Send) {
    let (started, path) = channel();
    scope(|scope| {
        let call = scope.spawn(move || {
            started.send(std::fs::read_link("/proc/thread-self").unwrap()).unwrap();
            call();
        });
        let stat = Path::new("/proc").join(path.recv().unwrap()).join("stat");
        // Its name is in brackets, its state follows.
        let sleeps = || std::fs::read_to_string(&stat).is_ok_and(|stat| stat.contains(") S "));
        wait_until("sleep", || call.is_finished() || sleeps());
        gate.set_shut(false);
    });
}

#[test]
fn a_reset_returns_at_once_and_ends_when_the_requests_in_flight_have() {
    let rig = Rig::version_3(101);
    rig.with_requests_in_flight(1);
    let before = rig.memory();
    rig.write(mmio::STATUS, 0);
    assert_eq!(rig.status(), RUNNING, "the write returns before the reset is done");
    // What a vCPU reads waits for nothing, and what it writes meanwhile has no effect.
    assert_eq!(rig.read(mmio::MAGIC_VALUE), mmio::MAGIC);
    assert_eq!(rig.read(mmio::CONFIG), (1 << 20) / 512);
    let refused = [
        (mmio::QUEUE_NOTIFY, 0),
        (mmio::QUEUE_READY, 0),
        (mmio::STATUS, status::ACKNOWLEDGE),
        (mmio::DRIVER_FEATURES, 1),
    ];
    assert_eq!(rig.device.violations(), 0);
    for (done, (register, value)) in (1..).zip(refused) {
        rig.write(register, value);
        assert_eq!(rig.device.violations(), done);
    }
    // A second request is still one reset.
    rig.write(mmio::STATUS, 0);
    assert_eq!(rig.status(), RUNNING);
    wait_until("the thread of the reset", || rig.reset_threads() == 1);
    // Nor does the host wait.
    assert!(rig.device.queues().iter().all(|queue| !queue.live));
    assert!(matches!(rig.device.move_queue(0, 0), Err(MoveError::NotLive { .. })));
    assert!(matches!(rig.device.take_back_queue(0), Err(LendError::NotLent { .. })));
    assert!(!rig.device.refresh().unwrap());

    rig.gate.set_shut(false);
    wait_until("the end of the reset", || rig.status() == 0);
    let done = rig.gate.state();
    assert_eq!((done.performed, done.reaped), (IN_FLIGHT, IN_FLIGHT), "each job ends once");
    assert!(std::fs::read(rig.image.path()).unwrap()[..IN_FLIGHT * BLOCK].iter().all(|&byte| byte == 1));
    // No buffer was used, and no status byte written.
    assert!(rig.memory() == before);
    assert_eq!(rig.device.interrupts(), 0);
    rig.works(2);
    assert_eq!(rig.device.violations(), refused.len() as u64);
}

#[test]
fn with_version_2_the_write_waits() {
    let rig = Rig::new(102, |builder| builder);
    rig.with_requests_in_flight(1);
    waits(&rig.gate, || {
        rig.write(mmio::STATUS, 0);
        assert_eq!(rig.gate.state().reaped, IN_FLIGHT);
        assert_eq!(rig.status(), 0);
    });
    assert_eq!(rig.reset_threads(), 0);
    rig.works(2);
}

#[test]
fn what_ends_the_device_waits_for_the_end_of_a_reset() {
    type Call = fn(&AttachedDevice);
    let calls: [(&str, Call); 3] = [
        ("stop", |device| assert!(device.stop().is_some())),
        ("save", |device| {
            let (saved, _) = device.save().unwrap();
            assert!(!saved.to_bytes().is_empty());
        }),
        ("reset", AttachedDevice::reset),
    ];
    for (number, (name, call)) in (110..).zip(calls) {
        let rig = Rig::version_3(number);
        rig.with_requests_in_flight(1);
        rig.write(mmio::STATUS, 0);
        waits(&rig.gate, || {
            call(&rig.device);
            // The jobs had ended before.
            assert_eq!(rig.gate.state().reaped, IN_FLIGHT, "{name}");
            assert_eq!(rig.status(), 0, "{name}");
        });
    }
}

#[test]
fn a_device_that_is_dropped_during_a_reset_waits_for_its_end() {
    let rig = Rig::version_3(103);
    rig.with_requests_in_flight(1);
    rig.write(mmio::STATUS, 0);
    let Rig { device, gate, .. } = rig;
    waits(&gate, || {
        drop(device);
        assert_eq!(gate.state().reaped, IN_FLIGHT);
    });
}

#[test]
fn a_driver_polls_until_the_reset_is_done() {
    let rig = Rig::version_3(104);
    rig.with_requests_in_flight(1);
    rig.write(mmio::STATUS, 0);
    let seen = rig.device.counters().accesses().other;
    scope(|scope| {
        let next = scope.spawn(|| rig.works(2));
        wait_until("polls of the next driver", || rig.device.counters().accesses().other > seen + 100);
        assert!(!next.is_finished());
        rig.gate.set_shut(false);
    });
    assert_eq!(rig.device.violations(), 0);
}

#[test]
fn a_guest_that_resets_in_a_loop_has_one_thread() {
    let rig = Rig::version_3(105);
    for round in 0..200 {
        rig.gate.set_shut(false);
        let (driver, _) = rig.driver();
        drop(driver);
        for _ in 0..3 {
            rig.write(mmio::STATUS, 0);
            assert!(rig.reset_threads() <= 1);
        }
        // With a device at reset there is nothing to wait for, and no thread.
        wait_until("the end of the reset", || rig.status() == 0);
        rig.write(mmio::STATUS, status::ACKNOWLEDGE);
        rig.write(mmio::STATUS, 0);
        assert_eq!(rig.status(), 0, "round {round}");
    }
    rig.works(3);
}
