//! A disk that one process after the other serves, while its driver writes, reads and compares.
//!
//! ```text
//!   this process: guest memory, driver         the other: the disk behind its registers
//!     register access -----------------------------> read, write
//!     <------------------------------------ interrupts
//!     save ------------------------------------> save, ends
//!     the next one, with what was saved --------> restore, goes on
//! ```
use paravane_attach::{AttachedDevice, Builder, InterruptFn, MessageFn, PciPlace, RingFeatures, SavedDevice};
use paravane_device::Device;
use paravane_device::blk::{Blk, BlkConfig};
use paravane_dma::{Backing, Memory, Region, RegionConfig};
use paravane_driver::blk::{Blk as Driver, Request};
use paravane_driver::mmio::{Mmio, Registers};
use paravane_driver::pci::{Ecam, Pci, Space};
use paravane_driver::{Area, DmaArea, Message, Pool, Transport};
use paravane_io::{InFlightMemory, IoPool};
use paravane_spec::blk::S_OK;
use paravane_spec::{mmio_msi, pci::ecam};
use paravane_test_support::{Random, patience, wait_until};
use paravane_transport::pci::Pci as Function;
use paravane_transport::pci::root::Root;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;
use tempfile::TempDir;

const BASE: u64 = 0xd000_0000;
const ECAM: u64 = 0xb000_0000;
const BAR: u64 = 0xe000_0000;
const RAM: u64 = 0x4000_0000;
const RAM_SIZE: u64 = 8 << 20;
const DISK: usize = 2 << 20;
const BLOCK: usize = 4096;
const SLOTS: usize = 16;
/// Requests in all, and processes that serve them.
const REQUESTS: u64 = 3000;
const PROCESSES: u64 = 8;

/// How the disk is attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Mmio,
    MmioMsi,
    Pci,
}

const FOLDER: &str = "PARAVANE_TEST_SAVED_FOLDER";
const PLACE: &str = "PARAVANE_TEST_SAVED_PLACE";
/// Guest memory, and in-flight memory if there is some: paths.
const MEMORY: &str = "PARAVANE_TEST_SAVED_MEMORY";
const IN_FLIGHT: &str = "PARAVANE_TEST_SAVED_IN_FLIGHT";

/// Not a test: [`Disk::serve`] starts it.
#[test]
#[ignore = "serves a disk until it is saved"]
fn device() {
    let variable = |name| std::env::var(name).ok();
    let folder = variable(FOLDER).unwrap();
    let folder = Path::new(&folder);
    let connect = || UnixStream::connect(folder.join("socket")).unwrap();
    let (mut control, interrupts) = (connect(), Arc::new(connect()));
    let open = |path: String| OwnedFd::from(File::options().read(true).write(true).open(path).unwrap());
    let ram = RegionConfig { gpa: RAM, size: RAM_SIZE, backing: Backing::Pages, writable: true };
    let region = Region::open(ram, open(variable(MEMORY).unwrap())).unwrap();
    let memory = Memory::new(vec![region]).unwrap();
    let disk = Blk::open(BlkConfig::new(folder.join("disk.img"))).unwrap();
    let tracking =
        variable(IN_FLIGHT).map(|path| InFlightMemory::open(disk.queue_sizes(), open(path)).unwrap());
    // As a daemon shares its threads.
    let pool = Arc::new(IoPool::shared(2, Duration::ZERO).unwrap());
    let mut builder = AttachedDevice::builder(Box::new(disk), &memory).io_pool(&pool);
    if let Some(tracking) = tracking {
        builder = builder.track(tracking);
    }
    let saved = receive(&mut control);
    if !saved.is_empty() {
        builder = builder.restore(SavedDevice::from_bytes(&saved).unwrap());
    }
    let device = attach(builder, &variable(PLACE).unwrap(), &interrupts);
    control.write_all(&[0]).unwrap();
    let mut request = [0; 18];
    while control.read_exact(&mut request).is_ok() {
        let [kind, len, rest @ ..] = request;
        let (addr, data) = rest.split_at(8);
        let addr = u64::from_le_bytes(addr.try_into().unwrap());
        let mut data: [u8; 8] = data.try_into().unwrap();
        let place = if addr >= Function::CONFIG_SPACE { Some(addr) } else { device.offset(addr) };
        match (kind, place) {
            (0, Some(offset)) => device.read(offset, &mut data[..usize::from(len)]),
            (1, Some(offset)) => device.write(offset, &data[..usize::from(len)]),
            (2, _) => {
                let (saved, disk) = device.save().unwrap();
                assert!(device.save().is_none());
                // Its lock goes first.
                drop(disk);
                return send(&mut control, &saved.to_bytes());
            }
            _ => data = [0xff; 8],
        }
        control.write_all(&data).unwrap();
    }
}

fn attach(builder: Builder, place: &str, interrupts: &Arc<UnixStream>) -> AttachedDevice {
    let builder = match place {
        "Mmio" => builder,
        _ => builder.rings(RingFeatures::default().packed()),
    };
    let raise = |socket: &UnixStream| {
        let mut socket = socket;
        // The driver may be gone at the end.
        let _ = socket.write(&[0]);
    };
    let (wire, messages) = (Arc::clone(interrupts), Arc::clone(interrupts));
    let (line, messages) =
        (InterruptFn::new(move || raise(&wire)), MessageFn::new(move |_| raise(&messages)));
    match place {
        "Mmio" => builder.mmio(BASE, line),
        "MmioMsi" => builder.mmio_msi(BASE, line, &messages),
        _ => builder.pci(PciPlace { bar: BAR, requester: 8, interrupt_line: 5 }, line, Some(&messages)),
    }
    .unwrap()
}

fn send(socket: &mut UnixStream, bytes: &[u8]) {
    socket.write_all(&(bytes.len() as u32).to_le_bytes()).unwrap();
    socket.write_all(bytes).unwrap();
}

fn receive(socket: &mut UnixStream) -> Vec<u8> {
    let mut len = [0; 4];
    socket.read_exact(&mut len).unwrap();
    let mut bytes = vec![0; u32::from_le_bytes(len) as usize];
    socket.read_exact(&mut bytes).unwrap();
    bytes
}

/// Interrupts of all processes.
#[derive(Default)]
struct Line {
    count: Mutex<u64>,
    raised: Condvar,
}

impl Line {
    fn count(&self) -> u64 {
        *self.count.lock().unwrap()
    }

    /// Counts what a process sends, until it ends.
    fn follow(self: &Arc<Self>, mut socket: UnixStream) {
        let line = Arc::clone(self);
        std::thread::spawn(move || {
            while socket.read(&mut [0; 64]).is_ok_and(|count| count > 0) {
                *line.count.lock().unwrap() += 1;
                line.raised.notify_all();
            }
        });
    }

    fn wait(&self, seen: u64) {
        let count = self.count.lock().unwrap();
        let waited = self.raised.wait_timeout_while(count, patience(), |count| *count == seen).unwrap();
        assert!(!waited.1.timed_out(), "an interrupt is lost");
    }
}

/// A disk, and the process that serves it now.
struct Disk {
    folder: TempDir,
    listener: UnixListener,
    place: Place,
    region: Arc<Region>,
    in_flight: Option<InFlightMemory>,
    line: Arc<Line>,
    server: Mutex<Option<(UnixStream, Child)>>,
}

impl Disk {
    fn new(place: Place, is_tracked: bool) -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("disk.img"), vec![0; DISK]).unwrap();
        let ram = RegionConfig { gpa: RAM, size: RAM_SIZE, backing: Backing::Pages, writable: true };
        let sizes = Blk::open(BlkConfig::new(folder.path().join("disk.img"))).unwrap().queue_sizes().to_vec();
        let this = Self {
            listener: UnixListener::bind(folder.path().join("socket")).unwrap(),
            folder,
            place,
            region: Region::new(ram).unwrap(),
            in_flight: is_tracked.then(|| InFlightMemory::new(&sizes).unwrap()),
            line: Arc::default(),
            server: Mutex::default(),
        };
        *this.server.lock().unwrap() = Some(this.serve(&[]));
        this
    }

    /// Starts a process, which goes on with what was saved.
    fn serve(&self, saved: &[u8]) -> (UnixStream, Child) {
        let path = |fd: i32| format!("/proc/{}/fd/{fd}", std::process::id());
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "device", "--ignored", "--nocapture"]).stdout(Stdio::null());
        command.env(FOLDER, self.folder.path()).env(PLACE, format!("{:?}", self.place));
        command.env(MEMORY, path(self.region.fd().unwrap().as_raw_fd()));
        if let Some(in_flight) = &self.in_flight {
            command.env(IN_FLIGHT, path(in_flight.file().unwrap().as_raw_fd()));
        }
        let child = command.spawn().unwrap();
        let mut control = self.listener.accept().unwrap().0;
        self.line.follow(self.listener.accept().unwrap().0);
        control.set_read_timeout(Some(patience())).unwrap();
        send(&mut control, saved);
        control.read_exact(&mut [0]).expect("the device is there");
        (control, child)
    }

    /// Saves the disk, and has another process go on with it.
    fn move_on(&self) {
        let mut server = self.server.lock().unwrap();
        let saved = self.end(server.take());
        *server = Some(self.serve(&saved));
    }

    fn end(&self, server: Option<(UnixStream, Child)>) -> Vec<u8> {
        let (mut control, mut child) = server.unwrap();
        control.write_all(&[2; 18]).unwrap();
        let saved = receive(&mut control);
        assert!(child.wait().unwrap().success());
        saved
    }

    /// A register access: of `len` bytes at a guest-physical address, or in the configuration space.
    fn access(&self, kind: u8, addr: u64, len: usize, value: u64) -> u64 {
        let mut server = self.server.lock().unwrap();
        let (control, _) = server.as_mut().unwrap();
        let mut request = vec![kind, len as u8];
        request.extend(addr.to_le_bytes());
        request.extend(value.to_le_bytes());
        control.write_all(&request).unwrap();
        let mut answer = [0; 8];
        control.read_exact(&mut answer).unwrap();
        u64::from_le_bytes(answer)
    }
}

/// The bus, as the driver sees it.
#[derive(Clone)]
struct Bus(Arc<Disk>);

impl Bus {
    /// Where an address of ECAM is; `None`: there is no function.
    fn place(addr: u64, len: usize) -> Option<u64> {
        match addr.checked_sub(ECAM).filter(|offset| *offset < ecam::BUS) {
            None => Some(addr),
            Some(offset) => {
                let target = Root::new().write(offset, len).filter(|target| target.endpoint == 0)?;
                Some(Function::CONFIG_SPACE + u64::from(target.register))
            }
        }
    }

    fn read(&self, addr: u64, len: usize) -> u64 {
        Self::place(addr, len).map_or(u64::MAX, |place| self.0.access(0, place, len, 0))
    }

    fn write(&self, addr: u64, len: usize, value: u64) {
        if let Some(place) = Self::place(addr, len) {
            self.0.access(1, place, len, value);
        }
    }
}

impl Space for Bus {
    fn read8(&self, addr: u64) -> u8 {
        self.read(addr, 1) as u8
    }
    fn read16(&self, addr: u64) -> u16 {
        self.read(addr, 2) as u16
    }
    fn read32(&self, addr: u64) -> u32 {
        self.read(addr, 4) as u32
    }
    fn write8(&self, addr: u64, value: u8) {
        self.write(addr, 1, value.into());
    }
    fn write16(&self, addr: u64, value: u16) {
        self.write(addr, 2, value.into());
    }
    fn write32(&self, addr: u64, value: u32) {
        self.write(addr, 4, value.into());
    }
}

impl Registers for Bus {
    fn read32(&self, offset: u64) -> u32 {
        self.read(BASE + offset, 4) as u32
    }
    fn write32(&self, offset: u64, value: u32) {
        self.write(BASE + offset, 4, value.into());
    }
    fn read16(&self, offset: u64) -> u16 {
        self.read(BASE + offset, 2) as u16
    }
    fn read8(&self, offset: u64) -> u8 {
        self.read(BASE + offset, 1) as u8
    }
    fn window(&self) -> u64 {
        mmio_msi::WINDOW
    }
}

/// Writes and reads blocks and compares, until all requests are done. Returns what the disk has.
fn load<T: Transport>(transport: T, disk: &Disk, done: &AtomicU64) -> Vec<u8> {
    // SAFETY: the region outlives the driver, and nobody makes references to its bytes.
    let area = unsafe { Area::new(disk.region.host(), RAM_SIZE as usize) };
    let mut pool = Pool::new(DmaArea { area, addr: RAM });
    let mut driver = Driver::new(transport, SLOTS as u16, &mut pool).unwrap();
    let buffers: Vec<_> = (0..SLOTS).map(|_| pool.take(BLOCK, BLOCK).unwrap()).collect();
    let (mut model, mut random) = (vec![0; DISK], Random::new(7));
    // The block of each slot's request, and whether it reads.
    let mut busy: Vec<Option<(usize, bool)>> = vec![None; SLOTS];
    let (mut begun, mut ended) = (0, 0);
    while ended < REQUESTS {
        while let Some(slot) = busy.iter().position(Option::is_none).filter(|_| begun < REQUESTS) {
            let block = random.below(DISK / BLOCK);
            if busy.iter().flatten().any(|(other, _)| *other == block) {
                continue;
            }
            let (sector, buffer, reads) = ((block * BLOCK / 512) as u64, buffers[slot], random.below(2) == 0);
            let request = if reads {
                Request::Read { sector, buffer }
            } else {
                let bytes: Vec<u8> = (0..BLOCK).map(|_| random.below(256) as u8).collect();
                assert!(buffer.area.write(0, &bytes));
                model[block * BLOCK..][..BLOCK].copy_from_slice(&bytes);
                Request::Write { sector, buffer }
            };
            assert!(driver.submit(request, slot as u64).unwrap());
            busy[slot] = Some((block, reads));
            begun += 1;
        }
        driver.kick();
        let seen = disk.line.count();
        while let Some(answer) = driver.complete().unwrap() {
            assert_eq!(answer.status, S_OK);
            let slot = answer.tag as usize;
            let (block, reads) = busy[slot].take().unwrap();
            if reads {
                let mut bytes = vec![0; BLOCK];
                assert!(buffers[slot].area.read(0, &mut bytes));
                assert!(bytes == model[block * BLOCK..][..BLOCK], "block {block}");
            }
            ended += 1;
            done.store(ended, Ordering::Relaxed);
        }
        if busy.iter().all(Option::is_some) || begun == REQUESTS && ended < REQUESTS {
            if !driver.enable_interrupts() {
                disk.line.wait(seen);
            }
            driver.disable_interrupts();
            driver.interrupt().unwrap();
        }
    }
    model
}

/// Saves the disk in the middle of the load, again and again.
fn a_disk_goes_on(place: Place, is_tracked: bool) {
    let disk = Arc::new(Disk::new(place, is_tracked));
    let (bus, done) = (Bus(Arc::clone(&disk)), Arc::new(AtomicU64::new(0)));
    let driver = {
        let (disk, done) = (Arc::clone(&disk), Arc::clone(&done));
        let message = |n: u16| Message { address: 0xfee0_0000, data: 0x40 + u32::from(n) };
        std::thread::spawn(move || match place {
            Place::Mmio => load(Mmio::new(bus).unwrap(), &disk, &done),
            Place::MmioMsi => {
                let mut mmio = Mmio::new(bus).unwrap();
                mmio.use_messages(vec![message(0), message(1)]);
                load(mmio, &disk, &done)
            }
            Place::Pci => {
                let ecam = Ecam::new(bus, ECAM, BAR..BAR + (1 << 20));
                let mut pci = Pci::open(ecam.function(1).unwrap()).unwrap();
                assert!(pci.use_messages(message));
                load(pci, &disk, &done)
            }
        })
    };
    for process in 1..PROCESSES {
        let due = process * REQUESTS / PROCESSES;
        wait_until("progress", || done.load(Ordering::Relaxed) >= due || driver.is_finished());
        if !driver.is_finished() {
            disk.move_on();
        }
    }
    let model = driver.join().unwrap();
    disk.end(disk.server.lock().unwrap().take());
    assert!(
        std::fs::read(disk.folder.path().join("disk.img")).unwrap() == model,
        "the disk is not what was written"
    );
}

#[test]
fn a_disk_behind_mmio_goes_on_in_other_processes() {
    a_disk_goes_on(Place::Mmio, false);
}

#[test]
fn a_disk_behind_mmio_with_messages_goes_on_with_its_requests_in_flight() {
    a_disk_goes_on(Place::MmioMsi, true);
}

#[test]
fn a_disk_behind_pci_goes_on_in_other_processes() {
    a_disk_goes_on(Place::Pci, false);
}

#[test]
fn a_disk_behind_pci_goes_on_with_its_requests_in_flight() {
    a_disk_goes_on(Place::Pci, true);
}
