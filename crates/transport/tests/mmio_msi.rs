//! The extension of docs/reference/virtio-mmio-msi.md.
//!
//! Notification addresses and messages.
mod rig;

use paravane_spec::mmio_msi::{
    F_MSI, F_NOTIFICATION, MSI_ADDRESS_HIGH, MSI_ADDRESS_LOW, MSI_COMMAND, MSI_DATA, MSI_LIMIT, MSI_STATE,
    NOTIFY_BASE, NOTIFY_MULTIPLIER, NOTIFY_PAGE, SELECT_CONFIGURATION, command, state,
};
use paravane_spec::{feature, mmio as reg, status};
use paravane_transport::{AccessKind, Effect, NotifyAddress, Transport};
use rig::{OFFERED, Platform, RUNNING, Rig, addresses};

const EXTENDED: u64 = OFFERED | F_MSI | F_NOTIFICATION;
const REGISTERS: [u64; 8] = [
    NOTIFY_BASE,
    NOTIFY_MULTIPLIER,
    MSI_LIMIT,
    MSI_ADDRESS_LOW,
    MSI_ADDRESS_HIGH,
    MSI_DATA,
    MSI_COMMAND,
    MSI_STATE,
];

/// Negotiated, with everything accepted.
fn extended() -> (Rig, Platform) {
    let (mut rig, platform) = Rig::with_messages(EXTENDED);
    rig.negotiate(EXTENDED);
    assert_eq!(rig.status(), rig::NEGOTIATED);
    (rig, platform)
}

/// A running device with messages.
///
/// 0x40 for queue 0, 0x41 for queue 1 and 0x42 for the configuration change.
fn running() -> (Rig, Platform) {
    let (mut rig, platform) = extended();
    rig.quiet(MSI_COMMAND, command::ENABLE);
    for (source, vector) in [(0, 0x40), (1, 0x41), (SELECT_CONFIGURATION, 0x42)] {
        configure(&mut rig, source, vector);
        assert_eq!(rig.read(MSI_STATE), state::ON | state::CONFIGURED);
    }
    for queue in 0..2 {
        rig.set_up(queue, &addresses(64));
        rig.quiet(reg::QUEUE_READY, 1);
    }
    assert!(matches!(rig.write(reg::STATUS, RUNNING), Some(Effect::Activate { features: EXTENDED, .. })));
    (rig, platform)
}

fn stage(rig: &mut Rig, data: u32) {
    rig.quiet(MSI_ADDRESS_LOW, 0xfee0_0000);
    rig.quiet(MSI_ADDRESS_HIGH, 0);
    rig.quiet(MSI_DATA, data);
}

fn configure(rig: &mut Rig, source: u32, data: u32) {
    rig.quiet(reg::QUEUE_SEL, source);
    stage(rig, data);
    rig.quiet(MSI_COMMAND, command::CONFIGURE);
}

#[test]
fn a_driver_that_does_not_accept_the_bits_sees_a_plain_device() {
    let (mut rig, platform) = Rig::with_messages(EXTENDED);
    rig.negotiate(OFFERED);
    assert_eq!(rig.read(reg::VERSION), reg::VERSION_2);
    rig.set_up(0, &addresses(256));
    rig.quiet(reg::QUEUE_READY, 1);
    assert!(rig.write(reg::STATUS, RUNNING).is_some());
    for offset in REGISTERS {
        rig.refused(offset, 1);
        rig.unreadable(offset);
    }
    rig.refused(NOTIFY_PAGE, 0);
    assert_eq!(rig.write(reg::QUEUE_NOTIFY, 0), Some(Effect::Notify { queue: 0 }));
    assert_eq!(
        rig.mmio.notify_address(0),
        Some(NotifyAddress { offset: reg::QUEUE_NOTIFY, datamatch: Some(0) })
    );
    rig.interrupts.used_buffer(0);
    assert_eq!((rig.read(reg::INTERRUPT_STATUS), platform.delivered()), (reg::INT_USED_BUFFER, vec![]));
}

#[test]
fn each_half_is_there_alone() {
    for (accepted, there) in [(F_NOTIFICATION, &REGISTERS[..2]), (F_MSI, &REGISTERS[2..])] {
        let (mut rig, _) = Rig::with_messages(EXTENDED);
        rig.negotiate(OFFERED | accepted);
        for offset in REGISTERS {
            let before = rig.mmio.violations();
            rig.read(offset);
            let readable = matches!(offset, NOTIFY_BASE | NOTIFY_MULTIPLIER | MSI_LIMIT | MSI_STATE);
            let expected = u64::from(!readable || !there.contains(&offset));
            assert_eq!(rig.mmio.violations() - before, expected, "{offset:#x} with {accepted:#x}");
        }
        rig.refused(NOTIFY_BASE, 0);
        rig.refused(MSI_LIMIT, 0);
        rig.refused(MSI_STATE, 0);
    }
}

#[test]
fn messages_are_not_offered_where_there_are_none() {
    let mut rig = Rig::offering(EXTENDED);
    rig.write(reg::DEVICE_FEATURES_SEL, 1);
    let offered = u64::from(rig.read(reg::DEVICE_FEATURES)) << 32;
    assert_eq!(offered & (F_MSI | F_NOTIFICATION), F_NOTIFICATION);
}

#[test]
fn the_address_of_a_notification_says_which_queue_it_is_for() {
    let (mut rig, _) = running();
    let (base, multiplier) = (rig.read(NOTIFY_BASE), rig.read(NOTIFY_MULTIPLIER));
    for queue in 0..2_u16 {
        let offset = u64::from(base + u32::from(queue) * multiplier);
        assert!(offset >= reg::WINDOW, "not in the registers' page");
        assert_eq!(rig.mmio.notify_address(queue), Some(NotifyAddress { offset, datamatch: None }));
        assert_eq!(rig.mmio.access(offset, true), AccessKind::Notify);
        for value in [0, 1, 0xffff_ffff] {
            assert_eq!(rig.write(offset, value), Some(Effect::Notify { queue }));
        }
        assert_eq!(rig.mmio.write(offset, &[0; 2]), Some(Effect::Notify { queue }));
        rig.unreadable(offset);
        // The register keeps working.
        assert_eq!(rig.write(reg::QUEUE_NOTIFY, queue.into()), Some(Effect::Notify { queue }));
    }
    for beside in [2 * u64::from(multiplier), 0x1000, 0xffff_fff0] {
        rig.refused(u64::from(base) + beside, 0);
    }
    let before = rig.mmio.violations();
    assert_eq!(rig.mmio.write(u64::from(base) + 1, &[0]), None);
    assert_eq!(rig.mmio.write(u64::from(base), &[]), None);
    assert_eq!(rig.mmio.violations(), before + 2);
}

#[test]
fn a_notification_address_works_with_notification_data() {
    let (mut rig, _) = Rig::with_messages(EXTENDED | feature::NOTIFICATION_DATA);
    rig.negotiate(EXTENDED | feature::NOTIFICATION_DATA);
    assert_eq!(rig.mmio.notify_address(1), Some(NotifyAddress { offset: NOTIFY_PAGE + 4, datamatch: None }));
    let (mut plain, _) = Rig::with_messages(OFFERED | feature::NOTIFICATION_DATA);
    plain.negotiate(OFFERED | feature::NOTIFICATION_DATA);
    assert_eq!(plain.mmio.notify_address(1), None, "what is written varies");
}

#[test]
fn each_source_sends_its_message_and_the_status_stays_zero() {
    let (mut rig, platform) = running();
    assert_eq!(rig.read(MSI_LIMIT), rig::QUEUE_SIZES.len() as u32 + 1);
    rig.interrupts.used_buffer(0);
    rig.interrupts.used_buffer(1);
    rig.mmio.config_changed();
    rig.mmio.needs_reset();
    assert_eq!(platform.delivered(), [0x40, 0x41, 0x42, 0x42]);
    assert_eq!(rig.read(reg::INTERRUPT_STATUS), 0);
    rig.quiet(reg::INTERRUPT_ACK, reg::INT_USED_BUFFER);
    assert!(platform.delivered().is_empty());
}

#[test]
fn a_message_takes_effect_at_the_command_and_not_before() {
    let (mut rig, platform) = running();
    rig.quiet(reg::QUEUE_SEL, 0);
    for (offset, value) in [(MSI_ADDRESS_LOW, 0xfee0_1000), (MSI_ADDRESS_HIGH, 0), (MSI_DATA, 0x77)] {
        rig.quiet(offset, value);
        rig.interrupts.used_buffer(0);
        assert_eq!(platform.delivered(), [0x40]);
    }
    rig.quiet(MSI_COMMAND, command::CONFIGURE);
    rig.interrupts.used_buffer(0);
    rig.interrupts.used_buffer(1);
    assert_eq!(platform.delivered(), [0x77, 0x41]);
    // Staged values stay: sources may share a message.
    rig.quiet(reg::QUEUE_SEL, 1);
    rig.quiet(MSI_COMMAND, command::CONFIGURE);
    rig.interrupts.used_buffer(1);
    assert_eq!(platform.delivered(), [0x77]);
}

#[test]
fn a_masked_source_is_pending_until_it_is_unmasked() {
    let (mut rig, platform) = running();
    for (source, vector) in [(1, 0x41), (SELECT_CONFIGURATION, 0x42)] {
        rig.quiet(reg::QUEUE_SEL, source);
        rig.quiet(MSI_COMMAND, command::MASK);
        assert_eq!(rig.read(MSI_STATE), state::ON | state::CONFIGURED | state::MASKED);
        rig.interrupts.used_buffer(1);
        rig.mmio.config_changed();
        platform.delivered();
        assert_eq!(rig.read(MSI_STATE), state::ON | state::CONFIGURED | state::MASKED | state::PENDING);
        rig.quiet(MSI_COMMAND, command::UNMASK);
        assert_eq!(
            (platform.delivered(), rig.read(MSI_STATE)),
            (vec![vector], state::ON | state::CONFIGURED)
        );
        rig.quiet(MSI_COMMAND, command::UNMASK);
        assert!(platform.delivered().is_empty());
    }
}

#[test]
fn a_source_may_have_no_message() {
    let (mut rig, platform) = running();
    rig.quiet(reg::QUEUE_SEL, 0);
    rig.quiet(MSI_COMMAND, command::MASK);
    rig.interrupts.used_buffer(0);
    rig.quiet(MSI_COMMAND, command::UNCONFIGURE);
    assert_eq!(rig.read(MSI_STATE), state::ON);
    rig.interrupts.used_buffer(0);
    configure(&mut rig, 0, 0x50);
    assert!(platform.delivered().is_empty(), "what came without a message is not remembered");
    rig.interrupts.used_buffer(0);
    assert_eq!(platform.delivered(), [0x50]);
}

#[test]
fn a_message_that_cannot_be_delivered_is_refused_and_the_old_one_stays() {
    let (mut rig, platform) = running();
    rig.quiet(reg::QUEUE_SEL, 0);
    rig.quiet(MSI_ADDRESS_LOW, 0x1000);
    rig.quiet(MSI_COMMAND, command::CONFIGURE);
    assert_eq!(rig.read(MSI_STATE), state::ON | state::CONFIGURED | state::REFUSED);
    rig.interrupts.used_buffer(0);
    assert_eq!(platform.delivered(), [0x40]);
    rig.quiet(MSI_COMMAND, command::UNMASK);
    assert_eq!(rig.read(MSI_STATE), state::ON | state::CONFIGURED);
}

#[test]
fn a_command_that_must_not_be_given_is_refused() {
    let (mut rig, platform) = extended();
    // Not on.
    for value in [command::CONFIGURE, command::MASK, command::UNMASK, command::UNCONFIGURE, 0, 7, u32::MAX] {
        rig.refused(MSI_COMMAND, value);
        assert_eq!(rig.read(MSI_STATE), state::REFUSED);
    }
    // No such source: a queue of size 0, one that is not there, a large number.
    rig.quiet(MSI_COMMAND, command::ENABLE);
    for source in [2, 3, 0xfffe, 0x1_0000, 0x1_ffff] {
        rig.quiet(reg::QUEUE_SEL, source);
        stage(&mut rig, 0x40);
        rig.refused(MSI_COMMAND, command::CONFIGURE);
        assert_eq!(rig.read(MSI_STATE), state::ON | state::REFUSED);
    }
    let (mut rig, _) = running();
    // It is running.
    rig.refused(MSI_COMMAND, command::DISABLE);
    rig.refused(MSI_COMMAND, command::ENABLE);
    rig.write(reg::STATUS, RUNNING | status::FAILED);
    rig.refused(MSI_COMMAND, command::MASK);
    rig.refused(MSI_DATA, 1);
    assert!(platform.delivered().is_empty());
}

#[test]
fn nothing_of_it_is_there_before_the_features_are_agreed() {
    let (mut rig, _) = Rig::with_messages(EXTENDED);
    rig.write(reg::STATUS, status::ACKNOWLEDGE);
    rig.write(reg::STATUS, rig::DRIVER);
    rig.accept(EXTENDED);
    for offset in REGISTERS {
        rig.refused(offset, command::ENABLE);
        rig.unreadable(offset);
    }
}

#[test]
fn a_driver_whose_set_up_fails_goes_back_to_the_wired_interrupt() {
    let (mut rig, platform) = extended();
    rig.quiet(MSI_COMMAND, command::ENABLE);
    configure(&mut rig, 0, 0x40);
    rig.quiet(MSI_COMMAND, command::DISABLE);
    assert_eq!(rig.read(MSI_STATE), 0);
    rig.set_up(0, &addresses(64));
    rig.quiet(reg::QUEUE_READY, 1);
    rig.write(reg::STATUS, RUNNING);
    rig.interrupts.used_buffer(0);
    assert_eq!((rig.read(reg::INTERRUPT_STATUS), platform.delivered()), (reg::INT_USED_BUFFER, vec![]));
}

#[test]
fn a_reset_turns_it_off_and_forgets_all() {
    let (mut rig, platform) = running();
    rig.quiet(MSI_COMMAND, command::MASK);
    assert_eq!(rig.write(reg::STATUS, 0), Some(Effect::Reset));
    rig.mmio.reset_done();
    rig.negotiate(EXTENDED);
    assert_eq!(rig.read(MSI_STATE), 0);
    rig.quiet(MSI_COMMAND, command::ENABLE);
    for source in [0, 1, SELECT_CONFIGURATION] {
        rig.quiet(reg::QUEUE_SEL, source);
        assert_eq!(rig.read(MSI_STATE), state::ON);
    }
    // The stage was cleared too: nothing can be configured from it.
    rig.quiet(MSI_COMMAND, command::CONFIGURE);
    assert_eq!(rig.read(MSI_STATE), state::ON | state::REFUSED);
    rig.interrupts.used_buffer(0);
    assert!(platform.delivered().is_empty());
}

#[test]
fn a_queue_that_is_reset_has_no_message_and_one_that_is_stopped_keeps_it() {
    let (mut rig, platform) = running();
    rig.quiet(reg::QUEUE_SEL, 0);
    assert_eq!(rig.write(reg::QUEUE_READY, 0), Some(Effect::ResetQueue { queue: 0 }));
    rig.mmio.queue_reset_done(0);
    assert_eq!(rig.read(MSI_STATE), state::ON | state::CONFIGURED);
    rig.quiet(reg::QUEUE_SEL, 1);
    assert_eq!(rig.write(reg::QUEUE_RESET, 1), Some(Effect::ResetQueue { queue: 1 }));
    // Until it is done, interrupts under way are sent.
    rig.interrupts.used_buffer(1);
    assert_eq!(platform.delivered(), [0x41]);
    rig.mmio.queue_reset_done(1);
    assert_eq!(rig.read(MSI_STATE), state::ON);
    rig.interrupts.used_buffer(1);
    assert!(platform.delivered().is_empty());
    // At once where there is nothing to stop.
    rig.quiet(reg::QUEUE_SEL, 0);
    rig.quiet(reg::QUEUE_RESET, 1);
    assert_eq!(rig.read(MSI_STATE), state::ON);
}

#[test]
fn the_registers_are_only_32_bits_wide() {
    let (mut rig, _) = running();
    for offset in REGISTERS {
        for (at, len) in [(offset, 1), (offset, 2), (offset + 2, 4), (offset, 8)] {
            let before = rig.mmio.violations();
            assert_eq!(rig.mmio.write(at, &[1; 8][..len]), None);
            let mut data = [0xee; 8];
            rig.mmio.read(at, &mut data[..len], |_, _| panic!("no configuration space there"));
            assert_eq!((&data[..len], rig.mmio.violations()), (&[0; 8][..len], before + 2));
        }
    }
}
