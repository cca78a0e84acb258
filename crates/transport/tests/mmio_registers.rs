//! Every register of section 4.2.2, used as the specification requires.
mod rig;

use paravane_spec::{feature, mmio as reg, status};
use paravane_transport::Effect;
use paravane_transport::Transport as _;
use rig::{DEVICE_ID, NEGOTIATED, OFFERED, RUNNING, Rig, addresses, config};

#[test]
fn identification() {
    let rig = Rig::new();
    assert_eq!(rig.read(reg::MAGIC_VALUE), u32::from_le_bytes(*b"virt"));
    assert_eq!(rig.read(reg::VERSION), 2);
    assert_eq!(rig.read(reg::DEVICE_ID), DEVICE_ID);
    assert_eq!(rig.read(reg::VENDOR_ID), u32::from_le_bytes(*b"PARA"));
    assert_eq!(rig.mmio.violations(), 0);
}

#[test]
fn offered_features_by_word() {
    let mut rig = Rig::new();
    assert_eq!(rig.read(reg::DEVICE_FEATURES), OFFERED as u32);
    rig.quiet(reg::DEVICE_FEATURES_SEL, 1);
    assert_eq!(rig.read(reg::DEVICE_FEATURES), (OFFERED >> 32) as u32);
    for beyond in [2, 3, u32::MAX] {
        rig.quiet(reg::DEVICE_FEATURES_SEL, beyond);
        assert_eq!(rig.read(reg::DEVICE_FEATURES), 0);
    }
}

#[test]
fn a_whole_start_has_no_violation() {
    let mut rig = Rig::running();
    assert_eq!(rig.status(), RUNNING);
    assert_eq!(rig.mmio.status(), RUNNING);
    assert_eq!(rig.write(reg::QUEUE_NOTIFY, 0), Some(Effect::Notify { queue: 0 }));
    assert_eq!(rig.mmio.violations(), 0);
}

#[test]
fn a_subset_of_the_features_is_what_activates() {
    let mut rig = Rig::negotiated_with(feature::VERSION_1);
    let effect = rig.write(reg::STATUS, RUNNING);
    assert_eq!(effect, Some(Effect::Activate { features: feature::VERSION_1, queues: vec![] }));
}

#[test]
fn features_ok_does_not_stick_without_version_1() {
    let mut rig = Rig::new();
    rig.negotiate(OFFERED & !feature::VERSION_1);
    assert_eq!(rig.status(), rig::DRIVER);
}

#[test]
fn features_ok_does_not_stick_over_what_was_not_offered() {
    for extra in [1, feature::EVENT_IDX, feature::NOTIFICATION_DATA, 1 << 63] {
        let mut rig = Rig::new();
        rig.negotiate(OFFERED | extra);
        assert_eq!(rig.status(), rig::DRIVER, "{extra:#x}");
        // The driver may try again with less: negotiation has not ended.
        rig.accept(OFFERED);
        rig.quiet(reg::STATUS, NEGOTIATED);
        assert_eq!(rig.status(), NEGOTIATED);
    }
}

#[test]
fn features_ok_does_not_stick_over_bits_from_64_on() {
    let mut rig = Rig::new();
    rig.write(reg::STATUS, status::ACKNOWLEDGE);
    rig.write(reg::STATUS, rig::DRIVER);
    rig.accept(OFFERED);
    for word in [2, 3] {
        rig.quiet(reg::DRIVER_FEATURES_SEL, word);
        rig.quiet(reg::DRIVER_FEATURES, 0);
        rig.quiet(reg::DRIVER_FEATURES, 1);
        rig.quiet(reg::STATUS, NEGOTIATED);
        assert_eq!(rig.status(), rig::DRIVER);
        // The driver may take it back.
        rig.quiet(reg::DRIVER_FEATURES, 0);
    }
    // A driver of version 1.4 writes all four words.
    rig.quiet(reg::STATUS, NEGOTIATED);
    assert_eq!(rig.status(), NEGOTIATED);
}

#[test]
fn feature_words_from_4_on_do_not_exist() {
    let mut rig = Rig::new();
    rig.write(reg::STATUS, status::ACKNOWLEDGE);
    rig.write(reg::STATUS, rig::DRIVER);
    rig.accept(OFFERED);
    for word in [4, 5, 64, 0x8000_0000, u32::MAX] {
        rig.quiet(reg::DRIVER_FEATURES_SEL, word);
        rig.quiet(reg::DRIVER_FEATURES, u32::MAX);
        rig.quiet(reg::DEVICE_FEATURES_SEL, word);
        assert_eq!(rig.read(reg::DEVICE_FEATURES), 0);
    }
    rig.quiet(reg::STATUS, NEGOTIATED);
    assert_eq!(rig.status(), NEGOTIATED);
}

#[test]
fn queue_size_max_of_each_queue() {
    let mut rig = Rig::new();
    for (queue, max) in [(0, 256), (1, 64), (2, 0), (3, 0), (0x1_0000, 0), (u32::MAX, 0)] {
        rig.quiet(reg::QUEUE_SEL, queue);
        assert_eq!(rig.read(reg::QUEUE_SIZE_MAX), max, "queue {queue:#x}");
        assert_eq!(rig.read(reg::QUEUE_READY), 0, "queue {queue:#x}");
    }
    assert_eq!(rig.mmio.violations(), 0);
}

#[test]
fn queues_keep_their_registers_apart() {
    let mut rig = Rig::negotiated();
    rig.set_up(0, &addresses(256));
    rig.set_up(1, &addresses(16));
    rig.quiet(reg::QUEUE_READY, 1);
    assert_eq!(rig.read(reg::QUEUE_READY), 1);
    rig.quiet(reg::QUEUE_SEL, 0);
    assert_eq!(rig.read(reg::QUEUE_READY), 0);
    rig.quiet(reg::QUEUE_READY, 1);
    let queues = vec![(0, addresses(256)), (1, addresses(16))];
    assert_eq!(rig.write(reg::STATUS, RUNNING), Some(Effect::Activate { features: OFFERED, queues }));
}

#[test]
fn a_queue_that_is_not_ready_does_not_activate() {
    let mut rig = Rig::negotiated();
    rig.set_up(0, &addresses(256));
    rig.quiet(reg::QUEUE_READY, 1);
    rig.quiet(reg::QUEUE_READY, 0);
    assert_eq!(rig.read(reg::QUEUE_READY), 0);
    assert_eq!(rig.write(reg::STATUS, RUNNING), Some(Effect::Activate { features: OFFERED, queues: vec![] }));
}

#[test]
fn a_queue_may_start_late() {
    let mut rig = Rig::running();
    rig.set_up(1, &addresses(64));
    let start = Effect::StartQueue { features: OFFERED, queue: 1, addresses: addresses(64) };
    assert_eq!(rig.write(reg::QUEUE_READY, 1), Some(start));
    assert_eq!(rig.write(reg::QUEUE_NOTIFY, 1), Some(Effect::Notify { queue: 1 }));
    // It reads 1 already: nothing is started twice.
    rig.quiet(reg::QUEUE_READY, 1);
    assert_eq!(rig.mmio.violations(), 0);
}

#[test]
fn queue_ready_0_stops_a_live_queue_with_and_without_ring_reset() {
    for accepted in [OFFERED, OFFERED & !feature::RING_RESET] {
        let mut rig = Rig::running_with(accepted);
        assert_eq!(rig.write(reg::QUEUE_READY, 0), Some(Effect::ResetQueue { queue: 0 }));
        // Until the owner has stopped it, 0 would be wrong.
        assert_eq!(rig.read(reg::QUEUE_READY), 1);
        rig.quiet(reg::QUEUE_READY, 0);
        rig.refused(reg::QUEUE_NOTIFY, 0);
        rig.refused(reg::QUEUE_SIZE, 8);
        rig.refused(reg::QUEUE_READY, 1);
        rig.mmio.queue_reset_done(0);
        assert_eq!(rig.read(reg::QUEUE_READY), 0);
        // The registers have kept their values.
        let start = Effect::StartQueue { features: accepted, queue: 0, addresses: addresses(256) };
        assert_eq!(rig.write(reg::QUEUE_READY, 1), Some(start));
    }
}

#[test]
fn queue_reset_returns_the_registers_to_their_defaults() {
    let mut rig = Rig::running();
    assert_eq!(rig.read(reg::QUEUE_RESET), 0);
    assert_eq!(rig.write(reg::QUEUE_RESET, 1), Some(Effect::ResetQueue { queue: 0 }));
    assert_eq!(rig.read(reg::QUEUE_RESET), 1);
    assert_eq!(rig.read(reg::QUEUE_READY), 1);
    rig.quiet(reg::QUEUE_RESET, 1);
    rig.refused(reg::QUEUE_NOTIFY, 0);
    rig.mmio.queue_reset_done(0);
    assert_eq!(rig.read(reg::QUEUE_RESET), 0);
    assert_eq!(rig.read(reg::QUEUE_READY), 0);
    rig.refused(reg::QUEUE_READY, 1); // The size is 0 again.
    rig.quiet(reg::QUEUE_SIZE, 32);
    let default = paravane_spec::queue::QueueAddresses { size: 32, ..Default::default() };
    let start = Effect::StartQueue { features: OFFERED, queue: 0, addresses: default };
    assert_eq!(rig.write(reg::QUEUE_READY, 1), Some(start));
    assert_eq!(rig.read(reg::QUEUE_RESET), 0);
}

#[test]
fn queue_reset_of_a_queue_that_is_not_live_is_done_at_once() {
    let mut rig = Rig::negotiated();
    rig.set_up(0, &addresses(256));
    rig.quiet(reg::QUEUE_READY, 1);
    rig.quiet(reg::QUEUE_RESET, 1);
    assert_eq!(rig.read(reg::QUEUE_RESET), 0);
    assert_eq!(rig.read(reg::QUEUE_READY), 0);
    rig.refused(reg::QUEUE_READY, 1);
}

#[test]
fn queue_reset_overtakes_a_stop() {
    let mut rig = Rig::running();
    assert_eq!(rig.write(reg::QUEUE_READY, 0), Some(Effect::ResetQueue { queue: 0 }));
    rig.quiet(reg::QUEUE_RESET, 1);
    assert_eq!(rig.read(reg::QUEUE_RESET), 1);
    rig.mmio.queue_reset_done(0);
    assert_eq!(rig.read(reg::QUEUE_RESET), 0);
    rig.refused(reg::QUEUE_READY, 1);
}

#[test]
fn notification_data_carries_the_queue_in_its_low_half() {
    let offered = OFFERED | feature::NOTIFICATION_DATA;
    let mut rig = Rig::offering(offered);
    rig.negotiate(offered);
    rig.set_up(1, &addresses(16));
    rig.quiet(reg::QUEUE_READY, 1);
    assert!(rig.write(reg::STATUS, RUNNING).is_some());
    assert_eq!(rig.write(reg::QUEUE_NOTIFY, 0x8003_0001), Some(Effect::Notify { queue: 1 }));
    rig.refused(reg::QUEUE_NOTIFY, 0x0001_0000);
}

#[test]
fn interrupt_status_and_acknowledge() {
    let mut rig = Rig::running();
    rig.interrupts.used_buffer(0);
    rig.mmio.config_changed();
    assert_eq!(rig.read(reg::INTERRUPT_STATUS), reg::INT_USED_BUFFER | reg::INT_CONFIG_CHANGE);
    rig.quiet(reg::INTERRUPT_ACK, reg::INT_USED_BUFFER);
    assert_eq!(rig.read(reg::INTERRUPT_STATUS), reg::INT_CONFIG_CHANGE);
    rig.quiet(reg::INTERRUPT_ACK, reg::INT_CONFIG_CHANGE);
    assert_eq!(rig.read(reg::INTERRUPT_STATUS), 0);
}

#[test]
fn config_changed_is_silent_before_driver_ok_but_moves_the_generation() {
    let mut rig = Rig::negotiated();
    let before = rig.read(reg::CONFIG_GENERATION);
    rig.mmio.config_changed();
    assert_ne!(rig.read(reg::CONFIG_GENERATION), before);
    assert_eq!(rig.read(reg::INTERRUPT_STATUS), 0);
}

#[test]
fn shared_memory_regions_do_not_exist() {
    let mut rig = Rig::running();
    for region in [0, 1, u32::MAX] {
        rig.quiet(reg::SHM_SEL, region);
        for half in [reg::SHM_LEN_LOW, reg::SHM_LEN_HIGH, reg::SHM_BASE_LOW, reg::SHM_BASE_HIGH] {
            assert_eq!(rig.read(half), u32::MAX);
        }
    }
    assert_eq!(rig.mmio.violations(), 0);
}

#[test]
fn configuration_space_by_1_2_4_and_8_bytes() {
    let mut rig = Rig::running();
    for (offset, len) in [(0, 1), (3, 1), (0, 2), (6, 2), (0, 4), (0x44, 4), (0, 8), (0xef8, 8), (0xeff, 1)] {
        let mut data = vec![0xee; len];
        rig.mmio.read(reg::CONFIG + offset, &mut data, config);
        let want: Vec<u8> = (offset..).take(len).map(|at| at as u8).collect();
        assert_eq!(data, want);
        let written = Effect::WriteConfig { offset: offset as u32, data: data.clone() };
        assert_eq!(rig.mmio.write(reg::CONFIG + offset, &data), Some(written));
    }
    assert_eq!(rig.mmio.violations(), 0);
}

#[test]
fn the_configuration_space_is_readable_from_the_start() {
    let rig = Rig::new();
    assert_eq!(rig.read(reg::CONFIG + 4), u32::from_le_bytes([4, 5, 6, 7]));
}

#[test]
fn status_stays_until_the_reset_is_done() {
    let mut rig = Rig::running();
    rig.interrupts.used_buffer(0);
    rig.mmio.config_changed();
    let generation = rig.read(reg::CONFIG_GENERATION);
    assert_eq!(rig.write(reg::STATUS, 0), Some(Effect::Reset));
    assert_eq!(rig.status(), RUNNING);
    // A second request is still one reset.
    rig.quiet(reg::STATUS, 0);
    rig.mmio.reset_done();
    assert_eq!(rig.status(), 0);
    assert_eq!(rig.read(reg::INTERRUPT_STATUS), 0);
    assert_eq!(rig.read(reg::QUEUE_READY), 0);
    assert_eq!(rig.read(reg::CONFIG_GENERATION), generation, "the generation survives a reset");
    rig.negotiate(OFFERED);
    rig.quiet(reg::QUEUE_SEL, 0);
    rig.refused(reg::QUEUE_READY, 1); // All queue registers are at their defaults.
}

#[test]
fn with_version_3_the_driver_polls_for_the_end_of_a_reset() {
    let mut rig = Rig::running();
    assert!(!rig.mmio.polls_reset());
    rig.mmio = rig.mmio.version_3();
    assert_eq!(rig.read(reg::VERSION), 3);
    assert!(rig.mmio.polls_reset());
    assert_eq!(rig.write(reg::STATUS, 0), Some(Effect::Reset));
    assert_eq!(rig.status(), RUNNING);
    // A handler that another processor runs takes its interrupt.
    rig.interrupts.used_buffer(0);
    assert_eq!(rig.read(reg::INTERRUPT_STATUS), reg::INT_USED_BUFFER);
    rig.quiet(reg::INTERRUPT_ACK, reg::INT_USED_BUFFER);
    assert_eq!(rig.read(reg::INTERRUPT_STATUS), 0);
    assert_eq!(rig.mmio.violations(), 0);
    // One that does not wait sets nothing up.
    rig.refused(reg::STATUS, status::ACKNOWLEDGE);
    rig.mmio.reset_done();
    assert_eq!(rig.status(), 0);
    rig.negotiate(OFFERED);
    assert_eq!(rig.status(), NEGOTIATED);
}

#[test]
fn a_reset_forgets_features_and_selectors() {
    let mut rig = Rig::running();
    rig.quiet(reg::DEVICE_FEATURES_SEL, 1);
    rig.quiet(reg::QUEUE_SEL, 1);
    assert_eq!(rig.write(reg::STATUS, 0), Some(Effect::Reset));
    rig.mmio.reset_done();
    assert_eq!(rig.read(reg::DEVICE_FEATURES), OFFERED as u32);
    assert_eq!(rig.read(reg::QUEUE_SIZE_MAX), 256);
    rig.quiet(reg::STATUS, rig::DRIVER);
    rig.quiet(reg::STATUS, NEGOTIATED);
    assert_eq!(rig.status(), rig::DRIVER, "nothing is accepted any more");
}

#[test]
fn reset_at_reset_is_done_at_once() {
    let mut rig = Rig::new();
    rig.quiet(reg::QUEUE_SEL, 1);
    rig.quiet(reg::STATUS, 0);
    assert_eq!(rig.status(), 0);
    assert_eq!(rig.read(reg::QUEUE_SIZE_MAX), 256, "the selector is at its default");
    rig.quiet(reg::STATUS, status::ACKNOWLEDGE);
    assert_eq!(rig.status(), status::ACKNOWLEDGE);
}

#[test]
fn reset_done_and_queue_reset_done_unasked_do_nothing() {
    let mut rig = Rig::running();
    rig.mmio.reset_done();
    for queue in [0, 1, 2, 3, u16::MAX] {
        rig.mmio.queue_reset_done(queue);
    }
    assert_eq!(rig.status(), RUNNING);
    assert_eq!(rig.write(reg::QUEUE_NOTIFY, 0), Some(Effect::Notify { queue: 0 }));
}

#[test]
fn needs_reset_interrupts_once_and_only_a_reset_ends_it() {
    let mut rig = Rig::running();
    rig.mmio.needs_reset();
    assert_eq!(rig.status(), RUNNING | status::DEVICE_NEEDS_RESET);
    assert_eq!(rig.read(reg::INTERRUPT_STATUS), reg::INT_CONFIG_CHANGE);
    rig.quiet(reg::INTERRUPT_ACK, reg::INT_CONFIG_CHANGE);
    rig.mmio.needs_reset();
    assert_eq!(rig.read(reg::INTERRUPT_STATUS), 0);
    // The driver may not know yet: kicks and late queues have no effect, and are no violation.
    rig.quiet(reg::QUEUE_NOTIFY, 0);
    rig.set_up(1, &addresses(16));
    rig.quiet(reg::QUEUE_READY, 1);
    assert_eq!(rig.read(reg::QUEUE_READY), 0);
    rig.quiet(reg::STATUS, RUNNING | status::DEVICE_NEEDS_RESET);
    rig.quiet(reg::STATUS, RUNNING);
    assert_eq!(rig.status(), RUNNING | status::DEVICE_NEEDS_RESET);
    assert_eq!(rig.write(reg::STATUS, 0), Some(Effect::Reset));
    rig.mmio.needs_reset();
    rig.mmio.reset_done();
    assert_eq!(rig.status(), 0);
}

#[test]
fn needs_reset_before_driver_ok_is_silent_and_prevents_activation() {
    let mut rig = Rig::negotiated();
    rig.set_up(0, &addresses(256));
    rig.quiet(reg::QUEUE_READY, 1);
    rig.mmio.needs_reset();
    assert_eq!(rig.read(reg::INTERRUPT_STATUS), 0);
    rig.quiet(reg::STATUS, RUNNING);
    assert_eq!(rig.status(), RUNNING | status::DEVICE_NEEDS_RESET);
}

#[test]
fn a_device_at_reset_needs_none() {
    let mut rig = Rig::new();
    rig.mmio.needs_reset();
    assert_eq!(rig.status(), 0);
}

#[test]
fn enabled_again_after_a_failed_activation() {
    let mut rig = Rig::running();
    rig.mmio.needs_reset(); // The owner could not start it.
    assert_eq!(rig.write(reg::STATUS, 0), Some(Effect::Reset));
    rig.mmio.reset_done();
    rig.negotiate(OFFERED);
    rig.set_up(0, &addresses(128));
    rig.quiet(reg::QUEUE_READY, 1);
    let queues = vec![(0, addresses(128))];
    assert_eq!(rig.write(reg::STATUS, RUNNING), Some(Effect::Activate { features: OFFERED, queues }));
    assert_eq!(rig.write(reg::QUEUE_NOTIFY, 0), Some(Effect::Notify { queue: 0 }));
}

#[test]
fn enabled_again_while_a_reset_is_under_way_waits_for_it() {
    let mut rig = Rig::running();
    assert_eq!(rig.write(reg::STATUS, 0), Some(Effect::Reset));
    // A driver that does not wait for 0: its writes are lost, and its old state is not revived.
    rig.refused(reg::STATUS, status::ACKNOWLEDGE);
    rig.refused(reg::STATUS, RUNNING);
    rig.mmio.reset_done();
    assert_eq!(rig.status(), 0);
    rig.negotiate(OFFERED);
    assert_eq!(rig.status(), NEGOTIATED);
}
