//! A kick at every point of every transition.
//!
//! A driver makes a buffer available and kicks if requested, while the control path goes through a
//! transition. When both are done, the present owner of the queue serves while it is signalled; it
//! must have seen the buffer.
use crate::scene::{Owner, Scene};
use loom::thread;
use paravane_notify::NotifierState;
use std::sync::Arc;

/// Explores `transition` against a driver with one buffer.
fn a_kick_during(transition: impl Fn(&Scene, &mut Owner) + Sync + Send + 'static) {
    loom::model(move || {
        let scene = Scene::new();
        let driver = {
            let scene = Arc::clone(&scene);
            thread::spawn(move || scene.drive())
        };
        let mut owner = Owner::default();
        transition(&scene, &mut owner);
        driver.join().unwrap();
        owner.serve(&scene);
        assert_eq!(owner.seen, 1, "the kick is lost");
    });
}

/// The order that a signal itself makes, by ioeventfd and by exit.
#[test]
fn an_owner_that_takes_a_kick_sees_what_it_is_about() {
    for assigned in [false, true] {
        loom::model(move || {
            let scene = Scene::new();
            if assigned {
                scene.queue().assign().expect("a registration");
                assert_eq!(scene.queue().notifier().take(), 1);
            }
            let driver = {
                let scene = Arc::clone(&scene);
                thread::spawn(move || scene.drive_unasked())
            };
            let mut owner = Owner::default();
            if owner.glance(&scene) {
                assert_eq!(owner.seen, 1);
            }
            driver.join().unwrap();
        });
    }
}

#[test]
fn no_transition() {
    a_kick_during(|scene, owner| {
        owner.serve(scene);
    });
}

#[test]
fn assign() {
    a_kick_during(|scene, owner| {
        scene.queue().assign().expect("a registration");
        assert!(owner.serve(scene), "a start is signalled");
    });
}

/// The queue starts all the same, so that what an earlier owner began is found.
#[test]
fn a_refused_assign() {
    a_kick_during(|scene, owner| {
        owner.start_to_serve(scene);
        scene.host.refuse();
        scene.queue().assign().expect_err("the host refuses");
        assert!(owner.serve(scene), "a start is signalled");
        assert_eq!(scene.queue().state(), NotifierState::Deassigned);
    });
}

#[test]
fn deassign() {
    a_kick_during(|scene, owner| {
        scene.queue().assign().expect("a registration");
        assert!(owner.serve(scene));
        // The handler is removed. A kick may be under way.
        scene.queue().deassign().expect("removal");
        // The final test.
        owner.serve(scene);
        if scene.host.delivered() > 0 {
            assert_eq!(owner.seen, 1, "a kick by ioeventfd is lost when it is removed");
        }
    });
}

#[test]
fn deassign_and_assign_again() {
    a_kick_during(|scene, owner| {
        scene.queue().assign().expect("a registration");
        owner.serve(scene);
        scene.queue().deassign().expect("removal");
        owner.start_to_serve(scene);
        scene.queue().assign().expect("and again");
    });
}

/// Stop and restore on a host without ioeventfds.
///
/// Only the initial signal reports waiting buffers.
#[test]
fn stop_and_restore() {
    a_kick_during(|scene, owner| {
        owner.start_to_serve(scene);
        scene.renew();
    });
}

#[test]
fn stop_and_restore_with_ioeventfds() {
    a_kick_during(|scene, owner| {
        scene.queue().assign().expect("a registration");
        owner.serve(scene);
        scene.queue().deassign().expect("removal");
        owner.start_to_serve(scene);
        scene.renew();
        scene.queue().assign().expect("a registration");
    });
}

/// Our event loop takes the signal and is stopped before it looks.
///
/// The back end finds the buffers that remain.
#[test]
fn grab() {
    a_kick_during(|scene, owner| {
        scene.queue().assign().expect("a registration");
        owner.start_to_serve(scene);
        scene.queue().grab().expect("a grab");
    });
}

/// The same with the roles exchanged.
#[test]
fn release() {
    a_kick_during(|scene, owner| {
        scene.queue().assign().expect("a registration");
        scene.queue().grab().expect("a grab");
        owner.start_to_serve(scene);
        scene.queue().release().expect("the hand-back");
    });
}

#[test]
fn nested_grabs() {
    a_kick_during(|scene, owner| {
        scene.queue().assign().expect("a registration");
        owner.serve(scene);
        scene.queue().grab().expect("a grab");
        scene.queue().grab().expect("another");
        owner.serve(scene);
        scene.queue().release().expect("one");
        owner.start_to_serve(scene);
        scene.queue().release().expect("the other");
        assert_eq!(scene.queue().state(), NotifierState::Assigned);
        assert!(owner.serve(scene), "a hand-back is signalled");
    });
}

/// A back end can also own the queue where kicks exit.
#[test]
fn grab_and_release_without_ioeventfds() {
    a_kick_during(|scene, owner| {
        owner.start_to_serve(scene);
        scene.queue().grab().expect("a grab");
        owner.start_to_serve(scene);
        scene.queue().release().expect("the hand-back");
        assert_eq!(scene.queue().state(), NotifierState::Deassigned);
    });
}

#[test]
fn relocate() {
    a_kick_during(|scene, owner| {
        scene.queue().assign().expect("a registration");
        owner.start_to_serve(scene);
        scene.queue().relocate(Some(0x1050)).expect("moved");
        assert_eq!(scene.queue().state(), NotifierState::Assigned);
    });
}

#[test]
fn relocate_to_nowhere_and_back() {
    a_kick_during(|scene, owner| {
        scene.queue().assign().expect("a registration");
        owner.serve(scene);
        scene.queue().relocate(None).expect("taken off");
        owner.start_to_serve(scene);
        scene.queue().relocate(Some(0x50)).expect("back");
        assert_eq!(scene.queue().state(), NotifierState::Assigned);
    });
}

/// While a back end owns it.
#[test]
fn relocate_off_limits() {
    a_kick_during(|scene, owner| {
        scene.queue().assign().expect("a registration");
        scene.queue().grab().expect("a grab");
        owner.serve(scene);
        scene.queue().relocate(Some(0x1050)).expect("moved");
        assert_eq!(scene.queue().state(), NotifierState::OffLimits);
    });
}

/// A grab, a stop during it, a restore with another notifier, its grab.
#[test]
fn stop_and_restore_off_limits() {
    a_kick_during(|scene, owner| {
        scene.queue().assign().expect("a registration");
        scene.queue().grab().expect("a grab");
        owner.start_to_serve(scene);
        scene.queue().release().expect("the hand-back");
        scene.queue().deassign().expect("removal");
        owner.start_to_serve(scene);
        scene.renew();
        scene.queue().grab().expect("a grab");
        scene.queue().release().expect("the hand-back");
    });
}
