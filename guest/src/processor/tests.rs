//! A mover on a machine that loses interrupts, or sends them to the wrong processor.
use super::mover::Mover;
use super::shared::Shared;
use crate::DmaArea;
use crate::console::{Console, MEMORY};
use crate::platform::Platform;
use crate::report::Failure;
use crate::worker::Interrupts;
use core::ptr::NonNull;
use paravane_driver::{Area, DriverError, Message};
use paravane_spec::builtin::{
    BootInfo, DeviceEntry, INTERRUPTS, IRQ_VECTOR_BASE, completion, job, message_address,
};
use std::boxed::Box;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard};
use std::vec::Vec;
use zerocopy::FromZeros;
extern crate std;

const CPUS: usize = 3;
/// Interrupts of the entry, from its configuration change's on.
const FIRST: u32 = 30;

/// What is wrong with the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    None,
    /// The interrupt with this number, from 1 on, is lost.
    Loses(u64),
    /// The interrupt with this number comes to the processor before as well.
    ComesTwice(u64),
    /// Fences are not taken.
    NoFences,
    /// There is always something that has arrived.
    NeverIdle,
    /// The device refuses messages.
    Refuses,
}

/// A machine whose clock runs when it is read, and a device with one queue.
struct Fake {
    fault: Fault,
    clock: AtomicU64,
    taken: Mutex<[[u64; INTERRUPTS]; CPUS]>,
    /// Where the queue's message goes, now and before.
    to: Mutex<[usize; 2]>,
    sent: AtomicU64,
}

impl Fake {
    fn new(fault: Fault) -> Self {
        let (clock, sent) = (AtomicU64::new(0), AtomicU64::new(0));
        Self { fault, clock, taken: Mutex::new([[0; INTERRUPTS]; CPUS]), to: Mutex::new([1, 1]), sent }
    }

    fn taken(&self) -> MutexGuard<'_, [[u64; INTERRUPTS]; CPUS]> {
        self.taken.lock().unwrap()
    }

    /// The device interrupts for its queue 1.
    fn send(&self) {
        let number = self.sent.fetch_add(1, Relaxed) + 1;
        let [to, before] = *self.to.lock().unwrap();
        if self.fault != Fault::Loses(number) {
            self.taken()[to][FIRST as usize + 2] += 1;
        }
        if self.fault == Fault::ComesTwice(number) {
            self.taken()[before][FIRST as usize + 2] += 1;
        }
    }
}

impl Platform for Fake {
    fn mmio_read32(&self, _: u64) -> u32 {
        0
    }
    fn mmio_write32(&self, _: u64, _: u32) {}
    fn mmio_read16(&self, _: u64) -> u16 {
        0
    }
    fn mmio_read8(&self, _: u64) -> u8 {
        0
    }
    fn mmio_write16(&self, _: u64, _: u16) {}
    fn mmio_write8(&self, _: u64, _: u8) {}
    fn ram(&self, _: u64, _: usize) -> Option<DmaArea> {
        None
    }
    fn now_ns(&self) -> u64 {
        self.clock.fetch_add(100_000_000, Relaxed) + 1
    }
    fn interrupts(&self, cpu: usize) -> u64 {
        self.taken()[cpu].iter().sum()
    }
    fn interrupts_on(&self, cpu: usize, number: u32) -> u64 {
        self.taken()[cpu][number as usize]
    }
    fn enable_line(&self, _: u32, _: usize) {}
    fn interrupt(&self, cpu: usize, number: u32) {
        if self.fault != Fault::NoFences {
            self.taken()[cpu][number as usize] += 1;
        }
    }
    fn on_each_cpu<W: Send>(&self, _: &mut [W], _: &(dyn Fn(usize, &mut W) + Sync)) {}
    fn wait(&self, _: usize, _: u64) {}
    fn relax(&self) {}
    fn crash(&self) -> ! {
        panic!()
    }
}

impl Interrupts for &Fake {
    fn enable_interrupts(&mut self) -> bool {
        self.fault == Fault::NeverIdle
    }
    fn disable_interrupts(&mut self) {}
    fn interrupt(&mut self) -> Result<u32, DriverError> {
        Ok(0)
    }
    fn set_message(&self, number: u16, message: Message) -> Result<(), DriverError> {
        if self.fault == Fault::Refuses {
            return Err(DriverError::Message(number.into()));
        }
        let cpu = (0..CPUS).find(|&cpu| message.address == message_address(cpu as u32)).unwrap();
        assert_eq!((number, message.data), (2, u32::from(IRQ_VECTOR_BASE) + FIRST + 2), "queue 1's alone");
        let mut to = self.to.lock().unwrap();
        *to = [cpu, to[0]];
        Ok(())
    }
}

fn console(fake: &Fake) -> Console<'_, Fake> {
    let words = Box::leak(Box::new([0_u64; MEMORY.div_ceil(8)]));
    // SAFETY: the array was leaked, so it stays mapped and no reference to it is left.
    let area = unsafe { Area::new(NonNull::new(words.as_mut_ptr().cast()).unwrap(), MEMORY) };
    Console::new(fake, DmaArea { area, addr: 0x1000 })
}

/// Moves the message of queue 1, which processor 1 works on, with a request after each move.
fn moved(fault: Fault, moves: u32) -> Result<(u32, usize), Failure> {
    let fake = Fake::new(fault);
    let info = BootInfo { completion: completion::INTERRUPT, cpus: CPUS as u32, ..BootInfo::new_zeroed() };
    let shared = Shared::new(&fake, console(&fake), &info, [[1, 1]; CPUS].into_iter());
    let entry = DeviceEntry {
        job: job::WRITE_TEST,
        queues: 2,
        messages: FIRST,
        message_count: 3,
        ..DeviceEntry::default()
    };
    let (mut mover, mut count) = (Mover::new(&entry, 1, 1, moves), 0);
    for _ in 0..10_000 {
        if !mover.is_active() {
            break;
        }
        count += u32::from(mover.after(&mut &fake, 0, 1, &shared)?);
        fake.send();
        count += u32::from(mover.after(&mut &fake, 1, 1, &shared)?);
    }
    assert!(!mover.is_active());
    let at = fake.to.lock().unwrap()[0];
    Ok((count, at))
}

#[test]
fn messages_move_as_often_as_they_are_to_and_end_at_home() {
    for moves in [1, 2, 7, 1000] {
        assert_eq!(moved(Fault::None, moves), Ok((moves, 1)));
    }
}

#[test]
fn each_fault_of_a_move_is_found_and_ends_the_work() {
    for (fault, reason) in [
        (Fault::Loses(1), "an interrupt was lost"),
        (Fault::Loses(70), "an interrupt was lost"),
        (Fault::ComesTwice(1), "an interrupt came to the processor that it was moved away from"),
        (Fault::ComesTwice(70), "an interrupt came to the processor that it was moved away from"),
        (Fault::NoFences, "a processor takes no interrupts"),
        (Fault::NeverIdle, "interrupts are never awaited, and cannot be moved"),
    ] {
        let found = moved(fault, 100).unwrap_err();
        assert_eq!(found.reason, reason, "{fault:?}");
    }
    assert!(moved(Fault::Refuses, 1).is_err());
}

#[test]
fn a_fence_is_one_processors_at_a_time() {
    let fake = Fake::new(Fault::None);
    let shared = Shared::new(&fake, console(&fake), &BootInfo::new_zeroed(), [[1, 1]; 2].into_iter());
    assert!(shared.begin_fence(0) && !shared.begin_fence(0) && shared.begin_fence(1));
    shared.end_fence(0);
    let again: Vec<_> = (0..2).map(|_| shared.begin_fence(0)).collect();
    assert_eq!(again, [true, false]);
}
