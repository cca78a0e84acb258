//! Entropy device, by its ring.
use crate::raw::{GPA, Machine, Raw};
use crate::rig::Rig;
use paravane_device::rng::MAX_REQUEST;
use paravane_ring::Segment;
use paravane_spec::feature::{ACCESS_PLATFORM, EVENT_IDX, INDIRECT_DESC, RING_PACKED};
use paravane_spec::vhost_user::{VringState, request};
use paravane_test_support::patience;
use zerocopy::IntoBytes;

/// QEMU offers all features of an entropy source, also without an IOMMU.
#[test]
fn an_entropy_source_offers_no_iommu() {
    let rig = Rig::entropy();
    let raw = Raw::connect(&rig.socket());
    // Accepts all protocol features, with which a disk offers it.
    raw.begin(0);
    assert_eq!(raw.ask_number(request::GET_FEATURES) & ACCESS_PLATFORM, 0);
}

/// User Mode Linux and crosvm make queues of 256 for every device.
#[test]
fn a_queue_may_be_as_large_as_vmms_make_them() {
    let rig = Rig::entropy();
    for (features, size) in [(0, 256), (RING_PACKED, 256), (0, 1024)] {
        let raw = Raw::connect(&rig.socket());
        let mut machine = Machine::new(features, size, 1);
        let base = machine.first_base();
        machine.attach(&raw, base, false);
        assert!(rig.status().queues[0].live);
    }
    assert_eq!(rig.status().protocol_errors, 0);
}

#[test]
fn buffers_are_filled_with_bytes_that_differ() {
    let rig = Rig::entropy();
    for features in [0, INDIRECT_DESC | EVENT_IDX, RING_PACKED, RING_PACKED | INDIRECT_DESC | EVENT_IDX] {
        let raw = Raw::connect(&rig.socket());
        let mut machine = Machine::new(features, 64, 1);
        let base = machine.first_base();
        machine.attach(&raw, base, false);
        let most = MAX_REQUEST as usize;
        let mut seen = Vec::new();
        for wanted in [1, 7, 64, 4095, most, most + 5000] {
            let at = Machine::slot(0);
            machine.set_bytes(at, vec![0; wanted + 1]);
            // In two pieces, if possible.
            let first = (wanted / 2).max(1);
            let pieces = [(at, first), (at + first as u64, wanted - first)]
                .map(|(at, len)| Segment { addr: GPA + at, len: len as u32 });
            let pieces = if wanted == first { &pieces[..1] } else { &pieces[..] };
            let id = machine.queue.add(&[], pieces).unwrap();
            machine.kick();
            let used = loop {
                // The start of the queue causes one too.
                assert!(machine.wait(patience()), "no interrupt");
                if let Some(used) = machine.queue.pop_used().unwrap() {
                    break used;
                }
            };
            let given = wanted.min(most);
            assert_eq!((used.id, used.len as usize), (id, given));
            let bytes = machine.bytes(at, wanted + 1);
            assert!(bytes[given..].iter().all(|&byte| byte == 0), "more than was said");
            // Of 4000 bytes none repeats those of another request.
            if given >= 4000 {
                let other = bytes[..4000].to_vec();
                assert!(!seen.contains(&other) && other.iter().any(|&byte| byte != 0));
                seen.push(other);
            }
        }
        assert_eq!(seen.len(), 3);
        // A read-only buffer breaks the queue.
        machine.queue.add(&[Segment { addr: GPA + Machine::slot(0), len: 16 }], &[]).unwrap();
        machine.kick();
        rig.wait_for(|status| status.queues[0].error.is_some());
        raw.ask(request::GET_VRING_BASE, VringState::default().as_bytes());
        assert_eq!(rig.status().queues[0].error, None);
    }
    assert_eq!(rig.status().protocol_errors, 0);
}
