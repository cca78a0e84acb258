//! Writes the seeds of the corpora: a small scenario a file, named after it.
//!
//! A target decodes its input step by step, so the bytes below are the steps in `src/TARGET.rs`. If
//! the decoding of a target changes, change them too and run this again.
//!
//! `cargo run -p paravane-fuzz --example seeds`
use std::fs;
use std::io;
use std::path::Path;

/// A name and the pieces of the input.
type Seed = (&'static str, &'static [&'static [u8]]);

/// Steps of `split_device`.
///
/// After size (as a power of two), feature bits, and batch slots less one.
mod device {
    /// Descriptor 0: 16 readable bytes, the last of its chain.
    pub(super) const READABLE: &[u8] =
        &[0, 0, 0, /* addr */ 0, 0, 0, /* len */ 0, 16, /* flags */ 0, /* next */ 0];
    /// Descriptor 0 goes on at 1.
    pub(super) const FIRST: &[u8] = &[0, 0, 0, 0, 0, 0, 0, 16, 1, 1];
    /// Descriptor 1: 512 writable bytes.
    pub(super) const SECOND: &[u8] = &[0, 0, 1, 0, 64, 0, 4, 1, 2, 0];
    /// Descriptor 1 goes back to 0.
    pub(super) const LOOP: &[u8] = &[0, 0, 1, 0, 64, 0, 4, 1, 1, 0];
    /// Descriptor 1 is readable, after a writable descriptor 0.
    pub(super) const WRITABLE_FIRST: &[u8] = &[0, 0, 0, 0, 0, 0, 0, 16, 3, 1];
    pub(super) const READABLE_SECOND: &[u8] = &[0, 0, 1, 0, 64, 0, 4, 1, 0, 0];
    /// Descriptor 0 has no bytes.
    pub(super) const EMPTY: &[u8] = &[0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    /// Descriptor 0 lies at the very end of the address space.
    pub(super) const WRAPS: &[u8] = &[0, 0, 0, 6, 0, 0, 16, 0, 0];
    /// Descriptor 0 goes on outside of the table.
    pub(super) const OUTSIDE: &[u8] = &[0, 0, 0, 0, 0, 0, 0, 16, 1, 255, 255, 255];
    /// Descriptor 0 names a table of two entries: one readable, one writable.
    pub(super) const INDIRECT: &[u8] = &[0, 0, 0, 4, 0, 3, 2, 4, 0];
    pub(super) const TABLE_0: &[u8] = &[0, 7, 0, 0, 0, 0, 0, 16, 1, 1];
    pub(super) const TABLE_1: &[u8] = &[0, 7, 1, 0, 64, 0, 4, 1, 2, 0];
    /// The first entry is a table again.
    pub(super) const TABLE_NESTED: &[u8] = &[0, 7, 0, 4, 0, 3, 2, 4, 0];
    /// Wrong tables: chained on, no multiple of 16 long, and empty.
    pub(super) const INDIRECT_NEXT: &[u8] = &[0, 0, 0, 4, 0, 3, 2, 5, 1];
    pub(super) const INDIRECT_ODD: &[u8] = &[0, 0, 0, 4, 0, 0, 17, 4, 0];
    pub(super) const INDIRECT_EMPTY: &[u8] = &[0, 0, 0, 4, 0, 0, 0, 4, 0];
    /// A table that is only partly in memory.
    pub(super) const INDIRECT_OUTSIDE: &[u8] = &[0, 0, 0, 4, 63, 3, 255, 4, 0];
    /// available[0] = 0, and the index one up.
    pub(super) const OFFER: &[u8] = &[0, 2, 0, 0, 0, 3, 0];
    /// available[7] = 0: where position 65535 lies.
    pub(super) const NEXT_SLOT: &[u8] = &[0, 2, 7, 0];
    pub(super) const OFFER_TWICE: &[u8] = &[0, 2, 0, 0, 0, 2, 1, 0, 0, 3, 1];
    /// The index jumps by the size and one.
    pub(super) const JUMP: &[u8] = &[0, 4, 9, 0];
    pub(super) const BACKWARDS: &[u8] = &[0, 4, 255, 255];
    pub(super) const POP: &[u8] = &[7, 0];
    /// While the table is fetched, its descriptor changes.
    pub(super) const POP_TAMPERED: &[u8] = &[7, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7, 0, 4, 0, 3, 2, 4, 0];
    pub(super) const COMPLETE: &[u8] = &[10, 0, 0, 2, 0, 0];
    pub(super) const COMPLETE_UNKNOWN: &[u8] = &[14, 0, 5, 0, 0, 0, 0, 0];
    pub(super) const PUBLISH: &[u8] = &[12];
    pub(super) const ARM: &[u8] = &[13];
    pub(super) const QUIET: &[u8] = &[14, 3];
    pub(super) const NO_INTERRUPT: &[u8] = &[0, 5, 1];
    pub(super) const USED_EVENT: &[u8] = &[0, 6, 0, 0];
}

const SPLIT_DEVICE: &[Seed] = {
    use device::*;
    const PLAIN: &[u8] = &[3, 0, 7];
    const INDIRECTS: &[u8] = &[3, 1, 7];
    const EVENTS: &[u8] = &[3, 2, 7];
    /// After 65535 requests, so that the next is at the wrap.
    const AT_THE_WRAP: &[u8] = &[3, 0xf2, 0xc7, 255, 255];
    &[
        ("round-trip", &[PLAIN, QUIET, READABLE, OFFER, POP, COMPLETE, PUBLISH, ARM, POP]),
        ("no-interrupt", &[PLAIN, NO_INTERRUPT, READABLE, OFFER, POP, COMPLETE, PUBLISH]),
        ("event-index", &[EVENTS, ARM, USED_EVENT, READABLE, OFFER, ARM, POP, COMPLETE, PUBLISH, ARM]),
        (
            "event-index-wrap",
            &[AT_THE_WRAP, ARM, NEXT_SLOT, READABLE, OFFER, ARM, POP, COMPLETE, PUBLISH, ARM],
        ),
        ("queue-of-one", &[&[0, 3, 0], READABLE, OFFER, POP, COMPLETE, PUBLISH, OFFER, POP]),
        ("chain", &[PLAIN, FIRST, SECOND, OFFER, POP, COMPLETE, PUBLISH]),
        ("indirect", &[INDIRECTS, INDIRECT, TABLE_0, TABLE_1, OFFER, POP, COMPLETE, PUBLISH]),
        (
            "indirect-tampered",
            &[INDIRECTS, INDIRECT, TABLE_0, TABLE_1, OFFER, POP_TAMPERED, COMPLETE, PUBLISH],
        ),
        ("indirect-not-negotiated", &[PLAIN, INDIRECT, TABLE_0, TABLE_1, OFFER, POP, POP]),
        ("indirect-nested", &[INDIRECTS, INDIRECT, TABLE_NESTED, TABLE_1, OFFER, POP]),
        ("indirect-and-next", &[INDIRECTS, INDIRECT_NEXT, SECOND, TABLE_0, TABLE_1, OFFER, POP]),
        ("indirect-odd-length", &[INDIRECTS, INDIRECT_ODD, OFFER, POP]),
        ("indirect-empty", &[INDIRECTS, INDIRECT_EMPTY, OFFER, POP]),
        ("indirect-outside", &[INDIRECTS, INDIRECT_OUTSIDE, OFFER, POP]),
        ("loop", &[PLAIN, FIRST, LOOP, OFFER, POP, PUBLISH, ARM]),
        ("readable-after-writable", &[PLAIN, WRITABLE_FIRST, READABLE_SECOND, OFFER, POP]),
        ("zero-length", &[PLAIN, EMPTY, OFFER, POP]),
        ("address-wraps", &[PLAIN, WRAPS, OFFER, POP]),
        ("next-outside", &[PLAIN, OUTSIDE, OFFER, POP]),
        ("head-twice", &[PLAIN, READABLE, OFFER_TWICE, POP, COMPLETE, PUBLISH]),
        ("index-jumps", &[PLAIN, READABLE, JUMP, POP, ARM]),
        ("index-backwards", &[PLAIN, READABLE, BACKWARDS, ARM, POP]),
        ("complete-unknown", &[PLAIN, READABLE, OFFER, POP, COMPLETE_UNKNOWN, COMPLETE, PUBLISH]),
    ]
};

/// Steps of `split_driver`.
///
/// After size (as a power of two), feature bits, and length of the indirect tables.
mod driver {
    /// One readable segment; two and one writable; six of each.
    pub(super) const ADD: &[u8] = &[5, 1, 0, 0, 1, 0];
    pub(super) const ADD_CHAIN: &[u8] = &[5, 8, 0, 0, 1, 0, 0, 1, 2, 0, 0, 2, 3, 0];
    pub(super) const PUBLISH: &[u8] = &[9];
    pub(super) const HONEST: &[u8] = &[4, 16, 0, 0, 0];
    pub(super) const TOO_LONG: &[u8] = &[4, 255, 255, 255, 255];
    pub(super) const POP: &[u8] = &[10];
    pub(super) const ENABLE: &[u8] = &[13];
    pub(super) const DISABLE: &[u8] = &[14];
    pub(super) const POLL: &[u8] = &[15];
    pub(super) const USE_0: &[u8] = &[0, 0, 0, 1, 0, 0, 0];
    pub(super) const USE_OUTSIDE: &[u8] = &[0, 1, 0, 0, 1, 0, 0, 0, 0, 0];
    pub(super) const JUMP: &[u8] = &[0, 2, 200];
    pub(super) const BACKWARDS: &[u8] = &[0, 3, 255, 255];
    pub(super) const NO_NOTIFY: &[u8] = &[0, 4, 1];
    /// The `next` of descriptor 0 now leads outside.
    pub(super) const TAMPER: &[u8] = &[0, 6, 12, 0, 255, 255, 255, 255];
}

const SPLIT_DRIVER: &[Seed] = {
    use driver::*;
    const PLAIN: &[u8] = &[3, 0, 0];
    const INDIRECTS: &[u8] = &[3, 1, 4];
    const EVENTS: &[u8] = &[3, 2, 0];
    &[
        ("round-trip", &[PLAIN, DISABLE, ADD, PUBLISH, HONEST, POP, POP, ENABLE, POLL]),
        ("event-index", &[EVENTS, ENABLE, POLL, ADD, PUBLISH, HONEST, POLL, POP, POLL]),
        ("chain", &[PLAIN, ADD_CHAIN, ADD_CHAIN, PUBLISH, HONEST, HONEST, POP, POP]),
        ("indirect", &[INDIRECTS, ADD_CHAIN, ADD, PUBLISH, HONEST, HONEST, POP, POP]),
        ("full", &[PLAIN, ADD_CHAIN, ADD_CHAIN, ADD_CHAIN, PUBLISH, HONEST, POP, ADD_CHAIN]),
        ("length-clamped", &[PLAIN, ADD_CHAIN, PUBLISH, TOO_LONG, POP]),
        ("used-before-published", &[PLAIN, ADD, USE_0, POP, PUBLISH, ADD]),
        ("used-twice", &[PLAIN, ADD, ADD, PUBLISH, USE_0, USE_0, POP, POP, POP]),
        ("used-outside", &[PLAIN, ADD, PUBLISH, USE_OUTSIDE, POP, ADD]),
        ("index-jumps", &[PLAIN, ADD, PUBLISH, JUMP, POLL, POP, POP]),
        ("index-backwards", &[PLAIN, ADD, PUBLISH, BACKWARDS, POP]),
        ("no-notify", &[PLAIN, NO_NOTIFY, ADD, PUBLISH]),
        ("descriptors-tampered", &[PLAIN, ADD_CHAIN, PUBLISH, TAMPER, HONEST, POP, ADD_CHAIN, ADD_CHAIN]),
    ]
};

/// Steps of `packed_device`.
///
/// After size less one, feature bits, and batch slots less one.
mod packed_device {
    /// Descriptors less one, identifier; then each: its kind, and where and how long.
    pub(super) const READABLE: &[u8] = &[0, 0, 3, 0, 0, 0, 0, 5];
    /// Its identifier is 0 in a queue of one.
    pub(super) const ALONE: &[u8] = &[0, 0, 2, 0, 0, 0, 0, 5];
    pub(super) const CHAIN: &[u8] = &[0, 2, 4, 0, 0, 0, 0, 5, 2, 0, 1, 0, 6, 2, 0, 2, 0, 7];
    pub(super) const WRONG_WAY: &[u8] = &[0, 1, 4, 2, 0, 0, 0, 5, 0, 0, 1, 0, 6];
    pub(super) const INDIRECT: &[u8] = &[0, 0, 5, 4, 0, 0, 0, 2];
    pub(super) const EMPTY: &[u8] = &[0, 0, 3, 0, 0, 0, 0, 0];
    pub(super) const OUTSIDE: &[u8] = &[0, 0, 255, 9, 1, 0, 0, 0, 0, 5];
    pub(super) const WRAPS: &[u8] = &[0, 0, 3, 0, 6, 0, 5, 9];
    pub(super) const TABLE: &[u8] = &[4, 1, 5, 0, 0, 0, 0, 0, 5];
    pub(super) const TABLE_NEXT: &[u8] = &[4, 1, 6, 2, 0, 0, 0, 0, 5];
    pub(super) const POP: &[u8] = &[7, 0];
    pub(super) const COMPLETE: &[u8] = &[10, 0, 7, 0, 0, 0];
    pub(super) const COMPLETE_SECOND: &[u8] = &[10, 1, 7, 0, 0, 0];
    pub(super) const COMPLETE_UNKNOWN: &[u8] = &[14, 0, 9, 0, 0, 0, 0, 0];
    pub(super) const PUBLISH: &[u8] = &[12];
    pub(super) const ARM: &[u8] = &[13];
    pub(super) const EVENT: &[u8] = &[4, 3, 1, 1, 2];
    pub(super) const SETTLE: &[u8] = &[15];
}

const PACKED_DEVICE: &[Seed] = {
    use packed_device::*;
    const PLAIN: &[u8] = &[7, 0, 7];
    const ODD: &[u8] = &[4, 2, 7];
    const INDIRECTS: &[u8] = &[7, 1, 7];
    const ORDERED: &[u8] = &[7, 12, 7];
    &[
        ("round-trip", &[PLAIN, READABLE, POP, COMPLETE, PUBLISH, ARM, POP]),
        ("chain", &[PLAIN, CHAIN, READABLE, POP, COMPLETE_SECOND, COMPLETE, PUBLISH, ARM]),
        (
            "odd-size-wraps",
            &[ODD, CHAIN, POP, SETTLE, CHAIN, EVENT, POP, SETTLE, CHAIN, POP, SETTLE, ARM, CHAIN, POP],
        ),
        ("in-order", &[ORDERED, CHAIN, READABLE, POP, COMPLETE_SECOND, PUBLISH, COMPLETE, PUBLISH]),
        ("indirect", &[INDIRECTS, TABLE, TABLE_NEXT, INDIRECT, POP, COMPLETE, PUBLISH]),
        ("indirect-not-negotiated", &[PLAIN, TABLE, TABLE_NEXT, INDIRECT, POP, POP]),
        ("readable-after-writable", &[PLAIN, WRONG_WAY, POP]),
        ("zero-length", &[PLAIN, EMPTY, POP]),
        ("address-wraps", &[PLAIN, WRAPS, POP]),
        ("identifier-outside", &[PLAIN, OUTSIDE, POP]),
        ("identifier-twice", &[PLAIN, READABLE, READABLE, POP]),
        ("overrun", &[&[0, 0, 7], ALONE, POP, ALONE, POP]),
        ("complete-unknown", &[PLAIN, READABLE, POP, COMPLETE_UNKNOWN, PUBLISH]),
    ]
};

/// Steps of `packed_driver`.
///
/// After size (as a power of two), feature bits, and length of the indirect tables.
mod packed_driver {
    pub(super) use super::driver::{ADD, ADD_CHAIN, DISABLE, ENABLE, POLL, POP, PUBLISH};
    pub(super) const HONEST: &[u8] = &[2, 16, 0, 0, 0];
    pub(super) const TOO_LONG: &[u8] = &[2, 255, 255, 255, 255];
    pub(super) const USE_0: &[u8] = &[0, 0, 0, 1, 0, 0, 0];
    pub(super) const USE_OUTSIDE: &[u8] = &[0, 1, 0, 1, 1, 0, 0, 0];
    pub(super) const TAKE: &[u8] = &[12, 5];
    pub(super) const FLAGS: &[u8] = &[0, 3, 0, 128, 128];
}

const PACKED_DRIVER: &[Seed] = {
    use packed_driver::*;
    const PLAIN: &[u8] = &[3, 0, 0];
    const INDIRECTS: &[u8] = &[3, 1, 4];
    const EVENTS: &[u8] = &[3, 2, 0];
    const ORDERED: &[u8] = &[3, 12, 0];
    &[
        ("round-trip", &[PLAIN, DISABLE, ADD, PUBLISH, HONEST, POP, POP, ENABLE, POLL]),
        ("event-index", &[EVENTS, ENABLE, POLL, ADD, PUBLISH, HONEST, POLL, POP, POLL]),
        (
            "chain",
            &[PLAIN, ADD_CHAIN, ADD_CHAIN, PUBLISH, HONEST, HONEST, TAKE, ADD_CHAIN, PUBLISH, HONEST, POP],
        ),
        ("indirect", &[INDIRECTS, ADD_CHAIN, ADD, PUBLISH, HONEST, HONEST, POP, POP]),
        ("in-order", &[ORDERED, ADD_CHAIN, ADD, PUBLISH, HONEST, HONEST, TAKE, POP]),
        ("full", &[PLAIN, ADD_CHAIN, ADD_CHAIN, ADD_CHAIN, PUBLISH, HONEST, POP, ADD_CHAIN]),
        ("length-clamped", &[PLAIN, ADD_CHAIN, PUBLISH, TOO_LONG, POP]),
        ("used-before-published", &[PLAIN, ADD, USE_0, POP, PUBLISH, ADD]),
        ("used-twice", &[PLAIN, ADD, ADD, PUBLISH, USE_0, USE_0, POP, POP, POP]),
        ("used-outside", &[PLAIN, ADD, PUBLISH, USE_OUTSIDE, POP, ADD]),
        ("flags-alone", &[PLAIN, ADD, PUBLISH, FLAGS, POLL, TAKE, POP]),
    ]
};

/// Steps of `mmio`.
///
/// After one byte: NOTIFICATION_DATA, no RING_RESET, slow owner, number of queues.
mod registers {
    pub(super) const NEGOTIATE: &[u8] = &[9, 2];
    pub(super) const NEGOTIATE_LITTLE: &[u8] = &[9, 1];
    pub(super) const NEGOTIATE_TOO_MUCH: &[u8] = &[9, 0, 255, 255, 255, 255, 255, 255, 255, 255];
    pub(super) const QUEUE_0: &[u8] = &[10, 0, 8, 1];
    pub(super) const QUEUE_0_TOO_LARGE: &[u8] = &[10, 0, 9, 1];
    pub(super) const QUEUE_1: &[u8] = &[10, 1, 3, 2];
    pub(super) const DRIVER_OK: &[u8] = &[12, 2];
    pub(super) const FAILED: &[u8] = &[12, 5];
    pub(super) const NOTIFY_0: &[u8] = &[14, 2, 0];
    pub(super) const NOTIFY_9: &[u8] = &[14, 2, 9];
    pub(super) const STOP_0: &[u8] = &[11, 0, 0, 0];
    pub(super) const START_0: &[u8] = &[11, 0, 0, 1];
    pub(super) const RESET_0: &[u8] = &[11, 0, 1, 1];
    pub(super) const QUEUE_SIZE: &[u8] = &[0, 0x38 / 4, 2];
    pub(super) const DESC_LOW: &[u8] = &[0, 0x80 / 4, 16];
    pub(super) const FEATURES: &[u8] = &[0, 0x20 / 4, 0];
    pub(super) const RESET: &[u8] = &[14, 1];
    pub(super) const NEEDS_RESET: &[u8] = &[14, 0];
    pub(super) const CONFIG_CHANGED: &[u8] = &[13];
    pub(super) const RESET_DONE: &[u8] = &[15, 0];
    pub(super) const QUEUE_0_DONE: &[u8] = &[15, 1];
    /// Writes 8 bytes to the configuration space, 1 to Status, 4 across the end.
    ///
    /// The end is that of the window.
    pub(super) const WRITE_CONFIG: &[u8] = &[6, 1, 0, 1, 8, 1, 2, 3, 4, 5, 6, 7, 8];
    pub(super) const WRITE_NARROW: &[u8] = &[6, 0, 0x70, 1, 0, 0, 0, 0, 0, 0, 0, 0];
    pub(super) const READ_ACROSS: &[u8] = &[8, 1, 0xfe, 0x0f, 4];
}

const MMIO: &[Seed] = {
    use registers::*;
    const PROMPT: &[u8] = &[0x60];
    const SLOW: &[u8] = &[0x64];
    &[
        ("start", &[PROMPT, NEGOTIATE, QUEUE_0, QUEUE_1, DRIVER_OK, NOTIFY_0]),
        ("start-late", &[PROMPT, NEGOTIATE, DRIVER_OK, QUEUE_0, NOTIFY_0]),
        ("features-refused", &[PROMPT, NEGOTIATE_TOO_MUCH, DRIVER_OK, NEGOTIATE_LITTLE, DRIVER_OK]),
        ("frozen", &[PROMPT, NEGOTIATE, QUEUE_0, DRIVER_OK, QUEUE_SIZE, DESC_LOW, FEATURES]),
        ("size-too-large", &[PROMPT, NEGOTIATE, QUEUE_0_TOO_LARGE, DRIVER_OK, NOTIFY_0]),
        ("notify-nobody", &[PROMPT, NEGOTIATE, QUEUE_0, NOTIFY_0, DRIVER_OK, NOTIFY_9]),
        (
            "queue-stop",
            &[SLOW, NEGOTIATE, QUEUE_0, DRIVER_OK, STOP_0, START_0, QUEUE_0_DONE, QUEUE_SIZE, START_0],
        ),
        (
            "queue-reset",
            &[SLOW, NEGOTIATE, QUEUE_0, DRIVER_OK, RESET_0, NOTIFY_0, QUEUE_0_DONE, START_0, QUEUE_0],
        ),
        ("no-ring-reset", &[&[0x62], NEGOTIATE, QUEUE_0, DRIVER_OK, RESET_0, NOTIFY_0]),
        ("notification-data", &[&[0x61], NEGOTIATE, QUEUE_0, DRIVER_OK, &[14, 2, 0xff, 0, 0, 7, 0]]),
        (
            "reset",
            &[
                SLOW, NEGOTIATE, QUEUE_0, DRIVER_OK, RESET, NEGOTIATE, RESET_DONE, NEGOTIATE, QUEUE_0,
                DRIVER_OK,
            ],
        ),
        (
            "needs-reset",
            &[PROMPT, NEGOTIATE, QUEUE_0, DRIVER_OK, NEEDS_RESET, NOTIFY_0, QUEUE_1, RESET, NEGOTIATE],
        ),
        ("failed", &[PROMPT, NEGOTIATE, QUEUE_0, DRIVER_OK, FAILED, NOTIFY_0, STOP_0, RESET]),
        (
            "configuration",
            &[PROMPT, WRITE_CONFIG, NEGOTIATE, WRITE_CONFIG, DRIVER_OK, CONFIG_CHANGED, READ_ACROSS],
        ),
        ("narrow", &[PROMPT, NEGOTIATE, QUEUE_0, DRIVER_OK, WRITE_NARROW, NOTIFY_0]),
    ]
};

/// Steps of `mmio_msi`, after one byte: a prompt owner (0) or a slow one (1), version 3 (2).
mod messages {
    pub(super) const NEGOTIATE: &[u8] = &[9, 2];
    pub(super) const NEGOTIATE_WITHOUT: &[u8] = &[9, 0];
    pub(super) const ENABLE: &[u8] = &[0, 1];
    pub(super) const DISABLE: &[u8] = &[0, 2];
    pub(super) const CONFIGURE: &[u8] = &[0, 3];
    pub(super) const MASK: &[u8] = &[0, 4];
    pub(super) const UNMASK: &[u8] = &[0, 5];
    pub(super) const UNCONFIGURE: &[u8] = &[0, 6];
    /// APIC 1, vector 0x41.
    pub(super) const MESSAGE: &[u8] = &[3, 1, 0x41];
    pub(super) const OTHER_MESSAGE: &[u8] = &[3, 2, 0x42];
    /// An address that is not that of an APIC.
    pub(super) const STRAY_ADDRESS: &[u8] = &[2, 0, 0, 0x10, 0, 0];
    pub(super) const QUEUE_0: &[u8] = &[4, 0];
    /// It has no descriptors.
    pub(super) const QUEUE_1: &[u8] = &[4, 1];
    pub(super) const QUEUE_2: &[u8] = &[4, 2];
    pub(super) const CONFIGURATION: &[u8] = &[4, 4];
    pub(super) const RAISE_0: &[u8] = &[6, 0];
    pub(super) const RAISE_2: &[u8] = &[6, 2];
    pub(super) const RAISE_CONFIGURATION: &[u8] = &[6, 3];
    pub(super) const READY: &[u8] = &[10, 1];
    pub(super) const STOP: &[u8] = &[10, 0];
    pub(super) const RESET_QUEUE: &[u8] = &[11];
    pub(super) const DRIVER_OK: &[u8] = &[12, 1];
    pub(super) const FAILED: &[u8] = &[12, 2];
    pub(super) const RESET: &[u8] = &[13, 0];
    pub(super) const ACKNOWLEDGE: &[u8] = &[13, 1];
    pub(super) const DONE: &[u8] = &[13, 2];
    pub(super) const NOTIFY_0: &[u8] = &[14, 0, 0xff, 0xff, 0, 0];
    pub(super) const NOTIFY_BESIDE: &[u8] = &[14, 6, 0, 0, 0, 0];
}

const MMIO_MSI: &[Seed] = {
    use messages::*;
    const PROMPT: &[u8] = &[0];
    const SLOW: &[u8] = &[1];
    const PROMPT_3: &[u8] = &[2];
    const SLOW_3: &[u8] = &[3];
    &[
        (
            "version-3",
            &[
                PROMPT_3, NEGOTIATE, ENABLE, MESSAGE, READY, DRIVER_OK, RAISE_0, RESET, NOTIFY_0, MASK,
                RAISE_0, STOP, RESET, NEGOTIATE, DONE, NEGOTIATE, ENABLE, MESSAGE, READY, DRIVER_OK,
                NOTIFY_0,
            ],
        ),
        (
            "version-3-acknowledge",
            &[PROMPT_3, NEGOTIATE_WITHOUT, READY, DRIVER_OK, RAISE_0, RESET, ACKNOWLEDGE, RAISE_0, DONE],
        ),
        (
            "version-3-queue-reset",
            &[
                SLOW_3,
                NEGOTIATE,
                ENABLE,
                MESSAGE,
                READY,
                DRIVER_OK,
                RESET_QUEUE,
                RESET,
                RESET_QUEUE,
                DONE,
                NEGOTIATE,
                READY,
            ],
        ),
        (
            "start",
            &[
                PROMPT,
                NEGOTIATE,
                ENABLE,
                QUEUE_0,
                MESSAGE,
                READY,
                CONFIGURATION,
                OTHER_MESSAGE,
                DRIVER_OK,
                NOTIFY_0,
                RAISE_0,
                RAISE_CONFIGURATION,
            ],
        ),
        (
            "plain",
            &[PROMPT, NEGOTIATE_WITHOUT, ENABLE, QUEUE_0, READY, DRIVER_OK, MESSAGE, RAISE_0, NOTIFY_0],
        ),
        ("mask", &[PROMPT, NEGOTIATE, ENABLE, MESSAGE, MASK, RAISE_0, RAISE_0, UNMASK, RAISE_0]),
        ("change-masked", &[PROMPT, NEGOTIATE, ENABLE, MESSAGE, MASK, RAISE_0, OTHER_MESSAGE, UNMASK]),
        ("change", &[PROMPT, NEGOTIATE, ENABLE, MESSAGE, RAISE_0, OTHER_MESSAGE, RAISE_0]),
        ("refused", &[PROMPT, NEGOTIATE, ENABLE, MESSAGE, STRAY_ADDRESS, CONFIGURE, RAISE_0, MASK]),
        ("no-source", &[PROMPT, NEGOTIATE, ENABLE, QUEUE_1, MESSAGE, MASK, UNCONFIGURE]),
        ("not-on", &[PROMPT, NEGOTIATE, MESSAGE, MASK, UNMASK, RAISE_0, ENABLE, RAISE_0]),
        ("fall-back", &[PROMPT, NEGOTIATE, ENABLE, MESSAGE, DISABLE, READY, DRIVER_OK, RAISE_0, DISABLE]),
        ("unconfigure", &[PROMPT, NEGOTIATE, ENABLE, MESSAGE, MASK, RAISE_0, UNCONFIGURE, MESSAGE, RAISE_0]),
        (
            "queue-reset",
            &[
                SLOW,
                NEGOTIATE,
                ENABLE,
                QUEUE_2,
                MESSAGE,
                READY,
                DRIVER_OK,
                RESET_QUEUE,
                RAISE_2,
                DONE,
                RAISE_2,
                MESSAGE,
                READY,
            ],
        ),
        (
            "queue-stop",
            &[SLOW, NEGOTIATE, ENABLE, QUEUE_2, MESSAGE, READY, DRIVER_OK, STOP, RESET_QUEUE, DONE, RAISE_2],
        ),
        ("reset", &[SLOW, NEGOTIATE, ENABLE, MESSAGE, MASK, RAISE_0, RESET, MASK, DONE, NEGOTIATE, ENABLE]),
        ("failed", &[PROMPT, NEGOTIATE, ENABLE, MESSAGE, READY, DRIVER_OK, FAILED, MASK, NOTIFY_0, RESET]),
        ("notify-beside", &[PROMPT, NEGOTIATE, READY, DRIVER_OK, NOTIFY_BESIDE, NOTIFY_0]),
    ]
};

/// Steps of `pci`.
///
/// After one byte: number of queues (upper half), a slow owner (4), no RING_RESET (2),
/// NOTIFICATION_DATA (1).
mod function {
    pub(super) const NEGOTIATE: &[u8] = &[7, 2];
    pub(super) const NEGOTIATE_LITTLE: &[u8] = &[7, 1];
    /// Queue 0, of 64; queue 1, of 8.
    pub(super) const ENABLE_0: &[u8] = &[8, 0, 6];
    pub(super) const ENABLE_1: &[u8] = &[8, 1, 3];
    pub(super) const RESET_0: &[u8] = &[9, 0];
    pub(super) const DRIVER_OK: &[u8] = &[10, 3];
    pub(super) const FAILED: &[u8] = &[10, 5];
    pub(super) const KICK_0: &[u8] = &[11, 0, 0, 0, 0, 0];
    pub(super) const NEEDS_RESET: &[u8] = &[12, 0];
    pub(super) const CONFIG_CHANGED: &[u8] = &[12, 1];
    pub(super) const RESET: &[u8] = &[12, 2];
    pub(super) const RESET_DONE: &[u8] = &[13, 0];
    pub(super) const QUEUE_0_DONE: &[u8] = &[13, 1];
    /// Vectors of queues 0 and 1 and of the configuration change.
    ///
    /// Queue 0 and the configuration change by vector 0; queue 1 by vector 1, the configuration
    /// change by 0.
    pub(super) const MAP_0: &[u8] = &[14, 0, 0];
    pub(super) const MAP_1: &[u8] = &[14, 1, 1];
    pub(super) const UNMAP_0: &[u8] = &[14, 0, 7];
    /// Vector 0: a message, open; masked; opened again; no interrupt at all.
    pub(super) const MESSAGE_0: &[u8] = &[15, 0, 0x86];
    pub(super) const MASK_0: &[u8] = &[15, 0, 1];
    pub(super) const UNMASK_0: &[u8] = &[15, 0, 0];
    pub(super) const STRAY_0: &[u8] = &[15, 0, 0x84];
    pub(super) const MESSAGE_1: &[u8] = &[15, 1, 0x8e];
    /// Message control and command register: enable, function mask, bus master, memory.
    pub(super) const ON: &[u8] = &[17, 0b1110];
    pub(super) const HELD: &[u8] = &[17, 0b1111];
    pub(super) const NO_MASTER: &[u8] = &[17, 0b0010];
    pub(super) const OFF: &[u8] = &[17, 0b0100];
    pub(super) const RAISE_0: &[u8] = &[18, 0];
    pub(super) const RAISE_1: &[u8] = &[18, 1];
    /// The window on the status (offset 0x14, one byte): writes 15 there.
    pub(super) const WINDOW_STATUS: &[u8] = &[19, 0x14, 0, 1, 15];
    pub(super) const WINDOW_WRONG: &[u8] = &[19, 0x15, 0, 2, 15];
    /// The size of the selected queue, after it was enabled.
    pub(super) const RESIZE: &[u8] = &[5, 4, 16];
    /// The BAR's lower half, all ones.
    pub(super) const SIZE_BAR: &[u8] = &[3, 0x10, 0, 2, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff];
}

const PCI: &[Seed] = {
    use function::*;
    const PROMPT: &[u8] = &[0x60];
    const SLOW: &[u8] = &[0x64];
    &[
        (
            "start",
            &[
                PROMPT,
                ON,
                MESSAGE_0,
                MESSAGE_1,
                NEGOTIATE,
                MAP_0,
                MAP_1,
                ENABLE_0,
                ENABLE_1,
                DRIVER_OK,
                KICK_0,
                RAISE_0,
                RAISE_1,
                CONFIG_CHANGED,
            ],
        ),
        ("wired", &[PROMPT, NEGOTIATE_LITTLE, ENABLE_0, DRIVER_OK, RAISE_0, CONFIG_CHANGED, RESET]),
        ("mask", &[PROMPT, ON, MESSAGE_0, MAP_0, MASK_0, RAISE_0, RAISE_0, UNMASK_0, RAISE_0]),
        ("function-mask", &[PROMPT, ON, MESSAGE_0, MESSAGE_1, MAP_0, MAP_1, HELD, RAISE_0, RAISE_1, ON]),
        ("bus-master", &[PROMPT, ON, MESSAGE_0, MAP_0, NO_MASTER, RAISE_0, ON, RAISE_0]),
        ("stray", &[PROMPT, ON, MESSAGE_0, MAP_0, STRAY_0, RAISE_0, MASK_0, RAISE_0, MESSAGE_0]),
        ("off", &[PROMPT, ON, MESSAGE_0, MAP_0, MASK_0, RAISE_0, OFF, RAISE_0, UNMASK_0, ON, RAISE_0]),
        ("unmap", &[PROMPT, ON, MESSAGE_0, MAP_0, RAISE_0, UNMAP_0, RAISE_0]),
        ("freeze", &[PROMPT, NEGOTIATE, ENABLE_0, RESIZE, DRIVER_OK, RESIZE, KICK_0]),
        (
            "queue-reset",
            &[
                SLOW,
                NEGOTIATE,
                ENABLE_0,
                DRIVER_OK,
                RESET_0,
                KICK_0,
                ENABLE_0,
                QUEUE_0_DONE,
                ENABLE_0,
                KICK_0,
            ],
        ),
        (
            "reset",
            &[
                SLOW, ON, MESSAGE_0, MAP_0, MASK_0, NEGOTIATE, ENABLE_0, DRIVER_OK, RAISE_0, RESET, ENABLE_1,
                RESET_DONE, UNMASK_0, NEGOTIATE,
            ],
        ),
        (
            "needs-reset",
            &[
                PROMPT,
                ON,
                MESSAGE_0,
                MAP_0,
                NEGOTIATE,
                ENABLE_0,
                DRIVER_OK,
                NEEDS_RESET,
                KICK_0,
                ENABLE_1,
                RESET,
            ],
        ),
        ("failed", &[PROMPT, NEGOTIATE, ENABLE_0, DRIVER_OK, FAILED, KICK_0, RESET_0, RESET]),
        ("window", &[PROMPT, NEGOTIATE, ENABLE_0, WINDOW_STATUS, WINDOW_WRONG, KICK_0]),
        ("bar", &[PROMPT, ON, SIZE_BAR, OFF, SIZE_BAR, ON]),
    ]
};

/// Steps of `blk_request`.
///
/// After read-only (0) or not, size (as a power of two), and features (1: all).
mod requests {
    /// Kind, sector, number of pieces, then each piece: length and place.
    pub(super) const READ: &[u8] = &[0, 0, 2, 1, 0, 2, 0, 0x80];
    pub(super) const READ_IN_THREE: &[u8] = &[0, 0, 0, 3, 0, 1, 0, 0x80, 2, 1, 0, 0x90, 3, 0xf0, 1, 0, 0xa0];
    pub(super) const READ_BEYOND: &[u8] = &[0, 0, 31, 1, 0, 2, 0, 0x80];
    pub(super) const READ_ODD: &[u8] = &[0, 0, 0, 1, 3, 7, 0, 0, 0x80];
    pub(super) const READ_FAR: &[u8] =
        &[0, 0, 0xff, 255, 255, 255, 255, 255, 255, 255, 255, 1, 0, 2, 0, 0x80];
    pub(super) const WRITE: &[u8] = &[0, 1, 4, 1, 0, 2, 0, 0x80];
    /// The first sector beyond the image; the last sector and the one after it.
    pub(super) const WRITE_BEYOND: &[u8] = &[0, 1, 32, 1, 0, 1, 0, 0x80];
    pub(super) const WRITE_ACROSS: &[u8] = &[0, 1, 31, 1, 0, 2, 0, 0x80];
    pub(super) const FLUSH: &[u8] = &[0, 2, 0, 0];
    pub(super) const GET_ID: &[u8] = &[0, 3, 0, 1, 2, 2, 0, 0x80];
    pub(super) const GET_ID_SHORT: &[u8] = &[0, 3, 0, 1, 2, 1, 0, 0x80];
    pub(super) const DISCARD: &[u8] = &[0, 4, 8, 1, 2, 1, 0, 0x80, 8, 0];
    pub(super) const ZEROES: &[u8] = &[0, 5, 8, 2, 2, 1, 0, 0x80, 8, 0, 2, 1, 0, 0x90, 2, 0];
    pub(super) const ZEROES_BEYOND: &[u8] = &[0, 5, 30, 1, 2, 1, 0, 0x80, 39, 0];
    pub(super) const UNKNOWN: &[u8] = &[0, 6, 0, 0];
    /// A read into the ring itself.
    pub(super) const READ_OVER_RING: &[u8] = &[0, 0, 0, 1, 0, 1, 0, 0];
    pub(super) const SERVE: &[u8] = &[11];
    pub(super) const SETTLE: &[u8] = &[14];
    /// Descriptor 0 becomes one writable byte: a request without a header.
    pub(super) const NO_HEADER: &[u8] = &[8, 0, 0, 0, 0, 64, 0, 1, 2, 0];
    pub(super) const NO_STATUS: &[u8] = &[8, 0, 0, 0, 0, 64, 0, 16, 0, 0];
}

const BLK_REQUEST: &[Seed] = {
    use requests::*;
    const DISK: &[u8] = &[1, 4, 1];
    const READ_ONLY: &[u8] = &[0, 4, 1];
    const NO_FEATURES: &[u8] = &[1, 4, 0, 255, 255, 255, 255, 255, 255, 255, 255];
    &[
        ("read", &[DISK, READ, SETTLE]),
        ("read-in-pieces", &[DISK, READ_IN_THREE, SERVE, READ, SETTLE]),
        ("read-beyond-the-end", &[DISK, READ_BEYOND, READ_FAR, SETTLE]),
        ("read-odd-length", &[DISK, READ_ODD, SETTLE]),
        ("read-over-the-ring", &[DISK, READ_OVER_RING, SETTLE, READ, SETTLE]),
        ("write-and-flush", &[DISK, WRITE, FLUSH, SETTLE, READ, SETTLE]),
        ("write-beyond-the-end", &[DISK, WRITE_BEYOND, WRITE_ACROSS, SETTLE]),
        ("write-through", &[NO_FEATURES, WRITE, SETTLE, ZEROES, DISCARD, SETTLE]),
        ("get-id", &[DISK, GET_ID, GET_ID_SHORT, SETTLE]),
        ("discard-and-zeroes", &[DISK, DISCARD, ZEROES, SETTLE, ZEROES_BEYOND, SETTLE]),
        ("read-only", &[READ_ONLY, WRITE, DISCARD, ZEROES, READ, SETTLE]),
        ("unknown-kind", &[DISK, UNKNOWN, SETTLE]),
        ("no-header", &[DISK, READ, NO_HEADER, SERVE, SERVE]),
        ("no-status", &[DISK, FLUSH, NO_STATUS, SERVE, SETTLE]),
        ("dropped-in-flight", &[DISK, WRITE, WRITE, SERVE]),
        ("queue-of-one", &[&[1, 0, 1], READ, SETTLE]),
    ]
};

/// Steps of `net_request`.
///
/// After features (1: all) and the sizes of the three queues (as powers of two).
mod frames {
    /// Header of zeroes, pieces less one, then each piece: length, place, flag.
    pub(super) const FRAME: &[u8] = &[0, 1, 0, 0, 60, 0, 0x10, 0];
    pub(super) const IN_THREE: &[u8] = &[0, 1, 2, 0, 7, 0, 0x10, 0, 2, 8, 0, 0x20, 0, 0, 100, 0, 0x30, 0];
    /// Shorter than its addresses; longer than any.
    pub(super) const RUNT: &[u8] = &[0, 1, 0, 0, 13, 0, 0x10, 0];
    pub(super) const GIANT: &[u8] =
        &[0, 1, 2, 3, 255, 255, 0, 0, 0, 3, 255, 255, 0, 0, 0, 3, 255, 255, 0, 0, 0];
    /// A checksum inside the frame, and one behind it; to be segmented.
    pub(super) const CHECKSUM: &[u8] = &[0, 0, 1, 0, 0, 0, 0, 0, 34, 0, 6, 0, 0, 0, 0, 0, 60, 0, 0x10, 0];
    pub(super) const LIE: &[u8] = &[0, 0, 1, 0, 0, 0, 0, 0, 34, 0, 80, 0, 0, 0, 0, 0, 60, 0, 0x10, 0];
    pub(super) const SEGMENT: &[u8] = &[0, 0, 1, 1, 54, 0, 200, 0, 34, 0, 16, 0, 0, 0, 0, 2, 16, 0, 0x10, 0];
    /// A frame with a writable piece.
    pub(super) const WRITABLE: &[u8] = &[0, 1, 1, 0, 60, 0, 0x10, 0, 0, 60, 0, 0x20, 255];
    pub(super) const BUFFER: &[u8] = &[4, 0, 2, 16, 0, 0x20, 0];
    pub(super) const SMALL: &[u8] = &[4, 0, 0, 30, 0, 0x28, 0];
    pub(super) const TINY: &[u8] = &[4, 0, 0, 11, 0, 0x29, 0];
    pub(super) const IN_PIECES: &[u8] =
        &[4, 3, 0, 5, 0, 0x30, 0, 0, 4, 0, 0x31, 0, 0, 40, 0, 0x32, 0, 0, 60, 0, 0x33, 0];
    pub(super) const READABLE: &[u8] = &[4, 0, 2, 16, 0, 0x20, 255];
    /// A buffer over the ring itself.
    pub(super) const OVER_RING: &[u8] = &[4, 0, 2, 16, 0, 0, 0];
    pub(super) const TWO_PAIRS: &[u8] = &[7, 2, 1, 4];
    pub(super) const NO_PAIRS: &[u8] = &[7, 0, 1, 4];
    pub(super) const UNKNOWN: &[u8] = &[7, 0, 0, 9, 9, 9, 9, 4];
    pub(super) const SERVE_RX: &[u8] = &[10, 0];
    pub(super) const SERVE_TX: &[u8] = &[10, 1];
    pub(super) const SETTLE: &[u8] = &[14];
    pub(super) const ARM: &[u8] = &[15];
    /// The available index of the transmit queue jumps.
    pub(super) const JUMP: &[u8] = &[8, 1, 4, 0, 0x80];
}

const NET_REQUEST: &[Seed] = {
    use frames::*;
    const CARD: &[u8] = &[1, 4, 4, 4];
    const NO_FEATURES: &[u8] = &[0, 255, 255, 255, 255, 255, 255, 255, 255, 4, 4, 4];
    const SMALL_QUEUES: &[u8] = &[1, 1, 0, 1];
    &[
        ("echo", &[CARD, BUFFER, FRAME, SETTLE, BUFFER, FRAME, SETTLE]),
        ("frame-in-pieces", &[CARD, BUFFER, IN_THREE, SERVE_TX, SERVE_RX, SETTLE]),
        ("frames-that-are-none", &[CARD, RUNT, GIANT, WRITABLE, FRAME, SETTLE]),
        ("checksums", &[CARD, BUFFER, BUFFER, CHECKSUM, LIE, SETTLE]),
        ("segmentation", &[CARD, BUFFER, SEGMENT, SETTLE]),
        ("no-features", &[NO_FEATURES, SMALL, BUFFER, FRAME, CHECKSUM, SETTLE]),
        ("merged", &[CARD, SMALL, SMALL, SMALL, FRAME, SETTLE]),
        ("merged-later", &[CARD, SMALL, FRAME, SETTLE, ARM, SMALL, SERVE_RX, SMALL, SETTLE]),
        ("buffer-in-pieces", &[CARD, IN_PIECES, IN_PIECES, IN_THREE, FRAME, SETTLE]),
        ("useless-buffers", &[CARD, TINY, READABLE, TINY, FRAME, SETTLE, BUFFER, SETTLE]),
        ("buffer-over-the-ring", &[CARD, OVER_RING, FRAME, SETTLE, BUFFER, SETTLE]),
        ("no-room-in-the-queue", &[SMALL_QUEUES, SMALL, SMALL, IN_THREE, SETTLE, BUFFER, FRAME, SETTLE]),
        ("pairs", &[CARD, TWO_PAIRS, NO_PAIRS, UNKNOWN, SETTLE, BUFFER, FRAME, SETTLE]),
        ("index-jump", &[CARD, FRAME, SETTLE, JUMP, SERVE_TX, BUFFER, SETTLE]),
    ]
};

/// Steps of `dma`.
mod domain {
    /// Device pages 0 to 3 become guest pages 2 to 5, to read and to write.
    ///
    /// The same pages of another base, around a border of two megabytes, become readable only.
    pub(super) const MAP: &[u8] = &[0, 0, 0, 3, 2, 2];
    pub(super) const MAP_READ_ONLY: &[u8] = &[0, 1, 0, 3, 2, 0];
    /// 1027 pages around the same border, of which memory lies behind the first.
    pub(super) const MAP_LARGE: &[u8] = &[0, 1, 0, 241, 0, 2];
    /// The last pages of the address space, and one too many.
    pub(super) const MAP_LAST: &[u8] = &[0, 4, 12, 3, 12, 2];
    pub(super) const MAP_BEYOND: &[u8] = &[0, 4, 12, 4, 12, 2];
    pub(super) const UNMAP: &[u8] = &[3, 0, 0, 3];
    /// A page from the middle; everything around the border.
    pub(super) const UNMAP_ONE: &[u8] = &[3, 1, 3, 0];
    pub(super) const UNMAP_LARGE: &[u8] = &[3, 1, 0, 241];
    /// Reads 100 bytes around the end of device page 0, and 10000 from there.
    ///
    /// The same by guest-physical addresses.
    pub(super) const READ: &[u8] = &[5, 1, 0, 0, 220, 100];
    pub(super) const READ_LONG: &[u8] = &[5, 1, 0, 0, 220, 160];
    pub(super) const READ_BORDER: &[u8] = &[5, 1, 1, 1, 220, 100];
    pub(super) const READ_DIRECT: &[u8] = &[5, 0, 2, 220, 100];
    /// Two writes and a fill in a batch.
    pub(super) const WRITE: &[u8] = &[7, 1, 3, 0, 0, 220, 100, 1, 0, 1, 7, 9, 2, 0, 3, 220, 160, 4];
    pub(super) const WRITE_BORDER: &[u8] = &[7, 1, 1, 1, 1, 220, 100, 1];
    /// Into memory that is read-only, and beyond.
    pub(super) const WRITE_DIRECT: &[u8] = &[7, 0, 2, 7, 220, 100, 1, 15, 220, 200, 1];
    pub(super) const HOLD: &[u8] = &[10, 1, 0, 0, 220, 100, 2];
    pub(super) const HOLD_DIRECT: &[u8] = &[10, 0, 7, 220, 100, 0];
    pub(super) const LET_GO: &[u8] = &[11, 0];
    pub(super) const WITHOUT_THE_FIRST: &[u8] = &[12, 6];
    pub(super) const ALL: &[u8] = &[12, 7];
    pub(super) const LOG: &[u8] = &[13, 0];
    pub(super) const LOG_LARGE: &[u8] = &[13, 2];
    pub(super) const LOG_OFF: &[u8] = &[13, 3];
    pub(super) const HARVEST: &[u8] = &[15];
}

const DMA: &[Seed] = {
    use domain::*;
    &[
        ("translated", &[MAP, WRITE, READ, READ_LONG, READ_DIRECT, UNMAP, READ]),
        ("permissions", &[MAP_READ_ONLY, READ_BORDER, WRITE_BORDER, WRITE_DIRECT]),
        ("a_page_cut_out", &[MAP_LARGE, READ_BORDER, UNMAP_ONE, READ_BORDER, UNMAP_LARGE]),
        ("the_last_page", &[MAP_BEYOND, MAP_LAST, MAP_LAST]),
        ("unmapped_while_held", &[MAP, HOLD, UNMAP, MAP, UNMAP, LET_GO, UNMAP]),
        ("held_apart", &[MAP, HOLD_DIRECT, HOLD, WITHOUT_THE_FIRST, READ, LET_GO, HARVEST]),
        ("logged", &[LOG, MAP, WRITE, HARVEST, WRITE, WRITE_DIRECT, HARVEST, HARVEST]),
        (
            "a_log_that_comes_and_goes",
            &[MAP, HOLD, LOG_LARGE, LET_GO, HARVEST, WRITE, LOG_OFF, WRITE, LOG, HARVEST],
        ),
        ("another_memory_map", &[MAP, WRITE, WITHOUT_THE_FIRST, WRITE, READ, LOG, ALL, WRITE, HARVEST]),
    ]
};

/// Steps of `vhost_user`. A byte of 63 selects no unlikely variant.
const VHOST_USER: &[Seed] = {
    /// A client sets up queue 1, packed and in order.
    ///
    /// Or queue 0, split, tracked in its second file.
    const PACKED: &[u8] = &[5, 1, 63, 63, 63, 63, 63, 63, 63, 63, 63];
    const SPLIT: &[u8] = &[5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 63];
    const AGREED: &[u8] = &[63; 35];
    /// The same with translations, for three messages more; one comes, and all go.
    const TRANSLATED_PACKED: &[u8] = &[5, 1, 0, 0, 0, 0, 6, 0, 0, 0xff, 63];
    const TRANSLATED_SPLIT: &[u8] = &[5, 0, 0, 0, 0, 0, 2, 0, 0, 0xff, 63];
    const MORE_AGREED: &[u8] = &[63; 44];
    const UPDATE: &[u8] = &[6, 21, 0, 1, 0, 4, 0, 3, 63, 63, 63, 63, 63];
    const INVALIDATE: &[u8] = &[6, 21, 0, 0, 0, 0, 0, 0, 63, 63, 63, 63, 63];
    /// The driver writes descriptor 0, and makes one entry available.
    ///
    /// 16 bytes of the first page; it goes on at 1.
    const DESC: &[u8] = &[2, 0, 0, 0, 15, 0, 0, 16, 0, 0, 0, 0, 0, 16, 0, 0, 0, 1, 0, 1, 0];
    const AVAIL: &[u8] = &[2, 0, 8, 2, 1, 1, 0];
    const INDEX_JUMPS: &[u8] = &[2, 0, 8, 2, 1, 0xff, 0xff];
    /// A file loses its bytes, and the export looks.
    const TRUNCATE: &[u8] = &[4, 0, 0, 0, 0, 0];
    const LOOK: &[u8] = &[4, 63];
    const ANYTHING: &[u8] =
        &[0, 32, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 63, 63, 63, 63, 63];
    /// GET_VRING_BASE, RESET_DEVICE, SET_VRING_ENABLE.
    const STOP: &[u8] = &[6, 10, 63, 0, 63, 63, 63];
    const RESET: &[u8] = &[6, 33, 63, 63, 63];
    const DISABLE: &[u8] = &[6, 17, 0, 63, 0, 63, 63, 63];
    &[
        ("set-up-packed", &[PACKED, AGREED, DESC, AVAIL, LOOK]),
        ("set-up-split", &[SPLIT, AGREED, DESC, AVAIL, LOOK, STOP, LOOK]),
        ("driver-breaks-it", &[SPLIT, AGREED, INDEX_JUMPS, LOOK, LOOK, STOP, SPLIT, AGREED]),
        ("set-up-twice", &[SPLIT, AGREED, PACKED, AGREED]),
        ("memory-goes", &[SPLIT, AGREED, DESC, TRUNCATE, AVAIL, LOOK, LOOK]),
        ("stop-and-go", &[SPLIT, AGREED, DISABLE, STOP, RESET, SPLIT, AGREED]),
        ("translated-packed", &[TRANSLATED_PACKED, MORE_AGREED, DESC, AVAIL, INVALIDATE, LOOK, UPDATE, LOOK]),
        (
            "translated-split",
            &[TRANSLATED_SPLIT, MORE_AGREED, DESC, AVAIL, LOOK, INVALIDATE, UPDATE, STOP, LOOK],
        ),
        ("anything", &[ANYTHING, ANYTHING, ANYTHING]),
        ("all-requests", &[&[15; 250]]),
        ("all-zero", &[&[0; 250]]),
        ("rising", &[AGREED, ANYTHING, SPLIT, AGREED, ANYTHING]),
    ]
};

/// Steps of `nbd_reply`: layout, bytes at a time less one, replies.
const NBD_REPLY: &[Seed] = {
    const SIMPLE: &[u8] = &[0x67, 0x44, 0x66, 0x98];
    const CHUNK: &[u8] = &[0x66, 0x8e, 0x33, 0xef];
    const EXTENDED: &[u8] = &[0x6e, 0x8a, 0x27, 0x8c];
    const DONE: &[u8] = &[0, 1];
    const MORE: &[u8] = &[0, 0];
    const NONE: &[u8] = &[0, 0];
    const DATA: &[u8] = &[0, 1];
    const HOLE: &[u8] = &[0, 2];
    const STATUS: &[u8] = &[0, 5];
    const STATUS_EXT: &[u8] = &[0, 6];
    const ERROR: &[u8] = &[0x80, 1];
    const ERROR_OFFSET: &[u8] = &[0x80, 2];
    const FIRST: &[u8] = &[0, 0, 0, 0, 0, 0, 0, 1];
    const SECOND: &[u8] = &[0, 0, 0, 0, 0, 0, 0, 2];
    const THIRD: &[u8] = &[0, 0, 0, 0, 0, 0, 0, 3];
    const FOURTH: &[u8] = &[0, 0, 0, 0, 0, 0, 0, 4];
    const UNKNOWN: &[u8] = &[0, 0, 0, 0, 0, 0, 0, 5];
    const AT_START: &[u8] = &[0, 0, 0, 0, 0, 0, 16, 0];
    const AT_MIDDLE: &[u8] = &[0, 0, 0, 0, 0, 0, 16, 32];
    const ZERO: &[u8] = &[0; 8];
    const OK: &[u8] = &[0, 0, 0, 0];
    const IO: &[u8] = &[0, 0, 0, 5];
    const HALF: &[u8] = &[7; 32];
    &[
        ("simple", &[&[0, 3], SIMPLE, OK, FIRST, HALF, HALF, SIMPLE, IO, FOURTH, SIMPLE, OK, SECOND]),
        ("simple-twice", &[&[0, 255], SIMPLE, OK, SECOND, SIMPLE, OK, SECOND]),
        ("unknown", &[&[0, 255], SIMPLE, OK, UNKNOWN]),
        ("data", &[&[1, 7], CHUNK, DONE, DATA, FIRST, &[0, 0, 0, 72], AT_START, HALF, HALF]),
        (
            "pieces-in-disorder",
            &[
                &[1, 9],
                CHUNK,
                MORE,
                DATA,
                FIRST,
                &[0, 0, 0, 40],
                AT_MIDDLE,
                HALF,
                SIMPLE,
                OK,
                SECOND,
                CHUNK,
                MORE,
                HOLE,
                FIRST,
                &[0, 0, 0, 12],
                AT_START,
                &[0, 0, 0, 32],
                CHUNK,
                DONE,
                NONE,
                FIRST,
                OK,
            ],
        ),
        ("short", &[&[1, 255], CHUNK, DONE, DATA, FIRST, &[0, 0, 0, 40], AT_MIDDLE, HALF]),
        (
            "overlap",
            &[
                &[1, 255],
                CHUNK,
                MORE,
                DATA,
                FIRST,
                &[0, 0, 0, 40],
                AT_MIDDLE,
                HALF,
                CHUNK,
                MORE,
                DATA,
                FIRST,
                &[0, 0, 0, 41],
                AT_START,
                HALF,
                &[7],
            ],
        ),
        ("error", &[&[1, 2], CHUNK, DONE, ERROR, SECOND, &[0, 0, 0, 9], IO, &[0, 3], b"bad"]),
        (
            "error-offset",
            &[&[1, 255], CHUNK, DONE, ERROR_OFFSET, FIRST, &[0, 0, 0, 14], IO, &[0, 0], AT_MIDDLE],
        ),
        (
            "status",
            &[
                &[1, 4],
                CHUNK,
                DONE,
                STATUS,
                THIRD,
                &[0, 0, 0, 20],
                &[0, 0, 0, 5],
                &[0, 0, 16, 0],
                IO,
                &[0, 0, 32, 0],
                OK,
            ],
        ),
        (
            "extended",
            &[
                &[2, 11],
                EXTENDED,
                DONE,
                DATA,
                FIRST,
                AT_START,
                &[0, 0, 0, 0, 0, 0, 0, 72],
                AT_START,
                HALF,
                HALF,
                EXTENDED,
                DONE,
                STATUS_EXT,
                THIRD,
                ZERO,
                &[0, 0, 0, 0, 0, 0, 0, 24],
                &[0, 0, 0, 5],
                &[0, 0, 0, 1],
                &[0, 0, 0, 0, 0, 0, 32, 0],
                &[0, 0, 0, 0, 0, 0, 0, 3],
                EXTENDED,
                DONE,
                NONE,
                SECOND,
                ZERO,
                ZERO,
            ],
        ),
        ("extended-elsewhere", &[&[2, 255], EXTENDED, DONE, NONE, SECOND, AT_START, ZERO]),
    ]
};

fn main() -> io::Result<()> {
    let corpora = [
        ("split_device", SPLIT_DEVICE),
        ("split_driver", SPLIT_DRIVER),
        ("packed_device", PACKED_DEVICE),
        ("packed_driver", PACKED_DRIVER),
        ("mmio", MMIO),
        ("mmio_msi", MMIO_MSI),
        ("pci", PCI),
        ("blk_request", BLK_REQUEST),
        ("net_request", NET_REQUEST),
        ("nbd_reply", NBD_REPLY),
        ("dma", DMA),
        ("vhost_user", VHOST_USER),
    ];
    for (target, seeds) in corpora {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target);
        fs::create_dir_all(&folder)?;
        for (name, pieces) in seeds {
            fs::write(folder.join(name), pieces.concat())?;
        }
    }
    Ok(())
}
