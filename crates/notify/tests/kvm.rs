//! ioeventfd and irqfd on a real KVM. Skipped with a message where there is none.
#![cfg(all(target_arch = "x86_64", not(loom)))]
mod machine;

use kvm_bindings::{KVM_IRQCHIP_PIC_MASTER, kvm_irqchip};
use kvm_ioctls::{VcpuExit, VmFd};
use machine::{Page, vm};
use paravane_notify::{
    HostNotifier, InterruptLine, InterruptSink, IoEventFds, KvmIoEventFds, KvmIrqfd, Notifier, NotifierState,
    NotifyError,
};
use paravane_test_support::patience;
use std::sync::Arc;
use std::time::{Duration, Instant};

const NOTIFY: u64 = 0xd000_0050;

fn errno(result: Result<(), NotifyError>) -> Option<i32> {
    match result {
        Err(NotifyError::Os { source, .. }) => source.raw_os_error(),
        other => panic!("expected an error of the host, got {other:?}"),
    }
}

#[test]
fn an_ioeventfd_is_registered_once() {
    let Some((_kvm, vm)) = vm("an_ioeventfd_is_registered_once") else { return };
    let fds: Arc<dyn IoEventFds> = Arc::new(KvmIoEventFds::new(Arc::new(vm)));
    let first = HostNotifier::new(Arc::clone(&fds), NOTIFY, Some(0)).expect("an eventfd");
    first.assign().expect("KVM takes it");
    let second = HostNotifier::new(Arc::clone(&fds), NOTIFY, Some(0)).expect("an eventfd");
    assert_eq!(errno(second.assign()), Some(libc::EEXIST));
    assert_eq!(second.state(), NotifierState::Deassigned);
    second.kick();
    assert_eq!(second.notifier().take(), 3, "birth, start, kick");

    let other_queue = HostNotifier::new(Arc::clone(&fds), NOTIFY, Some(1)).expect("an eventfd");
    other_queue.assign().expect("another value at the same address");
    first.deassign().expect("KVM lets go");
    second.assign().expect("the value is free again");
    drop(second);
    first.assign().expect("and again");
}

#[test]
fn an_ioeventfd_that_is_not_there_cannot_be_removed() {
    let Some((_kvm, vm)) = vm("an_ioeventfd_that_is_not_there_cannot_be_removed") else { return };
    let fds = KvmIoEventFds::new(Arc::new(vm));
    let notifier = Notifier::new(false).expect("an eventfd");
    assert_eq!(errno(fds.deassign(NOTIFY, Some(0), &notifier)), Some(libc::ENOENT));
    fds.assign(NOTIFY, None, &notifier).expect("any value");
    assert_eq!(errno(fds.deassign(NOTIFY, Some(0), &notifier)), Some(libc::ENOENT), "another match");
    fds.deassign(NOTIFY, None, &notifier).expect("this one");
}

#[test]
fn an_irqfd_needs_an_interrupt_controller() {
    let Some((_kvm, vm)) = vm("an_irqfd_needs_an_interrupt_controller") else { return };
    assert!(matches!(KvmIrqfd::new(&vm, 5), Err(NotifyError::Os { .. })));
}

const LINE: u32 = 5;

/// Whether the edge of the line reaches the interrupt controller.
///
/// KVM may deliver it from another thread.
fn comes(vm: &VmFd) -> bool {
    let start = Instant::now();
    while start.elapsed() < patience() {
        if pending(vm) {
            return true;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    false
}

fn pending(vm: &VmFd) -> bool {
    let mut chip = kvm_irqchip { chip_id: KVM_IRQCHIP_PIC_MASTER, ..Default::default() };
    vm.get_irqchip(&mut chip).expect("the state of the PIC");
    // SAFETY: the requested chip is a PIC, so that KVM has filled in this variant.
    unsafe { chip.chip.pic.irr & (1 << LINE) != 0 }
}

#[test]
fn an_irqfd_raises_its_line() {
    let Some((_kvm, vm)) = vm("an_irqfd_raises_its_line") else { return };
    vm.create_irq_chip().expect("an interrupt controller");
    let line = InterruptLine::new(Arc::new(KvmIrqfd::new(&vm, LINE).expect("an irqfd")));
    assert!(!pending(&vm));
    line.raise(1);
    assert!(comes(&vm), "the interrupt did not come");
}

#[test]
fn devices_that_share_a_line_come_and_go_alone() {
    let Some((_kvm, vm)) = vm("devices_that_share_a_line_come_and_go_alone") else { return };
    vm.create_irq_chip().expect("an interrupt controller");
    let one = KvmIrqfd::new(&vm, LINE).expect("an irqfd");
    let two = KvmIrqfd::new(&vm, LINE).expect("another on the same line");
    drop(one);
    assert!(!pending(&vm));
    two.raise();
    assert!(comes(&vm), "the interrupt did not come");
}

/// Real mode, with the data segment at the device's page.
///
/// Writes 0 (twice), then 1 to the notification address, then reports by port 0x10 that it is done.
const GUEST: &[u8] = &[
    0x66, 0x31, 0xc0, // xor eax, eax
    0x66, 0xa3, 0x50, 0x00, // mov [0x50], eax
    0x66, 0xa3, 0x50, 0x00, // mov [0x50], eax
    0x66, 0x40, // inc eax
    0x66, 0xa3, 0x50, 0x00, // mov [0x50], eax
    0xe6, 0x10, // out 0x10, al
];

/// Runs the guest. Returns the values of the notifications that exited.
fn run(vm: &VmFd, page: &Page, mut exited: impl FnMut(u32)) {
    page.map(vm, 0x1000);
    let mut vcpu = vm.create_vcpu(0).expect("a vCPU");
    let mut sregs = vcpu.get_sregs().expect("registers");
    sregs.cs.base = 0;
    sregs.cs.selector = 0;
    sregs.ds.base = NOTIFY & !0xfff;
    vcpu.set_sregs(&sregs).expect("registers");
    let mut regs = vcpu.get_regs().expect("registers");
    (regs.rip, regs.rflags) = (0x1000, 2);
    vcpu.set_regs(&regs).expect("registers");
    for _ in 0..100 {
        match vcpu.run().expect("the guest runs") {
            VcpuExit::MmioWrite(addr, data) => {
                assert_eq!(addr, NOTIFY);
                exited(u32::from_le_bytes(data.try_into().expect("4 bytes")));
            }
            VcpuExit::IoOut(0x10, _) => return,
            other => panic!("unexpected exit {other:?}"),
        }
    }
    panic!("the guest does not end");
}

#[test]
fn a_guest_write_signals_without_an_exit() {
    let Some((_kvm, vm)) = vm("a_guest_write_signals_without_an_exit") else { return };
    let page = Page::with(GUEST);
    let vm = Arc::new(vm);
    let fds: Arc<dyn IoEventFds> = Arc::new(KvmIoEventFds::new(Arc::clone(&vm)));
    let zero = HostNotifier::new(Arc::clone(&fds), NOTIFY, Some(0)).expect("an eventfd");
    let one = HostNotifier::new(fds, NOTIFY, Some(1)).expect("an eventfd");
    zero.assign().expect("KVM takes it");
    assert_ne!(zero.notifier().take() + one.notifier().take(), 0, "from birth and start");
    run(&vm, &page, |value| {
        assert_eq!(value, 1, "the other value does not exit");
        one.kick();
    });
    assert_eq!((zero.notifier().take(), zero.exit_kicks()), (2, 0));
    assert_eq!((one.notifier().take(), one.exit_kicks()), (1, 1));
}

#[test]
fn without_a_match_every_value_signals() {
    let Some((_kvm, vm)) = vm("without_a_match_every_value_signals") else { return };
    let page = Page::with(GUEST);
    let vm = Arc::new(vm);
    let queue =
        HostNotifier::new(Arc::new(KvmIoEventFds::new(Arc::clone(&vm))), NOTIFY, None).expect("an eventfd");
    queue.assign().expect("KVM takes it");
    assert_ne!(queue.notifier().take(), 0, "from birth and start");
    run(&vm, &page, |value| panic!("{value} exited"));
    assert_eq!(queue.notifier().take(), 3);
}

#[test]
fn after_removal_writes_exit_again() {
    let Some((_kvm, vm)) = vm("after_removal_writes_exit_again") else { return };
    let page = Page::with(GUEST);
    let vm = Arc::new(vm);
    let queue = HostNotifier::new(Arc::new(KvmIoEventFds::new(Arc::clone(&vm))), NOTIFY, Some(0))
        .expect("an eventfd");
    queue.assign().expect("KVM takes it");
    queue.deassign().expect("KVM lets go");
    assert_ne!(queue.notifier().take(), 0, "from birth and start");
    run(&vm, &page, |value| {
        if value == 0 {
            queue.kick();
        }
    });
    assert_eq!((queue.notifier().take(), queue.exit_kicks()), (2, 2));
}
