//! Clients that connect, work and disconnect.
use crate::driver::{Driver, Random, Wish};
use crate::raw::{Machine, Raw};
use crate::rig::{DISK, Rig};
use paravane_spec::feature;
use paravane_spec::vhost_user::{VringState, protocol_feature, request};

#[test]
fn a_disk_serves_one_driver_after_the_other() {
    let mut rig = Rig::new(2);
    let mut model = vec![0; DISK];
    let mut random = Random::new(1);
    let mut sessions = 0;
    for packed in [false, true, true, false] {
        for event_idx in [false, true] {
            for (queues, depth) in [(1, 1), (1, 32), (2, 16)] {
                let wish = Wish { packed, event_idx, queues, depth };
                let mut driver = Driver::connect(&rig.socket(), wish).unwrap();
                driver.exercise(&mut model, 300, &mut random);
                sessions += 1;
                let status = rig.status();
                assert!(status.connected);
                assert_eq!(status.sessions, sessions);
                assert!(status.queues[0].live && status.queues[0].enabled);
                drop(driver);
            }
        }
    }
    let status = rig.wait_for(|status| !status.connected);
    assert_eq!((status.protocol_errors, &status.last_error), (0, &None));
    for queue in &status.queues {
        assert_eq!(queue.taken, queue.completed);
        assert!(queue.interrupts > 0 && queue.kicks > 0 && !queue.live, "{queue:?}");
    }
    let (one, two) = (status.queues[0].taken, status.queues[1].taken);
    assert_eq!((one, two), (300 * sessions, 300 * 8));
    rig.stop();
    assert!(std::fs::read(rig.image()).unwrap() == model);
}

/// OVMF uses transitional devices by their legacy interface.
#[test]
fn a_driver_from_before_virtio_1_is_served() {
    for features in [0, feature::EVENT_IDX, feature::INDIRECT_DESC] {
        let rig = Rig::new(1);
        let raw = Raw::connect(&rig.socket());
        let mut machine = Machine::new(features, 64, 8);
        machine.features &= !feature::VERSION_1;
        machine.attach(&raw, 0, false);
        assert_eq!(rig.status().features & feature::VERSION_1, 0);
        let (mut model, mut random) = (vec![0; DISK], Random::new(4));
        for _ in 0..20 {
            machine.fill(DISK, &mut random);
            machine.finish(&mut model);
        }
        assert_eq!(rig.status().protocol_errors, 0);
    }
}

#[test]
fn a_network_card_tells_the_network_that_a_machine_has_moved_and_a_disk_does_not() {
    let rig = Rig::new(1);
    assert_eq!(
        Raw::connect(&rig.socket()).ask_number(request::GET_PROTOCOL_FEATURES) & protocol_feature::RARP,
        0
    );
    let rig = Rig::card();
    let raw = Raw::connect(&rig.socket());
    // QEMU and DPDK count queue pairs, others queues.
    let counted = |features: u64| {
        raw.say(request::SET_PROTOCOL_FEATURES, &(features | protocol_feature::REPLY_ACK), &[]);
        raw.ask_number(request::GET_QUEUE_NUM)
    };
    assert_eq!(counted(protocol_feature::MQ | protocol_feature::STATUS), 2);
    assert_eq!(counted(protocol_feature::MQ | protocol_feature::BACKEND_REQ | protocol_feature::CONFIG), 5);
    assert_eq!(counted(protocol_feature::MQ | protocol_feature::RARP), 2);
    raw.begin(u64::MAX);
    assert_ne!(raw.ask_number(request::GET_PROTOCOL_FEATURES) & protocol_feature::RARP, 0);
    assert_eq!(raw.ask_number(request::GET_QUEUE_NUM), 2);
    raw.say(request::SEND_RARP, &[2u8, 0, 0, 0, 0, 1, 0, 0][..], &[]);
    for index in 0..5 {
        raw.say(request::SET_VRING_ENABLE, &VringState { index, num: 1 }, &[]);
    }
    assert_eq!(rig.status().protocol_errors, 0);
    // A length that it cannot have.
    raw.send(request::SEND_RARP, &[2, 0, 0, 0, 0, 1], &[]).unwrap();
    let (_, reply, _) = raw.receive().unwrap();
    assert_eq!(reply, 1u64.to_le_bytes());
}
