//! The structures in the BAR.
use crate::rig::{DRIVER, NEGOTIATED, OFFERED, QUEUE_SIZES, RUNNING, Rig, addresses};
use paravane_spec::pci::{cap, common as reg};
use paravane_spec::{feature, status};
use paravane_transport::pci::Pci;
use paravane_transport::{Effect, Transport};

#[test]
fn a_whole_start_has_no_violation() {
    let mut rig = Rig::running();
    assert_eq!(rig.status(), RUNNING);
    assert_eq!(rig.write(Pci::notification(0), 2, 0), Some(Effect::Notify { queue: 0 }));
    assert_eq!(rig.pci.violations(), 0);
}

#[test]
fn features_by_word() {
    let mut rig = Rig::new();
    for word in 0..4 {
        rig.quiet(reg::DEVICE_FEATURE_SELECT, 4, word);
        assert_eq!(rig.read(reg::DEVICE_FEATURE_SELECT, 4), word);
        let want = if word < 2 { OFFERED >> (32 * word) & 0xffff_ffff } else { 0 };
        assert_eq!(rig.read(reg::DEVICE_FEATURE, 4), want);
    }
    rig.negotiate(OFFERED);
    rig.quiet(reg::DRIVER_FEATURE_SELECT, 4, 1);
    assert_eq!(rig.read(reg::DRIVER_FEATURE, 4), OFFERED >> 32);
    rig.refused(reg::DRIVER_FEATURE, 4, 0);
}

#[test]
fn features_from_64_on_read_back_and_are_refused() {
    let mut rig = Rig::new();
    rig.write(reg::DEVICE_STATUS, 1, status::ACKNOWLEDGE.into());
    rig.write(reg::DEVICE_STATUS, 1, DRIVER.into());
    for (word, kept) in [(2, 0xffff_0001), (3, 0x8000_0000), (4, 0), (0xffff_ffff, 0)] {
        rig.quiet(reg::DRIVER_FEATURE_SELECT, 4, word);
        rig.quiet(reg::DRIVER_FEATURE, 4, kept | u64::from(kept == 0));
        assert_eq!(rig.read(reg::DRIVER_FEATURE, 4), kept);
    }
    rig.negotiate(OFFERED);
    assert_eq!(rig.status(), DRIVER);
    for word in [2, 3] {
        rig.quiet(reg::DRIVER_FEATURE_SELECT, 4, word);
        rig.quiet(reg::DRIVER_FEATURE, 4, 0);
    }
    rig.negotiate(OFFERED);
    assert_eq!(rig.status(), NEGOTIATED);
}

#[test]
fn features_ok_does_not_stick_over_what_was_not_offered() {
    let mut rig = Rig::new();
    rig.negotiate(OFFERED | feature::NOTIFICATION_DATA);
    assert_eq!(rig.status(), DRIVER);
}

#[test]
fn queues_begin_with_their_largest_size() {
    let mut rig = Rig::new();
    assert_eq!(rig.read(reg::NUM_QUEUES, 2), 3);
    for (queue, &size) in QUEUE_SIZES.iter().enumerate() {
        rig.quiet(reg::QUEUE_SELECT, 2, queue as u64);
        assert_eq!(rig.read(reg::QUEUE_SIZE, 2), size.into());
        assert_eq!(rig.read(reg::QUEUE_NOTIFY_OFF, 2), queue as u64);
        assert_eq!(rig.read(reg::QUEUE_ENABLE, 2), 0);
    }
    rig.quiet(reg::QUEUE_SELECT, 2, 3);
    assert_eq!(rig.read(reg::QUEUE_SIZE, 2), 0);
    assert_eq!(rig.pci.violations(), 0);
}

#[test]
fn a_queue_reads_back_what_was_written() {
    let mut rig = Rig::negotiated();
    rig.set_up(1, &addresses(16));
    assert_eq!(rig.read(reg::QUEUE_SIZE, 2), 16);
    assert_eq!(rig.read(reg::QUEUE_DRIVER, 8), addresses(16).driver);
    assert_eq!(rig.read(reg::QUEUE_DRIVER + 4, 4), addresses(16).driver >> 32);
    rig.quiet(reg::QUEUE_DEVICE, 8, 0x1234_5678_9abc_def0);
    assert_eq!(rig.read(reg::QUEUE_DEVICE, 4), 0x9abc_def0);
    assert_eq!(rig.pci.violations(), 0);
}

/// CVE-2026-5747: later writes do not change what was checked at the enabling.
#[test]
fn the_configuration_of_an_enabled_queue_is_frozen() {
    let mut rig = Rig::negotiated();
    rig.set_up(0, &addresses(256));
    rig.quiet(reg::QUEUE_ENABLE, 2, 1);
    for running in [false, true] {
        for (at, len, value) in [
            (reg::QUEUE_SIZE, 2, 0),
            (reg::QUEUE_SIZE, 2, 32768),
            (reg::QUEUE_DESC, 4, 0),
            (reg::QUEUE_DESC + 4, 4, u64::MAX),
            (reg::QUEUE_DRIVER, 8, u64::MAX),
            (reg::QUEUE_DEVICE, 8, 0),
        ] {
            rig.refused(at, len, value);
        }
        assert_eq!(rig.read(reg::QUEUE_SIZE, 2), 256);
        assert_eq!(rig.read(reg::QUEUE_DESC, 8), addresses(256).desc);
        if !running {
            let activate = Effect::Activate { features: OFFERED, queues: vec![(0, addresses(256))] };
            assert_eq!(rig.write(reg::DEVICE_STATUS, 1, RUNNING.into()), Some(activate));
        }
    }
    rig.quiet(reg::QUEUE_ENABLE, 2, 1);
}

#[test]
fn sizes_that_no_split_queue_has_do_not_enable() {
    for size in [0, 3, 255, 512, 0xffff] {
        let mut rig = Rig::negotiated();
        rig.set_up(0, &addresses(size));
        rig.refused(reg::QUEUE_ENABLE, 2, 1);
        assert_eq!(rig.read(reg::QUEUE_ENABLE, 2), 0);
    }
}

#[test]
fn a_queue_is_not_disabled_by_writing_0() {
    let mut rig = Rig::running();
    rig.refused(reg::QUEUE_ENABLE, 2, 0);
    rig.refused(reg::QUEUE_ENABLE, 2, 2);
    assert_eq!(rig.read(reg::QUEUE_ENABLE, 2), 1);
}

#[test]
fn a_queue_is_reset_and_enabled_again() {
    let mut rig = Rig::running();
    assert_eq!(rig.write(reg::QUEUE_RESET, 2, 1), Some(Effect::ResetQueue { queue: 0 }));
    assert_eq!((rig.read(reg::QUEUE_RESET, 2), rig.read(reg::QUEUE_ENABLE, 2)), (1, 1));
    rig.refused(Pci::notification(0), 2, 0);
    rig.pci.queue_reset_done(0);
    assert_eq!((rig.read(reg::QUEUE_RESET, 2), rig.read(reg::QUEUE_ENABLE, 2)), (0, 0));
    assert_eq!((rig.read(reg::QUEUE_SIZE, 2), rig.read(reg::QUEUE_DESC, 8)), (256, 0));
    rig.set_up(0, &addresses(8));
    let start = Effect::StartQueue { features: OFFERED, queue: 0, addresses: addresses(8) };
    assert_eq!(rig.write(reg::QUEUE_ENABLE, 2, 1), Some(start));
}

#[test]
fn each_queue_has_its_address() {
    let mut rig = Rig::running();
    rig.set_up(1, &addresses(64));
    assert!(rig.write(reg::QUEUE_ENABLE, 2, 1).is_some());
    let (notify, len) = rig.region(cap::NOTIFY);
    let at = rig.virtio(cap::NOTIFY) + cap::NOTIFY_OFF_MULTIPLIER;
    let multiplier = rig.config_read(at, 4);
    assert_eq!(len, 3 * multiplier);
    for queue in 0..2 {
        rig.quiet(reg::QUEUE_SELECT, 2, queue);
        let at = notify + rig.read(reg::QUEUE_NOTIFY_OFF, 2) * multiplier;
        assert_eq!(at, Pci::notification(queue as u16));
        // With NOTIFICATION_DATA the value is arbitrary.
        for (len, value) in [(2, queue), (4, 0x8003_0000 | queue), (1, 0), (4, 0xffff_ffff)] {
            assert_eq!(rig.write(at, len, value), Some(Effect::Notify { queue: queue as u16 }));
        }
    }
    for nowhere in [2, 3, 100, 0x7fff] {
        rig.refused(Pci::notification(nowhere), 2, 0);
    }
    rig.refused(Pci::notification(0) + 2, 2, 0);
    assert_eq!(rig.read(Pci::notification(0), 2), 0);
}

#[test]
fn fields_take_only_their_own_width() {
    let mut rig = Rig::running();
    for (at, len) in [
        (reg::DEVICE_STATUS, 2),
        (reg::DEVICE_STATUS, 4),
        (reg::QUEUE_SELECT, 1),
        (reg::QUEUE_SIZE, 4),
        (reg::QUEUE_DESC, 2),
        (reg::QUEUE_DESC, 1),
        (reg::DEVICE_FEATURE, 8),
        (reg::QUEUE_DESC + 4, 8),
        (reg::QUEUE_DESC + 2, 4),
        (reg::LENGTH, 2),
        (reg::NUM_QUEUES, 3),
        (0x1000, 2),
        (0x1001, 1),
        (0x2eff, 2),
        (0x2f00, 1),
        (0x3000, 2),
        (0x3008, 8),
        (0x8000, 2),
        (0x8000 + 16 * 4, 4),
        (Pci::CONFIG_SPACE - 8, 8),
        (u64::MAX, 1),
        (u64::MAX - 7, 8),
    ] {
        let before = rig.pci.violations();
        let mut data = vec![0xee; len];
        rig.pci.read(at, &mut data, &mut |_, _| panic!("this is not the configuration space"));
        assert!(data.iter().all(|&byte| byte == 0), "{at:#x}, {len} bytes: {data:?}");
        assert_eq!(rig.pci.write(at, &data), None);
        assert_eq!(rig.pci.violations(), before + 2, "{at:#x}, {len} bytes");
    }
    assert_eq!(rig.status(), RUNNING);
}

#[test]
fn the_device_configuration_is_its_own_region() {
    let mut rig = Rig::new();
    let (at, len) = rig.region(cap::DEVICE);
    assert_eq!(len, 0xf00);
    assert_eq!(rig.read(at + 4, 4), 0x0706_0504);
    rig.refused(at, 1, 1);
    rig.negotiate(OFFERED);
    let write = Effect::WriteConfig { offset: 0xef8, data: vec![1, 2, 3, 4, 5, 6, 7, 8] };
    assert_eq!(rig.write(at + 0xef8, 8, 0x0807_0605_0403_0201), Some(write));
}

#[test]
fn isr_status_is_cleared_by_reading() {
    let mut rig = Rig::running();
    let (isr, _) = rig.region(cap::ISR);
    rig.interrupts.used_buffer(0);
    rig.pci.config_changed();
    assert_eq!(rig.edges(), 2);
    assert_eq!(rig.read(isr, 1), 3);
    assert_eq!(rig.read(isr, 1), 0);
    rig.refused(isr, 1, 3);
}

#[test]
fn generation_moves_and_goes_on_over_a_reset() {
    let mut rig = Rig::running();
    let before = rig.read(reg::CONFIG_GENERATION, 1);
    rig.pci.config_changed();
    let after = rig.read(reg::CONFIG_GENERATION, 1);
    assert_ne!(before, after);
    assert_eq!(rig.write(reg::DEVICE_STATUS, 1, 0), Some(Effect::Reset));
    rig.pci.reset_done();
    assert_eq!(rig.read(reg::CONFIG_GENERATION, 1), after);
}

#[test]
fn the_status_stays_until_the_reset_is_done() {
    let mut rig = Rig::running();
    assert_eq!(rig.write(reg::DEVICE_STATUS, 1, 0), Some(Effect::Reset));
    assert_eq!(rig.status(), RUNNING);
    rig.refused(reg::QUEUE_SELECT, 2, 1);
    rig.refused(reg::CONFIG_MSIX_VECTOR, 2, 1);
    rig.quiet(reg::DEVICE_STATUS, 1, 0);
    rig.pci.reset_done();
    assert_eq!((rig.status(), rig.read(reg::QUEUE_ENABLE, 2)), (0, 0));
    rig.negotiate(OFFERED);
    assert_eq!(rig.status(), NEGOTIATED);
}

#[test]
fn a_device_that_needs_a_reset_says_so_once() {
    let mut rig = Rig::running();
    rig.pci.needs_reset();
    rig.pci.needs_reset();
    assert_eq!(rig.status(), RUNNING | status::DEVICE_NEEDS_RESET);
    assert_eq!(rig.edges(), 1);
    rig.quiet(Pci::notification(0), 2, 0);
}

/// Found by the fuzzer: notification addresses are outside the common structure.
#[test]
fn a_kick_during_a_reset_reaches_nobody() {
    let mut rig = Rig::running();
    assert_eq!(rig.write(reg::DEVICE_STATUS, 1, 0), Some(Effect::Reset));
    rig.refused(Pci::notification(0), 2, 0);
}
