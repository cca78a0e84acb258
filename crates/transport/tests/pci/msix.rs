//! MSI-X: destination and time of each interrupt.
use crate::rig::{OFFERED, RUNNING, Rig, VECTORS};
use paravane_spec::pci::{NO_VECTOR, cap, capability, command, common as reg, header, msix};
use paravane_transport::{Effect, Transport};

const TABLE: u64 = 0x8000;
const PENDING: u64 = 0x3000;
const APIC: u64 = 0xfee0_0000;

impl Rig {
    fn control(&mut self) -> u16 {
        self.capability(|[id, ..]| id == capability::MSIX).unwrap() + msix::CONTROL
    }

    fn enable(&mut self, bits: u16) {
        let at = self.control();
        self.config_write(at, 2, bits.into());
    }

    fn bus_master(&mut self, on: bool) {
        self.config_write(header::COMMAND, 2, if on { command::BUS_MASTER.into() } else { 0 });
    }

    fn entry(&mut self, vector: u64, address: u64, data: u32, masked: bool) {
        let at = TABLE + vector * msix::ENTRY;
        self.write(at, 4, address);
        self.write(at + msix::ADDRESS_HIGH, 4, address >> 32);
        self.write(at + msix::DATA, 4, data.into());
        self.write(at + msix::VECTOR_CONTROL, 4, masked.into());
    }

    fn mask(&mut self, vector: u64, masked: bool) {
        self.write(TABLE + vector * msix::ENTRY + msix::VECTOR_CONTROL, 4, masked.into());
    }

    fn pending(&mut self) -> u64 {
        self.read(PENDING, 8)
    }

    /// Running by messages: queue 0 sends 0x40, the configuration 0x41.
    fn by_messages() -> Self {
        let mut rig = Self::negotiated();
        rig.bus_master(true);
        rig.enable(msix::ENABLE | msix::FUNCTION_MASK);
        rig.entry(0, APIC, 0x40, false);
        rig.entry(1, APIC, 0x41, false);
        rig.enable(msix::ENABLE);
        rig.quiet(reg::CONFIG_MSIX_VECTOR, 2, 1);
        rig.quiet(reg::QUEUE_SELECT, 2, 0);
        rig.quiet(reg::QUEUE_MSIX_VECTOR, 2, 0);
        rig.start();
        rig
    }
}

#[test]
fn the_capability_names_table_and_pending_bits() {
    let mut rig = Rig::new();
    let control = rig.control();
    let at = control - msix::CONTROL;
    assert_eq!(rig.config_read(control, 2), u64::from(VECTORS) - 1);
    assert_eq!(rig.config_read(at + msix::TABLE, 4), TABLE);
    assert_eq!(rig.config_read(at + msix::PBA, 4), PENDING);
    for vector in 0..u64::from(VECTORS) {
        let control = TABLE + vector * msix::ENTRY + msix::VECTOR_CONTROL;
        assert_eq!(rig.read(control, 4), 1, "masked after a reset");
    }
}

#[test]
fn without_messages_there_is_no_capability() {
    let mut rig = Rig::wired();
    assert_eq!(rig.capability(|[id, ..]| id == capability::MSIX), None);
    rig.quiet(reg::CONFIG_MSIX_VECTOR, 2, 0);
    assert_eq!(rig.read(reg::CONFIG_MSIX_VECTOR, 2), NO_VECTOR.into());
    assert_eq!(rig.read(reg::QUEUE_MSIX_VECTOR, 2), NO_VECTOR.into());
    rig.refused(TABLE, 4, 0);
    rig.negotiate(OFFERED);
    rig.start();
    rig.interrupts.used_buffer(0);
    assert_eq!(rig.edges(), 1);
}

#[test]
fn vectors_that_do_not_exist_read_back_as_none() {
    let mut rig = Rig::new();
    for (vector, got) in [(0, 0), (3, 3), (4, NO_VECTOR), (0x7ff, NO_VECTOR), (NO_VECTOR, NO_VECTOR)] {
        rig.quiet(reg::CONFIG_MSIX_VECTOR, 2, vector.into());
        assert_eq!(rig.read(reg::CONFIG_MSIX_VECTOR, 2), got.into());
        rig.quiet(reg::QUEUE_MSIX_VECTOR, 2, vector.into());
        assert_eq!(rig.read(reg::QUEUE_MSIX_VECTOR, 2), got.into());
    }
    rig.quiet(reg::QUEUE_SELECT, 2, 7);
    rig.refused(reg::QUEUE_MSIX_VECTOR, 2, 0);
    assert_eq!(rig.read(reg::QUEUE_MSIX_VECTOR, 2), NO_VECTOR.into());
}

#[test]
fn each_source_sends_its_message_and_the_isr_stays_0() {
    let mut rig = Rig::by_messages();
    rig.interrupts.used_buffer(0);
    assert_eq!(rig.sent(), [0x40]);
    rig.pci.config_changed();
    assert_eq!(rig.sent(), [0x41]);
    // Queue 1 has no vector.
    rig.interrupts.used_buffer(1);
    assert_eq!((rig.sent(), rig.edges()), (vec![], 0));
    let (isr, _) = rig.region(cap::ISR);
    assert_eq!(rig.read(isr, 1), 0);
}

#[test]
fn what_comes_while_masked_is_pending_and_sent_once() {
    let mut rig = Rig::by_messages();
    rig.mask(0, true);
    rig.interrupts.used_buffer(0);
    rig.interrupts.used_buffer(0);
    assert_eq!((rig.pending(), rig.sent()), (1, vec![]));
    rig.mask(0, false);
    assert_eq!((rig.pending(), rig.sent()), (0, vec![0x40]));
}

#[test]
fn the_function_mask_and_bus_mastering_hold_all_back() {
    for by_command in [false, true] {
        let mut rig = Rig::by_messages();
        if by_command {
            rig.bus_master(false);
        } else {
            rig.enable(msix::ENABLE | msix::FUNCTION_MASK);
        }
        rig.interrupts.used_buffer(0);
        rig.pci.config_changed();
        rig.mask(1, true);
        assert_eq!((rig.pending(), rig.sent()), (3, vec![]));
        rig.bus_master(true);
        rig.enable(msix::ENABLE);
        assert_eq!((rig.pending(), rig.sent()), (2, vec![0x40]));
        rig.mask(1, false);
        assert_eq!((rig.pending(), rig.sent()), (0, vec![0x41]));
    }
}

#[test]
fn a_message_changed_under_the_mask_goes_to_the_new_place_only() {
    let mut rig = Rig::by_messages();
    rig.mask(0, true);
    rig.interrupts.used_buffer(0);
    rig.entry(0, APIC | 1 << 12, 0x52, true);
    assert_eq!(rig.sent(), []);
    rig.mask(0, false);
    assert_eq!(rig.sent(), [0x52]);
    assert_eq!(rig.read(TABLE, 8), APIC | 1 << 12);
    assert_eq!(rig.read(TABLE + msix::DATA, 8), 0x52);
}

#[test]
fn a_message_that_is_no_interrupt_sends_nothing_until_there_is_one() {
    let mut rig = Rig::by_messages();
    rig.entry(0, 0x1234_5678, 0x40, false);
    rig.interrupts.used_buffer(0);
    assert_eq!(rig.sent(), []);
    rig.entry(0, APIC, 0x43, false);
    rig.interrupts.used_buffer(0);
    assert_eq!(rig.sent(), [0x43]);
}

#[test]
fn turned_off_it_is_the_line_again() {
    let mut rig = Rig::by_messages();
    rig.enable(0);
    rig.interrupts.used_buffer(0);
    assert_eq!((rig.sent(), rig.edges()), (vec![], 1));
    let (isr, _) = rig.region(cap::ISR);
    assert_eq!(rig.read(isr, 1), 1);
}

#[test]
fn a_disabled_line_is_silent_and_makes_up_for_it() {
    let mut rig = Rig::running();
    let (isr, _) = rig.region(cap::ISR);
    rig.config_write(header::COMMAND, 2, command::INTX_DISABLE.into());
    rig.interrupts.used_buffer(0);
    assert_eq!(rig.edges(), 0);
    rig.config_write(header::COMMAND, 2, 0);
    assert_eq!(rig.edges(), 1);
    assert_eq!(rig.read(isr, 1), 1);
    rig.config_write(header::COMMAND, 2, command::INTX_DISABLE.into());
    rig.config_write(header::COMMAND, 2, 0);
    assert_eq!(rig.edges(), 1);
}

#[test]
fn a_reset_of_the_device_unmaps_and_forgets_what_is_pending() {
    let mut rig = Rig::by_messages();
    rig.mask(1, true);
    rig.pci.config_changed();
    assert_eq!(rig.pending(), 2);
    assert_eq!(rig.write(reg::DEVICE_STATUS, 1, 0), Some(Effect::Reset));
    rig.pci.reset_done();
    assert_eq!(rig.pending(), 0);
    assert_eq!(rig.read(reg::CONFIG_MSIX_VECTOR, 2), NO_VECTOR.into());
    assert_eq!(rig.read(reg::QUEUE_MSIX_VECTOR, 2), NO_VECTOR.into());
    rig.mask(1, false);
    assert_eq!(rig.sent(), []);
    // The table belongs to PCI: it needs no second set-up.
    let control = rig.control();
    assert_eq!(rig.config_read(control, 2) as u16 & msix::ENABLE, msix::ENABLE);
    rig.negotiate(OFFERED);
    rig.quiet(reg::QUEUE_SELECT, 2, 0);
    rig.quiet(reg::QUEUE_MSIX_VECTOR, 2, 0);
    rig.start();
    assert_eq!(rig.status(), RUNNING);
    rig.interrupts.used_buffer(0);
    assert_eq!(rig.sent(), [0x40]);
}

#[test]
fn a_reset_of_a_queue_unmaps_it_and_no_other() {
    let mut rig = Rig::by_messages();
    assert_eq!(rig.write(reg::QUEUE_RESET, 2, 1), Some(Effect::ResetQueue { queue: 0 }));
    assert_eq!(rig.read(reg::QUEUE_MSIX_VECTOR, 2), 0);
    rig.pci.queue_reset_done(0);
    assert_eq!(rig.read(reg::QUEUE_MSIX_VECTOR, 2), NO_VECTOR.into());
    assert_eq!(rig.read(reg::CONFIG_MSIX_VECTOR, 2), 1);
    // One that is not live is reset at once.
    rig.quiet(reg::QUEUE_MSIX_VECTOR, 2, 3);
    rig.quiet(reg::QUEUE_RESET, 2, 1);
    assert_eq!(rig.read(reg::QUEUE_MSIX_VECTOR, 2), NO_VECTOR.into());
}
