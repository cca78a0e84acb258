//! Every illegal order and every malformed access: no effect, and counted.
mod rig;

use paravane_spec::{feature, mmio as reg, status};
use paravane_transport::Effect;
use paravane_transport::Transport as _;
use rig::{NEGOTIATED, OFFERED, RUNNING, Rig, addresses};

const READ_ONLY: [u64; 13] = [
    reg::MAGIC_VALUE,
    reg::VERSION,
    reg::DEVICE_ID,
    reg::VENDOR_ID,
    reg::DEVICE_FEATURES,
    reg::QUEUE_SIZE_MAX,
    reg::INTERRUPT_STATUS,
    reg::SHM_LEN_LOW,
    reg::SHM_LEN_HIGH,
    reg::SHM_BASE_LOW,
    reg::SHM_BASE_HIGH,
    reg::CONFIG_GENERATION,
    0x028, // GuestPageSize of the legacy interface: nothing here.
];

const WRITE_ONLY: [u64; 14] = [
    reg::DEVICE_FEATURES_SEL,
    reg::DRIVER_FEATURES,
    reg::DRIVER_FEATURES_SEL,
    reg::QUEUE_SEL,
    reg::QUEUE_SIZE,
    reg::QUEUE_NOTIFY,
    reg::INTERRUPT_ACK,
    reg::QUEUE_DESC_LOW,
    reg::QUEUE_DESC_HIGH,
    reg::QUEUE_DRIVER_LOW,
    reg::QUEUE_DRIVER_HIGH,
    reg::QUEUE_DEVICE_LOW,
    reg::QUEUE_DEVICE_HIGH,
    reg::SHM_SEL,
];

/// Registers that hold a queue's configuration.
const QUEUE_CONFIGURATION: [u64; 7] = [
    reg::QUEUE_SIZE,
    reg::QUEUE_DESC_LOW,
    reg::QUEUE_DESC_HIGH,
    reg::QUEUE_DRIVER_LOW,
    reg::QUEUE_DRIVER_HIGH,
    reg::QUEUE_DEVICE_LOW,
    reg::QUEUE_DEVICE_HIGH,
];

#[test]
fn read_only_registers_are_not_written() {
    let mut rig = Rig::running();
    let before: Vec<u32> = READ_ONLY[..12].iter().map(|&offset| rig.read(offset)).collect();
    for offset in READ_ONLY {
        rig.refused(offset, 0x5a5a_5a5a);
    }
    let after: Vec<u32> = READ_ONLY[..12].iter().map(|&offset| rig.read(offset)).collect();
    assert_eq!(before, after);
}

#[test]
fn write_only_registers_are_not_read() {
    let rig = Rig::running();
    for offset in WRITE_ONLY {
        rig.unreadable(offset);
    }
}

#[test]
fn offsets_without_a_register() {
    let mut rig = Rig::running();
    // The extension's registers (0x0c4 to 0x0f8) are absent from a plain device.
    for offset in [0x018, 0x01c, 0x028, 0x02c, 0x03c, 0x040, 0x048, 0x054, 0x06c, 0x074, 0x0a8, 0x0c4, 0x0f8]
    {
        rig.unreadable(offset);
        rig.refused(offset, 1);
    }
}

#[test]
fn registers_take_only_aligned_32_bit_accesses() {
    let mut rig = Rig::running();
    for (offset, len) in [
        (0, 0),
        (0, 1),
        (0, 2),
        (0, 3),
        (0, 8),
        (0, 5),
        (1, 4),
        (2, 4),
        (3, 1),
        (0x70, 1),
        (0xfc, 8),
        (0xfe, 4),
    ] {
        let before = rig.mmio.violations();
        let mut data = vec![0xee; len];
        rig.mmio.read(offset, &mut data, |_, _| panic!("this is not the configuration space"));
        assert!(data.iter().all(|&b| b == 0), "{offset:#x}, {len} bytes: {data:?}");
        assert_eq!(rig.mmio.write(offset, &data), None);
        assert_eq!(rig.mmio.violations(), before + 2, "{offset:#x}, {len} bytes");
    }
    assert_eq!(rig.status(), RUNNING);
}

#[test]
fn configuration_space_accesses_that_are_misaligned_odd_or_outside() {
    let mut rig = Rig::running();
    let cases: [(u64, usize); 14] = [
        (0x100, 0),
        (0x100, 3),
        (0x100, 5),
        (0x100, 16),
        (0x101, 2),
        (0x102, 4),
        (0x104, 8),
        (0xfff, 2),
        (0xffe, 4),
        (0xffc, 8),
        (0x1000, 1),
        (0x1000, 4),
        (u64::MAX, 1),
        (u64::MAX - 3, 4),
    ];
    for (offset, len) in cases {
        let before = rig.mmio.violations();
        let mut data = vec![0xee; len];
        rig.mmio.read(offset, &mut data, |_, _| panic!("{offset:#x}, {len} bytes reached the device"));
        assert!(data.iter().all(|&b| b == 0), "{offset:#x}, {len} bytes: {data:?}");
        assert_eq!(rig.mmio.write(offset, &data), None);
        assert_eq!(rig.mmio.violations(), before + 2, "{offset:#x}, {len} bytes");
    }
}

#[test]
fn status_bits_are_not_taken_away() {
    let mut rig = Rig::running();
    for fewer in [NEGOTIATED, RUNNING & !status::ACKNOWLEDGE, status::DRIVER_OK, status::ACKNOWLEDGE] {
        rig.refused(reg::STATUS, fewer);
        assert_eq!(rig.status(), RUNNING);
    }
}

#[test]
fn undefined_status_bits_are_not_set() {
    let mut rig = Rig::negotiated();
    for undefined in [status::SUSPEND, 0x20, 0x100, 0x8000_0000] {
        rig.refused(reg::STATUS, NEGOTIATED | undefined);
        assert_eq!(rig.status(), NEGOTIATED);
    }
}

#[test]
fn the_driver_does_not_set_device_needs_reset() {
    let mut rig = Rig::running();
    rig.refused(reg::STATUS, RUNNING | status::DEVICE_NEEDS_RESET);
    assert_eq!(rig.status(), RUNNING);
    let mut rig = Rig::new();
    rig.refused(reg::STATUS, status::DEVICE_NEEDS_RESET);
    assert_eq!(rig.status(), 0);
}

#[test]
fn driver_without_acknowledge() {
    let mut rig = Rig::new();
    rig.refused(reg::STATUS, status::DRIVER);
    assert_eq!(rig.status(), 0);
}

#[test]
fn features_ok_without_driver() {
    let mut rig = Rig::new();
    rig.write(reg::STATUS, status::ACKNOWLEDGE);
    rig.refused(reg::STATUS, status::ACKNOWLEDGE | status::FEATURES_OK);
    assert_eq!(rig.status(), status::ACKNOWLEDGE);
}

#[test]
fn driver_ok_without_features_ok_does_not_activate() {
    let mut rig = Rig::new();
    rig.write(reg::STATUS, rig::DRIVER);
    rig.accept(OFFERED);
    rig.refused(reg::STATUS, rig::DRIVER | status::DRIVER_OK);
    // Nor together: FEATURES_OK has to be read back first.
    rig.refused(reg::STATUS, RUNNING);
    assert_eq!(rig.status(), rig::DRIVER);
}

#[test]
fn driver_ok_after_features_ok_was_refused_does_not_activate() {
    let mut rig = Rig::new();
    rig.negotiate(OFFERED | feature::EVENT_IDX);
    assert_eq!(rig.status(), rig::DRIVER);
    rig.refused(reg::STATUS, RUNNING);
    assert_eq!(rig.status(), rig::DRIVER);
}

#[test]
fn driver_ok_again_does_not_activate_again() {
    let mut rig = Rig::running();
    rig.quiet(reg::STATUS, RUNNING);
}

#[test]
fn nothing_but_a_reset_after_failed() {
    let mut rig = Rig::running();
    rig.quiet(reg::STATUS, RUNNING | status::FAILED);
    rig.refused(reg::QUEUE_NOTIFY, 0);
    rig.refused(reg::QUEUE_READY, 0);
    rig.refused(reg::QUEUE_RESET, 1);
    assert_eq!(rig.mmio.write(reg::CONFIG, &[1]), None);
    assert_eq!(rig.write(reg::STATUS, 0), Some(Effect::Reset));
    let mut rig = Rig::negotiated();
    rig.quiet(reg::STATUS, NEGOTIATED | status::FAILED);
    rig.refused(reg::STATUS, RUNNING | status::FAILED);
    rig.refused(reg::QUEUE_SIZE, 8);
    assert_eq!(rig.status(), NEGOTIATED | status::FAILED);
}

#[test]
fn failed_comes_alone() {
    let mut rig = Rig::negotiated();
    rig.refused(reg::STATUS, RUNNING | status::FAILED);
    assert_eq!(rig.status(), NEGOTIATED);
}

#[test]
fn features_before_driver() {
    let mut rig = Rig::new();
    rig.refused(reg::DRIVER_FEATURES, 1);
    rig.write(reg::STATUS, status::ACKNOWLEDGE);
    rig.refused(reg::DRIVER_FEATURES, 1);
}

#[test]
fn features_after_features_ok() {
    let mut rig = Rig::negotiated_with(feature::VERSION_1);
    for (word, bits) in [(0, OFFERED as u32), (1, 0), (1, u32::MAX), (2, 1)] {
        rig.quiet(reg::DRIVER_FEATURES_SEL, word);
        rig.refused(reg::DRIVER_FEATURES, bits);
    }
    let effect = rig.write(reg::STATUS, RUNNING);
    assert_eq!(effect, Some(Effect::Activate { features: feature::VERSION_1, queues: vec![] }));
    rig.quiet(reg::DRIVER_FEATURES_SEL, 0);
    rig.refused(reg::DRIVER_FEATURES, OFFERED as u32);
}

#[test]
fn queue_registers_before_features_ok() {
    let mut rig = Rig::new();
    rig.write(reg::STATUS, rig::DRIVER);
    for offset in QUEUE_CONFIGURATION {
        rig.refused(offset, 8);
    }
    rig.refused(reg::QUEUE_RESET, 1);
    // What was written too early is not there later.
    rig.accept(OFFERED);
    rig.quiet(reg::STATUS, NEGOTIATED);
    rig.refused(reg::QUEUE_READY, 1);
}

#[test]
fn queue_ready_before_features_ok() {
    let mut rig = Rig::new();
    rig.refused(reg::QUEUE_READY, 1);
    rig.quiet(reg::QUEUE_READY, 0);
    assert_eq!(rig.read(reg::QUEUE_READY), 0);
}

#[test]
fn queue_sizes_that_no_queue_has() {
    for size in [0, 3, 255, 257, 512, 32768, 0x1_0000, 0x1_0100, u32::MAX] {
        let mut rig = Rig::negotiated();
        rig.set_up(0, &addresses(256));
        rig.quiet(reg::QUEUE_SIZE, size);
        rig.refused(reg::QUEUE_READY, 1);
        assert_eq!(rig.read(reg::QUEUE_READY), 0, "size {size}");
        assert_eq!(
            rig.write(reg::STATUS, RUNNING),
            Some(Effect::Activate { features: OFFERED, queues: vec![] })
        );
        rig.refused(reg::QUEUE_READY, 1);
        rig.refused(reg::QUEUE_NOTIFY, 0);
    }
}

#[test]
fn packed_queues_have_any_size_up_to_the_maximum() {
    for (size, ready) in [(1, 1), (3, 1), (255, 1), (256, 1), (0, 0), (257, 0), (0x1_0003, 0)] {
        let mut rig = Rig::offering(OFFERED | feature::RING_PACKED);
        rig.negotiate(OFFERED | feature::RING_PACKED);
        rig.set_up(0, &addresses(256));
        rig.quiet(reg::QUEUE_SIZE, size);
        rig.write(reg::QUEUE_READY, 1);
        assert_eq!(rig.read(reg::QUEUE_READY), ready, "size {size}");
    }
}

#[test]
fn every_power_of_two_up_to_the_maximum_is_a_size() {
    for shift in 0..=8 {
        let mut rig = Rig::negotiated();
        rig.set_up(0, &addresses(1 << shift));
        rig.quiet(reg::QUEUE_READY, 1);
        assert_eq!(rig.read(reg::QUEUE_READY), 1);
    }
}

#[test]
fn queue_ready_takes_only_0_and_1() {
    let mut rig = Rig::negotiated();
    rig.set_up(0, &addresses(256));
    for value in [2, 3, 0x100, u32::MAX] {
        rig.refused(reg::QUEUE_READY, value);
        assert_eq!(rig.read(reg::QUEUE_READY), 0);
    }
    let mut rig = Rig::running();
    rig.refused(reg::QUEUE_READY, 2);
    assert_eq!(rig.read(reg::QUEUE_READY), 1);
}

#[test]
fn queue_select_out_of_range() {
    // Queue 2 has size 0: it is numbered, but not available.
    for queue in [2, 3, 0xffff, 0x1_0000, u32::MAX] {
        let mut rig = Rig::negotiated();
        rig.quiet(reg::QUEUE_SEL, queue);
        for offset in QUEUE_CONFIGURATION {
            rig.refused(offset, 1);
        }
        rig.refused(reg::QUEUE_READY, 1);
        rig.refused(reg::QUEUE_RESET, 1);
        assert_eq!(rig.read(reg::QUEUE_SIZE_MAX), 0);
        assert_eq!(rig.read(reg::QUEUE_READY), 0);
        assert_eq!(rig.read(reg::QUEUE_RESET), 0);
        rig.refused(reg::QUEUE_NOTIFY, queue);
        // The neighbour whose index has the same low half was not touched.
        rig.quiet(reg::QUEUE_SEL, 0);
        rig.refused(reg::QUEUE_READY, 1);
    }
}

/// QueueSize writes after activation have no effect.
///
/// Firecracker's transport used the new value with the old, validated addresses.
#[test]
fn cve_2026_5747_configuration_written_after_activation_has_no_effect() {
    let mut rig = Rig::running();
    for offset in QUEUE_CONFIGURATION {
        rig.refused(offset, 0x8000);
    }
    // Not at once, and not when the queue is started again either.
    assert_eq!(rig.write(reg::QUEUE_READY, 0), Some(Effect::ResetQueue { queue: 0 }));
    for offset in QUEUE_CONFIGURATION {
        rig.refused(offset, 0x8000);
    }
    rig.mmio.queue_reset_done(0);
    let start = Effect::StartQueue { features: OFFERED, queue: 0, addresses: addresses(256) };
    assert_eq!(rig.write(reg::QUEUE_READY, 1), Some(start));
}

#[test]
fn cve_2026_5747_configuration_written_between_queue_ready_and_driver_ok_has_no_effect() {
    let mut rig = Rig::negotiated();
    rig.set_up(0, &addresses(256));
    rig.quiet(reg::QUEUE_READY, 1);
    for offset in QUEUE_CONFIGURATION {
        rig.refused(offset, 0x8000);
    }
    let queues = vec![(0, addresses(256))];
    assert_eq!(rig.write(reg::STATUS, RUNNING), Some(Effect::Activate { features: OFFERED, queues }));
}

#[test]
fn queue_reset_without_ring_reset() {
    let mut rig = Rig::running_with(OFFERED & !feature::RING_RESET);
    rig.refused(reg::QUEUE_RESET, 1);
    rig.unreadable(reg::QUEUE_RESET);
    assert_eq!(rig.read(reg::QUEUE_READY), 1);
    assert_eq!(rig.write(reg::QUEUE_NOTIFY, 0), Some(Effect::Notify { queue: 0 }));
}

#[test]
fn queue_reset_takes_only_1() {
    let mut rig = Rig::running();
    for value in [0, 2, u32::MAX] {
        rig.refused(reg::QUEUE_RESET, value);
        assert_eq!(rig.read(reg::QUEUE_RESET), 0);
    }
}

#[test]
fn queue_registers_while_its_reset_is_under_way() {
    let mut rig = Rig::running();
    assert_eq!(rig.write(reg::QUEUE_RESET, 1), Some(Effect::ResetQueue { queue: 0 }));
    for offset in QUEUE_CONFIGURATION {
        rig.refused(offset, 8);
    }
    rig.refused(reg::QUEUE_READY, 1);
    rig.quiet(reg::QUEUE_READY, 0);
}

#[test]
fn notifications_of_queues_that_are_not_live() {
    let mut rig = Rig::negotiated();
    rig.set_up(0, &addresses(256));
    rig.quiet(reg::QUEUE_READY, 1);
    rig.refused(reg::QUEUE_NOTIFY, 0); // Ready is not live: DRIVER_OK is missing.
    let mut rig = Rig::running();
    // 0x1_0000 would be queue 0 with NOTIFICATION_DATA, which was not negotiated.
    for queue in [1, 2, 3, 0xffff, 0x1_0000, u32::MAX] {
        rig.refused(reg::QUEUE_NOTIFY, queue);
    }
}

#[test]
fn undefined_bits_of_interrupt_ack_are_counted_and_the_others_acknowledged() {
    let mut rig = Rig::running();
    rig.interrupts.used_buffer(0);
    rig.refused(reg::INTERRUPT_ACK, !0);
    assert_eq!(rig.read(reg::INTERRUPT_STATUS), 0);
}

#[test]
fn the_configuration_space_is_not_written_before_features_ok() {
    let mut rig = Rig::new();
    assert_eq!(rig.mmio.write(reg::CONFIG, &[1]), None);
    rig.write(reg::STATUS, rig::DRIVER);
    assert_eq!(rig.mmio.write(reg::CONFIG, &[1]), None);
    assert_eq!(rig.mmio.violations(), 2);
}

#[test]
fn writes_while_a_reset_is_under_way_have_no_effect() {
    let mut rig = Rig::running();
    assert_eq!(rig.write(reg::STATUS, 0), Some(Effect::Reset));
    rig.refused(reg::QUEUE_SEL, 1);
    rig.refused(reg::QUEUE_SIZE, 8);
    rig.refused(reg::QUEUE_READY, 0);
    rig.refused(reg::QUEUE_READY, 1);
    rig.refused(reg::QUEUE_RESET, 1);
    rig.refused(reg::QUEUE_NOTIFY, 0);
    rig.refused(reg::DRIVER_FEATURES, 1);
    rig.refused(reg::STATUS, RUNNING);
    rig.refused(reg::STATUS, status::ACKNOWLEDGE);
    assert_eq!(rig.mmio.write(reg::CONFIG, &[1]), None);
    rig.mmio.config_changed();
    rig.mmio.needs_reset();
    assert_eq!(rig.read(reg::INTERRUPT_STATUS), 0, "no interrupt during a reset");
    assert_eq!(rig.status(), RUNNING);
    rig.mmio.reset_done();
    assert_eq!(rig.status(), 0);
}

#[test]
fn a_reset_overtakes_a_queue_reset() {
    let mut rig = Rig::running();
    assert_eq!(rig.write(reg::QUEUE_RESET, 1), Some(Effect::ResetQueue { queue: 0 }));
    assert_eq!(rig.write(reg::STATUS, 0), Some(Effect::Reset));
    rig.mmio.reset_done();
    rig.mmio.queue_reset_done(0); // Too late: there is nothing to finish.
    rig.negotiate(OFFERED);
    rig.quiet(reg::QUEUE_SEL, 0);
    assert_eq!(rig.read(reg::QUEUE_RESET), 0);
    assert_eq!(rig.read(reg::QUEUE_READY), 0);
}
