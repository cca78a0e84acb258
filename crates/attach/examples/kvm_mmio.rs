//! A VMM of one's own on kvm-ioctls, with a Paravane disk behind virtio-mmio.
//!
//! The guest is 82 bytes of real-mode code: it writes to port 0xf4 when it is ready, kicks the
//! disk's queue, sleeps until the interrupt, acknowledges it, and starts again. To keep it short,
//! the host plays the rest of the driver: it sets the queue up, fills in requests and checks the
//! answers. Kicks come by ioeventfd, interrupts go by irqfd to GSI 5.
//! `cargo run --example kvm_mmio` needs /dev/kvm.
use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd};
use paravane_attach::AttachedDevice;
use paravane_device::blk::{Blk, BlkConfig};
use paravane_dma::{Backing, Memory, Region, RegionConfig};
use paravane_driver::blk::{Blk as Driver, Request};
use paravane_driver::mmio::{Mmio, Registers};
use paravane_driver::{Area, DmaArea, Pool};
use paravane_notify::{KvmIoEventFds, KvmIrqfd};
use paravane_spec::mmio::QUEUE_NOTIFY;
use std::error::Error;
use std::io::{Error as Failure, ErrorKind, Write};
use std::sync::Arc;

/// Where guest memory ends.
const RAM_SIZE: u64 = 0x8_0000;
/// Where the guest's code lies; rings and buffers lie above.
const CODE_AT: usize = 0x1000;
const POOL_AT: usize = 0x1_0000;
/// Guest-physical address of the disk's registers.
const WINDOW: u64 = 0xd_0000;
const GSI: u32 = 5;
const SECTORS: u64 = 64;

#[rustfmt::skip]
const CODE: [u8; 82] = [
    0x31, 0xc0, 0x8e, 0xd8, 0x8e, 0xd0,             //       ds = ss = 0
    0xbc, 0x00, 0x80,                               //       mov   sp, 0x8000
    0xc7, 0x06, 0x94, 0x00, 0x44, 0x10,             //       vector 0x25: offset of irq, ...
    0xc7, 0x06, 0x96, 0x00, 0x00, 0x00,             //       ... and segment
    0xb0, 0x11, 0xe6, 0x20, 0xb0, 0x20, 0xe6, 0x21, //       interrupt controller: IRQ 0 is vector 0x20, ...
    0xb0, 0x04, 0xe6, 0x21, 0xb0, 0x01, 0xe6, 0x21,
    0xb0, 0xdf, 0xe6, 0x21,                         //       ... and only IRQ 5 is unmasked
    0xb8, 0x00, 0xd0, 0x8e, 0xd8,                   //       ds = 0xd000, the window
    0xe6, 0xf4, 0x31, 0xdb,                         // next: out 0xf4, al; bx = 0
    0x66, 0xc7, 0x06, 0x50, 0x00, 0, 0, 0, 0,       //       QueueNotify = 0: the kick
    0xfa, 0x85, 0xdb, 0x75, 0xee,                   // wait: cli; next if bx is not 0
    0xfb, 0xf4, 0xeb, 0xf7,                         //       sti, hlt, wait
    0x66, 0xa1, 0x60, 0x00, 0x66, 0xa3, 0x64, 0x00, // irq:  InterruptACK = InterruptStatus
    0xb0, 0x20, 0xe6, 0x20, 0x43, 0xcf,             //       end of interrupt, bx = bx + 1, iret
];

/// The registers for the driver's host part. The guest makes the kicks.
struct Window(Arc<AttachedDevice>);

impl Window {
    fn read<const N: usize>(&self, offset: u64) -> [u8; N] {
        let mut data = [0; N];
        self.0.read(offset, &mut data);
        data
    }
}

impl Registers for Window {
    fn read32(&self, offset: u64) -> u32 {
        u32::from_le_bytes(self.read(offset))
    }
    fn write32(&self, offset: u64, value: u32) {
        if offset != QUEUE_NOTIFY {
            self.0.write(offset, &value.to_le_bytes());
        }
    }
    fn read16(&self, offset: u64) -> u16 {
        u16::from_le_bytes(self.read(offset))
    }
    fn read8(&self, offset: u64) -> u8 {
        self.read::<1>(offset)[0]
    }
}

/// Runs the guest until it is ready for a request.
fn run(vcpu: &mut VcpuFd, device: &AttachedDevice) -> Result<(), Box<dyn Error>> {
    loop {
        match vcpu.run() {
            Ok(VcpuExit::IoOut(0xf4, _)) => return Ok(()),
            Ok(VcpuExit::MmioRead(addr, data)) => device.read(device.offset(addr).ok_or("no device")?, data),
            Ok(VcpuExit::MmioWrite(addr, data)) => {
                device.write(device.offset(addr).ok_or("no device")?, data)
            }
            Ok(exit) => return Err(format!("{exit:?}").into()),
            Err(error) if Failure::from(error).kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error.into()),
        }
    }
}

pub(crate) fn main() -> Result<(), Box<dyn Error>> {
    // The machine: memory, interrupt controller, one vCPU in real mode.
    let vm = Arc::new(Kvm::new()?.create_vm()?);
    vm.create_irq_chip()?;
    let ram = Region::new(RegionConfig { gpa: 0, size: RAM_SIZE, backing: Backing::Pages, writable: true })?;
    let slot = kvm_userspace_memory_region {
        memory_size: ram.size(),
        userspace_addr: ram.host().as_ptr() as u64,
        ..Default::default()
    };
    // SAFETY: `ram` is one mapping of that size, and is dropped after the VM has run for the last
    // time.
    unsafe { vm.set_user_memory_region(slot)? };
    // SAFETY: as above; nobody makes references to guest memory.
    let area = unsafe { Area::new(ram.host(), ram.size() as usize) };
    assert!(area.write(CODE_AT, &CODE));
    let mut vcpu = vm.create_vcpu(0)?;
    let mut sregs = vcpu.get_sregs()?;
    (sregs.cs.base, sregs.cs.selector) = (0, 0);
    vcpu.set_sregs(&sregs)?;
    let mut regs = vcpu.get_regs()?;
    (regs.rip, regs.rflags) = (CODE_AT as u64, 2);
    vcpu.set_regs(&regs)?;

    // The disk: sector n is full of bytes n + 1.
    let mut image = tempfile::NamedTempFile::new()?;
    (1..=SECTORS).try_for_each(|byte| image.write_all(&[byte as u8; 512]))?;
    let disk = Blk::open(BlkConfig::new(image.path()))?;
    let device = AttachedDevice::builder(Box::new(disk), &Memory::new(vec![Arc::clone(&ram)])?)
        .ioeventfds(Arc::new(KvmIoEventFds::new(Arc::clone(&vm))))
        .mmio(WINDOW, Arc::new(KvmIrqfd::new(&vm, GSI)?))?;
    let device = Arc::new(device);

    // The host's part of the driver.
    let pool = area.slice(POOL_AT, ram.size() as usize - POOL_AT).ok_or("there is no room for rings")?;
    let mut pool = Pool::new(DmaArea { area: pool, addr: POOL_AT as u64 });
    let mut driver = Driver::new(Mmio::new(Window(Arc::clone(&device)))?, 16, &mut pool)?;
    let buffer = pool.take(512, 64)?;

    // An interrupt that comes before the guest has set its controller up would be lost.
    run(&mut vcpu, &device)?;
    for sector in 0..SECTORS {
        // Armed before the disk can see the request: it may serve it before the kick.
        assert!(!driver.enable_interrupts(), "nothing is in flight");
        driver.submit(Request::Read { sector, buffer }, sector)?;
        driver.kick();
        run(&mut vcpu, &device)?;
        let done = driver.complete()?.ok_or("interrupted, and nothing is done")?;
        let mut data = [0; 512];
        assert!(buffer.area.read(0, &mut data) && data == [sector as u8 + 1; 512] && done.status == 0);
    }
    assert_eq!((device.exit_kicks(), device.interrupts()), (0, SECTORS));
    println!("{SECTORS} sectors read, {} kicks by ioeventfd", device.counters().kicks());
    device.stop();
    Ok(())
}
