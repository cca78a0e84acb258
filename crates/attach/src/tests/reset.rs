//! Resets with version 3 of virtio-mmio. `tests/reset.rs` has those that wait for requests.
use super::*;

#[test]
fn a_driver_that_polls_starts_again_and_again() {
    let mut rig = Rig::with(&memory(), Arc::new(LocalIoEventFds::default()), Builder::mmio_version_3);
    for _ in 0..20 {
        rig.start(DESC as u32);
        rig.served();
        rig.write(STATUS, 0);
        rig.wait_for("the end of the reset", |rig| rig.read(STATUS) == 0);
    }
    assert_eq!((rig.device.violations(), rig.device.counters().faults()), (0, vec![]));
}

#[test]
fn a_reset_that_panics_does_not_end_and_holds_nobody_up() {
    let mut rig = Rig::attached(
        Box::new(Altered { reset_panics: true, ..Altered::new() }),
        &memory(),
        Arc::new(NoIoEventFds),
        0,
        |builder| builder.mmio_version_3().mmio(BASE, InterruptFn::new(|| ())).unwrap(),
    );
    rig.start(DESC as u32);
    let running = rig.read(STATUS);
    rig.write(STATUS, 0);
    rig.wait_for("a fault", |rig| !rig.device.counters().faults().is_empty());
    assert_eq!(rig.read(STATUS), running);
    assert!(rig.device.counters().faults()[0].reason.contains("was not reset: as the test asks"));
    assert!(rig.device.stop().is_some());
}
