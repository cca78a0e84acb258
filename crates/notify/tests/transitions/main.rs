//! No transition of a host notifier loses a kick or sends it to another queue.
//!
//! Tests every interleaving of short scripts with two kicks, long random scripts, and a guest on a
//! real KVM.
#![cfg(not(loom))]
#[cfg(target_arch = "x86_64")]
mod kvm;
mod world;

use proptest::prelude::*;
use world::{ADDRESSES, KICK, Step, World};

/// Transitions, each with its further steps.
///
/// The steps have the order that [`paravane_notify::HostNotifier`] requires.
const SCRIPTS: [(&str, &[Step]); 12] = {
    use Step::*;
    [
        ("start", &[Take, Look, Assign, Take, Look]),
        ("refused start", &[Take, Refuse(true), Assign, Look, Take]),
        ("stop", &[Assign, Take, Off, Deassign, On, Take, Look]),
        ("a host that does not let go", &[Assign, Take, Off, Refuse(true), Deassign, On]),
        ("stop and start", &[Assign, Take, Off, Deassign, Assign, On, Take]),
        ("stop and restore", &[Assign, Take, Off, Deassign, Renew, On]),
        ("restore and start", &[Take, Off, Renew, Assign, On, Take, Look]),
        ("hand-over", &[Assign, Take, Off, Grab, On, Take, Look]),
        ("hand-over and hand-back", &[Assign, Off, Grab, On, Take, Off, Release, On]),
        ("nested hand-over", &[Off, Grab, Grab, On, Take, Off, Release, On]),
        ("move", &[Assign, Take, Look, Relocate(Some(2)), Take, Look]),
        ("away and back", &[Assign, Take, Relocate(None), Look, Take, Relocate(Some(0)), Take]),
    ]
};

/// Calls `run` with every interleaving of `a` and `b`.
fn interleave(a: &[Step], b: &[Step], begun: &mut Vec<Step>, run: &mut impl FnMut(&[Step])) {
    if a.is_empty() || b.is_empty() {
        let length = begun.len();
        begun.extend_from_slice(a);
        begun.extend_from_slice(b);
        run(begun);
        begun.truncate(length);
        return;
    }
    begun.push(a[0]);
    interleave(&a[1..], b, begun, run);
    *begun.last_mut().unwrap() = b[0];
    interleave(a, &b[1..], begun, run);
    begun.pop();
}

#[test]
fn two_kicks_at_every_step_of_every_transition() {
    for (name, script) in SCRIPTS {
        let mut count = 0_u64;
        interleave(&[KICK, KICK].concat(), script, &mut Vec::new(), &mut |steps| {
            count += 1;
            let run = || {
                let mut world = World::new();
                steps.iter().for_each(|&step| world.apply(0, step));
                world.settle();
            };
            if let Err(panic) = std::panic::catch_unwind(run) {
                eprintln!("{name}: {steps:?}");
                std::panic::resume_unwind(panic);
            }
        });
        assert!(count > 1000, "{name}");
    }
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => proptest::sample::select(KICK.to_vec()),
        4 => proptest::sample::select(vec![Step::Take, Step::Look]),
        3 => proptest::sample::select(vec![Step::On, Step::Off]),
        4 => proptest::sample::select(vec![Step::Assign, Step::Deassign, Step::Grab, Step::Release, Step::Renew]),
        1 => proptest::option::of(0..ADDRESSES.len()).prop_map(Step::Relocate),
        1 => any::<bool>().prop_map(Step::Refuse),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Any steps in any order, also those that are no transition of the current state.
    #[test]
    fn any_steps_of_two_queues(steps in proptest::collection::vec((0..2_usize, step()), 0..120)) {
        let mut world = World::new();
        for (queue, step) in steps {
            world.apply(queue, step);
        }
        world.settle();
    }
}
