//! SUSPEND (version 1.4, section 3.4).
mod rig;

use paravane_spec::status::{DEVICE_NEEDS_RESET, DRIVER_OK, FAILED, SUSPEND};
use paravane_spec::{feature, mmio as reg};
use paravane_transport::Effect;
use paravane_transport::Transport as _;
use rig::{DRIVER, NEGOTIATED, OFFERED, RUNNING, Rig, addresses};

const SUSPENDED: u32 = NEGOTIATED | SUSPEND;

/// Running, with queue 0 live.
fn running() -> Rig {
    let features = OFFERED | feature::SUSPEND;
    let mut rig = Rig::offering(features);
    rig.negotiate(features);
    rig.set_up(0, &addresses(256));
    rig.write(reg::QUEUE_READY, 1);
    assert!(matches!(rig.write(reg::STATUS, RUNNING), Some(Effect::Activate { .. })));
    rig
}

fn suspended() -> Rig {
    let mut rig = running();
    assert_eq!(rig.write(reg::STATUS, RUNNING | SUSPEND), Some(Effect::Suspend));
    rig.mmio.suspend_done();
    assert_eq!(rig.status(), SUSPENDED);
    rig
}

#[test]
fn a_device_is_suspended_and_resumed() {
    let mut rig = running();
    for resume in [SUSPENDED | DRIVER_OK, RUNNING] {
        assert_eq!(rig.write(reg::STATUS, RUNNING | SUSPEND), Some(Effect::Suspend));
        // Until the owner is done, the driver reads the old state, and can only reset the device.
        assert_eq!(rig.status(), RUNNING);
        rig.refused(reg::STATUS, RUNNING | SUSPEND);
        rig.mmio.resume_done();
        assert_eq!(rig.status(), RUNNING);
        rig.mmio.suspend_done();
        assert_eq!(rig.status(), SUSPENDED);
        rig.quiet(reg::STATUS, SUSPENDED);
        assert_eq!(rig.write(reg::STATUS, resume), Some(Effect::Resume));
        assert_eq!(rig.status(), SUSPENDED);
        rig.refused(reg::STATUS, resume);
        rig.mmio.suspend_done();
        assert_eq!(rig.status(), SUSPENDED);
        rig.mmio.resume_done();
        assert_eq!(rig.status(), RUNNING);
        assert_eq!(rig.write(reg::QUEUE_NOTIFY, 0), Some(Effect::Notify { queue: 0 }));
    }
}

#[test]
fn a_suspended_device_takes_no_kicks_and_no_configuration() {
    let mut rig = suspended();
    rig.refused(reg::QUEUE_NOTIFY, 0);
    rig.refused(reg::QUEUE_RESET, 1);
    rig.refused(reg::QUEUE_READY, 0);
    rig.refused(reg::CONFIG, 1);
    rig.write(reg::QUEUE_SEL, 1);
    rig.refused(reg::QUEUE_SIZE, 8);
    // An interrupt that came before is acknowledged.
    rig.quiet(reg::INTERRUPT_ACK, reg::INT_USED_BUFFER);
}

#[test]
fn a_change_of_the_configuration_space_waits() {
    let mut rig = suspended();
    let generation = rig.read(reg::CONFIG_GENERATION);
    rig.mmio.config_changed();
    assert_eq!((rig.read(reg::CONFIG_GENERATION), rig.read(reg::INTERRUPT_STATUS)), (generation, 0));
    assert_eq!(rig.write(reg::STATUS, RUNNING), Some(Effect::Resume));
    rig.mmio.resume_done();
    assert_eq!(rig.read(reg::CONFIG_GENERATION), generation + 1);
    assert_eq!(rig.read(reg::INTERRUPT_STATUS), reg::INT_CONFIG_CHANGE);
}

#[test]
fn the_bit_is_ignored_before_the_device_runs() {
    let mut rig = Rig::offering(OFFERED | feature::SUSPEND);
    rig.negotiate(OFFERED | feature::SUSPEND);
    rig.quiet(reg::STATUS, NEGOTIATED | SUSPEND);
    assert_eq!(rig.status(), NEGOTIATED);
    assert!(matches!(rig.write(reg::STATUS, RUNNING | SUSPEND), Some(Effect::Activate { .. })));
    assert_eq!(rig.status(), RUNNING);
}

#[test]
fn the_bit_is_undefined_without_its_feature() {
    let mut rig = Rig::running();
    rig.refused(reg::STATUS, RUNNING | SUSPEND);
    assert_eq!(rig.status(), RUNNING);
}

#[test]
fn a_reset_leads_out_of_every_state() {
    for done in [false, true] {
        let mut rig = running();
        rig.write(reg::STATUS, RUNNING | SUSPEND);
        if done {
            rig.mmio.suspend_done();
        }
        assert_eq!(rig.write(reg::STATUS, 0), Some(Effect::Reset));
        // Too late.
        rig.mmio.suspend_done();
        rig.mmio.reset_done();
        assert_eq!(rig.status(), 0);
    }
    let mut rig = suspended();
    rig.write(reg::STATUS, RUNNING);
    assert_eq!(rig.write(reg::STATUS, 0), Some(Effect::Reset));
    rig.mmio.resume_done();
    rig.mmio.reset_done();
    assert_eq!(rig.status(), 0);
    rig.quiet(reg::STATUS, DRIVER & 1);
}

#[test]
fn a_device_that_cannot_needs_a_reset() {
    let mut rig = running();
    rig.write(reg::STATUS, RUNNING | SUSPEND);
    rig.mmio.needs_reset();
    rig.mmio.suspend_done();
    assert_eq!(rig.status(), RUNNING | DEVICE_NEEDS_RESET);
    rig.quiet(reg::STATUS, RUNNING | SUSPEND);
    assert_eq!(rig.status(), RUNNING | DEVICE_NEEDS_RESET);

    let mut rig = suspended();
    rig.write(reg::STATUS, RUNNING);
    rig.mmio.needs_reset();
    rig.mmio.resume_done();
    assert_eq!(rig.status(), SUSPENDED | DEVICE_NEEDS_RESET);
    rig.quiet(reg::STATUS, RUNNING | DEVICE_NEEDS_RESET);
    assert_eq!(rig.status(), SUSPENDED | DEVICE_NEEDS_RESET);
}

#[test]
fn a_driver_that_fails_resumes_nothing() {
    let mut rig = suspended();
    rig.quiet(reg::STATUS, SUSPENDED | FAILED);
    rig.refused(reg::STATUS, RUNNING | FAILED);
    assert_eq!(rig.status(), SUSPENDED | FAILED);
}
