//! Messages on a real KVM, as its local APIC receives them.
//!
//! No guest runs: delivered messages are read from the interrupt request register, and cleared
//! there. Skipped with a message where there is no KVM.
#![cfg(all(target_arch = "x86_64", not(loom)))]
mod machine;

use kvm_ioctls::VcpuFd;
use machine::vm;
use paravane_notify::msi::{MsiController, MsiMessage, MsiTable};
use paravane_notify::{KvmMsi, KvmMsiDelivery, KvmRoutes, NotifyError};
use paravane_test_support::{apic_vector, patience};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const DELIVERIES: [KvmMsiDelivery; 2] = [KvmMsiDelivery::Irqfd, KvmMsiDelivery::Signal];
/// Spurious-interrupt vector register of the local APIC: bit 8 turns the APIC on.
const SPURIOUS: usize = 0xf0;
/// The first of eight interrupt request registers, 16 bytes apart.
const REQUESTS: usize = 0x200;

struct Machine {
    routes: Arc<KvmRoutes>,
    vcpu: VcpuFd,
}

impl Machine {
    /// Makes a VM with an enabled local APIC; or reports why there is none.
    fn new(test: &str) -> Option<Self> {
        let (_kvm, vm) = vm(test)?;
        vm.create_irq_chip().expect("an interrupt controller");
        let vcpu = vm.create_vcpu(0).expect("a vCPU");
        let machine = Self {
            routes: Arc::new(
                KvmRoutes::new(Arc::new(vm), Vec::new(), |message| apic_vector(message).is_some())
                    .expect("no routes"),
            ),
            vcpu,
        };
        machine.change(|registers| registers[SPURIOUS..SPURIOUS + 4].copy_from_slice(&[-1, 1, 0, 0]));
        Some(machine)
    }

    fn msi(&self, delivery: KvmMsiDelivery) -> KvmMsi {
        KvmMsi::new(Arc::clone(&self.routes), delivery)
    }

    fn change(&self, change: impl FnOnce(&mut [i8; 1024])) {
        let mut lapic = self.vcpu.get_lapic().expect("the local APIC");
        change(&mut lapic.regs);
        self.vcpu.set_lapic(&lapic).expect("the local APIC");
    }

    /// Requested vectors.
    fn requested(&self) -> Vec<u8> {
        let lapic = self.vcpu.get_lapic().expect("the local APIC");
        let set = |&vector: &u8| {
            let byte = lapic.regs[REQUESTS + usize::from(vector / 32) * 16 + usize::from(vector % 32 / 8)];
            byte.cast_unsigned() & (1 << (vector % 8)) != 0
        };
        (0..=u8::MAX).filter(set).collect()
    }

    /// Clears all requests.
    fn acknowledge(&self) {
        self.change(|registers| registers[REQUESTS..REQUESTS + 0x80].fill(0));
    }

    /// KVM may deliver from another thread.
    fn comes(&self, vector: u8) -> bool {
        let start = Instant::now();
        while start.elapsed() < patience() {
            if self.requested().contains(&vector) {
                return true;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        false
    }
}

fn to(vector: u8) -> MsiMessage {
    MsiMessage { address: 0xfee0_0000, data: vector.into(), device: 0 }
}

/// `count` vectors and queues, queue n on vector n.
fn table(machine: &Machine, delivery: KvmMsiDelivery, count: u16) -> MsiTable {
    let table = MsiTable::new(&machine.msi(delivery), count, count.into()).expect("vectors");
    for n in 0..count {
        table.map_queue(n, n);
    }
    table
}

#[test]
fn a_message_reaches_its_vector() {
    let Some(machine) = Machine::new("a_message_reaches_its_vector") else { return };
    for delivery in DELIVERIES {
        let table = table(&machine, delivery, 2);
        table.set_message(0, to(0x61)).expect("a route");
        table.set_message(1, to(0x62)).expect("another route");
        table.queue(1);
        assert!(machine.comes(0x62), "{delivery:?}");
        table.queue(0);
        assert!(machine.comes(0x61), "{delivery:?}");
        assert_eq!(machine.requested(), [0x61, 0x62]);
        machine.acknowledge();
    }
}

#[test]
fn a_masked_message_waits() {
    let Some(machine) = Machine::new("a_masked_message_waits") else { return };
    for delivery in DELIVERIES {
        let table = table(&machine, delivery, 1);
        table.set_message(0, to(0x71)).expect("a route");
        table.mask(0);
        table.queue(0);
        std::thread::sleep(Duration::from_millis(5));
        assert_eq!(machine.requested(), []);
        table.unmask(0);
        assert!(machine.comes(0x71), "{delivery:?}");
        machine.acknowledge();
    }
}

#[test]
fn what_is_no_interrupt_is_refused() {
    let Some(machine) = Machine::new("what_is_no_interrupt_is_refused") else { return };
    for delivery in DELIVERIES {
        let table = table(&machine, delivery, 1);
        for address in [0, 0x1000, 0xfed0_0000, 0x1_fee0_0000, u64::MAX] {
            let refused = table.set_message(0, MsiMessage { address, data: 0x41, device: 0 });
            assert!(matches!(refused, Err(NotifyError::Message { .. })), "{address:#x}: {refused:?}");
        }
        table.queue(0);
        assert_eq!(machine.requested(), []);
    }
}

#[test]
fn routes_of_devices_that_come_and_go_do_not_touch_one_another() {
    let Some(machine) = Machine::new("routes_of_devices_that_come_and_go_do_not_touch_one_another") else {
        return;
    };
    let staying = table(&machine, KvmMsiDelivery::Irqfd, 2);
    staying.set_message(1, to(0x51)).expect("a route");
    for round in 0..50_u8 {
        let going = table(&machine, KvmMsiDelivery::Irqfd, 3);
        going.set_message(2, to(0x80 + round)).expect("a route");
        going.queue(2);
        assert!(machine.comes(0x80 + round));
        drop(going);
        machine.acknowledge();
        staying.queue(1);
        assert!(machine.comes(0x51));
        assert_eq!(machine.requested(), [0x51]);
        machine.acknowledge();
    }
}

/// The affinity change: a thread fires while the message is rewritten.
///
/// Once the change has returned, nothing may arrive at the old vector; the new one gets the next
/// interrupt; no third vector gets any.
#[test]
fn nothing_goes_astray_while_the_message_changes() {
    let Some(machine) = Machine::new("nothing_goes_astray_while_the_message_changes") else { return };
    const CHANGES: u8 = 150;
    for delivery in DELIVERIES {
        let table = Arc::new(table(&machine, delivery, 1));
        let vector = |n: u8| 0x40 + n;
        table.set_message(0, to(vector(0))).expect("a route");
        let done = Arc::new(AtomicBool::new(false));
        let device = {
            let (table, done) = (Arc::clone(&table), Arc::clone(&done));
            std::thread::spawn(move || {
                while !done.load(Ordering::Relaxed) {
                    table.queue(0);
                }
            })
        };
        for n in 1..CHANGES {
            table.set_message(0, to(vector(n))).expect("a route");
            // What was sent to the old vector was sent before the change returned.
            machine.acknowledge();
            assert!(machine.comes(vector(n)), "{delivery:?}: lost at change {n}");
            assert_eq!(machine.requested(), [vector(n)], "{delivery:?}: astray at change {n}");
        }
        done.store(true, Ordering::Relaxed);
        device.join().expect("the device's thread");
        // A change while masked: the pending interrupt goes to the new message.
        table.mask(0);
        table.queue(0);
        table.set_message(0, to(0xe0)).expect("a route");
        machine.acknowledge();
        table.unmask(0);
        assert!(machine.comes(0xe0), "{delivery:?}");
        assert_eq!(machine.requested(), [0xe0]);
        machine.acknowledge();
    }
}

#[test]
fn each_vector_has_its_route() {
    let Some(machine) = Machine::new("each_vector_has_its_route") else { return };
    let msi = machine.msi(KvmMsiDelivery::Irqfd);
    let some: Vec<_> = (0..64).map(|_| msi.sink().expect("a vector")).collect();
    for (n, sink) in (0..).zip(&some) {
        sink.route(to(0x60 + n)).expect("a route");
    }
    some[7].fire(to(0x67));
    assert!(machine.comes(0x67));
    assert_eq!(machine.requested(), [0x67]);
}
