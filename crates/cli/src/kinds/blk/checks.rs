//! Checks of what a VMM and the driver of a disk have negotiated.
use crate::doctor::negotiated::Check;
use paravane_spec::blk;
use paravane_spec::vhost_user::protocol_feature as protocol;

pub(super) const CHECKS: &[Check] = &[
    Check {
        name: "in-flight tracking",
        // A frame may be lost in any network.
        applies: |_| true,
        has: |it| it.has_protocol(protocol::INFLIGHT_SHMFD),
        with: "requests in flight survive a crash of the daemon",
        without: "no in-flight tracking: a crash of the daemon loses the requests in flight",
        remedy: "use a VMM that has it: QEMU negotiates it without an option, and resumes with reconnect-ms=1000",
    },
    Check {
        name: "resize",
        applies: |_| true,
        has: |it| it.has_protocol(protocol::CONFIG) && it.has_protocol(protocol::BACKEND_REQ),
        with: "a running guest learns of a new size of the image",
        without: "no configuration messages: the guest learns of a new size when it boots",
        remedy: "restart the guest after a change of the size, or use QEMU, which negotiates them without an option",
    },
    Check {
        name: "flush",
        applies: |_| true,
        has: |it| it.has(blk::F_FLUSH),
        with: "the guest flushes when it needs to",
        without: "no flush requests: every write is flushed before it completes",
        remedy: "QEMU offers it without an option; else the driver of the guest lacks it",
    },
    Check {
        name: "discard",
        applies: |it| !it.has(blk::F_RO),
        has: |it| it.has(blk::F_DISCARD),
        with: "the guest can free blocks of the image",
        without: "no discard: the image never shrinks",
        remedy: "QEMU: discard=on (its default); Linux 5.0 or later in the guest",
    },
];
